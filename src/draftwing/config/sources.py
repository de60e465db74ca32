"""Where options come from: the command line, the environment (`DRAFTWING_...`) and a file (`--config`).

The command line comes before the environment, that before the file, and that before defaults. Names and types are those
of `Options`; of aliases the option counts. What is wrong is refused with where it stands.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from draftwing.config import foreign_names as compat
from draftwing.config.fields import (
    SECRETS,
    Kind,
    add_fields,
    check_field,
    flag,
    from_python,
    from_text,
    kinds,
    names_of,
)
from draftwing.config.foreign_names import instead
from draftwing.config.options import OPPOSITES, Options
from draftwing.errors import ConfigError

logger = logging.getLogger(__name__)
PREFIX, FILE = "DRAFTWING_", "config"
MODELS = "models"  # a list of tables in the file, see `model_tables`
# Options of the address that all models share, which no model has for itself.
ALL_MODELS = SECRETS | {
    "host", "port", "root_path", "api_key_file", "allowed_hosts", "public_endpoints", "max_connections",
    "served_model_name", "disable_ui", "models_dir", "models_cache", "models_max",
    "models_memory",
}  # fmt: skip
_LOCKS = SECRETS | {"api_key_file"}  # one that is lost would leave the server open
NO_OPTIONS = frozenset({"DRAFTWING_NATIVE", "DRAFTWING_CPU_ISA", "DRAFTWING_BUILD_ISA"})  # that are read elsewhere
# Kubernetes has one of these for each service, whose name may begin with draftwing.
_OF_SERVICES = re.compile(r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
Layer = dict[str, tuple[Any, str]]  # by field: a value, and where it stands


def with_sources(arguments: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns the command line's options and, where it is silent, those of the environment and of the file that either
    names; `FILE` is none of them. Raises ConfigError."""
    typed: Layer = {name: (value, "the command line") for name, value in arguments.items() if name != FILE}
    path = _file(arguments, environ)
    sglang: Layer = {name: (value, "SGLang's variable") for name, value in compat.from_environment(environ).items()}
    layers = [_from_file(path)] if path else []
    found: Layer = {}
    for layer in (*layers, sglang, _from_environment(environ), typed):
        for pair in OPPOSITES:
            if not found.keys().isdisjoint(pair) and not layer.keys().isdisjoint(pair):
                for name in pair:
                    found.pop(name, None)
        found |= layer
    for name, (value, where) in found.items():
        if where != "the command line":
            logger.debug("%s %s is of %s", flag(name), "***" if name in SECRETS else value, where)
    return {name: value for name, (value, _) in found.items()}


def model_tables(arguments: Mapping[str, Any], environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """Returns what the list `models` of the file says of each model: options by field, with `model` at least, perhaps
    `name` and `aliases`. Raises ConfigError."""
    path = _file(arguments, environ)
    tables = _parsed(path, _text(path)).get(MODELS, []) if path else []
    if not isinstance(tables, list):
        raise ConfigError(f"{path}: {MODELS} must be a list with a table for each model; found {tables!r}")
    return [_model_table(table, f"{path}, {MODELS}[{i}]") for i, table in enumerate(tables)]


def _model_table(table: Any, where: str) -> dict[str, Any]:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} must be a table with model and perhaps name, aliases and options; found {table!r}")
    named: dict[str, Any] = {}
    found: Layer = {}
    for key, value in table.items():
        name = str(key).removeprefix("--").replace("-", "_")
        if name in ("name", "aliases"):
            texts = [value] if name == "name" else value
            if not isinstance(texts, list) or not all(isinstance(text, str) and text.strip() for text in texts):
                raise ConfigError(f"{where}: {name} must be a text, aliases a list of them; found {value!r}")
            named[name] = value
            continue
        field, kind = _option(name, where)
        if field in ALL_MODELS:
            raise ConfigError(f"{where}: {flag(field)} is of the whole server; it stands at the top of the file")
        _add(found, field, name, where, partial(from_python, kind, value))
    if "model" not in found:
        raise ConfigError(f"{where} has no model; expected an alias, a hub id, a .gguf file or a folder")
    return named | {field: value for field, (value, _) in found.items()}


def _file(arguments: Mapping[str, Any], environ: Mapping[str, str]) -> Path | None:
    path = arguments.get(FILE) or environ.get(PREFIX + FILE.upper())
    if path == "":  # it may hold a key
        raise ConfigError(f"{PREFIX}{FILE.upper()}: expected the name of a file, found an empty text")
    return Path(path).expanduser() if path else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"--config {str(path)!r} cannot be read: {reason}") from None


def _from_environment(environ: Mapping[str, str]) -> Layer:
    found: Layer = {}
    for variable, text in environ.items():
        name = variable.removeprefix(PREFIX)
        if name == variable or variable in NO_OPTIONS or name == FILE.upper():
            continue
        if _OF_SERVICES.fullmatch(name) or (name.endswith("PORT") and "://" in text):
            continue
        known = names_of(Options).keys() | compat.FOREIGN
        if name.lower() not in known and not instead(name.lower(), known):
            logger.warning("%s is not read: there is no such option", variable)  # it may be somebody else's
            continue
        name = name.lower()
        field, kind = _option(name, variable)
        if not text and field not in _LOCKS:  # as a compose file sets what its own environment has not
            continue
        _add(found, field, name, variable, partial(from_text, name, kind, text))
    return found


def _from_file(path: Path) -> Layer:
    text = _text(path)
    found: Layer = {}
    for name, value in _parsed(path, text).items():
        if name == MODELS:
            continue
        line = re.search(rf"""^[ \t]*(--)?["']?{re.escape(str(name))}["']?[ \t]*[=:]""", text, re.MULTILINE)
        where = f"{path}, line {text.count(chr(10), 0, line.start()) + 1}" if line else str(path)
        if value is None:  # of YAML: the default
            continue
        if isinstance(value, Mapping):
            raise ConfigError(f"{where}: {name} is a table; every option stands at the top of the file")
        name = str(name).removeprefix("--").replace("-", "_")
        field, kind = _option(name, where)
        _add(found, field, name, where, partial(from_python, kind, value))
    return found


def _parsed(path: Path, text: str) -> Mapping[Any, Any]:
    if path.suffix == ".toml":
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"--config {str(path)!r} is not valid TOML: {error}") from None
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--config expects a file that ends with .toml, .yaml or .yml; found {str(path)!r}")
    import yaml

    try:
        values = yaml.safe_load(text)
        document = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError as error:
        # Its own message quotes lines, which may hold a key.
        mark = getattr(error, "problem_mark", None)
        where = f": line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise ConfigError(f"--config {str(path)!r} is not valid YAML{where}") from None
    if values is not None and not isinstance(values, Mapping):
        raise ConfigError(f"--config {str(path)!r} must have lines such as port: 8080; found a {type(values).__name__}")
    _refuse_repeated(path, document.value if values else ())
    return values or {}


def _refuse_repeated(path: Path, pairs: Iterable[tuple[Any, Any]]) -> None:
    """Raises ConfigError for a key that a YAML file has twice; its reader takes the last one. pairs: nodes."""
    lines: dict[str, int] = {}
    for key, _ in pairs:
        line = key.start_mark.line + 1
        if key.value in lines:
            raise ConfigError(
                f"{path}, line {line}: {key.value} is given twice, here and in {path}, line {lines[key.value]}"
            )
        lines[key.value] = line


def _option(name: str, where: str) -> tuple[str, Kind]:
    """Returns the field that a name means, and its type; SGLang's options are taken or refused later."""
    names = names_of(Options)
    if name in compat.FOREIGN:
        return name, Kind((compat.FOREIGN[name].kind,), False, True)
    if name not in names:
        said = instead(name, names)
        raise ConfigError(f"{where}: unknown option {name!r}" + (f"; {said}" if said else ""))
    return names[name], kinds(Options)[names[name]]


def _add(found: Layer, field: str, name: str, where: str, value: Callable[[], Any]) -> None:
    """Adds a value, of a function that may raise as its check does. name: as the field is called there."""
    if field in found:
        raise ConfigError(f"{where}: {flag(field)} is given twice, here and in {found[field][1]}")
    try:
        found[field] = value(), where
        spec = next((one for one in dataclasses.fields(Options) if one.name == field), None)
        if spec is not None:
            check_field(spec, kinds(Options)[field], found[field][0], name)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


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
        brief = {
            action: {name: vars(action)[name] for name in attributes} for action, attributes in self._whole.items()
        }
        for action, attributes in self._whole.items():
            vars(action).update(attributes)
        try:
            parser.print_help()
        finally:
            for action, attributes in brief.items():
                vars(action).update(attributes)
        parser.exit()


def dashed(argv: Sequence[str]) -> list[str]:
    """Arguments with `_` in option names replaced by `-`, so that both spellings work; values stay as they are."""
    out = []
    for arg in argv:
        name, eq, value = arg.partition("=")
        out.append(name.replace("_", "-") + eq + value if arg.startswith("--") else arg)
    return out
