"""JSON schemas as the grammar library takes them.

The library refuses a keyword that it does not build, whatever it asks for. So keywords that ask for nothing are dropped
here, and what others ask for is said with those that it builds. What is left is for the library to refuse.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from draftwing.grammar.ebnf import GrammarError
from draftwing.grammar.limits import check_values, checked_regex
from draftwing.grammar.merged import as_uri, check_merged, pointed, references
from draftwing.requests.grammar_field import SCHEMA_DATA, SCHEMA_LISTS, SCHEMA_MAPS, SCHEMAS

MAX_NAMES = 10_000  # that all `propertyNames` of a schema list together
MAX_DEPENDENT = 3  # optional properties of an object that others depend on: each doubles what has to be built
_MAX_REFERENCES = 8  # from one schema of names to the next

_ANNOTATIONS = frozenset({
    "$anchor", "$comment", "$defs", "$id", "$schema", "contentEncoding", "contentMediaType", "contentSchema",
    "default", "definitions", "deprecated", "description", "examples", "id", "readOnly", "title", "writeOnly",
})  # fmt: skip
_FOR_READERS = ("$comment", "description", "title")
_URIS = ("$anchor", "$id", "$ref")
# Keywords of values of one type, which ask for nothing of others.
_OF_TYPE = {
    "object": ("propertyNames", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"),
    "array": ("contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems"),
    "string": ("format",),
}
# Formats of JSON Schema that the library does not build. Others that it does not know are nobody's: they only annotate.
_FORMATS = frozenset({
    "idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer", "regex", "relative-json-pointer",
    "uri-reference", "uri-template",
})  # fmt: skip
_BUILT_FORMATS = frozenset({
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid",
})  # fmt: skip
_OLD_DRAFTS = frozenset(f"http://json-schema.org/draft-0{n}/schema" for n in (4, 6, 7))
_DRAFTS = _OLD_DRAFTS | {f"https://json-schema.org/draft/{name}/schema" for name in ("2019-09", "2020-12")}
# Keywords next to which `unevaluatedProperties` and `unevaluatedItems` are more than "additional" ones.
_APPLIED = frozenset({
    "$dynamicRef", "$recursiveRef", "$ref", "allOf", "anyOf", "contains", "dependencies", "dependentSchemas",
    "else", "if", "not", "oneOf", "then",
})  # fmt: skip


def schema_text(schema: Any, options: Mapping[str, Any]) -> str:
    """Returns a JSON schema with our options in it; those that the request may have written there itself are dropped,
    as they could relax what the schema says. Raises GrammarError."""
    return json.dumps({**rewritten(schema), "x-guidance": dict(options)}, ensure_ascii=False)


def rewritten(schema: Any) -> dict[str, Any]:
    """Returns a JSON schema in what the library knows of the language. Raises GrammarError."""
    if schema is False:
        raise GrammarError("the schema false allows nothing")
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarError(f"expected an object, true or false, found {type(schema).__name__}")
    check_values(schema)
    made: dict[str, Any] = _Rewriter(schema).schema(schema)
    check_merged(made)
    return made


def _allows_all(schema: Any) -> bool:
    return schema is True or (isinstance(schema, dict) and schema.keys() <= _ANNOTATIONS)


def _types(schema: Mapping[str, Any]) -> list[Any] | None:
    """Returns the types that it names; None for any."""
    kinds = schema.get("type")
    return kinds if isinstance(kinds, list) or kinds is None else [kinds]


class _Rewriter:
    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._old = str(root.get("$schema")).rstrip("#") in _OLD_DRAFTS
        self._names = 0  # listed so far
        # What is referred to is a schema, wherever it stands.
        self._targets = {id(target) for one in set(references(root)) if (target := pointed(root, one)) is not None}

    def schema(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return self._other(schema)
        made: dict[str, Any] = {}
        for key, value in schema.items():
            if key in SCHEMA_MAPS and isinstance(value, dict):
                made[key] = {name: self.schema(one) for name, one in value.items()}
            elif key in SCHEMA_LISTS and isinstance(value, list):
                made[key] = [self.schema(one) for one in value]
            elif key in SCHEMAS:
                made[key] = self.schema(value)
            elif key in _URIS and isinstance(value, str):
                made[key] = as_uri(value, self._root)
            elif key not in (*_FOR_READERS, "x-guidance", "$schema") or _is_draft(value):
                made[key] = self._other(value, key in SCHEMA_DATA)
        _check_patterns(made)
        self._reduce(made, schema)
        return made

    def _other(self, value: Any, data: bool = False) -> Any:
        """Returns the value of a keyword that nobody knows, or data: no schema unless something refers to it."""
        if isinstance(value, list):
            return [self._other(one, data) for one in value]
        if not isinstance(value, dict):
            return value
        if id(value) in self._targets:
            return self.schema(value)
        made = {key: self._other(one, data) for key, one in value.items()}
        if not data:
            _check_patterns(made)
        return made

    def _reduce(self, made: dict[str, Any], given: Mapping[str, Any]) -> None:
        """Rewrites what the library does not build. given: the schema as it was."""
        kinds = _types(made)
        for kind, keys in _OF_TYPE.items():
            if kinds is not None and kind not in kinds:
                _drop(made, *keys)
        if "$dynamicAnchor" in made:
            made.setdefault("$anchor", made.pop("$dynamicAnchor"))
        _drop(made, "$recursiveAnchor")
        if isinstance(name := made.get("format"), str) and name not in _FORMATS | _BUILT_FORMATS:
            _drop(made, "format")
        if made.get("not") is False:
            _drop(made, "not")
        _unevaluated(made)
        self._contains(made)
        _counted(made)
        added = [*_conditional(made), *_dependent(made), *self._named(made, given)]
        if added:
            others = made.get("allOf", [])
            made["allOf"] = [*others, *added] if isinstance(others, list) else others  # which is refused

    def _contains(self, made: dict[str, Any]) -> None:
        if self._old or "contains" not in made:
            _drop(made, "minContains", "maxContains")
        if "contains" not in made:
            return
        low, high = made.get("minContains", 1), made.get("maxContains")
        min_items, max_items = made.get("minItems", 0), made.get("maxItems", 0)
        if not all(map(_is_count, (low, 0 if high is None else high, min_items, max_items))):
            return
        wanted = made["contains"]
        every = _allows_all(wanted) or (wanted == made.get("items") and "prefixItems" not in made)
        if every:
            made["minItems"] = max(low, min_items)
            if high is not None:
                made["maxItems"] = min(high, made.get("maxItems", high))
        if every or (low == 0 and high is None):
            _drop(made, "contains", "minContains", "maxContains")

    def _named(self, made: dict[str, Any], given: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Schemas of objects whose properties have such names as `propertyNames` asks for."""
        if "propertyNames" not in made:
            return []
        names = self._followed(given["propertyNames"])
        if isinstance(names, bool):
            _drop(made, "propertyNames")
            return [] if names else [{"additionalProperties": False}]
        if not isinstance(names, dict) or "string" not in (_types(names) or ["string"]):
            return []
        asked = {key: one for key, one in names.items() if key not in _ANNOTATIONS | {"type"}}
        if asked.get("minLength") == 0:
            del asked["minLength"]
        found: list[dict[str, Any]]
        match asked:
            case _ if not asked:
                found = []
            case {"enum": list(every), **rest} if not rest:
                found = [self._listed(every)]
            case {"const": only, **rest} if not rest:
                found = [self._listed([only])]
            case {"pattern": str(pattern), **rest} if not rest:
                found = [_matching(checked_regex(pattern))]
            case _ if asked.keys() <= {"minLength", "maxLength"} and all(map(_is_count, asked.values())):
                low, high = asked.get("minLength", 0), asked.get("maxLength", "")
                found = [_matching(checked_regex(f"^(?s:.{{{low},{high}}})$"))]
            case _:
                return []
        _drop(made, "propertyNames")
        return found

    def _followed(self, names: Any) -> Any:
        """Returns the schema that a schema of references alone stands for."""
        for _ in range(_MAX_REFERENCES):
            if not isinstance(names, dict) or not isinstance(reference := names.get("$ref"), str):
                break
            if names.keys() - _ANNOTATIONS != {"$ref"}:
                return None
            names = pointed(self._root, reference)
        return names

    def _listed(self, names: Sequence[Any]) -> dict[str, Any]:
        self._names += len(names)
        if self._names > MAX_NAMES:
            raise GrammarError(f"propertyNames: all of them may list {MAX_NAMES} names together; found more")
        listed = {name: True for name in names if isinstance(name, str)}
        return {"properties": listed, "additionalProperties": False}


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_draft(value: Any) -> bool:
    return isinstance(value, str) and value.rstrip("#") in _DRAFTS


def _check_patterns(made: dict[str, Any]) -> None:
    if isinstance(pattern := made.get("pattern"), str):
        made["pattern"] = checked_regex(pattern)
    if isinstance(named := made.get("patternProperties"), dict):
        made["patternProperties"] = {checked_regex(name): one for name, one in named.items()}


def _drop(made: dict[str, Any], *keys: str) -> None:
    for key in keys:
        made.pop(key, None)


def _matching(pattern: str) -> dict[str, Any]:
    return {"patternProperties": {pattern: True}, "additionalProperties": False}


def _unevaluated(made: dict[str, Any]) -> None:
    for key, additional in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        if isinstance(made.get("items"), list) and additional == "items":
            additional = "additionalItems"
        if key not in made:
            continue
        if _allows_all(made[key]) or additional in made:  # which leaves none
            del made[key]
        elif not made.keys() & _APPLIED:
            made[additional] = made.pop(key)


def _counted(made: dict[str, Any]) -> None:
    max_items = made.get("maxItems")
    if made.get("uniqueItems") is False or (type(max_items) is int and max_items < 2):
        _drop(made, "uniqueItems")
    max_properties, names = made.get("maxProperties"), made.get("properties", {})
    closed = made.get("additionalProperties") is False and not made.get("patternProperties")
    if type(max_properties) is int and closed and isinstance(names, dict) and max_properties >= len(names):
        _drop(made, "maxProperties")


def _conditional(made: dict[str, Any]) -> list[Any]:
    """Returns what `if`, `then` and `else` ask for where that depends on nothing."""
    then, otherwise = made.get("then", True), made.get("else", True)
    condition = made.get("if")
    if "if" not in made or (_allows_all(then) and _allows_all(otherwise)):
        wanted: Any = True
    elif condition is False or _allows_all(condition):
        wanted = then if condition is not False else otherwise
    else:
        return []
    _drop(made, "if", "then", "else")
    return [] if _allows_all(wanted) else [wanted]


def _dependent(made: dict[str, Any]) -> list[Any]:
    """Returns what properties ask for where they are given, as alternatives with and without them."""
    given: dict[str, list[Any]] = {}  # by property, what it asks for
    for key in ("dependentRequired", "dependentSchemas", "dependencies"):
        every = made.get(key, {})
        if not isinstance(every, dict):
            return []
        for name, asked in every.items():
            if isinstance(asked, list):
                asked = {"required": asked}
                if not asked["required"]:
                    continue
            if not _allows_all(asked):
                given.setdefault(name, []).append(asked)
    required = made.get("required", [])
    if not isinstance(required, list):
        return []
    needed = [name for name in given if name in required]
    free = [name for name in given if name not in required]
    if len(free) > MAX_DEPENDENT:
        return []
    _drop(made, "dependentRequired", "dependentSchemas", "dependencies")
    added = [one for name in needed for one in given[name]]
    for name in free:
        absent = {"properties": {name: False}}
        added.append({"anyOf": [absent, {"required": [name], "allOf": given[name]}]})
    return added
