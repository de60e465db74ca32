"""Which state slots a request has while it runs, what it leaves to the prefix cache, and what is evicted."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from draftwing.kv.pool import DeltaSpec, RowStates
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.sched.kv_manager import KVManager
from draftwing.sched.req import Req, ReqState
from draftwing.sched.state_slots import StateSizes, StateSlots

SLOTS, ROWS = 400, 4


def manager(states: StateSizes, slots: int = SLOTS, lookahead: int = 0) -> KVManager:
    return KVManager(slots, ROWS, lookahead, cache=True, room=4, states=states)


def request(tokens: list[int], uid: str = "a") -> Req:
    return Req(GenerationRequest(uid, tokens, SamplingParams(temperature=0)), 0, 300, frozenset())


def states_of(kv: KVManager) -> StateSlots:
    assert kv.states is not None
    return kv.states


def run(kv: KVManager, req: Req, chunk: int = 1000, steps: int = 0) -> None:
    """Its prompt in chunks, and plain steps; each is committed at once."""
    states = states_of(kv)
    assert kv.admit(req, req.array, 0)
    req.state = ReqState.PREFILL
    while req.unsent:
        length = min(chunk, req.unsent)
        assert kv.cover(req, req.sent + length)
        states.saves(req, length)
        kv.take_states()
        states.planned([req])
        req.sent += length
        req.kv = req.sent
        states.committed(req, req.kv)
    req.tokens.append(7)
    kv.share(req)
    for _ in range(steps):
        step(kv, req)


def step(kv: KVManager, req: Req) -> None:
    assert kv.cover(req, req.kv + 1)
    kv.take_states()
    states_of(kv).planned([req])
    states_of(kv).committed(req, req.kv + 1)
    req.kv += 1
    req.tokens.append(7)


def end(kv: KVManager, req: Req) -> None:
    kv.release(req)
    req.state = ReqState.DONE
    kv.check_idle()


def found(kv: KVManager, tokens: list[int]) -> tuple[int, int]:
    """Tokens that a request would not compute, and those with KV."""
    match = kv.radix.match(np.asarray(tokens), 0, len(tokens) - 1)
    return len(match.slots), match.reach


def test_slots_of_a_row_take_turns_and_its_first_one_is_another_s() -> None:
    kv = manager(StateSizes(6, 100, 100))
    req, states = request([*range(9)]), states_of(kv)
    assert kv.admit(req, req.array, 0)
    req.state = ReqState.PREFILL
    ((row, read, first, length),) = kv.take_states().tolist()
    assert (row, read, length) == (req.row, 0, 0), "it begins with the state of an empty text"
    states.planned([req])
    ((row, read, second, length),) = kv.take_states().tolist()
    assert (row, read, length) == (req.row, -1, -1) and second not in (0, first)
    for write, other in ((second, first), (first, second), (second, first)):
        assert req.states is not None and (req.states.write, req.states.read) == (write, other)
        states.planned([req])
        assert not len(kv.take_states())
    kv.check_integrity()


def test_snapshots_of_prompts() -> None:
    """Every 16 tokens, at the last multiple of 4, and where a prompt leaves what is cached."""
    kv = manager(StateSizes(40, 16, 4))
    text = [*range(50)]
    req = request(text)
    run(kv, req, chunk=20)
    assert states_of(kv).kept == 3
    assert found(kv, text) == (48, 49) and found(kv, text[:40]) == (32, 39)
    end(kv, req)
    other = request([*text[:40], 90, 91, 92])
    assert found(kv, other.tokens) == (32, 40)
    run(kv, other)
    assert other.cached_tokens == 32
    assert found(kv, [*text[:40], 80]) == (40, 40), "the next one that leaves there goes on from there"
    end(kv, other)


@pytest.mark.parametrize(("lookahead", "expected"), [(0, 48), (1, 48), (2, 44)])
def test_the_last_snapshot_leaves_what_has_to_be_run(lookahead: int, expected: int) -> None:
    """By whoever comes with the same prompt."""
    kv = manager(StateSizes(40, 100, 4), lookahead=lookahead)
    run(kv, request([*range(50)]))
    again = request([*range(50)], "b")
    run(kv, again)
    assert again.cached_tokens == expected


def test_one_prompt_takes_a_quarter_of_all_slots() -> None:
    kv = manager(StateSizes(40, 2, 2))
    run(kv, request([*range(300)]))
    assert 5 <= states_of(kv).kept <= 11


def test_without_a_prefix_cache_there_are_no_snapshots() -> None:
    kv = KVManager(SLOTS, ROWS, 0, cache=False, room=4, states=StateSizes(40, 2, 2))
    req = request([*range(50)])
    assert kv.admit(req, req.array, 0) and not states_of(kv).saves(req, 50)
    req.state = ReqState.PREFILL
    end(kv, req)
    req = request([*range(50)])
    run(kv, req, steps=3)
    end(kv, req)
    assert states_of(kv).kept == 0


def test_what_a_request_leaves_when_it_ends() -> None:
    kv = manager(StateSizes(6, 100, 100))
    req = request([*range(9)])
    run(kv, req, steps=5)
    end(kv, req)
    assert states_of(kv).kept == 1 and found(kv, [*req.tokens, 1]) == (14, 14)


def test_a_step_in_flight_does_not_spoil_what_is_left() -> None:
    kv = manager(StateSizes(6, 100, 100))
    req, states = request([*range(9)]), states_of(kv)
    run(kv, req, steps=2)
    assert req.states is not None
    newest = req.states.newest
    states.planned([req])  # reads the newest one
    kv.release(req)
    req.state = ReqState.DONE
    assert found(kv, [*req.tokens, 1])[0] == 11
    match = kv.radix.match(np.asarray([*req.tokens, 1]), 0, 20)
    assert match.node.state == newest
    other = request([*range(60, 69)])
    run(kv, other)
    assert other.states is not None
    states.planned([other])
    states.planned([other])  # writes the slot that was written last
    kv.release(other)
    other.state = ReqState.DONE
    assert found(kv, [*other.tokens, 1])[0] == 0 and kv.states is not None and kv.states.kept == 1
    kv.check_idle()


def test_the_least_recently_used_is_evicted_and_none_that_is_about_to_be_read() -> None:
    kv = manager(StateSizes(5, 100, 4))
    texts = [[i] * 9 for i in (1, 2, 3)]
    for text in texts:
        req = request(text)
        run(kv, req)
        end(kv, req)
    kept = [found(kv, [*text, 5])[0] for text in texts]
    assert sum(length > 0 for length in kept) >= 2 and kept[2] > 0
    reader = request([*texts[2], 7, 6, 6])
    assert kv.admit(reader, reader.array, 0)
    reader.state = ReqState.PREFILL
    assert reader.states is not None and reader.states.begun is not None
    snapshot = reader.states.read
    other = request([9] * 9, "b")
    assert kv.admit(other, other.array, 0)
    other.state = ReqState.PREFILL
    assert not kv.admit(request([8] * 9, "c"), np.asarray([8] * 9), 0), "there are two slots for two, and the snapshot"
    assert snapshot == reader.states.begun.state
    kv.check_integrity()
    for req in (reader, other):
        kv.release(req)
        req.state = ReqState.DONE
    kv.check_idle()


def turn(kv: KVManager, text: list[int], steps: int = 3) -> Req:
    req = request(text)
    run(kv, req, steps=steps)
    end(kv, req)
    return req


def test_sessions_that_take_turns_keep_the_ends_of_their_prompts() -> None:
    """With fewer slots than they leave snapshots, of which most are of no use again."""
    kv = manager(StateSizes(14, 16, 4), slots=2000)
    texts = [[session] * 20 for session in range(1, 6)]
    for number in range(5):
        for session, text in enumerate(texts):
            req = turn(kv, text)
            assert req.cached_tokens >= (len(text) - 20 if number else 0), (number, session)
            text += [50 + number] * 16
    assert states_of(kv).evictions > 20


def test_what_several_begin_with_is_kept_as_long_as_what_is_waited_for() -> None:
    kv = manager(StateSizes(12, 100, 4))
    common = [*range(12)]
    for number in range(3):
        turn(kv, [*common, *[20 + number] * 9])
    for number in range(4):
        turn(kv, [60 + number] * 9)
    assert found(kv, [*common, 90])[0] == 12


def test_what_nobody_comes_back_to_is_evicted_at_last() -> None:
    kv = manager(StateSizes(8, 100, 4))
    for number in range(20):
        turn(kv, [10 + number] * 9)
    text = [*range(12)]
    for number in range(4):
        req = turn(kv, text)
        assert (req.cached_tokens > 0) == (number > 0)
        text = [*req.tokens, 5, 5]


def test_no_state_for_a_few_tokens() -> None:
    """Where a prompt leaves what is cached near the snapshot that it begins with."""
    kv = manager(StateSizes(40, 100, 8))
    turn(kv, [*range(29)], steps=0)
    turn(kv, [*range(27), *[90] * 3], steps=0)
    assert found(kv, [*range(27), 80]) == (24, 27)


def test_kv_that_is_evicted_takes_its_snapshot_along() -> None:
    kv = manager(StateSizes(8, 100, 4), slots=30)
    first = request([*range(13)])
    run(kv, first)
    end(kv, first)
    assert found(kv, [*range(13)])[0] == 12
    second = request([*range(50, 73)])
    run(kv, second)
    kv.check_integrity()
    assert found(kv, [*range(13)])[0] == 0
    end(kv, second)


def test_a_spoilt_request_leaves_nothing() -> None:
    kv = manager(StateSizes(8, 100, 4))
    first, spoilt = request([*range(13)]), request([*range(50, 73)], "b")
    run(kv, first)
    run(kv, spoilt, steps=3)
    kv.release(first)
    first.state = ReqState.DONE
    kv.quarantine(spoilt)
    kv.release(spoilt)
    spoilt.state = ReqState.DONE
    kv.quarantine_cache()
    assert states_of(kv).kept == 0
    kv.check_idle()


@pytest.mark.parametrize("lazy", [False, True])
def test_reads_and_writes_as_the_device_does(lazy: bool) -> None:
    """Chunks, plain steps and trees at random, committed a step later; what is left is what the device wrote."""
    kv, rng = manager(StateSizes(40, 100, 100, lazy)), random.Random(1)
    states, spec = states_of(kv), DeltaSpec(1, 1, 2, 2, 2)
    device = RowStates({0: spec}, 40, ROWS, 4, torch.float32, torch.device("cpu"), lazy)
    req = request([1] * 50)
    assert kv.admit(req, req.array, 0) and req.states is not None
    row, written, left = torch.tensor([req.row]), {}, 0
    flying: list[int] = []
    for at in range(10, 400):
        nodes = 0 if at < 14 else rng.choice((1, 1, 1, 4))
        device.set(torch.from_numpy(kv.take_states()).reshape(-1, 4))
        held = req.states
        assert (held.read, held.write) == (int(device.read[row]), int(device.write[row]))
        if bool(device.left(row, nodes)):
            left += 1
        else:
            written[int(device.write[row])] = at
        device.advance(row, torch.tensor([at]), nodes)
        states.planned([req], nodes)
        flying.append(at)
        if len(flying) > 1:
            states.committed(req, flying.pop(0))
            if held.newest not in held.writes:
                assert written[held.newest] == held.length
    assert left > 60 if lazy else not left
