"""Incremental text equals the text of all tokens, however they arrive; stop strings are cut at the first character."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import REPLACEMENT, sentencepiece
from tokenizers import decoders

from draftwing.text.detok import IncrementalDetokenizer, StopStringScanner, TokenTexts
from draftwing.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module", params=["smollm2", "sentencepiece", "metaspace"])
def tokenizer(request: pytest.FixtureRequest, smollm2_path: Path) -> Tokenizer:
    if request.param == "smollm2":
        return load_tokenizer(smollm2_path)
    return sentencepiece(decoders.Metaspace() if request.param == "metaspace" else None)


def random_text(rng: random.Random, length: int) -> str:
    alphabets = ["the cat sat  on\n", "äöüßéñ", "日本語中文字", "😀👩‍👩‍👧🇩🇪", "العربية", "\t\r\u0000\u200d\ufffd"]
    return "".join(rng.choice(rng.choice(alphabets)) for _ in range(length))


def token_lists(tokenizer: Tokenizer, seed: int) -> Iterator[list[int]]:
    """Encoded text, random tokens (mostly invalid UTF-8), and texts cut or joined inside a character."""
    rng = random.Random(seed)
    single = [i for i in range(tokenizer.vocab_size) if len(tokenizer.backend.id_to_token(i) or "") == 1]
    pool = sorted(tokenizer.byte_fallback_ids) or single
    for _ in range(20):
        yield tokenizer.encode(random_text(rng, 30))
        yield [rng.randrange(tokenizer.vocab_size + 5) for _ in range(30)]
        yield [rng.choice(pool) if rng.random() < 0.7 else rng.randrange(tokenizer.vocab_size) for _ in range(40)]
        ids = tokenizer.encode(random_text(rng, 20))
        cut = rng.randrange(len(ids))
        yield [*ids[cut:], rng.choice([0, 1, 2]), *ids[:cut]]
    yield from ([], [1], [1, 2, 1], [pool[-1]] * 100)


@pytest.mark.parametrize("skip", [True, False])
def test_pushes_add_up_to_the_decoded_text(tokenizer: Tokenizer, skip: bool) -> None:
    rng = random.Random(1)
    nonempty = 0
    for ids in token_lists(tokenizer, seed=2):
        expected = tokenizer.backend.decode(ids, skip_special_tokens=skip)
        single = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
        parts = []
        for token in ids:
            parts.append(single.push([token]))
            # What was given out stays, whatever follows.
            assert expected.startswith("".join(parts))
        parts.append(single.push([], final=True))
        assert "".join(parts) == expected
        nonempty += bool(expected)

        chunked, at, text = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip), 0, ""
        while at < len(ids):
            step = rng.randrange(1, 8)
            text += chunked.push(ids[at : at + step], final=at + step >= len(ids))
            at += step
        assert text == expected
    assert nonempty > 50


def test_no_half_characters_and_no_needless_waiting(smollm2_path: Path) -> None:
    tokenizer = load_tokenizer(smollm2_path)
    text = "Größe: 日本語 😀👩‍👩‍👧 done"
    detokenizer = IncrementalDetokenizer(tokenizer)
    parts = [detokenizer.push([token]) for token in tokenizer.encode(text)]
    assert all(REPLACEMENT not in part for part in parts) and "".join(parts) == text
    assert "" in parts  # some token ended inside a character
    plain = IncrementalDetokenizer(tokenizer)
    words = [plain.push([token]) for token in tokenizer.encode("The capital of France is")]
    assert words == ["The", " capital", " of", " France", " is"]


def test_a_long_wait_does_not_cut_a_character(smollm2_path: Path) -> None:
    tokenizer = load_tokenizer(smollm2_path)
    day = [tokenizer.backend.token_to_id(name) for name in "æĹ¥"]  # the three bytes of one character
    for count in range(30):
        detokenizer = IncrementalDetokenizer(tokenizer)
        out = [detokenizer.push([token]) for token in [day[2]] * count + day]
        assert "".join(out) == REPLACEMENT * count + "日"


def test_work_per_token_is_bounded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = 0
    real = tokenizer.decode

    def count(ids: list[int], **options: Any) -> str:
        nonlocal decoded
        decoded += len(ids)
        return real(ids, **options)

    monkeypatch.setattr(tokenizer, "decode", count)
    rng = random.Random(3)
    broken = tokenizer.encode("日")[-1]
    for ids in ([broken] * 1000, [rng.randrange(tokenizer.vocab_size) for _ in range(1000)]):
        decoded = 0
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False, stop=("never",))
        for token in ids:
            detokenizer.push([token])
        detokenizer.push([], final=True)
        assert 0 < decoded < 60 * len(ids)


def reference_cut(text: str, stops: tuple[str, ...], keep: bool) -> tuple[str, str | None]:
    """Reads character by character: the first stop string that is complete wins, the longest of several."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end if keep else end - len(longest)], longest
    return text, None


STOPS = [("the",), ("ab", "abc"), ("aab", "b"), ("a a", " a"), ("日",), (" ", "the cat"), ("aa",), ("é", "e", "\n")]


def random_words(tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    if tokenizer.joins_bytes and tokenizer.vocab_size > 1000:
        words = ["a", "b", "c", " ", "the cat", "aa", "é", "日", "\n"]
        return tokenizer.encode("".join(rng.choice(words) for _ in range(12)))
    pieces = ["a", "b", "<0x63>", "▁", "the", "▁the", "▁a", "é", "日", "<0xE6>", "<0x97>", "<0xA5>", "\n"]
    ids = [tokenizer.backend.token_to_id(rng.choice(pieces)) for _ in range(16)]
    assert None not in ids
    return ids


@pytest.mark.parametrize("stops", STOPS)
def test_stop_strings(tokenizer: Tokenizer, stops: tuple[str, ...]) -> None:
    rng = random.Random(4)
    hits = 0
    for i in range(60):
        keep = i % 2 == 0
        ids = random_words(tokenizer, rng)
        expected, hit = reference_cut(tokenizer.decode(ids), stops, keep)
        hits += hit is not None

        scanner = StopStringScanner(IncrementalDetokenizer(tokenizer, stop=stops))
        count = next((n for n, token in enumerate(ids, 1) if scanner.push(token)), len(ids))
        ended = scanner.finish()
        assert ended == hit
        # The stream gets the tokens that the scheduler committed, in other portions.
        detokenizer, at, out = IncrementalDetokenizer(tokenizer, stop=stops, no_stop_trim=keep), 0, ""
        while at < count:
            step = rng.randrange(1, 5)
            out += detokenizer.push(ids[at : min(at + step, count)], final=at + step >= count)
            assert expected.startswith(out)
            at += step
        assert (out, detokenizer.stopped) == (expected, hit)
        assert hit is None or detokenizer.push(ids, final=True) == ""
    assert hits > 5


def test_text_is_held_only_while_it_may_become_a_stop_string() -> None:
    tokenizer = sentencepiece()
    ids = tokenizer.backend.get_vocab()
    detokenizer = IncrementalDetokenizer(tokenizer, stop=("stopper",))
    out = [detokenizer.push([ids[name]]) for name in ["a", "▁stop", "b", "stop", "stop", "a"]]
    assert out == ["a", " ", "stopb", "", "stop", "stopa"]
    assert detokenizer.push([ids["stop"]]) == "" and detokenizer.push([], final=True) == "stop"
    kept = IncrementalDetokenizer(tokenizer, stop=("stopper",), no_stop_trim=True)
    assert kept.push([ids["stop"]]) == "stop"  # it stays in the text either way


def test_special_tokens_in_stop_strings() -> None:
    tokenizer = sentencepiece()
    ids = [tokenizer.backend.token_to_id(name) for name in ("a", "</s>", "b")]
    shown = IncrementalDetokenizer(tokenizer, skip_special_tokens=False, stop=("a</s>",))
    assert shown.push(ids) == "" and shown.stopped == "a</s>"
    hidden = IncrementalDetokenizer(tokenizer, stop=("a</s>", "ab"))
    assert hidden.push(ids) == "" and hidden.stopped == "ab"


@pytest.mark.parametrize(
    "names", [["<0xE3>", "", "<0xCA>", "<0xB8>"], ["", "▁the", "<0x18>"], ["a", "", "", "<0xCA>", "", "<0xB8>"]]
)
@pytest.mark.parametrize("decoder", [None, decoders.Metaspace()])
def test_empty_tokens_end_runs_of_bytes(names: list[str], decoder: Any) -> None:
    tokenizer = sentencepiece(decoder)
    ids = [tokenizer.backend.token_to_id(name) for name in names]
    detokenizer = IncrementalDetokenizer(tokenizer)
    text = "".join([detokenizer.push([token]) for token in ids]) + detokenizer.push([], final=True)
    assert text == tokenizer.backend.decode(ids)


TEXT = "The  größte 日本語 😀👩‍👩‍👧\n\tüber\u0000 \ufffd"


def test_byte_level(smollm2_path: Path) -> None:
    tokenizer = load_tokenizer(smollm2_path)
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode(TEXT)
    assert b"".join(map(texts.raw, ids)) == TEXT.encode()
    parts = tokenizer.encode("日")
    if len(parts) > 1:
        assert texts.text(parts[0]) == "\ufffd" and texts.key(parts[0]).startswith("bytes:\\xe6")
    end = tokenizer.eos_id
    assert end is not None and texts.text(end) == tokenizer.piece(end)
    assert texts.raw(tokenizer.vocab_size + 3) == b""
    # Keys tell all tokens of a vocabulary apart.
    keys = [texts.key(token) for token in range(2000)]
    assert len(set(keys)) == len(keys)


def test_sentencepiece() -> None:
    tokenizer = sentencepiece()
    texts, ids = TokenTexts(tokenizer), tokenizer.backend.get_vocab()
    raw = {name: texts.raw(ids[name]) for name in ("▁the", "the", "<0xE6>", "</s>", "▁", "é")}
    expected = {"▁the": b" the", "the": b"the", "<0xE6>": b"\xe6", "</s>": b"</s>", "▁": b" ", "é": "é".encode()}
    assert raw == expected
