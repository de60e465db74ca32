"""`draftwing chat`: a conversation in the terminal, or one question and its answer."""

from __future__ import annotations

import base64
import json
import mimetypes
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TextIO

from draftwing.cli.answerers import CHAT_NAMES, Answerer, Fields, Messages, Piece, Usage, chat_fields, described
from draftwing.errors import ConfigError, DraftwingError, RequestError
from draftwing.files import load_json
from draftwing.llm_inputs import read_messages
from draftwing.requests.refusals import check_text, show, suggestion
from draftwing.requests.sampling_params import OTHER_NAMES, SamplingParams
from draftwing.sched.explain import number_of

HINT = "/help lists the commands; Ctrl-C stops an answer, Ctrl-D or /exit leaves"
ROLES = ("system", "user", "assistant")
# Of a terminal, but for the ends of lines and tabs: a model's text must not move its cursor or change its title.
_CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def ask(answerer: Answerer, question: dict[str, Any], system: str | None, fields: Fields) -> None:
    """Prints the answer to one question, which `asked` made, and on standard error how it was made. Raises
    DraftwingError."""
    usage, stopwatch = Usage(), Stopwatch()
    messages: Messages = [*_system(system), question]
    screen, text = Screen(sys.stdout), ""
    try:
        with closing(answerer.answer(messages, fields, usage)) as pieces:
            for piece in stopwatch.watch(pieces, usage):
                if not piece.reasoning:
                    text = piece.text
                    screen.write(text)
        if text and not text.endswith("\n"):
            screen.write("\n")
    except BrokenPipeError:  # whoever read the answer has left; Python would complain once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    print(stopwatch.line(usage), file=sys.stderr)


def at_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def piped_question(question: str | None) -> str:
    """Returns the question, and what comes on standard input where that is no terminal. Raises ConfigError where there
    is neither."""
    piped = "" if sys.stdin is None or at_terminal() else sys.stdin.read().removeprefix("\ufeff").strip()
    if not question and not piped:
        raise ConfigError("there is no question: give one after the model, or on standard input")
    return "\n\n".join(filter(None, (question, piped)))


def picture_part(file: str) -> dict[str, Any]:
    """Returns the part of a message that is the picture of a file. Raises RequestError."""
    path = Path(file).expanduser()
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from None
    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{base64.b64encode(data).decode()}"}}


def asked(question: str, pictures: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Returns a question as a message. Raises RequestError. pictures: those that `picture_part` made."""
    text = check_text(question, "the question")
    return {"role": "user", "content": [*pictures, {"type": "text", "text": text}] if pictures else text}


class Chat:
    """A conversation in the terminal.

    read: returns the next question, or raises EOFError or KeyboardInterrupt.  system: the system prompt.
    fields: sampling parameters that the user has set; the model's own are those of others.  pictures: those that
    come with the first question, as `picture_part` makes them.
    """

    def __init__(
        self, answerer: Answerer, read: Callable[[], str], system: str | None, fields: Fields,
        pictures: Sequence[dict[str, Any]] = (),
    ) -> None:  # fmt: skip
        self._answerer, self._read = answerer, read
        self._system, self._fields = system, dict(fields)
        self._messages: Messages = []  # without the system prompt
        self._screen = Screen(sys.stdout)
        self._files: set[Path] = set()  # that this conversation was saved to or loaded from
        self._leaving = False
        self._pictures = [*pictures]  # of the next question

    def run(self) -> None:
        """Reads and answers until the user leaves."""
        for name, value in described(self._answerer.info):
            print(f"{name:<10}{value}")
        print(HINT)
        while not self._leaving:
            try:
                self._obey(self._read())
            except KeyboardInterrupt:
                print(f"\n{HINT}")
            except EOFError:
                print()
                return

    def _obey(self, text: str) -> None:
        """Runs a command or answers a question; says what is wrong with it."""
        try:
            if text.startswith("/"):
                name, _, rest = text.strip().partition(" ")
                if name not in COMMANDS:
                    near = suggestion(name, COMMANDS)
                    raise RequestError(f"{name} is no command{near or '; /help lists them'} (a text that begins with / "
                                       "needs a space before it)")  # fmt: skip
                COMMANDS[name][0](self, rest.strip())
            elif text.strip():
                self._messages.append(asked(text.strip(), self._pictures))
                if self._answer():
                    self._pictures = []
                else:
                    self._messages.pop()
        except DraftwingError as error:
            print(f"error: {error}", file=sys.stderr)

    def _answer(self) -> bool:
        """Answers the last message; False where nothing came."""
        usage, stopwatch, text, stopped = Usage(), Stopwatch(), "", False
        messages = [*_system(self._system), *self._messages]
        pieces = self._answerer.answer(messages, self._fields, usage)
        reasoned = False
        try:
            for piece in stopwatch.watch(pieces, usage):
                text += "" if piece.reasoning else piece.text  # before Ctrl-C may come: it is as good as shown
                self._screen.write(("\n" if reasoned and not piece.reasoning else "") + piece.text, piece.reasoning)
                reasoned = piece.reasoning
        except KeyboardInterrupt:
            stopped = True
        except DraftwingError as error:
            print(f"\nerror: {error}" if text else f"error: {error}", file=sys.stderr)
        finally:
            pieces.close()
        if text:
            self._messages.append({"role": "assistant", "content": text})
        if usage.tokens or stopped:
            self._screen.write("\n")
            self._screen.write(f"[{stopwatch.line(usage, stopped)}]", dim=True)
            self._screen.write("\n")
        return bool(text)

    # -- commands -----------------------------------------------------------------------------------------------------

    def _help(self, rest: str) -> None:
        for name, (_, arguments, text) in COMMANDS.items():
            print(f"{f'{name} {arguments}':<24}{text}")
        print(f'\n{HINT}.\nTexts of several lines: end lines with \\, or put """ before and after. A text that begins '
              "with /: put a space before it.")  # fmt: skip

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if not name:
            self._print_fields()
            return
        name = OTHER_NAMES.get(name, name)
        if value.strip():
            changed = {**self._fields, name: _value(value.strip())}
            check_fields(changed)
            self._fields = changed
        elif self._fields.pop(name, None) is None:
            raise RequestError(f"{name} is not set; expected /set NAME VALUE")
        self._print_fields()

    def _print_fields(self) -> None:
        defaults = self._answerer.info.get("sampling_defaults") or {}
        for name, value in {**defaults, **self._fields}.items():
            print(f"{name:<24}{json.dumps(value)}{'' if name in self._fields else '  (of the model)'}")
        if not defaults and not self._fields:
            print("no sampling parameter is set; those of the model are used")

    def _show(self, rest: str) -> None:
        for name, value in described(self._answerer.info):
            print(f"{name:<24}{value}")
        print(f"{'messages':<24}{len(self._messages)}")
        if self._system:
            print(f"{'system prompt':<24}{self._system}")
        self._print_fields()

    def _set_system(self, rest: str) -> None:
        self._system = check_text(rest, "the system prompt") or None
        print("the system prompt is set" if rest else "there is no system prompt now")

    def _attach(self, rest: str) -> None:
        self._pictures = [*self._pictures, picture_part(rest)] if rest else []
        count = len(self._pictures)
        print(
            f"{number_of(count, 'picture')} will be shown with the next question" if rest else "no picture is attached"
        )

    def _reset(self, rest: str) -> None:
        self._messages = []
        print("the conversation is forgotten; settings and system prompt stay")

    def _regenerate(self, rest: str) -> None:
        if not self._messages or self._messages[-1]["role"] != "assistant":
            raise RequestError("there is no answer yet that could be generated again")
        earlier = self._messages.pop()
        if not self._answer():
            self._messages.append(earlier)

    def _save(self, rest: str) -> None:
        path = _path(rest, "/save")
        body = {
            "model": self._answerer.info["served_model_name"],
            "messages": [*_system(self._system), *self._messages],
            **chat_fields(self._fields),
        }
        if path.exists() and path not in self._files:
            raise RequestError(f"{path} is there already; choose another name")
        try:
            path.write_text(json.dumps(body, indent=1, ensure_ascii=False), encoding="utf-8")
        except OSError as error:
            raise RequestError(f"{path} cannot be written: {error.strerror}") from None
        self._files.add(path)
        print(f"{len(self._messages)} messages are in {path}, as the body of a request to /v1/chat/completions")

    def _load(self, rest: str) -> None:
        path = _path(rest, "/load")
        try:
            body = load_json(path)
        except (OSError, ValueError) as error:
            raise RequestError(f"{path} cannot be read: {getattr(error, 'strerror', error)}") from None
        messages, fields = _read_conversation(body)
        first = messages[0] if messages else {"role": ""}
        self._system = first["content"] if first["role"] == "system" else None
        self._messages, self._fields = messages[first["role"] == "system" :], fields
        self._files.add(path)
        print(f"{len(self._messages)} messages are loaded")

    def _exit(self, rest: str) -> None:
        self._leaving = True


# By name: what runs it, its arguments, and what /help says.
COMMANDS: dict[str, tuple[Callable[[Chat, str], None], str, str]] = {
    "/help": (Chat._help, "", "show this list"),
    "/set": (
        Chat._set,
        "[NAME [VALUE]]",
        "set a sampling parameter, as temperature 0.2; without VALUE: the default",
    ),
    "/show": (Chat._show, "", "show the model and the settings"),
    "/system": (Chat._set_system, "[TEXT]", "set the system prompt; no TEXT: remove it"),
    "/image": (Chat._attach, "[FILE]", "show a picture with the next question; no FILE: none"),
    "/reset": (Chat._reset, "", "forget the conversation"),
    "/regenerate": (Chat._regenerate, "", "answer the last question again"),
    "/save": (Chat._save, "FILE", "write the conversation and the settings as JSON"),
    "/load": (Chat._load, "FILE", "go on with a saved conversation"),
    "/exit": (Chat._exit, "", "leave"),
}


class Screen:
    """Writes a model's text. On a terminal its control characters are left out."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._terminal = file, file.isatty()
        self._styled = self._terminal and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")

    def write(self, text: str, dim: bool = False) -> None:
        if self._terminal:
            text = text.translate(_CONTROLS)
        print(f"{_DIM}{text}{_PLAIN}" if dim and self._styled else text, end="", file=self._file, flush=True)


class Stopwatch:
    """Measures an answer as its reader sees it."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._first: tuple[float, int] | None = None  # when the first text came, and how many tokens there were
        self._end = self._begin

    def watch(self, pieces: Iterator[Piece], usage: Usage) -> Iterator[Piece]:
        """Hands the pieces on."""
        for piece in pieces:
            self._end = time.monotonic()
            self._first = self._first or (self._end, usage.tokens)
            yield piece
        self._end = time.monotonic()

    def line(self, usage: Usage, stopped: bool = False) -> str:
        """Returns in words how an answer was made."""
        parts = [number_of(usage.tokens, "token")]
        if self._first is not None:
            at, before = self._first
            if usage.tokens > before and self._end > at:
                parts.append(f"{(usage.tokens - before) / (self._end - at):.1f} tokens/s")
            if usage.acceptance_length is not None:
                parts.append(f"acceptance length {usage.acceptance_length:.2f}")
            parts.append(f"time to first token {at - self._begin:.2f} s")
        if stopped:
            parts.append("stopped")
        elif usage.finish == "length":
            parts.append("cut at max_tokens")
        elif usage.finish == "abort":
            parts.append("aborted")
        return ", ".join(parts)


def _system(text: str | None) -> Messages:
    return [{"role": "system", "content": text}] if text else []


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def check_fields(fields: Fields) -> None:
    """Raises RequestError for sampling parameters that a conversation cannot have."""
    if fields.get("n") is not None:
        raise RequestError("n is not for a conversation, which has one answer to each question")
    SamplingParams.read(fields)


def _path(rest: str, command: str) -> Path:
    if not rest:
        raise RequestError(f"expected {command} FILE")
    return Path(rest).expanduser().absolute()


def _read_conversation(body: Any) -> tuple[Messages, dict[str, Any]]:
    """Checked messages and sampling parameters of a saved conversation, or of a list of messages."""
    given = {"messages": body} if isinstance(body, list) else body
    messages = given.get("messages") if isinstance(given, dict) else None
    if not isinstance(messages, list):
        raise RequestError(f'expected a JSON object with "messages"; found {show(body)}')
    for message in messages:
        known = isinstance(message, dict) and message.get("role") in ROLES
        if not known or not isinstance(message.get("content"), str | list):
            raise RequestError(f"expected messages with a role of {', '.join(ROLES)} and a text; found {show(message)}")
    own = {other: name for name, other in CHAT_NAMES.items()} | OTHER_NAMES
    fields = {own.get(name, name): value for name, value in given.items() if name not in ("messages", "model")}
    check_fields(fields)
    read_messages(messages)
    return [{name: message[name] for name in ("role", "content")} for message in messages], fields
