"""Renders prompts that end inside of the assistant's last message, for the model to go on with it."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from draftwing.errors import RequestError
from draftwing.text.chat_template import Message
from draftwing.text.tokenizer import Tokenizer

_MARK = "Qcontinued{}Z"  # plain letters and digits, which no filter of a template changes


def render_continued(tokenizer: Tokenizer, messages: Sequence[Message], **kwargs: Any) -> str:
    """Returns the prompt text up to the end of the last message, which has to be the assistant's; spaces at its end are
    kept, whatever the template does to those of finished messages. kwargs: as of `Tokenizer.render_chat`.

    Raises RequestError, also where the template does not show the message's end.
    """
    last = messages[-1] if messages else {}
    content = last.get("content")
    if last.get("role") != "assistant" or not isinstance(content, str):
        raise RequestError(
            "continue_final_message needs a last message of the assistant, with a text", "continue_final_message"
        )
    # Nothing holds its own digest, so the mark is nowhere else.
    mark = _MARK.format(blake2b(repr((messages, kwargs)).encode(), digest_size=16).hexdigest())
    marked = [*messages[:-1], {**last, "content": content + mark}]
    text, found, _ = tokenizer.render_chat(marked, add_generation_prompt=False, **kwargs).rpartition(mark)
    if not found:
        raise RequestError("the chat template does not show the last message", "continue_final_message")
    return text.replace(mark, "")  # some templates show it before, too
