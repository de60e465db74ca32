"""How pictures are prepared, against transformers' processors, to the pixel."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from image_models import picture
from PIL import Image
from transformers import Qwen2VLImageProcessorPil, SmolVLMImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from draftwing.errors import RequestError
from draftwing.images.processing import BudgetProcessor, ImageProcessor, PatchProcessor, Tile
from draftwing.images.tiles import GridProcessor, SplitProcessor

SIZES = [(640, 480), (37, 53), (1, 1), (300, 2), (3, 480), (1200, 1000), (1023, 511), (130, 900)]
RAW = {"do_normalize": False, "do_rescale": False}


def tiles_of(processor: ImageProcessor, image: Image.Image) -> list[Tile]:
    return [piece for piece in processor.pieces(image) if isinstance(piece, Tile)]


def arithmetic(package: str, module: str, name: str) -> Any:
    """An object of a class in a module that transformers does not import without torchvision, and has not been made."""
    folder = Path(importlib.import_module(package).__path__[0])
    spec = importlib.util.spec_from_file_location(f"{package}.{module}_alone", folder / f"{module}.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        for name_of in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
            patch.setitem(sys.modules, name_of, MagicMock())
        patch.setitem(sys.modules, spec.name, found)
        spec.loader.exec_module(found)
    return object.__new__(getattr(found, name))


def pixels(tile: Tile) -> np.ndarray:
    return np.frombuffer(tile.pixels, np.uint8).reshape(tile.height, tile.width, 3)


@pytest.mark.parametrize("size", SIZES)
def test_patches(size: tuple[int, int]) -> None:
    image = picture(*size)
    (tile,) = tiles_of(PatchProcessor(0, "", ""), image)
    limits = {"shortest_edge": 65536, "longest_edge": 16777216}
    theirs = Qwen2VLImageProcessorPil(size=limits, patch_size=16, temporal_patch_size=1, **RAW)(
        images=image, return_tensors="np"
    )
    assert tuple(theirs["image_grid_thw"][0][1:]) == (tile.height // 16, tile.width // 16)
    rows, columns = tile.grid
    patches = theirs["pixel_values"].reshape(rows, columns, 2, 2, 3, 16, 16).transpose(0, 2, 5, 1, 3, 6, 4)
    assert np.array_equal(patches.reshape(tile.height, tile.width, 3), pixels(tile))


@pytest.mark.parametrize("budget", [70, 280])
@pytest.mark.parametrize("size", SIZES)
def test_a_budget_of_tokens(size: tuple[int, int], budget: int) -> None:
    image = picture(*size)
    (tile,) = tiles_of(BudgetProcessor(0, "", "", budget=budget), image)
    theirs = Gemma4ImageProcessorPil(max_soft_tokens=budget, do_rescale=False)(images=image, return_tensors="np")
    assert theirs["num_soft_tokens_per_image"][0] == math.prod(tile.grid) <= budget
    rows, columns = tile.height // 16, tile.width // 16
    patches = theirs["pixel_values"][0][: rows * columns].reshape(rows, columns, 16, 16, 3).transpose(0, 2, 1, 3, 4)
    assert np.array_equal(patches.reshape(tile.height, tile.width, 3), pixels(tile))


@pytest.mark.parametrize("size", SIZES)
def test_tiles_of_one_size(size: tuple[int, int]) -> None:
    image = picture(*size)
    processor = SplitProcessor(0, "<image>", "<image>", 64, 16, 192)
    sizes = {"size": {"longest_edge": 192}, "max_image_size": {"longest_edge": 64}}
    theirs = SmolVLMImageProcessorPil(**sizes, **RAW)(images=image, return_tensors="np", return_row_col_info=True)
    pieces = processor.pieces(image)
    ours = np.stack([pixels(piece) for piece in pieces if isinstance(piece, Tile)])
    assert np.array_equal(theirs["pixel_values"][0].transpose(0, 2, 3, 1), ours)
    text = "".join(piece if isinstance(piece, str) else "<image>" * math.prod(piece.grid) for piece in pieces)
    rows, columns = theirs["rows"][0][0], theirs["cols"][0][0]
    names = "<fake_token_around_image>", "<image>", "<global-img>"
    assert text == get_image_prompt_string(rows, columns, 16, *names)


@pytest.mark.parametrize(
    "size", [*SIZES, (2000, 1500), (1500, 1400), (2304, 1728), (3000, 300), (1024, 1024), (512, 1024)]
)
def test_a_grid_of_tiles(size: tuple[int, int]) -> None:
    """The processor itself needs torchvision, its arithmetic does not."""
    ours = tiles_of(GridProcessor(0, "", ""), picture(*size))
    theirs = arithmetic("transformers.models.lfm2_vl", "image_processing_lfm2_vl", "Lfm2VlImageProcessor")
    width, height = size
    how = {"max_image_tokens": 256, "encoder_patch_size": 16, "downsample_factor": 2}
    whole = theirs.smart_resize(height, width, min_image_tokens=64, **how)
    assert (ours[-1].width, ours[-1].height) == whole
    if theirs._is_image_too_large(height, width, max_pixels_tolerance=2.0, **how):
        columns, rows, *_ = theirs._get_grid_layout(height, width, 2, 10, 512)
        assert len(ours) == columns * rows + 1
        large = picture(*size).resize((512 * columns, 512 * rows), Image.Resampling.BILINEAR)
        for i, tile in enumerate(ours[:-1]):
            row, column = divmod(i, columns)
            part = large.crop((512 * column, 512 * row, 512 * column + 512, 512 * row + 512))
            assert np.array_equal(np.asarray(part), pixels(tile))
    else:
        assert len(ours) == 1


@pytest.mark.parametrize("processor", [PatchProcessor(0, "", ""), SplitProcessor(0, "", ""), GridProcessor(0, "", "")])
def test_a_picture_that_is_too_narrow(processor: ImageProcessor) -> None:
    with pytest.raises(RequestError, match="at most 200 times"):
        processor.pieces(picture(402, 2))
