"""What the C functions are given and write: tensors of a CPU, by address."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftwing.ops.types import (
    Draft,
)


def ints(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.int64)


def empty_draft(batch: int, nodes: int) -> Draft:
    return Draft(
        ints(batch, nodes), ints(batch, nodes), torch.empty(batch, nodes, dtype=torch.bool), ints(batch, nodes)
    )


def addresses(tensors: Any) -> tuple[int, ...]:
    """Returns the addresses of contiguous tensors, which must be held for as long as these are used."""
    return tuple(part.data_ptr() for part in tensors)


def with_rows(x: Tensor) -> Tensor:
    """x [M, size] with adjacent columns; rows may be apart."""
    return x if x.stride(1) == 1 else x.contiguous()
