"""What tests of the page in a browser share: sizes, an engine with something to show, and asking on the page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fake_engine import FakeEngine

WIDE, NARROW = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
PAUSE = 0.03  # seconds that a step of the stand-in takes, so that there is something to see
Open = Callable[..., Any]
Run = Callable[..., Any]  # a script of the page's, by Node.js


class BusyEngine(FakeEngine):
    """Has numbers as an engine has them that drafted."""

    def stats(self) -> dict[str, Any]:
        drafts = {"drafts": 5, "proposed": 20, "accepted": 8, "proposed_at": [10, 10], "accepted_at": [5, 3]}
        option = {
            "option": "chains of 2", "price_ms": 9.5, "expected_accepted_drafts": 1.2,
            "expected_tokens_per_second": 232.0, "chosen": True,
        }  # fmt: skip
        return super().stats() | {
            "prefilled_tokens": 40, "queried_tokens": 60, "hit_tokens": 20, "retractions": 0,
            "steps": {"prefill": 1, "plain": 2, "speculative": 5},
            "step_seconds": {"prefill": 0.1, "plain": 0.02, "speculative": 0.2}, "host_seconds": 0.01,
            "stage_seconds": {"draft": 0.05, "verify": 0.1, "commit": 0.03}, "staged_steps": 7,
            "drafters": {"EAGLE3": drafts, "NGRAM": drafts}, "speedup": 1.4,
            "explain": {"requests": 1, "summary": "chains of 2 are drafted", "options": [option]},
        }  # fmt: skip


def ask(page: Any, question: str) -> None:
    page.fill("#question", question)
    page.keyboard.press("Enter")


def wait_for_end(page: Any, seconds: float = 60) -> None:
    page.wait_for_selector("#send:not([data-stops])", timeout=seconds * 1000)
    page.wait_for_selector(".answer-foot:visible", timeout=5000)
