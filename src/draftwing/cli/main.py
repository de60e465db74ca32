"""The command line: `draftwing serve ...` and others. Nothing heavy is imported before the options are checked."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import draftwing
from draftwing.cli.commands import Run, add_commands, take_question
from draftwing.config import fields
from draftwing.config.arguments import POSITIONAL_MODEL, add_arguments, dashed
from draftwing.config.choices import LOG_LEVELS
from draftwing.config.foreign_names import OURS, WITHOUT_COUNTERPART
from draftwing.config.options import Options
from draftwing.config.sglang_compat import from_environment
from draftwing.errors import ConfigError, DraftwingError
from draftwing.log import Forgiving, configure_logging
from draftwing.train.command import add_train, run_train


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code. 2: an option or a model that cannot work."""
    parser, runs, commands = _parser()
    known, unknown = parser.parse_known_args(dashed(sys.argv[1:] if argv is None else argv))
    arguments = vars(known)
    command = arguments.pop("command")
    if "question" in arguments:
        unknown = take_question(arguments, unknown)
    if unknown:
        _refuse(commands.get(command, parser), unknown)
    if command is None:
        parser.print_help()
        return 2
    level = arguments.get("log_level", "info")
    configure_logging(level if level in LOG_LEVELS else "info")  # a wrong one is refused in a moment
    try:
        _take_positional_model(arguments)
        runs[command](arguments)
    except DraftwingError as error:
        Forgiving(sys.stderr).write(f"draftwing: error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _take_positional_model(arguments: dict[str, Any]) -> None:
    """Makes `draftwing serve MODEL` the same as `--model MODEL`."""
    given = arguments.pop(POSITIONAL_MODEL, None)
    if given is not None and arguments.setdefault("model", given) != given:
        raise ConfigError(f"the model is given twice: {given!r} and --model {arguments['model']!r}")


def _serve(arguments: dict[str, Any]) -> None:
    _open_standard_files()
    options = serve_options(arguments).resolve()
    from draftwing.server.run import serve

    serve(options)


def _open_standard_files() -> None:
    """Those that are closed: else the first sockets would have their numbers, and get what libraries complain about."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)


def serve_options(arguments: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Options:
    """What the command line and, where it is silent, the environment ask for."""
    asked = from_environment(environ)
    if arguments.get("disable_overlap_schedule"):
        asked.pop("enable_overlap", None)
    return Options.from_kwargs(**{**asked, **arguments})


def _refuse(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    """Exits with the usage of the command whose arguments these are, and what to write instead."""
    flag = next((word.partition("=")[0] for word in unknown if word.startswith("--")), None)
    if flag is None:
        parser.error(f"unrecognised arguments: {' '.join(unknown)}")
    name = flag.removeprefix("--").replace("-", "_")
    if name in WITHOUT_COUNTERPART:
        parser.error(f"{flag} is no option of this server: {WITHOUT_COUNTERPART[name]}")
    options = [name for name in parser._option_string_actions if name.startswith("--")]
    near = fields.flag(OURS.get(name, ""))
    if near not in options:
        (near,) = difflib.get_close_matches(flag, options, n=1, cutoff=0.0)
    parser.error(f"unrecognised argument {flag}; the nearest option is {near}")


def _parser() -> tuple[argparse.ArgumentParser, dict[str, Run], Mapping[str, argparse.ArgumentParser]]:
    """The parser, what runs each command, and the parser of each command."""
    parser = argparse.ArgumentParser(
        prog="draftwing", description="Serves large language models with exact tree-based speculative decoding."
    )
    parser.add_argument("--version", action="version", version=f"draftwing {draftwing.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        usage="draftwing serve [MODEL] [options]",
        help="serve a model over HTTP",
        description="Serves a model over HTTP: OpenAI's chat and text completions, and /generate. "
        "Option names may be written with - or _.",
        allow_abbrev=False,
    )
    add_arguments(serve)
    runs = {"serve": _serve, "train": run_train} | add_commands(commands)
    add_train(commands)
    return parser, runs, commands.choices


if __name__ == "__main__":
    sys.exit(main())
