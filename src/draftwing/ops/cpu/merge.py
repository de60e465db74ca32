"""What makes one draft of two drafters' in C (ops/cpu/csrc/merge.c): the same trees as in torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftwing.core import MAX_CONFIDENCE, TreeShape
from draftwing.ops.cpu.tree import addresses, empty_draft
from draftwing.ops.drafts import graded
from draftwing.ops.reference.merge import MergeOps
from draftwing.ops.types import Calibration, Draft


class CpuMergeOps(MergeOps):
    """Overrides all of `MergeOps`."""

    raw: Any

    def merge(self, first: Draft, second: Draft, shape: TreeShape, calibration: Calibration) -> Draft:
        batch, nodes = first.tokens.shape[0], shape.nodes
        held = [part.contiguous() for part in (*graded(first), *graded(second)) if part is not None]
        seen, accepted = calibration
        assert seen.is_contiguous() and accepted.is_contiguous() and seen.dtype == accepted.dtype == torch.float32
        draft = empty_draft(batch, nodes)
        self.raw.merge(
            *addresses(held), batch, first.tokens.shape[1], second.tokens.shape[1], nodes, shape.depth,
            seen.data_ptr(), accepted.data_ptr(), *addresses(draft),
        )  # fmt: skip
        return draft

    def raise_confidence(self, confidence: Tensor) -> Tensor:
        self.raw.raise_confidence(confidence.data_ptr(), confidence.stride(0), confidence.shape[0], MAX_CONFIDENCE)
        return confidence
