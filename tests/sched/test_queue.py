"""Whose turn it is."""

from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.sched.queue import FairQueue
from draftwing.sched.req import Req


def req(uid: str, client: str, priority: int = 0) -> Req:
    request = GenerationRequest(uid, [1], SamplingParams(), priority, client=client)
    return Req(request, seed=0, max_total=9, stop_ids=frozenset())


def served(queue: FairQueue, count: int = 1000) -> list[str]:
    found = []
    while len(queue) and len(found) < count:
        (one,) = queue.first(1)
        queue.admit(one)
        found.append(one.uid)
    return found


def test_clients_take_turns_within_a_priority() -> None:
    queue = FairQueue()
    for i in range(1000):
        queue.join(req(f"a{i}", "a"))
    assert served(queue, 3) == ["a0", "a1", "a2"]
    queue.join(req("b0", "b"))
    queue.join(req("b1", "b"))
    queue.join(req("c0", "c"))
    queue.join(req("a!", "a", priority=1))
    assert served(queue, 6) == ["a!", "b0", "c0", "a3", "b1", "a4"]


def test_without_keys_first_come_is_first_served() -> None:
    queue = FairQueue()
    for i in range(50):
        queue.join(req(str(i), ""))
    assert served(queue) == [str(i) for i in range(50)]


def test_a_client_that_asks_again_each_time_gets_every_second_turn() -> None:
    queue = FairQueue()
    for i in range(100):
        queue.join(req(f"a{i}", "a"))
    seen = []
    for i in range(40):
        queue.join(req(f"b{i}", "b"))
        seen += served(queue, 2)
    assert sum(uid.startswith("a") for uid in seen) >= 38 and "b38" in seen


def test_whoever_comes_back_has_its_old_place() -> None:
    queue = FairQueue()
    ones = [req(str(i), "ab"[i % 2]) for i in range(6)]
    for one in ones:
        queue.join(one)
    assert served(queue, 4) == ["0", "1", "2", "3"]
    queue.rejoin(ones[2])
    queue.join(req("new", "c"))
    assert served(queue) == ["2", "new", "4", "5"]
    queue.leave(ones[0])  # it does not wait


def test_clients_that_are_gone_are_forgotten() -> None:
    queue = FairQueue()
    for i in range(2000):
        queue.join(req(str(i), f"client {i}"))
        served(queue)
    assert len(queue._last) < 600
