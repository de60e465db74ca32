"""Adapters as they lie in a slot: a few copies fill it with the same as factor by factor. And how files are read."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from types import SimpleNamespace

import moe_models
import pytest
import torch
from models.adapters.test_families import PARAMETERS, write
from safetensors.torch import load_file, save
from tiny_adapters import write_adapter
from tiny_checkpoint import write_checkpoint

from draftwing.engine.devices import pick_device
from draftwing.errors import CheckpointError
from draftwing.models.adapters import adapter as adapters
from draftwing.models.adapters import files, image
from draftwing.models.adapters import stored as contents
from draftwing.models.adapters.adapter import Adapter, AdapterSlots
from draftwing.models.adapters.files import digest_of_bytes
from draftwing.models.adapters.read import read_adapter
from draftwing.models.adapters.stored import read_whole, tensors_of
from draftwing.models.decoder import WIDE
from draftwing.models.loader import load_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


def slots_of(tiny: Path, rank: int = 4) -> AdapterSlots:
    return AdapterSlots(load_model(tiny, torch.float32, "cpu"), 3, rank)


def stored(slots: AdapterSlots, tiny: Path, folder: Path, **given: object) -> Adapter:
    write_adapter(folder, tiny, **given)  # type: ignore[arg-type]
    return slots.targets.fit(read_adapter(folder, slots.targets.config, 1 << 24))


def memory(size: int) -> torch.Tensor:
    return torch.full((size,), 255, dtype=torch.uint8)  # NaN, wherever nothing is written


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize(
    "given",
    [{}, {"rank": 3}, {"rank": 2, "targets": ("q_proj", "down_proj")}, {"dtype": torch.bfloat16}],
    ids=["whole", "smaller", "some", "of another type"],
)
def test_an_image_is_the_same(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, object], threads: int
) -> None:
    monkeypatch.setattr(image, "THREADS", threads)
    monkeypatch.setattr(image, "PART_BYTES", 2_000)  # so that there are several
    one, other = slots_of(tiny), slots_of(tiny)
    adapter, before = stored(one, tiny, tmp_path / "one", seed=1, **given), stored(one, tiny, tmp_path / "two", seed=2)
    imaged = one.imaged(adapter, memory)
    assert len(imaged.image) > 1
    one.put(2, before)
    other.put(2, before)
    one.fill(2, torch.cat(list(imaged.image)))
    other.put(2, adapter)
    for name, weights in one.weights.items():
        for found, expected in zip(weights[:4], other.weights[name][:4], strict=True):
            assert torch.equal(found, expected), name
    other.put(3, imaged)  # its factors are views of the image now
    for weights in other.weights.values():
        assert all(torch.equal(part[1], part[2]) for part in weights[:4])


def test_several_ranks_get_factors_of_their_own(tiny: Path, tmp_path: Path) -> None:
    slots = slots_of(tiny)
    adapter = stored(slots, tiny, tmp_path / "one")
    slots._ranks = SimpleNamespace(size=2)  # type: ignore[assignment]
    imaged = slots.imaged(adapter, memory)
    assert not imaged.image
    assert all(one.down.untyped_storage().nbytes() == one.down.nbytes for one in imaged.factors.values())


def test_without_room_for_an_image_factors_serve(tiny: Path, tmp_path: Path) -> None:
    def full(size: int) -> torch.Tensor:
        raise RuntimeError("out of memory")

    slots = slots_of(tiny)
    adapter = stored(slots, tiny, tmp_path / "one")
    assert slots.imaged(adapter, full) is adapter


def test_images_leave_memory_to_others(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter of few factors has an image as large as a slot."""
    slots = slots_of(tiny, 64)
    adapter, size = stored(slots, tiny, tmp_path / "one", targets=("q_proj",)), sum(slots.layout.sizes)
    assert size > 100 * adapter.nbytes
    for free, images in ((size, False), ((1 << 30) + 4 * size - 1, False), ((1 << 30) + 4 * size, True), (None, True)):
        monkeypatch.setattr(adapters, "free_memory", lambda free=free: free)
        assert bool(slots.imaged(adapter, memory).image) == images


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_slot_of_a_gpu(tiny: Path, tmp_path: Path) -> None:
    """Its image is page-locked, and crosses the bus beside what runs."""
    device = pick_device("cuda")
    slots = AdapterSlots(load_model(tiny, torch.bfloat16, device.device), 3, 4)
    imaged = slots.imaged(stored(slots, tiny, tmp_path / "one", rank=3), device.host_memory)
    assert imaged.image and all(part.is_pinned() for part in imaged.image)
    arrived, _ = device.copy_in(imaged.image)
    slots.fill(1, arrived)
    slots.put(2, imaged)
    for name, weights in slots.weights.items():
        assert all(torch.equal(part[0], part[1]) for part in weights[:4]), name


# -- files


def test_tensors_are_those_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (files, contents):
        monkeypatch.setattr(module, "PART", 1000)
    kinds = torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool
    tensors = {str(kind): (torch.arange(-105, 105).view(2, 3, 35) / 3).to(kind) for kind in kinds}
    tensors |= {"none": torch.zeros(0, 4), "one": torch.tensor(2.5)}
    path = tmp_path / "some.safetensors"
    path.write_bytes(save(tensors, {"format": "pt"}))
    data, digest = read_whole(path, 1 << 20)
    assert digest == digest_of_bytes(memoryview(path.read_bytes()))
    found, expected = tensors_of(data, path), load_file(path)
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        assert found[name].dtype == one.dtype and torch.equal(found[name], one), name
    path.write_bytes(path.read_bytes()[:-1] + b"\x77")
    assert read_whole(path, 1 << 20)[1] != digest
    with pytest.raises(CheckpointError, match="expected at most 100 bytes"):
        read_whole(path, 100)


ONE = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


@pytest.mark.parametrize(
    "header",
    [
        ONE | {"shape": [2, 4]}, ONE | {"data_offsets": [4, 28]}, ONE | {"data_offsets": [24, 0]}, ONE | {"dtype": "X"},
        ONE | {"shape": [-2, -3]}, ONE | {"shape": [2, True, 3]}, ONE | {"shape": 6}, ONE | {"more": 1}, {"shape": [6]},
        [], {**ONE, "data_offsets": [0, 8, 24]}, {**ONE, "data_offsets": ["0", "24"]}, None,
    ],
)  # fmt: skip
def test_headers_that_are_refused(tmp_path: Path, header: object) -> None:
    text = json.dumps({"x": header}).encode()
    data = struct.pack("<Q", len(text)) + text + bytes(24)
    for bad in (data, data[:5], struct.pack("<Q", 1 << 60) + data[8:], struct.pack("<Q", 3) + b"[1]", b""):
        with pytest.raises(CheckpointError, match="cannot be read"):
            tensors_of(torch.frombuffer(bytearray(bad or b"\0"), dtype=torch.uint8), tmp_path / "x")


def file_of(header: dict[str, object], size: int) -> torch.Tensor:
    text = json.dumps(header).encode()
    data = torch.zeros(8 + len(text) + size, dtype=torch.uint8)
    data[: 8 + len(text)] = torch.frombuffer(bytearray(struct.pack("<Q", len(text)) + text), dtype=torch.uint8)
    return data


def test_tensors_in_one_place_are_refused(tmp_path: Path) -> None:
    """Each that is not aligned is copied, so a small file could take any memory."""
    header: dict[str, object] = {str(at): ONE | {"data_offsets": [1, 25]} for at in range(2)}
    with pytest.raises(CheckpointError, match="in the same place"):
        tensors_of(file_of(header, 40), tmp_path / "x")


@pytest.mark.parametrize("name", ["x", "xx", "xxx", "xxxx"])
def test_tensors_lie_anywhere(tmp_path: Path, name: str) -> None:
    """Headers of other writers have any length, and some tensors no elements."""
    none = {"dtype": "F32", "shape": [0, 3], "data_offsets": [0, 0]}
    found = tensors_of(file_of({name: ONE, "none": none}, 24), tmp_path / "x")
    assert torch.equal(found[name], torch.zeros(2, 3)) and found["none"].shape == (0, 3)


def test_memory_that_is_asked_for_ahead() -> None:
    """It is taken once, and what is missing is asked for at once; without room the next image asks again."""
    asked: list[int] = []

    def memory(size: int) -> torch.Tensor:
        asked.append(size)
        if len(asked) == 6:
            raise RuntimeError("no room")
        return torch.empty(size, dtype=torch.uint8)

    spare = image.SpareMemory([3, 5])
    spare.fill(memory, 0)
    assert [len(part) for part in spare.take(memory)] == [3, 5] and asked == [3, 5]
    assert [len(part) for part in spare.take(memory)] == [3, 5] and asked == [3, 5, 3, 5]
    spare.fill(memory, 0)
    assert asked[4:] == [3, 5]
    assert [len(part) for part in spare.take(memory)] == [3, 5] and asked[6:] == [5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lies", ["turned", "apart", "alone"])
def test_bits_stay_when_their_tensor_goes(dtype: torch.dtype, lies: str) -> None:
    """Of tensors that lie otherwise, as those of an expert among all and of a head, a copy has them."""
    own = torch.randn(16, 3, 40, dtype=torch.float64).to(dtype)
    views = {"turned": own.permute(0, 2, 1), "apart": own[..., ::2], "alone": own[:, :2]}[lies].unbind(0)
    found = [image.bits_of(one) for one in views]
    again = [torch.full_like(one.contiguous(), torch.nan) for one in views]  # memory that was given back is taken
    for bits, one in zip(found, views, strict=True):
        kind = torch.int32 if dtype == torch.float32 else torch.int16
        assert torch.equal(torch.from_numpy(bits.copy()), one.contiguous().view(kind))
    assert len(again) == len(found)


@pytest.mark.parametrize("kind", ["deepseek-v2", "glm4-moe"])
def test_an_image_of_factors_that_are_parts_of_others(tmp_path: Path, kind: str) -> None:
    """Of all experts, and of latents' heads, which lie by columns in a file."""
    theirs = moe_models.reference(kind)
    theirs.save_pretrained(tmp_path / "model")
    experts = {name: value for name, value in theirs.named_parameters() if name.endswith(PARAMETERS)}
    named = theirs.named_modules()
    heads = {name: one.weight for name, one in named if name.endswith(".kv_b_proj")}
    with torch.no_grad():
        write(tmp_path / "adapter", heads, experts)
    one, other = (AdapterSlots(load_model(tmp_path / "model", torch.float32, "cpu"), 2, 3, wide=WIDE) for _ in range(2))
    adapter = one.targets.fit(read_adapter(tmp_path / "adapter", one.targets.config, 1 << 24))
    one.fill(1, torch.cat(list(one.imaged(adapter, memory).image)))
    other.put(1, adapter)
    for name, weights in one.weights.items():
        for found, expected in zip(weights[:4], other.weights[name][:4], strict=True):
            assert torch.equal(found, expected), name
