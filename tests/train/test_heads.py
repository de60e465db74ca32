"""The target as a teacher; fresh heads are tested where they are trained."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from draftwing.train.heads import TargetHead


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_some_tokens_and_whether_the_best_is_among_them(dtype):
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(300, 48, generator=generator).to(dtype)
    hidden = torch.randn(400, 48, generator=generator).to(dtype)
    ids = torch.randperm(300, generator=generator)[:120].sort().values
    target = SimpleNamespace(config=SimpleNamespace(tie_embeddings=True), embed=SimpleNamespace(weight=weight))
    teach = TargetHead(target)
    exact = hidden.double() @ weight.double().t()
    torch.testing.assert_close(teach(hidden).double(), exact, rtol=1e-5, atol=1e-4)
    kept, known = teach.of(ids, hidden)
    torch.testing.assert_close(kept.double(), exact[:, ids], rtol=1e-5, atol=1e-4)
    member = torch.isin(exact.argmax(-1), ids)
    best = exact.topk(2).values
    clear = best[:, 0] - best[:, 1] > 2**-6 * best[:, 0].abs()  # more than rounding to bfloat16 can turn round
    assert clear.sum() > 300 and 0 < member[clear].sum() < clear.sum()
    assert torch.equal(known[clear], member[clear])
