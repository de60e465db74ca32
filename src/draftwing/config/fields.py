"""Dataclasses whose fields are options: their checks, and the arguments of the command line made of them.

`Options` and training's `Settings` are such dataclasses. A field's type is one of bool, int, float and str, perhaps
`| None`, or a tuple of one of them, which is typed with spaces.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import field
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from draftwing.errors import ConfigError

SECRETS = frozenset({"api_key", "admin_api_key"})  # whose values are in no message
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


def option(
    default: Any,
    group: str,
    help: str,
    *,
    aliases: Sequence[str] = (),
    short: Sequence[str] = (),
    choices: Sequence[str] = (),
    metavar: str | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    common: bool = False,
) -> Any:
    """Returns a dataclass field with what the command line and the checks need.

    short: further spellings of the command line, with their dash.  metavar: shown in place of choices or type.
    minimum, maximum: inclusive.
    common: whether --help shows it, or only --help-all.
    """
    meta = {"group": group, "help": help, "aliases": aliases, "short": short, "choices": choices}
    return field(
        default=default, metadata=meta | {"metavar": metavar, "min": minimum, "max": maximum, "common": common}
    )


class Kind(NamedTuple):
    """A field's type: types of one value, that of the command line first; whether it holds several; whether None is
    allowed."""

    singles: tuple[type[Any], ...]
    many: bool
    optional: bool


_known: dict[type[Any], Mapping[str, Kind]] = {}  # hints are texts, whose evaluation takes milliseconds


def kinds(cls: type[Any]) -> Mapping[str, Kind]:
    """Returns the type of each field."""
    if cls not in _known:
        _known[cls] = {name: _kind(hint) for name, hint in typing.get_type_hints(cls).items()}
    return _known[cls]


def _kind(hint: Any) -> Kind:
    hints = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    many = typing.get_origin(hints[0]) is tuple
    singles = typing.get_args(hints[0])[:1] if many else tuple(one for one in hints if one is not types.NoneType)
    return Kind(tuple(typing.get_origin(one) or one for one in singles), many, types.NoneType in hints)


def from_text(name: str, kind: Kind, text: str) -> Any:
    """Returns a field's value as it is typed where there is no parser of arguments. Raises ConfigError."""
    single = kind.singles[0]
    if single is bool:
        if text.lower() not in _TRUE + _FALSE:
            raise ConfigError(f"{name} must be true or false; found {text!r}")
        return text.lower() in _TRUE
    try:
        values = tuple(single(word) for word in (text.split() if kind.many else [text]))
    except ValueError:
        raise ConfigError(f"{name} must be {_a(single)}; found {text!r}") from None
    return values if kind.many else values[0]


def names_of(cls: type[Any]) -> dict[str, str]:
    """Returns every accepted name, aliases included, to its field's name."""
    fields = dataclasses.fields(cls)
    return {f.name: f.name for f in fields} | {alias: f.name for f in fields for alias in f.metadata["aliases"]}


def check_fields(values: Any) -> None:
    """Raises ConfigError for the first field whose value has the wrong type or lies outside its choices or bounds."""
    found = kinds(type(values))
    for spec in dataclasses.fields(values):
        check_field(spec, found[spec.name], getattr(values, spec.name))


def check_field(spec: dataclasses.Field[Any], kind: Kind, value: Any, name: str | None = None) -> None:
    """Raises ConfigError for a value of the wrong type, or outside the field's choices or bounds.

    name: the one of the field's names by which it was given (default: its own).
    """
    name = name or spec.name
    if value is None and kind.optional:
        return
    if kind.many and not isinstance(value, tuple):
        raise ConfigError(f"{name} must be a tuple; found {value!r}")
    for single in value if kind.many else (value,):
        _check(name, spec.metadata, kind.singles, single)


def from_python(kind: Kind, value: Any) -> Any:
    """Returns a value of Python or of a file as a field has it: one text may stand for several, a list for a tuple."""
    if kind.many and not isinstance(value, tuple | None):
        return tuple(value) if isinstance(value, list) else (value,)
    return value


def _a(kind: type[Any]) -> str:
    return f"{'an' if kind is int else 'a'} {kind.__name__}"


def _check(name: str, meta: Mapping[str, Any], kinds: tuple[type[Any], ...], value: Any) -> None:
    allowed = (int, float) if kinds == (float,) else kinds
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in kinds):
        found = "another type" if name in SECRETS else repr(value)
        raise ConfigError(f"{name} must be {_a(kinds[0])}; found {found}")
    if meta["choices"] and value not in meta["choices"]:
        raise ConfigError(f"{name} must be one of {', '.join(meta['choices'])}; found {value!r}")
    if value == "":
        raise ConfigError(f"{name} must not be empty")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name} must be a finite number; found {value!r}")
    if meta["min"] is not None and value < meta["min"]:
        raise ConfigError(f"{name} must be at least {meta['min']}; found {value}")
    if meta["max"] is not None and value > meta["max"]:
        raise ConfigError(f"{name} must be at most {meta['max']}; found {value}")


def flag(name: str) -> str:
    """Returns what is typed for a field."""
    return "--" + name.replace("_", "-")


def as_typed(message: str, *classes: type[Any], typed_as: Mapping[str, str] = MappingProxyType({})) -> str:
    """Returns a message about fields of these classes with their names as options: those that it begins with and those
    that have an underscore, unless they are part of a quoted value or a path. typed_as: what was typed, by field."""
    names = {name for cls in classes for name in names_of(cls)}

    def typed(found: re.Match[str]) -> str:
        word = found[0]
        return typed_as.get(word, flag(word)) if word in names and ("_" in word or found.start() == 0) else word

    return re.sub(r"""(?<![\w./'"-])\w+(?![\w/'"-]|\.\w)""", typed, message)


class _OneModel(argparse.Action):
    """Takes a model, and no other one after it. Of other options the last one counts: scripts override them so."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, *_: Any) -> None:
        before = getattr(namespace, self.dest, value)
        if before != value:
            raise argparse.ArgumentError(self, two_models(before, value))
        setattr(namespace, self.dest, value)


def two_models(one: object, other: object) -> str:
    """Returns a sentence about two models where one is served."""
    return (
        "several models: list them in the file of --config, or put them into the folder of --models-dir; found "
        f"{one!r} and {other!r}"
    )


def add_fields(parser: argparse.ArgumentParser, cls: type[Any], title: str = "{}") -> None:
    """Adds one argument per field, in groups with this title. Defaults stay out, so that only what was given is set."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    found = kinds(cls)
    for spec in dataclasses.fields(cls):
        meta, kind, default = spec.metadata, found[spec.name], cast(Any, spec.default)
        if meta["group"] not in groups:
            groups[meta["group"]] = parser.add_argument_group(title.format(meta["group"]))
        text, settings = meta["help"], dict[str, Any](dest=spec.name, default=argparse.SUPPRESS)
        if kind.singles == (bool,):
            settings["action"] = "store_true"
        else:
            choices = "{" + ",".join(meta["choices"]) + "}" if meta["choices"] else kind.singles[0].__name__.upper()
            settings |= {
                "action": _OneModel if spec.name == "model" else "store",
                "type": kind.singles[0],
                "metavar": meta["metavar"] or choices,
            }
            if kind.many:
                settings["nargs"] = "+"
            if default not in (None, ()) and "(default" not in text:
                shown = " ".join(map(str, default)) if kind.many else default
                text += f" (default: {shown})"
        spellings = [*map(flag, (spec.name, *meta["aliases"])), *meta["short"]]
        add = groups[meta["group"]].add_argument
        first = add(spellings[0], help=text.replace("%", "%%"), **settings)
        for other in spellings[1:]:  # an argument of its own: errors name the one that was typed
            add(other, help=argparse.SUPPRESS, **settings)
        first.option_strings = spellings  # that help shows
