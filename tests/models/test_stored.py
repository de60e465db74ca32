"""What files say of how they hold a model, against the models themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_gguf
import tiny_quantised
import torch
from gguf import GGUFReader, GGUFWriter
from safetensors.torch import load_file, save_file
from tiny_checkpoint import write_checkpoint

from draftwing.errors import CheckpointError
from draftwing.models.families import FAMILIES, in_gguf, language_model
from draftwing.models.stored import reads_images, stored_as
from draftwing.models.weight_files import read_json


def test_whose_images_are_read_is_what_the_families_say() -> None:
    for family in FAMILIES.values():
        for name, whole in family.wholes.items():
            seen = any(one.wholes[name].tower for one in FAMILIES.values() if name in one.wholes)
            assert reads_images({"architectures": [name], "vision_config": {"a": 1}}) == seen, name
            assert not reads_images({"architectures": [name]}) and whole


def said_in(tmp_path: Path, config: dict[str, Any]) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(stored_as(tmp_path)["architecture"])


def test_architectures_of_folders_are_those_of_the_loaded_models(tmp_path: Path) -> None:
    for name in FAMILIES:
        assert said_in(tmp_path, {"architectures": [name]}) == name
        if name.endswith("ForCausalLM") and f"{name.removesuffix('ForCausalLM')}Model" not in FAMILIES:
            assert said_in(tmp_path, {"architectures": [f"{name.removesuffix('ForCausalLM')}Model"]}) == name
    texts = {family.model_type for family in FAMILIES.values()} | {
        whole.text for family in FAMILIES.values() for whole in family.wholes.values() if whole.text
    }
    for name in {name for family in FAMILIES.values() for name in family.wholes}:
        for text in (None, "another", *texts):
            for key in ("text_config", "llm_config"):
                config = {"architectures": [name], key: {} if text is None else {"model_type": text}}
                try:
                    (meant,) = language_model(config)["architectures"]
                except CheckpointError:
                    continue  # it is not served
                assert said_in(tmp_path, config) == meant, config
        assert said_in(tmp_path, {"architectures": [name]}) in FAMILIES


@pytest.mark.parametrize("kind", in_gguf())
def test_architectures_of_gguf_files_are_those_of_the_loaded_models(tmp_path: Path, kind: str) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", kind)
    others = {
        "granite_swa": ("expert_count", "GraniteMoeSWAForCausalLM"),
        "llama": ("expert_count", "MixtralForCausalLM"),
        "mamba": ("ssm.dt_b_c_rms", "FalconMambaForCausalLM"),
        "olmo2": ("attention.sliding_window", "Olmo3ForCausalLM"),
    }
    writer.add_uint32(f"{kind}.{others[kind][0] if kind in others else 'x'}", 0)
    write(writer)
    unsaid = {"deepseek2", "granitehybrid"}  # several keys decide
    assert stored_as(tmp_path / "m.gguf")["architecture"] == ("" if kind in unsaid else in_gguf()[kind])
    if kind in others:
        key, other = others[kind]
        writer = GGUFWriter(tmp_path / "m.gguf", kind)
        writer.add_uint32(f"{kind}.{key}", 8)
        write(writer)
        assert stored_as(tmp_path / "m.gguf")["architecture"] == other
    two = {f.gguf.architecture for f in FAMILIES.values() if f.gguf is not None and f.gguf.when is not None}
    assert two == {*others, *unsaid}


def write(writer: GGUFWriter) -> None:
    writer.add_tensor("a", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", [None, *tiny_quantised.FORMATS])
def test_values_of_a_folder_are_those_of_its_model(tmp_path: Path, name: str | None) -> None:
    folder = Path(write_checkpoint(tmp_path / "m"))
    file = folder / "model.safetensors"
    values = sum(tensor.numel() for tensor in load_file(file).values())
    if name is not None:
        config, writer = tiny_quantised.FORMATS[name]
        tiny_quantised.quantise(folder, config, lambda module: writer)
    found = stored_as(folder)
    assert found["values"] == values and found["bytes"] == file.stat().st_size and found["format"] == "safetensors"
    config = read_json(folder / "config.json")
    kind = config.get("quantization_config", {}).get("quant_method") or config.get("dtype") or config["torch_dtype"]
    assert found["type"] == kind


@pytest.mark.parametrize("name", ["compressed int4", "compressed int8 packed", "compressed nvfp4"])
@pytest.mark.parametrize("other", [4, 8, 16])
def test_bits_are_those_of_weights(tmp_path: Path, name: str, other: int) -> None:
    folder = Path(write_checkpoint(tmp_path / "m"))
    values = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    config, writer = tiny_quantised.FORMATS[name]
    tiny_quantised.quantise(folder, config, lambda module: writer)
    said, activations = read_json(folder / "config.json"), {"num_bits": other, "type": "float"}
    groups = {
        key: {"input_activations": activations, **one, "output_activations": activations}
        for key, one in config["config_groups"].items()
    }
    said["quantization_config"] = {"kv_cache_scheme": activations, **config, "config_groups": groups}
    (folder / "config.json").write_text(json.dumps(said))
    assert stored_as(folder)["values"] == values


def test_values_with_several_numbers_of_bits_are_not_said(tmp_path: Path) -> None:
    groups = {str(bits): {"targets": [f"re:.*{bits}"], "weights": {"num_bits": bits}} for bits in (4, 8)}
    config = {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"4.weight_packed": torch.zeros(8, 2, dtype=torch.int32)}, tmp_path / "model.safetensors")
    assert stored_as(tmp_path)["values"] == 0


def test_values_of_bitsandbytes(tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {
        "a.weight": torch.zeros(8, 16, dtype=torch.int8), "a.SCB": torch.zeros(8),
        "a.weight_format": torch.zeros((), dtype=torch.uint8), "norm.weight": torch.zeros(16),
    }  # fmt: skip
    save_file(tensors, tmp_path / "model.safetensors")
    assert stored_as(tmp_path)["values"] == 8 * 16 + 16


def test_values_of_a_gguf_file(tmp_path: Path) -> None:
    file = tiny_gguf.write(tmp_path / "m.gguf", "llama")
    found = stored_as(file)
    assert found["values"] == sum(tensor.n_elements for tensor in GGUFReader(file).tensors) and found["type"]
    assert found["bytes"] == file.stat().st_size and found["format"] == "gguf"


@pytest.mark.parametrize("content", [b"", b"abc", b"\x02\0\0\0\0\0\0\0[]", b"\xff" * 16, b'\x08\0\0\0\0\0\0\0{"a": 1}'])
def test_broken_files_say_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    for name in ("model.safetensors", "m.gguf"):
        (tmp_path / name).write_bytes(content)
    assert stored_as(tmp_path) == {
        "format": "safetensors", "architecture": "", "values": 0, "type": "bfloat16", "bytes": len(content)
    }  # fmt: skip
    assert stored_as(tmp_path / "m.gguf")["values"] == stored_as(tmp_path / "none")["values"] == 0


def of_shape(*shape: Any) -> str:
    return json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}})


@pytest.mark.parametrize(
    "header",
    [
        of_shape(-3), of_shape(-3, -2), of_shape(10**15), of_shape(2**62, 2**62), of_shape(2.5), of_shape(float("inf")),
        of_shape(True), of_shape("3"), of_shape(*[1] * 100_000), "[" * 200_000, '{"a":' * 200_000,
        '{"a": {"dtype": "F32", "shape": 3}}', '{"a": {"dtype": [], "shape": [3]}, "b": 1}',
    ],
    ids=lambda header: header[:60],
)  # fmt: skip
@pytest.mark.parametrize("quantization", [{}, {"quant_method": "gptq", "bits": 4}, {"bits": 0, "w_bit": -1}])
def test_absurd_headers_say_nothing(tmp_path: Path, header: str, quantization: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "x", "quantization_config": quantization}))
    content = header.encode()
    (tmp_path / "model.safetensors").write_bytes(len(content).to_bytes(8, "little") + content)
    found = stored_as(tmp_path)
    assert found["values"] == 0 and found["bytes"] == 8 + len(content)


@pytest.mark.parametrize(
    "config", ["[" * 200_000, '{"a":' * 200_000, '{"architectures": "llama"}', '{"architectures": [1]}']
)
def test_absurd_configs_say_nothing(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    found = stored_as(tmp_path)
    assert found["architecture"] == found["type"] == "" and found["values"] == 0


def test_what_is_changed_is_read_anew(tmp_path: Path) -> None:
    (tmp_path / "gone").symlink_to("nowhere")  # as in a cache that was tidied
    for size in (8, 16):
        (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": f"of {size}"}))
        save_file({"a": torch.zeros(size, 2)}, tmp_path / "model.safetensors")
        found = stored_as(tmp_path)
        assert (found["values"], found["type"]) == (2 * size, f"of {size}")
