"""The command line's arguments, made of the fields of `Options`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

from draftwing.config import sglang_compat as compat
from draftwing.config.options import Options, type_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds one argument per field of `Options`, grouped. Defaults stay out, so that only what was given is set."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for spec in dataclasses.fields(Options):
        meta = spec.metadata
        group = groups.get(meta["group"]) or groups.setdefault(meta["group"], parser.add_argument_group(meta["group"]))
        flags = ["--" + name.replace("_", "-") for name in (spec.name, *meta["aliases"])]
        kind, _ = type_of(spec.name)
        text = meta["help"].replace("%", "%%")
        if kind is bool:
            group.add_argument(*flags, dest=spec.name, action="store_true", default=argparse.SUPPRESS, help=text)
            continue
        if spec.default is not None:
            text += f" (default: {spec.default})"
        metavar = "{" + ",".join(meta["choices"]) + "}" if meta["choices"] else kind.__name__.upper()
        group.add_argument(*flags, dest=spec.name, type=kind, default=argparse.SUPPRESS, metavar=metavar, help=text)
    for title, table in (
        ("accepted for SGLang's users, without effect", compat.NO_EFFECT),
        ("known from SGLang, refused", compat.REFUSED),
    ):
        group = parser.add_argument_group(title)
        for name, foreign in table.items():
            flag, text = "--" + name.replace("_", "-"), foreign.why.replace("%", "%%")
            if foreign.kind is bool:
                group.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=text)
            else:
                metavar = foreign.kind.__name__.upper()
                group.add_argument(flag, type=foreign.kind, default=argparse.SUPPRESS, metavar=metavar, help=text)


def dashed(argv: Sequence[str]) -> list[str]:
    """Arguments with `_` in option names replaced by `-`, so that both spellings work; values stay as they are."""
    out = []
    for arg in argv:
        name, eq, value = arg.partition("=")
        out.append(name.replace("_", "-") + eq + value if arg.startswith("--") else arg)
    return out
