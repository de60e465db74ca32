"""What waits for the engine's thread, and how much of it is taken between two steps."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tiny_checkpoint import write_checkpoint

from draftwing.config.options import Options
from draftwing.engine.engine import ENDED, RECEIVED, Engine
from draftwing.engine.input_queue import InputQueue
from draftwing.errors import RequestError
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.sched.req import Req


def asked(uid: str, client: str = "") -> GenerationRequest:
    """A request of more tokens than the steps of a test accept, whatever drafts the prices of this machine allow."""
    params = SamplingParams(max_new_tokens=200, ignore_eos=True, temperature=0.0)
    return GenerationRequest(uid, [1, 2, 3], params, client=client)


def req(uid: str, client: str) -> Req:
    return Req(asked(uid, client), seed=0, max_total=9, stop_ids=frozenset())


def test_clients_take_turns_and_what_ended_is_never_taken() -> None:
    inbox = InputQueue()
    for i in range(1000):
        inbox.put(req(f"a{i}", "a"))
    inbox.put(req("b0", "b"))
    inbox.put(req("b1", "b"))
    for i in range(2, 1000):
        inbox.end(f"a{i}")
    inbox.end("known to the scheduler")
    assert inbox.new == 4 and not inbox.empty
    assert [one.uid for one in inbox.take_new(3)] == ["a0", "b0", "a1"]
    ended = [inbox.take_ended(400) for _ in range(4)]
    assert [len(part) for part in ended] == [400, 400, 199, 0]
    assert ended[2][-1] == "known to the scheduler" and all(isinstance(one, Req) for one in ended[0])
    assert [one.uid for one in inbox.take_new(3)] == ["b1"] and inbox.empty and not inbox.take_new(1)
    inbox.wake()
    inbox.wait()


def test_who_waits_gets_all_that_are_put_together() -> None:
    inbox, found = InputQueue(), list[int]()
    waiting = threading.Thread(target=lambda: found.append(inbox.wait(10) and inbox.new))
    with inbox.together():
        inbox.put(req("first", "a"))
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive() and inbox.wait(0) is False
        inbox.put(req("second", "a"))
    waiting.join(10)
    assert found == [2]


def test_its_length_is_of_one_moment() -> None:
    """Whoever counts does not meet a queue that is being released."""
    queue = InputQueue()
    queue.hold()
    queue.put(req("a", ""))
    found: list[int] = []
    counting = threading.Thread(target=lambda: found.append(len(queue)), daemon=True)
    with queue._changed:
        counting.start()
        counting.join(0.05)
        assert counting.is_alive()
    counting.join(10)
    assert found == [1]


def test_a_wake_ends_one_wait() -> None:
    queue = InputQueue()
    queue.wake()
    queue.wait()
    waiting = threading.Thread(target=queue.wait, daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    queue.wake()
    waiting.join(10)
    assert not waiting.is_alive()


def test_a_wait_of_some_seconds_says_whether_there_is_something() -> None:
    queue = InputQueue()
    assert not queue.wait(0)
    queue.wake()
    assert queue.wait(0) and not queue.wait(0)
    queue.put(req("a", ""))
    assert queue.wait(0) and queue.wait(0)
    queue.end("a")
    assert queue.wait(60) and len(queue.take_ended(2)) == 1 and not queue.wait(0)


class Turning:
    """An engine's outputs, taken together."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.done = engine, list[list[int]]()  # tokens of requests that ended
        self._open: dict[str, list[int]] = {}

    def turn(self, times: int) -> None:
        for _ in range(times):
            for output in self.engine.step():
                self._open.setdefault(output.uid, []).extend(output.token_ids)
                if output.finish_reason is not None:
                    self.done.append(self._open.pop(output.uid))

    def ended(self, count: int = 1) -> list[list[int]]:
        """Turns until so many requests more have ended -> their tokens."""
        while len(self.done) < count:
            self.turn(1)
        done, self.done = self.done, []
        return done


@pytest.mark.slow
@pytest.mark.further(overlap=False, drafter="NGRAM")
@pytest.mark.further(overlap=True, drafter="NGRAM", turns=[0, 7])
@pytest.mark.further(overlap=False, drafter="none", turns=[1, 3])
@pytest.mark.further(overlap=True, drafter="none", turns=[0, 7])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("drafter", ["none", "NGRAM"])
@pytest.mark.parametrize("turns", [0, 1, 3, 7])
def test_a_uid_has_one_live_request(tmp_path: Path, turns: int, drafter: str, overlap: bool) -> None:
    """At once and some steps apart; it is free when the last output was given out, though a step of the old request may
    still be under way."""
    engine = Engine(
        Options(
            model=str(write_checkpoint(tmp_path / "model")), device="cpu", max_total_tokens=2048, num_threads=1,
            max_running_requests=4, speculative_algorithm=drafter, enable_overlap=overlap,
        )
    )  # fmt: skip
    try:
        turning = Turning(engine)
        engine.submit(asked("a"))
        expected = turning.ended()
        for _ in range(3):
            engine.submit(asked("a"))
            turning.turn(turns)
            for client in ("", "another"):
                with pytest.raises(RequestError, match="'a', which a live request has"):
                    engine.submit(asked("a", client))
            engine.submit(asked("b"))
            assert turning.ended(2) == 2 * expected
        engine.submit(asked("a"))
        turning.turn(turns)
        engine.abort("a")
        with pytest.raises(RequestError):
            engine.submit(asked("a"))
        turning.ended()
        engine.submit(asked("a"))
        assert turning.ended() == expected
        while not engine.idle():
            engine.step()
        assert not engine.step()
    finally:
        engine.close()


@pytest.mark.slow
def test_running_answers_go_on_beside_thousands(tmp_path: Path) -> None:
    """Of 1,000 requests that come at once, and leave, each step takes some; one of another client is among the first,
    and one that runs gets its tokens at every step."""
    engine = Engine(
        Options(
            model=str(write_checkpoint(tmp_path / "model")), device="cpu", max_total_tokens=4096, num_threads=1,
            max_running_requests=4, speculative_algorithm="none", disable_overlap_schedule=True,
        )
    )  # fmt: skip
    try:
        engine.submit(asked("bob", "b"))
        assert [out.uid for out in engine.step()] == ["bob"]
        for i in range(1000):
            engine.submit(asked(f"a{i}", "a"))
        engine.submit(asked("carol", "c"))
        sched, seen = engine.parts.sched, []
        for turn in range(1, 5):
            seen += [out.uid for out in engine.step()]
            assert len(sched.waiting) + len(sched.running) <= 1 + turn * RECEIVED
        assert seen.count("bob") >= 2 and "carol" in seen
        begun = {*seen}
        for i in reversed(range(1000)):
            engine.abort(f"a{i}")
        ended: list[str] = []
        while len(ended) < 1000:
            outputs = engine.step()
            begun |= {out.uid for out in outputs if out.token_ids}
            news = [out.uid for out in outputs if out.finish_reason is not None]
            assert len(news) <= ENDED + 3
            ended += [uid for uid in news if uid[0] == "a"]
        assert len(begun) < 40, "those that wait end without a row"
        assert len(set(ended)) == 1000
        while not engine.idle():
            engine.step()
        assert engine.stats()["waiting"] == 0
    finally:
        engine.close()
