"""The target as a teacher, and what fresh heads start from."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from decoder_configs import changed
from published import written
from reference.checkpoints import llama_target

from draftwing.engine.devices import pick_device
from draftwing.errors import ConfigError
from draftwing.layers.part_configs import NormConfig
from draftwing.models.heads.config import BlockConfig
from draftwing.models.loader import load_model
from draftwing.train.capture import Causal, FeatureModel
from draftwing.train.checkpoint import save_head
from draftwing.train.heads import TargetHead, load_mean, new_block_head, new_eagle3_head, new_eagle_head


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_some_tokens_and_whether_the_best_is_among_them(dtype):
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(300, 48, generator=generator).to(dtype)
    hidden = torch.randn(400, 48, generator=generator).to(dtype)
    ids = torch.randperm(300, generator=generator)[:120].sort().values
    target = SimpleNamespace(lm_head=SimpleNamespace(dense_weight=lambda: weight))
    teach = TargetHead(target)
    exact = hidden.double() @ weight.double().t()
    torch.testing.assert_close(teach(hidden).double(), exact, rtol=1e-5, atol=1e-4)
    kept, known, share = teach.of(ids, hidden, 0.5)
    close = 1e-5 if dtype == torch.float32 else 0.04  # the others' logits are rounded on a CPU
    torch.testing.assert_close(share.double(), (exact / 0.5).softmax(-1)[:, ids].sum(-1), rtol=0, atol=close)
    torch.testing.assert_close(kept.double(), exact[:, ids], rtol=1e-5, atol=1e-4)
    assert torch.equal(teach.of(ids, hidden)[2], torch.ones(400)), "nobody asked"
    member = torch.isin(exact.argmax(-1), ids)
    best = exact.topk(2).values
    clear = best[:, 0] - best[:, 1] > 2**-6 * best[:, 0].abs()  # more than rounding to bfloat16 can turn round
    assert clear.sum() > 300 and 0 < member[clear].sum() < clear.sum()
    assert torch.equal(known[clear], member[clear])


@pytest.mark.parametrize("row", ["gpt2", "nemotron-3-nano-30b-a3b", "mamba-codestral-7b", "mamba-2.8b-hf"])
def test_heads_of_targets_that_have_other_parts(tmp_path, row):
    """A head has attention and an MLP, whatever the target's first layer is, and no table of positions."""
    theirs = written(tmp_path, row)
    target = load_model(tmp_path, torch.float32, "cpu")
    ids = torch.arange(7)
    heads = [
        new_eagle3_head(target, None),
        new_eagle_head(target),
        new_block_head(target, BlockConfig((1, 3), 4, 63, False, (), ())),
    ]
    features = FeatureModel(target, heads[0].aux_layers, pick_device("cpu")).batch([ids])
    torch.testing.assert_close(TargetHead(target)(features[0][1]), theirs(ids[None]).logits[0], rtol=0, atol=1e-4)
    for head in heads:
        layer, hidden = head.config.layers[0], target.config.hidden_size
        assert layer.ffn >= hidden // 2 and head.config.attention.heads * head.config.attention.head_dim >= hidden
        assert head.config.matrix_weights == head.config.layer_weights + 2 * target.config.vocab_size * hidden


def test_a_fresh_head_does_what_the_last_layer_does(tmp_path):
    """Fed with what comes before that layer, and blind to the next token, it says what the target says."""
    folder = llama_target(0, num_hidden_layers=7, rope_scaling=None).write(tmp_path / "target")
    target = load_model(folder, torch.float32, "cpu")
    ids = torch.randint(0, 64, (11,), generator=torch.Generator().manual_seed(1))
    kept = torch.arange(0, 64, 2)
    head = new_eagle3_head(target, kept, aux_layers=(1, 3, 6), seed=2)
    ((aux_hidden, final),) = FeatureModel(target, head.aux_layers, pick_device("cpu")).batch([ids])
    head.set_max_positions(32)
    with torch.no_grad():
        assert head.fusion.mixer.qkv.weight[:, : head.width].any()
        head.fusion.mixer.qkv.weight[:, : head.width].zero_()  # what reads the next token
        hidden = head.run(ids, torch.arange(11), head.features(aux_hidden), 0, Causal(1, 11))
        torch.testing.assert_close(head.logits(hidden), TargetHead(target)(final)[:, kept], rtol=1e-4, atol=1e-5)


def test_other_shapes_stay_random(tmp_path):
    target = load_model(llama_target(0, num_hidden_layers=7).write(tmp_path / "target"), torch.float32, "cpu")
    head = new_eagle3_head(target, None, ffn_size=32, seed=2)
    other = new_eagle3_head(target, None, ffn_size=32, seed=3)
    assert not torch.equal(head.fusion.mlp.down.weight, other.fusion.mlp.down.weight)
    assert torch.equal(head.fusion.mixer.o.weight, other.fusion.mixer.o.weight)


def test_only_heads_that_compute_alike_have_a_mean(tmp_path):
    """Whatever the weights' shapes do not show is compared too; names and lengths in the config do not matter."""
    target = load_model(llama_target(0, num_hidden_layers=7).write(tmp_path / "target"), torch.float32, "cpu")
    kept = torch.arange(0, 64, 2)

    def saved(name, seed=1, ids=kept, aux_layers=(1, 3, 6), **changes):
        folder = save_head(new_eagle3_head(target, ids, aux_layers, seed=seed), tmp_path / name, torch.float32)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
        return folder

    first = saved("first")
    alike = [saved("seed", seed=2), saved("names", seed=3, architectures=["Other"], max_position_embeddings=99)]
    mean = load_mean([first, *alike], target, "EAGLE3")
    parts = [dict(load_mean([folder], target, "EAGLE3").named_parameters()) for folder in (first, *alike)]
    for name, parameter in mean.named_parameters():
        assert parameter.requires_grad
        torch.testing.assert_close(parameter.detach(), sum(part[name].detach() for part in parts) / 3)
    assert not torch.equal(parts[0]["fusion.mixer.qkv.weight"], parts[1]["fusion.mixer.qkv.weight"])
    for number, (changes, message) in enumerate(
        (
            ({"aux_layers": (1, 4, 6)}, r"aux_layers: \(1, 3, 6\), \(1, 4, 6\)$"),
            ({"norm_before_residual": True}, "norm_before_residual: False, True$"),
            ({"norm_output": True}, "norm_output: False, True$"),
            ({"rms_norm_eps": 0.5}, "eps: .*, 0.5$"),
            ({"rope_theta": 77.0}, "ropes: .*77.0"),
            ({"ids": kept + 1}, "the tokens that they draft$"),
            ({"ids": kept[1:]}, "draft_vocab: 32, 31; shape of lm_head.weight"),
        )
    ):
        other = saved(f"other {number}", **changes)
        with pytest.raises(ConfigError, match=f"no mean of {first} and {other}, which differ in {message}"):
            load_mean([first, alike[0], other], target, "EAGLE3")


def test_layers_of_a_head_are_plain_whatever_the_targets_are(tmp_path):
    target = load_model(llama_target(0, num_hidden_layers=7).write(tmp_path / "target"), torch.float32, "cpu")
    target.config = changed(target.config, window=4, sinks=True, scalar=3, norm=NormConfig(wide=True))
    block = BlockConfig((1, 3), 4, 63, False, (), ())
    for head in (new_eagle3_head(target, None), new_block_head(target, block, layers=2)):
        layer = head.layers[0] if hasattr(head, "layers") else head.fusion
        assert layer.mixer.kind.is_full and layer.mixer.qkv.weight.dtype == torch.float32
