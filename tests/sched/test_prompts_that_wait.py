"""What drafting brings, and costs, where prompts wait at every step: the scheduler, the policy and one step of lag in a
closed loop, on a machine whose times were measured."""

from __future__ import annotations

import random

import numpy as np
import pytest
import test_tails
from test_tails import Load
from world import H200

from draftwing.core import TreeShape
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.sched import policy
from draftwing.sched.policy import MostTokens
from draftwing.sched.req import Req

pytestmark = pytest.mark.slow


class Clients(Load):
    """So many, each with a request at a time: a prompt of `size` tokens, answered by half as many as `tokens` to half
    as many again. They begin one after the other."""

    def __init__(self, drafts: bool, count: int, size: int, tokens: int, seconds: float) -> None:
        super().__init__(drafts, 1.0, 0.0, tokens)
        self.rng, self.size, self.tokens, self.until, self.number = random.Random(1), size, tokens, seconds, 0
        self.served = 0
        for client in range(count):
            self.ask(0.05 * client)
        self.todo.sort(key=lambda one: one[0])

    def ask(self, at: float) -> None:
        self.number += 1
        length = round(self.tokens * self.rng.uniform(0.5, 1.5))
        prompt = [10_000 * self.number + i for i in range(self.size)]
        request = GenerationRequest(str(self.number), prompt, SamplingParams(max_new_tokens=length))
        self.todo.append((at, Req(request, 0, self.size + length, frozenset())))

    def take(self) -> None:
        for output in self.sched.take_outputs():
            if output.uid in self.last:
                self.gaps.append(self.now - self.last[output.uid])
            self.last[output.uid] = self.now
            if self.now < self.until:
                self.served += len(output.token_ids)
                if output.finish_reason is not None:
                    self.ask(self.now)


class AtEveryStep(MostTokens):
    """Drafts as if nobody waited for a part of a prompt."""

    def choose(self, load: policy.Load) -> TreeShape:
        return super().choose(load._replace(longer=float("inf")))


def measured(drafts: bool) -> tuple[int, float]:
    """-> tokens of answers, and the 99th percentile of gaps in seconds"""
    clients = Clients(drafts, 16, 4000, 112, 4.0)
    clients.run()
    return clients.served, float(np.quantile(clients.gaps, 0.99))


def test_where_prompts_wait_at_every_step_gaps_come_before_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts at each of these steps would serve more, for parts of prompts grow with usual steps and answers end
    sooner; but everybody would wait for longer steps behind longer parts."""
    monkeypatch.setattr(H200, "HEAD", (0.0, 1.0))  # prompts are seen in few passes
    none, chosen = measured(False), measured(True)
    monkeypatch.setattr(test_tails, "MostTokens", AtEveryStep)
    always = measured(True)
    assert chosen[0] > 0.98 * none[0] and chosen[1] < 1.1 * none[1]
    assert always[0] > 1.1 * none[0] and always[1] > 1.3 * none[1]
