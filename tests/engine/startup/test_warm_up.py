"""What is run before the first request: it makes all that the request needs, changes no text, and costs the menu."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from draftwing.config.trees import PLAIN, TreeShape
from draftwing.core import Plan
from draftwing.engine.executor import Executor
from draftwing.engine.graphs import RecordedStages
from draftwing.engine.startup import warm_up as warming
from draftwing.engine.step_state import Pending
from draftwing.llm import LLM

pytestmark = pytest.mark.slow

NGRAM = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}
PROMPT, GREEDY = "the cat sat on the cat sat on the", {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}


def load(path: str, **options) -> LLM:
    return LLM(
        path, device="cpu", max_total_tokens=1024, max_running_requests=2, random_seed=1, num_threads=1, **options
    )


@pytest.fixture(autouse=True)
def nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine before has left its costs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "SECONDS", 600.0)
    monkeypatch.setattr(warming, "FIRST_SECONDS", 600.0)


@pytest.mark.parametrize("options", [{"speculative_algorithm": "none"}, NGRAM], ids=["none", "ngram"])
def test_the_first_request_records_nothing(model: str, unhurried: None, options: dict) -> None:
    with load(model, quantization="q8_0", **options) as llm:
        stages = llm.engine.parts.executor.graphs
        if not isinstance(stages, RecordedStages):
            pytest.skip("nothing is recorded here")
        known, refused, replays = len(stages), set(stages.refused), stages.replays
        assert known and not refused
        llm.generate(PROMPT, GREEDY)
        assert (len(stages), stages.refused) == (known, refused) and stages.replays > replays


@pytest.mark.parametrize("options", [{"speculative_algorithm": "none"}, NGRAM], ids=["none", "ngram"])
def test_the_text_is_that_of_a_cold_engine(
    model: str, unhurried: None, options: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [GREEDY, GREEDY | {"temperature": 0.7, "sampling_seed": 3}]
    with load(model, **options) as llm:
        warm = [one.token_ids for one in llm.generate([PROMPT, PROMPT], params)]
        table = llm.engine.parts.executor.table
        assert not table.kv_len[table.rows] and not table.page_table[table.rows].any()
    monkeypatch.setattr("draftwing.engine.build.warm_up", lambda *parts: None)
    with load(model, **options) as llm:
        assert [one.token_ids for one in llm.generate([PROMPT, PROMPT], params)] == warm


@pytest.mark.parametrize("options", [{"speculative_algorithm": "none"}, NGRAM], ids=["none", "ngram"])
def test_prompts_at_once_leave_no_trace(
    model: str, options: dict, unhurried: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an engine with graphs runs them, whose kernels are made for one row, for two and for sixteen, for longer
    prompts, and for a row that asks for all there is."""
    params = [GREEDY, GREEDY | {"temperature": 0.7, "top_p": 0.8, "sampling_seed": 3}]
    texts, ran, lengths = [], list[tuple[int | TreeShape, int]](), list[int]()

    def launched(executor: Executor, plan: Plan) -> Pending:
        if len(plan.rows) == 1 and plan.max_kv_len > warming.PROMPT:
            lengths.append(plan.max_kv_len)
        else:
            ran.append((plan.shape if plan.special else len(plan.rows), len(plan.filtered)))
        return Executor.launch(executor, plan)

    for some in (False, True):
        with LLM(model, device="cpu", max_total_tokens=1024, max_running_requests=16, num_threads=1, **options) as llm:
            executor, menu = llm.engine.parts.executor, llm.engine.parts.sched.choice.policy.menu
            if some:
                with monkeypatch.context() as patch:
                    patch.setattr(executor, "launch", partial(launched, executor))
                    short, long = warming.lengths_to_try(executor, 100)
                    warming.try_prompts(executor, menu, short)
                    assert not long
            texts.append([one.token_ids for one in llm.generate([PROMPT, PROMPT], params)])
    assert texts[0] == texts[1]
    # A prompt, and a step of each shape behind another one.
    asking = [(PLAIN, 1), *(one for shape in menu for one in ((1, 0), (shape, 1)))]
    assert ran == [*((count, noisy) for count in (1, 2, 4, 8, 16) for noisy in (0, count)), *asking]
    assert lengths == [64, 96, 100]


@pytest.mark.parametrize(
    "options", [{"speculative_algorithm": "none"}, NGRAM | {"speculative_fixed_shape": True}], ids=["none", "ngram"]
)
def test_lengths_are_tried_between_requests(
    model: str, options: dict, unhurried: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cached prefixes and what the drafter has learnt stay as they are."""
    monkeypatch.setattr(warming, "SHORT", 32)
    params = [GREEDY, GREEDY | {"temperature": 0.7, "top_p": 0.8, "sampling_seed": 3}]
    found = []
    for some in (False, True):
        with LLM(model, device="cpu", max_total_tokens=1024, max_running_requests=16, num_threads=1, **options) as llm:
            parts, texts = llm.engine.parts, [one.token_ids for one in llm.generate([PROMPT, PROMPT], params)]
            if some:
                short, parts.lengths = warming.lengths_to_try(parts.executor, 100)
                assert (short, parts.lengths, parts.later) == ([], [64, 96, 100], 3)
                while parts.later:
                    parts.run_later()
            table = parts.executor.table
            assert not table.kv_len[table.rows] and not table.page_table[table.rows].any()
            again = llm.generate([PROMPT, PROMPT], params)
            kept = ("cached_tokens", "spec_accept_length")
            found.append((texts, [(one.token_ids, [one.meta_info.get(key) for key in kept]) for one in again]))
            assert all(one.meta_info["cached_tokens"] for one in again)
    assert found[0] == found[1]


def test_every_shape_has_a_price(model: str, unhurried: None) -> None:
    with load(model, **NGRAM) as llm:
        costs, menu = llm.engine.parts.costs, llm.engine.parts.sched.choice.policy.menu
        assert costs.complete and PLAIN in menu and len(menu) > 1
        points = {point[:3] for point in costs.table.points()}
        assert {(shape, 1, 0) for shape in menu} <= points and all(seconds > 0 for *_, seconds in costs.table.points())


def test_every_shape_of_a_large_model_has_a_price(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prompt alone takes longer than steps of a small one."""
    monkeypatch.setattr(warming, "SECONDS", 0.0)
    monkeypatch.setattr(warming, "FIRST_SECONDS", 600.0)
    with load(model, **NGRAM) as llm:
        assert llm.engine.parts.costs.complete


def test_steps_whose_costs_are_known_take_no_time_of_a_start(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Plan] = []
    monkeypatch.setattr(warming, "SECONDS", 0.0)
    with load(model, **NGRAM) as llm:
        parts = llm.engine.parts
        executor, menu = parts.executor, parts.sched.choice.policy.menu
        launch = executor.launch
        monkeypatch.setattr(executor, "launch", lambda plan: (ran.append(plan), launch(plan))[1])
        warming.warm_up(executor, menu, None)
        assert [plan.kind for plan in ran] == ["prefill"]


@pytest.mark.parametrize("mixed", [True, False])
def test_plain_steps_have_a_price_where_parts_of_prompts_are_beside_them(
    model: str, unhurried: None, mixed: bool
) -> None:
    """Those beside rows say nothing of what the rows take, and how long they may be follows from that."""
    with load(model, speculative_algorithm="none", enable_mixed_chunk=mixed) as llm:
        found = llm.engine.parts.sched.choice.policy.seconds(1, 0, PLAIN)
        assert (found is not None and found > 0) == mixed


def test_it_ends_in_time(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "SECONDS", 0.0)
    monkeypatch.setattr(warming, "FIRST_SECONDS", 0.0)
    with load(model, **NGRAM) as llm:
        assert not list(llm.engine.parts.costs.table.points())
        assert len(llm.generate(PROMPT, GREEDY)[0].token_ids) == 24
