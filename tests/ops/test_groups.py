"""Packed groups: what was joined is what its parts were, whatever the sizes of their groups."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from draftwing.ops.groups import cut, join, pack, unpacked, unsupported_reason
from draftwing.ops.types import QuantizedRows

COLUMNS = 320  # of which the last group of 128, 192 or 96 columns has fewer
WIDTHS = (32, 64, 96, 128, 192, COLUMNS)


def rows_of(bits: int, wide: int, seed: int, zeros: bool = False) -> QuantizedRows:
    """16 random rows of integers."""
    made, most = torch.Generator().manual_seed(seed), 2 ** (bits - 1)
    codes = torch.randint(-most, most, (16, COLUMNS), generator=made).to(torch.int8)
    scales = (torch.rand(16, -(-COLUMNS // wide), generator=made) / 16 + 0.01).bfloat16()
    zero = torch.randint(-8, 8, scales.shape, generator=made).to(torch.int16) if zeros else None
    return QuantizedRows(codes, bits, scales, zero, 1, wide, None)


@pytest.mark.parametrize(("bits", "zeros"), [(4, False), (4, True), (8, False)])
def test_groups_of_two_sizes_are_joined(bits: int, zeros: bool) -> None:
    """zeros: of the second part alone."""
    for one, other in product(WIDTHS, WIDTHS):
        parts = [rows_of(bits, one, 1), rows_of(bits, other, 2, zeros)]
        assert [unsupported_reason(part, torch.bfloat16) for part in parts] == [None, None]
        packed = [pack(part, torch.bfloat16, "cpu") for part in parts]
        for at in ((0, 1), (1, 0)):
            whole = join([packed[i] for i in at])
            assert whole is not None
            right = torch.cat([parts[i].dense(torch.bfloat16) for i in at])
            assert torch.equal(unpacked(whole), right), (one, other)


@pytest.mark.parametrize(("bits", "zeros"), [(4, True), (8, False)])
@pytest.mark.parametrize("wide", WIDTHS)
def test_a_part_is_what_it_was_in_the_whole(bits: int, zeros: bool, wide: int) -> None:
    """But where a tile or a group would be cut."""
    rows = [rows_of(bits, wide, seed, zeros) for seed in (1, 2, 3)]
    whole = join([pack(part, torch.bfloat16, "cpu") for part in rows])
    assert whole is not None
    for down in (range(48), range(16, 32)):
        for across in (range(COLUMNS), range(128), range(128, COLUMNS), range(192, 256)):
            part = cut(whole, down, across)
            group = 128 if wide == 128 else 64 if wide in (64, 192) else 32
            if wide < COLUMNS and (across.start % group or (across.stop % group and across.stop < COLUMNS)):
                assert part is None
                continue
            assert part is not None and (part.rows, part.columns) == (len(down), len(across))
            right = unpacked(whole)[down.start : down.stop, across.start : across.stop]
            assert torch.equal(unpacked(part), right), (down, across)
    assert cut(whole, range(8, 24), range(COLUMNS)) is None and cut(whole, range(16), range(32, 96)) is None
    other = whole._replace(order=torch.arange(COLUMNS - 1, -1, -1))
    assert cut(other, range(16), range(128)) is None and cut(other, range(16), range(COLUMNS)) is not None
