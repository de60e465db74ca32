"""Custom tools: functions whose arguments are one text, `{"input": "..."}`, which models that call functions know how
to write. A grammar of the text becomes one of the JSON string."""

from __future__ import annotations

from draftwing.errors import RequestError
from draftwing.grammar.ebnf import GrammarError
from draftwing.grammar.quoted import quoted
from draftwing.requests.refusals import check_text, show
from draftwing.server.parsers.grammars import Function

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
