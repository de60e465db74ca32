"""Draft heads that are loaded beside the steps, on every rank, until one takes the place of the head that serves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftwing.engine.devices.base import Device
from draftwing.errors import ConfigError
from draftwing.models.heads.base import FeatureHead
from draftwing.spec.drafter import Drafter

if TYPE_CHECKING:
    from draftwing.engine.executor import Executor


class LoadedHeads:
    """Of one rank, by number. `load` and `drop` belong to one thread, which may be another than that of the steps."""

    def __init__(self, drafter: Drafter | None, device: Device, calibration: Sequence[Tensor]) -> None:
        """calibration: how often drafts were right, of the serving head; now the first guesses."""
        self._drafter, self._device, self._calibration = drafter, device, calibration
        self._guesses = [counts.clone() for counts in calibration]
        self._heads: dict[int, FeatureHead] = {}

    def load(self, number: int, folder: Path | None) -> None:
        """Loads a head for `take`, and changes nothing that is served; see `Drafter.read_head`."""
        if self._drafter is None:
            raise ConfigError("nothing is drafted, so no head can be replaced")
        head = self._drafter.read_head(folder)
        self._device.synchronize()  # the streams of the thread of the steps know nothing of this one's
        self._heads[number] = head

    def drop(self, number: int) -> None:
        """Forgets a head that will not be taken, where it is there."""
        self._heads.pop(number, None)

    @torch.inference_mode()
    def take(self, number: int) -> None:
        """Drafts with this head's values from the next step on; how often drafts were right is learnt anew. Heads that
        were loaded before it are forgotten."""
        assert self._drafter is not None
        self._drafter.take_head(self._heads[number])
        for counts, guesses in zip(self._calibration, self._guesses, strict=True):
            counts.copy_(guesses)
        for loaded in [one for one in list(self._heads) if one <= number]:
            self.drop(loaded)


def take_head(executor: Executor, number: int) -> None:
    """Does as `LoadedHeads.take`, for all ranks."""
    executor.heads.take(number)
