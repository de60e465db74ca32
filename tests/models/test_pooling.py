"""What a checkpoint says about making vectors of texts: modules.json and its folders, metadata of .gguf files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_gguf

from draftwing.errors import CheckpointError
from draftwing.models.loader import load_config
from draftwing.models.pooling import pooling_of
from draftwing.requests.pooling import Pooling, PoolingKind

TRANSFORMER = {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}
NORMALIZE = {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}


def folder_of(path: Path, pooling: dict[str, Any], *others: dict[str, Any], at: str = "1_Pooling") -> Path:
    named = {"idx": 1, "path": at, "type": "sentence_transformers.models.Pooling"}
    (path / "modules.json").write_text(json.dumps([TRANSFORMER, named, *others]))
    (path / "1_Pooling").mkdir(exist_ok=True)
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 8, **pooling}))
    return path


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_cls_token": False, "include_prompt": True}, "last"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False}, "mean"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_folders(tmp_path: Path, config: dict[str, Any], kind: PoolingKind) -> None:
    assert pooling_of(folder_of(tmp_path, config, NORMALIZE)) == Pooling(kind, True, True)
    assert pooling_of(folder_of(tmp_path, config)) == Pooling(kind, False, True)


def test_what_says_nothing(tmp_path: Path) -> None:
    assert pooling_of(tmp_path) == Pooling("last", True, False)
    (tmp_path / "modules.json").write_text(json.dumps([TRANSFORMER]))
    assert pooling_of(tmp_path) == Pooling("last", True, False)


@pytest.mark.parametrize(
    ("config", "others", "why"),
    [
        ({"pooling_mode_max_tokens": True}, (), "pooling_mode_max_tokens"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}, (), "pooling_mode_lasttoken"),
        ({"pooling_mode": "weightedmean"}, (), "'weightedmean'"),
        ({}, (), "none"),
        ({"pooling_mode": "mean", "include_prompt": False}, (), "include_prompt"),
        ({"pooling_mode": "mean"}, ({**NORMALIZE, "type": "sentence_transformers.models.Dense"},), "'Dense'"),
    ],
)
def test_what_is_not_supported(
    tmp_path: Path, config: dict[str, Any], others: tuple[dict[str, Any], ...], why: str
) -> None:
    """It says so when vectors are asked for: such a model may still generate."""
    assert why in pooling_of(folder_of(tmp_path, config, *others)).refused


@pytest.mark.parametrize("at", ["../other", "a/b", 3])
def test_files_elsewhere_are_not_read(tmp_path: Path, at: Any) -> None:
    with pytest.raises(CheckpointError, match="expected a folder beside it"):
        pooling_of(folder_of(tmp_path, {"pooling_mode": "mean"}, at=at))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for text in ("{", "3", '["a"]'):
        (tmp_path / "modules.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"modules\.json"):
            pooling_of(tmp_path)


@pytest.mark.parametrize(
    ("number", "found"),
    [(0, Pooling()), (1, Pooling("mean", stated=True)), (3, Pooling(stated=True)), (4, Pooling())],
)
def test_metadata_of_a_gguf_file(tmp_path: Path, number: int, found: Pooling) -> None:
    def edit(writer: tiny_gguf.gguf_package.GGUFWriter) -> None:
        writer.add_pooling_type(tiny_gguf.gguf_package.PoolingType(number))

    file = tiny_gguf.write(tmp_path / "a.gguf", "qwen3", edit=edit)
    assert pooling_of(file) == found
    assert load_config(file).architecture == "Qwen3ForCausalLM"
