"""Words as token sequences, at the start of a text and inside of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftwing.errors import RequestError
from draftwing.requests.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from draftwing.text.bad_words import bad_word_ids
from draftwing.text.tokenizer import load_tokenizer


def test_both_forms_of_a_word(smollm2_path: Path) -> None:
    tokenizer = load_tokenizer(smollm2_path)
    found = bad_word_ids(tokenizer, ["capital", " France"])
    assert [tokenizer.decode(ids) for ids in found] == ["capital", " capital", " France"]
    inside = tokenizer.encode("The capital of France is")
    assert all(ids[0] in inside for ids in found[1:]) and len(found[1]) == len(found[2]) == 1
    assert bad_word_ids(tokenizer, []) == ()
    assert len(bad_word_ids(tokenizer, ["capital", "capital", " capital"])) == 2


def test_limits(smollm2_path: Path) -> None:
    tokenizer = load_tokenizer(smollm2_path)
    with pytest.raises(RequestError, match=str(MAX_BAD_WORD_TOKENS)) as info:
        bad_word_ids(tokenizer, ["a b " * MAX_BAD_WORD_TOKENS])
    assert info.value.param == "bad_words"
    with pytest.raises(RequestError, match=f"{MAX_BAD_WORDS} token sequences"):
        bad_word_ids(tokenizer, [f"w{i}" for i in range(MAX_BAD_WORDS)])
