"""Texts of any length have the ids of the tokenizer; those that cannot fit are refused early."""

from __future__ import annotations

import random

import pytest

from draftwing.errors import RequestError
from draftwing.models.hub import resolve_model
from draftwing.text.bounded import PIECE, Stopped, encode_bounded
from draftwing.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: object) -> Tokenizer:
    return load_tokenizer(resolve_model("smollm2", None, weights=False))


def texts() -> list[str]:
    draw = random.Random(3)
    words = " ".join(draw.choice(["the", "zebra", "quantum", "日本", "12", "\n\n"]) for _ in range(40_000))
    return ["a", words, "", "b" * 1000, "x" * (PIECE + 1), " " * 100_000, "c" * PIECE]


def test_ids_are_those_of_the_tokenizer(tokenizer: Tokenizer) -> None:
    plain = [tokenizer.encode(text) for text in texts()]
    longest = max(map(len, plain))
    assert encode_bounded(tokenizer, texts(), longest, "prompt") == plain  # what just fits is never refused


def test_what_cannot_fit_costs_no_more_than_what_does(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    encode_many = Tokenizer.encode_many

    def spy(self: Tokenizer, batch: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        seen.append(sum(map(len, batch)))
        return encode_many(self, batch, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode_many", spy)
    with pytest.raises(RequestError, match="prompt has more than 1000 tokens") as error:
        encode_bounded(tokenizer, ["word " * 10**6], 1000, "prompt")
    assert error.value.param == "prompt" and sum(seen) == PIECE


def test_it_stops_between_pieces(tokenizer: Tokenizer) -> None:
    asked = iter([False, False, True])
    with pytest.raises(Stopped):
        encode_bounded(tokenizer, ["word " * 10**6], 10**6, "prompt", stopped=lambda: next(asked))
    with pytest.raises(StopIteration):
        next(asked)
