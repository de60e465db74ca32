"""Ranks in processes of their own read pictures: texts with drafts are those of one rank without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine.test_images_on_gpu import ALONE, texts
from image_models import with_prediction_layer, write_model

pytestmark = pytest.mark.slow
COUNT = 4


@pytest.mark.exhaustive  # tests/engine/test_images.py and test_random_images.py have ranks in threads
@pytest.mark.parametrize("kind", ["qwen3.5", "qwen3-vl-moe", "gemma4", "gemma4-26b"])
def test_two_ranks(kind: str, tmp_path: Path) -> None:
    model, shared = write_model(tmp_path / "model", kind), {"device": "cpu", "num_threads": 1, "dtype": "float32"}
    own = "NGRAM"
    if kind == "qwen3.5":
        with_prediction_layer(model, kind)
        own = "NEXTN"
    expected, _ = texts(model, COUNT, **ALONE, **shared)
    assert len({token for ids in expected for token in ids}) > 12, "answers say nothing"
    more: dict[str, Any] = {"speculative_algorithm": own, "speculative_fixed_shape": True, "tp_size": 2}
    found, rate = texts(model, COUNT, **more, **shared)
    assert found == expected and rate > 1
