"""References in JSON schemas, and how many expressions one text in an answer must match at once.

The library builds one automaton for all that `allOf`, `$ref`, `anyOf` and properties of one name ask of a text. Its
time may double with each expression, and none of its limits counts that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from draftwing.grammar.ebnf import GrammarError
from draftwing.requests.grammar_field import SCHEMA_DATA, SCHEMA_MAPS

_PLAIN = re.compile(r"[a-z0-9_-]+(?:\.[a-z0-9_-]+)*")  # parts of addresses that are written in one way
_NOT_IN_URIS = re.compile(r"%(?![0-9A-Fa-f]{2})|[^\w.~!$&'()*+,;=:@/?%-]", re.ASCII)


def pointed(root: Any, reference: str) -> Any:
    """Returns what a reference like "#/$defs/a" stands for; None where that is nothing in `root`."""
    if reference.rstrip("/") == "#":
        return root
    if not reference.startswith("#/"):
        return None
    found = _found(root, unquote(reference[2:]))
    return _found(root, reference[2:]) if found is None else found


def _found(root: Any, pointer: str) -> Any:
    for part in pointer.split("/"):
        if not isinstance(root, dict | list):
            return None
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list) and name.removeprefix("+").isdecimal() and len(name) < 10:  # the library reads +0
            root = root[int(name)] if int(name) < len(root) else None
        else:
            root = root.get(name) if isinstance(root, dict) else None
    return root


def as_uri(text: str, root: Any) -> str:
    """Returns a reference, or what one leads to, as a URI: programs name definitions in any language, and by types."""
    path, mark, fragment = text.partition("#")
    if fragment.startswith("/") and _found(root, unquote(fragment[1:])) is None:
        fragment = fragment.replace("%", "%25") if _found(root, fragment[1:]) is not None else fragment
    return mark.join(_NOT_IN_URIS.sub(lambda found: quote(found[0], safe=""), part) for part in (path, fragment))


def moved(schema: Any, root: str, names: bool = False) -> Any:
    """Returns the schema with references to its own root turned into references to `root`.

    names: the keys are names of the user's, not keywords.
    """
    if isinstance(schema, list):
        return [moved(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    out = {}
    for key, value in schema.items():
        if names:
            out[key] = moved(value, root)
        elif key == "$ref" and isinstance(value, str) and value.startswith("#"):
            out[key] = root + value[1:]
        elif key in SCHEMA_DATA:
            out[key] = value
        else:
            out[key] = moved(value, root, key in SCHEMA_MAPS)
    return out


def references(value: Any) -> list[str]:
    """Every "$ref" in a schema."""
    found, rest = [], [value]
    while rest:
        part = rest.pop()
        if isinstance(part, dict):
            reference = part.get("$ref")
            found += [reference] if isinstance(reference, str) else []
            rest += part.values()
        elif isinstance(part, list):
            rest += part
    return found


class Resolver:
    """Finds what references of any form may stand for in a schema: pointers, anchors, and both behind an address."""

    def __init__(self, root: Any) -> None:
        self._bases = [root]  # what a pointer may begin at
        self._named: dict[str, list[Any]] = {}  # the same by the last part of the address
        self._anchors: dict[str, list[Any]] = {}
        self._found: dict[str, list[Any]] = {}
        self.steps = 0  # looked at so far
        left = [root]
        while left:
            one = left.pop()
            if isinstance(one, list):
                left += one
            if not isinstance(one, dict):
                continue
            left += one.values()
            for key in ("$anchor", "$dynamicAnchor", "$id", "id"):
                if isinstance(name := one.get(key), str):
                    address, _, anchor = name.partition("#")
                    self._anchors.setdefault(anchor if "#" in name else name, []).append(one)
                    if key in ("$id", "id"):
                        self._bases.append(one)
                        self._named.setdefault(_last(address), []).append(one)

    def targets(self, reference: str) -> list[Any]:
        """Returns all that it may stand for; nothing where it leads out of the schema. An address says little, for the
        same one is written in many ways."""
        if reference not in self._found:
            self._found[reference] = self._look(reference)
        return self._found[reference]

    def _look(self, reference: str) -> list[Any]:
        address, _, fragment = reference.partition("#")
        if not fragment.startswith("/"):
            fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            return self._anchors.get(fragment, [])
        bases = self._named.get(_last(address)) if _PLAIN.fullmatch(_last(address)) else None
        bases = self._bases if bases is None else bases
        self.steps += len(bases) + fragment.count("/")
        return [found for one in bases if (found := pointed(one, f"#{fragment}")) is not None]


def _last(address: str) -> str:
    """Returns the last part of an address's path; "" of a host alone."""
    path = address.partition("://")[2].partition("/")[2] if "://" in address else address
    return path.rstrip("/").rpartition("/")[2]


MAX_TOGETHER = 8  # expressions of one text: 8 take up to a second of the library, 14 simple ones half of it, 19 31 s
MAX_STEPS = 300_000  # schemas that are put together to find that out: one or two seconds

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
    resolver, weights, steps = Resolver(schema), _Weights(), 0
    left, seen = [_Value((), (schema,))], set[Any]()
    while left:
        value = left.pop()
        key = frozenset(map(id, value.parts)), frozenset(map(id, value.more)), frozenset(map(_ids, value.choices))
        if key in seen or weights.of_value(value) <= MAX_TOGETHER:
            continue
        seen.add(key)
        value = _expanded(value, resolver)
        if not (kinds := _kinds(value.parts)):
            continue  # no value is all of that
        steps += len(value.parts) + sum(map(len, value.choices))
        if steps + resolver.steps > MAX_STEPS:
            raise GrammarError("its alternatives and references stand for too many combinations of patterns")
        if value.choices:
            first, *rest = value.choices
            left += [_Value(value.parts, (one,), tuple(rest)) for one in first]
            continue
        found = {own for part in value.parts for own in _own(part)}
        if len(found) > MAX_TOGETHER and "string" in kinds:
            raise GrammarError(
                f"one text would have to match {len(found)} patterns and formats at once, at most {MAX_TOGETHER} are "
                "allowed: say it with fewer"
            )
        for inner in _within(value.parts):
            steps += len(inner.more)
            if steps > MAX_STEPS:
                break
            left.append(inner)


def _ids(choices: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(map(id, choices))


def _kinds(parts: tuple[Schema, ...]) -> set[str]:
    """Returns the types that all of them allow."""
    found = {"array", "boolean", "integer", "null", "number", "object", "string"}
    for part in parts:
        named = part.get("type", [*found])
        allowed = {one for one in (named if isinstance(named, list) else [named]) if isinstance(one, str)}
        found &= allowed | ({"integer"} if "number" in allowed else set())
    return found


class _Weights:
    """At most how many expressions a text can meet in a schema; endless where it refers to others."""

    def __init__(self) -> None:
        self._known: dict[int, float] = {}

    def of_value(self, value: _Value) -> float:
        """Returns it of all that holds for one value."""
        together = sum(map(self._of, (*value.parts, *value.more)))
        return together + sum(max(map(self._of, every), default=0) for every in value.choices)

    def _of(self, schema: Any) -> float:
        if isinstance(schema, list):
            return sum(map(self._of, schema))
        if not isinstance(schema, dict):
            return 0
        if id(schema) not in self._known:
            refers = isinstance(schema.get("$ref", schema.get("$dynamicRef")), str)
            own = math.inf if refers else len([*_own(schema)])
            self._known[id(schema)] = own + sum(map(self._of, schema.values()))
        return self._known[id(schema)]


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
        choices += [_options(every) for key in ("anyOf", "oneOf") if (every := _list(one, key))]
    return _Value((*parts.values(),), (), (*choices,))


def _options(schemas: list[Any]) -> tuple[Any, ...]:
    """Returns the schemas, of those that say nothing one."""
    found = [one for one in schemas if isinstance(one, dict)]
    return (*found, *[True] * (len(found) < len(schemas)))


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
