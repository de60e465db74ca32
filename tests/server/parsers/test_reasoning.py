"""The reasoning parsers: whole, character by character and in random pieces they split an answer alike."""

from __future__ import annotations

import random

import garbled
import pytest
from fake_engine import byte_tokenizer

from draftwing.config.option_fields import REASONING_PARSERS
from draftwing.server.parsers.reasoning import (
    REASONING_STYLES,
    ReasoningParser,
    Start,
    count_reasoning,
    start_of,
)

THINK = REASONING_STYLES["qwen3"]
# start, text, reasoning, content
CASES: list[tuple[Start, str, str, str]] = [
    ("free", "<think>\nwhy so\n</think>\n\nBecause.", "why so", "Because."),
    ("free", "\n <think>why</think>x", "why", "x"),
    ("free", "Just an answer with <think>no block</think>.", "", "Just an answer with <think>no block</think>."),
    ("free", "  \n indented", "", "  \n indented"), ("free", "<thin", "", "<thin"),
    ("free", "<thinking>not it", "", "<thinking>not it"), ("free", "", "", ""), ("free", " \n", "", " \n"),
    ("free", "<think>never ends </thin", "never ends </thin", ""),
    ("free", "<think>\n\n</think>\n\nquick", "", "quick"),
    ("open", "why\nso </think> \n\n Because. ", "why\nso", "Because. "),
    ("open", "<think>again</think>x", "again", "x"), ("open", "\n\nall of it, cut  ", "all of it, cut", ""),
    ("open", "a < b </ c </think </think>x</think>y", "a < b </ c </think", "x</think>y"),
    ("open", "<</think>x", "<", "x"), ("open", "a <think> inside</think>", "a <think> inside", ""),
    ("closed", "\n x <think>y</think>", "", "\n x <think>y</think>"),
]  # fmt: skip


def split(start: Start, parts: list[str]) -> tuple[str, str]:
    parser = ReasoningParser(THINK, start)
    pushed = [parser.push(part) for part in parts]
    pushed.append(parser.push("", final=True))
    return "".join(p[0] for p in pushed), "".join(p[1] for p in pushed)


@pytest.mark.parametrize("case", CASES, ids=lambda c: repr(c[1])[:30])
def test_any_split_gives_the_same(case: tuple[Start, str, str, str]) -> None:
    start, text, *expected = case
    draw = random.Random(5)
    for parts in ([text], list(text), *(garbled.pieces(draw, text) for _ in range(40))):
        assert list(split(start, parts)) == expected, parts
    last = ReasoningParser(THINK, start)
    assert list(last.push(text, final=True)) == expected


def test_only_what_may_be_a_marker_is_held_back() -> None:
    parser = ReasoningParser(THINK, "open")
    assert parser.push("I thin") == ("I thin", "")
    assert parser.push("k </th") == ("k", "")
    assert parser.push("en ") == (" </then", "")
    assert parser.push("</think>\nYes </think") == ("", "Yes </think")
    free = ReasoningParser(THINK, "free")
    assert free.push("<") == ("", "") and free.push("b> ") == ("", "<b> ")


def test_every_name_has_a_style_and_every_style_splits() -> None:
    assert set(REASONING_PARSERS) == set(REASONING_STYLES)
    for style in REASONING_STYLES.values():
        parser = ReasoningParser(style, "free")
        assert parser.push(f"{style.begin}a{style.end}b", final=True) == ("a", "b")


def test_where_an_answer_begins() -> None:
    r1, prompt = REASONING_STYLES["deepseek-r1"], "<user>hi<assistant>"
    assert start_of(THINK, prompt) == "free" and start_of(r1, prompt) == "open"
    assert start_of(THINK, f"{prompt}<think>\n") == "open"
    for style in (THINK, r1):
        assert start_of(style, f"{prompt}<think>\n\n</think>\n\n") == "closed"
    assert start_of(THINK, "say <think> please<assistant>") == "free"
    assert start_of(THINK, f"{prompt}<think>I was", continued="<think>I was") == "open"
    assert start_of(THINK, f"{prompt}<think>a</think>b", continued="<think>a</think>b") == "closed"
    assert start_of(THINK, f"{prompt}Sure", continued="Sure") == "closed"
    assert start_of(THINK, prompt, continued="") == "free"


def test_reasoning_tokens_end_with_the_marker() -> None:
    tokenizer = byte_tokenizer()  # a token is a byte, so the marker is text of eight of them
    for text, count in (("<think>é</think>\n\nx", 17), ("x</think>", 0), ("<think>ab", 9)):
        ids = tokenizer.encode(text)
        parser = ReasoningParser(THINK, "free")
        parser.push(text, final=True)
        assert count_reasoning(parser, THINK, ids, tokenizer) == count
    tokenizer.backend.add_tokens(["</think>"])
    ids = tokenizer.encode("why</think>because")
    parser = ReasoningParser(THINK, "open")
    parser.push("why</think>because", final=True)
    assert len(ids) == 11 and count_reasoning(parser, THINK, ids, tokenizer) == 4
    assert count_reasoning(ReasoningParser(THINK, "closed"), THINK, ids, tokenizer) == 0
