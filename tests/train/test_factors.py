"""Factors that are trained beside a head: their gradients are torch's, and what is written adds to what was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from reference.checkpoints import llama_target
from reference.fit_run import KEPT, config, run
from safetensors.torch import load_file

from draftwing.errors import ConfigError
from draftwing.models.loader import load_model
from draftwing.train import fit as fit_module
from draftwing.train.factors import HeadFactors
from draftwing.train.fit import STATE_FILE
from draftwing.train.heads import new_eagle3_head


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_target(num_hidden_layers=6, vocab_size=64).write(tmp_path_factory.mktemp("target") / "model")


def test_gradients_are_those_of_factors_in_the_product(target: Path) -> None:
    """By torch's own, in float64, of a loss of the weights that is no sum over matrices."""
    head = new_eagle3_head(load_model(target, torch.float32, "cpu"), KEPT).double()
    factors = HeadFactors(head, 3, 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for up in factors.up:
            up.copy_(torch.randn(up.shape, generator=generator))
    before = {name: weight.detach().clone() for name, weight in head.named_parameters()}
    factors.write()
    trained = [weight for weight in head.parameters() if weight.requires_grad]
    assert len(trained) == 5  # fc, qkv, o, gate_up, down
    torch.stack([(weight**3).mean().sin() for weight in trained]).prod().backward()
    factors.take_gradients()
    pairs = dict(zip(factors.names, zip(factors.down, factors.up, strict=True), strict=True))
    assert len(pairs) == 8
    leaves = {name: tuple(one.detach().clone().requires_grad_() for one in pair) for name, pair in pairs.items()}

    def whole(param: str, *names: str) -> torch.Tensor:
        return before[param] + torch.cat([up @ down for down, up in (leaves[f"model.{name}"] for name in names)])

    layer = "midlayer.self_attn.", "midlayer.mlp."
    made = [
        whole("fc.weight", "fc"),
        whole("fusion.mixer.qkv.weight", *(f"{layer[0]}{name}_proj" for name in "qkv")),
        whole("fusion.mixer.o.weight", f"{layer[0]}o_proj"),
        whole("fusion.mlp.gate_up.weight", f"{layer[1]}gate_proj", f"{layer[1]}up_proj"),
        whole("fusion.mlp.down.weight", f"{layer[1]}down_proj"),
    ]
    torch.stack([(weight**3).mean().sin() for weight in made]).prod().backward()
    for name, pair in leaves.items():
        for own, expected in zip(pairs[name], pair, strict=True):
            assert expected.grad is not None and expected.grad.abs().max() > 0
            torch.testing.assert_close(own.grad, expected.grad, rtol=1e-9, atol=1e-30)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_killed_run_goes_on_as_if_it_had_not_been(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    settings = config("EAGLE3", head_rank=4, optimizer=optimizer)
    whole, report = run(target, tmp_path / "whole", settings)
    replace, calls = fit_module.replace_file, []

    def die(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise Killed
        return replace(*args)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(fit_module, "replace_file", die)
        run(target, tmp_path / "killed", settings)
    assert (tmp_path / "killed" / STATE_FILE).exists()
    head, again = run(target, tmp_path / "killed", settings)
    assert again.steps == report.steps
    for (name, one), (_, other) in zip(head.named_parameters(), whole.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    first = new_eagle3_head(load_model(target, torch.float32, "cpu"), KEPT)
    for (name, one), (_, other) in zip(first.named_parameters(), whole.named_parameters(), strict=True):
        changed = name.startswith(("fc.", "fusion.mixer.", "fusion.mlp."))
        assert torch.equal(one, other) != changed, name


def test_files_are_a_peft_adapter_that_makes_the_head(target: Path, tmp_path: Path) -> None:
    head = new_eagle3_head(load_model(target, torch.float32, "cpu"), KEPT)
    before = {name: tensor.clone() for name, tensor in head.stored_tensors()}
    factors = HeadFactors(head, 3, 5)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for up in factors.up:
            up.copy_(torch.randn(up.shape, generator=generator))
    factors.write()
    for _ in range(2):  # also in the place of what is there
        factors.save(tmp_path / "draft_head", torch.float32, "base", {})
    stored = load_file(tmp_path / "draft_head" / "adapter_model.safetensors")
    after, changed = dict(head.stored_tensors()), 0
    for name, tensor in before.items():
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        if f"{key}A.weight" in stored:
            tensor = tensor + stored[f"{key}B.weight"] @ stored[f"{key}A.weight"]
            changed += 1
        torch.testing.assert_close(after[name], tensor, rtol=1e-5, atol=1e-6)
    assert 2 * changed == len(stored) == 16


def test_factors_that_are_loaded_go_on_with_more_rank(target: Path, tmp_path: Path) -> None:
    """What they make is the same, and so it is after what is nearest to it in rank was taken."""

    def fresh() -> Any:
        return new_eagle3_head(load_model(target, torch.float32, "cpu"), KEPT)

    first = fresh()
    factors, generator = HeadFactors(first, 3, 5), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for up in factors.up:
            up.copy_(torch.randn(up.shape, generator=generator))
    factors.write()
    factors.save(tmp_path / "draft_head", torch.float32, "base", {})
    expected = dict(first.named_parameters())
    head = fresh()
    more = HeadFactors(head, 5, 9)
    more.load(tmp_path / "draft_head")
    for _ in range(2):
        for name, weight in head.named_parameters():
            torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-5, msg=name)
        more.fit()
    with pytest.raises(ConfigError, match="rank 3: expected at most 2"):
        HeadFactors(fresh(), 2, 0).load(tmp_path / "draft_head")


def test_what_is_nearest_in_rank_is_what_singular_values_say(target: Path) -> None:
    head = new_eagle3_head(load_model(target, torch.float32, "cpu"), KEPT)
    before = {name: weight.detach().clone() for name, weight in head.named_parameters()}
    factors, generator = HeadFactors(head, 3, 5), torch.Generator().manual_seed(0)
    made = {}
    with torch.no_grad():  # two changes of that rank, the second one smaller
        for name, weight in head.named_parameters():
            if name in ("fc.weight", "fusion.mixer.o.weight", "fusion.mlp.down.weight"):
                rows, columns = weight.shape
                ups, downs = (torch.randn(2, *size, generator=generator) for size in ((rows, 3), (3, columns)))
                made[name] = ups[0] @ downs[0] + 0.3 * ups[1] @ downs[1]
                weight += made[name]
    factors.fit()
    for name, weight in head.named_parameters():
        if name in made:
            left, sizes, right = torch.linalg.svd(made[name].double(), full_matrices=False)
            nearest = left[:, :3] * sizes[:3] @ right[:3]
            torch.testing.assert_close((weight - before[name]).double(), nearest, rtol=1e-3, atol=1e-3, msg=name)
        else:
            torch.testing.assert_close(weight, before[name], msg=name)
