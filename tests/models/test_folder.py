"""Which files of a folder hold its weights: the same as transformers takes."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from reference.checkpoints import llama_target
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftwing.errors import CheckpointError
from draftwing.models.folder import folder_tensors
from draftwing.models.loader import load_model
from draftwing.models.weight_files import weight_files

SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 8}


def weights(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=1)
    return {name: torch.randn_like(value) for name, value in transformers.LlamaForCausalLM(config).state_dict().items()}


def config(folder: Path, **more: object) -> None:
    given = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 1, **SIZES, **more}
    (folder / "config.json").write_text(json.dumps(given))


def whole(folder: Path, seed: int, name: str = "model.safetensors") -> None:
    (save_file if name.endswith(".safetensors") else torch.save)(weights(seed), folder / name)


def shards(folder: Path, seed: int, kind: str = "safetensors", stem: str = "model") -> None:
    tensors = weights(seed)
    names = {name: f"{stem}-0000{i % 2 + 1}-of-00002.{kind}" for i, name in enumerate(tensors)}
    for file in set(names.values()):
        part = {name: value for name, value in tensors.items() if names[name] == file}
        (save_file if kind == "safetensors" else torch.save)(part, folder / file)
    (folder / f"{stem}.{kind}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def over_old_shards(folder: Path) -> None:
    """What `save_pretrained` leaves that writes one file over a folder of several."""
    shards(folder, 1)
    whole(folder, 2)


def over_an_index_alone(folder: Path) -> None:
    over_old_shards(folder)
    for file in folder.glob("*-of-00002.safetensors"):
        file.unlink()


def beside_pickles(folder: Path) -> None:
    shards(folder, 3)
    whole(folder, 1, "pytorch_model.bin")


def pickles_over_old_shards(folder: Path) -> None:
    shards(folder, 1, "bin", "pytorch_model")
    whole(folder, 4, "pytorch_model.bin")


def beside_others(folder: Path) -> None:
    """Other layouts of the same model, and an adapter."""
    whole(folder, 5)
    for name in ("consolidated.safetensors", "model.fp16.safetensors", "adapter_model.safetensors"):
        whole(folder, 1, name)


def named(folder: Path) -> None:
    config(folder, transformers_weights="other.safetensors")
    whole(folder, 1)
    whole(folder, 6, "other.safetensors")


def named_index(folder: Path) -> None:
    config(folder, transformers_weights="other.safetensors.index.json")
    whole(folder, 1)
    shards(folder, 7, stem="other")


@pytest.mark.slower(write=[over_an_index_alone, pickles_over_old_shards, beside_others, named])
@pytest.mark.parametrize(
    ("write", "aside"),
    [
        (over_old_shards, ["model.safetensors.index.json", "model-00001-of-00002.safetensors"]),
        (over_an_index_alone, ["model.safetensors.index.json"]), (beside_pickles, ["pytorch_model.bin"]),
        (pickles_over_old_shards, ["pytorch_model.bin.index.json", "pytorch_model-00002-of-00002.bin"]),
        (beside_others, ["consolidated.safetensors", "model.fp16.safetensors", "adapter_model.safetensors"]),
        (named, ["model.safetensors"]), (named_index, ["model.safetensors"]),
    ],
)  # fmt: skip
def test_files_are_those_that_transformers_takes(
    tmp_path: Path, write: Callable[[Path], None], aside: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    config(tmp_path)
    write(tmp_path)
    with caplog.at_level(logging.INFO):
        found = dict(folder_tensors(tmp_path))
    if "adapter_model.safetensors" in aside:
        (tmp_path / "adapter_model.safetensors").unlink()  # which makes transformers ask for a package
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, value in model.state_dict().items():
        assert torch.equal(found[name], value), name
    left = caplog.text.partition("not read: ")[2]
    assert all(name in left for name in aside)


def test_nothing_is_said_where_nothing_is_left_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config(tmp_path)
    shards(tmp_path, 1)
    (tmp_path / "tokenizer.json").write_text("{}")
    with caplog.at_level(logging.INFO):
        assert len(weight_files(tmp_path)) == 2 and list(folder_tensors(tmp_path))
    assert not caplog.records


def test_all_missing_shards_are_named(tmp_path: Path) -> None:
    shards(tmp_path, 1)
    for file in tmp_path.glob("*-of-00002.safetensors"):
        file.unlink()
    with pytest.raises(CheckpointError) as error:
        weight_files(tmp_path)
    assert all(f"model-0000{i}-of-00002.safetensors" in str(error.value) for i in (1, 2))


@pytest.mark.parametrize(
    "name", ["consolidated.safetensors", "model.fp16.safetensors", "model-00001-of-00002.safetensors"]
)
def test_files_that_hold_no_served_weights_are_named(tmp_path: Path, name: str) -> None:
    whole(tmp_path, 1, name)
    with pytest.raises(CheckpointError, match=f"no weights in .*; found {name}"):
        weight_files(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    for make in (os.mkfifo, lambda path: path.symlink_to(tmp_path / "nothing")):
        make(tmp_path / name)
        with pytest.raises(CheckpointError, match="expected a file"):
            weight_files(tmp_path)
        (tmp_path / name).unlink()


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 12\n"


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "config.json", "model.gguf"])
def test_pointers_of_git_lfs_are_named(tmp_path: Path, name: str) -> None:
    """As they lie in folders that were cloned without it."""
    folder = llama_target(1).write(tmp_path)
    if name.startswith("pytorch"):
        (folder / "model.safetensors").unlink()
    (folder / name).write_text(POINTER)
    with pytest.raises(CheckpointError, match=f"{name}.*: it is a pointer of Git LFS .*: run git lfs pull"):
        load_model(folder / name if name.endswith("gguf") else folder, torch.float32, "cpu")


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "base_model.model."])
def test_other_names_of_tensors_are_named(tmp_path: Path, prefix: str) -> None:
    """As trainers write them that save what is around a model."""
    folder = llama_target(1).write(tmp_path)
    file = folder / "model.safetensors"
    save_file({f"{prefix}{name}": value for name, value in load_file(file).items()}, file)
    with pytest.raises(CheckpointError, match=rf"missing from the checkpoint: .*lm_head.weight.*instead: .*{prefix}"):
        load_model(folder, torch.float32, "cpu")
