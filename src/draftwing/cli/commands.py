"""Adds the commands other than `serve`: their arguments, and what runs them."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from draftwing.cli.stored import add_learning_commands, add_model_commands
from draftwing.config.option_fields import LOG_LEVELS, SERVER
from draftwing.config.options import Options
from draftwing.config.sources import POSITIONAL_MODEL, add_arguments, add_config_file
from draftwing.config.trees import save_shape
from draftwing.errors import ConfigError
from draftwing.files import cache_folder

Run = Callable[[dict[str, Any]], None]
Emit = Callable[[dict[str, Any]], None]
Lines = Callable[[Mapping[str, Any]], list[str]]  # of a record, for people
PLAIN_SAMPLING = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "dry_multiplier": 0.0}


def add_commands(commands: Any) -> dict[str, Run]:
    """Adds a parser for each command to argparse's `commands`; returns what runs them, by name."""
    _add_chat(commands)
    models = add_model_commands(commands) | add_learning_commands(commands)
    _add_bench(commands)
    _add_token_map(commands)
    _add_write_prompts(commands)
    runs = {"chat": run_chat, "run": run_chat, "bench": run_bench, "token-map": run_token_map}
    return {**models, **runs, "write-prompts": run_write_prompts}


def _add_chat(commands: Any) -> None:
    chat = commands.add_parser(
        "chat",
        aliases=["run"],
        usage="draftwing chat [MODEL] [QUESTION] [--url URL | options]",
        help="chat in the terminal",
        description="Chats with a running server (--url), or with a model that is loaded into this process. With a "
        "question, or with a text on standard input, it prints one answer and ends.",
        allow_abbrev=False,
    )
    _add_source(chat)
    chat.add_argument("--system", metavar="STR", help="system prompt")
    chat.add_argument(
        "--image", action="append", metavar="FILE", help="a picture for the first question; more than once"
    )
    chat.add_argument("--max-tokens", type=int, metavar="INT", help="maximum answer tokens (default: the model's)")
    chat.add_argument("--temperature", type=float, metavar="FLOAT", help="0 is greedy (default: the model's)")
    _add_engine_options(chat)
    chat.add_argument(
        "question", nargs="?", metavar="QUESTION", help="a text with white space is a question even without a MODEL"
    )


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        usage="draftwing bench [MODEL] [--url URL | options] [--sweep]",
        help="measure throughput and latency",
        description="Measures a running server (--url), or an engine in this process, with drafts and without.",
        allow_abbrev=False,
    )
    _add_source(bench)
    _add_number(bench, "--concurrency", _sizes, "1,8", "requests at once")
    _add_number(bench, "--num-prompts", _count, 16, "prompts of each run")
    bench.add_argument("--prompts", metavar="FILE", help="JSON lines, each a string or an object with prompt or turns")
    _add_number(bench, "--max-tokens", _count, 128, "maximum tokens of an answer")
    _add_number(bench, "--temperature", float, 0, "0 is greedy")
    bench.add_argument("--ignore-eos", action="store_true", help="let every answer have --max-tokens tokens")
    bench.add_argument("--json", action="store_true", help="print JSON lines, not a table")
    bench.add_argument("--output", metavar="FILE", help="append JSON lines to this file")
    bench.add_argument("--plot", metavar="FILE.svg", help="draw throughput, accepted drafts and latency, or the sweep")
    bench.add_argument(
        "--check-card",
        metavar="HEAD",
        help="instead, check that a head of `draftwing train` accepts what its eval.json says, on the same --prompts",
    )
    sweep = bench.add_argument_group(
        "sweep", "Measures fixed trees, no speculation, and what the engine chooses by itself, at each --concurrency."
    )
    sweep.add_argument(
        "--sweep",
        action="store_true",
        help="print the best flags, costs of steps, and what is chosen and why; needs a drafter",
    )
    sweep.add_argument(
        "--save-shape",
        action="store_true",
        help="write the best tree into the head's config.json, as its default on this device",
    )
    for name, default in (("steps", "1,3,5,7"), ("topk", "1,2,4,8"), ("draft-tokens", "2,4,6,8,16,32")):
        _add_number(sweep, f"--{name}", _sizes, default, "values to try")
    _add_engine_options(bench, uncommon=("save_shape", "check_card", "steps", "topk", "draft_tokens", "output"))


def _add_token_map(commands: Any) -> None:
    token_map = commands.add_parser(
        "token-map",
        help="count tokens, for --speculative-token-map",
        description="Writes the most frequent tokens of texts or conversations, to which an EAGLE head or prediction "
        "layers can be restricted.",
        allow_abbrev=False,
    )
    token_map.add_argument("--model", required=True, metavar="STR", help="model whose tokenizer counts, as for serve")
    token_map.add_argument("--revision", metavar="STR", help="branch, tag or commit of a hub id")
    _add_number(token_map, "--size", _count, 32768, "tokens kept")
    token_map.add_argument("--out", required=True, metavar="FILE", help=".pt, .json, or text with one id per line")
    token_map.add_argument(
        "files", nargs="+", metavar="FILE", help="plain text, or .jsonl and .json with text, messages or conversations"
    )


def _add_write_prompts(commands: Any) -> None:
    prompts = commands.add_parser(
        "write-prompts",
        usage="draftwing write-prompts [MODEL] --out FILE [options]",
        help="let a model write prompts, for `train --prompts`",
        description="The model writes what a user may say, by its own chat template: more prompts to train a draft on.",
        allow_abbrev=False,
    )
    prompts.add_argument("--out", required=True, metavar="FILE", help="JSON lines; must not be there yet")
    _add_number(prompts, "--count", _count, 1000, "prompts that are asked for")
    _add_number(prompts, "--seed", int, 0, "others for another one")
    _add_engine_options(prompts)


def _add_number(parser: Any, name: str, kind: Callable[[str], Any], default: Any, text: str) -> None:
    """Adds an option of a number, or of several with commas between them, whose help says its default."""
    metavar = "INTS" if kind is _sizes else "FLOAT" if kind is float else "INT"
    text += f" (default: {default})"
    parser.add_argument(name, type=kind, default=kind(str(default)), metavar=metavar, help=text)


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", metavar="URL", help="address of a running server, such as http://127.0.0.1:30000")


def _add_engine_options(parser: argparse.ArgumentParser, uncommon: Collection[str] = ()) -> None:
    """Adds all options, so that the command of a server can be tried here; the help is without those that only concern
    a server, and without those that only SGLang has. uncommon: own options that only --help-all shows."""
    add_config_file(parser)
    add_arguments(parser, hidden=(SERVER,), uncommon=uncommon)
    next(action for action in parser._actions if action.dest == "api_key").help = "for --url: the key of that server"


def _count(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1; found {text!r}")
    return int(text)


def _sizes(text: str) -> list[int]:
    try:
        return [_count(part) for part in text.split(",")]
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"must be whole numbers of at least 1, as 1,8; found {text!r}") from None


def _taken(arguments: dict[str, Any], *names: str) -> dict[str, Any]:
    """Takes a command's own arguments out of all; the rest are options of an engine."""
    return {name: arguments.pop(name) for name in names}


def run_token_map(arguments: dict[str, Any]) -> None:
    from draftwing.cli.token_map import write_token_map
    from draftwing.models.hub import resolve_model
    from draftwing.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(resolve_model(arguments["model"], arguments["revision"]))
    write_token_map(arguments["files"], tokenizer, arguments["size"], arguments["out"])


def run_write_prompts(arguments: dict[str, Any]) -> None:
    own = _taken(arguments, "out", "count", "seed")
    options = Options.from_kwargs(**{"log_level": "warning", **arguments}).resolve()
    from draftwing.engine.engine import Engine
    from draftwing.train.generate import partial_file, write_prompts

    partial_file(Path(own["out"]))  # before a model is loaded
    with contextlib.closing(Engine(options)) as engine:
        found = write_prompts(engine, own["count"], Path(own["out"]), own["seed"])
    print(f"{found} prompts of {own['count']} are in {own['out']}")


def take_question(arguments: dict[str, Any], unknown: Sequence[str]) -> list[str]:
    """Tells `draftwing chat`'s model and question apart, in `arguments`; returns what is left of the `unknown` words.

    A text with white space that is no path is a question; with --url everything is. Else the model comes first.
    """
    # argparse gives no second word to a command that has had options since the first one.
    words = [arguments.pop(name, None) for name in (POSITIONAL_MODEL, "question")]
    words = [*filter(None, words), *(word for word in unknown if not word.startswith("-"))]
    model = words and arguments["url"] is None and (len(words[0].split()) < 2 or Path(words[0]).exists())
    if model:
        arguments[POSITIONAL_MODEL] = words.pop(0)
    arguments["question"] = words.pop(0) if words else None
    return [*(word for word in unknown if word.startswith("-")), *words]


def run_chat(arguments: dict[str, Any]) -> None:
    from draftwing.cli import chat
    from draftwing.cli.answerers import InProcess, Remote
    from draftwing.cli.line_reader import LineReader

    own = _taken(arguments, "url", "system", "image", "max_tokens", "temperature", "question")
    named = {"max_new_tokens": own["max_tokens"], "temperature": own["temperature"]}
    fields = {name: value for name, value in named.items() if value is not None}
    # What can be wrong is found before a model is loaded.
    chat.check_fields(fields)
    pictures = [*map(chat.picture_part, own["image"] or [])]
    typed = own["question"] is None and chat.at_terminal()
    question = None if typed else chat.asked(chat.piped_question(own["question"]), pictures)
    # The engine's lines would stand between the answers.
    level = _log(arguments)
    remote = partial(Remote, model=None if own["url"] is None else arguments.pop("model", None))
    with _opened(own["url"], arguments, remote, InProcess, level, typed or sys.stderr.isatty()) as answerer:
        if question is not None:
            chat.ask(answerer, question, own["system"], fields)
            return
        with LineReader(cache_folder() / "chat_history", [*chat.COMMANDS]) as lines:
            chat.Chat(answerer, lines.read, own["system"], fields, pictures).run()


def _log(arguments: Mapping[str, Any]) -> str:
    """Sets the level of the log, by default that of warnings, and returns it. Raises ConfigError."""
    if (level := arguments.get("log_level", "warning")) not in LOG_LEVELS:
        raise ConfigError(f"log_level must be one of {', '.join(LOG_LEVELS)}; found {level!r}")
    logging.getLogger("draftwing").setLevel(level.upper())
    return str(level)


@contextlib.contextmanager
def _opened(
    url: str | None, arguments: dict[str, Any], remote: Callable[[Any], Any], local: Callable[[Any], Any],
    log_level: str = "info", announces: bool = False,
) -> Iterator[Any]:  # fmt: skip
    """What `remote` makes of the client of a server, or `local` of an engine with the model that `arguments` name.
    log_level: unless they name one.  announces: whether to say that it is being loaded."""
    from draftwing.cli.client import Client

    if url is not None:
        client = Client(url, arguments.pop("api_key", None))
        if arguments:
            raise ConfigError(
                f"with --url, {', '.join(sorted(arguments))} would have no effect: the server has its own"
            )
        yield remote(client)
        return
    options = Options.from_kwargs(**{"log_level": log_level, **arguments}).resolve()
    if announces:
        print(f"loading {options.model_names[0]} ...", file=sys.stderr)
    from draftwing.engine.engine import Engine

    with contextlib.closing(Engine(options)) as engine:
        yield local(engine)


def run_bench(arguments: dict[str, Any]) -> None:
    from draftwing.cli import bench
    from draftwing.cli.bench import Progress, footer, sweep_lines, table
    from draftwing.cli.card_check import check_card
    from draftwing.cli.sweep import Grid, flags, head_folder, sweep
    from draftwing.engine.benchmark import Local
    from draftwing.sched.explain import number_of

    own = _taken(
        arguments, "url", "concurrency", "num_prompts", "prompts", "max_tokens", "temperature", "ignore_eos", "output",
        "sweep", "save_shape", "steps", "topk", "draft_tokens", "check_card", "plot", "json",
    )  # fmt: skip
    measured = own["url"] or arguments.get("model", Options.model)
    if own["save_shape"] and not own["sweep"]:
        raise ConfigError("--save-shape needs --sweep, which finds the shape")
    if own["check_card"] is not None and own["sweep"]:
        raise ConfigError("--check-card and --sweep measure different things: give one of them")
    if own["check_card"] is not None and own["plot"] is not None:
        raise ConfigError("--plot draws throughput; --check-card measures none")
    params = {name: own[name] for name in ("temperature", "ignore_eos")} | {"max_new_tokens": own["max_tokens"]}
    params |= PLAIN_SAMPLING  # whatever the model's defaults are: a server has them, an engine of this process not
    prompts = [] if own["check_card"] is not None else bench.load_prompts(own["prompts"], own["num_prompts"])
    _log(arguments)

    def lines(record: Mapping[str, Any]) -> list[str]:
        if own["json"]:
            return [json.dumps(record)]
        if own["check_card"] is not None:  # which has lines of its own
            return []
        return sweep_lines(record) if own["sweep"] else table(record)

    records: list[dict[str, Any]] = []
    printer, title = _printer(own["output"], lines), f"draftwing bench: {measured}"
    with printer as printed, _drawn(own["plot"], title, printed) as emit, Progress() as progress:
        for name in ("sweep", "check_card"):
            if own["url"] is not None and own[name]:
                raise ConfigError(f"--{name.replace('_', '-')} starts engines of its own; it does not go with --url")
        if own["check_card"] is not None:
            check_card(Path(own["check_card"]), arguments, own["prompts"], emit)
        elif own["sweep"]:
            folder = head_folder(arguments) if own["save_shape"] else None
            grid = Grid(own["steps"], own["topk"], own["draft_tokens"], own["concurrency"])
            found = sweep(arguments, grid, prompts, params, emit, progress)
            for batch, point in found.best.items():
                print(f"best for {number_of(batch)} at once: {flags(point)}")
            for lines_of_choice in found.choices.values():
                print("\n".join(lines_of_choice))
            if folder is not None:
                save_shape(folder, found.device, found.tree)
                print(f"{folder / 'config.json'} asks for {list(found.tree.tree)} on {found.device} from now on")
        else:
            with _opened(own["url"], arguments, bench.Remote, Local) as target:
                ids = [target.encode(prompt) for prompt in prompts]
                for size in own["concurrency"]:
                    records.append(bench.compare(target, ids, params, size, progress))
                    emit(records[-1])
            if not own["json"]:
                print(footer(records, own["url"] is not None))


@contextlib.contextmanager
def _printer(path: str | None, lines: Lines) -> Iterator[Emit]:
    """Prints the `lines` of records, and appends records as JSON lines to a file where one is named."""
    with contextlib.ExitStack() as stack:
        try:
            file = None if path is None else stack.enter_context(Path(path).open("a", encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"--output: {path} cannot be written: {error.strerror}") from None

        def emit(record: dict[str, Any]) -> None:
            record = _rounded(record)
            for line in lines(record):
                print(line, flush=True)
            if file is not None:
                print(json.dumps(record), file=file, flush=True)

        yield emit


@contextlib.contextmanager
def _drawn(path: str | None, title: str, emit: Emit) -> Iterator[Emit]:
    """`emit`, and at the end a picture of what it was given, where a file is named."""
    if path is None:
        yield emit
        return
    from draftwing.cli.plot import plot

    if not path.endswith(".svg") or not Path(path).parent.is_dir():
        raise ConfigError(f"--plot writes an .svg file into a folder that is there; found {path}")
    records: list[dict[str, Any]] = []

    def kept(record: dict[str, Any]) -> None:
        records.append(record)
        emit(record)

    yield kept
    try:
        Path(path).write_text(plot(records, title), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--plot: {path} cannot be written: {error.strerror}; --output keeps the figures") from None


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value
