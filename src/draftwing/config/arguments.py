"""The command line's arguments: one per field of `Options`, and one per option that only SGLang has."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Collection, Sequence

from draftwing.config import sglang_compat as compat
from draftwing.config.fields import add_fields, flag
from draftwing.config.options import Options

POSITIONAL_MODEL = "positional_model"  # where argparse puts it, beside the option


def add_arguments(parser: argparse.ArgumentParser, hidden: Collection[str] = ()) -> None:
    """Adds all of them, grouped. Defaults stay out, so that only what was given is set.

    hidden: groups of `Options` that --help leaves out, and with them the options that are refused.
    """
    parser.add_argument(
        POSITIONAL_MODEL, nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help="the same as --model"
    )
    add_fields(parser, Options)
    for title, table in (
        ("accepted for SGLang's users, without effect", compat.NO_EFFECT),
        ("known from SGLang, refused", compat.REFUSED),
    ):
        group = parser.add_argument_group(title)
        for name, foreign in table.items():
            text = foreign.why.replace("%", "%%")
            if foreign.kind is bool:
                group.add_argument(flag(name), action="store_true", default=argparse.SUPPRESS, help=text)
            else:
                metavar = foreign.kind.__name__.upper()
                group.add_argument(flag(name), type=foreign.kind, default=argparse.SUPPRESS, metavar=metavar, help=text)
    names = {spec.name for spec in dataclasses.fields(Options) if spec.metadata["group"] in hidden}
    for action in parser._actions if hidden else ():
        if action.dest in names | compat.REFUSED.keys():
            action.help = argparse.SUPPRESS


def dashed(argv: Sequence[str]) -> list[str]:
    """Arguments with `_` in option names replaced by `-`, so that both spellings work; values stay as they are."""
    out = []
    for arg in argv:
        name, eq, value = arg.partition("=")
        out.append(name.replace("_", "-") + eq + value if arg.startswith("--") else arg)
    return out
