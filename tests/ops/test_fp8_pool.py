"""Attention over a pool in float8_e4m3fn: what is written is torch's rounding, what is read is exactly that."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import TINY, Case, common, make_case
from torch import Tensor

from draftwing.kv.pool import FP8, KVPool, KVSpec
from draftwing.layers.rope import RopeConfig, rope_table

rope = pytest.importorskip("draftwing.ops.triton.rope")

GPU = torch.cuda.is_available()
pytestmark = pytest.mark.usefixtures("mended_interpreter")
SCALES = (0.5, 0.03125)
CLOSE = 5e-3


def codes(pool: Tensor) -> Tensor:
    return pool.view(torch.uint8)


def in_fp8(case: Case) -> tuple[Case, Tensor]:
    """The case with its pool in 8 bits, and what that holds: NaN where nobody may read."""
    by = torch.tensor(SCALES, device=case.kv.device)[: case.kv.shape[2], None]  # of values that are keys there is one
    stored = (case.kv.float() / by).clamp(-448, 448).to(FP8)
    return replace(case, kv=stored, scales=SCALES), stored.double() * by


def test_what_is_written(device: torch.device) -> None:
    """Every number of 16 bits is rounded as torch rounds it, by the kernel and by `KVPool.write`."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[torch.isfinite(every)][:: 1 if GPU else 5]  # the interpreter takes its time
    every = torch.cat([every, every.new_zeros(-len(every) % 128)])
    qkv = every.view(-1, 4, 32).to(device)  # 2 query heads, 1 key head, 1 value head
    qkv[0, 2, 0] = torch.nan
    count = len(qkv)
    slots = torch.arange(1, count + 1, device=device)
    cos, sin = torch.ones(count, 32, device=device).bfloat16(), torch.zeros(count, 32, device=device).bfloat16()
    by_kernel, by_torch = (KVPool([KVSpec(1, 32)], count, FP8, device, [SCALES]) for _ in range(2))
    rope.rope_and_write(qkv.clone(), cos, sin, slots, by_kernel.kv[0], scales=SCALES)
    by_torch.write(0, slots, qkv[:, 2:3], qkv[:, 3:])
    expected = (qkv[:, 2:].float().cpu() / torch.tensor(SCALES)[:, None]).clamp(-448, 448).to(FP8)
    assert torch.isnan(by_torch.kv[0][1, 0, 0, 0].float()) and torch.isnan(by_kernel.kv[0][1, 0, 0, 0].float())
    numbers = (~torch.isnan(expected.float())) & (codes(expected) & 0x7F > 0)  # to turn a zero may change its sign
    for pool in (by_kernel, by_torch):
        assert torch.equal(codes(pool.kv[0][1:, 0].cpu())[numbers], codes(expected)[numbers])


def test_turned_keys(device: torch.device) -> None:
    """The keys are those of a pool in 16 bits, rounded."""
    rng = torch.Generator().manual_seed(1)
    qkv = torch.randn(7, 10, 64, generator=rng).to(device, torch.bfloat16)
    table = rope_table(RopeConfig(), 64, 7, torch.bfloat16, device)
    slots = (torch.randperm(9, generator=rng)[:7] + 1).to(device)
    wide, narrow = KVPool([KVSpec(2, 64)], 10, torch.bfloat16, device), KVPool([KVSpec(2, 64)], 10, FP8, device)
    turned = [qkv.clone(), qkv.clone()]
    for one, pool in zip(turned, (wide, narrow), strict=True):
        rope.rope_and_write(one, table[:, 0], table[:, 1], slots, pool.kv[0])
    assert torch.equal(*turned)
    assert torch.equal(codes(narrow.kv[0].cpu()), codes(wide.kv[0].cpu().float().to(FP8)))


@pytest.mark.further(nodes=1, values=32)
@pytest.mark.parametrize("values", [0, 32])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("nodes", [1, 5])
def test_trees(nodes: int, exact: bool, values: int, device: torch.device) -> None:
    dim = 48 if values else 32
    case, held = in_fp8(make_case([37, 130, 0], nodes, device, (4, 2), dim, torch.bfloat16, values=values))
    found = case.run(exact, common.pick_tiling(case.kv) if GPU else TINY)
    expected = replace(case, kv=held).expected()
    torch.testing.assert_close(found.double(), expected, atol=CLOSE, rtol=2e-2)


def test_bits_do_not_depend_on_tree_or_batch(device: torch.device) -> None:
    case, _ = in_fp8(make_case([39, 230, 0], 5, device, (4, 1), dim=16, dtype=torch.bfloat16))
    tiling = common.pick_tiling(case.kv) if GPU else TINY
    together = case.run(True, tiling).view(3, 5, -1)
    for b, node in [(0, 4), (1, 3)]:
        alone = case.alone(b, node)
        assert torch.equal(alone.run(True, tiling)[0], together[b, node])
        for length in (1, 21):
            assert torch.equal(alone.as_chunk(length, tiling), together[b, node])


def test_clear_and_scales(device: torch.device) -> None:
    pool = KVPool([KVSpec(1, 16), KVSpec(1, 16)], 3, FP8, device, [SCALES])
    assert pool.scales == (SCALES, (1.0, 1.0))
    assert KVPool([KVSpec(1, 16)], 3, torch.bfloat16, device, [SCALES]).scales == ((1.0, 1.0),)
    key = torch.full((1, 1, 16), torch.nan, device=device)
    for layer in range(2):
        pool.write(layer, torch.tensor([2], device=device), key, key)
    assert all(torch.isnan(kv.float()).any() for kv in pool.kv)
    pool.clear(torch.tensor([2], device=device))
    assert not any(codes(kv).any() for kv in pool.kv)
