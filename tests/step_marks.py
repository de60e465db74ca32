"""Marks of nodes, for results that a test makes up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from draftwing.core import MARK_VERIFIED, IntArray


def marks_of(depth: Sequence[Sequence[int]]) -> IntArray:
    """The marks of verified nodes of these depths [B, nodes], 0 for those that were not proposed."""
    levels = np.asarray(depth, np.int64)
    return levels + (levels > 0) * MARK_VERIFIED
