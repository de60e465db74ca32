"""How much structure JSON has, before it is parsed: a parser holds the interpreter's lock, nothing else runs then."""

from __future__ import annotations

import re

from draftwing.errors import RequestError

MAX_PARTS = 131_072  # lists, objects and fields of a body
MAX_IN_CALL = 16_384  # of the arguments of a call, which stand in a text of the body
_TEXT = re.compile(rb'"[^"]*"?')


def check_parts(text: bytes, max_parts: int, longest: int, field: str | None = None) -> None:
    """Raises RequestError for JSON that would take long to parse. What stands in texts does not count.

    max_parts: lists, objects and fields.  longest: entries of a list.  field: that it is in; None: it is the body.
    """
    if _parts(text) <= max_parts and text.count(b",") <= longest:
        return
    called, field = field or "the body", field or "body"
    # Where it is no JSON, it is another text that is left out; there the parser stops.
    text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    texts = text.count(b'"') // 2
    if texts > 2 * max_parts:
        raise RequestError(f"{called} has {texts} texts, names of fields included; it may have {2 * max_parts}", field)
    text = _TEXT.sub(b"", text)
    parts = _parts(text)
    if parts > max_parts:
        raise RequestError(f"{called} has {parts} lists, objects and fields; it may have {max_parts}", field)
    if text.count(b",") > longest:
        found = max(part.count(b",") for part in text.split(b"]"))
        if found > longest:
            raise RequestError(f"{called} has a list of {found + 1} entries; it may have {longest + 1}", field)


def _parts(text: bytes) -> int:
    return sum(map(text.count, (b"[", b"{", b":")))
