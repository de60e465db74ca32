"""`draftwing chat`: a conversation in the terminal, with a server or with a model in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from draftwing.cli.client import Client
from draftwing.engine.session import Session
from draftwing.errors import DraftwingError
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    from draftwing.engine.engine import Engine

Messages = list[dict[str, str]]
Talk = Callable[[Messages], Iterator[str]]  # pieces of the answer as they come
HELP = "/reset forgets the conversation, /exit or Ctrl-D ends; Ctrl-C stops an answer"


def over_http(client: Client, fields: dict[str, Any]) -> Talk:
    """fields: of the body, beside the messages."""

    def talk(messages: Messages) -> Iterator[str]:
        for event in client.stream("/v1/chat/completions", {**fields, "messages": messages}):
            yield from (choice["delta"].get("content") or "" for choice in event["choices"])

    return talk


def in_process(engine: Engine, fields: dict[str, Any]) -> Talk:
    """fields: as in `/generate`'s sampling_params."""
    params = SamplingParams.read({"max_new_tokens": None, **engine.info.defaults, **fields})
    session = Session(engine)

    def talk(messages: Messages) -> Iterator[str]:
        ids = engine.tokenizer.encode_chat(messages)
        fitting = params if "max_new_tokens" in fields else params.fit(engine.info.context_length - len(ids))
        answers = session.prepare([GenerationRequest("", ids, fitting)])
        with closing(session.stream(answers)) as pieces:
            yield from (text for _, text in pieces)

    return talk


def converse(talk: Talk, system: str | None = None) -> None:
    """Reads questions from standard input until it ends."""
    interactive = sys.stdin.isatty()
    start: Messages = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    if interactive:
        print(HELP)
    while True:
        try:
            question = input("> " if interactive else "").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if question in ("/exit", "/quit"):
            return
        if question == "/reset":
            messages = list(start)
        elif question:
            messages.append({"role": "user", "content": question})
            text = _show(talk(messages))
            if text is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": text})


def _show(pieces: Iterator[str]) -> str | None:
    """Prints an answer as it comes. What there is of it, when it is interrupted; None when it failed."""
    text = ""
    try:
        for piece in pieces:
            text += piece
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pass
    except DraftwingError as error:
        print(f"error: {error}", file=sys.stderr)
        return None
    finally:
        close = getattr(pieces, "close", None)
        if close is not None:
            close()
    print()
    return text
