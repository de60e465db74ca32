"""EBNF against brute force: every short string, against languages written out in Python."""

import itertools
import re

import pytest

from draftwing.errors import RequestError
from draftwing.grammar.ebnf import GrammarError, to_lark
from draftwing.requests.grammar_field import Grammar


def balanced(text):
    while "()" in text:
        text = text.replace("()", "")
    return text == ""


def is_sum(text):
    """term ("+" term)*, by putting a digit for every innermost sum in brackets."""
    while (shorter := re.sub(r"\(1(\+1)*\)", "1", text)) != text:
        text = shorter
    return bool(re.fullmatch(r"1(\+1)*", text))


GRAMMARS = [
    # greedy lexemes would never see the last letters
    ('root ::= [a-z]+ "bx"', "abx", lambda s: re.fullmatch("[a-z]+bx", s)),
    ('root ::= x "b" root | "a"\nx ::= "b" | "bb"', "ab", lambda s: re.fullmatch("(bb|bbb)*a", s)),
    ('root ::= "" | "(" root ")" root', "()", balanced),
    ('root ::= "a" root "b" | "ab"', "ab", lambda s: s and s == "a" * (len(s) // 2) + "b" * (len(s) // 2)),
    ('root ::= root "a" | "b"', "ab", lambda s: re.fullmatch("ba*", s)),
    (
        '# sums\nroot ::= term ("+" term)* # more\nterm ::=\n  [1-2] | "(" root ")"\n',
        "1+()",
        is_sum,
    ),
    ('root ::= item{2,3} tail?\nitem ::= [^a] | "x"\ntail ::= "a"+', "abx", None),
    ('a-b ::= "\\x61" "\\u0062"\nroot ::= a-b{2} | (("/" | "\\"")){1,}', 'ab/"', None),
]


EXPECTED = {
    6: lambda s: re.fullmatch("[^a]{2,3}a*", s),
    7: lambda s: re.fullmatch('(ab){2}|[/"]+', s),
}


@pytest.mark.parametrize("number", range(len(GRAMMARS)))
def test_every_short_string(byte_vocab, number):
    text, alphabet, language = GRAMMARS[number]
    language = language or EXPECTED[number]
    root = byte_vocab.compiler.compile(Grammar("ebnf", text))
    tokens = {char: byte_vocab.bytes.index(char.encode()) for char in alphabet}
    found = 0

    def descend(state, string):
        """Goes through all legal strings; what is not reached must not be in the language, nor begin a member."""
        nonlocal found
        assert state.may_end == bool(language(string)), string
        found += state.may_end
        if len(string) == 6:
            return
        forced = state.forced()
        for char in alphabet:
            # Forced text goes by the tokenizer's own cut, so single characters are tried on the automaton below it.
            if state._matcher.try_consume_tokens([tokens[char]]):
                descend(state, string + char)
                state.rollback(1)
            else:
                assert not forced or byte_vocab.bytes[forced[0]][:1] != char.encode()
                refused.add(string + char)

    refused = set()
    descend(root, "")
    for length in range(7):
        for string in map("".join, itertools.product(alphabet, repeat=length)):
            if language(string):
                assert not any(string[:i] in refused for i in range(len(string) + 1)), string
    assert found > 1


def test_rules_without_recursion_become_one_expression():
    assert to_lark('root ::= a{2} | "x"\na ::= [0-9]?') == "start: /(?:(?:(?:[0-9])?){2,2}|x)/"


@pytest.mark.parametrize(
    "text, reason",
    [
        ('x ::= "a"', "no rule 'root'"), ("root ::= a", "'a', which is not defined"),
        ('root ::= "a', "expected '\"'"), ("root ::= [z-a]", "range"), ("root ::= []", "no characters"),
        ("root ::= [a", "']'|too early"), ('root ::= ("a"', r"expected '\)'"), ('root "a"', "::="),
        ('root ::= "a"\nroot ::= "b"', "twice"), ('root ::= "a"{3,2}', "low <= high"), ('root ::= "\\q"', "escape"),
        ('root ::= "\\ud800"', "no character"), ('root ::= "a" (= "b")', "lookahead"),
        ('root ::= TagDispatch(("a", b))', "TagDispatch"), ("root ::= " + "(" * 300, "nested"),
        ("root ::= a\na ::= b\nb ::= a", "never ends"), ("", "no rule"),
    ],
)  # fmt: skip
def test_errors(text, reason):
    with pytest.raises(GrammarError, match=reason):
        to_lark(text)


@pytest.mark.slow
def test_a_long_chain_of_rules(byte_vocab):
    rules = [f"r{i} ::= r{i + 1}" for i in range(3000)]
    text = "\n".join(["root ::= r0", *rules, 'r3000 ::= "a"'])
    try:
        state = byte_vocab.compiler.compile(Grammar("ebnf", text))
    except RequestError:
        return
    assert state.run([byte_vocab.bytes.index(b"a")]) == 1 and state.done


@pytest.mark.parametrize(
    "text",
    [
        'root ::= @("a" | "b"', 'root ::= x\nx ::= "a" @("b"\ny ::= "c"', 'root ::= @("é" "(" ("b")* | [(]',
        'root ::= ("a") # (\n  "\\"(" @("b"\n\n',
    ],
)  # fmt: skip
def test_the_place_of_an_unclosed_group_is_said(text: str) -> None:
    """Which is where `@` is."""
    before, _, rest = text.partition("@")
    place = f"line {before.count(chr(10)) + 1}, column {len(before.rpartition(chr(10))[2]) + 1}"
    with pytest.raises(GrammarError, match=rf"expected '\)' for the '\(' of {place}, found"):
        to_lark(before + rest)


@pytest.mark.parametrize("text", ['root ::= "a" @)', 'root ::= "a"\nx ::= "b" @"c', "root ::= @[a", "@+", "root@"])
def test_other_errors_say_line_and_column(text: str) -> None:
    before, _, rest = text.partition("@")
    place = f"line {before.count(chr(10)) + 1}, column {len(before.rpartition(chr(10))[2]) + 1}"
    with pytest.raises(GrammarError, match=f"^{place}: "):
        to_lark(before + rest)
