"""Whole answers that a grammar takes, and calls as the templates of the families write them."""

from __future__ import annotations

import json
from typing import Any

from draftwing.grammar.compiler import GrammarCompiler
from draftwing.requests.grammar_field import Grammar
from draftwing.server.parsers.tools import TOOL_STYLES


def takes(compiler: GrammarCompiler, grammar: Grammar | None, text: str) -> bool:
    """Whether `text` is a whole answer."""
    assert grammar is not None
    state = compiler.compile(grammar)
    for token in compiler._tokenizer.encode(text, add_special_tokens=False):
        words = state.mask()
        # `advance` would insist on the tokenizer's own choice where text is forced; the mask of bytes is the same.
        if not (int(words[token // 32]) >> (token % 32)) & 1 or not state.advance(token):
            return False
    return state.may_end


def written(style: str, calls: list[tuple[str, Any]]) -> str:
    """Calls as the templates of the families write them."""
    key = TOOL_STYLES[style].arguments
    objects = [json.dumps({"name": name, key: arguments}, ensure_ascii=False) for name, arguments in calls]
    match style:
        case "hermes":
            return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
        case "mistral":
            return f"[TOOL_CALLS][{', '.join(objects)}]"
        case "llama3":
            return "; ".join(objects)
    return f"[{', '.join(objects)}]"
