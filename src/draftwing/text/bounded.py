"""Tokenizes texts of any length at a bounded cost: one that cannot fit is found out before all of it is tokenized."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from draftwing.errors import TOO_LONG, RequestError
from draftwing.text.tokenizer import Tokenizer

PIECE = 65_536  # characters that are tokenized without looking up


class Stopped(Exception):
    """Nobody waits for the ids any more."""


def encode_bounded(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    max_tokens: int,
    field: str,
    add_special_tokens: bool = True,
    stopped: Callable[[], bool] = lambda: False,
) -> list[list[int]]:
    """Returns the ids of each text, as `Tokenizer.encode` gives them.

    max_tokens: tokens that a text may have. One that has more may still be encoded if it is short, or has few more.
    field: named in the error.  stopped: asked between pieces; Stopped is raised when it says so.

    Raises RequestError for a text that has more tokens.
    """
    out: list[list[int]] = []
    for batch in _batches(texts):
        if len(batch[0]) > PIECE:
            _check(tokenizer, batch[0], max_tokens, field, stopped)
        if stopped():
            raise Stopped
        out += tokenizer.encode_many(batch, add_special_tokens)
    return out


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yields the texts in turn, together as long as they are no more than a piece."""
    batch, size = list[str](), 0
    for text in texts:
        if batch and size + len(text) > PIECE:
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text)
    if batch:
        yield batch


def _check(tokenizer: Tokenizer, text: str, max_tokens: int, field: str, stopped: Callable[[], bool]) -> None:
    """Counts the tokens of pieces. Their sum may be a little more than the text has, for a cut changes the tokens
    next to it; so a quarter more is let pass, and left to whoever counts the real ones."""
    count = 0
    for start in range(0, len(text), PIECE):
        if stopped():
            raise Stopped
        count += len(tokenizer.encode_many([text[start : start + PIECE]], add_special_tokens=False)[0])
        if count > max_tokens + max_tokens // 4 + 64:
            message = f"the prompt is too long: {field} has more than {max_tokens} tokens; {TOO_LONG} exceeded"
            raise RequestError(message, field, "context_length_exceeded")
