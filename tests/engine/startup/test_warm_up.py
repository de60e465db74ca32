"""What is run before the first request: it makes all that the request needs, changes no text, and prices the menu."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_checkpoint import write_checkpoint

from draftwing.core import PLAIN
from draftwing.engine.graphs.cpu_tape import RecordedStages
from draftwing.engine.startup import warm_up as warming
from draftwing.llm import LLM

NGRAM = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}
PROMPT, GREEDY = "the cat sat on the cat sat on the", {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}


def load(path: Path, **options) -> LLM:
    return LLM(
        str(path), device="cpu", max_total_tokens=1024, max_running_requests=2, random_seed=1, num_threads=1, **options
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its rows are whole blocks, so that the steps of quantised weights are recorded."""
    return write_checkpoint(tmp_path_factory.mktemp("warm") / "model", hidden=64, heads=2, size=32)


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "SECONDS", 600.0)


@pytest.mark.parametrize("options", [{"speculative_algorithm": "none"}, NGRAM], ids=["none", "ngram"])
def test_the_first_request_records_nothing(checkpoint: Path, unhurried: None, options: dict) -> None:
    with load(checkpoint, quantization="q8_0", **options) as llm:
        stages = llm.engine.parts.executor.graphs
        if not isinstance(stages, RecordedStages):
            pytest.skip("nothing is recorded here")
        known, refused, replays = len(stages), set(stages.refused), stages.replays
        assert known and not refused
        llm.generate(PROMPT, GREEDY)
        assert (len(stages), stages.refused) == (known, refused) and stages.replays > replays


@pytest.mark.parametrize("options", [{"speculative_algorithm": "none"}, NGRAM], ids=["none", "ngram"])
def test_the_text_is_that_of_a_cold_engine(
    checkpoint: Path, unhurried: None, options: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [GREEDY, GREEDY | {"temperature": 0.7, "sampling_seed": 3}]
    with load(checkpoint, **options) as llm:
        warm = [one.token_ids for one in llm.generate([PROMPT, PROMPT], params)]
        table = llm.engine.parts.executor.table
        assert not table.kv_len[table.rows] and not table.page_table[table.rows].any()
    monkeypatch.setattr("draftwing.engine.build.warm_up", lambda executor, policy: None)
    with load(checkpoint, **options) as llm:
        assert [one.token_ids for one in llm.generate([PROMPT, PROMPT], params)] == warm


def test_the_policy_knows_the_price_of_every_shape(checkpoint: Path, unhurried: None) -> None:
    with load(checkpoint, **NGRAM) as llm:
        policy = llm.engine.parts.sched.policy
        assert PLAIN in policy.menu and len(policy.menu) > 1
        assert {(shape, 1) for shape in range(len(policy.menu))} <= set(policy._seconds)
        assert all(seconds > 0 for seconds in policy._seconds.values())


def test_it_ends_in_time(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "SECONDS", 0.0)
    with load(checkpoint, **NGRAM) as llm:
        assert not llm.engine.parts.sched.policy._seconds
        assert len(llm.generate(PROMPT, GREEDY)[0].token_ids) == 24
