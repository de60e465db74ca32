"""Configs as models were published with them, sizes shrunk: what is served has transformers' log probabilities, and all
others are refused with a sentence that says what is missing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_models import tokens, whole_logits
from published import FOLDER, PROMPT, Row, published, rows, written

from draftwing.errors import CheckpointError
from draftwing.models.loader import load_config, load_model
from draftwing.models.unserved import unserved_part

QUICK = {  # one of each way in which configs differ
    "deepseek-v2-lite-chat", "gemma-3-4b-it", "glm-4.6-yarn", "gpt-oss-20b", "lfm2.5-1.2b-instruct",
    "llama-3.2-1b-instruct", "mimo-7b-rl", "minimax-m2.7", "mistral-7b-v0.1", "mixtral-8x7b",
    "qwen2.5-7b-instruct-yarn", "qwen3-8b-awq", "qwen3-coder-480b-a35b-instruct", "qwen3-next-80b-a3b-yarn",
    "qwen3.5-27b", "vicuna-7b-v1.5-16k",
}  # fmt: skip
SERVED = [
    pytest.param(row, id=row.name, marks=() if row.name in QUICK else pytest.mark.slow)
    for row in rows().values()
    if row.missing is None
]
REFUSED = [pytest.param(row, id=row.name) for row in rows().values() if row.missing is not None]


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


@pytest.mark.parametrize("row", REFUSED)
def test_what_is_missing_is_said(tmp_path: Path, row: Row) -> None:
    config = published(row.name)
    files: Mapping[str, Any] = {"config.json": config, **row.beside}
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(CheckpointError) as refusal:
        load_config(tmp_path)
    said = row.says or row.missing or unserved_part(config["architectures"], config["model_type"])
    assert said is not None and said in str(refusal.value) and "\n" not in str(refusal.value)
