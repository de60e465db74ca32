"""What waits for the engine's thread, and how much of it is taken between two steps."""

from __future__ import annotations

from pathlib import Path

from tiny_checkpoint import write_checkpoint

from draftwing.config.options import Options
from draftwing.engine.engine import ENDED, RECEIVED, Engine
from draftwing.engine.inbox import Inbox
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.sched.req import Req


def asked(uid: str, client: str = "") -> GenerationRequest:
    return GenerationRequest(uid, [1, 2, 3], SamplingParams(max_new_tokens=50, ignore_eos=True), client=client)


def req(uid: str, client: str) -> Req:
    return Req(asked(uid, client), seed=0, max_total=9, stop_ids=frozenset())


def test_clients_take_turns_and_what_ended_is_never_taken() -> None:
    inbox = Inbox()
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
