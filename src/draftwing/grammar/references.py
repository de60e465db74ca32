"""References in JSON schemas: what they stand for, and how they are written."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote, unquote

from draftwing.requests.grammar_field import SCHEMA_DATA, SCHEMA_MAPS

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
    """Finds what references of any form may stand for in a schema: pointers, anchors, and both behind an `$id`."""

    def __init__(self, root: Any) -> None:
        self._resources: list[tuple[str, Any]] = [("", root)]  # last part of its address, where it is
        self._anchors: dict[str, list[Any]] = {}
        left = [root]
        while left:
            one = left.pop()
            if isinstance(one, dict):
                if isinstance(name := one.get("$id"), str):
                    self._resources.append((_last(name.partition("#")[0]), one))
                for key in ("$anchor", "$dynamicAnchor", "$id"):
                    if isinstance(name := one.get(key), str):
                        self._anchors.setdefault(name.rpartition("#")[2], []).append(one)
                left += one.values()
            elif isinstance(one, list):
                left += one

    def targets(self, reference: str) -> list[Any]:
        """Returns all that it may stand for, which is nothing where it leads out of the schema."""
        address, _, fragment = reference.partition("#")
        if not fragment.startswith("/"):
            fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            return self._anchors.get(fragment, [])
        name = _last(address)
        bases = [one for own, one in self._resources if not address or own == name]
        return [found for one in bases if (found := pointed(one, f"#{fragment}")) is not None]


def _last(address: str) -> str:
    return unquote(address).rstrip("/").rpartition("/")[2]
