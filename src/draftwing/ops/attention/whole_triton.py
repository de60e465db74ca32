"""Attention to all of a picture's patches by the kernels of prompts. To them a picture is a row of a pool, and the
queries of a block are heads of one token behind all of its keys: heads that share a key head all see what it has."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
from torch import Tensor

from draftwing.ops.attention.batch import AttentionKind
from draftwing.ops.attention.triton_common import pick_tiling
from draftwing.ops.attention.triton_decode import Workspace
from draftwing.ops.attention.triton_hopper import ROWS, SIZES
from draftwing.ops.attention.triton_prefill import prefill_attention, prefill_room, prefill_rows
from draftwing.ops.attention.triton_tiles import prefill_tiles
from draftwing.ops.attention.whole import WholeAttention, whole_attention

BLOCK = ROWS  # queries: the rows of the largest tile
_PICTURES = 64  # numbers of patches whose tiles are kept


class TritonWhole:
    """Does what `whole_attention` does. What cuts a query's sums is how many keys and queries there are."""

    def __init__(self, device: torch.device) -> None:
        self._workspace = Workspace(device)
        self._places = lru_cache(_PICTURES)(self._made_places)

    def __call__(self, k: Tensor, v: Tensor, scalar: int = 0) -> WholeAttention:
        if k.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return whole_attention(k, v, scalar)
        count, heads, size = k.shape
        kind, width = AttentionKind(scalar=scalar or size), _width(k)
        kv = k.new_zeros(count, heads, 2, width)
        kv[:, :, 0, :size], kv[:, :, 1, :size] = k, v

        def attend(q: Tensor) -> Tensor:
            whole, rest = divmod(len(q), BLOCK)
            blocks = q.new_zeros(whole + (rest > 0), heads, BLOCK, width)
            blocks[:whole, ..., :size] = q[: whole * BLOCK].unflatten(0, (whole, BLOCK)).transpose(1, 2)
            if rest:
                blocks[whole, :, :rest, :size] = q[whole * BLOCK :].transpose(0, 1)
            out = q.new_empty(len(blocks), heads * BLOCK * width)
            table, row, tiles = self._places(len(blocks), count, kv.shape[1:], kv.dtype)
            prefill_attention(
                blocks.flatten(1, 2), kv, table, row, tiles, out, self._workspace, exact=False, kind=kind
            )  # fmt: skip
            found = out.view(-1, heads, BLOCK, width)[..., :size].transpose(1, 2)
            return found.reshape(-1, heads * size)[: len(q)]

        return attend

    def _made_places(
        self, blocks: int, keys: int, shape: torch.Size, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns a page table of so many keys, its row, and the tiles of so many blocks. shape, dtype: of the pool."""
        device = self._workspace.device
        kv = torch.empty(1, *shape, dtype=dtype, device=device)
        spans = [(0, block, keys - 1, 1) for block in range(blocks)]
        tiles = prefill_tiles(spans, BLOCK, prefill_rows(kv, False), prefill_room(kv, False)).to(device)
        table = torch.arange(triton.next_power_of_2(max(keys, 16)), device=device)[None]  # compiled for one pitch
        return table, torch.zeros(1, dtype=torch.int64, device=device), tiles


def _width(k: Tensor) -> int:
    """Returns elements of heads, with zeros behind theirs, that the fastest kernel takes. k: [N, heads, size]."""
    size = k.shape[2]
    return min((each for each in SIZES if each >= size and pick_tiling(k[:, :, None]).overlap_unit), default=size)
