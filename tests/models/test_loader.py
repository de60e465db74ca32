"""Checkpoint folders in every layout, and the errors of broken ones."""

from __future__ import annotations

import io
import json
import logging
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from draftwing.errors import CheckpointError
from draftwing.models.config import from_hf
from draftwing.models.generation import stop_ids
from draftwing.models.loader import load_config, load_model
from draftwing.models.weight_map import checkpoint_names, stored_tensors

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 40, "max_position_embeddings": 32,
    "tie_word_embeddings": False, "eos_token_id": [3, 5],
}  # fmt: skip


def weights() -> dict[str, Tensor]:
    """The tensors that a Qwen2 checkpoint of these sizes has, written out independently of the table under test."""
    torch.manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.randn(40, 16), "model.norm.weight": torch.randn(16)}
    tensors["lm_head.weight"] = torch.randn(40, 16)
    for i in range(2):
        layer = f"model.layers.{i}"
        for name, rows in (("q_proj", 16), ("k_proj", 8), ("v_proj", 8)):
            tensors[f"{layer}.self_attn.{name}.weight"] = torch.randn(rows, 16)
            tensors[f"{layer}.self_attn.{name}.bias"] = torch.randn(rows)
        tensors[f"{layer}.self_attn.o_proj.weight"] = torch.randn(16, 16)
        tensors[f"{layer}.mlp.gate_proj.weight"] = torch.randn(24, 16)
        tensors[f"{layer}.mlp.up_proj.weight"] = torch.randn(24, 16)
        tensors[f"{layer}.mlp.down_proj.weight"] = torch.randn(16, 24)
        tensors[f"{layer}.input_layernorm.weight"] = torch.randn(16)
        tensors[f"{layer}.post_attention_layernorm.weight"] = torch.randn(16)
    return tensors


def write(folder: Path, tensors: dict[str, Tensor], **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_shards(folder: Path, tensors: dict[str, Tensor], kind: str) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    weight_map = {}
    for i, part in enumerate((list(tensors)[::2], list(tensors)[1::2])):
        stem = "model" if kind == "safetensors" else "pytorch_model"
        file = f"{stem}-0000{i + 1}-of-00002.{kind}"
        shard = {name: tensors[name] for name in part}
        (save_file if kind == "safetensors" else torch.save)(shard, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / f"{stem}.{kind}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def check(folder: Path, tensors: dict[str, Tensor]) -> None:
    model = load_model(folder, torch.float32, "cpu")
    layer = model.layers[1]
    prefix = "model.layers.1."
    qkv = [tensors[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(layer.mixer.qkv.weight, torch.cat(qkv))
    assert torch.equal(
        layer.mixer.qkv.bias, torch.cat([tensors[f"{prefix}self_attn.{name}_proj.bias"] for name in "qkv"])
    )
    gate_up = [tensors[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(layer.mlp.gate_up.weight, torch.cat(gate_up))
    assert torch.equal(layer.mlp.down.weight, tensors[f"{prefix}mlp.down_proj.weight"])
    assert torch.equal(layer.mlp_norm.weight, tensors[f"{prefix}post_attention_layernorm.weight"])
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"])
    assert not any(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_shards(tmp_path: Path, kind: str) -> None:
    check(write_shards(tmp_path, weights(), kind), weights())


@pytest.mark.parametrize("zipped", [True, False])
def test_single_bin(tmp_path: Path, zipped: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.save(weights(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    check(tmp_path, weights())


def test_names_without_the_model_prefix(tmp_path: Path) -> None:
    check(write(tmp_path, {name.removeprefix("model."): tensor for name, tensor in weights().items()}), weights())


def test_cast_on_the_way_and_report(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[tuple[int, int]] = []
    with caplog.at_level(logging.INFO):
        model = load_model(
            write(tmp_path, weights()), torch.bfloat16, "cpu", lambda done, total: seen.append((done, total))
        )
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.norm.weight, weights()["model.norm.weight"].bfloat16())
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1] == (tmp_path / "model.safetensors").stat().st_size
    assert "weights loaded: " in caplog.text and " GB" in caplog.text


def test_tied_head_in_the_file_is_harmless_and_others_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2), "tower.proj.weight": torch.ones(2)}
    same = {"lm_head.weight": weights()["model.embed_tokens.weight"].clone()}
    model = load_model(write(tmp_path, weights() | extra | same, tie_word_embeddings=True), torch.float32, "cpu")
    assert model.lm_head.weight is model.embed.weight
    assert "tower.proj.weight" in caplog.text
    assert "inv_freq" not in caplog.text and "lm_head" not in caplog.text
    load_model(write(tmp_path, weights(), tie_word_embeddings=True), torch.float32, "cpu")
    assert "lm_head.weight is not used: tie_word_embeddings is true" in caplog.text  # for it holds other values


def test_code_of_a_checkpoint_is_not_executed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "modeling.py").write_text("raise SystemExit('executed')")
    with caplog.at_level(logging.INFO):
        check(write(tmp_path, weights(), auto_map={"AutoModelForCausalLM": "modeling.Evil"}), weights())
    assert "auto_map" in caplog.text


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise SystemExit('executed')",))


def refused(folder: Path, *expected: str) -> None:
    with pytest.raises(CheckpointError) as error:
        load_model(folder, torch.float32, "cpu")
    for part in expected:
        assert part in str(error.value)


UP, K, NORM = "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.k_proj.weight", "model.norm.weight"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        (UP, None, ("missing", UP)),  # half of a fused parameter
        (K, torch.randn(16, 16), (K, "[8, 16]", "found [16, 16]")),
        (NORM, torch.ones(16, dtype=torch.int8), (NORM, "int8")),
        ("norm.weight", torch.ones(16), (NORM, "twice")),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, name: str, value: Tensor | None, expected: tuple[str, ...]) -> None:
    tensors = {**weights(), name: value}
    refused(write(tmp_path, {key: one for key, one in tensors.items() if one is not None}), *expected)


def test_truncated_safetensors(tmp_path: Path) -> None:
    file = write(tmp_path, weights()) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    refused(tmp_path, "model.safetensors cannot be read")


def test_no_weights_no_config_no_folder(tmp_path: Path) -> None:
    refused(tmp_path, "config.json is missing")
    (tmp_path / "config.json").write_text("{")
    refused(tmp_path, "not valid JSON")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    refused(tmp_path, "no weights", "model.safetensors")
    refused(tmp_path / "nothing", "neither")


def test_stop_ids_are_a_union(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    config = load_config(tmp_path)
    assert stop_ids(tmp_path, config) == (3, 5)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 3]}))
    assert stop_ids(tmp_path, config, (11, None, 5)) == (3, 5, 7, 11)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert stop_ids(tmp_path, from_hf({**CONFIG, "eos_token_id": None})) == (9,)
    assert stop_ids(tmp_path / "model.gguf", config, (1,)) == (1, 3, 5)


MEASURE = """
import pathlib, sys, torch
from draftwing.models.loader import load_model

def kilobytes(key):
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1])

torch.set_num_threads(1)
load_model(sys.argv[1], torch.float32, "cpu")  # what is loaded or allocated once, whatever the size
before = kilobytes("VmRSS")
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
model = load_model(sys.argv[2], torch.float32, "cpu")
print(before, kilobytes("VmHWM"), kilobytes("VmRSS"))
"""


@pytest.mark.further(kind="bin")
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is read from Linux's /proc")
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_memory_stays_within_the_weights_and_one_shard(tmp_path: Path, kind: str) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    for folder in (small, large):
        folder.mkdir()
    write_shards(small, weights(), kind)
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 8192, "num_hidden_layers": 3}
    (large / "config.json").write_text(json.dumps({**CONFIG, **sizes, "architectures": ["LlamaForCausalLM"]}))
    model = load_model(large, torch.float32, "cpu", dummy=True)
    tensors = [(name, tensor.clone()) for name, tensor in stored_tensors(model, checkpoint_names(model.config))]
    total = sum(tensor.nbytes for _, tensor in tensors)
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors:
        if sum(part.nbytes for part in shards[-1].values()) > total / 8:
            shards.append({})
        shards[-1][name] = tensor
    stem = "model" if kind == "safetensors" else "pytorch_model"
    weight_map = {}
    for i, shard in enumerate(shards):
        (save_file if kind == "safetensors" else torch.save)(shard, large / f"{stem}-{i}.{kind}")
        weight_map |= dict.fromkeys(shard, f"{stem}-{i}.{kind}")
    (large / f"{stem}.{kind}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    largest = max(file.stat().st_size for file in large.glob(f"*.{kind}"))
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(small), str(large)], capture_output=True, text=True, check=True
    )
    before, peak, after = (int(word) * 1024 for word in done.stdout.split())
    slack = 8 << 20
    assert total > 60e6 and largest < total / 3
    assert after - before > 0.9 * total, "the weights are not in memory: this measures nothing"
    assert peak - before < total + largest + slack


def pickled(folder: Path, shard: object) -> Path:
    """A folder of one file, of which torch is to save this, or which has these bytes."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    file = folder / "pytorch_model.bin"
    file.write_bytes(shard) if isinstance(shard, bytes) else torch.save(shard, file)
    return folder


def test_compressed_pickles_are_refused(tmp_path: Path) -> None:
    """Their bytes would be mapped as if they were values."""
    file = pickled(tmp_path, weights()) / "pytorch_model.bin"
    stored = io.BytesIO(file.read_bytes())
    with zipfile.ZipFile(stored) as plain, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        for record in plain.infolist():
            packed.writestr(record.filename, plain.read(record))
    refused(tmp_path, "found compressed records")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize(
    ("shard", "expected"),
    [
        ({NORM: Evil()}, "pytorch_model.bin cannot be read"),
        (pickle.dumps({NORM: Evil()}), "pytorch_model.bin cannot be read"),
        ({1: torch.ones(2)}, "expected dense tensors by name, found"),
        ({"a": torch.ones(2, 2).to_sparse()}, "expected dense tensors by name, found"),
        ({"a": torch.ones(2, device="meta")}, "expected dense tensors by name, found"),
        (b"\x80\x02h\x05.", "cannot be read"), (b"\x80\x02R.", "cannot be read"),
        (b"\x80\x02X\x02\0\0\0\xff\xfe.", "cannot be read"),
    ],
)  # fmt: skip
def test_pickles_of_anything_else_are_refused_and_call_nothing(tmp_path: Path, shard: object, expected: str) -> None:
    refused(pickled(tmp_path, shard), expected)
