"""GGUF files that are broken: an error that says what is wrong, and nothing is read that is not there."""

from __future__ import annotations

import struct
from collections.abc import Callable
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
from draftwing.layers.linear_ops.dense import DENSE
from draftwing.models.gguf_config import model_config
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
    lengths = np.random.default_rng(0).integers(0, len(whole), 20).tolist()
    for length in [*range(0, 40, 5), *lengths, len(whole) - 33]:
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
    for at in generator.integers(0, end, 80).tolist():
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


def parts_of(folder: Path, tensors: int, small_first: bool = False) -> list[Path]:
    """Writes a model in parts of so many tensors, as the gguf package does."""
    write(folder / "m.gguf", "qwen3", Type.Q8_0, split=tensors, small_first=small_first)
    return sorted(folder.glob("m-*-of-*.gguf"))


@pytest.mark.parametrize(("tensors", "small_first"), [(5, False), (1, False), (4, True)])
def test_parts_of_a_split_file_are_read_together(tmp_path: Path, tensors: int, small_first: bool) -> None:
    whole = open_gguf(write(tmp_path / "whole.gguf", "qwen3", Type.Q8_0))
    parts = parts_of(tmp_path, tensors, small_first)
    assert len(parts) >= 3
    for path in parts:
        found = open_gguf(path)
        assert found.tensors.keys() == whole.tensors.keys() and model_config(found) == model_config(whole)
        assert all(np.array_equal(found.raw(name), whole.raw(name)) for name in whole.tensors)
        assert found.metadata["tokenizer.ggml.tokens"] == whole.metadata["tokenizer.ggml.tokens"]
    seen: list[tuple[int, int]] = []
    form = BlockFormat("Q8_0", BlockTorchOps(torch.device("cpu")))
    for weight_format in (DENSE, form):
        model, expected = (
            load_model(path, torch.float32, "cpu", lambda *now: seen.append(now), weight_format=weight_format)
            for path in (parts[-1], whole.path)
        )
        for name, value in expected.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name
    assert seen[len(seen) // 4 - 1][0] <= sum(part.stat().st_size for part in parts) == seen[0][1]


def test_missing_parts_are_named(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, 3)
    parts[1].unlink()
    parts[3].unlink()
    for path in (parts[0], parts[2]):
        with pytest.raises(CheckpointError) as error:
            load_model(path, torch.float32, "cpu")
        assert all(part.name in str(error.value) for part in (parts[1], parts[3]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda parts: parts[1].write_bytes(parts[2].read_bytes()), "split.no: expected 1, found 2"),
        (lambda parts: parts[1].rename(parts[1].with_name("renamed.gguf")), "a name that says so"),
        (lambda parts: parts[1].write_bytes(parts[1].read_bytes()[:-40]), "it was not fully downloaded"),
        (lambda parts: parts[2].write_bytes(b""), "not a GGUF file"),
        (lambda parts: write(parts[1], "qwen3"), "split.no: expected 1, found None"),
    ],
)
def test_parts_that_are_of_something_else(tmp_path: Path, change: Callable[[list[Path]], Any], message: str) -> None:
    parts = parts_of(tmp_path, 4)
    change(parts)
    renamed = tmp_path / "renamed.gguf"
    with pytest.raises(CheckpointError, match=message):
        load_model(renamed if renamed.exists() else parts[0], torch.float32, "cpu")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ((("split.count", STRING, text("2")),), "split.count: expected a number of parts, found '2'"),
        ((("split.count", 5, struct.pack("<i", -2)),), "split.count: expected a number of parts, found -2"),
        ((("split.count", U64, struct.pack("<Q", 2**60)),), "a name that says so"),
        ((("split.count", U32, u32(2)), ("split.no", U32, u32(0))), "split.no: expected 1, found 0"),
        (
            (("split.count", U32, u32(2)), ("split.no", ARRAY, u32(U32) + bytes(8))),
            "split.no: expected 0, found array",
        ),
    ],
)
def test_hostile_parts(tmp_path: Path, metadata: tuple[Any, ...], message: str) -> None:
    paths = [file(tmp_path / f"m-0000{i}-of-00002.gguf", [Entry("a", (32,), Q8_0)], 64, metadata) for i in (1, 2)]
    with pytest.raises(CheckpointError, match=message):
        open_gguf(paths[0])


def test_the_same_tensor_in_two_parts_and_one_that_is_in_none(tmp_path: Path) -> None:
    for second, message in (("a", "the tensor a is there twice"), ("b", "expected 3 tensors in all parts, found 2")):
        for i, name in enumerate(("a", second)):
            metadata = [("split.count", U32, u32(2)), ("split.no", U32, u32(i)), ("split.tensors.count", U32, u32(3))]
            path = tmp_path / f"m-0000{i + 1}-of-00002.gguf"
            file(path, [Entry(name, (32,), Q8_0)], 64, tuple(metadata))
        with pytest.raises(CheckpointError, match=message):
            open_gguf(path)
