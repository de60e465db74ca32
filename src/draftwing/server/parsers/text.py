"""Searches that every parser needs."""

from __future__ import annotations


def partial_end(text: str, marker: str) -> int:
    """Length of the longest end of `text` that `marker` begins with and is longer than."""
    at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while at >= 0 and not marker.startswith(text[at:]):
        at = text.find(marker[0], at + 1)
    return len(text) - at if at >= 0 else 0
