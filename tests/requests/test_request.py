"""What a request may ask besides sampling."""

from __future__ import annotations

import pytest

from draftwing.errors import RequestError
from draftwing.requests.request import (
    MAX_LOGPROBS,
    LogprobParams,
    SpecLimits,
    logprob_params,
    prediction_text,
    speculation,
)

SHAPE, PLAIN = SpecLimits(5, 4, 8), SpecLimits(0, 1, 1)


def test_log_probabilities() -> None:
    assert logprob_params() is None and logprob_params(False, -1, 0, []) is None and logprob_params(None, 0) is None
    assert logprob_params(True) == LogprobParams(0, (), -1)
    assert logprob_params(True, 3, 2, [7, 8]) == LogprobParams(2, (7, 8), 3)
    for values, name in (
        ((False, -1, 1), "top_logprobs_num"),
        ((None, -1, 0, [1]), "token_ids_logprob"),
        ((True, -2), "logprob_start_len"), ((True, -1, MAX_LOGPROBS + 1), "top_logprobs_num"),
        ((True, -1, True), "top_logprobs_num"), ((True, -1, 0, [1.5]), "token_ids_logprob"),
        ((True, -1, 0, "ab"), "token_ids_logprob"), ((True, -1, 0, [0] * (MAX_LOGPROBS + 1)), "token_ids_logprob"),
    ):  # fmt: skip
        with pytest.raises(RequestError) as info:
            logprob_params(*values)  # type: ignore[arg-type]
        assert info.value.param == name and name in str(info.value)


def test_speculation() -> None:
    limits, used = speculation(None, "EAGLE", SHAPE)
    assert limits is None and used == {"algorithm": "EAGLE", "num_steps": 5, "topk": 4, "num_draft_tokens": 8}
    limits, used = speculation({"num_steps": 3, "num_draft_tokens": 4, "algorithm": None}, "EAGLE", SHAPE)
    assert limits == SpecLimits(3, 4, 4) and used["num_steps"] == 3
    assert speculation("off", "EAGLE", SHAPE).limits == SpecLimits(0, 1, 1)
    # Where nothing is drafted there is nothing to limit, and nothing more to be had.
    for wish in (None, "off", {}, {"algorithm": "none"}, {"num_steps": 0}):
        assert speculation(wish, "none", PLAIN) == (
            None, {"algorithm": "none", "num_steps": 0, "topk": 1, "num_draft_tokens": 1},
        )  # fmt: skip
    # Limits never ask for more than the engine has, and a chain has one node a level.
    for topk in range(1, 5):
        for nodes in range(1, 9):
            limits = speculation({"topk": topk, "num_draft_tokens": nodes}, "EAGLE", SHAPE).limits or SHAPE
            assert limits.depth <= min(5, nodes - 1) and limits.topk <= 4 and limits.nodes <= nodes
            assert limits.topk > 1 or limits.nodes == limits.depth + 1


def test_numbers_for_a_server_that_drafts_nothing() -> None:
    with pytest.raises(RequestError, match="from 0 to 0") as info:
        speculation({"num_steps": 2}, "none", PLAIN)
    assert info.value.param == "speculative.num_steps"


def test_a_prediction_is_unicode() -> None:
    with pytest.raises(RequestError) as info:
        prediction_text({"type": "content", "content": "\ud800"})
    assert info.value.param == "prediction"
