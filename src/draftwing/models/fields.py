"""Reads the values of a checkpoint's config, which may hold anything: each is checked, and an error says its key, what
was expected and what was found.

What nobody reads is refused, for a key that is ignored would give fluent but wrong text; but for keys of a table,
`neutral.toml`, with the values at which they change nothing.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from draftwing.errors import CheckpointError
from draftwing.requests.refusals import show

T = TypeVar("T")
# No size of a model comes near these, nor is one that large a sound one.
LARGEST = (1 << 24) - 1
WIDEST = 1 << 20  # of a layer
MAX_LAYERS = 1000
MAX_EXPERTS = 4096
MAX_EXPERTS_IN_ALL = 1 << 16  # of all layers


def max_experts(layers: int) -> int:
    """Returns the most of a layer, where each of `layers` has as many."""
    return min(MAX_EXPERTS, MAX_EXPERTS_IN_ALL // layers)


class Fields:
    """The values of one object by key. A null is as good as no value.

    where: what errors begin with.  prefix: of all keys.  inside: the keys of the objects that this one is in.  asked:
    paths of keys that somebody asked for, of this object and of those in it; a dot ends those of opened objects.
    """

    def __init__(
        self, values: Mapping[str, Any], where: str, prefix: str = "", inside: str = "", asked: set[str] | None = None
    ) -> None:
        self.where, self.prefix, self.inside = where, prefix, inside
        self.asked = set() if asked is None else asked
        self._values = values

    def get(self, key: str) -> Any:
        self.asked.add(f"{self.inside}{self.prefix}{key}")
        return self._values.get(self.prefix + key)

    def has(self, key: str) -> bool:
        """Returns whether the key is there, if only with a null."""
        self.asked.add(f"{self.inside}{self.prefix}{key}")
        return self.prefix + key in self._values

    def overruled(self, own: Mapping[str, Any], where: str | None = None) -> Fields:
        """Returns the same object with some other values. where: of errors, None: as it is."""
        own = {f"{self.prefix}{key}": value for key, value in own.items()}
        return Fields({**self._values, **own}, where or self.where, self.prefix, self.inside, self.asked)

    def unread(self) -> Iterator[tuple[str, Any]]:
        """Yields path and value of each key with the prefix that nobody asked for, also of objects that were opened."""
        for key, value in self._values.items():
            path = f"{self.inside}{key}"
            if not key.startswith(self.prefix) or value is None:
                continue
            if path not in self.asked:
                yield path.removeprefix(self.prefix), value
            elif f"{path}." in self.asked:
                yield from Fields(value, self.where, inside=f"{path}.", asked=self.asked).unread()

    def values(self) -> Iterable[Any]:
        return self._values.values()

    def items(self) -> Iterable[tuple[str, Any]]:
        return self._values.items()

    def whole(self, key: str, low: int = 1, high: int = LARGEST, default: int | None = None) -> int:
        """Returns an integer from low to high. Raises CheckpointError for another value, and for none without a
        default."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not low <= value <= high:
            raise self.unlike(key, f"an integer from {low} to {high}" if low < high else str(low))
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """Returns a number from low to high, as a float. Errors as `whole`."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not low <= value <= high:  # which NaN is not
            raise self.unlike(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def numbers(self, key: str, low: float, high: float) -> tuple[float, ...]:
        """Returns a list of numbers from low to high."""
        value = self.get(key)
        every = value if isinstance(value, list) else []
        if not every or not all(type(one) in (int, float) and low <= one <= high for one in every):
            raise self.unlike(key, f"a list of numbers from {low:g} to {high:g}")
        return tuple(map(float, every))

    def flag(self, key: str, default: bool = False) -> bool:
        """Returns whether a switch is on. A null where it is on by default is refused: others read it as off."""
        if default and self.has(key) and self.get(key) is None:
            raise self.unlike(key, "true or false")
        return self._typed(key, bool, default, "true or false")

    def text(self, key: str, default: str) -> str:
        return self._typed(key, str, default, "a text")

    def _typed(self, key: str, kind: type[T], default: T, expected: str) -> T:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, kind):
            raise self.unlike(key, expected)
        return value

    def texts(self, key: str) -> list[str]:
        """Returns a list of texts, empty where there is none."""
        value = self.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self.unlike(key, "a list of texts")
        return value

    def inner(self, key: str) -> Fields:
        """Returns the fields of an object, which is empty where there is none."""
        value = self.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.unlike(key, "an object")
        inside = f"{self.inside}{self.prefix}{key}."
        self.asked.add(inside)
        return Fields(value or {}, self.where, inside=inside, asked=self.asked)

    def renamed(self, names: Mapping[str, str]) -> dict[str, Any]:
        """Returns what is said in keys of other names, under ours. names: theirs by ours.  Raises CheckpointError where
        both are there and differ, of which libraries take one or the other."""
        found = {ours: self.get(theirs) for ours, theirs in names.items() if self.has(theirs)}
        for ours, value in found.items():
            if self.get(ours) not in (None, value):
                raise self.unlike(ours, f"none beside {names[ours]}, or the same, {show(value)}")
        return found

    def ids(self, key: str) -> tuple[int, ...]:
        """Returns token ids: none, one or a list of them."""
        value = self.get(key)
        every = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(one) is int and 0 <= one <= LARGEST for one in every):
            raise self.unlike(key, "a token id, or a list of them")
        return tuple(every)

    def check(self, key: str, served: Collection[Any]) -> None:
        """Raises CheckpointError for a value that is none of those that are served."""
        value = self.get(key)
        if value is not None and (isinstance(value, np.ndarray) or value not in served):
            raise self.unsupported(key, value)

    def unlike(self, key: str, expected: str) -> CheckpointError:
        """Returns the error of a value that is wrong."""
        return CheckpointError(f"{self._named(key)}: expected {expected}, found {show(self.get(key))}")

    def unsupported(self, key: str, value: Any) -> CheckpointError:
        """Returns the error of a value that is right, and for which there is no code here."""
        return CheckpointError(f"{self._named(key)} = {show(value)} is not supported")

    def _named(self, key: str) -> str:
        return f"{self.where}: {self.inside}{self.prefix}{key}"


# ---- keys that nobody reads ------------------------------------------------------------------------------------------

Values = tuple[Any, ...] | None  # None: any

_TABLES = tomllib.loads((Path(__file__).parent / "neutral.toml").read_text(encoding="utf8"))
BOOKKEEPING, IN_ROPE = frozenset(_TABLES["bookkeeping"].split()), frozenset(_TABLES["in_rope"].split())
TOOLS = tuple(_TABLES["tools"])
EVERYWHERE: dict[str, Values] = {key: tuple(values) for key, values in _TABLES["everywhere"].items()}
METADATA: dict[str, Values] = {
    **dict.fromkeys(_TABLES["metadata_bookkeeping"].split()),
    **{key: tuple(values) for key, values in _TABLES["metadata"].items()},
}


def refuse_unread_metadata(fields: Fields) -> None:
    """Does what `refuse_unread` does with the metadata of a GGUF file."""
    for key, value in fields.unread():
        if key not in METADATA:
            raise unknown(fields, fields.prefix + key, value, "take it out of the file")
        if not _is_one(value, METADATA[key]):
            raise fields.unsupported(key, value)


def refuse_unread(fields: Fields, own: Mapping[str, Values], known_alone: bool = False) -> None:
    """Raises CheckpointError for a key that nobody asked for, where it may change the arithmetic. own: of the family.
    known_alone: of those that stand here; others are as they may be."""
    for path, value in fields.unread():
        outer, _, key = path.rpartition(".")
        if outer.startswith("quantization_config"):  # whose reader knows them
            continue
        if outer.startswith(("rope_parameters", "rope_scaling")):
            if key in IN_ROPE or (key == "llama_4_scaling_beta" and value == 0):
                continue
        elif path in BOOKKEEPING or path.startswith(TOOLS) or (known_alone and path not in EVERYWHERE):
            continue
        elif path in own or path in EVERYWHERE:
            if _is_one(value, own[path] if path in own else EVERYWHERE[path]):
                continue
            raise fields.unsupported(path, value)
        if not known_alone:
            raise unknown(fields, path, value, "take it out of config.json")


def unknown(fields: Fields, path: str, value: Any, instead: str) -> CheckpointError:
    """Returns the error of a key that nobody reads here, and of which nobody knows what it does."""
    return CheckpointError(
        f"{fields.where}: {path[:80]!r} = {show(value)} is not supported: nothing here reads this key, and it may "
        f"change what the model computes; if you know that it does not, {instead}"
    )


def _is_one(value: Any, values: Values) -> bool:
    return values is None or (not isinstance(value, np.ndarray) and value in values)
