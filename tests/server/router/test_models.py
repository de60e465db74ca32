"""Which models run, with servers that are no processes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftwing.config.model_list import ServedModel
from draftwing.engine.process.link import EngineDead
from draftwing.errors import CheckpointError, GenerationError, NotFound
from draftwing.server.quotas import QueueFull
from draftwing.server.router.memory import Forecast
from draftwing.server.router.model import Model
from draftwing.server.router.models import Models, NoRoom

GB = 10**9


class Machine:
    """Starts servers, and sees who is there at which time."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.running: dict[str, FakeServer] = {}
        self.log: list[str] = []
        self.errors: dict[str, Exception] = {}
        self.refused: set[tuple[str, str]] = set()  # "sleep" or "wake", and whose
        self.hung: set[str] = set()  # whose start or wake-up does not end
        self.pool = 0  # bytes of each one's KV cache
        self.taken = 0  # and what each takes now; 0: not known

    def start(self, arguments: Mapping[str, Any], path: Path, ended: Callable[[], None]) -> FakeServer:
        return FakeServer(self, arguments["model"], path, ended)

    def models(self, sizes: Mapping[str, float], **more: Any) -> Models:
        """sizes: GB of each."""
        kept = more.pop("keep_alive", 1e9)
        own = {"device": more.pop("device", "cpu"), "load_timeout": more.pop("load_timeout", 60)}
        every = [ServedModel((name,), kept, {"model": name, **own}) for name in sizes]
        forecast = lambda one: Forecast(0, int(sizes[one.name] * GB), 0)  # noqa: E731
        return Models(every, start=self.start, forecast=forecast, taken=lambda pid: self.taken, **more)  # type: ignore[arg-type]


class FakeServer:
    def __init__(self, machine: Machine, name: str, path: Path, ended: Callable[[], None]) -> None:
        assert name not in machine.running, "it runs already"
        self.machine, self.name, self.path, self.ended = machine, name, path, ended
        self.process = SimpleNamespace(pid=os.getpid())
        self.users = 0
        self.asleep = False
        machine.running[name] = self
        machine.log.append(f"+{name}")

    async def ready(self) -> int:
        await self.pause()
        if self.name in self.machine.errors:
            raise self.machine.errors[self.name]
        return self.machine.pool

    async def stop(self) -> None:
        assert not self.users, "it loses a request"
        await asyncio.sleep(self.machine.seconds)
        if self.machine.running.pop(self.name, None):
            self.machine.log.append(f"-{self.name}")

    async def sleep(self) -> None:
        await asyncio.shield(self._sleep())  # what was sent is done, whoever leaves

    async def _sleep(self) -> None:
        assert not self.users, "it loses a request"
        await asyncio.sleep(self.machine.seconds)
        self.check("sleep")
        self.asleep = True
        self.machine.log.append(f"z{self.name}")

    async def wake_up(self) -> None:
        assert self.asleep
        await self.pause()
        self.check("wake")
        self.asleep = False
        self.machine.log.append(f"!{self.name}")

    async def pause(self) -> None:
        await asyncio.sleep(1e9 if self.name in self.machine.hung else self.machine.seconds)

    def check(self, what: str) -> None:
        if self.machine.running.get(self.name) is not self:
            raise EngineDead("its process ended")
        if (what, self.name) in self.machine.refused:
            raise GenerationError("there is no room")

    def die(self) -> None:
        del self.machine.running[self.name]
        self.ended()

    def how_it_ended(self) -> str:
        return "it died"


async def ask(models: Models, name: str, seconds: float = 0.0, ends: asyncio.Event | None = None) -> str:
    async with models.use(models.find(name)) as server:
        assert isinstance(server, FakeServer)
        assert not server.asleep
        server.users += 1
        await asyncio.sleep(seconds)
        if ends is not None:
            await ends.wait()
        server.users -= 1
        return server.name


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def test_one_start_for_all_who_wait() -> None:
    machine = Machine(0.01)
    models = machine.models({"a": 1}, budget=2 * GB)
    assert await asyncio.gather(*(ask(models, "a") for _ in range(9))) == ["a"] * 9
    assert machine.log == ["+a"] and models.find("a:latest").state == "loaded"
    await models.close()
    assert not machine.running


async def test_the_least_recently_used_makes_room() -> None:
    machine = Machine()
    models = machine.models({"a": 1, "b": 1, "c": 1}, budget=2 * GB)
    for name in "abac":
        await ask(models, name)
    assert machine.log == ["+a", "+b", "-b", "+c"]
    machine = Machine()
    models = machine.models({"a": 1, "b": 1, "c": 1}, budget=9 * GB, most=2)
    for name in "abc":
        await ask(models, name)
    assert machine.log == ["+a", "+b", "-a", "+c"]


async def test_a_loaded_model_counts_with_what_was_measured() -> None:
    machine = Machine()
    machine.pool, machine.taken = GB // 2, GB
    models = machine.models({"a": 3, "b": 3}, budget=5 * GB)
    await ask(models, "a")
    await models.refresh()
    machine.taken = 2 * GB  # for a moment
    await ask(models, "b")
    assert machine.log == ["+a", "+b"], "with its forecast a would have made room"
    await models.refresh()
    machine.taken = GB
    await models.refresh()
    least = models.find("a").needs.all
    assert 1.5 * GB < least < 1.6 * GB
    machine.taken = int(1.4 * GB)  # some of the cache is used: that is no more than it may take
    await models.refresh()
    assert models.find("a").needs.all == models.find("b").needs.all == least
    machine.taken = 0  # not known: what was known before
    await models.refresh()
    assert models.find("a").needs.all == least
    await models.unload(models.find("a"))
    machine.taken = 3 * GB
    machine.log.clear()
    await ask(models, "a")
    assert machine.log == ["-b", "+a"], "one that takes more than it should counts with that"
    await models.close()


async def test_what_cannot_fit_is_said_before_anything_is_stopped() -> None:
    machine = Machine()
    models = machine.models({"a": 1, "b": 1, "huge": 9}, budget=2 * GB)
    await asyncio.gather(ask(models, "a"), ask(models, "b"))
    with pytest.raises(NoRoom, match=r"'huge' was not started: it needs about 9\.00 GB .*2\.00 GB"):
        await ask(models, "huge")
    assert set(machine.running) == {"a", "b"} and models.find("huge").state == "unloaded"


async def test_a_request_in_flight_keeps_its_model() -> None:
    """Whoever needs its room waits, and further requests for it wait behind those, so that nobody waits for ever."""
    machine = Machine(0.005)
    models = machine.models({"a": 1, "b": 1}, budget=1 * GB)
    long = asyncio.create_task(ask(models, "a", 0.1))
    await asyncio.sleep(0.03)
    other = asyncio.create_task(ask(models, "b"))
    await asyncio.sleep(0.01)
    assert models.find("a").state == "unloading" and models.find("b").state == "loading"
    again = asyncio.create_task(ask(models, "a"))
    assert await asyncio.gather(long, other, again) == ["a", "b", "a"]
    assert machine.log == ["+a", "-a", "+b", "-b", "+a"]


async def test_a_start_that_fails_is_said_and_tried_again() -> None:
    machine = Machine()
    machine.errors["a"] = CheckpointError("a tensor is missing")
    models = machine.models({"a": 1}, budget=2 * GB)
    for _ in range(2):
        with pytest.raises(EngineDead, match="'a' was not started: a tensor is missing"):
            await ask(models, "a")
        await asyncio.sleep(0.01)  # until its process is gone
        assert not machine.running and models.find("a").failure == "a tensor is missing"
    for said, words in (("of its own", "of its own"), ("", "of something that it waited for")):  # no `load_timeout`
        machine.errors["a"] = TimeoutError(said)
        with pytest.raises(EngineDead, match=f"'a' was not started: TimeoutError: {words}$"):
            await ask(models, "a")
        await asyncio.sleep(0.01)
    machine.errors.clear()
    assert await ask(models, "a") == "a" and models.find("a").failure is None


async def test_one_that_dies_is_started_by_the_next_request() -> None:
    machine = Machine()
    models = machine.models({"a": 1}, budget=1 * GB)
    await ask(models, "a")
    machine.running["a"].die()
    assert models.find("a").state == "unloaded" and models.find("a").failure == "it died"
    assert await ask(models, "a") == "a"


async def test_time_without_requests() -> None:
    machine = Machine()
    models = machine.models({"a": 1}, budget=1 * GB, keep_alive=0.05)
    await ask(models, "a")
    await ask(models, "a", 0.1)
    assert machine.log == ["+a"], "it was stopped while it answered"
    async with asyncio.timeout(10):
        while machine.running:
            await asyncio.sleep(0.01)
    assert machine.log == ["+a", "-a"]


GPU: dict[str, Any] = {"device": "cuda", "budget": 10 * GB, "weights": lambda one: 2 * GB}


async def test_on_a_gpu_who_makes_room_sleeps() -> None:
    """One is awake at a time; each has its process."""
    machine = Machine()
    models = machine.models({"a": 1, "b": 1}, **GPU)
    for name in "abab":
        await ask(models, name)
    assert machine.log == ["+a", "za", "+b", "zb", "!a", "za", "!b"]
    a, b = models.find("a"), models.find("b")
    assert (a.state, b.state) == ("sleeping", "loaded") and models.loaded == [a, b]
    assert await models.unload(a) and (a.state, a.asleep) == ("unloaded", False)
    await ask(models, "a")
    assert machine.log[-3:] == ["-a", "zb", "+a"]
    await models.close()
    assert not machine.running


async def test_a_sleeping_model_needs_room_on_the_host() -> None:
    """Else who sleeps for longest is stopped, and then who was to sleep."""
    machine = Machine()
    models = machine.models({"a": 2, "b": 2, "c": 2}, **GPU | {"budget": 7 * GB})
    for name in "abc":
        await ask(models, name)
    assert machine.log == ["+a", "za", "+b", "-a", "zb", "+c"]
    machine = Machine()
    models = machine.models({"a": 2, "b": 2}, **GPU | {"budget": 4 * GB})
    for name in "ab":
        await ask(models, name)
    assert machine.log == ["+a", "-a", "+b"]


async def test_one_that_cannot_sleep_is_stopped_and_one_that_cannot_wake_is_started_anew() -> None:
    machine = Machine()
    models = machine.models({"a": 1, "b": 1}, **GPU)
    machine.refused = {("sleep", "a"), ("wake", "b")}
    for name in "abab":
        await ask(models, name)
    assert machine.log == ["+a", "-a", "+b", "zb", "+a", "-a", "-b", "+b"]
    machine.refused.clear()
    await ask(models, "a")
    machine.running["b"].die()
    assert models.find("b").state == "unloaded" and models.find("a").state == "loaded"
    await ask(models, "b")
    assert machine.log[-4:] == ["zb", "+a", "za", "+b"]


async def test_a_request_keeps_its_model_awake() -> None:
    machine = Machine(0.005)
    models = machine.models({"a": 1, "b": 1}, **GPU)
    long = asyncio.create_task(ask(models, "a", 0.1))
    await asyncio.sleep(0.03)
    other = asyncio.create_task(ask(models, "b"))
    await asyncio.sleep(0.01)
    assert models.find("a").state == "unloading" and models.find("b").state == "loading"
    again = asyncio.create_task(ask(models, "a"))
    assert await asyncio.gather(long, other, again) == ["a", "b", "a"]
    assert machine.log == ["+a", "za", "+b", "zb", "!a"]


async def test_a_sleeping_model_s_time_goes_on() -> None:
    machine = Machine()
    models = machine.models({"a": 1, "b": 1}, keep_alive=0.2, **GPU)
    await ask(models, "a")
    await ask(models, "b")
    assert machine.log == ["+a", "za", "+b"] and models.find("a").expires() <= models.find("b").expires()
    async with asyncio.timeout(10):
        while machine.running:
            await asyncio.sleep(0.01)
    assert sorted(machine.log[3:]) == ["-a", "-b"]


async def test_sleep_by_hand() -> None:
    """On any device; and back by hand, or by a request."""
    machine = Machine()
    models = machine.models({"a": 1, "b": 1}, budget=4 * GB)
    a = models.find("a")
    assert not await models.sleep(a) and not await models.wake_up(a)
    for wake in (lambda: models.wake_up(a), lambda: ask(models, "a")):
        await ask(models, "a")
        assert await models.sleep(a) and await models.sleep(a) and a.state == "sleeping"
        await wake()
        assert a.state == "loaded" and machine.log[-2:] == ["za", "!a"]
    machine.refused = {("sleep", "a")}
    with pytest.raises(GenerationError, match="no room"):
        await models.sleep(a)
    assert a.state == "loaded" and await ask(models, "a") == "a"
    machine.refused.clear()
    machine.taken = GB // 2
    await models.sleep(a)
    await models.refresh()
    assert a.size == GB // 2
    await models.close()


async def test_who_leaves_while_a_model_falls_asleep() -> None:
    """It sleeps all the same, is known to, and counts with what it takes then; nobody's request comes in between."""
    machine = Machine(0.02)
    machine.pool, machine.taken = GB, GB
    models = machine.models({"a": 3}, budget=9 * GB)
    a = models.find("a")
    await ask(models, "a")
    await models.refresh()
    needs = a.needs
    leaving, staying = (asyncio.create_task(models.sleep(a)) for _ in range(2))
    await asyncio.sleep(0.005)
    leaving.cancel()
    await asyncio.sleep(0)
    assert a.state == "unloading" and await staying and a.state == "sleeping" and machine.log == ["+a", "za"]
    machine.taken = GB // 10
    await models.refresh()
    assert a.needs == needs and a.size == GB // 10
    assert await ask(models, "a") == "a" and machine.log == ["+a", "za", "!a"]
    alone = asyncio.create_task(models.sleep(a))
    await asyncio.sleep(0.005)
    alone.cancel()
    assert await ask(models, "a") == "a" and machine.log[3:] == ["za", "!a"]
    await models.close()


async def test_who_leaves_while_it_waits_holds_nothing() -> None:
    machine = Machine(0.01)
    models = machine.models({"a": 1, "b": 1}, budget=1 * GB)
    leaving = [asyncio.create_task(ask(models, name)) for name in "abab"]
    await asyncio.sleep(0.002)
    for task in leaving:
        task.cancel()
    assert await ask(models, "b") == "b" and await ask(models, "a") == "a"
    assert not any(model.in_flight or model.waiting for model in models.every)


@pytest.mark.parametrize(
    ("obstacle", "why"),
    [
        ("room", "it waits for room"),
        ("own end", "it is still answering"),
        pytest.param("own sleep", "it is still answering", marks=pytest.mark.exhaustive),
        ("start", "it is still being loaded"),
        ("wake-up", "it waits for room"),
    ],
)
async def test_a_request_waits_no_longer_than_it_may(obstacle: str, why: str) -> None:
    """It has nothing then, nor keeps others from anything."""
    machine, ends = Machine(), asyncio.Event()
    models = machine.models({"a": 1, "b": 1}, budget=(1 if obstacle == "room" else 2) * GB, load_timeout=0.1)
    a = models.find("a")
    user = {"room": "b", "own end": "a", "own sleep": "a"}.get(obstacle)
    running = [] if user is None else [asyncio.create_task(ask(models, user, ends=ends))]
    await until(lambda: user is None or models.find(user).in_flight > 0)
    if obstacle == "wake-up":
        await ask(models, "a")
        await models.sleep(a)
    if obstacle.startswith("own"):
        running.append(asyncio.create_task(models.unload(a) if obstacle == "own end" else models.sleep(a)))
        await until(lambda: a.state == "unloading")
    machine.hung = set() if running else {"a"}
    with pytest.raises(
        QueueFull, match=rf"'a' was not loaded within 0\.1 s \(--load-timeout\): {why}.*try again later"
    ):
        await ask(models, "a")
    assert not a.waiting and await ask(models, "b") == "b"
    if obstacle == "start":
        ends_of = await asyncio.gather(*(late(models, "a", 0.02 * i) for i in range(5)), return_exceptions=True)
        said = "the model 'a' was not started: it was not ready within 0.1 s (--load-timeout)"
        assert said in map(str, ends_of) and all(isinstance(one, QueueFull | EngineDead) for one in ends_of)
    ends.set()
    machine.hung.clear()
    async with asyncio.timeout(10):
        await asyncio.gather(*running)
    await until(lambda: a.starting is None)
    assert await ask(models, "a") == "a"
    assert not any(model.in_flight or model.waiting for model in models.every)
    await models.close()
    assert not machine.running


async def late(models: Models, name: str, seconds: float) -> str:
    await asyncio.sleep(seconds)
    return await ask(models, name)


@pytest.mark.parametrize("sleeps", [False, True])
@pytest.mark.parametrize("by_hand", [False, True])
async def test_who_makes_room_goes_on_when_nobody_wants_it_any_more(by_hand: bool, sleeps: bool) -> None:
    """By hand it is stopped all the same; its time without requests goes on."""
    machine, ends = Machine(), asyncio.Event()
    models = machine.models({"a": 1, "b": 1}, keep_alive=0.1, **GPU if sleeps else {"budget": 1 * GB})
    b = models.find("b")
    long = asyncio.create_task(ask(models, "b", ends=ends))
    await until(lambda: b.in_flight > 0)
    leaving = [asyncio.create_task(ask(models, "a")) for _ in range(2)]
    await until(lambda: b.state == "unloading")
    unload = asyncio.create_task(models.unload(b)) if by_hand else None
    held = asyncio.create_task(ask(models, "b"))
    for task in leaving:
        await asyncio.sleep(0.02)
        assert b.state == "unloading" and not held.done()
        task.cancel()
    if unload is None:
        assert await held == "b" and b.state == "loaded" and models.find("a").state == "unloaded"
    await asyncio.sleep(0.02)
    assert machine.log == ["+b"] and held.done() is not by_hand and b.state == ("unloading" if by_hand else "loaded")
    ends.set()
    assert await asyncio.gather(long, held) == ["b", "b"]
    await until(lambda: not machine.running)
    assert machine.log == ["+b", "-b", *(["+b", "-b"] if by_hand else [])]


async def test_others_do_not_wait_for_the_end_of_one_that_has_room() -> None:
    machine, ends = Machine(), asyncio.Event()
    models = machine.models({"a": 1, "b": 1}, budget=2 * GB)
    a, running = models.find("a"), [asyncio.create_task(ask(models, "a", ends=ends))]
    await until(lambda: a.in_flight > 0)
    running += [asyncio.create_task(models.sleep(a)), asyncio.create_task(ask(models, "a"))]
    await asyncio.sleep(0.01)
    async with asyncio.timeout(10):
        assert await ask(models, "b") == "b"
    ends.set()
    await asyncio.gather(*running)
    assert machine.log == ["+a", "+b", "za", "!a"]


async def test_a_model_that_is_loaded_for_who_has_left_is_there_for_its_time() -> None:
    machine = Machine(0.02)
    models = machine.models({"a": 1}, budget=1 * GB)
    leaving, a = asyncio.create_task(ask(models, "a")), models.find("a")
    await until(lambda: bool(machine.running))
    leaving.cancel()
    await until(lambda: a.state == "loaded")
    await asyncio.sleep(0.02)
    assert await ask(models, "a") == "a" and machine.log == ["+a"]


@pytest.mark.parametrize("why", ["refused", "died"])
async def test_a_sleep_that_fails_when_who_asked_has_left_is_no_error_of_the_loop(why: str) -> None:
    machine, said = Machine(0.01), list[str]()
    models = machine.models({"a": 1})
    await ask(models, "a")
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: said.append(context["message"]))
    a, asked = models.find("a"), asyncio.create_task(models.sleep(models.find("a")))
    await until(lambda: a.resting is not None)
    await asyncio.sleep(0.002)  # the engine has been told
    asked.cancel()
    if why == "refused":
        machine.refused = {("sleep", "a")}
    else:
        machine.running["a"].die()
    await until(lambda: a.resting is None)
    await asyncio.sleep(0.02)
    gc.collect()
    assert not said and not a.asleep
    await models.close()


async def test_names_that_nobody_has() -> None:
    models = Machine().models({"a": 1, "b": 1})
    with pytest.raises(NotFound, match=r"the model 'x' does not exist; this server has 'a', 'b'"):
        models.find("x")


async def test_the_end_waits_for_nobody() -> None:
    machine = Machine(0.02)
    models = machine.models({"a": 1}, budget=1 * GB)
    waiting = asyncio.create_task(ask(models, "a"))
    await asyncio.sleep(0.005)
    await models.close()
    with pytest.raises(EngineDead, match="shutting down"):
        await waiting
    assert not machine.running


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.exhaustive) for i in range(1, 20))])
async def test_random_requests_deaths_and_departures(seed: int, device: str) -> None:
    """Each request has an answer of its model or an error; what runs never takes more than the budget."""
    rng, machine = random.Random(seed), Machine(0.001)
    sizes = {name: rng.choice([1, 1.5, 2, 3]) for name in "abcdef"}
    most = rng.choice([None, 2, 3])
    timeout = rng.choice([0.02, 60])
    more = {"device": device, "load_timeout": timeout, "weights": lambda one: GB // 4}
    models = machine.models(sizes, budget=4 * GB, most=most, **more)
    answers: list[bool] = []

    async def one() -> None:
        name = rng.choice("abcdef")
        await asyncio.sleep(rng.random() * 0.2)
        try:
            async with models.use(models.find(name)) as server:
                assert isinstance(server, FakeServer)
                assert sum(sizes[there] for there in machine.running) <= 4 and not server.asleep
                awake = [there for there in machine.running.values() if not there.asleep]
                assert len(awake) <= (most or (6 if device == "cpu" else 1))
                until = asyncio.get_running_loop().time() + rng.random() * 0.01
                server.users += 1
                try:
                    while asyncio.get_running_loop().time() < until:
                        await asyncio.sleep(0.001)
                finally:
                    server.users -= 1
                answers.append(server.name == name)
        except (EngineDead, QueueFull):
            answers.append(True)

    async def nap(model: Model) -> None:
        with contextlib.suppress(EngineDead):
            await models.sleep(model)

    async def trouble() -> None:
        while True:
            await asyncio.sleep(0.005)
            if machine.running and rng.random() < 0.4:
                victim = machine.running[rng.choice([*machine.running])]
                if victim.users or rng.random() < 0.5:
                    victim.users = 0
                    victim.die()
            if rng.random() < 0.3:
                asyncio.get_running_loop().create_task(models.unload(models.find(rng.choice("abcdef"))))
            if timeout < 1:
                machine.hung = {name for name in "abcdef" if rng.random() < 0.1}
            if rng.random() < 0.1:
                asyncio.get_running_loop().create_task(nap(models.find(rng.choice("abcdef"))))

    troubles = asyncio.create_task(trouble())
    asked = [asyncio.create_task(one()) for _ in range(200)]
    left = rng.sample(asked, 20)
    async with asyncio.timeout(60):
        for task in left:
            await asyncio.sleep(0.01)
            task.cancel()
        done = await asyncio.gather(*asked, return_exceptions=True)
    troubles.cancel()
    assert all(answers) and all(result is None or isinstance(result, asyncio.CancelledError) for result in done)
    assert len(answers) >= 180 and not any(model.in_flight or model.waiting for model in models.every)
    await models.close()
    assert not machine.running


async def test_folders_of_sockets_that_nobody_has_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    one = Machine().models({"a": 1})
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o077 == 0
    other = Machine().models({"a": 1})
    assert len([*tmp_path.iterdir()]) == 2, "both are in use"
    one._lock.close()  # as the system does when its process ends
    last = Machine().models({"a": 1})
    assert len([*tmp_path.iterdir()]) == 2 and not folder.exists()
    for models in (other, last):
        await models.close()
    assert not [*tmp_path.iterdir()]
