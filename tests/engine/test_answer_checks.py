"""Answers that are replayed while nothing else runs: each is counted, one that differs is logged with both receipts,
and no request waits for it."""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest
from hybrid_models import layer_weights, reference, with_layer
from reference.learnable import write_target
from tiny_checkpoint import VOCAB, write_tokenizer

from draftwing import LLM
from draftwing.core import Output
from draftwing.engine import answer_checks as answer_checks_module
from draftwing.engine import engine as engine_module
from draftwing.engine.answer_checks import PENDING, AnswerChecks
from draftwing.engine.engine import Engine
from draftwing.engine.provenance import Digests
from draftwing.engine.receipts import read_receipt
from draftwing.errors import RequestError
from draftwing.requests.request import GenerationRequest, SpecLimits
from draftwing.requests.sampling_params import SamplingParams
from draftwing.sched.req import Req

SECONDS = 30.0  # after which a test gives up
OPTIONS: dict[str, Any] = {"speculative_algorithm": "NGRAM", "max_total_tokens": 2048, "max_running_requests": 4}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("models") / "target", max_position_embeddings=512, intermediate_size=64)


@pytest.fixture(autouse=True)
def idle_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "IDLE_SECONDS", 0.001)


@pytest.fixture
def engine(target: Path) -> Iterator[Engine]:
    with LLM(str(target), **OPTIONS, replay_interval=1) as llm:
        llm.engine.measure_read_rate()  # else that is what it does first when it is idle
        yield llm.engine


def request(uid: str, tokens: int = 12, prompt: str = "one two one two", **more: Any) -> GenerationRequest:
    given = {name: more.pop(name) for name in list(more) if name not in GenerationRequest._fields}
    fields = {"temperature": 5.0, "top_k": 40, "ignore_eos": "regex" not in given, **given}
    params = SamplingParams(max_new_tokens=tokens, **fields)
    return GenerationRequest(uid, list(prompt.encode()), params, **more)


def answers(engine: Engine, *requests: GenerationRequest) -> list[Output]:
    """Runs them to their ends; no step of it is blocked."""
    for one in requests:
        engine.submit(one)
    found = []
    while not engine.idle():
        found += engine.step()
    return found


def rest(engine: Engine, until: Callable[[], bool]) -> list[Output]:
    """Turns the engine as its process does while nobody asks."""
    end, found = time.monotonic() + SECONDS, []
    alarm = threading.Timer(SECONDS, engine.wake)  # for a step with nothing to do, which waits for ever
    alarm.start()
    while not until():
        assert time.monotonic() < end, "waited in vain"
        found += engine.step(block=True)
    alarm.cancel()
    return found


def counts(engine: Engine) -> tuple[int, int]:
    stats = engine.stats()
    return stats["checked_answers"], stats["different_answers"]


def private(engine: Engine) -> list[bool]:
    sched = engine.parts.sched
    return [req.private for req in (*sched.running, *sched.waiting)]


def test_each_answer_is_replayed_once(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    answers(engine, request("a"), request("b", sampling_seed=3), request("c", regex="[a-f]{5,9}"))
    before = engine.stats()
    assert counts(engine) == (0, 0)
    assert rest(engine, lambda: counts(engine)[0] == 3) == [], "nobody is told of replays"
    assert counts(engine) == (3, 0) and not caplog.records
    after = engine.stats()
    for name in ("steps", "queried_tokens", "prefilled_tokens", "committed_tokens", "running", "cached_tokens"):
        assert after[name] == before[name], name
    assert not engine.parts.sched.running and engine.idle()


@pytest.mark.parametrize("every", [0, 3])
def test_one_of_so_many_is_replayed(target: Path, every: int) -> None:
    with LLM(str(target), **OPTIONS, replay_interval=every) as llm:
        engine = llm.engine
        engine.measure_read_rate()
        answers(engine, *(request(str(i), 3) for i in range(7)))
        if not every:
            assert "checked_answers" not in engine.stats()
            return
        rest(engine, lambda: counts(engine)[0] == 2)
        answers(engine, request("last but one", 3), request("last", 3))
        rest(engine, lambda: counts(engine)[0] == 3)


def plant(engine: Engine) -> None:
    """From now on the last token of each answer is another one than was drawn."""
    answered = engine.parts.sched.answered

    def altered(req: Req, reason: dict[str, Any]) -> None:
        req.tokens[-1] ^= 1
        answered(req, reason)

    engine.parts.sched.answered = altered


def test_a_difference_is_counted_and_logged_with_both_receipts(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    answers(engine, request("right"))
    plant(engine)
    given = answers(engine, request("wrong", sampling_seed=8))
    rest(engine, lambda: counts(engine) == (2, 1))
    end = time.monotonic() + SECONDS
    while not (lines := [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]):
        assert time.monotonic() < end
        time.sleep(0.01)
    (line,) = lines
    assert "at token 11" in line
    first, second = (
        read_receipt(json.dumps(json.loads(one))) for one in re.findall(r"\{\"version.*?\"digest\": \"\w+\"\}", line)
    )
    tokens = [token for output in given for token in output.token_ids]
    assert second.answer.token_ids == tokens and first.answer.token_ids == [*tokens[:-1], tokens[-1] ^ 1]
    assert first.request == second.request and first.request.sampling.sampling_seed == "8"


def test_a_request_ends_a_replay_with_its_first_step(engine: Engine) -> None:
    """It gets its tokens in as many steps as without, and never runs beside a replay."""
    plain = {"limits": SpecLimits(0, 1, 1), "sampling_seed": 4}  # so that a step gives one token
    answers(engine, request("a", 200))
    rest(engine, lambda: private(engine) == [True])
    engine.step()
    assert engine.stats()["running"] == 0, "to those who ask it is idle"
    engine.submit(request("b", 5, **plain))
    steps, found = 0, []
    while not any(output.finish_reason for output in found):
        found += engine.step()
        steps += 1
        assert True not in private(engine)
    assert {output.uid for output in found} == {"b"}
    alone = 0
    engine.submit(request("b", 5, **plain))
    found = []
    while not any(output.finish_reason for output in found):
        found += engine.step()
        alone += 1
    assert steps == alone and counts(engine) == (0, 0)
    rest(engine, lambda: counts(engine)[0] == 3)
    assert counts(engine) == (3, 0), "what was ended is replayed later"


def test_nothing_is_replayed_while_requests_wait(target: Path) -> None:
    with LLM(str(target), **{**OPTIONS, "max_running_requests": 1}, replay_interval=1) as llm:
        engine = llm.engine
        engine.measure_read_rate()
        for i in range(4):
            engine.submit(request(str(i), 8))
        ended = 0
        while ended < 4:
            ended += sum(output.finish_reason is not None for output in engine.step(block=True))
            assert True not in private(engine) or ended == 4
        rest(engine, lambda: counts(engine) == (4, 0))


def test_it_neither_uses_nor_leaves_cached_prefixes(engine: Engine) -> None:
    sched = engine.parts.sched
    answers(engine, request("a", 20, prompt="x" * 100), request("b", 20, prompt="x" * 100))
    size = sched.kv.radix.size
    prefilled: list[int] = []
    plan = sched.plan

    def watched() -> Any:
        made = plan()
        if made is not None:
            prefilled.extend(chunk.length for chunk in made.chunks)
        return made

    sched.plan = watched  # type: ignore[method-assign]
    rest(engine, lambda: counts(engine)[0] == 2)
    assert sum(prefilled) == 200 and max(prefilled) <= 32, "in small parts, so that who comes waits for one of them"
    assert sched.kv.radix.size == size
    sched.check_integrity()
    assert answers(engine, request("c", 2, prompt="x" * 100))[-1].meta["cached_tokens"] >= 99


def test_requests_that_may_not_be_kept_are_left_out(engine: Engine) -> None:
    answers(engine, request("a", learn=False), request("b", client="bob"), request("c", client="eve"))
    engine.forget_client("bob")
    rest(engine, lambda: counts(engine)[0] == 1)
    threading.Timer(0.1, engine.wake).start()
    engine.step(block=True)
    assert engine.idle() and counts(engine) == (1, 0), "there is nothing more to be replayed"


def test_a_client_may_be_forgotten_meanwhile(engine: Engine) -> None:
    answers(engine, request("a", 60, client="bob"), request("b", 60, client="bob"), request("c", 5, client="eve"))
    rest(engine, lambda: private(engine) == [True])
    engine.forget_client("bob")
    engine.submit(request("d", 3, client="eve"))  # which ends it: it does not wait again
    rest(engine, lambda: counts(engine)[0] == 2)
    assert engine.idle() and not private(engine)
    answers(engine, request("e", 60, client="bob"))
    rest(engine, lambda: private(engine) == [True])
    engine.forget_client("bob")
    rest(engine, engine.idle)
    assert counts(engine) == (2, 0)


def test_an_answer_that_ends_after_its_client_was_forgotten_is_left_out(engine: Engine) -> None:
    for traced in (False, True):
        engine.submit(request("a", client="bob", traced=traced))
        engine.step()
        engine.step()
        engine.forget_client("bob")
        while not engine.idle():
            engine.step()
    threading.Timer(0.1, engine.wake).start()
    engine.step(block=True)
    assert engine.idle() and counts(engine) == (0, 0)
    answers(engine, request("b", client="bob"), request("c", client="eve", traced=True))
    rest(engine, lambda: counts(engine) == (2, 0))


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Errors, once all threads that log differences have ended."""
    for thread in threading.enumerate():
        if thread.name == "draftwing-difference":
            thread.join(SECONDS)
            assert not thread.is_alive()
    return [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]


def test_differences_are_logged_from_time_to_time(
    engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has the whole prompt, and a fault makes many."""
    plant(engine)
    answers(engine, request("a"), request("b"), request("c"))
    rest(engine, lambda: counts(engine) == (3, 3))
    assert len(logged(caplog)) == 1
    monkeypatch.setattr(answer_checks_module, "LOG_SECONDS", 0.0)
    answers(engine, request("d"))
    rest(engine, lambda: counts(engine) == (4, 4))
    assert len(logged(caplog)) == 2


def test_who_is_forgotten_while_files_are_read_is_not_logged_in_place_of_others(
    engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, begin = threading.Event(), Digests.begin
    monkeypatch.setattr(Digests, "begin", lambda *args: (read.wait(SECONDS), begin(*args))[1])
    plant(engine)
    answers(engine, request("a", client="bob"))
    rest(engine, lambda: counts(engine) == (1, 1))
    engine.forget_client("bob")
    read.set()
    assert not logged(caplog)
    answers(engine, request("b"))
    rest(engine, lambda: counts(engine) == (2, 2))
    assert len(logged(caplog)) == 1


def test_a_replay_that_is_aborted_is_no_difference(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    given = answers(engine, request("a", 60))
    rest(engine, lambda: private(engine) == [True])
    engine.step()
    (replay,) = engine.parts.sched.running
    engine.parts.sched.abort(replay.uid, "it took too long")
    engine.step()
    assert counts(engine) == (0, 0)
    (line,) = logged(caplog)
    (one,) = re.findall(r"\{\"version.*?\"digest\": \"\w+\"\}", line)
    assert read_receipt(one).answer.token_ids == [token for output in given for token in output.token_ids]
    assert "could not be replayed" in line and "it took too long" in line
    plant(engine)
    answers(engine, request("b", 3))
    rest(engine, lambda: counts(engine) == (1, 1))
    assert len(logged(caplog)) == 2, "of two kinds"


def test_a_thread_that_cannot_be_started_ends_nothing(
    engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if thread.name == "draftwing-difference":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    plant(engine)
    answers(engine, request("a"), request("b"))
    rest(engine, lambda: counts(engine) == (2, 2))
    (line,) = logged(caplog)
    assert "differs" in line and "can't start new thread" in line and "prompt_ids" not in line


def test_a_replay_that_is_refused_is_left_out(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(engine, request("a", regex="[a-f]{5,9}"), request("b", 3))

    def refused(grammar: Any, *args: Any) -> Any:
        raise RequestError("regex takes too long")

    with monkeypatch.context() as patch:
        patch.setattr(engine.grammars, "compile", refused)
        rest(engine, lambda: counts(engine) == (1, 0))
    assert engine.idle()


def test_lengths_of_answers_are_not_learnt_from_replays(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    learnt: list[str] = []
    monkeypatch.setattr(engine.parts.sched.choice, "answered", lambda req: learnt.append(req.uid))
    answers(engine, request("a", 3), request("b", 3))
    rest(engine, lambda: counts(engine) == (2, 0))
    assert sorted(learnt) == ["a", "b"]


def interrupted(call: Callable[[], Any], line: int, meanwhile: Callable[[], Any]) -> tuple[Any, bool]:
    """Returns what the call does, before whose line of this number, in the file of answer checks, another thread does
    something for which it may have to wait; and whether there is such a line."""
    thread, seen = threading.Thread(target=meanwhile), 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal seen
        if frame.f_code.co_filename != answer_checks_module.__file__:
            return None
        seen += event == "line"
        if event == "line" and seen == line:
            thread.start()
            thread.join(0.05)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        found = call()
    finally:
        sys.settrace(before)
    if seen >= line:
        thread.join(SECONDS)
    return found, seen >= line


@pytest.mark.parametrize("part", ["begin", "stop", "take"])
def test_a_client_may_be_forgotten_at_any_moment(
    engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Before any line of what handles its answer, which is then neither replayed again nor logged."""
    ended: list[Any] = []
    monkeypatch.setattr(engine.parts.sched, "answered", lambda *args: ended.append(args))
    answers(engine, request("a", 3, client="bob"))
    read, begin = threading.Event(), Digests.begin
    monkeypatch.setattr(Digests, "begin", lambda *args: (read.wait(SECONDS), begin(*args))[1])

    def kept(line: int) -> bool:
        """Whether the answer is replayed again or logged where the client is forgotten before that line; asserts that
        it is not, if there is such a line."""
        read.clear()
        checks, there = AnswerChecks(1, lambda: engine.info), False
        checks.answered(*ended[0])

        def here(name: str, call: Callable[[], Any]) -> Any:
            nonlocal there
            if name != part:
                return call()
            found, there = interrupted(call, line, lambda: checks.forget("bob"))
            return found

        def begun() -> Any:
            return checks.begin(lambda grammar: True, lambda request: cast(Any, SimpleNamespace(uid=request.uid)))

        asked, again = here("begin", begun), None
        if part == "stop":
            here("stop", checks.stop)
            again = begun()
        elif asked is not None:
            output = Output(asked.uid, [1], {"type": "length", "length": 1})
            assert here("take", lambda: checks.take([output])) == []
        read.set()
        found = again is not None or bool(logged(caplog))
        assert not (found and there), line
        return found

    lines = 1
    while not kept(lines):
        lines += 1
    assert lines > 3, "after the last line it is too late"


def test_few_answers_wait_for_it(engine: Engine) -> None:
    for i in range(PENDING + 9):
        answers(engine, request(str(i), 1))
    rest(engine, lambda: counts(engine)[0] == PENDING)
    answers(engine, request("one more", 1))
    rest(engine, lambda: counts(engine)[0] == PENDING + 1)


def test_aborted_requests_are_not_replayed(engine: Engine) -> None:
    engine.submit(request("a", 100))
    engine.step()
    engine.abort("a")
    answers(engine, request("b", 3))
    rest(engine, lambda: counts(engine)[0] == 1)
    assert counts(engine) == (1, 0) and engine.idle()


def test_the_cache_can_be_flushed_meanwhile(engine: Engine) -> None:
    answers(engine, request("a", 200))
    rest(engine, lambda: private(engine) == [True])
    assert engine.flush_cache() and engine.idle()
    engine.parts.sched.check_integrity()
    rest(engine, lambda: counts(engine) == (1, 0))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["NEXTN", pytest.param("SUFFIX", marks=pytest.mark.exhaustive)])
def test_a_model_with_recurrent_layers(tmp_path: Path, algorithm: str) -> None:
    """Its states are kept apart as its keys are, and its head keeps keys of its own."""
    theirs = reference("qwen3.5", vocab_size=VOCAB, max_position_embeddings=512)
    with_layer(tmp_path, theirs, layer_weights(theirs))
    write_tokenizer(tmp_path)
    options = OPTIONS | {"speculative_algorithm": algorithm, "enable_overlap": True}
    with LLM(str(tmp_path), **options, replay_interval=1) as llm:
        engine = llm.engine
        engine.measure_read_rate()
        asked = [request(str(i), 20, prompt="abc" * 30 + str(i)) for i in range(3)]
        answers(engine, *asked)
        kept = engine.stats()["snapshots"]
        rest(engine, lambda: counts(engine)[0] == 2 and private(engine) == [True])
        engine.submit(request("d", 5))
        rest(engine, lambda: counts(engine)[0] == 4)
        assert counts(engine) == (4, 0) and engine.stats()["snapshots"] >= kept
        engine.parts.sched.check_integrity()


@pytest.mark.exhaustive  # as a tiny one
@pytest.mark.slow
def test_the_default_model_with_its_head(smollm2_path: Path) -> None:
    with LLM("smollm2", device="cpu", max_total_tokens=2048, replay_interval=2) as llm:
        engine = llm.engine
        engine.measure_read_rate()
        prompts = [llm.tokenizer.encode(f"Count from {i} to ten:") for i in range(4)]
        params = SamplingParams(max_new_tokens=24, temperature=0.7)
        answers(engine, *(GenerationRequest(str(i), prompt, params) for i, prompt in enumerate(prompts)))
        rest(engine, lambda: counts(engine)[0] == 2)
        assert counts(engine) == (2, 0)
        engine.parts.sched.check_integrity()
