"""Packed groups: what was joined is what its parts were, whatever the sizes of their groups."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from draftwing.ops.groups import join, pack, unpacked, why_not
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
        assert [why_not(part, torch.bfloat16) for part in parts] == [None, None]
        packed = [pack(part, torch.bfloat16, "cpu") for part in parts]
        for at in ((0, 1), (1, 0)):
            whole = join([packed[i] for i in at])
            assert whole is not None
            right = torch.cat([parts[i].dense(torch.bfloat16) for i in at])
            assert torch.equal(unpacked(whole), right), (one, other)
