"""Custom tools: functions whose arguments are one text, `{"input": "..."}`, which models that call functions know how
to write. A grammar of the text becomes one of the JSON string."""

from __future__ import annotations

import json
import re

from draftwing.errors import RequestError
from draftwing.grammar.ebnf import GrammarError
from draftwing.grammar.quoted import quoted
from draftwing.requests.refusals import check_text, show
from draftwing.server.parsers.grammars import Function

_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_HALF = r"\\u[dD][89abAB][0-9a-fA-F]{2}"  # of a character, the first
_ESCAPE = re.compile(rf"{_HALF}\\u[dD][c-fC-F][0-9a-fA-F]{{2}}|\\u[0-9a-fA-F]{{4}}|\\[^u]", re.DOTALL)
_PARTIAL = re.compile(rf"(?:{_HALF})?\\(?:u[0-9a-fA-F]{{0,3}})?|{_HALF}")
_CALLED = {"lark": "Lark grammar", "regex": "regular expression"}


def custom_function(
    name: str, description: str | None, syntax: str | None, definition: str | None, where: str
) -> Function:
    """A custom tool as a function. syntax: of `definition`, "lark" or "regex"; None where any text will do.
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
    return Function(name, description, schema, strict=True, form=form)


class InputReader:
    """Reads the input of a custom tool from the arguments of a call while they grow; arguments that are none, as of a
    model that was not held to them, are the input as they are."""

    def __init__(self) -> None:
        self._rest = ""  # what the next piece may change
        self._state = "begin"  # then "text", and "end" or "raw"

    def push(self, arguments: str) -> str:
        """Returns the text that the next piece of the arguments adds."""
        text = self._rest + arguments
        self._rest = ""
        if self._state == "begin":
            begin = _BEGIN.match(text)
            if begin is not None:
                self._state, text = "text", text[begin.end() :]
            elif '{"input":"'.startswith("".join(text.split())):
                self._rest = text
                return ""
            else:
                self._state = "raw"
        if self._state != "text":
            return text if self._state == "raw" else ""
        out, at = list[str](), 0
        while at < len(text):
            stop = next((i for i in range(at, len(text)) if text[i] in '"\\'), len(text))
            out.append(text[at:stop])
            at = stop
            if text.startswith('"', at):
                self._state = "end"
                break
            if at < len(text):
                if _PARTIAL.fullmatch(text, at) is not None:
                    self._rest = text[at:]
                    break
                escape = _ESCAPE.match(text, at)
                assert escape is not None
                out.append(_character(escape.group()))
                at = escape.end()
        return "".join(out)

    def finish(self) -> str:
        """Returns the text that was held back: of arguments that are none."""
        return self._rest if self._state == "begin" else ""


def _character(escape: str) -> str:
    text: str = json.loads(f'"{escape}"')
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # half a character is none
