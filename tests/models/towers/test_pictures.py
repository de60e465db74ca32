"""Pictures of every kind, as files, through all that a request goes through: features, positions, log probabilities and
greedy text are what transformers makes of the same file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import engine_rig
import numpy as np
import pytest
import torch
from engine_rig import Rig, greedy
from image_models import EOS, KINDS, PAD, ROUTED, features, loaded, logits, reference, write_model
from image_models import greedy as transformers_greedy
from picture_kinds import PICTURES, seen_by_transformers
from PIL import Image
from transformers.image_transforms import convert_to_rgb

from draftwing.images.processing import Tile
from draftwing.images.reader import Picture, Prompt, placed, read
from draftwing.requests.images import RequestImage, axes_of
from draftwing.requests.request import LogprobParams

TOKENS = 6
OTHERS = [name for i, name in enumerate(PICTURES) if i % 7]
AT_ONCE = [["png", "turned 6"], ["alpha", "tall", "cmyk", "png", "animated gif"]]


@pytest.fixture(scope="module", params=list(KINDS))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Any:
    return written(tmp_path_factory.mktemp("pictures"), request.param)


def written(folder: Path, kind: str) -> Any:
    model, processor = loaded(write_model(folder / kind, kind))
    return kind, model, processor


@pytest.fixture(autouse=True)
def long_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_rig, "CONTEXT", 512)


def prompt_of(processor: Any, files: Sequence[bytes]) -> tuple[list[int], tuple[RequestImage, ...]]:
    """Words around and between pictures."""
    pieces = [read(Picture(data, "x"), processor) for data in files]
    ids = [3, 60, 61]
    for i, every in enumerate(pieces):
        ids += [90, *[PAD] * sum(isinstance(one, Tile) for one in every), 91, 70 + i]
    return placed([*ids, 33], Prompt("", pieces), processor)


@torch.inference_mode()
def check(family: Any, names: Sequence[str]) -> None:
    kind, model, processor = family
    files = [PICTURES[name] for name in names]
    ids, images = prompt_of(processor, files)
    shown = [convert_to_rgb(seen_by_transformers(data)) for data in files]
    rows = [model.tower.features(torch.from_numpy(image.pixels.copy()), image.tokens) for image in images]
    compare(kind, torch.cat(rows), shown)
    if hasattr(reference(kind).model, "get_rope_index"):
        compare_positions(kind, ids, images)
    rig = Rig(model, chunk=64)
    rig.submit("0", ids, greedy(TOKENS), images=images, logprobs=LogprobParams(start=0))
    answer = rig.run()
    expected = logits(kind, ids, shown)[:-1].log_softmax(-1).gather(1, torch.tensor(ids)[1:, None])[:, 0]
    found = [value.value for value in answer.prompt_logprobs["0"][1:]]
    assert found == pytest.approx(expected.tolist(), abs=1e-4, rel=1e-4)
    text = transformers_greedy(kind, ids, shown, TOKENS)
    words = next(
        (i + 1 for i, token in enumerate(text) if token > EOS), TOKENS
    )  # what follows a placeholder is no text
    assert answer.tokens["0"][:words] == text[:words]


def compare(kind: str, rows: torch.Tensor, shown: Sequence[Image.Image]) -> None:
    each = [features(kind, image) for image in shown]
    deep = len(each[0][1])
    ours = rows.unflatten(1, (1 + deep, -1))
    for i in range(1 + deep):
        expected = torch.cat([(first, *more)[i].flatten(0, -2) for first, more in each])
        scale = max(float(expected.abs().max()), 1.0)
        assert torch.allclose(ours[:, i], expected, atol=1e-4 * scale / 8, rtol=1e-4), i


def compare_positions(kind: str, ids: list[int], images: Sequence[RequestImage]) -> None:
    whole = torch.tensor([ids])
    grids = torch.tensor([[1, image.grid[0] * 2, image.grid[1] * 2] for image in images])
    expected, shift = reference(kind).model.get_rope_index(whole, (whole == PAD).int(), image_grid_thw=grids)
    axes, ours = axes_of(images, len(ids))
    assert np.array_equal(axes, expected[:, 0].numpy()) and ours == int(shift)


@pytest.mark.further(name=OTHERS)
@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.covering
def test_each_kind(family: Any, name: str) -> None:
    check(family, [name])


@pytest.mark.parametrize("names", AT_ONCE, ids=["two", "five"])
@pytest.mark.covering
def test_several_in_a_prompt(family: Any, names: list[str]) -> None:
    check(family, names)


@pytest.mark.parametrize("kind", ROUTED)
def test_models_with_experts(kind: str, tmp_path: Path, one_thread: None) -> None:
    family = written(tmp_path, kind)
    for names in (["jpeg"], ["tall", "png"]):
        check(family, names)
