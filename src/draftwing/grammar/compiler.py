"""Compiles grammars to automata over a tokenizer's vocabulary, by the library llguidance.

`Translator` writes a grammar in the library's own language, which takes Python's time, not the library's; the library
is imported when the first grammar comes, so a server without constrained requests never loads it.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from draftwing.errors import ConfigError, RequestError
from draftwing.grammar.diagnosis import explained, schemas_in
from draftwing.grammar.ebnf import GrammarError, to_lark
from draftwing.grammar.limits import (
    MAX_CHARS,
    WHITESPACE,
    check_multiples,
    lark_regex,
    on_large_stack,
    whitespace_regex,
)
from draftwing.grammar.schemas import schema_text
from draftwing.grammar.state import GrammarState, Mask, Vocabulary, reason
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


def _limits() -> Any:
    """Bounds the work of compiling and of one mask; the library counts steps, so they hold on every machine."""
    import llguidance

    return llguidance.LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_items_in_row=1_000,  # an ambiguous grammar's grow with the text, and every other request waits for them
        max_lexer_states=50_000,
        max_grammar_size=500_000,
        verbose_errors=False,
    )


def _matcher(vocabulary: Vocabulary, text: str) -> Any:
    import llguidance

    return llguidance.LLMatcher(vocabulary.tokens, text, log_level=0, limits=_limits())


def _built(vocabulary: Vocabulary, text: str) -> tuple[Any, str | None]:
    """Returns the library's state before the first token, and why it cannot be used."""
    matcher = _matcher(vocabulary, text)
    if matcher.is_error():
        return matcher, reason(matcher)
    # The first mask builds the automaton's start, which all copies then share, and shows whether it is too large.
    state = GrammarState(vocabulary, matcher)
    try:
        empty = not state.mask().any()
    except RequestError as error:
        return matcher, "no text fulfils it" if "NoExtension" in matcher.get_error() else str(error)
    return matcher, "no text fulfils it" if empty and not state.done else None


def _explained(vocabulary: Vocabulary, grammar: Grammar, why: str) -> str:
    """Returns why it cannot be used, in words and with the place in a schema."""

    def fails(schema: dict[str, Any]) -> str | None:
        matcher = _matcher(vocabulary, schema_document(schema))
        return reason(matcher) if matcher.is_error() else None

    if grammar.kind == "structural_tag":
        return explained(why, schemas_in(json.loads(grammar.text)), fails)
    schemas = [((), json.loads(grammar.text))] if grammar.kind == "json_schema" else []
    return explained(why, schemas, fails)


class GrammarCompiler:
    """Makes states of grammars for one vocabulary; one for each server. Safe to use from several threads.

    tokenizer: the target's.  vocab_size: V, width of the logits, which may be padded.  stop_ids: tokens that end an
    answer; they are allowed exactly where the grammar may end.
    translator: by default one with `WHITESPACE` in JSON.  cache_size: compiled grammars to keep.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        stop_ids: Iterable[int],
        translator: Translator | None = None,
        cache_size: int = 128,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stop_ids = sorted({i for i in stop_ids if 0 <= i < vocab_size})
        self._translator = translator or Translator(tokenizer)
        self._vocabulary: Vocabulary | None = None
        self._cache: OrderedDict[Grammar, Any] = OrderedDict()
        self._cache_size = cache_size
        self._lock = threading.Lock()  # held for no longer than it takes to look something up
        self._loading = threading.Lock()

    @classmethod
    def of(cls, options: Options, tokenizer: Tokenizer, vocab_size: int, stop_ids: Iterable[int]) -> GrammarCompiler:
        """Makes a compiler as the server's options say."""
        return cls(tokenizer, vocab_size, stop_ids, Translator.of(options, tokenizer))

    def knows(self, grammar: Grammar) -> bool:
        """Returns whether it is compiled and kept, which counts as a use of it."""
        with self._lock:
            if grammar in self._cache:
                self._cache.move_to_end(grammar)
            return grammar in self._cache

    def compile(self, grammar: Grammar, param: str | None = None, text: str | None = None) -> GrammarState:
        """Returns the state before the first token. Releases the interpreter's lock while the library works.

        text: what `Translator.translate` has made of the grammar, if it is known.

        Raises RequestError, whose `param` is `param` or the grammar's kind ("response_format" for json_object), when
        the grammar is invalid, not supported, too complex, or when no answer can fulfil it.
        """
        vocabulary = self._load()
        with self._lock:
            root = self._cache.get(grammar)
            if root is not None:
                self._cache.move_to_end(grammar)
        if root is None:
            root = self._build(vocabulary, grammar, param, text)
            with self._lock:
                self._cache[grammar] = root
                while len(self._cache) > self._cache_size:
                    self._cache.popitem(last=False)
        return GrammarState(vocabulary, root.deep_copy())

    def _build(self, vocabulary: Vocabulary, grammar: Grammar, param: str | None, text: str | None) -> Any:
        text = self._translator.translate(grammar, param) if text is None else text
        matcher, why = on_large_stack(lambda: _built(vocabulary, text))
        if why is not None:
            raise refusal(grammar, on_large_stack(lambda: _explained(vocabulary, grammar, why)), param)
        return matcher

    def _load(self) -> Vocabulary:
        with self._loading:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
            return self._vocabulary

    def _make_vocabulary(self) -> Vocabulary:
        import llguidance

        size = self._tokenizer.vocab_size
        # The library wants one token that ends a text. `GrammarState` decides about the stop ids by itself.
        candidates = [*self._stop_ids, self._tokenizer.eos_id, size - 1]
        end = next(i for i in candidates if i is not None and i < size)
        tokens = llguidance.LLTokenizer(self._tokenizer.backend.to_str(), n_vocab=size, eos_token=end)
        reserved = {*self._stop_ids, end}
        stop = np.zeros(-(-self._vocab_size // 32) * 32, np.uint8)
        stop[self._stop_ids] = 1
        keep = np.zeros_like(stop)
        keep[: self._vocab_size] = 1
        keep[[i for i in reserved if i < self._vocab_size]] = 0
        return Vocabulary(tokens, frozenset(self._stop_ids), frozenset(reserved), _packed(stop), _packed(keep))


def _packed(bits: npt.NDArray[np.uint8]) -> Mask:
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)
