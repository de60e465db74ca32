"""What is under way at the end of a text that grows: random expressions against a search of the whole text after every
piece."""

from __future__ import annotations

import random
from typing import Any

import pytest
import regex

from draftwing.requests.regex_ends import refused, under_way
from draftwing.requests.stop_regex import RegexScanner, Stops, compile_stop

PIECES = ["a", "b", "ab", " ", "\n", "-", "ba", "a b", "c"]
ATOMS = [
    "a", "b", "c", "-", " ", ".", r"\w", r"[^b]", "[[:alpha:]$]", "^", r"\b", r"\B", "$", r"\Z", r"\m", r"\M",
    "(?!a)", "(?!$)", "(?!b$|a)", "(?!a(?!b))", "(?=b)", r"(?=a\b)", r"(?=b|bb\B)",
    "(?=(a|b))", r"\1", r"(?=(a\b|b))", r"(?>a+\b)", "(?>a+?)", "(?=.*?c)", r"(?!.*\bc)",
    "(?<=a)", "(?<!b)", r"(?<!a\b)", "(?<=a(?=b))", "(?<=a$)", "(?>ab|a)", r"(?>a\b|ab)", r"(?>a|\Bab)",
]  # fmt: skip
REPEATS = ["", "", "", "", "+", "*", "?", "{2}", "{,2}", "+?", "++", "?+", "{1,2}+"]


def expression(rng: random.Random, depth: int = 2) -> str:
    found = ""
    for _ in range(rng.randrange(1, 4)):
        atom = rng.choice(ATOMS)
        if depth and rng.random() < 0.3:
            atom = f"({'' if rng.random() < 0.3 else '?:'}{expression(rng, depth - 1)})"
        plain = atom[0] not in "^$" and not atom.startswith(("(?=", "(?!", "(?<")) and atom not in (
            r"\b", r"\B", r"\Z", r"\m", r"\M",
        )  # fmt: skip
        found += atom + (rng.choice(REPEATS) if plain else "")
    return found + (f"|{expression(rng, depth - 1)}" if depth and rng.random() < 0.2 else "")


@pytest.mark.slow
@pytest.mark.further(seed=[2, 3, 4, 5])
@pytest.mark.parametrize("seed", range(6))
def test_what_ends_an_answer_does_not_depend_on_where_its_pieces_end(seed: int) -> None:
    rng = random.Random(seed)
    hits = late = 0
    for _ in range(500):
        pattern = rng.choice(["", "", "(?m)", "(?i)"]) + expression(rng)
        try:
            compile_stop(pattern)
        except ValueError:
            continue
        scanner, text = RegexScanner(Stops((pattern,))), ""
        for _ in range(12):
            held = text[len(text) - scanner.hold :]
            piece = rng.choice(PIECES)
            text += piece
            expected, found = regex.search(pattern, text), scanner.push(piece)
            if expected is None:
                assert found is None, (pattern, text)
                continue
            assert found is not None and (found.start, found.end) == expected.span(), (pattern, text)
            assert found.start >= len(text) - len(piece) - len(held), (pattern, text)
            hits += 1
            late += found.start < len(text) - len(piece)
            break
    assert hits > 150 and late > 20


@pytest.mark.parametrize(
    ("pattern", "pieces"),
    [
        (r"a\Bb", ["a", "b"]), (r" \bfoo", ["one", " ", "foo"]), (r"a(?!$)", ["a", "b"]),
        (r"end(?!\b)", ["en", "d", "s"]),
        (r"(?=(a))\1(?:\bc|x)", ["a", "x"]), (r"(?=(\w+))\1\b(?!$)", ["a", " "]),
        (r"x(?!(?!y))", ["x", "y"]), (r"a\B(?:b|c)+;", ["a", "b", "c", ";"]),
    ],
)  # fmt: skip
def test_what_the_library_takes_for_over(pattern: str, pieces: list[str]) -> None:
    scanner, found = RegexScanner(Stops((pattern,))), None
    for piece in pieces:
        assert found is None
        found = scanner.push(piece)
    assert found is not None and found.end <= sum(map(len, pieces))


def test_text_that_cannot_belong_to_a_match_is_not_held() -> None:
    scanner = RegexScanner(Stops((r"\bstop\b", r"[^\w]\Bx")))
    for piece, held in (("some text", 0), (" st", 2), ("and", 0), (" sto", 3), ("x ", 1)):
        assert scanner.push(piece) is None and scanner.hold == held


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        (r"a\Gb", r"\\G"), (r"a\Kb", r"\\K"), (r"a(*SKIP)b", "verbs"), (r"a(?R)?b", "itself"),
        (r"(?:foo){e<=1}", "errors"),
        (r"(?:foo){1<=e<=3}", "errors"), (r"(?:foo){2i+1d<=3}", "errors"), (r"(?V1)[[a-z]--[b]]", "V1"),
        (r"(?iV1)a", "V1"), (r"(?w)a\B", "flag w"), (r"a(?fi:ss)", "flag f"), (r"a(?(?=b)b|c)", "condition"),
    ],
)  # fmt: skip
def test_what_cannot_be_searched_as_the_text_grows(pattern: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        compile_stop(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        r'\{"e": 1\}', r"a{name}", r"[\\G$*]", r"(?<e>a)\g<e>", "(?P<w>a)(?P=w)", "(?i-f:a)", "(?i)few", r"a{,3}b",
        "a{}", r"\\G",
    ],
)  # fmt: skip
def test_what_only_looks_like_it(pattern: str) -> None:
    assert refused(pattern) is None and compile_stop(pattern)


def test_most_expressions_need_no_other() -> None:
    assert under_way(r"\d+ (?:a|b){2}[$\b](?=c)(?<=d)\$(?!e)\?\?") is None
    assert under_way(r"a\b") == r"(?:a(?:\n?(?s:.)(?!)|\b))\n?(?s:.)(?!)"


def test_what_bounds_a_search_stays() -> None:
    """Atomic groups and lookaheads, unless something in them may be otherwise than it is."""
    peek = r"\n?(?s:.)(?!)"
    assert under_way(r"(?>a+)(?:b|c)++(?=.*d)(?!e)$") == rf"(?:(?>a+)(?:b|c)++(?=.*d)(?!e)(?:{peek}|$)){peek}"
    assert under_way(r"(?>a+?)(?:b??)++(?=.*?d)") == rf"(?:(?:a+)(?:b?)+(?:(?=.*d(?!))|)){peek}"


def test_a_search_takes_little_where_a_match_is_long_under_way() -> None:
    scanner = RegexScanner(Stops((r"^(?=.*a)(?=.*zzz).*$",)))
    for piece in ("word " * 8000, *["sand"] * 300):
        assert scanner.push(piece) is None and scanner.failed is None
    assert scanner.hold == 41_200


def test_what_is_still_under_way_is_not_searched_for() -> None:
    class Counted:
        def __init__(self, compiled: Any) -> None:
            self.match, self._compiled, self.searches = compiled.match, compiled, 0

        def search(self, *args: Any, **named: Any) -> Any:
            self.searches += 1
            return self._compiled.search(*args, **named)

    stops = Stops(("foo.*?bar",))
    counted = stops.under_way[0] = Counted(stops.under_way[0])
    scanner = RegexScanner(stops)
    for piece in ["a", "fo", *["o fo"] * 9]:
        assert scanner.push(piece) is None
    assert counted.searches == 2 and scanner.hold == 38
    assert scanner.push("\n") is None and counted.searches == 3 and scanner.hold == 0


def test_a_search_without_memory_is_one_that_takes_too_long() -> None:
    class Greedy:
        pattern = "(a|(?1)b)"

        def search(self, *_: object, **__: object) -> None:
            raise MemoryError

    stops = Stops(("a",))
    stops.patterns[:] = [Greedy()]
    scanner = RegexScanner(stops)
    assert scanner.push("b") is None and scanner.failed is not None and "too long" in scanner.failed
