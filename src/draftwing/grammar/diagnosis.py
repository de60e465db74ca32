"""Why the grammar library does not take a schema, in words of JSON schema, and where in it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import quote, unquote

from draftwing.grammar.merged import moved, pointed
from draftwing.grammar.schemas import rewritten
from draftwing.requests.grammar_field import SCHEMA_LISTS, SCHEMA_MAPS, SCHEMAS
from draftwing.requests.refusals import show

SECONDS = 0.5  # of this thread at most, for all schemas of a grammar
_PATH_CHARS = 200
_PART_CHARS = 60
_ROOT = "#/$defs/s"
_NOT_BUILT = {
    "contains": " unless it is what all items are",
    "dependencies": " for more than 3 properties that are not required",
    "dependentRequired": " for more than 3 properties that are not required",
    "dependentSchemas": " for more than 3 properties that are not required",
    "propertyNames": " but with one of enum, const and pattern, or with lengths",
    "unevaluatedItems": " with keywords like allOf and $ref",
    "unevaluatedProperties": " with keywords like allOf and $ref",
}
# How messages of the library begin, and what is reported.
_WORDS = [
    (r"Unknown format: (?P<it>.*)", "the format '{it}' is not supported"),
    (r"oneOf constraints are not supported", "'oneOf' is not supported where more than one alternative could hold"),
    (r"min/maxProperties only", "'minProperties' and 'maxProperties' are not supported with optional properties"),
    (r"Unsatisfiable schema: (?P<it>.*)", "no value fulfils it: {it}"),
    (r"Invalid type: (?P<it>.*)", "'{it}' is no type"),
    (r"Resource '(?:json-schema:///)?(?P<it>[^']*)' is not present", "the reference '{it}' leads out of the schema"),
    (
        r".*regex parse error:\n {4}(?P<pattern>[^\n]*)\n {4}(?P<before> *)\^+\nerror: (?P<it>[^\n]*)",
        "the regular expression is not supported: {it}, at {at}",
    ),
    (r".*regex parse error:.*\nerror: (?P<it>[^\n]*)", "the regular expression is not supported: {it}"),
    (r"patternProperty regexes (?P<it>.*) are not disjoint", "the patterns {it} could match one name"),
    (r"schema must be an object or boolean", "expected a schema: an object, true or false"),
]
_REFERENCES = ("Anchor", "Pointer", "Resource")
Fails = Callable[[dict[str, Any]], str | None]
Path = tuple[str, ...]


def explained(why: str, schemas: Sequence[tuple[Path, Any]], fails: Fails) -> str:
    """Returns what to say of a grammar that cannot be compiled.

    why: what the library says.  schemas: those in the grammar, and where.  fails: what it says of a schema in its own
    language; None for one that it takes.
    """
    deadline = time.thread_time() + SECONDS
    for path, schema in schemas:
        if time.thread_time() > deadline:
            break
        made = rewritten(schema)
        alone = fails(made)
        if alone is not None:
            where = _shown((*path, *_located(schema, made, fails, deadline)))
            return f"{where}: {in_words(alone)}" if where else in_words(alone)
    return in_words(why)


def in_words(why: str) -> str:
    """Returns a reason of the library's without the grammar's inside."""
    why = re.sub(r"^at \d+\(\d+\): ", "", re.split(r"\n\s*\d+ \| |\n  while processing", why)[0])
    why = unquote(why) if why.startswith(_REFERENCES) else why  # it names them as URIs
    if match := re.match(r"Unimplemented keys: (\[.*\])", why):
        return "; ".join(f"'{key}' is not supported{_NOT_BUILT.get(key, '')}" for key in json.loads(match[1]))
    for pattern, reason in _WORDS:
        if match := re.match(pattern, why, re.DOTALL):
            found = match.groupdict()
            at = show(found.get("pattern", "")[len(found.get("before", "")) :], _PART_CHARS)
            return reason.format_map({**found, "at": at})
    return why


def _shown(path: Path) -> str:
    whole = ".".join(part[:_PART_CHARS] if part.isprintable() else ascii(part)[:_PART_CHARS] for part in path)
    return whole if len(whole) <= _PATH_CHARS else f"...{whole[-_PATH_CHARS:]}"


def _located(schema: Any, made: dict[str, Any], fails: Fails, deadline: float) -> Path:
    """Finds where in the schema, which is `made` in the library's language, the smallest one is that fails alike."""
    root = moved(made, _ROOT)

    def why(pointers: Sequence[str]) -> str | None:
        """Returns why schemas in it fail: of several one that is needed."""
        if time.thread_time() > deadline:
            return None
        parts = {str(i): {"$ref": _ROOT + pointer} for i, pointer in enumerate(pointers)}
        needed = {"type": "object", "properties": parts, "required": [*parts]} if len(parts) != 1 else parts["0"]
        reason = fails({**needed, "$defs": {"s": root}})
        return reason and reason.split("\n  while processing")[0]

    path: Path = ()
    pointer, seen = "", {""}
    reason = why([pointer])
    if reason is not None and why([]) == reason:  # whatever is needed: it leads out of the schema
        return next((place for place, reference in _references(made) if f"{reference}'" in reason), path)
    while reason is not None:
        inner = [one for one in _inside(schema, made, pointer, path) if one[0] not in seen]
        while len(inner) > 1:
            half = inner[: len(inner) // 2]
            inner = half if why([one for one, _ in half]) == reason else inner[len(half) :]
        if not inner or why([inner[0][0]]) != reason:
            break
        (pointer, path), *_ = inner
        seen.add(pointer)
    return path


def _inside(schema: Any, made: Any, pointer: str, path: Path) -> Iterator[tuple[str, Path]]:
    """Yields the schemas that the one at `pointer` consists of, in both of its forms: where, and how that is reported.
    Of a reference what it stands for."""
    given, here = pointed(schema, f"#{pointer}"), pointed(made, f"#{pointer}")
    if not isinstance(given, dict) or not isinstance(here, dict):
        return
    found: list[Path] = []
    for key, value in here.items():
        other = given.get(key)
        if key in SCHEMA_LISTS and isinstance(value, list) and isinstance(other, list):
            found += [(key, str(i)) for i in range(min(len(value), len(other)))]
        elif key in SCHEMA_MAPS - {"$defs", "definitions"} and isinstance(value, dict) and isinstance(other, dict):
            found += [(key, name) for name in value.keys() & other.keys()]
        elif key in SCHEMAS and other is not None and not isinstance(value, bool):
            found.append((key,))
    for inner in found:
        where = f"{pointer}/{'/'.join(map(_escaped, inner))}"
        part = pointed(made, f"#{where}")
        alone = isinstance(part, dict) and part.keys() == {"$ref"}
        yield (alone and _target(made, part)) or (where, (*path, *inner))
    if (target := _target(made, here)) is not None:
        yield target


def _target(made: Any, schema: Any) -> tuple[str, Path] | None:
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    if not isinstance(reference, str) or not isinstance(pointed(made, reference), dict):
        return None
    parts = unquote(reference[1:]).split("/")[1:]
    return reference[1:], tuple(part.replace("~1", "/").replace("~0", "~") for part in parts)


def _references(value: Any, path: Path = ()) -> Iterator[tuple[Path, str]]:
    """Every "$ref", and where."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        if key == "$ref" and isinstance(inner, str):
            yield path, inner
        yield from _references(inner, (*path, str(key)))


def _escaped(name: str) -> str:
    return quote(name.replace("~", "~0").replace("/", "~1"), safe="~", errors="surrogatepass")


def schemas_in(form: Any, path: Path = ()) -> list[tuple[Path, Any]]:
    """Returns the schemas in a structural tag, and where."""
    if isinstance(form, list):
        return [one for i, item in enumerate(form) for one in schemas_in(item, (*path, str(i)))]
    if not isinstance(form, dict):
        return []
    if form.get("type") == "json_schema" and "json_schema" in form:
        return [((*path, "json_schema"), form["json_schema"])]
    if {"begin", "schema", "end"} <= form.keys():
        schema = form["schema"]
        return [((*path, "schema"), json.loads(schema) if isinstance(schema, str) else schema)]
    return [one for key, item in form.items() for one in schemas_in(item, (*path, key))]
