"""Configs as models were published with them, sizes shrunk: what is served has transformers' log probabilities, and all
others are refused with a sentence that says what is missing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_models import tokens, whole_logits
from published import FOLDER, PROMPT, Row, published, rows, written

from draftwing.errors import CheckpointError
from draftwing.models.config import from_hf
from draftwing.models.families.unserved import unserved_part
from draftwing.models.loader import load_config, load_model

QUICK = {
    "gemma-3-4b-it",
    "granite-3.3-8b-instruct",
    "qwen2.5-7b-instruct-yarn",
    "qwen3-8b-awq",
}  # some that differ most


def kinds(row: Row) -> set[object]:
    """What a config has in common with those that differ from it in sizes and other numbers alone."""
    config = from_hf(published(row.name))
    layers = {re.sub(r"(?<![\w.])([2-9]|\d\d|0?\.\d)[\d.e+-]*", "n", repr(layer)) for layer in {*config.layers}}
    ropes = tuple((rope.kind, rope.dims > 0) for rope in config.ropes)
    return {(config.architecture, *sorted(layers)), (config.architecture, ropes), row.stored, (row.like,)}


def served() -> Iterator[Any]:
    """Rows; those without anything that none before has are exhaustive."""
    seen: set[object] = set()
    for row in sorted(rows().values(), key=lambda row: row.name not in QUICK):
        if row.missing is None:
            new = kinds(row) - seen
            seen |= new
            marks = () if row.name in QUICK else pytest.mark.slow if new else pytest.mark.exhaustive
            yield pytest.param(row, id=row.name, marks=marks)


SERVED = [*served()]
REFUSED = [row for row in rows().values() if row.missing is not None]


def test_there_is_a_file_for_each_row_of_the_index() -> None:
    assert {file.stem for file in FOLDER.glob("*.json")} - {"index"} == set(rows())
    assert len(rows()) > 240 and set(rows()) >= QUICK


@pytest.mark.parametrize("row", SERVED)
@torch.inference_mode()
def test_it_has_the_log_probabilities_of_transformers(tmp_path: Path, row: Row) -> None:
    theirs = written(tmp_path, row.name)
    model = load_model(tmp_path, torch.float32, "cpu")
    ids = tokens(min(PROMPT, model.config.max_positions))
    expected = theirs(input_ids=ids[None]).logits[0].log_softmax(-1)
    torch.testing.assert_close(whole_logits(model, ids).log_softmax(-1), expected, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_what_is_missing_is_said(tmp_path: Path) -> None:
    for row in REFUSED:
        config, folder = published(row.name), tmp_path / row.name
        folder.mkdir()
        files: Mapping[str, Any] = {"config.json": config, **row.beside}
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content))
        with pytest.raises(CheckpointError) as refusal:
            load_config(folder)
        said = row.says or row.missing or unserved_part(config["architectures"], config["model_type"])
        assert said is not None and said in str(refusal.value) and "\n" not in str(refusal.value), row.name


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("trinity-mini", {"route_norm": False}),
        ("trinity-mini", {"n_group": 2}),
        *(
            (name, {key: 0.5})
            for name in ("trinity-mini", "command-r7b-12-2024", "minicpm4-8b", "minicpm3-4b")
            for key in ("embedding_multiplier", "residual_multiplier", "logits_scaling")
        ),
        ("falcon-h1-7b-instruct", {"logits_scaling": 0.5}),
        ("smollm3-3b", {"layer_types": ["sliding_attention"] * 8, "sliding_window": 9}),
        ("gemma-3-1b-it", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    ],
)
def test_keys_that_libraries_read_otherwise_are_refused(name: str, more: dict[str, Any]) -> None:
    config = published(name)
    from_hf(config)
    with pytest.raises(CheckpointError, match=next(iter(more))):
        from_hf({**config, **more})


def test_factors_that_others_pass_over() -> None:
    config = published("falcon-h1-7b-instruct")
    assert from_hf({**config, "residual_multiplier": 0.5}).layers == from_hf(config).layers
