"""The fields of a request that hold a grammar, of which one may be given."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from draftwing.errors import RequestError
from draftwing.requests.refusals import Names, check_text, show, suggestion

GRAMMARS: Final = ("json_schema", "regex", "ebnf", "structural_tag", "response_format")
# Fields of vLLM's `structured_outputs`, and what each is called here.
STRUCTURED_KINDS: Final = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
    "structural_tag": "structural_tag",
    "json_object": "json_object",
}
MAX_CHOICES: Final = 1000
MAX_REGEX_CHARS: Final = 10_000  # of an expression
_SPECIAL: Final = frozenset(r"\.+*?()|[]{}^$")  # of regular expressions

# Keywords of JSON schema whose values are data; schemas; lists of schemas; schemas by names.
SCHEMA_DATA: Final = frozenset(["const", "default", "enum", "examples"])
SCHEMAS: Final = frozenset({
    "additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not",
    "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
})  # fmt: skip
SCHEMA_LISTS: Final = frozenset(["allOf", "anyOf", "items", "oneOf", "prefixItems"])
SCHEMA_MAPS: Final = frozenset({
    "$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties",
})  # fmt: skip


GrammarKind = Literal["json_schema", "json_object", "regex", "ebnf", "structural_tag"]


class Grammar(NamedTuple):
    """What an answer must be: `text` in the language that `kind` names, a JSON document where that is JSON.

    whitespace: a regular expression of what may stand between the tokens of JSON; None: as the server has it.
    """

    kind: GrammarKind
    text: str
    whitespace: str | None = None


class _Format(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Free(_Format):
    type: Literal["text"]


class _ObjectFormat(_Format):
    type: Literal["json_object"]
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")  # as llama.cpp has it


class _Schema(_Format):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class _SchemaFormat(_Format):
    type: Literal["json_schema"]
    json_schema: _Schema


class _TagFormat(_Format):
    type: Literal["structural_tag"]
    structures: Any = None
    triggers: Any = None
    format: Any = None


_FORMAT: TypeAdapter[Any] = TypeAdapter(
    Annotated[_Free | _ObjectFormat | _SchemaFormat | _TagFormat, Field(discriminator="type")]
)


def read_grammar(kind: Any, value: Any, names: Names) -> Grammar | None:
    """Returns the grammar that the field `kind` holds; None for free text. Raises RequestError."""
    if kind == "response_format":
        try:
            made = _FORMAT.validate_python(value)
        except ValidationError as error:
            raise _format_refusal(error, value, names) from None
        if isinstance(made, _Free):
            return None
        if isinstance(made, _ObjectFormat):
            given = made.schema_
            return Grammar("json_object", "") if given is None else _schema(kind, given, names)
        if isinstance(made, _SchemaFormat):
            return _schema(kind, made.json_schema.schema_, names)
        return Grammar("structural_tag", as_json(kind, value, (Mapping,), names))
    if kind in ("json_schema", "structural_tag") and not isinstance(value, str):
        value = as_json(kind, value, (Mapping, bool) if kind == "json_schema" else (Mapping,), names)
    if not isinstance(value, str) or not value:
        raise names.error(kind, f"must be a text that is not empty; found {show(value)}")
    return Grammar(kind, check_text(value, names[kind]))


def read_structured(field: str, value: Any, names: Names) -> tuple[str, Any] | None:
    """Returns the kind of `GRAMMARS` and its value that vLLM's `structured_outputs` holds: a mapping, or an object that
    keeps its fields as attributes, with one of `STRUCTURED_KINDS`. None where it holds none. Raises RequestError."""
    inner = value if isinstance(value, Mapping) else getattr(value, "__dict__", None)
    if not isinstance(inner, Mapping) or isinstance(value, type) or callable(value):
        raise names.error(field, f"must be an object with one of {', '.join(STRUCTURED_KINDS)}; found {show(value)}")
    own = names.names.get(field, field)
    given = {}
    for name, one in inner.items():
        private = inner is not value and isinstance(name, str) and name.startswith("_")
        if one is None or private or (one is False and name != "json"):  # false asks for no object, or is a switch
            continue
        if name not in STRUCTURED_KINDS:
            known = ", ".join(STRUCTURED_KINDS)
            raise names.error(field, f"has a field that is not supported, {show(name)}; known: {known}")
        given[name] = one
    if len(given) > 1:
        first, second, *_ = given
        names.names[second] = f"{own}.{second}"
        raise names.error(second, f"and {names.where}{own}.{first} cannot be given together")
    for name, one in given.items():
        kind, made = as_grammar(STRUCTURED_KINDS[name], one, f"{names.where}{own}.{name}")
        names.names[kind] = f"{own}.{name}"
        return kind, made
    return None


def as_grammar(kind: str, value: Any, name: str) -> tuple[str, Any]:
    """Returns the kind of `GRAMMARS` and its value that one of vLLM's kinds stands for. Raises RequestError."""
    if kind == "choice":
        return "regex", _one_of(value, name)
    if kind != "json_object":
        return kind, value
    if value is not True:
        raise RequestError(f"{name} must be true or false; found {show(value)}", name)
    return "response_format", {"type": "json_object"}


def _one_of(choices: Any, name: str) -> str:
    """Returns the regular expression of one of several texts. Raises RequestError."""
    if not isinstance(choices, list | tuple) or not 0 < len(choices) <= MAX_CHOICES:
        raise RequestError(f"{name} must be a list of 1 to {MAX_CHOICES} texts; found {show(choices)}", name)
    size = 0
    for i, choice in enumerate(choices):
        if not isinstance(choice, str) or not choice:
            raise RequestError(f"{name}.{i} must be a text that is not empty; found {show(choice)}", f"{name}.{i}")
        size += len(choice)
        if size > MAX_REGEX_CHARS:  # before each character is looked at
            raise RequestError(f"{name} may have {MAX_REGEX_CHARS} characters together; found more", name)
        check_text(choice, f"{name}.{i}")
    return "|".join("".join("\\" + char if char in _SPECIAL else char for char in choice) for choice in choices)


def schema_place(response_format: Any) -> str:
    """Returns where a response_format holds its schema: what comes behind the name of its field."""
    match response_format:
        case {"type": "json_schema"}:
            return ".json_schema.schema"
        case {"type": "json_object", "schema": _}:
            return ".schema"
    return ""


def _schema(field: str, value: Any, names: Names) -> Grammar:
    return Grammar("json_schema", as_json(field, value, (Mapping, bool), names))


def as_json(field: str, value: Any, kinds: tuple[type, ...], names: Names) -> str:
    """Returns the JSON of a field's value, which is to be one of `kinds`. Raises RequestError."""
    if isinstance(value, kinds):
        try:
            return json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            pass
    raise names.error(field, f"must be a JSON object; found {show(value)}")


def _format_refusal(error: ValidationError, value: Any, names: Names) -> RequestError:
    first = error.errors(include_url=False, include_input=False)[0]
    path = first["loc"][1:]  # after the kind of format
    if not path:
        kinds = "text, json_object, json_schema, structural_tag"
        return names.error("response_format", f"must have a type, one of {kinds}; found {show(value)}")
    unions = ("dict[str,any]", "bool")  # how pydantic calls alternatives
    inner = [str(part)[:80] for part in path if part not in unions]
    name = ".".join([names["response_format"], *inner])
    formats = (_Schema,) if len(inner) > 1 else (_ObjectFormat, _SchemaFormat, _TagFormat)
    known = [field.alias or one for kind in formats for one, field in kind.model_fields.items()]
    unknown = f"{name!r} is not a known field{suggestion(inner[-1], known) if inner else ''}"
    messages = {"extra_forbidden": unknown, "missing": f"{name} is missing", "model_type": f"{name} must be an object"}
    wrong = f"{name}: {first['msg']}".replace(": Input should", " must").replace("dictionary", "object")
    return RequestError(messages.get(first["type"], wrong), name)


def inlined(schema: Any, definitions: Mapping[str, Any] | None = None) -> Any:
    """Returns a JSON schema without references to `definitions`, which are its own "$defs" by default."""
    if isinstance(schema, list):
        return [inlined(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    definitions = schema.get("$defs", {}) if definitions is None else definitions
    if "$ref" in schema:
        return inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {key: inlined(one, definitions) for key, one in schema.items() if key not in ("$defs", "discriminator")}


def grammar_schemas() -> dict[str, dict[str, Any]]:
    """Returns the JSON schema of each of `GRAMMARS`, and of vLLM's field for one."""
    text, anything = {"type": "string"}, {"type": "object"}
    return {
        "json_schema": {"anyOf": [text, anything, {"type": "boolean"}]},
        "regex": text,
        "ebnf": text,
        "structural_tag": {"anyOf": [text, anything]},
        "response_format": inlined(_FORMAT.json_schema()),
        "structured_outputs": anything,
        "guided_decoding": anything,
    }
