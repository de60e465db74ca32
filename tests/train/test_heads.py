"""The target as a teacher, and what fresh heads start from."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from reference.checkpoints import llama_target

from draftwing.engine.device import pick_device
from draftwing.models.loader import load_model
from draftwing.train.capture import FeatureModel, causal
from draftwing.train.heads import TargetHead, new_eagle3_head


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


def test_a_fresh_head_does_what_the_last_layer_does(tmp_path):
    """Fed with what comes before that layer, and blind to the next token, it says what the target says."""
    folder = llama_target(0, num_hidden_layers=7, rope_scaling=None).write(tmp_path / "target")
    target = load_model(folder, torch.float32, "cpu")
    ids = torch.randint(0, 64, (11,), generator=torch.Generator().manual_seed(1))
    kept = torch.arange(0, 64, 2)
    head = new_eagle3_head(target, kept, taps=(1, 3, 6), seed=2)
    taps, final = FeatureModel(target, head.taps, pick_device("cpu"))(ids)
    head.set_max_positions(32)
    with torch.no_grad():
        assert head.fusion.qkv.weight[:, : head.width].any()
        head.fusion.qkv.weight[:, : head.width].zero_()  # what reads the next token
        hidden = head.run(ids, torch.arange(11), head.features(taps), 0, causal(1, 11))
        torch.testing.assert_close(head.logits(hidden), TargetHead(target)(final)[:, kept], rtol=1e-4, atol=1e-5)
    plain = new_eagle3_head(target, kept, taps=(1, 3, 6), seed=2, copy_layer=False)
    assert not torch.equal(plain.fusion.o.weight, head.fusion.o.weight)


def test_other_shapes_stay_random(tmp_path):
    target = load_model(llama_target(0, num_hidden_layers=7).write(tmp_path / "target"), torch.float32, "cpu")
    head = new_eagle3_head(target, None, ffn_size=32, seed=2)
    plain = new_eagle3_head(target, None, ffn_size=32, seed=2, copy_layer=False)
    assert torch.equal(head.fusion.down.weight, plain.fusion.down.weight)
    assert not torch.equal(head.fusion.o.weight, plain.fusion.o.weight)
