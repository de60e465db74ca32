"""How many streams go on in a turn of the event loop."""

from __future__ import annotations

import asyncio

import pytest

from draftwing.server.output_stream import WAKES, Wakeups


async def _all_go_on(streams: int) -> tuple[list[int], list[int]]:
    """Returns who goes on by turns, and who went on in which order."""
    wakeups, woken, turns = Wakeups(), list[int](), list[int]()
    events = [asyncio.Event() for _ in range(streams)]

    async def wait(number: int) -> None:
        await events[number].wait()
        woken.append(number)

    tasks = [asyncio.create_task(wait(number)) for number in range(streams)]
    await asyncio.sleep(0)
    for event in events:
        wakeups.set(event)
        wakeups.set(event)  # again, before it has gone on
    while len(woken) < streams:
        before = len(woken)
        await asyncio.sleep(0)
        turns.append(len(woken) - before)
    await asyncio.gather(*tasks)
    return turns, woken


@pytest.mark.parametrize("streams", [1, WAKES, WAKES + 1, 5 * WAKES + 3])
def test_few_go_on_in_a_turn_and_all_in_their_order(streams: int) -> None:
    turns, woken = asyncio.run(_all_go_on(streams))
    assert woken == list(range(streams)) and max(turns) <= WAKES
    assert sum(count > 0 for count in turns) == -(-streams // WAKES)


def test_a_turn_begins_anew() -> None:
    async def run() -> list[bool]:
        wakeups, found = Wakeups(), []
        for _ in range(3):
            events = [asyncio.Event() for _ in range(WAKES)]
            for event in events:
                wakeups.set(event)
            found.append(all(event.is_set() for event in events))
            await asyncio.sleep(0.01)
        return found

    assert asyncio.run(run()) == [True] * 3
