"""What lookups read of the row table, which tests fill by hand."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Slots(NamedTuple):
    tokens: Tensor
    kv_len: Tensor
    last: Tensor
    salt: Tensor
