"""Pictures of four megapixels, prepared as published models say: features and positions are transformers', which
prepares the same file itself. Towers have one small layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from image_models import LARGE, encoded, loaded, picture, write_model
from models.towers.test_pictures import compare, compare_positions, prompt_of

# Of a picture: one for each 32 x 32 pixels, at most 280, always 256, 4 x 3 tiles of 64 and the whole, 3 x 2 of 256 and
# the whole, which has 18 x 13.
TOKENS = {
    "large qwen3.5": 3888, "large qwen3-vl": 3888, "large gemma4": 266, "large gemma3": 256, "large smolvlm": 832,
    "large idefics3": 832, "large lfm2-vl": 1770,
}  # fmt: skip


@torch.inference_mode()
@pytest.mark.slow
@pytest.mark.exhaustive  # test_pictures.py has small ones, tests/images/test_processing.py what large ones become
@pytest.mark.parametrize("kind", LARGE)
def test_four_megapixels(kind: str, tmp_path: Path, one_thread: None) -> None:
    shown = picture(2304, 1728, 5)
    model, processor = loaded(write_model(tmp_path / "model", kind))
    ids, images = prompt_of(processor, [encoded(shown, "PNG")])
    assert sum(image.tokens for image in images) == TOKENS[kind]
    assert model.tower is not None
    rows = [model.tower.features(torch.from_numpy(image.pixels.copy()), image.tokens) for image in images]
    compare(kind, torch.cat(rows), [shown])
    if "qwen" in kind:
        compare_positions(kind, ids, images)
