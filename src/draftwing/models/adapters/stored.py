"""What is in the files of an adapter: their bytes, read by several threads, and their tensors."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from draftwing.errors import CheckpointError
from draftwing.machine import processors
from draftwing.models.adapters.files import FILES, PART, WEIGHTS, folder_digest, joined_digest, part_digest, read_config

THREADS: Final = 8  # that read a file; digests are made at about 1 GB/s each
_MOST_HEADER: Final = 100 << 20  # bytes, as the format says
_DTYPES: Final = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def read_whole(path: Path, most: int) -> tuple[Tensor, str]:
    """Returns a file's content, [n] uint8, and its digest, by several threads that leave other ones of Python alone.
    Raises CheckpointError as `read_file` does."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe is not waited for
    except OSError as error:
        if not path.exists():
            raise CheckpointError(f"{path.name} is missing in {path.parent}") from None
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{path.name} is missing in {path.parent}")
        if found.st_size > most:
            raise CheckpointError(f"{path}: expected at most {most} bytes, for no adapter of this model has more")
        data = torch.empty(found.st_size, dtype=torch.uint8)
        whole = data.numpy().data

        def read(begin: int) -> bytes:
            part = whole[begin : begin + PART]
            done = 0
            while done < len(part):
                count = os.preadv(file, [part[done:]], begin + done)
                if not count:
                    raise CheckpointError(f"{path} cannot be read: it became shorter meanwhile")
                done += count
            return part_digest(part)

        with ThreadPoolExecutor(min(THREADS, processors().threads), "adapter") as pool:
            return data, joined_digest(pool.map(read, range(0, len(data), PART)))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    finally:
        os.close(file)


def tensors_of(data: Tensor, path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a file in safetensors' format, in the memory of its content where they are aligned there.
    Raises CheckpointError."""
    try:
        size = int.from_bytes(data[:8].numpy().tobytes(), "little")
        if len(data) < 8 or size > min(len(data) - 8, _MOST_HEADER):
            raise ValueError("there is no header")
        header = json.loads(data[8 : 8 + size].numpy().tobytes())
        begin, found = 8 + size, dict[str, Tensor]()
        left = len(data) - begin
        flat = {kind: data[: len(data) // kind.itemsize * kind.itemsize].view(kind) for kind in _DTYPES.values()}
        for name, one in header.items():
            if name == "__metadata__":
                continue
            found[name] = _tensor(name, data, begin, flat, **one)
            left -= found[name].nbytes
            if left < 0:  # else a small file could ask for any memory
                raise ValueError("tensors lie in the same place")
        return found
    except (ValueError, KeyError, AttributeError, TypeError, OverflowError, RecursionError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def _tensor(
    name: str, data: Tensor, first: int, flat: Mapping[torch.dtype, Tensor], dtype: str, shape: list[int],
    data_offsets: list[int],
) -> Tensor:  # fmt: skip
    """first: byte of the first value.  flat: the content by type, of which a tensor is one operation of torch's."""
    if dtype not in _DTYPES:
        raise ValueError(f"{name[:200]!r} is of an unknown type, {dtype[:20]!r}")
    (begin, end), kind = data_offsets, _DTYPES[dtype]
    numbers = [begin, end, *shape]
    if not all(type(one) is int and one >= 0 for one in numbers):
        raise ValueError(f"{name[:200]!r} has sizes that are no whole numbers")
    if not begin <= end <= len(data) - first or end - begin != math.prod(shape) * kind.itemsize:
        raise ValueError(f"{name[:200]!r} does not fit its place")
    begin, end = first + begin, first + end
    if begin % kind.itemsize:
        return data[begin:end].clone().view(kind).view(shape)
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return flat[kind].as_strided(shape, strides, begin // kind.itemsize)


def stored_digest(path: Path) -> str:
    """Returns the digest that an adapter has when it is read: of its files. Raises CheckpointError."""
    if path.is_file():
        return read_whole(path, path.stat().st_size)[1]
    for name in FILES:
        if not (path / name).is_file():
            raise CheckpointError(f"{name} is missing in {path}")
    weights = path / WEIGHTS
    return folder_digest(read_config(path)[1], read_whole(weights, weights.stat().st_size)[1])
