"""Where answers end."""

from __future__ import annotations

from typing import Any

import pytest
from toy_device import ToyDevice

from draftwing.config.trees import PLAIN
from draftwing.core import Output
from draftwing.requests.request import GenerationRequest, LogprobParams
from draftwing.requests.sampling_params import SamplingParams
from draftwing.sched.policy.shape_policy import FixedShape
from draftwing.sched.req import Req
from draftwing.sched.results import append_until_stop
from draftwing.sched.scheduler import Scheduler, SchedulerConfig


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


PROMPT = list(range(20))


def req(uid: str, new: int, salt: int = 0, **wanted: Any) -> Req:
    params = SamplingParams(temperature=0, max_new_tokens=new)
    request = GenerationRequest(uid, list(PROMPT), params, logprobs=LogprobParams(**wanted))
    return Req(request, seed=0, max_total=len(PROMPT) + new, stop_ids=frozenset(), salt=salt)


def run(reqs: list[Req]) -> tuple[int, dict[str, Output]]:
    """Positions of prompts whose log probabilities were computed, and first outputs."""
    policy = FixedShape(PLAIN)
    sched = Scheduler(SchedulerConfig(400, 4, 1, 8), policy, {shape: shape.nodes for shape in policy.menu})
    device = ToyDevice(4, 60, lookahead=0, tail=0)
    computed, outputs = 0, dict[str, Output]()
    for one in reqs:
        sched.submit(one)
    while not sched.idle:
        plan = sched.plan()
        assert plan is not None
        computed += sum(part.length for part in plan.prompt_parts)
        device.launch(plan)
        sched.commit(plan, device.wait())
        for output in sched.take_outputs():
            outputs.setdefault(output.uid, output)
    return computed, outputs


@pytest.mark.parametrize("new", [1, 5])
def test_the_log_probabilities_of_a_prompt_are_computed_once(new: int) -> None:
    """new: tokens of the answers; those of one token end before others begin."""
    computed, outputs = run([req(str(i), new, start=2) for i in range(8)])
    assert computed == len(PROMPT) - 2
    assert len(outputs) == 8
    for output in outputs.values():
        assert [known and known.value for known in output.prompt_logprobs] == PROMPT[2:]
        assert output.prompt_logprobs is outputs["0"].prompt_logprobs


def test_others_have_their_own() -> None:
    reqs = [req("a", 5, start=2), req("b", 5, start=3), req("c", 5, salt=1, start=2), req("d", 5, start=2, top=1)]
    computed, outputs = run(reqs)
    assert computed == 18 + 17 + 18 + 18
    assert len({id(output.prompt_logprobs) for output in outputs.values()}) == 4
