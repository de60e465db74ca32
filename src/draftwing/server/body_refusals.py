"""pydantic's errors about a body, in our words: the field that is wrong, and what it must be."""

from __future__ import annotations

from collections.abc import Sequence
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from draftwing.errors import RequestError
from draftwing.requests.refusals import show, suggestion
from draftwing.server.schema import NotBuilt

_TOO_LONG = ("too_long", "string_too_long")  # says what is wrong, whatever other members of a union say
_EXPECTED = "Input should be "  # how pydantic begins to say what would do


class Digits(str):
    """An integer of a body as it is written there: it may be longer than Python converts."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def body_refusal(errors: list[Any], given: Any, model: type[BaseModel] | None = None) -> RequestError:
    """Returns the first field's errors in our words: pydantic names members of unions, of which clients know nothing.
    given: what was validated.  model: of a body."""
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
            message += suggestion(str(path[-1]), _known_fields(model, path[:-1]))
    elif expected:
        message = f"{field} must be {' or '.join(expected)}; found {show(_at(path, given))}"
    elif kind.startswith("string_"):
        value = _at(path, given)
        message = f"{field}: {messages[0]}; found {len(value) if kind == 'string_too_long' else show(value)}"
    else:
        message = f"{field}: {messages[0]}"
    return RequestError(message, name or "body")


def _path(error: Any, given: Any) -> tuple[int | str, ...]:
    """Returns the field of an error, without pydantic's names for members of unions."""
    found = []
    for part in error["loc"]:
        if (isinstance(given, dict) and part in given) or (isinstance(given, list) and part in range(len(given))):
            given = given[part]
            found.append(part)
    return (*found, error["loc"][-1]) if error["type"] == "missing" else tuple(found)


def _at(path: Sequence[int | str], given: Any) -> Any:
    for part in path:
        given = given[part]
    return given


def _known_fields(model: type[BaseModel], place: Sequence[int | str]) -> list[str]:
    """Names of the fields that an object at a place inside of a body may have, without those that are refused."""
    kinds: list[Any] = [model]
    for part in place:
        kinds = [one for kind in kinds for one in _inside(kind, part)]
    found = dict.fromkeys(
        field.alias or ""
        for kind in kinds
        if isinstance(kind, type) and issubclass(kind, BaseModel)
        for field in kind.model_fields.values()
        if field.metadata != list(NotBuilt.__metadata__)
    )
    return [*found]


def _inside(kind: Any, part: int | str) -> list[Any]:
    """Returns types of what a value of a type holds in a field or as an entry."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [
            one for field in kind.model_fields.values() if field.alias == part for one in _members(field.annotation)
        ]
    return _members(get_args(kind)[0]) if get_origin(kind) is list else []


def _members(kind: Any) -> list[Any]:
    """Returns the types of a union, or the type itself."""
    origin = get_origin(kind)
    if origin is Annotated:
        return _members(get_args(kind)[0])
    return [one for each in get_args(kind) for one in _members(each)] if origin in (Union, UnionType) else [kind]
