"""Grammars in the language of the library that compiles them. It takes Python's time, not the library's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from draftwing.errors import ConfigError, RequestError
from draftwing.grammar.ebnf import GrammarError, to_lark
from draftwing.grammar.limits import MAX_CHARS, WHITESPACE, check_multiples, lark_regex, whitespace_regex
from draftwing.grammar.schemas import schema_text
from draftwing.grammar.structural import to_lark_grammar
from draftwing.requests.grammar_field import Grammar

if TYPE_CHECKING:
    from draftwing.config.options import Options
    from draftwing.text.tokenizer import Tokenizer

_REASON_CHARS = 300  # of what the library says about an error
_PARAMS = {"json_object": "response_format"}
_OPTIONS = {"json_allow_general_unicode_escapes": True, "lenient": False, "coerce_one_of": False}


class Translator:
    """whitespace: a regular expression of what may stand between the tokens of JSON where a grammar does not say;
    nothing for "". Raises GrammarError where it matches anything else."""

    def __init__(self, tokenizer: Tokenizer, whitespace: str = WHITESPACE) -> None:
        self._special = {str(tokenizer.piece(i)): i for i in sorted(tokenizer.special_ids)}
        self._whitespace = whitespace_regex(whitespace)

    @classmethod
    def of(cls, options: Options, tokenizer: Tokenizer) -> Translator:
        """Makes one as the server's options say; the processes of a server must agree. Raises ConfigError."""
        pattern = options.constrained_json_whitespace_pattern
        if options.constrained_json_disable_any_whitespace:
            pattern = ""
        try:
            return cls(tokenizer, WHITESPACE if pattern is None else pattern)
        except GrammarError as error:
            raise ConfigError(f"--constrained-json-whitespace-pattern: {error}; found {pattern!r:.100}") from None

    def translate(self, grammar: Grammar, param: str | None = None) -> str:
        """Returns the grammar in the library's own language. Raises RequestError, as `GrammarCompiler.compile`, for
        what is wrong without the library."""
        try:
            space = self._whitespace if grammar.whitespace is None else whitespace_regex(grammar.whitespace)
            text = _translated(grammar, self._special, {**_OPTIONS, "whitespace_pattern": space})
            check_multiples(text)
            text.encode()
        except RecursionError:
            raise refusal(grammar, "it is nested too deep", param) from None
        except UnicodeEncodeError:
            raise refusal(grammar, "it holds a lone surrogate, which no text can", param) from None
        except GrammarError as error:
            raise refusal(grammar, str(error), param) from None
        return text


def schema_document(schema: Mapping[str, Any]) -> str:
    """Returns a schema that is in the library's language."""
    return _document(json_schema=json.dumps({**schema, "x-guidance": _OPTIONS}, ensure_ascii=False))


def _translated(grammar: Grammar, special: Mapping[str, int], options: Mapping[str, Any]) -> str:
    if len(grammar.text) > MAX_CHARS:
        raise GrammarError(f"it has {len(grammar.text)} characters, at most {MAX_CHARS} are allowed")
    if grammar.kind == "json_object":
        return _document(json_schema=schema_text({"type": "object"}, options))
    if grammar.kind == "json_schema":
        return _document(json_schema=schema_text(_parse(grammar.text), options))
    if grammar.kind == "regex":
        return _document(lark_grammar=f"start: /{lark_regex(grammar.text)}/")
    if grammar.kind == "ebnf":
        return _document(lark_grammar=to_lark(grammar.text))
    assert grammar.kind == "structural_tag", grammar.kind
    return _document(lark_grammar=to_lark_grammar(_parse(grammar.text), special, options))


def _document(json_schema: str | None = None, lark_grammar: str | None = None) -> str:
    if json_schema is not None:
        return f'{{"grammars": [{{"json_schema": {json_schema}}}]}}'
    return json.dumps({"grammars": [{"lark_grammar": lark_grammar}]}, ensure_ascii=False)


def _parse(text: str) -> Any:
    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise GrammarError("it is nested too deep") from None
    except ValueError as error:
        raise GrammarError(f"it is not valid JSON: {error}") from None


def refusal(grammar: Grammar, why: str, param: str | None) -> RequestError:
    """Returns the error for a grammar that came in the field `param`, by default of its kind's name."""
    name = param or _PARAMS.get(grammar.kind, grammar.kind)
    lines = [line.strip() for line in why.splitlines() if line.strip()]
    short = " ".join(lines)[:_REASON_CHARS]
    return RequestError(f"{name}: the grammar cannot be used: {short}", name)
