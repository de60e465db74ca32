"""What was drafted for a request, as the events of its response report it."""

from __future__ import annotations

from typing import Any

from draftwing.core import SOURCES, TracedStep
from draftwing.text.token_text import TokenTexts


def traced_step(step: TracedStep, texts: TokenTexts) -> dict[str, Any]:
    """One entry of `speculative_trace`; docs/page.md describes it."""
    return {
        "step": step.number,
        "seconds": round(step.seconds, 6),
        "requests": step.requests,
        "tokens": [_token(token, texts) for token in step.tokens],
        "nodes": [
            {
                "parent": node.parent,
                **_token(node.token, texts),
                "by": SOURCES[node.source],
                "survival": round(node.survival, 4),
                "verified": node.verified,
                "accepted": node.accepted,
            }
            for node in step.nodes
        ],
    }


def _token(token: int, texts: TokenTexts) -> dict[str, Any]:
    found = {"id": token, "text": texts.text(token)}
    return {**found, "special": True} if texts.special(token) else found
