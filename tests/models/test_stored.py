"""What files say of how they hold a model, against the models themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_gguf
import tiny_quantised
import torch
from gguf import GGUFReader
from safetensors.torch import load_file, save_file
from tiny_checkpoint import write_checkpoint

from draftwing.models.families import FAMILIES
from draftwing.models.stored import reads_images, stored_as
from draftwing.models.weight_files import read_json


def test_whose_images_are_read_is_what_the_families_say() -> None:
    for family in FAMILIES.values():
        for name, whole in family.wholes.items():
            seen = any(one.wholes[name].tower for one in FAMILIES.values() if name in one.wholes)
            assert reads_images({"architectures": [name], "vision_config": {"a": 1}}) == seen, name
            assert not reads_images({"architectures": [name]}) and whole


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


def test_what_is_changed_is_read_anew(tmp_path: Path) -> None:
    (tmp_path / "gone").symlink_to("nowhere")  # as in a cache that was tidied
    for size in (8, 16):
        (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": f"of {size}"}))
        save_file({"a": torch.zeros(size, 2)}, tmp_path / "model.safetensors")
        found = stored_as(tmp_path)
        assert (found["values"], found["type"]) == (2 * size, f"of {size}")
