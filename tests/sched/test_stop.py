"""Where answers end."""

from __future__ import annotations

from typing import Any

import pytest

from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.sched.req import Req
from draftwing.sched.stop import append_until_stop


class Scanner:
    """Finds a stop string in what is left when nothing follows."""

    failed: str | None = None

    def push(self, token: int) -> None:
        return None

    def finish(self) -> str:
        return "END"


def request(stop: int, scanner: Any = None) -> Req:
    """Of a prompt of two tokens, whose answer has three at most."""
    return Req(GenerationRequest("a", [1, 2], SamplingParams()), 0, 5, frozenset([stop]), scanner=scanner)


def test_tokens_past_the_stop_id_are_not_added() -> None:
    req = request(stop=6, scanner=Scanner())
    assert append_until_stop(req, [5, 6, 7]) == ([5, 6], {"type": "stop", "matched": 6}) and req.tokens == [1, 2, 5, 6]


@pytest.mark.parametrize(
    ("scanner", "reason"),
    [(None, {"type": "length", "length": 3}), (Scanner(), {"type": "stop", "matched": "END"})],
)
def test_at_the_length_limit_what_is_left_of_the_text_is_looked_at(scanner: Any, reason: dict[str, Any]) -> None:
    req = request(99, scanner)
    assert append_until_stop(req, [5, 6]) == ([5, 6], None)
    assert append_until_stop(req, [7, 8]) == ([7], reason) and req.tokens == [1, 2, 5, 6, 7]
