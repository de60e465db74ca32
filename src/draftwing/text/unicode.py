"""Text that UTF-8 can hold."""

from __future__ import annotations


def well_formed(text: str) -> str:
    """Returns the text with pairs of surrogates as one character, and U+FFFD in place of those that are alone."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
