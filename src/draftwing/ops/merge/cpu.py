"""Two drafters' trees become one in C (merge.c in ops/cpu/csrc)."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwing.config.trees import MAX_CONFIDENCE, TreeShape
from draftwing.ops.assign.spec import graded
from draftwing.ops.cpu.arguments import empty_draft
from draftwing.ops.cpu.runtime import InC
from draftwing.ops.merge.spec import MergeOps
from draftwing.ops.types import (
    Calibration,
    Draft,
)


class CpuMergeOps(InC, MergeOps):
    """Overrides all of `MergeOps`."""

    def merge(self, first: Draft, second: Draft, shape: TreeShape, calibration: Calibration) -> Draft:
        batch, nodes = first.tokens.shape[0], shape.nodes
        held = [part.contiguous() for part in (*graded(first), *graded(second)) if part is not None]
        seen, accepted = calibration
        assert seen.is_contiguous() and accepted.is_contiguous() and seen.dtype == accepted.dtype == torch.float32
        draft = empty_draft(batch, nodes)
        self.raw.merge(
            *held, batch, first.tokens.shape[1], second.tokens.shape[1], nodes, shape.depth, seen, accepted, *draft
        )
        return draft

    def raise_confidence(self, confidence: Tensor) -> Tensor:
        self.raw.raise_confidence(confidence, confidence.stride(0), confidence.shape[0], MAX_CONFIDENCE)
        return confidence
