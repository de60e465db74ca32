"""A checkpoint's chat template, rendered in processes of their own (`text.template_sandbox`), which are ended when it
takes too much.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from draftwing.errors import CheckpointError, RequestError
from draftwing.text import template_sandbox
from draftwing.text.sandbox import DONE, LIMIT, Sandbox

_MAX_BYTES = 4 * template_sandbox.MAX_CHARACTERS + 1
_sandbox = Sandbox(template_sandbox.__name__, template_sandbox.SECONDS, _MAX_BYTES)


class TemplateLimit(RequestError):
    """A template took more time or memory than it may, or made too long a text."""


def _check(source: str) -> None:
    """Raises CheckpointError for a text that is no template, or takes too long to compile."""
    try:
        kind, text = _ask(template_sandbox.Job(source, None))
    except TemplateLimit as error:
        raise CheckpointError(f"{error}; pass another one with --chat-template") from None
    if kind != DONE:
        raise CheckpointError(f"{text}; pass another one with --chat-template")


def _rendered(source: str, variables: dict[str, Any]) -> str:
    """Returns the text of a template. Blocks; any thread may call it.

    Raises RequestError when the template refuses the variables or cannot work with them, TemplateLimit when it takes
    too much.
    """
    kind, text = _ask(template_sandbox.Job(source, variables))
    if kind != DONE:
        raise RequestError(text, "messages")
    return text


def _ask(job: template_sandbox.Job) -> tuple[bytes, str]:
    try:
        data = pickle.dumps(job)
    except Exception as error:  # what objects raise that cannot be copied
        raise RequestError(f"the chat template can be given plain values alone: {error}", "messages") from None
    kind, made = _sandbox.ask(data)
    text = str(made, "utf-8")
    if kind == LIMIT:
        raise TemplateLimit(f"the chat template {text}", "messages")
    return kind, text


Message = Mapping[str, Any]

# Plain letters, so that no trim, escape or reasoning filter of a template changes it.
_SENTINEL = "QsentinelZ"
_USER: Message = {"role": "user", "content": "a"}
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {}}}
# For each role a conversation in which it says the sentinel.
_PROBES: dict[str, list[Message]] = {
    "user": [{"role": "user", "content": _SENTINEL}],
    "assistant": [_USER, {"role": "assistant", "content": _SENTINEL}],
    "system": [{"role": "system", "content": _SENTINEL}, _USER],
    "tool": [
        _USER,
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "content": _SENTINEL, "tool_call_id": _CALL["id"], "name": "f"},
    ],
}


class ChatTemplate:
    """A template, which is foreign code: it runs in a process of its own, with a limit of time and memory.

    source: jinja2 text. `special_tokens` (`bos_token`, `eos_token`, ...) are variables of the template.
    Raises CheckpointError when the text is not a valid template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        _check(source)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Returns the prompt text of a conversation. `kwargs` are further variables (`enable_thinking`, `documents`,
        ...). Contents that are strings are given as lists of one part where the template takes nothing else.

        Raises RequestError when the template refuses the messages or cannot work with them, or takes too long.
        """
        variables = {**self._special_tokens, "documents": None, **kwargs}
        shaped = _parted(messages, self._in_parts)
        conversation = {"messages": shaped, "tools": tools, "add_generation_prompt": add_generation_prompt}
        return _rendered(self.source, variables | conversation)

    @cached_property
    def _in_parts(self) -> frozenset[str]:
        """Returns the roles whose content the template shows only where it is a list of parts. Raises TemplateLimit; it
        is found out again then, for a busy machine must not decide it for good."""
        found: frozenset[str] = frozenset()
        if self._shows("user", found) and self._shows("assistant", found):
            return found  # as nearly all do, for all roles
        for role in _PROBES:
            if not self._shows(role, found) and self._shows(role, found | {role}):
                found |= {role}
        return found

    def _shows(self, role: str, in_parts: frozenset[str]) -> bool:
        messages = _parted(_PROBES[role], in_parts)
        variables = {**self._special_tokens, "documents": None, "tools": None, "add_generation_prompt": False}
        try:
            return _SENTINEL in _rendered(self.source, variables | {"messages": messages})
        except TemplateLimit:
            raise
        except RequestError:
            return False

    @cached_property
    def turn_suffix(self) -> str:
        """Returns the text a template puts after the last assistant message; empty when it puts none or cannot be
        probed. Raises CheckpointError for a template that takes too long even for that."""
        try:
            text = self.render(_PROBES["assistant"], add_generation_prompt=False)
        except TemplateLimit as error:
            raise CheckpointError(f"{error}, for two short messages; pass another one with --chat-template") from None
        except RequestError:
            return ""
        return text.rpartition(_SENTINEL)[2] if _SENTINEL in text else ""


def _parted(messages: Sequence[Message], roles: frozenset[str]) -> list[Message]:
    """Returns messages with the text of some roles as a list of one part."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if message.get("role") in roles and isinstance(message.get("content"), str)
        else message
        for message in messages
    ]
