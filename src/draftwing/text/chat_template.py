"""A checkpoint's chat template, and the token that ends a turn in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from draftwing.errors import CheckpointError, RequestError
from draftwing.text import rendering

Message = Mapping[str, Any]

# Plain letters, so that no trim, escape or reasoning filter of a template changes it.
_SENTINEL = "QsentinelZ"


class ChatTemplate:
    """A template, which is foreign code: it runs in a process of its own, with a limit of time and memory.

    source: jinja2 text. `special_tokens` (`bos_token`, `eos_token`, ...) are variables of the template.
    Raises CheckpointError when the text is not a valid template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        rendering.check(source)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Returns the prompt text of a conversation. `kwargs` are further variables (`enable_thinking`, `documents`,
        ...).

        Raises RequestError when the template refuses the messages or cannot work with them, or takes too long.
        """
        variables = {**self._special_tokens, "documents": None, **kwargs}
        conversation = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        return rendering.render(self.source, variables | conversation)

    @cached_property
    def turn_suffix(self) -> str:
        """Returns the text a template puts after the last assistant message; empty when it puts none or cannot be
        probed. Raises CheckpointError for a template that takes too long even for that."""
        conversation = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _SENTINEL}]
        try:
            text = self.render(conversation, add_generation_prompt=False)
        except rendering.TemplateLimit as error:
            raise CheckpointError(f"{error}, for two short messages; pass another one with --chat-template") from None
        except RequestError:
            return ""
        return text.rpartition(_SENTINEL)[2] if _SENTINEL in text else ""


def end_of_turn(template: ChatTemplate, encode: Callable[[str], list[int]], special_ids: frozenset[int]) -> int | None:
    """Returns the special token that ends an assistant's turn, or None when the template ends it with plain text or
    nothing.

    `encode` maps text to ids, parsing special tokens and adding none. Some checkpoints name another token as eos than
    the one their chat format ends a turn with, and generation would run past it.
    """
    suffix = template.turn_suffix.lstrip()
    ids = encode(suffix) if suffix else []
    return ids[0] if ids and ids[0] in special_ids else None
