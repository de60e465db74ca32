"""The container of a GGUF file, or of all parts of a split one: its metadata, and its tensors in float32.

It is read here, for the `gguf` package's reader makes a Python object per token of the vocabulary, which takes seconds.
That package decodes the quantised blocks. Layout: the GGUF specification of ggml, version 2 and 3, little endian.
"""

from __future__ import annotations

import math
import os
import re
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from draftwing.errors import CheckpointError, listed
from draftwing.files import pointer

DECODE_ELEMENTS = 1 << 18  # decoded at once; temporaries fit the cache

MAGIC, STRING, ARRAY = b"GGUF", 8, 9
MAX_DIMS = 4
SCALARS: dict[int, np.dtype[Any]] = {
    kind: np.dtype(code)
    for kind, code in enumerate(("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", "", "", "<u8", "<i8", "<f8"))
    if code
}


class TensorInfo(NamedTuple):
    """shape is in row-major order, the reverse of the file's; offset counts from the start of the file."""

    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True)
class GGUFFile:
    """metadata: scalars and strings as Python values, arrays of strings as lists, of numbers as numpy arrays.
    parts: the others of a split file, whose tensors are among `tensors`."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    data: npt.NDArray[np.uint8]  # the whole file, mapped
    parts: tuple[GGUFFile, ...] = ()

    @property
    def size(self) -> int:
        """Returns bytes of all parts."""
        return len(self.data) + sum(part.size for part in self.parts)

    def dequantized(self, name: str) -> npt.NDArray[np.float32]:
        """Returns the tensor, in its own memory; raises CheckpointError for a type that cannot be decoded."""
        return self.decoded(name, self.raw(name)).reshape(self.tensors[name].shape)

    def decoded(self, name: str, raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """raw: rows of a tensor as it is stored -> [rows, columns]; errors as `dequantized`."""
        kind = self.kind(name)
        try:
            return dequantized(raw, kind)
        except NotImplementedError:
            raise CheckpointError(f"{self.path}: {name} has the type {kind}, which cannot be dequantised") from None

    def kind(self, name: str) -> str:
        """GGML's name of the tensor's type; raises CheckpointError for a type that has none."""
        try:
            return GGMLQuantizationType(self.tensors[name].type_id).name
        except ValueError:
            type_id = self.tensors[name].type_id
            raise CheckpointError(f"{self.path}: {name} has the unknown type {type_id}") from None

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """Returns the tensor as it is stored: [rows, bytes per row]; raises CheckpointError where it is not all
        there."""
        for part in self.parts:
            if name in part.tensors:
                return part.raw(name)
        info, kind = self.tensors[name], self.kind(name)
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        what = f"{name} of type {kind} and shape {list(info.shape)}"
        if info.shape[-1] % block:
            raise CheckpointError(f"{self.path}: {what}: expected rows of a multiple of {block} values")
        rows, row_bytes = math.prod(info.shape[:-1]), info.shape[-1] // block * block_bytes
        if info.offset + rows * row_bytes > len(self.data):
            raise CheckpointError(
                f"{self.path} ends before the data of {what}: expected at least {info.offset + rows * row_bytes} "
                f"bytes, found {len(self.data)}; it was not fully downloaded"
            )
        return self.data[info.offset : info.offset + rows * row_bytes].reshape(rows, row_bytes)

    def mapped(self, name: str) -> npt.NDArray[np.uint8]:
        """`raw` in a mapping of its own, for what stays in the file: pages of all other tensors, which were read once,
        leave memory with the file's mapping."""
        whole = next((part for part in self.parts if name in part.tensors), self)
        return np.memmap(whole.path, np.uint8, "c", whole.tensors[name].offset, self.raw(name).shape)


def is_quantized(type_id: int) -> bool:
    """Returns whether values of the type lie in blocks; of one that is known."""
    sizes = {kind.value: block for kind, (block, _) in GGML_QUANT_SIZES.items()}
    return sizes.get(type_id, 1) > 1


def block_values(kind: str) -> int:
    """Returns values of a block of this type, by GGML's name."""
    return int(GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0])


def dequantized(raw: npt.NDArray[np.uint8], kind: str) -> npt.NDArray[np.float32]:
    """raw [rows, bytes of a row] of GGML's type `kind` -> [rows, columns]; raises NotImplementedError for a type that
    cannot be decoded."""
    ggml = GGMLQuantizationType[kind]
    block, block_bytes = GGML_QUANT_SIZES[ggml]
    columns = raw.shape[1] // block_bytes * block
    out = np.empty((len(raw), columns), np.float32)
    # Some rows at a time bounds the decoder's temporaries; as one long row, because it loops over groups of rows.
    step = max(1, DECODE_ELEMENTS // columns)
    for start in range(0, len(raw), step):
        out[start : start + step] = dequantize(raw[start : start + step].reshape(1, -1), ggml).reshape(-1, columns)
    return out


class _Cursor:
    """Reads the header's values one after the other."""

    def __init__(self, data: npt.NDArray[np.uint8]) -> None:
        self.data, self.position = data.data, 0

    def unpack(self, layout: struct.Struct) -> int:
        (value,) = layout.unpack_from(self.data, self.position)
        self.position += layout.size
        return value

    def u32(self) -> int:
        return self.unpack(_U32)

    def u64(self) -> int:
        return self.unpack(_U64)

    def string(self) -> str:
        length = self.u64()
        start = self.position
        self.position += length
        if self.position > len(self.data):
            raise struct.error("string past the end")
        return str(self.data[start : self.position], "utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            item, count = self.u32(), self.u64()
            if item in SCALARS:
                return self._numbers(SCALARS[item], count)
            if item != STRING:  # the specification has arrays of arrays, and no file does
                raise CheckpointError(f"GGUF arrays of values of type {item} are not supported")
            return self._strings(count)
        if kind not in SCALARS:
            raise CheckpointError(f"unknown GGUF value type {kind}")
        return self._numbers(SCALARS[kind], 1)[0].item()

    def _strings(self, count: int) -> list[str]:
        """Reads strings as `string` does; a vocabulary has 100,000."""
        data, position, end, length_at = self.data, self.position, len(self.data), _U64.unpack_from
        found = []
        for _ in range(count):
            start = position + 8
            position = start + length_at(data, position)[0]
            if position > end:
                raise struct.error("string past the end")
            found.append(str(data[start:position], "utf-8", "replace"))
        self.position = position
        return found

    def _numbers(self, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
        start = self.position
        self.position += dtype.itemsize * count
        if self.position > len(self.data):
            raise struct.error("array past the end")
        return np.frombuffer(self.data[start : self.position], dtype).copy()


def _tensor_info(cursor: _Cursor, path: Path, name: str) -> TensorInfo:
    """Reads the info of the tensor whose name was read last."""
    count = cursor.u32()
    if not 1 <= count <= MAX_DIMS:
        raise CheckpointError(f"{path}: {name}: expected 1 to {MAX_DIMS} dimensions, found {count}")
    shape = tuple(cursor.u64() for _ in range(count))[::-1]
    if min(shape) < 1:
        raise CheckpointError(f"{path}: {name}: expected dimensions of at least 1, found {list(shape)}")
    return TensorInfo(shape, cursor.u32(), cursor.u64())


_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


# How llama.cpp names the parts of a split file.
PART = re.compile(r"(?P<model>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf")
_PART, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"


def open_gguf(path: str | Path) -> GGUFFile:
    """Maps the file and reads its header; of a split one those of all parts, whichever `path` is. Raises
    CheckpointError when it is not GGUF version 2 or 3, or a part is not there."""
    file = _open_one(Path(path))
    count = file.metadata.get(_COUNT, 1)
    if type(count) is not int or count < 0:
        raise CheckpointError(f"{path}: {_COUNT}: expected a number of parts, found {count!r}")
    if count <= 1:
        return file
    folder, match = file.path.parent, PART.fullmatch(file.path.name)
    if match is None or int(match["count"]) != count:
        raise CheckpointError(
            f"{path} is one of {count} parts of a split file: expected a name that says so, such as "
            f"model-00001-of-{count:05}.gguf"
        )
    paths = [folder / f"{match['model']}-{part:05}-of-{match['count']}.gguf" for part in range(1, count + 1)]
    missing = [path.name for path in paths if not os.path.isfile(path)]
    if missing:
        raise CheckpointError(f"parts of {path} that are not next to it: {listed(missing, 4)}, of {count}")
    return _together(*map(_open_one, paths))


def _together(first: GGUFFile, *others: GGUFFile) -> GGUFFile:
    """Returns the first part, with the tensors of all."""
    tensors: dict[str, TensorInfo] = {}
    for number, part in enumerate((first, *others)):
        for key, expected in ((_PART, number), (_COUNT, 1 + len(others))):
            found = part.metadata.get(key)
            if type(found) is not int or found != expected:
                raise CheckpointError(
                    f"{part.path}: {key}: expected {expected}, found {found!r}: is it another model's?"
                )
        twice = part.tensors.keys() & tensors.keys()
        if twice:
            raise CheckpointError(f"{part.path}: the tensor {min(twice)} is there twice")
        tensors |= part.tensors
    expected = first.metadata.get(_TENSORS, len(tensors))
    if type(expected) is not int or expected != len(tensors):
        raise CheckpointError(f"{first.path}: expected {expected!r} tensors in all parts, found {len(tensors)}")
    return replace(first, tensors=tensors, parts=others)


def _open_one(path: Path) -> GGUFFile:
    """Opens one file as `open_gguf` does."""
    if not path.is_file():
        raise CheckpointError(f"expected a GGUF file, found none at {path}")
    data = np.memmap(path, np.uint8, "c") if path.stat().st_size else np.empty(0, np.uint8)
    cursor = _Cursor(data)
    if bytes(data[:4]) != MAGIC:
        why = pointer(path) or f"it starts with {bytes(data[:4])!r}"
        raise CheckpointError(f"{path} is not a GGUF file: {why}")
    try:
        cursor.position = 4
        version = cursor.u32()
        if version not in (2, 3):
            raise CheckpointError(f"{path}: expected little-endian GGUF version 2 or 3, found {version}")
        tensor_count, entry_count = cursor.u64(), cursor.u64()
        metadata: dict[str, Any] = {}
        for _ in range(entry_count):
            key = cursor.string()
            if key in metadata:
                raise CheckpointError(f"{path}: the key {key} is there twice")
            metadata[key] = cursor.value(cursor.u32())
        infos: dict[str, TensorInfo] = {}
        for _ in range(tensor_count):
            name = cursor.string()
            if name in infos:
                raise CheckpointError(f"{path}: the tensor {name} is there twice")
            infos[name] = _tensor_info(cursor, path, name)
    except struct.error:
        raise CheckpointError(f"{path} ends within its header; it was not fully downloaded") from None
    align = metadata.get("general.alignment", 32)
    if type(align) is not int or align < 1 or align & (align - 1):
        raise CheckpointError(f"{path}: general.alignment: expected a power of two, found {align!r}")
    start = -(-cursor.position // align) * align  # tensor data begins at the next multiple of the alignment
    tensors = {name: info._replace(offset=start + info.offset) for name, info in infos.items()}
    return GGUFFile(path, metadata, tensors, data)
