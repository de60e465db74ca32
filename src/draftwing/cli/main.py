"""The command line: `draftwing serve ...` and others. Nothing heavy is imported before the options are checked."""

from __future__ import annotations

import argparse
import functools
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from draftwing.cli.commands import Run, add_commands, take_question
from draftwing.cli.doctor import add_doctor
from draftwing.cli.verify import add_verify
from draftwing.config import fields
from draftwing.config.foreign_names import COMMANDS, SHORT, instead, of_others
from draftwing.config.option_fields import LOG_LEVELS
from draftwing.config.options import Options
from draftwing.config.sources import (
    MODELS,
    POSITIONAL_MODEL,
    add_arguments,
    add_config_file,
    dashed,
    model_tables,
    reads_sources,
    with_sources,
)
from draftwing.errors import ConfigError, DraftwingError
from draftwing.log import Forgiving, configure_logging
from draftwing.train.command import add_train, run_train
from draftwing.train.settings import Settings
from draftwing.version import __version__

logger = logging.getLogger(__name__)
MAY_BE_EMPTY = ("question", "system")  # arguments of `draftwing chat`


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code. 2: an option or a model that cannot work."""
    parser, runs, commands = _parser()
    words = dashed(sys.argv[1:] if argv is None else argv)
    if words and words[0] in COMMANDS:
        parser.error(f"there is no command {words[0]!r}: {COMMANDS[words[0]]}")
    if words and words[0] in commands:
        _refuse_short(commands[words[0]], words[1:])
    known, unknown = parser.parse_known_args(words)
    arguments = vars(known)
    command = arguments.pop("command")
    if "question" in arguments:
        unknown = take_question(arguments, unknown)
    if unknown:
        _refuse(commands.get(command, parser), unknown, arguments)
    if command is None:
        parser.print_help()
        return 2
    _configure_logging(arguments)
    typed_as: dict[str, str] = {}
    try:
        _take_positional_model(arguments)
        _refuse_empty(_typed_as(commands[command], words), arguments)
        if reads_sources(commands[command]) and not arguments.get("url"):
            tables = model_tables(arguments, os.environ) if command == "serve" else []
            arguments = with_sources(arguments, os.environ)  # whose errors are of other places
            if tables:
                arguments[MODELS] = tables
            _configure_logging(arguments)
        typed_as = _typed_as(commands[command], words)
        runs[command](arguments)
    except DraftwingError as error:
        text = str(error)
        if isinstance(error, ConfigError):
            text = fields.as_typed(text, Options, Settings, typed_as=typed_as)
        if arguments.get("log_format") == "json":
            logger.error("%s", text)
        else:
            Forgiving(sys.stderr).write(f"draftwing: error: {text}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _configure_logging(arguments: Mapping[str, Any]) -> None:
    level, form = arguments.get("log_level", "info"), arguments.get("log_format", "text")
    configure_logging(level if level in LOG_LEVELS else "info", form)  # a wrong one is refused in a moment


def _take_positional_model(arguments: dict[str, Any]) -> None:
    """Makes `draftwing serve MODEL` the same as `--model MODEL`."""
    given = arguments.pop(POSITIONAL_MODEL, None)
    if given is not None and arguments.setdefault("model", given) != given:
        raise ConfigError(fields.two_models(given, arguments["model"]))


def _typed_as(parser: argparse.ArgumentParser, words: Sequence[str]) -> dict[str, str]:
    """Returns which spelling of each option was typed, by its field; the last one, which counts."""
    flags = [word.partition("=")[0] for word in words]
    options = parser._option_string_actions
    return {options[flag].dest: flag for flag in flags if flag in options}


def _refuse_empty(typed_as: Mapping[str, str], arguments: Mapping[str, Any]) -> None:
    """Raises ConfigError for an empty value, which a variable that is not set makes: of a folder it would be the one
    where the command runs."""
    for name, value in arguments.items():
        if name not in MAY_BE_EMPTY and "" in (value if isinstance(value, list) else [value]):
            raise ConfigError(f"{typed_as.get(name, name)} must not be empty")


def _serve(arguments: dict[str, Any]) -> None:
    _open_standard_files()
    unread = [f"{name} ({fields.flag(ours)})" for name, ours in of_others(os.environ, fields.names_of(Options)).items()]
    if unread:
        logger.info(
            "environment variables of other servers have no effect here; use the options instead: %s", ", ".join(unread)
        )
    tables = arguments.pop(MODELS, [])
    if tables or "models_dir" in arguments or arguments.get("models_cache"):
        from draftwing.server.router.run import serve_models

        serve_models(arguments, tables)
        return
    of_several = ("models_max", "models_memory", "keep_alive", "load_timeout")
    if idle := [fields.flag(name) for name in of_several if name in arguments]:
        raise ConfigError(
            f"{' and '.join(idle)} is for several models: give --models-dir, --models-cache, or a list `models` in the "
            "file of --config"
        )
    options = Options.from_kwargs(**arguments).resolve()
    from draftwing.server.run import serve

    serve(options)


def _open_standard_files() -> None:
    """Opens standard files that are closed: else sockets would get their numbers, and what libraries complain about."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)


def _refuse_short(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Refuses short options of other servers; the parser would take some of them for its own with a value behind."""
    options = parser._option_string_actions
    for word in words if "--model" in options else ():
        name = word.partition("=")[0]
        if name in SHORT and name not in options:
            _refuse_name(parser, name, SHORT[name])


def _refuse(parser: argparse.ArgumentParser, unknown: Sequence[str], known: Mapping[str, Any]) -> NoReturn:
    """Exits with the usage of the command whose arguments these are, and what to write instead."""
    flag = next((word.partition("=")[0] for word in unknown if word.startswith("--")), None)
    if flag is None and POSITIONAL_MODEL in known and "question" not in known and not unknown[0].startswith("-"):
        parser.error(fields.two_models(known[POSITIONAL_MODEL], unknown[0]))
    if flag is None:
        parser.error(f"unrecognised arguments: {' '.join(unknown)}")
    _refuse_name(parser, flag, _name(flag))


def _refuse_name(parser: argparse.ArgumentParser, flag: str, name: str) -> NoReturn:
    """name: what tables of names have for the flag."""
    options = [option for option in parser._option_string_actions if option.startswith("--")]
    help_option = "--help-all" if "--help-all" in options else "--help"
    said = instead(name, [*map(_name, options)], fields.flag)
    parser.error(f"unrecognised argument {flag}; {said or f'{parser.prog} {help_option} lists those that are known'}")


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


@functools.cache
def _parser() -> tuple[argparse.ArgumentParser, dict[str, Run], Mapping[str, argparse.ArgumentParser]]:
    """Returns the parser, what runs each command, and the parser of each command."""
    parser = argparse.ArgumentParser(
        prog="draftwing", description="Serves large language models with exact tree-based speculative decoding."
    )
    parser.add_argument("--version", action="version", version=f"draftwing {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        usage="draftwing serve [MODEL] [options]",
        help="serve a model over HTTP",
        description="Serves a model over HTTP: OpenAI's chat and text completions, and /generate. "
        "Option names may be written with - or _.",
        allow_abbrev=False,
    )
    add_config_file(serve)
    add_arguments(serve)
    runs = {"serve": _serve, "train": run_train} | add_commands(commands) | add_verify(commands) | add_doctor(commands)
    commands.add_parser("version", help="print the version")
    runs["version"] = lambda arguments: print(f"draftwing {__version__}")
    add_train(commands)
    return parser, runs, commands.choices


if __name__ == "__main__":
    sys.exit(main())
