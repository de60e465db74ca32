"""Shapes of GEMM kernels as files: those of a user's card come first, and a file that is none is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from draftwing.errors import ConfigError
from draftwing.ops.gemm import shapes
from draftwing.ops.gemm.shapes import few_rows, read_shapes

CUT: dict[str, Any] = {"form": "few_rows", "row_tiles": 1, "ahead": 2, "x_ahead": 1, "blocks": 3}
ROWS = [{"kind": kind, "rows": tile, **CUT} for kind in ("plain", "add", "silu") for tile in (8, 16, 32, 64, 128)]
BF16, OTHER = torch.bfloat16, (8, 6)  # a compute capability that has no files of its own


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(shapes, "user_folder", lambda: tmp_path)
    read_shapes.cache_clear()
    yield tmp_path
    read_shapes.cache_clear()


def test_a_card_has_its_own_or_those_of_its_kind(folder: Path) -> None:
    assert read_shapes("dense", OTHER, BF16) == read_shapes("dense", (8, 0), BF16)
    assert read_shapes("dense", (9, 0), BF16) != read_shapes("dense", (10, 0), BF16)
    assert read_shapes("dense", (9, 0), torch.float16) == read_shapes("dense", (10, 0), torch.float16)
    assert read_shapes("4bit", OTHER, BF16) != read_shapes("4bit", (9, 0), BF16)


def test_those_of_the_user_come_first(folder: Path) -> None:
    (folder / "sm86-dense.json").write_text(json.dumps({"shapes": [row | {"us": {"before": 1.0}} for row in ROWS]}))
    wanted = {(row["kind"], row["rows"]): few_rows(row["rows"], 1, 2, 1, 3) for row in ROWS}
    assert read_shapes("dense", OTHER, BF16) == wanted
    assert len(read_shapes("dense", OTHER, torch.float16)) > 1  # which was not tried


def shapes_of(**wrong: object) -> str:
    return json.dumps({"shapes": [*ROWS, ROWS[0] | wrong]})


SHARED = {"form": "shared", "warps": [4, 2], "row_tiles": 1, "ahead": 2, "stages": 2, "blocks": 1}
TALL = {"form": "tall", "groups": 1, "row_tiles": 1, "stages": 2, "ahead": 2}


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", '{"shapes": []}', json.dumps({"shapes": ROWS[1:]}), shapes_of(form="gone"),
        shapes_of(kind="gone"), shapes_of(rows="8"), shapes_of(colour=1), shapes_of(blocks=None, row_tiles="1"),
        json.dumps({"shapes": [*ROWS, {"kind": "add", "rows": 16, "cluster": 8} | SHARED]}),
        json.dumps({"shapes": [*ROWS, {"kind": "add", "rows": 64} | TALL]}),
    ],
)  # fmt: skip
def test_a_file_that_is_none_is_refused(folder: Path, text: str) -> None:
    (folder / "sm86-dense.json").write_text(text)
    with pytest.raises(ConfigError, match=r"sm86-dense\.json"):
        read_shapes("dense", OTHER, BF16)
