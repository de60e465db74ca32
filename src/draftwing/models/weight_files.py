"""The files of a model folder: its JSON, and which of them hold its weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from draftwing.errors import CheckpointError, listed
from draftwing.files import load_json
from draftwing.requests.refusals import show

# In order of preference, which is that of transformers: saving over a folder leaves an older index where it was.
WEIGHT_FILES = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip
_INDEX = ".index.json"
# How names of such files, and of what is like them, begin and end.
_BEGINNINGS, _ENDS = ("pytorch_model", "consolidated"), (".safetensors", ".safetensors.index.json")


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a file of a model. Raises CheckpointError."""
    try:
        content = load_json(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} is missing in {path.parent}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def read_config_json(folder: Path) -> dict[str, Any]:
    """Returns a folder's config.json, with what ModelOpt says beside it. Raises CheckpointError."""
    config, more = read_json(folder / "config.json"), folder / "hf_quant_config.json"
    if config.get("quantization_config") is None and more.exists():
        config["quantization_config"] = {"quant_method": "modelopt", **read_json(more)}
    return config


def bytes_of(path: Path) -> int:
    """Returns the size of a model's file, or of the files of its folder."""
    files = [path] if path.is_file() else path.iterdir() if path.is_dir() else []
    return sum(file.stat().st_size for file in files if file.is_file())


def weight_files(folder: Path) -> list[Path]:
    """Returns the files that hold a folder's weights: one, or the shards of an index. Raises CheckpointError where
    there are none, or not all."""
    chosen = chosen_weights(folder)
    if not os.path.isfile(chosen):  # a pipe would be waited for
        raise CheckpointError(f"{chosen}: expected a file, found none")
    return _shards(folder, chosen.name) if chosen.name.endswith(_INDEX) else [chosen]


def chosen_weights(folder: Path) -> Path:
    """Returns the file of weights, or the index."""
    name = _named(folder) or next((name for name in WEIGHT_FILES if os.path.lexists(folder / name)), None)
    if name is None:
        like = like_weights(folder)
        found = f"; found {', '.join(like)}" if like else ""
        raise CheckpointError(f"no weights in {folder}: expected one of {', '.join(WEIGHT_FILES)}{found}")
    return folder / name


def like_weights(folder: Path) -> list[str]:
    """Returns files whose names speak of weights, or of an index."""
    names = sorted(file.name for file in folder.iterdir())
    return [name for name in names if name.startswith(_BEGINNINGS) or name.endswith(_ENDS)]


def _named(folder: Path) -> str | None:
    """Returns the file that the config itself names."""
    config = folder / "config.json"
    name = read_json(config).get("transformers_weights") if config.exists() else None
    if name is None:
        return None
    if not isinstance(name, str) or not name.endswith(_ENDS) or "/" in name:
        raise CheckpointError(
            f"{config}: transformers_weights: expected a .safetensors file of the folder, or the index of some, found "
            f"{show(name)}"
        )
    return name


def _shards(folder: Path, index: str) -> list[Path]:
    weight_map = read_json(folder / index).get("weight_map")
    names = weight_map.values() if isinstance(weight_map, dict) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            f"{folder / index}: weight_map: expected an object of file names, found {show(weight_map)}"
        )
    files = [folder / name for name in sorted(set(names))]
    missing = [file.name for file in files if file.parent != folder or not os.path.isfile(file)]  # which takes any name
    if missing:
        shown = listed(list(map(show, missing)), 4)
        raise CheckpointError(f"{index} names shards that are not in {folder}: {shown} of {len(files)}")
    return files
