"""Whose turn it is, and who has how many rows."""

import random

import pytest

from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.sched.queue import MAX_CANDIDATES, FairQueue, RowShares
from draftwing.sched.req import Req


def req(uid: str, client: str, priority: int = 0) -> Req:
    request = GenerationRequest(uid, [1], SamplingParams(), priority, client=client)
    return Req(request, seed=0, max_total=9, stop_ids=frozenset())


def served(queue: FairQueue, count: int = 1000) -> list[str]:
    found = []
    while len(queue) and len(found) < count:
        one = next(queue.fair_order(lambda client: False))
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
    queue.requeue(ones[2])
    queue.join(req("new", "c"))
    assert served(queue) == ["2", "new", "4", "5"]
    with pytest.raises(KeyError):
        queue.leave(ones[0])  # it does not wait


def test_clients_that_are_gone_are_forgotten() -> None:
    queue = FairQueue()
    for i in range(2000):
        queue.join(req(str(i), f"client {i}"))
        served(queue)
    assert len(queue._last) < 600


def test_the_order_is_that_of_a_sort() -> None:
    """Whatever comes, goes and comes back: who waits is given by priority, turn and arrival, as a sort gives them, and
    those who have their share after the others of their priority."""
    rng, queue, waiting, gone = random.Random(0), FairQueue(), [], []
    for i in range(3000):
        what = rng.random()
        if what < 0.55 or not waiting:
            waiting.append(req(str(i), rng.choice("abc"), rng.randrange(2)))
            queue.join(waiting[-1])
        elif what < 0.7:
            queue.leave(waiting.pop(rng.randrange(len(waiting))))
        elif what < 0.9 or not gone:
            gone.append(waiting.pop(rng.randrange(len(waiting))))
            queue.admit(gone[-1])
        else:
            waiting.append(gone.pop(rng.randrange(len(gone))))
            queue.requeue(waiting[-1])
        if i % 50 == 0:
            served = set(rng.sample("abc", 1))
            lines = {c: sorted((r for r in waiting if r.request.client == c), key=lambda r: r.rank) for c in "abc"}
            seen = [r for line in lines.values() for r in line[:MAX_CANDIDATES]]
            expected = sorted(seen, key=lambda r: (r.rank[0], r.request.client in served, r.rank))
            assert list(queue.fair_order(served.__contains__)) == expected
            assert len(queue) == len(waiting) and set(queue) == set(waiting)


def test_who_gets_a_row_is_not_looked_at_in_vain() -> None:
    queue, ones = FairQueue(), [req(str(i), "a") for i in range(200)]
    for one in ones:
        queue.join(one)
    looked = []
    for one in queue.fair_order(lambda client: False, further=True):
        looked.append(one)
        if len(looked) % 2:
            queue.admit(one)
    assert looked == ones[: 2 * MAX_CANDIDATES - 1] or looked == ones[: 2 * MAX_CANDIDATES]
    for one in queue.fair_order(lambda client: False, further=True):
        queue.admit(one)
    assert not len(queue)


def test_who_leaves_gives_its_turn_back() -> None:
    queue = FairQueue()
    gone = [req(str(i), "a") for i in range(500)]
    for one in gone:
        queue.join(one)
    for one in random.Random(0).sample(gone, 500):
        queue.leave(one)
    kept = [req(f"kept {i}", "a", priority) for i, priority in enumerate((0, 1, 0))]
    for one in kept:
        queue.join(one)
    queue.join(last := req("last", "a"))
    queue.leave(last)
    queue.join(req("mine", "a"))
    for i in range(3):
        queue.join(req(f"b{i}", "b"))
    assert served(queue) == ["kept 1", "b0", "kept 0", "b1", "kept 2", "b2", "mine"]


def test_who_is_not_in_turn_is_not_looked_at() -> None:
    """Before every step the first in turn is looked for; thousands of clients may wait."""
    queue, looks = FairQueue(), []
    for i in range(1000):
        queue.join(req(str(i), f"client {i}"))
    fair_order = queue.fair_order(lambda client: bool(looks.append(client)))
    assert [next(fair_order).uid for _ in range(3)] == ["0", "1", "2"] and len(looks) < 10


def test_places_are_found_by_bisection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2,048 requests that come and leave in any order each looks at some dozens of others at most."""
    queue, ones, looks = FairQueue(), [req(str(i), "a") for i in range(2048)], 0
    rank = Req.rank

    def counted(self: Req) -> tuple[int, int, int]:
        nonlocal looks
        looks += 1
        return rank.__get__(self)

    monkeypatch.setattr(Req, "rank", property(counted))
    for one in ones:
        queue.join(one)
    random.Random(0).shuffle(ones)
    for one in ones:
        queue.leave(one)
    assert not len(queue) and looks < 30 * len(ones)


def test_rows_are_shared() -> None:
    queue, running = FairQueue(), [req(f"a{i}", "a", priority=i == 7) for i in range(8)]
    for one in running:
        queue.join(one)
        queue.admit(one)
    bob, high = req("b", "b"), req("c", "c", priority=1)
    shares = RowShares(8, running, queue)
    assert not shares.served("b") and shares.preemption_victim(running, bob) is None, "alone a client may have all"
    queue.join(bob)
    queue.join(high)
    shares = RowShares(8, running, queue)  # two each
    assert shares.preemption_victim(running, bob) is running[6], "the newest, but not of a higher priority"
    assert shares.preemption_victim(running, high) is running[6]
    assert shares.preemption_victim(running[7:], bob) is None, "all are of a higher priority"
    for one in (bob, req("b2", "b")):
        shares.give(one)
    assert shares.served("b") and shares.preemption_victim(running, bob) is None
    for one in running[:6]:
        shares.take(one)
    assert shares.preemption_victim(running, high) is None, "nobody has more than its share"
    many = RowShares(2, [], queue)
    assert not many.served("b"), "at least one row is everybody's share"
