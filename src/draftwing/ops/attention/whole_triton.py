"""Attention to all of a picture's patches by the kernels of prompts. To them a picture is a row of a pool, and the
queries of a block are heads of one token behind all of its keys: heads that share a key head all see what it has."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
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
        kind = AttentionKind(scalar=scalar or size)
        kv = torch.stack((k, v), 2)
        more = _padding(kv)
        kv = F.pad(kv, (0, more))  # [N, heads, 2, width]

        def attend(q: Tensor) -> Tensor:
            queries, rest = len(q), -len(q) % BLOCK
            q = F.pad(q, (0, more, 0, 0, 0, rest)).unflatten(0, (-1, BLOCK)).transpose(1, 2)
            q = q.flatten(1, 2).contiguous()  # [blocks, heads * BLOCK, width]
            out = q.new_empty(len(q), heads * BLOCK * (size + more))
            table, row, tiles = self._places(len(q), count, kv.shape[1:], kv.dtype)
            prefill_attention(q, kv, table, row, tiles, out, self._workspace, exact=False, kind=kind)
            found = out.view(-1, heads, BLOCK, size + more)[..., :size].transpose(1, 2)
            return found.reshape(-1, heads * size)[:queries]

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


def _padding(kv: Tensor) -> int:
    """Returns elements to add to heads, so that the fastest kernel takes them."""
    wider = [width - kv.shape[3] for width in SIZES if width >= kv.shape[3]]
    return wider[0] if wider and pick_tiling(kv).overlap_unit else 0
