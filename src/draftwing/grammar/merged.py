"""Counts the expressions that one text in an answer must match at once.

The library builds one automaton for all that `allOf`, `$ref`, `anyOf` and properties of one name ask of a text. Its
time may double with each expression, and none of its limits counts that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from draftwing.grammar.ebnf import GrammarError
from draftwing.grammar.references import Resolver

MAX_TOGETHER = 8  # expressions of one text: 8 take 0.05 s of the library at most, 14 half a second, 16 2.5 s, 19 31 s
MAX_STEPS = 500_000  # schemas that are put together to find that out: a second

Schema = dict[str, Any]


class _Value(NamedTuple):
    """What is asked of one value.

    parts: schemas that hold together, looked into.  more: others that hold, too.  choices: of each one holds, too.
    """

    parts: tuple[Schema, ...]
    more: tuple[Any, ...]
    choices: tuple[tuple[Any, ...], ...] = ()


def check_merged(schema: Schema) -> None:
    """Checks a schema in the library's language. Raises GrammarError where one text would have to match more than
    `MAX_TOGETHER` expressions and formats, or where that is too much to find out."""
    if len(set(_expressions(schema))) <= MAX_TOGETHER:
        return
    resolver, steps = Resolver(schema), 0
    left, seen = [_Value((), (schema,))], set()
    while left:
        value = _expanded(left.pop(), resolver)
        steps += len(value.parts)
        if steps > MAX_STEPS:
            raise GrammarError("its alternatives and references stand for too many combinations of patterns")
        key = frozenset(map(id, value.parts)), frozenset(tuple(map(id, every)) for every in value.choices)
        if key in seen:
            continue
        seen.add(key)
        if value.choices:
            first, *rest = value.choices
            left += [_Value(value.parts, (one,), tuple(rest)) for one in first]
            continue
        found = {own for part in value.parts for own in _own(part)}
        if len(found) > MAX_TOGETHER:
            raise GrammarError(
                f"one text would have to match {len(found)} patterns and formats at once, at most {MAX_TOGETHER} are "
                "allowed: say it with fewer"
            )
        for inner in _within(value.parts):
            steps += len(inner.more)
            if steps > MAX_STEPS:
                break
            left.append(inner)


def _own(schema: Schema) -> Iterator[tuple[str, str]]:
    for key in ("format", "pattern"):
        if isinstance(text := schema.get(key), str):
            yield key, text


def _expressions(schema: Any) -> Iterator[tuple[str, str]]:
    """Yields those of a whole document, of examples and the like, too, to which a reference may lead."""
    left = [schema]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            yield from _own(one)
            left += one.values()
        elif isinstance(one, list):
            left += one


def _expanded(value: _Value, resolver: Resolver) -> _Value:
    """Returns the same value with nothing left in `more`."""
    parts, choices, left = {id(one): one for one in value.parts}, [*value.choices], [*value.more]
    while left:
        one = left.pop()
        if not isinstance(one, dict) or id(one) in parts:
            continue
        parts[id(one)] = one
        left += _list(one, "allOf")
        for key in ("$ref", "$dynamicRef"):
            if isinstance(reference := one.get(key), str):
                left += resolver.targets(reference)
        choices += [tuple(every) for key in ("anyOf", "oneOf") if (every := _list(one, key))]
    return _Value((*parts.values(),), (), (*choices,))


def _within(parts: tuple[Schema, ...]) -> Iterator[_Value]:
    """Yields what is asked of the values in a value: properties by name, by pattern and others, and items."""
    named = [_map(part, "properties") for part in parts]
    matching = [_map(part, "patternProperties") for part in parts]
    others = [part.get("additionalProperties") for part in parts]
    patterns = tuple(one for every in matching for one in every.values())
    for name in dict.fromkeys(name for every in named for name in every):
        asked = tuple(every.get(name, other) for every, other in zip(named, others, strict=True))
        yield _Value((), asked, ((True, *patterns),) if patterns else ())
    for pattern in dict.fromkeys(pattern for every in matching for pattern in every):
        yield _Value((), tuple(every.get(pattern, other) for every, other in zip(matching, others, strict=True)))
    yield _Value((), (*others,))
    firsts = [_list(part, "prefixItems") or _list(part, "items") for part in parts]
    rest = [_other_items(part) for part in parts]
    for i in range(max(map(len, firsts), default=0)):
        yield _Value((), tuple(each[i] if i < len(each) else one for each, one in zip(firsts, rest, strict=True)))
    yield _Value((), (*rest,))
    for key in ("contains", "not", "propertyNames"):
        yield _Value((), tuple(part.get(key) for part in parts))


def _other_items(schema: Schema) -> Any:
    items = schema.get("items")
    return schema.get("additionalItems") if isinstance(items, list) else items


def _list(schema: Schema, key: str) -> list[Any]:
    found = schema.get(key)
    return found if isinstance(found, list) else []


def _map(schema: Schema, key: str) -> Schema:
    found = schema.get(key)
    return found if isinstance(found, dict) else {}
