"""`draftwing verify`: its exit codes, and what it says."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoint import write_checkpoint

from draftwing import LLM
from draftwing.cli.main import main
from draftwing.engine.receipts import digest_of

SMALL = ("--max-total-tokens", "512")


@pytest.fixture(scope="module")
def receipt(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")
    with LLM(str(model), speculative_algorithm="NGRAM", max_total_tokens=512) as llm:
        (done,) = llm.generate("abcabc", {"max_new_tokens": 8, "temperature": 3, "ignore_eos": True}, receipt=True)
    assert done.receipt is not None
    return done.receipt


@pytest.fixture
def file(receipt: dict[str, Any], tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "receipt.json"
    path.write_text(json.dumps(receipt))
    yield path


def verified(*argv: str) -> int:
    """The exit code."""
    try:
        return main(["verify", *argv, *SMALL])
    except SystemExit as ended:
        assert isinstance(ended.code, int)
        return ended.code


def test_the_same(
    file: Path, receipt: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verified(str(file)) == 0
    assert capsys.readouterr() == ("same: all 8 tokens, finish reason length\n", "")
    monkeypatch.setattr("sys.stdin", io.StringIO("\ufeff" + json.dumps(receipt)))
    assert verified("-") == 0


def test_a_difference(file: Path, receipt: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    tokens = receipt["answer"]["token_ids"]
    other = receipt | {"answer": {"token_ids": [*tokens[:3], 65, *tokens[4:]], "finish_reason": "length"}}
    file.write_text(json.dumps(other | {"digest": digest_of(other), "device": "cuda 9.0"}))
    assert verified(str(file)) == 2, "the device was changed, too"
    file.write_text(json.dumps(other | {"digest": digest_of(other)}))
    capsys.readouterr()
    assert verified(str(file)) == 1
    out = capsys.readouterr().out
    assert out.startswith("different at token 3: 65 'b' in the receipt") and "log probabilities differ by" in out
    other = receipt | {"answer": {"token_ids": tokens[:3], "finish_reason": "length"}}
    file.write_text(json.dumps(other | {"digest": digest_of(other)}))
    assert verified(str(file)) == 1
    assert "different at token 3: the end in the receipt" in capsys.readouterr().out
    other = receipt | {"answer": {"token_ids": tokens, "finish_reason": "stop"}}
    file.write_text(json.dumps(other | {"digest": digest_of(other)}))
    assert verified(str(file)) == 1
    assert "ended by stop in the receipt, by length now" in capsys.readouterr().out


def test_what_cannot_be_checked(
    file: Path, receipt: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*argv: str) -> str:
        capsys.readouterr()
        assert verified(*argv) == 2
        return capsys.readouterr().err

    assert "cannot be read" in said(str(tmp_path / "none.json"))
    other = write_checkpoint(tmp_path / "other", seed=1)
    assert "digest of weights differs" in said(str(file), "--model", str(other))
    assert "does not exist" in said(str(file), "--model", str(tmp_path / "missing"))
    assert "--dtype must be one of" in said(str(file), "--dtype", "float8")
    file.write_text(json.dumps(receipt | {"draftwing": "9"}))
    assert "was changed after it was made" in said(str(file))
    asked = receipt["request"] | {"thinking": {"tokens": 2**70, "begin": [], "end": [1], "open": True, "again": False}}
    file.write_text(json.dumps(receipt | {"request": asked, "digest": digest_of(receipt | {"request": asked})}))
    assert "request.thinking.tokens" in said(str(file))


def test_another_device_is_a_warning(file: Path, receipt: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    other = receipt | {"device": "cuda 9.0"}
    file.write_text(json.dumps(other | {"digest": digest_of(other)}))
    assert verified(str(file)) == 0
    assert "warning: the receipt is of device cuda 9.0, this is cpu" in capsys.readouterr().err
