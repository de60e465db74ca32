"""Limits what a request may ask of the grammar library, besides the limits that the library has itself.

Its own limits count steps of some phases; a long expression, or repetitions of repetitions, cost seconds before any of
them is looked at, and long chains of references cost stack, whose end kills the process.
"""

from __future__ import annotations

import math
import os
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal, InvalidOperation
from typing import Any, TypeVar

from draftwing.grammar.ebnf import MAX_REPETITION, GrammarError, written_count
from draftwing.requests.grammar_field import MAX_REGEX_CHARS, SCHEMA_MAPS
from draftwing.requests.refusals import show

MAX_CHARS = 400_000  # of a grammar's text
MAX_MULTIPLES = 100_000  # all `multipleOf` together: the automaton of one has a state for each remainder
MAX_COMMON = 500_000  # their least common multiple: 0.7 s of the library
LOWEST = -(2**63) + 2048  # of a range's upper ends: room for what rounds to the lowest integer of 64 bits
_VALUES = frozenset(["const", "enum", "maximum", "exclusiveMaximum"])
WHITESPACE = r" |\n{1,2}[ \t]{0,20}"  # between tokens of JSON, if nobody asks for another; small models never end more
NICE = 10  # of threads in which the library works
_STACK = 512 << 20  # bytes of address space; pages that are not touched cost nothing

_ATOM = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_MULTIPLE = re.compile(r'multipleOf\\*"\s*:\s*([-+.\deE]+)')  # in JSON, or in a text in JSON
_COUNT = re.compile(r"\{\s*(\d+)\s*(?:,\s*(\d*)\s*)?\}")  # blanks: with (?x)
_SPACE = r"[ \t\n\r]|\\[ tnrs]|\\x(?:20|09|0[aAdD])"  # JSON's, as an expression has it
_SPACES = re.compile(rf"(?:{_SPACE}|\[(?:{_SPACE})+\]|\(\?:|[()|?*+^$]|\{{\d+(?:,\d*)?\}})*")
_ASCII = {"d": "0-9", "w": "A-Za-z0-9_", "s": r" \t\n\r\f\v"}
_lock = threading.Lock()
T = TypeVar("T")


def checked_regex(pattern: str) -> str:
    """Returns `pattern` with \\d, \\w and \\s as the ASCII characters that their users mean, not as the hundreds of
    digits of all scripts, from which a hot sampler would choose. Whatever matches it matches the original, too.

    Raises GrammarError if the expression is too large, or would escape what is written behind it.
    """
    if re.sub(r"\\.", "", pattern, flags=re.DOTALL).endswith("\\"):
        raise GrammarError("the regular expression is not supported: nothing follows the backslash at its end")
    if len(pattern) > MAX_REGEX_CHARS:
        raise GrammarError(f"the expression has {len(pattern)} characters, at most {MAX_REGEX_CHARS} are allowed")
    if _written_out(pattern) > MAX_REPETITION:
        raise GrammarError(f"the expression's repetitions stand for more than {MAX_REPETITION} characters")

    def replaced(match: re.Match[str]) -> str:
        atom = match[0]
        if atom.startswith("[^"):
            return atom  # fewer characters less are more characters
        if atom.startswith("["):
            return re.sub(r"\\.", lambda inside: _ASCII.get(inside[0][1], inside[0]), atom, flags=re.DOTALL)
        kind = _ASCII.get(atom[1:]) if atom.startswith("\\") else None
        return atom if kind is None else f"[{kind}]"

    return _ATOM.sub(replaced, pattern)


def whitespace_regex(pattern: str) -> str:
    """Returns an expression of the white space between JSON's tokens as the library takes it. Raises GrammarError where
    it could match anything else."""
    if len(pattern) > MAX_REGEX_CHARS:
        raise GrammarError(f"the expression has {len(pattern)} characters, at most {MAX_REGEX_CHARS} are allowed")
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise GrammarError(f"it is no regular expression: {error}") from None
    if _SPACES.fullmatch(pattern) is None:
        raise GrammarError("expected an expression of blanks, tabs and line ends alone")
    own = r" \t\n\r"  # Rust's \s has others, too
    return checked_regex(
        re.sub(r"\[[^]]*\]|\\s", lambda m: m[0].replace(r"\s", own) if m[0] != r"\s" else f"[{own}]", pattern)
    )


def _written_out(pattern: str) -> int:
    """Counts the atoms after every x{n} was replaced by n times x; nothing else of the syntax matters for it."""
    sizes, last, at = [0], 0, 0  # of the open groups, of the newest atom
    while at < len(pattern):
        count = _COUNT.match(pattern, at)
        if count is not None:
            factor = max(written_count(count[1]), written_count(count[2] or "0"), 1)
            sizes[-1] += last * (factor - 1)
            last *= factor
            at = count.end()
            continue
        atom = _ATOM.match(pattern, at)
        assert atom is not None
        at = atom.end()
        if atom.group() == "(":
            sizes.append(0)
        elif atom.group() == ")":
            last = sizes.pop() if len(sizes) > 1 else 0
            sizes[-1] += last
        elif atom.group() not in "*+?|^$":
            last = 1
            sizes[-1] += 1
    return sum(sizes)


def lark_regex(pattern: str) -> str:
    """Returns a regular expression as it stands between slashes in Lark. Raises GrammarError as `checked_regex`."""
    written = re.sub(r"\\.|/", lambda m: r"\/" if m[0] == "/" else m[0], checked_regex(pattern), flags=re.DOTALL)
    return written.replace("\\\n", "\\n").replace("\n", "\\n")


def check_multiples(text: str) -> None:
    """Checks a grammar in the library's language. Raises GrammarError where all `multipleOf` in it are too much: the
    library builds the automaton of each, for seconds and gigabytes, and none of its limits counts that. Of those that
    hold for one number (`allOf`, `$ref`, ..) it builds that of their least common multiple; which these are is not
    looked for."""
    found = [_remainders(written) for written in _MULTIPLE.findall(text)]
    common = 1
    for count in set(found):
        if common <= MAX_COMMON:
            common = math.lcm(common, count)
    if sum(found) > MAX_MULTIPLES or common > MAX_COMMON:
        raise GrammarError(
            f"expected values of multipleOf, without decimal points, of at most {MAX_MULTIPLES} together and a least "
            f"common multiple of at most {MAX_COMMON}; found {sum(found)} and {common}: take fewer or rounder ones"
        )


def check_values(schema: Any) -> None:
    """Checks what the library must not meet anywhere in a schema, in examples and the like, too, to which references of
    many forms may lead. Raises GrammarError for values and upper bounds that the library takes for -2^63: to build the
    range from there to there it calls itself until the stack ends; and for expressions that are too large."""
    left = [(schema, False, False)]  # and whether it is a value, or in one, and whether its keys are names of schemas
    while left:
        one, is_value, has_names = left.pop()
        if isinstance(one, dict):
            for key, inner in one.items():
                is_schema = has_names and isinstance(inner, dict)
                found = is_value or (key in _VALUES and not is_schema)
                left.append((inner, found, key in SCHEMA_MAPS and not has_names))
            named = one.get("patternProperties")
            for pattern in (one.get("pattern"), *(named if isinstance(named, dict) else ())):
                if isinstance(pattern, str) and not is_value:
                    checked_regex(pattern)
        elif isinstance(one, list):
            left += [(inner, is_value, False) for inner in one]
        elif is_value and isinstance(one, int | float) and one <= LOWEST:
            raise GrammarError(f"expected values and upper bounds above {LOWEST}, found {show(one)}")


def _remainders(written: str) -> int:
    """About as many states has the automaton of a number's multiples; one more than are allowed stands for more. 1 for
    what is no number: in a text that says so."""
    try:
        _, shown, place = Decimal(written).as_tuple()
    except InvalidOperation:
        return 1
    longest = len(str(MAX_MULTIPLES))
    digits = "".join(map(str, shown)).rstrip("0")  # 0.25 is 25
    place = int(place) + len(shown) - len(digits)
    if len(digits) > 2 and place > 0:  # after one or two digits a zero is a state more
        digits += "0" * min(place, longest)
    return int(digits or 1) if len(digits) <= longest else MAX_MULTIPLES + 1


def give_way() -> None:
    """Lowers the priority of the calling thread."""
    if sys.platform == "linux":  # elsewhere it would be the whole process
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICE)


def on_large_stack(work: Callable[[], T]) -> T:
    """Returns `work()`, run on a thread with room for deep recursion: the library follows references by calls. The
    thread gives way to others: while it works the library holds no lock that they want."""
    with _lock:  # the size is the process's; other threads that start meanwhile only get more address space
        before = threading.stack_size(_STACK)
        try:
            pool = ThreadPoolExecutor(1, "grammar-compiler", initializer=give_way)
            result = pool.submit(work)
        finally:
            threading.stack_size(before)
    with pool:
        return result.result()
