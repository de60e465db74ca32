"""When the choice is looked at, and what an engine tells of it."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_checkpoint import write_checkpoint

from draftwing.config.trees import PLAIN, TreeShape
from draftwing.llm import LLM
from draftwing.sched.explain import LOG_SECONDS, REPORT_SECONDS, Explainer

CHAIN = TreeShape(2, 1, 3)


class Sched:
    """A scheduler whose load is set, with a policy that drafts nothing."""

    def __init__(self) -> None:
        self.choice, self.requests, self.asked = self, 2, 0
        self.suspended = False

    def explain(self) -> tuple[Any, list[dict[str, Any]]]:
        self.asked += 1
        context = SimpleNamespace(confidences=[1] * self.requests, kv_tokens=100 * self.requests)
        entries = [
            {"shape": CHAIN, "price_ms": 4.0, "gain": 1.0, "rate": 750.0, "chosen": False, "late": self.suspended},
            {"shape": PLAIN, "price_ms": 2.0, "gain": 0.0, "rate": 1000.0, "chosen": True, "late": False},
        ]
        return context, [entry | {"tried": False} for entry in entries]


def test_it_looks_and_logs_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    sched, at = Sched(), 5.0
    explainer = Explainer(sched, True, lambda: at)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO, logger="draftwing"):
        for _ in range(3):
            explainer.look()
        assert sched.asked == 1 and len(caplog.records) == 1
        assert caplog.messages[0] == (
            "drafts: nothing is drafted: verifying 3 nodes a request at 2 requests costs 2.00x and brings 1.50x"
        )
        at += REPORT_SECONDS
        explainer.look()
        assert sched.asked == 2 and len(caplog.records) == 1
        at += LOG_SECONDS
        explainer.look()
        assert len(caplog.records) == 2


def test_it_tells_that_drafts_are_suspended() -> None:
    sched = Sched()
    explainer = Explainer(sched, False)  # type: ignore[arg-type]
    sched.suspended = True
    explainer.look()
    assert explainer.now is not None and explainer.now["suspended"] is True
    assert "prompts wait" in explainer.now["summary"]


def test_the_newest_and_the_busiest() -> None:
    sched, at = Sched(), 0.0
    explainer = Explainer(sched, False, lambda: at)  # type: ignore[arg-type]
    assert explainer.now is None
    for requests in (2, 5, 1, 0):
        sched.requests = requests
        explainer.look()
        at += 1
    assert explainer.now is not None and explainer.busiest is not None
    assert (explainer.now["requests"], explainer.busiest["requests"]) == (1, 5)
    explainer.rest()
    assert (explainer.now["requests"], explainer.busiest["requests"]) == (0, 5)


def test_an_engine_tells(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = dict(device="cpu", max_total_tokens=2048, max_running_requests=4, num_threads=1, random_seed=1)
    model = str(write_checkpoint(tmp_path / "model"))
    with (
        caplog.at_level(logging.INFO, logger="draftwing"),
        LLM(model, **options, speculative_algorithm="NGRAM", speculative_explain=True) as llm,
    ):
        llm.generate("the cat sat on the cat sat on the", {"max_new_tokens": 60, "ignore_eos": True})
        (line,) = (message for message in caplog.messages if message.startswith("drafts: "))
        assert "drafted" in line
        found = llm.engine.stats()["explain"]
        assert found["requests"] == 0 and "no request" in found["summary"]
    with LLM(model, **options, speculative_algorithm="none") as llm:
        assert llm.engine.stats()["explain"] is None
