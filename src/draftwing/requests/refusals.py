"""How requests are refused: what was expected, what was found, with the names of the caller's API."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from draftwing.errors import RequestError

if TYPE_CHECKING:
    from pydantic import ValidationError


def well_formed(text: str) -> str:
    """Returns the text with pairs of surrogates as one character, and U+FFFD in place of those that are alone."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


UNKNOWN = "is not a sampling parameter"


class _Beginning(reprlib.Repr):
    """The beginning of a value, in time that its size does not change."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.maxlevel, self.maxlist, self.maxtuple, self.maxdict = 3, 8, 8, 4
        self._characters = characters

    def repr_str(self, x: str, level: int) -> str:
        return repr(x[: self._characters])  # too long with its quotes, so that it is cut

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        if not x or level <= 0:
            return "{...}" if x else "{}"
        shown = islice(x.items(), self.maxdict)  # in their order: reprlib would sort all of them
        parts = [f"{self.repr1(key, level - 1)}: {self.repr1(value, level - 1)}" for key, value in shown]
        return "{" + ", ".join([*parts, "..."] if len(x) > self.maxdict else parts) + "}"


def show(value: Any, limit: int = 80) -> str:
    """Returns a value for an error message: bounded, and safe for integers too long to print and for lone
    surrogates."""
    try:
        text = _Beginning(limit).repr(value)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__} too large to print"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def check_text(text: str, param: str) -> str:
    """Refuses lone surrogates, which no tokenizer and no UTF-8 response can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{param} must be valid Unicode; found a lone surrogate", param) from None
    return text


def check_level(level: object) -> None:
    """Raises RequestError for a level of sleep, as vLLM counts them, that there is not."""
    if level != 1:
        raise RequestError(
            f"level must be 1: weights are kept, in host memory; found {level!r}. To forget them, close the model",
            "level",
        )


def no_text(kind: str, where: str, param: str, expected: str = "text") -> RequestError:
    """Refuses a part of a message that is of another kind than text; expected: the kind that it must be of."""
    if "image" in kind:
        return RequestError(f"{where} has the type {show(kind)}: images belong into messages of users and tools", param)
    kinds = ("audio", "video", "file", "document", "screenshot")
    media = next((medium for medium in kinds if medium in kind), None)
    if media is not None:
        plural = {"audio": "audio is"}.get(media, f"{media}s are")
        return RequestError(f"{where} has the type {show(kind)}: {plural} not supported; send text alone", param)
    return RequestError(f"{where} must be {{'type': {expected!r}, 'text': ...}}; found the type {show(kind)}", param)


def suggestion(name: str, known: Iterable[str]) -> str:
    """Returns the end of an error about a name that is not known: the known one that it looks like, where there is
    one."""
    # Longer ones are no slip, and take long to compare.
    close = difflib.get_close_matches(name, known, 1, cutoff=0.75) if len(name) <= 64 else []
    return f"; did you mean {close[0]}?" if close else ""


class Names:
    """How the caller's API calls the fields.

    names: field -> its name there, where it differs.  where: a prefix of every name.
    """

    def __init__(self, names: Mapping[str, str], where: str) -> None:
        self.names, self.where = dict(names), where

    def error(self, field: str, message: str) -> RequestError:
        name = self[field]
        return RequestError(f"{name} {message}", name)

    def __getitem__(self, field: str) -> str:
        return self.where + self.names.get(field, field)


def refusal(error: ValidationError, names: Names, schemas: Mapping[str, Mapping[str, Any]]) -> RequestError:
    """Returns the first of pydantic's errors in our words. schemas: JSON schema of each field."""
    first = error.errors(include_url=False)[0]
    field, context = str(first["loc"][0]), first.get("ctx", {})
    match first["type"]:
        case "extra_forbidden" | "is_instance_of":
            return names.error(field if field.isprintable() else show(field), UNKNOWN + suggestion(field, schemas))
        case "value_error":
            return names.error(field, str(context["error"]))
        case "too_long":
            return names.error(field, f"takes at most {context['max_length']} entries; found {len(first['input'])}")
        case "too_short":
            return names.error(field, "must hold at least one entry, or be left out")
        case "string_too_short":
            return names.error(field, "must not hold an empty string")
        case "string_too_long":
            longest, size = context["max_length"], len(first["input"])
            return names.error(field, f"takes texts of at most {longest} characters; {show(first['input'])} has {size}")
        case "string_unicode":
            return names.error(field, "must be valid Unicode; found a lone surrogate")
    return names.error(field, f"must be {_expected(schemas[field])}; found {show(first['input'])}")


def bounded(schema: Any, longest: int | None = None) -> Any:
    """pydantic's core schema, whose lists end at the first entry that is wrong: errors take a thousand times the bytes
    that they come in. longest: entries of a list or an object that has no limit of its own."""
    if isinstance(schema, dict):
        # What pydantic keeps next to a schema is no schema; a field of this name is.
        kept = "metadata" if isinstance(schema.get("type"), str) else None
        out = {key: value if key == kept else bounded(value, longest) for key, value in schema.items()}
        if out.get("type") in ("list", "dict") and longest is not None:
            out = {"max_length": longest} | out
        return out | {"fail_fast": True} if out.get("type") in ("list", "tuple") else out
    return type(schema)(bounded(part, longest) for part in schema) if type(schema) in (list, tuple) else schema


def _expected(schema: Mapping[str, Any], one: bool = True) -> str:
    """Returns what a JSON schema takes, in words; one: of one such value, else of several."""
    if "anyOf" in schema:
        return " or ".join(_expected(kind, one) for kind in schema["anyOf"] if kind["type"] != "null")
    kind = schema["type"]
    if kind == "boolean":
        return "true or false"
    if kind == "array":
        return f"a list of {_expected(schema['items'], False)}"
    if kind == "object":
        return f"an object of {_expected(schema['additionalProperties'], False)} by token id"
    text = {"integer": "an integer", "number": "a number", "string": "a string"}[kind]
    text = text if one else text.split()[1] + "s"
    low, above, high = (schema.get(name) for name in ("minimum", "exclusiveMinimum", "maximum"))
    if high is None:
        return text
    return f"{text} from {low} to {high}" if above is None else f"{text} above {above} and at most {high}"
