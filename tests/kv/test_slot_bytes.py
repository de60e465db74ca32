"""Bytes of slots go out and come back to other slots, whatever tensors have them."""

from __future__ import annotations

import math

import pytest
import torch

from draftwing.kv.slot_bytes import SlotBytes

KINDS = [
    (torch.bfloat16, (3, 2, 64)), (torch.int8, (2, 2, 20)), (torch.float8_e4m3fn, (1, 1, 9)), (torch.float32, (5,)),
    (torch.bfloat16, (0,)), (torch.bfloat16, (7,)),
]  # fmt: skip


def made(seed: int, slots: int = 40) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for kind, shape in KINDS:
        count = math.prod(shape) * kind.itemsize
        numbers = torch.randint(0, 256, (slots * count,), generator=generator, dtype=torch.uint8)
        found.append(numbers.view(kind).view(slots, *shape))
    return found


@pytest.mark.parametrize("count", [1, 8, 13])
def test_slots_come_back(count: int) -> None:
    one, other, before = made(0), made(1), made(1)
    source, target = torch.randperm(40)[:count], torch.randperm(40)[:count]
    data = SlotBytes(one).read(source)
    assert len(data) == count * SlotBytes(one).each
    for first in {0, count // 2}:
        SlotBytes(other).write(target[first:], memoryview(bytearray(data)), first)
        for a, b, c in zip(one, other, before, strict=True):
            if a.numel():
                c.view(torch.uint8)[target[first:]] = a.view(torch.uint8)[source[first:]]
                assert torch.equal(b.view(torch.uint8), c.view(torch.uint8))


@pytest.mark.parametrize("groups", [1, 3])
def test_groups_come_back(groups: int) -> None:
    one, other, before = made(0), made(1), made(1)
    source, target = torch.randperm(40)[: groups * 8], torch.randperm(40)[: groups * 8]
    rows = SlotBytes(one).gather(source, groups)
    for group, part in zip(rows, source.split(8), strict=True):
        assert bytes(group.numpy()) == bytes(SlotBytes(one).read(part))
    SlotBytes(other).scatter(target, rows)
    for a, b, c in zip(one, other, before, strict=True):
        if a.numel():
            c.view(torch.uint8)[target] = a.view(torch.uint8)[source]
            assert torch.equal(b.view(torch.uint8), c.view(torch.uint8))
