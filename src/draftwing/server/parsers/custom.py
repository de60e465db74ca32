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
from draftwing.text.unicode import well_formed

_BEGIN = '{"input":"'
_KEY = range(2, 8)  # places in it before which no blank may stand
_HALF = r"\\u[dD][89abAB][0-9a-fA-F]{2}"  # of a character, the first
_PARTIAL = rf"(?:(?:{_HALF})?\\(?:u[0-9a-fA-F]{{0,3}})?|{_HALF})\Z"  # an escape that the next piece may change
_WHOLE = re.compile(rf'(?:[^"\\]++|(?!{_PARTIAL})\\.)*+', re.DOTALL)
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
        self._held: list[str] = []  # all of the beginning
        self._begun = 0  # characters of `_BEGIN` that were found
        self._rest = ""  # what the next piece may change
        self._state = "begin"  # then "text", and "end" or "raw"

    def push(self, arguments: str) -> str:
        """Returns the text that the next piece of the arguments adds."""
        if self._state == "begin":
            arguments = self._begin(arguments)
        if self._state != "text":
            return arguments if self._state == "raw" else ""
        text = self._rest + arguments
        whole = _WHOLE.match(text)
        assert whole is not None
        self._rest = text[whole.end() :]
        if self._rest.startswith('"'):
            self._state = "end"
        return well_formed(json.loads(f'"{whole.group()}"', strict=False))  # half a character is none

    def _begin(self, arguments: str) -> str:
        """Takes a piece of the beginning. Returns what of it, or of all until now, is for the state that follows."""
        self._held.append(arguments)
        for i, char in enumerate(arguments):
            if char == _BEGIN[self._begun]:
                self._begun += 1
                if self._begun == len(_BEGIN):
                    self._state = "text"
                    return arguments[i + 1 :]
            elif self._begun in _KEY or not char.isspace():
                self._state = "raw"
                return "".join(self._held)
        return ""

    def finish(self) -> str:
        """Returns the text that was held back: of arguments that are none."""
        return "".join(self._held) if self._state == "begin" else ""
