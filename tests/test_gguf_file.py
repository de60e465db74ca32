"""GGUF files that are broken: an error that says what is wrong, and nothing is read that is not there."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from block_ops import BlockTorchOps
from gguf import GGMLQuantizationType as Type
from tiny_gguf import write

from draftwing.errors import CheckpointError
from draftwing.gguf_file import open_gguf
from draftwing.layers.linear_ops.blocks import BlockFormat
from draftwing.models.gguf import model_config
from draftwing.models.loader import load_model

Q8_0, Q4_1, Q4_K = 8, 3, 12
U32, STRING, ARRAY, U64 = 4, 8, 9, 10


class Entry(NamedTuple):
    """A tensor as the header names it. dims: in the file's order, columns first."""

    name: str
    dims: tuple[int, ...]
    type_id: int
    offset: int = 0


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def file(path: Path, tensors: list[Entry], data: int = 0, metadata: tuple[tuple[str, int, bytes], ...] = ()) -> Path:
    """Writes a header, padding and so many bytes of data."""
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, kind, value in metadata:
        out += text(key) + struct.pack("<I", kind) + value
    for name, dims, type_id, offset in tensors:
        out += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, offset)
    path.write_bytes(out + bytes(-len(out) % 32) + bytes(data))
    return path


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def test_a_sound_one(tmp_path: Path) -> None:
    entries = [Entry("a", (64, 3), Q8_0), Entry("b", (32,), Q4_1, 224)]
    found = open_gguf(file(tmp_path / "m.gguf", entries, 224 + 20))
    assert found.raw("a").shape == (3, 68) and found.raw("b").shape == (1, 20)
    assert (found.kind("a"), found.kind("b")) == ("Q8_0", "Q4_1")
    assert not found.dequantized("a").any()


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (Entry("w", (64, 3), Q8_0, 1), r"ends before the data of w of type Q8_0 and shape \[3, 64\]"),
        (Entry("w", (64, 4), Q8_0), r"ends before the data of w of type Q8_0 and shape \[4, 64\]: expected at least"),
        (Entry("w", (64, 3), Q8_0, 1 << 40), "ends before the data of w of type Q8_0"),
        (Entry("w", (64, 3), Q8_0, (1 << 64) - 32), "ends before the data of w of type Q8_0"),
        (Entry("w", (64, 1 << 58), Q8_0), "ends before the data of w of type Q8_0"),  # bytes that overflow 64 bits
        (Entry("w", (1 << 63, 2), Q8_0), "ends before the data of w of type Q8_0"),
        (Entry("w", (32, (1 << 32) + 1, 1 << 32), Q8_0), "ends before the data of w of type Q8_0"),  # rows do
        (Entry("w", (48, 3), Q8_0), r"w of type Q8_0 and shape \[3, 48\]: expected rows of a multiple of 32 values"),
        (Entry("w", (128, 1), Q4_K), r"w of type Q4_K and shape \[1, 128\]: expected rows of a multiple of 256"),
        (Entry("w", (64, 3), 99), "w has the unknown type 99"),
        (Entry("w", (64, 3), 4), "w has the unknown type 4"),  # was once one
        (Entry("w", (64, 3), (1 << 32) - 1), "w has the unknown type 4294967295"),
    ],
)
def test_tensors_that_are_not_there(tmp_path: Path, entry: Entry, message: str) -> None:
    found = open_gguf(file(tmp_path / "m.gguf", [entry], 3 * 68))
    for read in (found.raw, found.dequantized):
        with pytest.raises(CheckpointError, match=message):
            read("w")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([Entry("w", (64, 0), Q8_0)], r"w: expected dimensions of at least 1, found \[0, 64\]"),
        ([Entry("w", (0,), Q8_0)], r"w: expected dimensions of at least 1, found \[0\]"),
        ([Entry("w", (), Q8_0)], "w: expected 1 to 4 dimensions, found 0"),
        ([Entry("w", (1, 1, 1, 1, 64), Q8_0)], "w: expected 1 to 4 dimensions, found 5"),
        ([Entry("w", (32,), Q8_0), Entry("w", (32,), Q8_0)], "the tensor w is there twice"),
    ],
)
def test_tensors_that_cannot_be(tmp_path: Path, entries: list[Entry], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_gguf(file(tmp_path / "m.gguf", entries, 1000))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ((("general.alignment", U32, u32(0)),), "general.alignment: expected a power of two, found 0"),
        ((("general.alignment", U32, u32(48)),), "general.alignment: expected a power of two, found 48"),
        ((("general.alignment", STRING, text("32")),), "general.alignment: expected a power of two, found '32'"),
        ((("general.alignment", 5, struct.pack("<i", -32)),), "expected a power of two, found -32"),
        ((("a", U32, u32(1)), ("a", U32, u32(1))), "the key a is there twice"),
        ((("a", 13, b""),), "unknown GGUF value type 13"),
        ((("a", ARRAY, struct.pack("<IQ", ARRAY, 1) * 5000),), "arrays of values of type 9 are not supported"),
        ((("a", ARRAY, struct.pack("<IQ", 99, 1 << 60)),), "arrays of values of type 99 are not supported"),
        ((("a", ARRAY, struct.pack("<IQ", U64, 1 << 62)),), "ends within its header"),
        ((("a", ARRAY, struct.pack("<IQ", STRING, (1 << 64) - 1)),), "ends within its header"),
        ((("a", STRING, struct.pack("<Q", (1 << 64) - 1)),), "ends within its header"),
    ],
)
def test_headers_that_cannot_be(tmp_path: Path, metadata: tuple[Any, ...], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_gguf(file(tmp_path / "m.gguf", [], 64, metadata))


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    """Wherever the file ends, with blocks and dequantised."""
    whole = write(tmp_path / "whole.gguf", "llama", Type.Q4_1).read_bytes()
    cut, form = tmp_path / "cut.gguf", BlockFormat("Q8_0", BlockTorchOps(torch.device("cpu")))
    lengths = np.random.default_rng(0).integers(0, len(whole), 40).tolist()
    for length in [*range(0, 40, 3), *lengths, len(whole) - 33]:
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            load_model(cut, torch.float32, "cpu")
        with pytest.raises(CheckpointError):
            load_model(cut, torch.float32, "cpu", weight_format=form)


def test_any_changed_byte_of_a_header_is_an_error_or_read(tmp_path: Path) -> None:
    """No other exception, and no read outside of the file."""
    whole = write(tmp_path / "whole.gguf", "llama", Type.Q8_0).read_bytes()
    changed, form = tmp_path / "changed.gguf", BlockFormat("Q8_0", BlockTorchOps(torch.device("cpu")))
    generator, end = np.random.default_rng(1), whole.index(b"ffn_norm.weight")
    for at in generator.integers(0, end, 150).tolist():
        changed.write_bytes(whole[:at] + bytes([int(generator.integers(256))]) + whole[at + 1 :])
        try:
            found = open_gguf(changed)
            for name in found.tensors:
                found.raw(name)
            model_config(found)
            load_model(changed, torch.float32, "cpu", weight_format=form)
        except CheckpointError:
            pass


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.block_count", 1 << 31, r"llama.block_count: expected an integer from 1 to .*, found 2147483648"),
        ("llama.block_count", 1000, "llama.block_count is 1000, and there are 11 tensors"),
        ("llama.feed_forward_length", 0, "llama.feed_forward_length: expected an integer from 1 to .*, found 0"),
        ("llama.attention.head_count", 0, "llama.attention.head_count: expected an integer from 1 to .*, found 0"),
        ("llama.embedding_length", 96, r"expected shape \[.*96\], found \[.*64\]"),
    ],
)
def test_sizes_that_cannot_be(tmp_path: Path, key: str, value: int, message: str) -> None:
    path = write(tmp_path / "m.gguf", "llama", Type.Q8_0)
    raw = path.read_bytes()
    at = raw.index(text(key)) + len(text(key)) + 4
    path.write_bytes(raw[:at] + u32(value) + raw[at + 4 :])
    with pytest.raises(CheckpointError, match=message):
        load_model(path, torch.float32, "cpu", weight_format=BlockFormat("Q8_0", BlockTorchOps(torch.device("cpu"))))
