"""Adapters of PEFT's: what is read of their files, and what is refused by name."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from image_models import reference, write_model
from safetensors.torch import load_file, save_file
from tiny_adapters import ATTENTION, mutated, shapes_of, write_adapter
from tiny_checkpoint import write_checkpoint

from draftwing.errors import CheckpointError
from draftwing.models.adapters.adapter import Adapter, AdapterTargets
from draftwing.models.adapters.peft import read_folder
from draftwing.models.adapters.read import stored_rank
from draftwing.models.adapters.stored import stored_digest
from draftwing.models.loader import load_model

MOST = 1 << 24
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def targets(tiny: Path) -> AdapterTargets:
    return AdapterTargets(load_model(tiny, torch.float32, "cpu"))


def changed(folder: Path, config: dict[str, Any] | None = None, **tensors: torch.Tensor | None) -> Path:
    """tensors: by name, None: it is taken away."""
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | (config or {})))
    found = load_file(folder / WEIGHTS) | {name: value for name, value in tensors.items() if value is not None}
    save_file({name: value for name, value in found.items() if tensors.get(name, value) is not None}, folder / WEIGHTS)
    return folder


def refusal(folder: Path, targets: AdapterTargets) -> str:
    with pytest.raises(CheckpointError) as info:
        targets.fit(read_folder(folder, MOST))
    return str(info.value)


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({"lora_alpha": 32}, {"q_proj": 8.0, "down_proj": 8.0}),
        ({"lora_alpha": 32, "use_rslora": True}, {"q_proj": 16.0, "down_proj": 16.0}),
        (
            {"lora_alpha": 8, "rank_pattern": {"q_proj": 2},
             "alpha_pattern": {"q_proj": 5, "layers.1.mlp.down_proj": 1}},
            {"q_proj": 2.5, "layers.0.mlp.down_proj": 2.0, "layers.1.mlp.down_proj": 0.25},
        ),
        (
            {"alpha_pattern": {r"model\.layers\.[01]\.self_attn\..*": 4, "q_proj": 100}, "lora_alpha": 1},
            {"q_proj": 1.0, "up_proj": 0.25},
        ),
    ],
)  # fmt: skip
def test_scales_and_patterns(tiny: Path, tmp_path: Path, config: dict[str, Any], scales: dict[str, float]) -> None:
    folder = write_adapter(tmp_path / "one", tiny, rank=4, **config)
    adapter = read_folder(folder, MOST)
    assert set(adapter.factors) == set(shapes_of(tiny))
    for ending, scale in scales.items():
        found = {one.scale for name, one in adapter.factors.items() if name.endswith(ending)}
        assert found == {scale}, ending
    assert adapter.rank == 4 == stored_rank(folder)


def test_what_names_may_look_like(tiny: Path, tmp_path: Path) -> None:
    plain = read_folder(write_adapter(tmp_path / "plain", tiny), MOST)
    folder = write_adapter(tmp_path / "named", tiny)
    tensors = {
        name.replace(".model.model.", ".model.model.language_model.").replace(".weight", ".default.weight"): value
        for name, value in load_file(folder / WEIGHTS).items()
    }  # fmt: skip
    save_file(tensors, folder / WEIGHTS)
    named = read_folder(folder, MOST)
    assert named.factors.keys() == plain.factors.keys() and named.digest != plain.digest
    for name, one in named.factors.items():
        assert torch.equal(one.down, plain.factors[name].down) and torch.equal(one.up, plain.factors[name].up)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "LOHA"}, "LOHA"), ({"peft_type": None}, "peft_type"), ({"use_dora": True}, "DoRA"),
        ({"bias": "lora_only"}, "bias"), ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"), ({"target_parameters": ["x"]}, "target_parameters"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"), ({"layer_replication": [[0, 1]]}, "layer_repl"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa"), ({"init_lora_weights": "olora"}, "olora"),
        ({"init_lora_weights": "lora_ga"}, "lora_ga"), ({"kasa_config": {"beta": 1e-4}}, "KaSA"),
        ({"monteclora_config": {"num_samples": 8}}, "MonteCLoRA"), ({"velora_config": {"num_groups": 8}}, "VeLoRA"),
        ({"alora_invocation_tokens": [1, 2]}, "alora"), ({"r": 5}, "expected the rank"),
        ({"r": "x"}, "expected the rank"),
        ({"lora_alpha": "x"}, "lora_alpha"), ({"lora_alpha": float("nan")}, "lora_alpha"),
        ({"alpha_pattern": ["x"]}, "alpha_pattern"), ({"alpha_pattern": {"(": 1}}, "alpha_pattern"),
        ({"alpha_pattern": {"(a*)*b": 1}}, "repetitions"), ({"rank_pattern": {"a*b*c*d*e": 1}}, "repetitions"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern"),
    ],
)  # fmt: skip
def test_configs_that_are_refused(
    tiny: Path, tmp_path: Path, targets: AdapterTargets, config: dict[str, Any], said: str
) -> None:
    assert said in refusal(changed(write_adapter(tmp_path / "one", tiny), config), targets)


Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({f"{Q}.lora_B.weight": None}, "lora_A alone"),
        ({f"{Q}.lora_B.weight": torch.zeros(33, 4)}, "the model's is"),
        ({f"{Q}.lora_B.weight": torch.zeros(32, 3)}, "found [4, 32] and [32, 3]"),
        ({f"{Q}.lora_A.weight": torch.zeros(4)}, "found [4] and [32, 4]"),
        ({f"{Q}.lora_A.weight": torch.full((4, 32), torch.inf)}, "finite"),
        ({f"{Q}.lora_A.weight": torch.zeros(4, 32, dtype=torch.int8)}, "floating point"),
        ({f"{Q}.lora_magnitude_vector": torch.zeros(32)}, "DoRA"),
        ({f"{Q}.base_layer.bias": torch.zeros(32)}, "bias"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 258)}, "embedding"),
        ({"base_model.model.lm_head.modules_to_save.weight": torch.zeros(258, 32)}, "whole module"),
        (
            {f"base_model.model.lm_head.lora_{one}.weight": torch.zeros(size) for one, size in
             (("A", (4, 32)), ("B", (258, 4)))}, "lm_head",
        ),
        (
            {f"base_model.model.model.layers.9.self_attn.q_proj.lora_{one}.weight": torch.zeros(size) for one, size in
             (("A", (4, 32)), ("B", (32, 4)))}, "no such matrix",
        ),
        (
            {f"base_model.model.model.embed_tokens.lora_{one}.weight": torch.zeros(size) for one, size in
             (("A", (4, 32)), ("B", (258, 4)))}, "embeddings, heads",
        ),
        ({"something": torch.zeros(2)}, "no factor of a LoRA"),
    ],
)  # fmt: skip
def test_tensors_that_are_refused(
    tiny: Path, tmp_path: Path, targets: AdapterTargets, tensors: dict[str, Any], said: str
) -> None:
    assert said in refusal(changed(write_adapter(tmp_path / "one", tiny), **tensors), targets)


@pytest.mark.parametrize("kind", ["qwen3-vl", "gemma3", "gemma4", "smolvlm", "lfm2-vl"])
def test_what_reads_images_takes_none(tmp_path: Path, kind: str) -> None:
    """But factors that add nothing: PEFT's `all-linear` makes some of these matrices, too, and text does not train
    them."""
    model, seeing = (
        write_model(tmp_path / kind, kind),
        AdapterTargets(load_model(tmp_path / kind, torch.float32, "cpu")),
    )
    inner = dict(reference(kind).named_modules())
    names = {name: one for name, one in inner.items() if type(one) is torch.nn.Linear and "language" not in name}
    shapes = {f"{name}": tuple(one.weight.shape) for name, one in names.items() if "text_model" not in name}
    shapes.pop("lm_head", None)
    assert len(shapes) > 2
    own = write_adapter(tmp_path / "own", model, targets=ATTENTION, shapes=shapes_in(seeing))
    both = write_adapter(tmp_path / "both", model, targets=ATTENTION, shapes=shapes_in(seeing))
    more = write_adapter(tmp_path / "more", model, targets={one.rpartition(".")[2] for one in shapes}, shapes=shapes)
    factors = load_file(more / WEIGHTS)
    empty = {name: value * ("lora_A" in name) for name, value in factors.items()}
    expected = seeing.fit(read_folder(own, MOST)).factors
    assert expected and seeing.fit(read_folder(changed(both, **empty), MOST)).factors.keys() == expected.keys()
    assert "what reads images or sound" in refusal(changed(both, **factors), seeing)
    assert seeing.fit(read_folder(changed(more, **empty), MOST)).rank == 1  # which adds nothing at all


@pytest.mark.parametrize(
    "module",
    [
        "model.vision_tower.encoder.layers.0.self_attn.q_proj", "vision_tower.encoder.layers.0.self_attn.q_proj",
        "model.audio_tower.layers.0.q_proj", "model.visual.blocks.0.attn.q_proj", "model.embed_audio.q_proj",
    ],
)  # fmt: skip
def test_what_is_not_served_of_a_model_takes_none(
    tiny: Path, tmp_path: Path, targets: AdapterTargets, module: str
) -> None:
    """As of models for images or sound whose text alone is served."""
    own = write_adapter(tmp_path / "own", tiny, targets=ATTENTION, shapes=shapes_in(targets))
    both = write_adapter(tmp_path / "both", tiny, targets=ATTENTION, shapes=shapes_in(targets) | {module: (24, 16)})
    factors = {name: value for name, value in load_file(both / WEIGHTS).items() if module in name}
    assert "what reads images or sound" in refusal(both, targets)
    found = targets.fit(read_folder(changed(both, **{k: v * ("lora_A" in k) for k, v in factors.items()}), MOST))
    assert found.factors.keys() == targets.fit(read_folder(own, MOST)).factors.keys()


@pytest.mark.parametrize(("pairs", "rank"), [(9, 2), (1, [2]), (1, "x"), (1, None), (1, 0)])
def test_experts_factors_that_nobody_makes(tmp_path: Path, pairs: int, rank: Any) -> None:
    """Are refused at once, however many names stand for the same parameters."""
    factors = {
        f"base_model.model.model.layers.0.mlp.experts{'.base_layer' * i}.lora_{which}.weight": torch.ones(8, 8)
        for i in range(pairs)
        for which in "AB"
    }
    same = [f"{'x' * i}.experts.down_proj" for i in range(1, 10)]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "target_modules": [], "target_parameters": same}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file(factors, tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError, match="expected ranks and alphas"):
        read_folder(tmp_path, MOST)


def shapes_in(targets: AdapterTargets) -> dict[str, tuple[int, int]]:
    return {name: (one.outputs, one.inputs) for name, one in targets.targets.items()}


def test_an_adapter_of_another_model_says_which(tiny: Path, tmp_path: Path, targets: AdapterTargets) -> None:
    other = write_checkpoint(tmp_path / "other", hidden=64)
    folder = write_adapter(tmp_path / "one", other, base_model_name_or_path="org/other-7b")
    said = refusal(folder, targets)
    assert "org/other-7b" in said and "[64, 128]" in said and "[32, 64]" in said


def test_its_digest_is_that_of_its_files(tiny: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "one", tiny)
    assert stored_digest(folder) == read_folder(folder, MOST).digest
    (folder / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=f"{WEIGHTS} is missing"):
        stored_digest(folder)


def test_files_that_are_refused(tiny: Path, tmp_path: Path, targets: AdapterTargets) -> None:
    with pytest.raises(CheckpointError, match="expected the folder"):
        stored_rank(tmp_path / "none")
    folder = write_adapter(tmp_path / "one", tiny)
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    assert "safe_serialization" in refusal(folder, targets)
    (folder / WEIGHTS).write_bytes(b"x" * 100)
    assert "cannot be read" in refusal(folder, targets)
    with pytest.raises(CheckpointError, match="at most 50 bytes"):
        read_folder(folder, 50)
    for text, said in (("{", "not valid JSON"), ("[1]", "expected a JSON object"), ("[" * 200_000, "not valid JSON")):
        (folder / CONFIG).write_text(text)
        assert said in refusal(folder, targets)
    (folder / CONFIG).unlink()
    assert "missing" in refusal(folder, targets)


@pytest.mark.slow
def test_a_thousand_mutated_adapters_are_read_or_refused(tiny: Path, tmp_path: Path, targets: AdapterTargets) -> None:
    folder, draw = write_adapter(tmp_path / "one", tiny, rank_pattern={"q_proj": 3}), random.Random(7)
    whole = {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS)}
    header = int.from_bytes(whole[WEIGHTS][:8], "little")
    read, refused = list[Adapter](), 0
    for i in range(1000):
        name = (CONFIG, WEIGHTS)[i % 2]
        most = len(whole[name]) if i % 4 else min(len(whole[name]), header + 8)  # the header half of the time
        (folder / name).write_bytes(mutated(whole[name], draw, most))
        try:
            adapter = read_folder(folder, MOST)
            targets.fit(adapter)
            assert all(one.down.isfinite().all() and one.up.isfinite().all() for one in adapter.factors.values())
            read.append(adapter)
        except CheckpointError as error:
            refused += 1
            assert str(error)
        (folder / name).write_bytes(whole[name])
    assert refused > 400 and len({one.digest for one in read}) > 50
