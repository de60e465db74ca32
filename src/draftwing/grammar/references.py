"""References in JSON schemas: what they stand for, and how they are written."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote, unquote

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
