"""Picks of an indexer in C: ops/cpu/csrc/indexer.c, which says in what order it sums."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from draftwing.ops.attention.batch import Batch
from draftwing.ops.cpu.workers import Workers
from draftwing.ops.indexer.spec import Picks, most_seen

_BLOCK = 256  # scores that lie together: whole ones of each query
_ROOM = 1 << 20  # scores that are kept at once, unless one query has more


@functools.cache
def _constants(size: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.arange(size), torch.zeros(size, 1, 1, dtype=torch.int64), torch.ones(size, 1, dtype=torch.int64)


def rows_of_one(count: int) -> tuple[Tensor, ...]:
    """Returns rows, paths and their lengths of so many queries that are rows of their own: views of what is kept, for
    what is recorded makes no such tensors again."""
    return tuple(one[:count] for one in _constants(1 << count.bit_length()))


def pick(
    raw: Any,
    scratch: Callable[[int, int], Tensor],
    workers: Workers,
    batch: Batch,
    who: tuple[Any, ...],
    kept: Tensor,
    q: Tensor,
    weights: Tensor,
    topk: int,
) -> Picks:
    """Computes what `ops.indexer.spec.picks` gives, at once. scratch(size, rows): so many bytes; who: as the kernels of
    attention are told who attends to what."""
    queries, heads, size = q.shape
    assert q.is_contiguous() and weights.is_contiguous() and weights.dtype == torch.float32
    assert weights.shape == (queries, heads) and kept.shape[1] == size and kept.is_contiguous()
    table, last = torch.empty(queries, topk, dtype=torch.int64), torch.empty(queries, dtype=torch.int64)
    each = -(-most_seen(batch) // _BLOCK) * _BLOCK
    room = each * min(queries, max(_ROOM // each, 1))
    more = raw.pick_scratch(heads, size, workers.most, queries)
    raw.pick(
        table, last, q, weights, kept, queries, heads, size, topk, q.dtype == torch.bfloat16,
        kept.dtype == torch.bfloat16, scratch(more + 4 * room, queries), room, workers.address, *who,
    )  # fmt: skip
    return Picks(slice(0, queries), table, last)
