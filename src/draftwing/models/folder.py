"""The tensors of a model folder, of whichever files hold its weights."""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftwing.errors import CheckpointError
from draftwing.files import pointer
from draftwing.models.gguf_tensors import Progress
from draftwing.models.weight_files import chosen_weights, like_weights, weight_files
from draftwing.models.weight_map import PER_LAYER, canonical
from draftwing.parallel.cut import Cut
from draftwing.requests.refusals import show

logger = logging.getLogger(__name__)


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
    aside = [name for name in like_weights(folder) if folder / name not in (chosen_weights(folder), *files)]
    if aside:
        logger.info("weights come from %s; these files are not read: %s", chosen_weights(folder), ", ".join(aside))
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
