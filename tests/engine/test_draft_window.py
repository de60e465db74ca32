"""A draft head that is right less often in long texts is kept to its last tokens where that is better. What it sees
changes drafts and no text; seen from a request to the next as from the start."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from draftwing import LLM, SamplingParams
from draftwing.config.drafters import HEADS
from draftwing.core import stretch_of
from draftwing.engine.draft_window import ENOUGH, LONG, WINDOW, DraftWindow
from draftwing.engine.head_fit import Expected

FIXED = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6,
         "speculative_fixed_shape": True}  # fmt: skip
SIZES = {"max_total_tokens": 4096, "max_running_requests": 2, "num_threads": 1, "context_length": 1024}
ASKED = [[{"role": "user", "content": text}] for text in (
    "Explain how a bicycle stays upright while its rider turns, and why it falls when it stands.",
    "Write a story about a fox and a crow who find a piece of cheese in the snow.",
)]  # fmt: skip
NEAR, FAR = stretch_of(100), stretch_of(3 * LONG)


class Server:
    """Answers in short and in long texts, whose first drafts are right in these shares."""

    def __init__(self, short: float, whole: float, kept: float, usual: float) -> None:
        self.shares = {NEAR: short, FAR: whole}
        self.kept, self.whole = kept, whole
        self.counts = {NEAR: [0, 0], FAR: [0, 0]}
        self.asked: list[int | None] = []
        self.able = True
        self.trial = DraftWindow(Expected(usual, "its card"), lambda: self.counts, self.see)

    def see(self, positions: int | None) -> bool:
        if self.able:
            self.asked.append(positions)
            self.shares[FAR] = self.whole if positions is None else self.kept
        return self.able

    def answer(self, short: int, long: int) -> None:
        for stretch, drafts in ((NEAR, short), (FAR, long)):
            self.counts[stretch][0] += drafts
            self.counts[stretch][1] += round(drafts * self.shares[stretch])
        self.trial.rest()


@pytest.mark.parametrize(
    ("short", "whole", "kept", "asked"),
    [
        (0.7, 0.3, 0.6, [WINDOW]), (0.7, 0.3, 0.31, [WINDOW, None]), (0.7, 0.3, 0.2, [WINDOW, None]),
        (0.7, 0.65, 0.9, []), (0.4, 0.6, 0.9, []), (0.9, 0.7, 0.8, [WINDOW]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("at_once", [40, ENOUGH])
def test_a_window_is_kept_where_it_is_better(
    short: float, whole: float, kept: float, asked: list[int | None], at_once: int
) -> None:
    server = Server(short, whole, kept, usual=0.01)
    for _ in range(4 * ENOUGH // at_once):
        server.answer(at_once, at_once)
    assert server.asked == asked and server.trial.window == (asked or [None])[-1]


def test_few_drafts_say_nothing() -> None:
    server = Server(0.8, 0.1, 0.8, usual=0.8)
    server.answer(ENOUGH - 1, ENOUGH - 1)
    assert not server.asked


@pytest.mark.parametrize(("usual", "asked"), [(0.6, [WINDOW]), (0.3, [])])
def test_without_short_texts_the_card_says_what_is_usual(usual: float, asked: list[int | None]) -> None:
    server = Server(0.9, 0.3, 0.8, usual)
    for _ in range(4):
        server.answer(0, ENOUGH)
    assert server.asked == asked


def test_what_cannot_be_done_now_is_done_later() -> None:
    server = Server(0.8, 0.3, 0.3, usual=0.8)
    server.able = False
    for able in (False, True, False, True):
        server.able = able
        server.answer(ENOUGH, ENOUGH)
    assert server.asked == [WINDOW, None]


@pytest.mark.parametrize(
    ("short", "whole", "kept", "asked"),
    [(0.7, 0.65, 0.66, [WINDOW, None]), (0.7, 0.5, 0.65, [WINDOW, None, WINDOW]), (0.6, 0.3, 0.3, [WINDOW, None] * 2)],
)
def test_a_head_that_is_swapped_in_is_judged_by_its_own_drafts(
    short: float, whole: float, kept: float, asked: list[int | None]
) -> None:
    """short, whole, kept: of the second head. The first is right in few drafts of long texts, whatever it sees."""
    server = Server(0.7, 0.1, 0.1, usual=0.7)
    server.answer(ENOUGH, ENOUGH)
    server.answer(0, ENOUGH // 2)
    assert server.asked == [WINDOW]
    server.trial.judge_anew()
    server.whole, server.kept = whole, kept
    server.shares = {NEAR: short, FAR: kept}
    for _ in range(20):
        server.answer(ENOUGH // 4, ENOUGH // 4)
    assert server.asked == asked and server.trial.window == asked[-1]


def test_what_was_decided_stays_when_the_head_is_swapped() -> None:
    server = Server(0.7, 0.3, 0.6, usual=0.7)
    for _ in range(3):
        server.answer(ENOUGH, ENOUGH)
    server.trial.judge_anew()
    server.shares[FAR] = 0.1
    for _ in range(3):
        server.answer(ENOUGH, ENOUGH)
    assert server.asked == [WINDOW] and server.trial.window == WINDOW


def without_window(kind: str, folder: Path) -> Path:
    """A copy of a head of the default model that sees all."""
    shutil.copytree(HEADS / "smollm2" / kind, folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config.get("draftwing", {}).pop("window", None)
    for key in ("layer_types", "sliding_window"):
        config.pop(key, None)
    file.write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    return folder


def answers(llm: LLM) -> list[tuple[list[int], int]]:
    """Token ids, and how many steps they took."""
    params = [SamplingParams(temperature=0.8, max_tokens=60, ignore_eos=True, seed=seed) for seed in range(len(ASKED))]
    return [(one.token_ids, one.meta_info["spec_verify_ct"]) for one in llm.chat(ASKED, params)]


@pytest.mark.slow
@pytest.mark.further(kind=["mtp", "eagle"])
@pytest.mark.parametrize("kind", ["eagle3", "mtp", "eagle"])
def test_seen_from_one_request_to_the_next_as_from_the_start(kind: str, tmp_path: Path) -> None:
    algorithm = {"eagle3": "EAGLE3", "mtp": "NEXTN", "eagle": "EAGLE"}[kind]
    folder = without_window(kind, tmp_path / "head")

    def engine(window: int) -> LLM:
        options: dict[str, Any] = {**FIXED, **SIZES, "speculative_algorithm": algorithm,
                                   "speculative_draft_model_path": str(folder)}  # fmt: skip
        return LLM("smollm2", speculative_draft_window_size=window, **options)

    with engine(0) as llm:
        first = answers(llm)
        llm.engine.parts.see_at_most(4)
        kept = answers(llm)
        llm.engine.parts.see_at_most(None)
        again = answers(llm)
    with engine(4) as llm:
        assert answers(llm) == kept
    assert first == again
    assert [ids for ids, _ in kept] == [ids for ids, _ in first]
    assert sum(steps for _, steps in kept) != sum(steps for _, steps in first)
