"""Drafts on their way to the host, for requests that asked to see them. Plans without such requests never come here."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import torch
from torch import Tensor

from draftwing.core import DraftTokens, Plan
from draftwing.engine.devices.base import Device, Download
from draftwing.ops.types import Draft


class DraftTraces:
    def __init__(self, device: Device) -> None:
        self._device = device
        self._captured: dict[Hashable, tuple[Tensor, Tensor]] = {}  # by key of a graph: tokens, parents

    def keep(self, key: Hashable, draft: Draft) -> None:
        """Takes note of where the graphs of a key leave their drafts. While it holds these two tensors no graph that
        is captured later gets their memory."""
        self._captured[key] = draft.tokens, draft.parent

    def fetch(self, plan: Plan, key: Hashable, draft: Draft | None) -> Download:
        """Starts the copy of the traced rows' tokens and parents, [T, 2 * N]; draft: None where graphs have it."""
        tokens, parent = self._captured[key] if draft is None else (draft.tokens, draft.parent)
        at = self._device.upload(plan.traced)
        return self._device.download(torch.cat((tokens[at], parent[at]), 1))


def fetched(download: Download | None) -> DraftTokens | None:
    """Returns what `fetch` has started; waits for it."""
    return None if download is None else DraftTokens(*np.split(download.wait(), 2, axis=1))
