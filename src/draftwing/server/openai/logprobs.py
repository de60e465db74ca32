"""Log probabilities as OpenAI's clients expect them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from draftwing.core import TokenLogprobs
from draftwing.text.answer import Answer, finite
from draftwing.text.detok import IncrementalDetokenizer, TokenTexts
from draftwing.text.tokenizer import Tokenizer


def chat_logprobs(answer: Answer, tokens: Iterable[int], texts: TokenTexts, top: int | None = None) -> dict[str, Any]:
    """Returns `choices[].logprobs` of a chat; tokens: indices into the answer's. top: the most best tokens to show."""

    def entry(value: float, token: int) -> dict[str, Any]:
        raw = texts.raw(token)
        return {"token": raw.decode(errors="replace"), "logprob": finite(value), "bytes": list(raw)}

    content = []
    for i in tokens:
        one = answer.logprobs[i]
        own = one.value, answer.token_ids[i]
        others = _others(answer, one, top)
        if answer.wanted is not None and answer.wanted.token_ids and own[1] not in (token for _, token in others):
            others.insert(0, own)  # as vLLM, whose field these ids are
        content.append({**entry(*own), "top_logprobs": [entry(*pair) for pair in others]})
    return {"content": content, "refusal": None}


class TextTokens:
    """Tells which tokens of an answer the texts are made of that were read from it, one after the other: an answer has
    markers, reasoning and calls besides. For answers with log probabilities."""

    def __init__(self, answer: Answer, texts: TokenTexts) -> None:
        self._answer, self._texts = answer, texts
        self._end = self._next = 0  # of the text before: its end in characters, and the token after its last one

    def take(self, read: Sequence[str], end: int) -> list[range]:
        """Returns indices of the tokens of each text that was read since the last call, a token of two texts with the
        first one. They are looked for from the end: who reads gives out all that it can, and markers come before.

        end: characters of the answer that were read.
        """
        whole, limit, places = self._answer.text, end, list[tuple[int, int]]()
        for text in reversed(read):
            begin = whole.rfind(text, self._end, limit)
            if begin < 0:  # blanks that were held back may be from before a call
                text = text.lstrip()
                begin = whole.rfind(text, self._end, limit)
            places.append((begin, len(text)))
            limit = begin if begin >= 0 else limit  # a call's arguments may have been written anew
        if places and whole.startswith(read[0], self._end, end):  # it goes on where the text before ended
            places[-1] = self._end, len(read[0])
        return [self._tokens(*place) for place in reversed(places)]

    def pieces(self, begin: int, text: str) -> list[str]:
        """Returns the next text of the answer, from character `begin` on, token by token: then `take` finds what a
        reader finds in it, and the same however much comes at once."""
        ends = self._answer.starts[bisect_right(self._answer.starts, begin) :]
        cuts = [0, *sorted({end - begin for end in ends if end - begin < len(text)}), len(text)]
        return [text[a:b] for a, b in pairwise(cuts)]

    def _tokens(self, begin: int, length: int) -> range:
        starts = self._answer.starts
        if begin < 0 or not length or not starts:
            return range(self._next, self._next)
        self._end = begin + length
        # Tokens of one character have one start, and so has a marker that is not shown with what comes after it.
        first = max(bisect_left(starts, starts[max(bisect_right(starts, begin) - 1, 0)]), self._next)
        last = max(bisect_left(starts, self._end), first)
        while first + 1 < last and starts[first] == starts[first + 1] and self._hidden(first):
            first += 1
        self._next = last
        return range(first, last)

    def _hidden(self, token: int) -> bool:
        return self._texts.special(self._answer.token_ids[token])


def text_logprobs(
    answer: Answer, tokens: Sequence[int], texts: TokenTexts, top: int, offset: int = 0
) -> dict[str, Any]:
    """Returns `choices[].logprobs` of a text completion; offset: characters of the echoed prompt."""
    ids = [answer.token_ids[i] for i in tokens]
    starts = [offset + answer.starts[i] for i in tokens]
    return _columns(answer, ids, [answer.logprobs[i] for i in tokens], starts, texts, top)


def echo_logprobs(
    answer: Answer, prompt: Sequence[int], hidden: int, tokenizer: Tokenizer, texts: TokenTexts, top: int
) -> dict[str, Any]:
    """Makes `choices[].logprobs` of an echoed prompt. hidden: how many of its first tokens the echo leaves out."""
    detok = IncrementalDetokenizer(tokenizer, skip_special_tokens=False, track=True)
    detok.push(prompt[hidden:], final=True)
    assert detok.starts is not None
    return _columns(answer, prompt, answer.prompt_logprobs, [0] * hidden + detok.starts, texts, top)


def prompt_logprobs(answer: Answer, texts: TokenTexts, top: int) -> list[dict[str, dict[str, Any]] | None]:
    """Returns vLLM's `prompt_logprobs`: by token id, each token of the prompt and the best ones at its place.

    A rank is known of the best alone; the engine counts no others.
    """
    found: list[dict[str, dict[str, Any]] | None] = []
    for token, one in zip(answer.request.prompt_ids, answer.prompt_logprobs, strict=False):  # none after an abort
        if one is None:
            found.append(None)
            continue
        best = one.top[:top]
        ranks = {other: rank for rank, (_, other) in enumerate(best, 1)}
        values = {token: one.value} | {other: value for value, other in best}
        found.append(
            {
                str(other): {"logprob": finite(value), "rank": ranks.get(other), "decoded_token": texts.text(other)}
                for other, value in values.items()
            }
        )
    return found


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Returns columns of two pieces of a text completion, one after the other."""
    return {name: first[name] + second[name] for name in first}


def _others(answer: Answer, one: TokenLogprobs, top: int | None) -> list[tuple[float, int]]:
    """Returns the best tokens of a position, or those that were asked for, as (value, id)."""
    asked = answer.wanted.token_ids if answer.wanted is not None else ()
    return one.top[:top] + list(zip(one.wanted, asked, strict=True))


def _columns(
    answer: Answer,
    ids: Sequence[int],
    entries: Sequence[TokenLogprobs | None],
    offsets: list[int],
    texts: TokenTexts,
    top: int,
) -> dict[str, Any]:
    best: list[dict[str, float] | None] = []
    for token, one in zip(ids, entries, strict=True):
        if one is None:
            best.append(None)
            continue
        # The token itself is there even if it is none of the best, and first, as in vLLM.
        found = {texts.key(other): finite(value) for value, other in _others(answer, one, top)}
        best.append({texts.key(token): finite(one.value)} | found | {texts.key(token): finite(one.value)})
    return {
        "tokens": [texts.key(token) for token in ids],
        "token_logprobs": [one and finite(one.value) for one in entries],
        "top_logprobs": best,
        "text_offset": offsets,
    }
