"""What all bodies of requests share: types of fields, and prompts in their many forms."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from draftwing.errors import RequestError

NotBuilt = Any
Bookkeeping = Any  # for the client's own accounts; no effect here
Priority = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
TokenIds = Annotated[list[int], Field(max_length=4_000_000)]
MAX_PROMPTS = 1024


def _shaped(kind: Any, *alternatives: dict[str, Any]) -> Any:
    """A type whose insides are checked in `requests.sampling_params` and `requests.options`, which name what is wrong
    with them; /openapi.json has the alternatives."""
    return Annotated[kind, WithJsonSchema({"anyOf": list(alternatives)})]


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


_TEXT, _COUNT = {"type": "string"}, {"type": "integer", "minimum": 1}
Speculative = _shaped(
    str | dict[str, Any],
    {"const": "off"},
    _object([], algorithm=_TEXT, num_steps={"type": "integer", "minimum": 0}, topk=_COUNT, num_draft_tokens=_COUNT),
)
ResponseFormat = _shaped(
    dict[str, Any],
    _object(["type"], type={"enum": ["text", "json_object"]}),
    _object(
        ["type", "json_schema"],
        type={"const": "json_schema"},
        json_schema=_object(
            ["name", "schema"], name=_TEXT, description=_TEXT, schema={"type": "object"}, strict={"type": "boolean"}
        ),
    ),
    _object(["type", "format"], type={"const": "structural_tag"}, format={"type": "object"}),
)
_PARTS = {"type": "array", "items": _object(["type", "text"], type={"const": "text"}, text=_TEXT)}
Prediction = _shaped(
    dict[str, Any], _object(["type", "content"], type={"const": "content"}, content={"anyOf": [_TEXT, _PARTS]})
)


def documented(**bounds: Any) -> Any:
    """Bounds for /openapi.json only: they are checked in `requests.sampling_params`, whose messages say more."""
    return Field(default=None, json_schema_extra=bounds)


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


def split_prompts(field: str, value: str | list[Any]) -> tuple[list[str] | list[list[int]], bool]:
    """(prompts, batched) from a string, a list of strings, token ids, or lists of token ids."""
    single = isinstance(value, str) or (len(value) > 0 and isinstance(value[0], int))
    prompts = [value] if single else value
    if not prompts or not all(prompts):
        raise RequestError(f"{field} must not be empty", field)
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(f"{field} takes at most {MAX_PROMPTS} prompts; found {len(prompts)}", field)
    return prompts, not single  # type: ignore[return-value]
