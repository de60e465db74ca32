"""`take_rows` for who has no `ops` yet."""

from __future__ import annotations

import functools

from torch import Tensor

from draftwing.ops import make_ops

_ops = functools.cache(make_ops)


def take_rows(source: Tensor, index: Tensor) -> Tensor:
    """source [R, ...], index [M] int64 -> source[index], which has no gradient. Torch starts slowly on a few rows."""
    return _ops(source.device).take_rows(source, index)
