"""White space between the tokens of JSON: bounded, and as the server or the request says."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest

from draftwing.config.options import Options
from draftwing.errors import ConfigError
from draftwing.grammar.compiler import GrammarCompiler, Translator
from draftwing.grammar.ebnf import GrammarError
from draftwing.grammar.limits import WHITESPACE, whitespace_regex
from draftwing.requests.grammar_field import Grammar

PAIR = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
KINDS = {
    "json_schema": (json.dumps(PAIR), "%s"),
    "json_object": ("", '{"a":%s}'),
    "structural_tag": (json.dumps({"format": {"type": "tag", "begin": "<", "end": ">",
                                              "content": {"type": "json_schema", "json_schema": PAIR}}}), "<%s>"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_white_space_is_bounded_by_default(byte_vocab: Any, kind: Any) -> None:
    """Against Python's `re`, at each of the five places of a pair; written by `json.dumps` all ways stay."""
    text, frame = KINDS[kind]
    state = byte_vocab.compiler.compile(Grammar(kind, text))
    for space in ["", " ", "  ", "\n", "\n\n", "\n\n\n", "\t", "\n\t", "\n" + " " * 20, "\n" + " " * 21, "\r\n",
                  "\n \n", "\n\n" + "\t" * 20, " " * 500, "\n" * 500]:  # fmt: skip
        expected = not space or re.fullmatch(WHITESPACE, space) is not None
        for place in range(4):
            parts = ["[", "1", ",", "2", "]"]
            parts[place] += space
            assert byte_vocab.accepts_bytes(state, frame % "".join(parts)) == expected, (space, place)
    for indent, separators in itertools.product((None, 1, 2, 4), (None, (",", ":"))):
        written = json.dumps([1, 2], indent=indent, separators=separators)
        assert byte_vocab.accepts_bytes(state, frame % written)


PATTERNS = ["", "[ ]?", r"\s*", "[ \\t\\n\\r]*", " {0,3}", r"[\n\s]?", r"(?: |\n){1,2}", r"\x20?", "^ ?$", " |\t"]


@pytest.mark.parametrize(("pattern", "kind"), [*zip(PATTERNS, itertools.cycle(KINDS))])
def test_the_server_or_the_request_says_which(byte_vocab: Any, kind: Any, pattern: str) -> None:
    text, frame = KINDS[kind]
    tokenizer = byte_vocab.tokenizer
    server = GrammarCompiler(tokenizer, byte_vocab.size, tokenizer.stop_ids, Translator(tokenizer, pattern))
    ours = server.compile(Grammar(kind, text))
    asked = byte_vocab.compiler.compile(Grammar(kind, text, pattern))
    for space in ["", " ", "  ", "   ", "\n", " \n", "\t", "\r", "\f", "\v", "\u00a0", " " * 300]:
        expected = not space or (re.fullmatch(pattern, space) is not None and not set(space) & set("\f\v\u00a0"))
        written = frame % f"[1,{space}2]"
        for state in (ours, asked):
            assert byte_vocab.accepts_bytes(state, written) == expected, space


@pytest.mark.parametrize("pattern", ["x", " |x", r"\S*", "[^ ]", r"\w?", ".", "(", " {2,1}", r"[\s\S]", r"\x41",
                                     "[ -~]", r"\p{Zs}", "(?i: )", "[", r"\b", " " * 20_000])  # fmt: skip
def test_what_could_be_more_than_white_space_is_refused(byte_vocab: Any, pattern: str) -> None:
    with pytest.raises(GrammarError):
        whitespace_regex(pattern)
    with pytest.raises(ConfigError, match="--constrained-json-whitespace-pattern"):
        Translator.of(Options(model="m", constrained_json_whitespace_pattern=pattern), byte_vocab.tokenizer)
