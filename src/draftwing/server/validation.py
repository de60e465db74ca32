"""What is wrong with a request, in our words: pydantic names members of unions, of which clients know nothing."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from draftwing.errors import RequestError
from draftwing.requests.refusals import suggestion
from draftwing.server.schema import known_fields

_TOO_LONG = ("too_long", "string_too_long")  # says what is wrong, whatever other members of a union say
_EXPECTED = "Input should be "  # how pydantic begins to say what would do


def refusal(errors: list[Any], given: Any, model: type[BaseModel] | None = None) -> RequestError:
    """The first field's errors in our words. given: what was validated.  model: of a body."""
    # A union gives an error for each of its members. Those that got deepest say what is wrong, together.
    first = [(_path(error, given), error) for error in errors if error["loc"][:1] == errors[0]["loc"][:1]]
    first = [one for one in first if one[1]["type"] in _TOO_LONG] or first
    path = max((path for path, _ in first), key=len)
    same = [error for at, error in first if at == path]
    name, kind = ".".join(map(str, path))[:200], same[0]["type"]
    messages = list(dict.fromkeys(error["msg"] for error in same))[:4]
    known = {"extra_forbidden": "is not a known field", "missing": "is missing", "not_built": messages[0]}
    expected = [message.removeprefix(_EXPECTED) for message in messages if message.startswith(_EXPECTED)]
    expected = ["a list" if one == "a valid array" else one for one in expected]
    field = name or "the body"
    if kind in known:
        message = f"{field} {known[kind]}"
        if kind == "extra_forbidden" and model is not None:
            message += suggestion(str(path[-1]), known_fields(model, path[:-1]))
    else:
        message = f"{field} must be {' or '.join(expected)}" if expected else f"{field}: {messages[0]}"
    return RequestError(message, name or "body")


def _path(error: Any, given: Any) -> tuple[int | str, ...]:
    """The field of an error, without pydantic's names for members of unions."""
    found = []
    for part in error["loc"]:
        if (isinstance(given, dict) and part in given) or (isinstance(given, list) and part in range(len(given))):
            given = given[part]
            found.append(part)
    return (*found, error["loc"][-1]) if error["type"] == "missing" else tuple(found)
