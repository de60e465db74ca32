"""Grammars of texts in JSON strings accept exactly the strings whose texts match, as Python's `re` finds."""

from __future__ import annotations

import json
import random
import re

import pytest
from fake_engine import EOS, byte_tokenizer
from timed import least_seconds

from draftwing.errors import RequestError
from draftwing.grammar.compiler import GrammarCompiler
from draftwing.grammar.ebnf import GrammarError
from draftwing.grammar.quoted import quoted
from draftwing.requests.grammar_field import Grammar

PATCH = """
start: "*** Begin" NL change+ "*** End" NL?  // the last line end may be missing
change: add | remove | edit
add: "*** Add: " name NL ("+" /.*/ NL)+ -> added
remove: "*** Remove: " name NL
?edit: "*** Edit: " name NL [moved] line+
moved: "*** To: " name NL
line: ("@@" | "@@ " /.+/ | ("+" | "-" | " ") /(.*)/) NL
name: /[^\\n]+/
%import common.LF -> NL
"""
SUMS = """
start: sum
sum: sum ("+" | "-") value | value
?value: NUMBER | "(" sum ")" | "abs"i "(" sum ")" | "a".."c" ~ 2..3
%import common (NUMBER, WS)
%ignore WS
"""
EXPRESSIONS = [
    r"[^\n]+", r"a.b", r'(\d+|"x")\\{2}', r"[\w\-]+\s?", r"(?:a|\n)*", r"[]a]+", r'[^]"\\]', r"\x41?\u00e9", "/a/?",
    "[a-z-]+", "a{2,3}?b*?", '^a|"$', "(?P<x>[a-]+)", r"\S\D?", r"[\s\S]{2}", r"[^\W]|[\d\t]", "",
]  # fmt: skip
ALPHABET = 'ab"\\\n\té-]/{x A1\x01\x7f\u2028😀'


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(byte_tokenizer(), EOS + 1, [EOS])


def takes(compiler: GrammarCompiler, syntax: str, definition: str, texts: list[str]) -> list[bool]:
    """Which of the texts, in an object as a call has it, are whole answers."""
    grammar = {"type": "grammar", "grammar": quoted(syntax, definition)}
    ends = ({"type": "const_string", "value": value} for value in ('{"input": "', '"}'))
    begin, end = ends
    form = {"type": "sequence", "elements": [begin, grammar, end]}
    root = compiler.compile(Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": form})))
    found = []
    for text in texts:
        state = root.fork()
        ids = compiler._tokenizer.encode(json.dumps({"input": text}, ensure_ascii=False), add_special_tokens=False)
        found.append(state.run(ids) == len(ids) and state.may_end)
    return found


@pytest.mark.parametrize("pattern", EXPRESSIONS)
def test_expressions_match_as_in_python(compiler: GrammarCompiler, pattern: str) -> None:
    draw = random.Random(pattern)
    texts = ["".join(draw.choices(ALPHABET, k=draw.randrange(5))) for _ in range(60)]
    texts += ["axb", "a\nb", '"x"\\\\', "12\\\\", "Aé", "é", "/a/", "aab", "aaabb", "a", '"', "a-", "-", "/a"]
    right = [re.fullmatch(pattern, text, re.ASCII) is not None for text in texts]
    assert takes(compiler, "regex", pattern, texts) == right and True in right and False in right


def test_a_grammar_of_patches(compiler: GrammarCompiler) -> None:
    good = '*** Begin\n*** Edit: a "b" \\.py\n*** To: ü.py\n@@ def f():\n-x = "1\\n"\n+y\t= \'😀\'\n \n*** End'
    added = "*** Begin\n*** Remove: x\n*** Add: y\n+\n+*** End\n*** End\n"
    bad = [good.replace("@@", "##"), good + "\n\n", good.removesuffix("End"), added.replace("+", ""), "", "*** Begin"]
    assert takes(compiler, "lark", PATCH, [good, good + "\n", added, *bad]) == [True] * 3 + [False] * len(bad)


def test_a_grammar_with_recursion_and_ignored_blanks(compiler: GrammarCompiler) -> None:
    inlined = 'start: _pair\n_pair: "a" "b"\n%ignore " "'
    assert takes(compiler, "lark", inlined, ["ab", "a b", "a c"]) == [True, True, False]
    good = ["1+2", " 1 + (2 -\n3)", "aBs(1)", "((((1))))+2.5e3\t", "ab+abc"]
    bad = ["1+", "abs 1", "(1", "a", "1.2.3", "x"]
    assert takes(compiler, "lark", SUMS, good + bad) == [True] * len(good) + [False] * len(bad)


@pytest.mark.parametrize(
    "definition",
    [
        "start: <|endoftext|>", "start: %json {}", 'start: a\n%declare A\na: "x"', "start: /(?=a)/", r"start: /\p{L}/",
        "start: /a/m", "start: /[[:alpha:]]/", 'start: "x" }\nstart: "y"', "%import common.NOTHING\nstart: NOTHING",
        'start[stop="x"]: /a*/', r'start: "\ud800"', r"start: /\ud800/", "start: /[^\\s\\S]/", "start: /[b-a]/",
        "start: /ü/i", "start: /a$/", 'start: "b".."a"', "start: @other",
        "start: /" + "a" * 10_001 + "/", "start: /[a/",
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused(definition: str) -> None:
    with pytest.raises(GrammarError):
        quoted("lark", definition)


@pytest.mark.parametrize(
    "definition", ['other: "x"', "start: missing", 'start: "x" start', 'start: "x"{1000}\n a: start', "start: A{9999}"]
)
def test_grammars_that_hold_nothing(compiler: GrammarCompiler, definition: str) -> None:
    if "1000" in definition:
        assert takes(compiler, "lark", definition, ["x" * 1000, "x"]) == [True, False]
    else:
        with pytest.raises(RequestError):
            takes(compiler, "lark", definition, [""])


@pytest.mark.timing
def test_an_expression_without_an_end_is_looked_for_once() -> None:
    def read() -> None:
        with pytest.raises(GrammarError):
            quoted("lark", "start: /" + r"\/" * 50_000)

    assert least_seconds(read, 1) < 2, "each of the slashes begins an expression that is searched to the end"


def test_large_classes_are_read_in_linear_time() -> None:
    members = "".join(chr(code) for code in range(0x4E00, 0x4E00 + 9000, 2))
    assert len(quoted("regex", f"[^{members}]" + "[^\n]" * 100)) < 200_000
