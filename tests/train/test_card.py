"""What a head's card says of the data: what the run did, not what it was asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftwing.train.card import card
from draftwing.train.run import Run
from draftwing.train.settings import Settings

REPORT: dict[str, Any] = {"steps": 3, "seconds": 1.0, "tokens": 90}


def said(folder: Path, used: dict[str, int] | None, **settings: Any) -> str:
    more = {} if used is None else {"used": used}
    (folder / "fit.json").write_text(json.dumps(REPORT | more))
    target: Any = None  # which only the cards of MTP layers speak of
    text = card(Run(folder, Settings(prompts=("p.jsonl",), **settings), {}), target, [])
    return text.partition("## Data")[2].partition("Sources")[0]


@pytest.mark.parametrize(
    "answers, greedy, temperatures, expected",
    [
        (80, 9, (0.6, 1.0), ": 80 answers, 9 of them (11%) at temperature 0, the others at 0.6 to 1."),
        (80, 0, (0.6, 1.0), ": 80 answers at temperature 0.6 to 1."),
    ],
)
def test_answers_are_counted(
    tmp_path: Path, answers: int, greedy: int, temperatures: tuple[float, ...], expected: str
) -> None:
    (tmp_path / "data.json").write_text(json.dumps({"prompts": 84, "conversations": 5, "skipped": {"empty": 2}}))
    used = {"prompts": 20, "answers": answers, "greedy": greedy, "conversations": 5}
    text = said(tmp_path, used, answers=4, temperatures=temperatures)
    assert (
        f"answered by the target itself{expected} 20 prompts and 5 conversations were used. Left out: 2 empty." in text
    )


def test_of_another_run_s_data_it_says_its_own(tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    for folder, count in ((out, 7), (other, 9)):
        folder.mkdir()
        (folder / "data.json").write_text(json.dumps({"prompts": 9, "skipped": {"empty": count}}))
    assert "Left out: 7 empty." in said(out, None, data=str(other))
    (out / "data.json").unlink()  # it only ran its fit
    assert "Left out: 9 empty." in said(out, None, data=str(other))
