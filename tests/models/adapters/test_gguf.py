"""Adapters in GGUF files: the same as PEFT's folders, in the row order of llama.cpp's converter."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gguf as gguf_package
import moe_models
import numpy as np
import pytest
import torch
from models.test_decoder import random_reference
from safetensors.torch import load_file
from tiny_adapters import write_adapter
from tiny_gguf import permuted

from draftwing.errors import CheckpointError
from draftwing.models.adapters.adapter import Adapter, AdapterSlots, AdapterTargets
from draftwing.models.adapters.peft import read_folder
from draftwing.models.adapters.read import read_adapter, stored_kinds, stored_rank
from draftwing.models.decoder import EXPERTS
from draftwing.models.loader import load_config, load_model
from draftwing.ops import make_ops
from draftwing.train.capture import Causal

MOST = 1 << 24
NAMES = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate",
    "up_proj": "ffn_up", "down_proj": "ffn_down",
}  # fmt: skip


def converted(folder: Path, to: Path, arch: str, heads: tuple[int, int], alpha: float | None, **more: Any) -> Path:
    """heads: of queries and of keys, whose rows are in pairs; more: metadata."""
    writer = gguf_package.GGUFWriter(to, arch)
    values = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": alpha} | more
    for key, value in values.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_float32(key, value)
    for name, value in load_file(folder / "adapter_model.safetensors").items():
        *_, layer, _, module, part, _ = name.split(".")
        own, rows = NAMES[module], value.float().numpy()
        count = {"q_proj": heads[0], "k_proj": heads[1]}.get(module, 0)
        if part == "lora_B" and count and arch == "llama":
            rows = permuted(rows, count)
        writer.add_tensor(f"blk.{layer}.{own}.weight.lora_{part[-1].lower()}", np.ascontiguousarray(rows))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


@pytest.fixture(scope="module", params=["llama2", "qwen2.5"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("models") / "model"
    random_reference(request.param).save_pretrained(folder)
    return folder, request.param.rstrip(".25")


def same(one: Adapter, other: Adapter) -> None:
    assert one.factors.keys() == other.factors.keys()
    for name, found in one.factors.items():
        assert torch.equal(found.down, other.factors[name].down) and torch.equal(found.up, other.factors[name].up), name
        assert found.scale == other.factors[name].scale


@pytest.mark.parametrize("alpha", [6.0, None])
def test_a_file_is_the_folder_that_it_was_made_of(model: tuple[Path, str], tmp_path: Path, alpha: float | None) -> None:
    (path, arch), config = model, load_config(model[0])
    folder = write_adapter(tmp_path / "one", path, rank=3, lora_alpha=6 if alpha else 3)
    heads = config.attention.heads, config.attention.kv_heads
    file = converted(folder, tmp_path / "one.gguf", {"llama": "llama", "qwen": "qwen2"}[arch], heads, alpha)
    adapter = read_adapter(file, config, MOST)
    same(adapter, read_folder(folder, MOST))
    assert stored_rank(file) == 3
    AdapterTargets(load_model(path, torch.float32, "cpu")).fit(adapter)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"general.type": "model"}, "general.type"), ({"adapter.type": "control_vector"}, "adapter.type"),
        ({"adapter.alora.invocation_tokens": [1, 2]}, "activated LoRA"), ({"adapter.lora.alpha": "x"}, "alpha"),
    ],
)  # fmt: skip
def test_what_is_refused(model: tuple[Path, str], tmp_path: Path, more: dict[str, Any], said: str) -> None:
    config, folder = load_config(model[0]), write_adapter(tmp_path / "one", model[0])
    file = converted(folder, tmp_path / "one.gguf", {"llama": "llama", "qwen": "qwen2"}[model[1]], (4, 2), 1.0, **more)
    with pytest.raises(CheckpointError, match=said):
        read_adapter(file, config, MOST)
    with pytest.raises(CheckpointError, match="at most 10 bytes"):
        read_adapter(file, config, 10)
    other = converted(folder, tmp_path / "other.gguf", "gemma3", (4, 2), 1.0)
    with pytest.raises(CheckpointError, match=r"general\.architecture: expected"):
        read_adapter(other, config, MOST)


@torch.inference_mode()
def test_experts_are_those_of_transformers(tmp_path: Path) -> None:
    """llama.cpp's form: factors of all experts of a layer in one tensor."""
    theirs: Any = moe_models.reference("glm4-moe")
    theirs.save_pretrained(tmp_path / "model")
    model = load_model(tmp_path / "model", torch.float32, "cpu")
    model.pack(make_ops(torch.device("cpu")))
    slots, generator = AdapterSlots(model, 1, 4, wide=[EXPERTS]), torch.Generator().manual_seed(4)
    writer, rank, alpha = gguf_package.GGUFWriter(tmp_path / "one.gguf", "glm4moe"), 3, 6.0
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    params, ids = dict(theirs.named_parameters()), torch.randint(1, 101, (1, 40), generator=generator)
    plain = theirs(ids).logits

    def factors(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        *count, outputs, inputs = weight.shape
        down = torch.randn(*count, rank, inputs, generator=generator) / inputs**0.5
        return down, torch.randn(*count, outputs, rank, generator=generator) / 8

    mlp = "model.layers.1.mlp"
    gate_up, down_proj = params[f"{mlp}.experts.gate_up_proj"], params[f"{mlp}.experts.down_proj"]
    gate, up = gate_up.chunk(2, 1)
    matrices = {"ffn_gate_exps": gate, "ffn_up_exps": up, "ffn_down_exps": down_proj}
    for name, weight in matrices.items():
        a, b = factors(weight)
        writer.add_tensor(f"blk.1.{name}.weight.lora_a", a.numpy())
        writer.add_tensor(f"blk.1.{name}.weight.lora_b", b.numpy())
        weight.add_((alpha / rank * b.double() @ a.double()).float())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert stored_rank(tmp_path / "one.gguf") == rank and stored_kinds(tmp_path / "one.gguf") == {EXPERTS}
    slots.put(1, slots.targets.fit(read_adapter(tmp_path / "one.gguf", model.config, MOST)))
    adapted = theirs(ids).logits
    assert not torch.allclose(adapted, plain, atol=0.1)
    hidden, _ = model(ids[0], torch.arange(40), Causal(1, 40), adapted=torch.ones(40, dtype=torch.int64))
    torch.testing.assert_close(model.logits(hidden), adapted[0], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.further(model="qwen2.5")
def test_mutated_files_are_read_or_refused(model: tuple[Path, str], tmp_path: Path) -> None:
    config, folder, draw = load_config(model[0]), write_adapter(tmp_path / "one", model[0], rank=2), random.Random(3)
    file = converted(folder, tmp_path / "one.gguf", {"llama": "llama", "qwen": "qwen2"}[model[1]], (4, 2), 1.0)
    whole, refused = file.read_bytes(), 0
    for _ in range(200):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(min(len(data), 6000))
            if draw.random() < 0.6:
                data[at] = draw.randrange(256)
            else:
                del data[at : at + draw.randint(1, 30)]
        file.write_bytes(bytes(data))
        try:
            read_adapter(file, config, MOST)
        except CheckpointError:
            refused += 1
    assert refused > 60
