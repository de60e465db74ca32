"""Finds the token sequences of words that an answer must not hold."""

from __future__ import annotations

from draftwing.errors import RequestError
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from draftwing.text.tokenizer import Tokenizer


def bad_word_ids(tokenizer: Tokenizer, request: GenerationRequest) -> tuple[tuple[int, ...], ...]:
    """Returns each of the request's words as it is tokenized at the start of a text and after a space, where the two
    differ; what was found before, where it was.

    Raises RequestError for a word of too many tokens, or of none, and for too many sequences.
    """
    if request.bad_word_ids is not None:
        return request.bad_word_ids
    found: dict[tuple[int, ...], None] = {}
    for word in request.params.bad_words:
        forms = {word: None, " " + word.lstrip(): None}
        for form in forms:
            ids = tokenizer.encode(form, add_special_tokens=False)
            if not ids:
                raise RequestError(f"bad_words: expected a word that has tokens, found {word!r}", "bad_words")
            if len(ids) > MAX_BAD_WORD_TOKENS:
                raise RequestError(
                    f"bad_words takes words of at most {MAX_BAD_WORD_TOKENS} tokens; {word[:80]!r} has {len(ids)}",
                    "bad_words",
                )
            found[tuple(ids)] = None
    if len(found) > MAX_BAD_WORDS:
        raise RequestError(
            f"bad_words takes at most {MAX_BAD_WORDS} token sequences, of which a word gives up to two; found "
            f"{len(found)}",
            "bad_words",
        )
    return tuple(found)
