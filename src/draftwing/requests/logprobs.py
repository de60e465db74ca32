"""Log probabilities as `/generate`'s `meta_info` has them, in the server and in `LLM`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from draftwing.core import TokenLogprobs

if TYPE_CHECKING:
    from draftwing.requests.answer import Answer
    from draftwing.text.token_text import TokenTexts

LEAST = -9999.0  # what stands for minus infinity, which JSON does not have


def finite(value: float) -> float:
    return max(value, LEAST)


def meta_logprobs(answer: Answer, prompt_ids: Sequence[int], texts: TokenTexts | None) -> dict[str, Any]:
    """Fields of `meta_info`; none where no log probabilities were asked for.

    An entry is [log probability, token id, text or None]; the log probability of the prompt's first token is None.
    texts: None leaves the texts out.
    """
    wanted = answer.wanted
    if wanted is None:
        return {}

    def entry(value: float | None, token: int) -> list[Any]:
        return [None if value is None else finite(value), token, None if texts is None else texts.text(token)]

    prompt = list(prompt_ids[wanted.start :]) if wanted.start >= 0 else []
    before = answer.prompt_logprobs
    # Nothing is known of the prompt before the first token has come.
    sides: list[tuple[str, list[int], Sequence[TokenLogprobs | None]]] = [
        ("input", prompt[: len(before)], before),
        ("output", answer.token_ids, answer.logprobs),
    ]
    found: dict[str, Any] = {}
    for side, tokens, entries in sides:
        known = list(zip(tokens, entries, strict=True))
        found[f"{side}_token_logprobs"] = [entry(one and one.value, token) for token, one in known]
        if wanted.top:
            found[f"{side}_top_logprobs"] = [one and [entry(*best) for best in one.top] for _, one in known]
        if wanted.token_ids:
            found[f"{side}_token_ids_logprobs"] = [
                one and [entry(*pair) for pair in zip(one.wanted, wanted.token_ids, strict=True)] for _, one in known
            ]
    return found | {"output_token_logprobs_length": len(answer.logprobs)}
