"""What towers make of pictures, against transformers in float32."""

from __future__ import annotations

import gc
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from image_models import KINDS, PAD, encoded, features, picture, reference, write_model
from torch import Tensor

from draftwing.errors import CheckpointError
from draftwing.images.processing import Tile
from draftwing.images.reader import Picture, Prompt, placed, read
from draftwing.layers.linear_ops.blocks import BlockFormat
from draftwing.layers.linear_ops.dense import DENSE
from draftwing.models.loader import load_config
from draftwing.models.towers.base import Tower
from draftwing.models.towers.loading import load_tower, stored_tensors
from draftwing.models.towers.patch_merger import PatchMergerConfig
from draftwing.models.weight_map import canonical
from draftwing.ops import make_ops
from draftwing.ops.table import PLAIN, TorchOps
from draftwing.requests.images import RequestImage, axes_of
from draftwing.text.tokenizer import load_tokenizer

CPU = torch.device("cpu")
PICTURES = [(40, 30), (200, 17), (8, 8), (300, 200), (16, 100), (1, 1), (37, 53)]


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tower") / kind, kind)


@pytest.fixture(scope="module")
def tower(folder: Path) -> Tower:
    config = load_config(folder).tower
    assert config is not None
    return load_tower(config, stored_tensors(folder, config), torch.float32, CPU, DENSE, PLAIN)


def shown(folder: Path, tower: Tower, *sizes: tuple[int, int], text: tuple[int, ...] = ()) -> list[RequestImage]:
    processor = tower.config.processor(load_tokenizer(folder, None))
    pieces = [read(Picture(encoded(picture(*size)), "x"), processor) for size in sizes]
    counts = [sum(isinstance(piece, Tile) for piece in every) for every in pieces]
    ids = [*text, *(one for count in counts for one in (5, *[PAD] * count, 6))]
    return list(placed(ids, Prompt("", pieces), processor)[1])


@torch.inference_mode()
def test_what_is_left_between_layers_has_no_pixels(tower: Tower) -> None:
    """Others' steps run meanwhile, and need the memory."""
    side = tower.config.least_side
    pixels = torch.zeros(side, side, 3, dtype=torch.uint8)
    before = set(map(id, floats(pixels.numel())))
    parts = tower.parts(pixels, 0)
    assert isinstance(next(parts), int)
    assert not [one for one in floats(pixels.numel()) if id(one) not in before]
    parts.close()  # type: ignore[attr-defined]  # until here it kept what it had


@torch.inference_mode()
def test_memory_of_an_image_that_is_begun(tower: Tower, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has room for what its image takes between any two layers."""
    side = min(tower.config.largest_side(400), 8 * tower.config.least_side)
    monkeypatch.setattr(tower.module, "at_once", 0)
    before, found, pixels = set(storages()), [], torch.zeros(side, side, 3, dtype=torch.uint8)
    for made in tower.parts(pixels, len(tower.module(pixels.float()))):
        if isinstance(made, int):
            found.append(sum(size for key, size in storages().items() if key not in before))
    assert len(found) > 1 and max(found) <= tower.config.begun_bytes(side, 4)


def storages() -> dict[int, int]:
    """Returns bytes of the storages of all tensors that anything holds, by their addresses."""
    every = [one for one in gc.get_objects() if type(one) is Tensor and one.device == CPU and not one.is_mkldnn]
    return {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in every}


def floats(count: int) -> list[Tensor]:
    """Returns all tensors of so many numbers in float32 that anything holds."""
    every = [one for one in gc.get_objects() if type(one) is Tensor]
    return [one for one in every if one.numel() == count and one.dtype == torch.float32]


@torch.inference_mode()
@pytest.mark.parametrize("size", PICTURES)
@pytest.mark.covering
def test_features_are_transformers(kind: str, folder: Path, tower: Tower, size: tuple[int, int]) -> None:
    images = shown(folder, tower, size)
    rows = torch.cat([tower.features(torch.from_numpy(image.pixels.copy()), image.tokens) for image in images])
    expected, deep = features(kind, picture(*size))
    ours = rows.unflatten(1, (1 + len(deep), -1))
    for i, theirs in enumerate([expected, *deep]):
        scale = max(float(theirs.abs().max()), 1.0)
        assert torch.allclose(ours[:, i], theirs, atol=1e-4 * scale / 8, rtol=1e-4), i
        assert float(theirs.std()) > 0.01


def test_positions_in_three_axes(kind: str, folder: Path, tower: Tower) -> None:
    inner = reference(kind).model
    if not hasattr(inner, "get_rope_index"):
        pytest.skip("positions are plain")
    images = shown(folder, tower, (40, 30), (16, 100), text=(1, 2, 3))
    length = images[-1].end + 4
    ids = torch.ones(1, length, dtype=torch.int64)
    for image in images:
        ids[0, image.start : image.end] = PAD
    grids = torch.tensor([[1, image.grid[0] * 2, image.grid[1] * 2] for image in images])
    expected, shift = inner.get_rope_index(ids, (ids == PAD).int(), image_grid_thw=grids)
    axes, ours = axes_of(images, length)
    assert np.array_equal(axes, expected[:, 0].numpy()) and ours == int(shift)


@torch.inference_mode()
@pytest.mark.parametrize("tokens", [1, 7, 16, 10_000])
def test_the_largest_square(tower: Tower, tokens: int) -> None:
    """Is one that it reads, of no more tokens than asked for where a picture's size is not given."""
    side = tower.config.largest_side(tokens)
    rows = tower.module(torch.zeros(side, side, 3))
    assert side >= tower.config.least_side
    if isinstance(tower.config, PatchMergerConfig):
        assert len(rows) <= tokens and side**2 <= tower.config.most


@torch.inference_mode()
def test_features_do_not_depend_on_what_was_seen_before(folder: Path, tower: Tower) -> None:
    first, *_, second = shown(folder, tower, (40, 30), (64, 48))
    pixels = [torch.from_numpy(image.pixels.copy()) for image in (first, second)]
    alone = tower.features(pixels[0], first.tokens)
    tower.features(pixels[1], second.tokens)
    assert torch.equal(tower.features(pixels[0], first.tokens), alone)


@torch.inference_mode()
@pytest.mark.parametrize("size", [(300, 200), (16, 100)])
@pytest.mark.covering
def test_parts_of_layers_have_the_bits_of_the_whole(kind: str, folder: Path, size: tuple[int, int]) -> None:
    """Each takes no more than its patches' share of what a layer does."""
    config, ops = load_config(folder).tower, make_ops(CPU)
    assert config is not None
    if not ops.block_kinds:
        pytest.skip("torch has no such promise")
    form = BlockFormat("Q8_0", ops)
    tower = load_tower(config, stored_tensors(folder, config), torch.float32, CPU, form, ops)
    (image, *_) = shown(folder, tower, size)
    pixels, layer = torch.from_numpy(image.pixels.copy()), config.products(*image.pixels.shape[:2])
    patches, found = math.prod(image.pixels.shape[:2]) // config.patch**2, []
    for rows in (0, 8, 32, 60, patches // 2, patches):
        tower.module.at_once = rows
        *parts, features = tower.parts(pixels, image.tokens)
        of_layers = [part for part in parts if isinstance(part, int)]
        assert len(of_layers) == len(parts) >= config.depth * (3 * -(-patches // (rows or patches)) - 2)
        assert sum(of_layers) > 0.6 * config.depth * layer and (rows or max(of_layers) == layer)
        assert max(of_layers) <= layer * max((rows or patches) / patches, 0.3)
        found.append(features)
    assert all(torch.equal(found[0], each) for each in found[1:])


@torch.inference_mode()
def test_matrices_in_blocks(folder: Path, tower: Tower) -> None:
    """On a CPU a tower is in blocks, as the model beside it."""
    ops = make_ops(CPU)
    if not ops.block_kinds:
        pytest.skip("there are no kernels for blocks")
    packed = load_tower(
        tower.config, stored_tensors(folder, tower.config), torch.float32, CPU, BlockFormat("Q8_0", ops), ops
    )
    (image,) = shown(folder, tower, (40, 30))
    pixels = torch.from_numpy(image.pixels.copy())
    exact, rounded = (one.features(pixels, image.tokens) for one in (tower, packed))
    error = (exact - rounded).norm() / exact.norm()
    assert 1e-5 < error < 0.2


@torch.inference_mode()
def test_random_weights(folder: Path, tower: Tower) -> None:
    """In blocks and not: `--load-format dummy`."""
    ops = make_ops(CPU)
    (image,) = shown(folder, tower, (40, 30))
    pixels = torch.from_numpy(image.pixels.copy())
    for form in (DENSE, *([BlockFormat("Q8_0", ops)] if ops.block_kinds else [])):
        made = load_tower(tower.config, (), torch.float32, CPU, form, ops, dummy=True)
        made.module.warm()  # as on a GPU
        found = made.features(pixels, image.tokens)
        assert found.isfinite().all() and found.std() > 0


@torch.inference_mode()
@pytest.mark.slow
def test_by_tritons_kernels(folder: Path, tower: Tower, triton_ops: TorchOps, device: torch.device) -> None:
    """As on a GPU, where nothing is cut into parts."""
    own = load_tower(tower.config, stored_tensors(folder, tower.config), torch.float32, device, DENSE, triton_ops)
    own.module.warm()
    (image,) = shown(folder, tower, (90, 70))[:1]
    pixels = torch.from_numpy(image.pixels.copy())
    found, expected = own.features(pixels.to(device), image.tokens), tower.features(pixels, image.tokens)
    assert (found.cpu() - expected).norm() <= 1e-5 * expected.norm()


def test_a_tower_that_lacks_a_tensor(folder: Path, tower: Tower, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if canonical(name).startswith(tower.config.prefixes))
    save_file({one: value for one, value in tensors.items() if one != name}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="--disable-images"):
        load_tower(tower.config, stored_tensors(tmp_path, tower.config), torch.float32, CPU, DENSE, PLAIN)
