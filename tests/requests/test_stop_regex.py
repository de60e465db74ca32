"""Regular expressions that end an answer: against a search of the whole text after every token."""

from __future__ import annotations

import pickle
import random
from collections.abc import Hashable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import regex

from draftwing.errors import RequestError
from draftwing.requests import stop_regex
from draftwing.requests.sampling_params import SamplingParams
from draftwing.requests.stop_regex import RegexScanner, Searches, Stops, compile_stop, refused
from draftwing.text.detok import IncrementalDetokenizer, StopStringScanner
from draftwing.text.tokenizer import Tokenizer, load_tokenizer

PATTERNS = [
    (r"a+b",), (r"\d{3}",), (r"(?<=a)b",), (r"b(?=ca)",), (r"a(?!b)c?",), (r"^[abc]{2}",), (r"(?m)^a",), (r"c$",),
    (r"\bca\b",), (r"[^ab\s]{2}",), (r"a.*c",), (r"(?s)b.+é",), (r"(?i)É",), ("ab", r"c\s+a"), (r"(\w)\1",),
    (r"日|😀a",), (r"\n[ab\s]",), (r"(?:a|ab)c", r"b{2}"), (r"(?<=c )a", r"aa+"),
]  # fmt: skip
WORDS = ["a", "b", "c", "ab", "ca", " ", "é", "日", "😀", "\n", "1", "23", "aa", "bb"]


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


def reference(pieces: list[str], patterns: tuple[str, ...]) -> tuple[int, int, str, str] | None:
    """What ends first, after the first token with which anything matches."""
    text = ""
    for piece in pieces:
        text += piece
        found = [m for m in (regex.search(pattern, text) for pattern in patterns) if m] if piece else []
        if found:
            first = min(found, key=lambda m: (m.end(), m.start()))
            return first.start(), first.end(), first.group(), first.re.pattern
    return None


@pytest.mark.slow
@pytest.mark.parametrize("patterns", PATTERNS)
def test_the_scanner_finds_what_a_search_of_everything_finds(patterns: tuple[str, ...]) -> None:
    rng = random.Random(1)
    hits = 0
    for _ in range(80):
        pieces = [rng.choice(WORDS) for _ in range(10)]
        expected = reference(pieces, patterns)
        scanner, found = RegexScanner(Stops(patterns)), None
        for piece in pieces:
            found = scanner.push(piece)
            if found is not None:
                break
            # What is not held can never be part of a match.
            known = len(scanner._text) - scanner.hold
            assert expected is None or known <= expected[0]
        assert (tuple(found) if found else None) == expected
        hits += found is not None
    assert hits > 5


@pytest.mark.parametrize("patterns", PATTERNS)
def test_scheduler_and_stream_cut_alike(tokenizer: Tokenizer, patterns: tuple[str, ...]) -> None:
    rng = random.Random(2)
    hits = 0
    for i in range(40):
        keep = i % 2 == 0
        ids = tokenizer.encode("".join(rng.choice(WORDS) for _ in range(12)))
        whole = IncrementalDetokenizer(tokenizer)
        pieces = [whole.push([token], final=i == len(ids) - 1) for i, token in enumerate(ids)]
        text = "".join(pieces)
        expected = reference(pieces, patterns)
        hits += expected is not None
        shown, matched = text, None
        if expected is not None:
            shown, matched = text[: expected[1] if keep else expected[0]], expected[2]

        scanner = StopStringScanner(IncrementalDetokenizer(tokenizer, stop_regex=RegexScanner(Stops(patterns))))
        count = next((n for n, token in enumerate(ids, 1) if scanner.push(token) is not None), len(ids))
        assert scanner.finish() == matched
        found = RegexScanner(Stops(patterns))
        stream, at, out = IncrementalDetokenizer(tokenizer, no_stop_trim=keep, stop_regex=found, track=True), 0, ""
        while at < count:
            step = rng.randrange(1, 5)
            out += stream.push(ids[at : min(at + step, count)], final=at + step >= count)
            assert shown.startswith(out)
            at += step
        assert (out, stream.stopped) == (shown, matched)
        assert stream.starts is not None and stream.starts == sorted(stream.starts) and len(stream.starts) == count
    assert hits > 2


def test_against_a_string_what_ends_first_counts(tokenizer: Tokenizer) -> None:
    def cut(text: str, stop: str, pattern: str) -> tuple[str, str | None]:
        stream = IncrementalDetokenizer(tokenizer, stop=(stop,), stop_regex=RegexScanner(Stops((pattern,))))
        out = stream.push(tokenizer.encode(text), final=True)
        return out, stream.stopped

    assert cut("one two three four", "three", "tw.") == ("one ", "two")
    assert cut("one two three four", "two", "thr") == ("one ", "two")
    assert cut("one two three", "two three", "o t") == ("one tw", "o t") or cut("one two three", "x", "o t")[1] == "o t"
    assert cut("one", "x", "y") == ("one", None)


def scanner(searches: Searches, patterns: Sequence[str], together: Hashable | None = None) -> RegexScanner:
    found = searches.scanner(patterns, together)
    assert found is not None
    return found


def test_the_answers_of_a_request_share_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """For as long as there is one: nothing is kept afterwards."""
    compiled, compile_one = list[str](), stop_regex.compile_stop

    def spy(pattern: str) -> object:
        compiled.append(pattern)
        return compile_one(pattern)

    monkeypatch.setattr(stop_regex, "compile_stop", spy)
    patterns = ("shared a+b", "shared [cd]{3}")
    searches = Searches()
    answers = [scanner(searches, patterns) for _ in range(128)]
    assert compiled == [*patterns]
    ends = [answer.push(f"shared {'a' * (1 + i % 3)}b") for i, answer in enumerate(answers)]
    assert [found and found.end for found in ends] == [9 + i % 3 for i in range(128)], "each searches its own text"
    del answers
    searches.scanner(patterns)
    assert compiled == [*patterns, *patterns]


def test_parameters_keep_what_was_compiled_until_the_answers_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, compile_one = list[str](), stop_regex.compile_stop
    monkeypatch.setattr(stop_regex, "compile_stop", lambda pattern: compiled.append(pattern) or compile_one(pattern))
    params = SamplingParams(stop_regex=["kept a+b", "kept [cd]"], n=128)
    answers = [Searches().scanner(one.stop_regex) for one in params.answers(random.Random(1))]
    assert len(answers) == 128 and compiled == ["kept a+b", "kept [cd]"]
    sent = pickle.loads(pickle.dumps(params))  # to the engine, which compiles its own
    assert type(sent.stop_regex) is tuple and sent.stop_regex == params.stop_regex
    again = SamplingParams(stop_regex=params.stop_regex)
    assert again.stop_regex is params.stop_regex and len(compiled) == 2


def test_an_expression_is_searched_once_a_token_not_from_the_beginning() -> None:
    class Spy:
        pattern = "ab"
        starts: list[int] = []  # noqa: RUF012

        def search(self, text: str, start: int, **options: object) -> object:
            self.starts.append(start)
            return regex.compile("ab").search(text, start, **options)

    scanner = RegexScanner(Stops(("ab",)))
    scanner._patterns = [Spy()]
    for piece in ("xxxx", "yyyy", "aa", "zz"):
        assert scanner.push(piece) is None
    assert Spy.starts == [0, 4, 8, 9] and scanner.hold == 0


def test_patterns_that_cannot_be_used() -> None:
    for pattern, words in (
        ("(", "not a regular expression"), ("a*", "empty text"), ("", "empty text"), ("(?r)a", "backwards"),
        (r"\L<names>", "not a regular expression"), ("a" * 1001, "1001 characters"), ("(" * 990, "nested"),
        ("(?x)a{1 0000000}", "flag x"), ("(?ix:a)", "flag x"), ("(?:a{1000})(?#(){1000}", "comments"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            compile_stop(pattern)
    # Compiled, these would take gigabytes.
    for large in (
        "a{10001}", "(?:(?:a{1000}){1000}){1000}b", r"(?:\p{L}{3}\d{1000,}){40}", "(?V1)(?:b{1000}[[a])]){1000}",
        "(?:[a(]b{1000}){1000}", "a{99999999999999}", r"\b{4000}a", r"(?:\X{1000}){1000}", "(?:a{1000})(?i){1000}b",
    ):  # fmt: skip
        with pytest.raises(ValueError, match="repeats"):
            compile_stop(large)
    assert compile_stop(r"\d+").search("a12")
    for fine in (
        r"\d{4}-\d{2}-\d{2}",
        r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
        "a{0,1000000}b",
        r"\({20}[{9999}]",
    ):
        assert compile_stop(fine)


def test_a_search_that_takes_too_long(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_regex, "SEARCH_SECONDS", 0.01)
    slow = Stops((r"(?:a|aa)+c(?:a|aa)+d",))
    ids = tokenizer.encode("b " + "a" * 50 + " end")
    scanner = StopStringScanner(IncrementalDetokenizer(tokenizer, stop_regex=RegexScanner(slow)))
    failed = [n for n, token in enumerate(ids) if scanner.push(token) is None and scanner.failed]
    assert failed and "takes too long" in str(scanner.failed)
    # A stream that fails where the scheduler did not shows nothing more until it gets how the answer ended.
    for matched, shown in (("end", "b " + "a" * 50 + " "), (None, "b " + "a" * 50 + " end"), ("x", None)):
        stream = IncrementalDetokenizer(tokenizer, stop_regex=RegexScanner(slow))
        out = stream.push(ids) + stream.push((), final=True)
        assert stream.failed and not out.startswith("b a")
        assert out + stream.end_at(matched) == (shown or tokenizer.decode(ids))


def test_many_expressions_have_one_allowance(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each search is short, but there are many after every token."""
    now = [0.0]

    class Slow:
        pattern = "slow"

        def search(self, *_: object, **__: object) -> None:
            now[0] += 0.0005

    monkeypatch.setattr(stop_regex, "compile_stop", lambda _: Slow())
    monkeypatch.setattr(stop_regex, "time", SimpleNamespace(thread_time=lambda: now[0]))
    few, many = RegexScanner(Stops(["a"] * 3)), RegexScanner(Stops(["a"] * 64))
    for _ in range(1000):
        few.push("x")
    assert not few.failed
    for _ in range(10):
        many.push("x")
    assert "takes too long" in str(many.failed) and "63 others" in str(many.failed)


def test_the_answers_of_a_request_have_one_allowance(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, their searches take a request's time together; others' are not touched."""
    now, cost, searches = [0.0], [0.0], Searches()

    class Slow:
        pattern = "slow"

        def search(self, *_: object, **__: object) -> None:
            now[0] += cost[0]

    monkeypatch.setattr(stop_regex, "compile_stop", lambda _: Slow())
    monkeypatch.setattr(stop_regex, "time", SimpleNamespace(thread_time=lambda: now[0]))

    def taken(count: int, seconds: float) -> tuple[float, bool]:
        """What the searches of so many answers take until they fail, at most 1,000 tokens; an answer of another
        request with them never does."""
        cost[0], now[0] = seconds, 0.0
        answers = [scanner(searches, ["a"], ("client", 1.0)) for _ in range(count)]
        other = scanner(searches, ["a"], ("client", 2.0))
        for _ in range(1000):
            for answer in answers:
                answer.push("x")
            cost[0], before = 0.001, now[0]
            other.push("x")
            cost[0], now[0] = seconds, before
        assert not other.failed
        assert len({answer.failed for answer in answers}) == 1
        return now[0], bool(answers[0].failed)

    assert taken(1, 0.0019) == (pytest.approx(1.9), False)
    for count, seconds in ((1, 0.004), (2, 0.0025), (8, 0.0025), (64, 0.0025)):
        together, failed = taken(count, seconds)
        assert failed and together < 0.25
    assert taken(64, 0.0001)[1] is False, "short searches of many answers go on"
    assert not searches._allowances, "an engine keeps nothing of requests that have ended"


def test_all_expressions_of_a_request_are_bounded_together() -> None:
    SamplingParams(stop_regex=tuple(f"{'a' * 200}{i}" for i in range(64)))
    with pytest.raises(RequestError, match="together"):
        SamplingParams(stop_regex=tuple(f"a{{900}}{i}" for i in range(64)))


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
    for _ in range(300):
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
    assert hits > 80 and late > 10


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
