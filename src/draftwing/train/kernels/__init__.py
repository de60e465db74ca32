"""Training's own kernels, in Triton, and what decides that a tensor goes there."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwing.ops import use_triton


def kernels_take(tensor: Tensor) -> bool:
    """Returns whether the kernels take such a tensor; else torch computes."""
    return tensor.dtype != torch.float64 and use_triton(tensor)
