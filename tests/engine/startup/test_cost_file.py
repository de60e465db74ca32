"""StepCost that one engine leaves to the next: what they depend on, and that a bad file does no harm."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from draftwing.config.options import Options
from draftwing.config.trees import PLAIN, TreeShape
from draftwing.engine import build
from draftwing.engine.devices.cpu import CpuDevice
from draftwing.engine.startup import cost_file as files
from draftwing.engine.startup import measure_costs
from draftwing.engine.startup import measure_costs as measuring
from draftwing.engine.startup.cost_file import MAX_STARTS, CostFile, cost_file
from draftwing.engine.startup.models import Precision
from draftwing.llm import LLM
from draftwing.ops.table import TorchOps
from draftwing.sched.policy.cost import StepCost

pytestmark = pytest.mark.slow

MENU = (TreeShape(3, 1, 4), PLAIN)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/draftwing/prices"


def some_prices() -> StepCost:
    costs = StepCost(MENU, False)
    for shape in MENU:
        costs.measured(shape, 1, 0, 1e-3 * shape.nodes)
    return costs


def test_what_is_written_is_read(folder: Path) -> None:
    file = CostFile({"model": "a", "menu": [tuple(shape) for shape in MENU]})
    assert file.read(MENU, False) is None
    file.write(some_prices())
    again = CostFile({"menu": MENU, "model": "a"}).read(MENU, False)
    assert again is not None and again.to_json() == some_prices().to_json()
    assert [found.name for found in folder.iterdir()] == [file.name], "nothing partial is left"
    assert CostFile({"model": "b", "menu": MENU}).read(MENU, False) is None
    assert file.read(MENU, True) is None, "of a machine with graphs"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '{"key": {"model": "a"}}', '{"key": {"model": "b"}, "prices": 1}']
)
def test_an_unreadable_file_is_ignored(folder: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    file = CostFile({"model": "a"})
    folder.mkdir(parents=True)
    (folder / file.name).write_text(text)
    with caplog.at_level(logging.DEBUG, logger="draftwing"):
        assert file.read(MENU, False) is None
    assert [record.levelname for record in caplog.records] == ["DEBUG"] and "cannot be used" in caplog.text
    file.write(some_prices())
    assert file.read(MENU, False) is not None


def test_a_folder_that_cannot_be_written_is_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("a file in the folder's place")
    with caplog.at_level(logging.INFO, logger="draftwing"):
        CostFile({}).write(some_prices())
        assert CostFile({}).read(MENU, False) is None
    assert "not kept for the next start" in caplog.text


def test_old_files_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_FILES", 2)
    for i in range(4):
        file = CostFile({"model": i})
        file.write(some_prices())
        os.utime(folder / file.name, (i + 1, i + 1))
    assert {found.name for found in folder.iterdir()} == {CostFile({"model": i}).name for i in (2, 3)}


def test_what_prices_depend_on(tmp_path: Path) -> None:
    device = CpuDevice(ops=TorchOps(torch.device("cpu")))
    (tmp_path / "a.gguf").write_bytes(b"1234")
    (tmp_path / "b.gguf").write_bytes(b"1234")
    (tmp_path / "c.gguf").write_bytes(b"12345")
    options = Options(speculative_algorithm="NGRAM", random_seed=1).resolve().for_engine(CpuDevice().defaults)
    types = Precision(torch.float32, torch.float32)

    def name(options=options, menu=MENU, path="a.gguf", draft=None, types=types) -> str:
        return cost_file(options, menu, tmp_path / path, draft, types, device).name

    others = [
        name(path="b.gguf"), name(path="c.gguf"), name(menu=MENU[1:]), name(draft=tmp_path / "b.gguf"),
        name(types=types._replace(kv_dtype=torch.bfloat16)), name(types=types._replace(dtype=torch.bfloat16)),
        name(dataclasses.replace(options, fast_numerics=True)),
        name(dataclasses.replace(options, quantization="q4_k")),
        name(dataclasses.replace(options, fp8_activations="none")),
        name(dataclasses.replace(options, context_length=4096)),
        name(dataclasses.replace(options, max_total_tokens=9999)),
        name(dataclasses.replace(options, speculative_ngram_max_bfs_breadth=3)),
    ]  # fmt: skip
    assert len({name(), *others}) == 1 + len(others)
    for change in ({"random_seed": 2}, {"port": 7}, {"api_key": "secret"}, {"disable_radix_cache": True}):
        assert name(dataclasses.replace(options, **change)) == name()


def test_a_build_is_what_its_files_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An install anew of the same code keeps costs; a kernel, the sampler or the pool that changed does not."""
    monkeypatch.setattr(files, "__file__", str(tmp_path / "engine" / "startup" / "cost_file.py"))
    code = [tmp_path / name for name in ("ops/cpu/a.so", "sampling/b.py", "kv/c.py", "engine/deep/d.py")]
    for file in code:
        file.parent.mkdir(parents=True)
        file.write_bytes(b"1234")
    build_of = files._build.__wrapped__  # a process keeps what it found
    build = build_of()
    for file in code:
        os.utime(file, (1, 1))
        assert build_of() == build
        file.write_bytes(b"4321")
        assert build_of() != build
        file.write_bytes(b"1234")
    (tmp_path / "server").mkdir()
    (tmp_path / "server/e.py").write_bytes(b"1")
    assert build_of() == build


OPTIONS = dict(
    device="cpu", max_total_tokens=2048, max_running_requests=4, num_threads=1, speculative_algorithm="NGRAM",
    speculative_num_draft_tokens=4,
)  # fmt: skip


class Machine:
    """Steps take what they take, times what other programs add: some number for each step that is measured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs, self.waits = 0, 0.0  # share of the time that threads wait
        self.load: Callable[[TreeShape], float] = lambda shape: 1.0
        self._began = time.monotonic()
        monkeypatch.setattr("draftwing.engine.startup.warm_up.SECONDS", 600.0)
        monkeypatch.setattr(measuring, "CPU_CONTEXT", 64)
        monkeypatch.setattr(measuring, "_run", self.run)
        monkeypatch.setattr(measure_costs, "delays", lambda: {"1": self.waits * (time.monotonic() - self._began)})
        monkeypatch.setattr(build, "delays", measure_costs.delays)

    def run(self, executor: object, shape: TreeShape, size: int, context: int) -> measuring.Timed:
        self.runs += 1
        return measuring.Timed(self.price(shape, size, context) * self.load(shape), 1.0)

    @staticmethod
    def price(shape: TreeShape, size: int = 1, context: int = 0) -> float:
        return (0.01 + 0.001 * shape.nodes) * (1 + 0.1 * size) + 1e-6 * context


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def start(machine: Machine, model: str) -> tuple[dict[tuple[TreeShape, int, int], float], int]:
    """An engine's costs, and how many steps it measured."""
    before = machine.runs
    with LLM(model, **OPTIONS) as llm:
        costs = llm.engine.parts.costs
        assert costs is not None and costs.complete
        return {
            point: seconds for *point, seconds in costs.table.points() for point in [tuple(point)]
        }, machine.runs - before


def right(found: dict[tuple[TreeShape, int, int], float]) -> bool:
    return all(seconds == pytest.approx(Machine.price(*point)) for point, seconds in found.items())


def test_prices_that_two_starts_agree_on_are_measured_no_more(machine: Machine, model: str) -> None:
    runs = []
    for _ in range(4):
        found, count = start(machine, model)
        assert right(found)
        runs.append(count)
    assert runs[0] == runs[1] > 0 and runs[2:] == [0, 0]
    assert {batch for _, batch, _ in found} == {1, 4} and {context for *_, context in found} == {0, 64}


@pytest.mark.parametrize(
    "load",
    [
        lambda shape: 1 + 4 * (shape.depth > 0),  # something else ran while trees were measured
        pytest.param(lambda shape: 3.0, marks=pytest.mark.exhaustive),
        lambda shape: 6.0 if shape == PLAIN else 1.0,
        pytest.param(lambda shape: 1 + shape.nodes, marks=pytest.mark.exhaustive),
    ],
)
def test_what_a_busy_machine_has_added_goes(machine: Machine, model: str, load: Callable[[TreeShape], float]) -> None:
    machine.load = load
    assert not right(start(machine, model)[0])
    machine.load = lambda shape: 1.0
    found, count = start(machine, model)
    assert right(found) and count > 0
    assert start(machine, model)[1] > 0, "nothing has agreed yet"
    found, count = start(machine, model)
    assert right(found) and count == 0


def test_a_busy_second_look_changes_nothing_and_settles_nothing(machine: Machine, model: str) -> None:
    start(machine, model)
    machine.load = lambda shape: 2.0
    found, _ = start(machine, model)
    assert right(found)
    machine.load, machine.waits = lambda shape: 1.0, 0.5  # it agrees, though threads were kept waiting
    for _ in range(2):
        found, count = start(machine, model)
        assert right(found) and count > 0
    machine.waits = 0.01
    assert start(machine, model)[1] > 0 and start(machine, model)[1] == 0


@pytest.mark.parametrize(("waits", "noise"), [(0.5, 0.0), (0.01, 1.0)])
def test_a_machine_that_stays_busy_is_not_measured_for_ever(
    machine: Machine, model: str, waits: float, noise: float
) -> None:
    """A quota of its processors keeps threads waiting at every start, and no two starts agree."""
    draw = random.Random(3)
    machine.load, machine.waits = lambda shape: 1 + noise * draw.random(), waits
    least, runs = dict[tuple[TreeShape, int, int], float](), []
    for _ in range(MAX_STARTS + 2):
        found, count = start(machine, model)
        assert all(seconds <= least.get(point, seconds) for point, seconds in found.items())
        least = found
        runs.append(count)
    assert all(runs[:MAX_STARTS]) and not any(runs[MAX_STARTS:])


def test_what_was_taken_off_too_much_comes_back(machine: Machine, model: str) -> None:
    """While others ran, a thread waited that no step waited for: all that was measured then is too little."""
    machine.load, machine.waits = lambda shape: 0.4 if shape == PLAIN else 0.8, 0.5
    for _ in range(2):
        assert not right(start(machine, model)[0])
    busy = machine.load
    machine.load, machine.waits = lambda shape: 1.0, 0.01
    found, count = start(machine, model)
    assert right(found) and count > 0
    machine.load, machine.waits = busy, 0.5
    assert right(start(machine, model)[0])
    machine.load, machine.waits = lambda shape: 1.0, 0.01
    assert right(start(machine, model)[0]) and start(machine, model)[1] == 0


def test_a_file_of_an_earlier_version_is_looked_at_again(machine: Machine, model: str, folder: Path) -> None:
    machine.load = lambda shape: 5.0 if shape.depth else 1.0
    start(machine, model)
    (file,) = folder.iterdir()
    content = json.loads(file.read_text())
    for settled in ({}, {"settled": 1}, {"settled": None}):
        file.write_text(json.dumps({"key": content["key"], "prices": content["prices"]} | settled))
        machine.load = lambda shape: 1.0
        found, count = start(machine, model)
        assert right(found) and count > 0


def test_what_was_learnt_of_prices_that_do_not_hold_goes_with_them(machine: Machine, model: str) -> None:
    """Steps in operation said that all is cheaper than measured; now it is measured so."""
    machine.load = lambda shape: 2.0
    with LLM(model, **OPTIONS) as llm:
        costs = llm.engine.parts.costs
        for _ in range(50):
            costs.record(PLAIN, 1, 0, Machine.price(PLAIN))
        assert costs.seconds(PLAIN, 1, 0) == pytest.approx(Machine.price(PLAIN), rel=0.1)
    machine.load = lambda shape: 1.0
    with LLM(model, **OPTIONS) as llm:
        assert llm.engine.parts.costs.seconds(PLAIN, 1, 0) == pytest.approx(Machine.price(PLAIN))


def test_the_next_engine_goes_on_with_what_was_learnt(machine: Machine, model: str, folder: Path) -> None:
    start(machine, model)
    with LLM(model, **OPTIONS) as llm:
        costs = llm.engine.parts.costs
        costs.record(PLAIN, 1, 0, 2 * costs.seconds(PLAIN, 1, 0))
        expected = costs.seconds(PLAIN, 1, 0)
    (file,) = folder.iterdir()
    assert json.loads(file.read_text())["prices"]["corrections"], "what was corrected is written when the engine ends"
    with LLM(model, **OPTIONS) as llm:
        assert llm.engine.parts.costs.seconds(PLAIN, 1, 0) == pytest.approx(expected)
        assert llm.generate("the cat sat", {"max_new_tokens": 4})
    for other in ({"speculative_algorithm": "none"}, {"speculative_fixed_shape": True}):
        with LLM(model, **OPTIONS | other) as llm:
            assert llm.engine.parts.costs is None, "nothing is chosen"
    assert list(folder.iterdir()) == [file]


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("quiet", [False, True])
def test_what_a_disturbed_start_found_of_the_smallest_drafts_is_a_guess(quiet: bool, settled: bool) -> None:
    """Also where nothing is measured any more, and only of one row; what is kept for the next start is all the same."""
    costs = some_prices()
    for shape in MENU:
        costs.measured(shape, 4, 0, 2e-3 * shape.nodes)
    file = CostFile({})
    file.quiet, file.settled = quiet and settled, settled
    found = build.Costs(StepCost(MENU, False) if settled else costs, costs if settled else None, settled, file)
    believed = found.compared(lambda: quiet)
    assert believed.guessed(MENU[0], 1) is not quiet
    assert not believed.guessed(MENU[0], 4) and not believed.guessed(PLAIN, 1)
    assert believed.to_json()["measured"] == costs.to_json()["measured"]
    without = build.Costs(some_prices()).compared(lambda: quiet)
    assert without.guessed(MENU[0], 1) is not quiet
