"""The command line's arguments: one per field of `Options`, and one per option that only SGLang has."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from draftwing.config import sglang_compat as compat
from draftwing.config.fields import add_fields, flag
from draftwing.config.options import Options

POSITIONAL_MODEL = "positional_model"  # where argparse puts it, besides the option
PAGE = "docs/server_arguments.md"
_WIDEST = 100  # characters of a list of values in --help; longer ones are in --help-all
_DEFAULT = re.compile(r" \(default: [^()]{1,24}\)$")  # those that --help shows


def add_arguments(
    parser: argparse.ArgumentParser, hidden: Collection[str] = (), uncommon: Collection[str] = ()
) -> None:
    """Adds all of them, grouped. Defaults stay out, so that only what was given is set. Call it last: --help then shows
    what the parser had before and the common ones of these, --help-all all of them.

    hidden: groups of `Options` that neither shows, and with them the options that only SGLang has.
    uncommon: of the arguments that the parser had before, those that only --help-all shows.
    """
    own = {action.dest for action in parser._actions}.difference(uncommon)
    parser.add_argument(POSITIONAL_MODEL, nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
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
    fields = dataclasses.fields(Options)
    never = {spec.name for spec in fields if spec.metadata["group"] in hidden}
    add_help_all(
        parser,
        shown=own | {spec.name for spec in fields if spec.metadata["common"]},
        never=never | compat.FOREIGN.keys() if hidden else never,
    )


def add_config_file(parser: argparse.ArgumentParser) -> None:
    """Has a command take options of a file and of the environment; call it before `add_arguments`."""
    parser.add_argument(
        "--config", metavar="FILE", default=argparse.SUPPRESS, help="options from a .toml or .yaml file"
    )


def reads_sources(parser: argparse.ArgumentParser) -> bool:
    """Returns whether a command takes options of a file and of the environment."""
    return "--config" in parser._option_string_actions


def add_help_all(parser: argparse.ArgumentParser, shown: Collection[str], never: Collection[str] = ()) -> None:
    """Adds --help-all. Of a parser's arguments --help then has those that are `shown`, without aliases and details.

    never: those that neither shows.
    """
    whole: dict[argparse.Action, dict[str, Any]] = {}
    for action in parser._actions:
        if action.dest in never:
            action.help = argparse.SUPPRESS
        elif action.option_strings and action.help is not argparse.SUPPRESS:
            whole[action] = {"help": action.help, "option_strings": action.option_strings, "metavar": action.metavar}
            action.help = _brief(action.help or "") if action.dest in shown else argparse.SUPPRESS
            action.option_strings = action.option_strings[:1] if action.dest != "help" else action.option_strings
            if action.metavar is not None and len(action.metavar) > _WIDEST:
                action.metavar = "NAME"
    parser.add_argument("--help-all", action=_HelpAll, whole=whole, help="show all options and exit")
    parser.formatter_class = _Formatter
    parser.epilog = f"{parser.prog} --help-all shows all options; {PAGE} explains them."
    if reads_sources(parser):
        parser.epilog += " An option counts before its variable, such as DRAFTWING_PORT, and that before the file."


def _brief(text: str) -> str:
    """Returns the first clause of an option's text, and its default if that is short."""
    default = _DEFAULT.search(text)
    return re.split(r"[;.] | \(default", text)[0] + (default[0] if default else "")


class _Formatter(argparse.HelpFormatter):
    """Puts the text of an option with a longer name on the same line, too."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)


class _HelpAll(argparse.Action):
    """Prints the help with what --help leaves out, and exits. whole: what was changed of each argument, as it was."""

    def __init__(self, whole: Mapping[argparse.Action, Mapping[str, Any]], **settings: Any) -> None:
        super().__init__(**settings | {"nargs": 0, "default": argparse.SUPPRESS})
        self._whole = whole

    def __call__(self, parser: argparse.ArgumentParser, *given: object) -> None:
        for action, attributes in self._whole.items():
            vars(action).update(attributes)
        parser.print_help()
        parser.exit()


def dashed(argv: Sequence[str]) -> list[str]:
    """Arguments with `_` in option names replaced by `-`, so that both spellings work; values stay as they are."""
    out = []
    for arg in argv:
        name, eq, value = arg.partition("=")
        out.append(name.replace("_", "-") + eq + value if arg.startswith("--") else arg)
    return out
