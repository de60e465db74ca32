"""Words as token sequences, at the start of a text and inside of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftwing.errors import RequestError
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, SamplingParams
from draftwing.text.bad_words import bad_word_ids
from draftwing.text.tokenizer import Tokenizer, load_tokenizer


def ids_of(tokenizer: Tokenizer, words: list[str]) -> tuple[tuple[int, ...], ...]:
    return bad_word_ids(tokenizer, GenerationRequest("", [1], SamplingParams(bad_words=words)))


def test_both_forms_of_a_word(smollm2_path: Path) -> None:
    tokenizer = load_tokenizer(smollm2_path)
    found = ids_of(tokenizer, ["capital", " France"])
    assert [tokenizer.decode(ids) for ids in found] == ["capital", " capital", " France"]
    inside = tokenizer.encode("The capital of France is")
    assert all(ids[0] in inside for ids in found[1:]) and len(found[1]) == len(found[2]) == 1
    assert ids_of(tokenizer, []) == ()
    asked = GenerationRequest("", [1], SamplingParams(bad_words=["capital"]), bad_word_ids=((5,),))
    assert bad_word_ids(tokenizer, asked) == ((5,),), "found before"
    assert len(ids_of(tokenizer, ["capital", "capital", " capital"])) == 2


def test_limits(smollm2_path: Path) -> None:
    tokenizer = load_tokenizer(smollm2_path)
    with pytest.raises(RequestError, match=str(MAX_BAD_WORD_TOKENS)) as info:
        ids_of(tokenizer, ["a b " * MAX_BAD_WORD_TOKENS])
    assert info.value.param == "bad_words"
    with pytest.raises(RequestError, match=f"{MAX_BAD_WORDS} token sequences"):
        ids_of(tokenizer, [f"w{i}" for i in range(MAX_BAD_WORDS)])
