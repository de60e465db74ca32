"""Makes grammars of what the parsers read: answers that are tool calls, and answers that begin with reasoning. Custom
tools are functions whose arguments are one text, `{"input": "..."}`, which models that call functions know how to
write: a grammar of the text becomes one of the JSON string."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from draftwing.errors import RequestError
from draftwing.grammar.ebnf import GrammarError
from draftwing.grammar.quoted import quoted
from draftwing.requests.grammar_field import Grammar
from draftwing.requests.refusals import check_text, show
from draftwing.server.parsers.reasoning import CHANNEL, END, MESSAGE, START, ReasoningStyle, Start
from draftwing.server.parsers.tools import ToolStyle

_ANY = {"type": "any_text"}


@dataclass(frozen=True)
class Function:
    """A function that a request offers the model. parameters: the JSON schema of an object; None for any object.
    field: of the request, that holds them.  form: of the arguments where a schema does not say all, as a format of a
    structural tag.  custom: a custom tool, whose arguments are its input alone.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False
    field: str = ""
    form: dict[str, Any] | None = None
    custom: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "object", **(self.parameters or {})}

    @property
    def content(self) -> dict[str, Any]:
        """Returns the arguments as a format of a structural tag."""
        return self.form or _json(self.schema)


@dataclass(frozen=True)
class ToolChoice:
    """mode "named": the function `name` must be called, "required": any of them, "auto": the model decides."""

    mode: Literal["none", "auto", "required", "named"] = "auto"
    name: str = ""


def grammar_for(
    functions: Sequence[Function],
    choice: ToolChoice,
    style: ToolStyle,
    parallel: bool = True,
    otherwise: Grammar | None = None,
) -> Grammar | None:
    """Returns what the answer must be for `choice`; None where it may be anything.

    "required" and "named": calls alone, written as the model's family does, with arguments of each function's schema.
    "auto", where a function is strict: any text, but calls are of functions that exist, with such arguments; those of
    functions that are not strict are any objects. parallel: whether there may be several calls.
    otherwise: what an answer must be that is not calls alone.
    """
    if choice.mode == "none":
        return otherwise
    if choice.mode == "auto":
        loose = [f if f.strict else Function(f.name) for f in functions]
        if otherwise is not None:
            return _structural({"type": "or", "elements": [_calls(loose, style, parallel), _form(otherwise)]})
        strict = any(function.strict for function in functions)
        return _structural(_text_or_calls(loose, style, parallel)) if strict else None
    if choice.mode == "named":
        functions, parallel = [f for f in functions if f.name == choice.name], False
    return _structural(_calls(functions, style, parallel))


def harmony_grammar(
    functions: Sequence[Function], choice: ToolChoice, otherwise: Grammar | None = None
) -> Grammar | None:
    """Makes, as `grammar_for`, that of answers in harmony, which may begin with reasoning and make one call at most."""
    if choice.mode == "auto" and otherwise is None and not any(function.strict for function in functions):
        return None
    if choice.mode == "none" and otherwise is None:
        return None
    wanted = [f for f in functions if choice.mode != "named" or f.name == choice.name]
    if choice.mode == "auto":
        wanted = [f if f.strict else Function(f.name) for f in functions]
    answers: list[dict[str, Any]] = []
    if choice.mode in ("auto", "none"):
        text = _ANY if otherwise is None else _form(otherwise)
        answers.append(_sequence(_text(f"{CHANNEL}final{MESSAGE}"), text))
    if choice.mode != "none":
        answers += [
            _tag(f"{CHANNEL}commentary to=functions.{f.name} <|constrain|>json{MESSAGE}", f.content, "") for f in wanted
        ]
    begin = f"{CHANNEL}analysis{MESSAGE}"
    thought = _tag(begin, _ANY, f"{END}{START}assistant")
    return _structural(_sequence({"type": "optional", "content": thought}, {"type": "or", "elements": answers}))


def after_reasoning(grammar: Grammar, style: ReasoningStyle, start: Start) -> Grammar:
    """Returns the grammar of an answer that may reason before it gives what `grammar` asks for."""
    if start == "closed":
        return grammar
    begin = "" if start == "open" else style.begin
    space = {"type": "regex", "pattern": r"\s{0,4}"}
    block = _tag(begin, _ANY, style.end)
    if start == "open":
        return _structural(_sequence(block, space, _form(grammar)))
    return _structural(_sequence({"type": "optional", "content": _sequence(block, space)}, _form(grammar)))


def _form(grammar: Grammar) -> dict[str, Any]:
    """Returns the grammar as a format of a structural tag. Its text may be wrong: compiling it says so."""
    match grammar.kind:
        case "json_object":
            return _json({"type": "object"})
        case "regex":
            return {"type": "regex", "pattern": grammar.text}
        case "ebnf":
            return {"type": "grammar", "grammar": grammar.text}
    value = json.loads(grammar.text)
    if grammar.kind == "json_schema":
        return _json(value)
    if "format" in value:
        return dict(value["format"])
    tags = [_tag(s["begin"], _json(s["schema"]), s["end"]) for s in value["structures"]]
    return {"type": "triggered_tags", "triggers": value["triggers"], "tags": tags}


def _structural(form: dict[str, Any]) -> Grammar:
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": form}))


def _sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def _tag(begin: str, content: dict[str, Any], end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _json(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema}


def _text(value: str | None) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def _calls(functions: Sequence[Function], style: ToolStyle, parallel: bool) -> dict[str, Any]:
    """Calls and nothing else."""
    if style.begin is not None and style.end is not None:
        return _several(_tags(functions, style), "\n", parallel)
    if style.separator is not None:
        return _sequence(_text(style.begin), _array(functions, style, parallel))
    # Only an array can hold several calls; families without one are known to make a single call.
    if parallel and "[" in style.bare:
        return _array(functions, style, parallel)
    return {"type": "or", "elements": _objects(functions, style)}


def _text_or_calls(functions: Sequence[Function], style: ToolStyle, parallel: bool) -> dict[str, Any]:
    if style.bare:
        starts = "".join(f"\\{char}" for char in style.bare)
        text = {"type": "regex", "pattern": rf"(\s*[^\s{starts}](?s:.*))?"}
        return {"type": "or", "elements": [_calls(functions, style, parallel), text]}
    tags = _tags(functions, style)
    if style.separator is not None:
        assert style.begin is not None
        tags = [_tag(style.begin, _array(functions, style, parallel), "")]
    once = not parallel or style.separator is not None  # an array holds all calls
    return {"type": "triggered_tags", "triggers": [style.begin], "tags": tags, "stop_after_first": once}


def _tags(functions: Sequence[Function], style: ToolStyle) -> list[dict[str, Any]]:
    """Returns a tag for each function, as the family's chat templates write calls."""
    return [
        _tag(f"{style.begin}\n{call['begin']}", call["content"], f"{call['end']}\n{style.end}")
        for call in _objects(functions, style)
    ]


def _objects(functions: Sequence[Function], style: ToolStyle) -> list[dict[str, Any]]:
    """Returns a tag for a call of each function, as models write them most often."""
    return [
        _tag(f'{{"name": {json.dumps(one.name, ensure_ascii=False)}, "{style.arguments}": ', one.content, "}")
        for one in functions
    ]


def _array(functions: Sequence[Function], style: ToolStyle, parallel: bool) -> dict[str, Any]:
    return _sequence(_text("["), _several(_objects(functions, style), ", ", parallel), _text("]"))


def _several(calls: Sequence[dict[str, Any]], separator: str, parallel: bool) -> dict[str, Any]:
    return {
        "type": "tags_with_separator",
        "tags": calls,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


_CALLED = {"lark": "Lark grammar", "regex": "regular expression"}


def custom_function(
    name: str, description: str | None, syntax: str | None, definition: str | None, where: str
) -> Function:
    """Returns a custom tool as a function. syntax: of `definition`, "lark" or "regex"; None where any text will do.
    where: the field that holds the format. Raises RequestError for a grammar that is wrong, or not supported."""
    text = {"type": "string"}
    if syntax is None:
        form = None
    else:
        field = f"{where}.definition"
        if not definition:
            raise RequestError(f"{field} must be a grammar; found {show(definition)}", field)
        check_text(definition, field)
        try:
            grammar = {"type": "grammar", "grammar": quoted(syntax, definition)}
        except GrammarError as error:
            raise RequestError(f"{field}: the grammar cannot be used: {error}", field) from None
        begin, end = ({"type": "const_string", "value": value} for value in ('{"input": "', '"}'))
        form = {"type": "sequence", "elements": [begin, grammar, end]}
        text["description"] = f"Matches this {_CALLED[syntax]}:\n{definition}"
    schema = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
    return Function(name, description, schema, strict=True, form=form, custom=True)
