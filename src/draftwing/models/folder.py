"""The files of a model folder: its JSON, and the tensors of whichever files hold its weights."""

from __future__ import annotations

import logging
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftwing.errors import CheckpointError, listed
from draftwing.files import load_json, pointer
from draftwing.models.gguf_tensors import Progress
from draftwing.models.weight_map import PER_LAYER, canonical
from draftwing.parallel.cut import Cut
from draftwing.requests.refusals import show

logger = logging.getLogger(__name__)

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


def folder_tensors(
    folder: Path,
    progress: Progress | None = None,
    cuts: Mapping[str, Cut] | None = None,
    unread: Callable[[str], bool] = lambda name: False,
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name as stored, tensor on the CPU) of every shard; raises CheckpointError for a folder without weights.
    cuts: by canonical name, where a part is wanted.  unread: says of a canonical name whether nothing is."""
    cuts = cuts or {}
    files = weight_files(folder)
    aside = [name for name in _like_weights(folder) if folder / name not in (_chosen(folder), *files)]
    if aside:
        logger.info("weights come from %s; these files are not read: %s", _chosen(folder), ", ".join(aside))
    total, done = sum(file.stat().st_size for file in files), 0
    for file in files:
        read = _safetensors if file.suffix == ".safetensors" else _pickled
        for name, tensor in read(file, cuts, unread):
            yield name, tensor
            done += tensor.nbytes
            if progress is not None:
                progress(min(done, total), total)
    if progress is not None:
        progress(total, total)


def bytes_of(path: Path) -> int:
    """Returns the size of a model's file, or of the files of its folder."""
    files = [path] if path.is_file() else path.iterdir() if path.is_dir() else []
    return sum(file.stat().st_size for file in files if file.is_file())


def weight_files(folder: Path) -> list[Path]:
    """Returns the files that hold a folder's weights: one, or the shards of an index. Raises CheckpointError where
    there are none, or not all."""
    chosen = _chosen(folder)
    if not os.path.isfile(chosen):  # a pipe would be waited for
        raise CheckpointError(f"{chosen}: expected a file, found none")
    return _shards(folder, chosen.name) if chosen.name.endswith(_INDEX) else [chosen]


def _chosen(folder: Path) -> Path:
    """Returns the file of weights, or the index."""
    name = _named(folder) or next((name for name in WEIGHT_FILES if os.path.lexists(folder / name)), None)
    if name is None:
        like = _like_weights(folder)
        found = f"; found {', '.join(like)}" if like else ""
        raise CheckpointError(f"no weights in {folder}: expected one of {', '.join(WEIGHT_FILES)}{found}")
    return folder / name


def _like_weights(folder: Path) -> list[str]:
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


def _safetensors(file: Path, cuts: Mapping[str, Cut], unread: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(file, framework="pt", device="cpu") as shard:
            for name in shard.keys():  # noqa: SIM118 (not a dict)
                if unread(canonical(name)):
                    continue
                cut = cuts.get(canonical(name))
                if canonical(name) == f"{PER_LAYER}.weight":
                    # In a mapping of its own, so that pages of all others, which are read once, leave memory.
                    with safe_open(file, framework="pt", device="cpu") as alone:
                        yield name, alone.get_tensor(name)
                    continue
                yield name, shard.get_tensor(name) if cut is None else cut.read(name, shard.get_slice(name))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {_why(file, error)}") from None


def _pickled(file: Path, cuts: Mapping[str, Cut], unread: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    """Yields a shard written by torch.save; `weights_only` refuses anything but tensors and plain containers."""
    try:
        if _deflated(file):
            raise CheckpointError(f"{file}: expected an archive as torch.save writes it, found compressed records")
        try:
            shard = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            # The format before torch 1.6 cannot be mapped.
            shard = torch.load(file, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # its unpickler raises whatever a malformed file makes it meet
        raise CheckpointError(f"{file} cannot be read: {_why(file, error)}") from None
    if not isinstance(shard, dict):
        raise CheckpointError(f"{file}: expected a dictionary of tensors, found {type(shard).__name__}")
    for name, value in shard.items():
        if isinstance(value, Tensor):
            if not isinstance(name, str) or value.layout != torch.strided or value.is_meta:
                found = f"{value.layout} on {value.device.type}"
                raise CheckpointError(f"{file}: expected dense tensors by name, found {show(name)} of {found}")
            if unread(canonical(name)):
                continue
            cut = cuts.get(canonical(name))
            yield name, value if cut is None else cut.of_tensor(name, value)


def _why(file: Path, error: Exception) -> str:
    """Returns why a file cannot be read: libraries do not know of pointers."""
    return (pointer(file) if file.is_file() else "") or str(error) or type(error).__name__


def _deflated(file: Path) -> bool:
    """Returns whether it is an archive with compressed records, whose bytes would be mapped as if they were values."""
    try:
        with zipfile.ZipFile(file) as archive:
            return any(record.compress_type != zipfile.ZIP_STORED for record in archive.infolist())
    except (zipfile.BadZipFile, OSError):
        return False
