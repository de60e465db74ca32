"""Renders a checkpoint's chat template, in jinja2's sandbox: a template is foreign code."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from draftwing.errors import CheckpointError, RequestError

Message = Mapping[str, Any]

# Plain letters, so that no trim, escape or reasoning filter of a template changes it.
_SENTINEL = "QsentinelZ"


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` marks assistant text for training; for serving it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares a mutable set)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models saw it in training: jinja2's own filter escapes HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class ChatTemplate:
    """A compiled template.

    source: jinja2 text. `special_tokens` (`bos_token`, `eos_token`, ...) are variables of the template.
    Raises CheckpointError when the text is not a valid template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"the chat template has a syntax error in line {error.lineno}: {error.message}; "
                "pass another one with --chat-template"
            ) from error

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Returns the prompt text of a conversation. `kwargs` are further variables (`enable_thinking`, `documents`,
        ...).

        Raises RequestError when the template refuses the messages or cannot work with them.
        """
        variables = {**self._special_tokens, "documents": None, **kwargs}
        try:
            return self._template.render(
                {**variables, "messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
            )
        except RecursionError:
            raise RequestError("the messages are nested too deeply for the chat template", "messages") from None
        # Not only TemplateError: a template may index a missing key, concatenate None, or divide by zero.
        except Exception as error:
            raise RequestError(f"the chat template refuses these messages: {error}", "messages") from error

    @cached_property
    def turn_suffix(self) -> str:
        """Returns the text a template puts after the last assistant message; empty when it puts none or cannot be
        probed."""
        conversation = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _SENTINEL}]
        try:
            text = self.render(conversation, add_generation_prompt=False)
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
