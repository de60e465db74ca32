"""What is left of an engine when a step raises: with overlap one more is in flight."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_checkpoint import write_checkpoint

from draftwing import LLM

PARAMS = {"max_new_tokens": 40, "ignore_eos": True, "temperature": 0}


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_an_error_in_a_commit_leaves_a_usable_engine(tmp_path: Path, overlap: bool) -> None:
    model = str(write_checkpoint(tmp_path / "tiny"))
    with LLM(model, speculative_algorithm="NGRAM", max_total_tokens=1024, enable_overlap=overlap) as llm:
        expected = llm.generate("hello hello", PARAMS)[0].token_ids
        results = llm.engine.parts.sched.results
        real = results._commit_path

        def once(*args: object) -> None:
            results._commit_path = real  # type: ignore[method-assign]
            raise RuntimeError("once")

        results._commit_path = once  # type: ignore[assignment, method-assign]
        with pytest.raises(RuntimeError, match="once"):
            llm.generate("hello hello", PARAMS)
        assert llm.generate("hello hello", PARAMS)[0].token_ids == expected


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Has SIGINT raise KeyboardInterrupt, as in a terminal: in a job of the background it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_waits_for_the_end_of_a_step(tmp_path: Path) -> None:
    model = str(write_checkpoint(tmp_path / "tiny"))
    with LLM(model, speculative_algorithm="NGRAM", max_total_tokens=1024, enable_overlap=True) as llm:
        expected = llm.generate("hello hello", PARAMS)[0].token_ids
        results, ended = llm.engine.parts.sched.results, []
        real = results._commit_path

        def interrupted(*args: object) -> None:
            results._commit_path = real  # type: ignore[method-assign]
            signal.raise_signal(signal.SIGINT)
            real(*args)  # type: ignore[arg-type]
            ended.append(True)

        results._commit_path = interrupted  # type: ignore[assignment, method-assign]
        with pytest.raises(KeyboardInterrupt):
            llm.generate("hello hello", PARAMS)
        assert ended and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert llm.generate("hello hello", PARAMS)[0].token_ids == expected
