"""`LayerOps.largest` against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from draftwing.ops.torch.ops import TorchOps


@pytest.mark.further(vocab=[16, 5003])
@pytest.mark.parametrize(("vocab", "count", "group"), [(16, 16, 1), (272, 16, 16), (5003, 8, 128)])
def test_the_largest_of_groups(vocab: int, count: int, group: int, ops: TorchOps) -> None:
    """Torch finds the largest of all; Triton, of each group of neighbours the largest. Of equal ones the first comes
    first there."""
    if ops.name != "triton":
        group = 1
    wide = torch.randn(3, vocab + 5, generator=torch.Generator().manual_seed(vocab)).mul_(8)
    wide[1] = wide[1].round()  # many are equal
    wide[2, 7:] = -torch.inf
    rows = [0, 1, 2] if ops.name == "triton" else [0]
    logits = wide.to(getattr(ops, "device", torch.device("cpu")))[:, :vocab]
    found, x = ops.largest(logits, count).cpu(), logits.cpu().numpy()
    for row in rows:
        best = [start + int(x[row, start : start + group].argmax()) for start in range(0, vocab, group)]
        expected = sorted(best, key=lambda i: (-x[row, i], i))[:count]
        np.testing.assert_array_equal(found[row].numpy(), expected)


@pytest.mark.parametrize("bits", [0x7FC00000, -0x400000])  # of both signs
def test_ids_are_tokens_where_logits_are_not_finite(bits: int, ops: TorchOps) -> None:
    device = getattr(ops, "device", torch.device("cpu"))
    logits = torch.full((2, 272), bits, dtype=torch.int32, device=device).view(torch.float32)
    logits[1, ::3] = 1
    found = ops.largest(logits, 16)
    assert int(found.min()) >= 0 and int(found.max()) < 272
