"""Stages of a tree step, captured or recorded once per batch size and replayed afterwards: a replay costs the host one
call instead of hundreds of launches. Knows no models, and the stages know no graphs.

A stage is a function of `rows` and of what the stage before it gave; all else that it touches is device state indexed
by row. A graph reads `rows` from a fixed buffer, so a replay needs the numbers of B rows and nothing more. A batch is
padded to the next captured size with the row table's dummy row. `GraphCache` has CUDA graphs; on a CPU small steps are
recorded when a batch size is met first (`RecordedStages`)."""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from draftwing.config.trees import TreeShape
from draftwing.core import IntArray
from draftwing.engine.devices.base import Device
from draftwing.ops.cpu.tape import Place, Recording, StepMemory, record
from draftwing.ops.runtime import RECORDED_ROWS
from draftwing.spec.drafter import Drafter

T = TypeVar("T")
Replay = Callable[[], None]

MAX_NODES = 4096  # a step with more keeps the device busy for longer than it takes to launch it
# Steps that were padded further for want of a graph, after which it is captured while requests run. A capture takes
# about as long as so many steps, so captures take no more of the time than steps that wanted them. Swept by
# benchmarks/sim/captures.py: fewer are hardly better, and would interrupt for what one burst wants.
WANTED = 16
# Of the time, which captures may take while requests run: whoever streams or waits for a first token meanwhile waits
# for a whole one, up to 0.1 s. Swept by the same script: more makes first tokens late, less leaves steps slow for
# minutes.
CAPTURE_SHARE = 0.03
logger = logging.getLogger(__name__)
FIRST, LAST = "draft", "commit"  # stages of a step


class Key(NamedTuple):
    """What a step's graphs were captured for; size: of the batch, padding included."""

    shape: TreeShape
    size: int


class Beside(NamedTuple):
    """The key of a stage that runs beside adapters. key: of the same without any."""

    key: Hashable


class GraphCache:
    """Graphs by stage and key. Those of one key run one after the other, with nothing of another key in between.

    They share one memory pool: what a stage gives stays as it is until the last stage of its key has run, and no
    longer, so that all keys take no more than the largest. Only what is captured with `keep` lasts to the next replay.
    In between whatever is no graph of this pool may read it, and write what a stage would have (`left`).
    """

    def __init__(self, device: Device, dummy_row: int, max_size: int) -> None:
        """max_size: of a captured batch; 0 for none."""
        self.sizes = batch_sizes(max_size)
        self.rows = torch.full((max_size,), dummy_row, dtype=torch.int64, device=device.device)
        self._host_rows: IntArray = np.full(max_size, dummy_row, np.int64)  # what `rows` holds
        self._wanted_rows: tuple[int, bytes] = 0, b""  # of the newest `set_rows`: size, and rows
        self._device = device
        self._dummy_row = dummy_row
        self._graphs: dict[Hashable, tuple[Replay, Any]] = {}
        self.replays = 0
        # What is still to be captured, and steps that were padded further for want of it.
        self.later: dict[Key, int] = {}
        self._sizes_of: dict[TreeShape, list[int]] = {}  # that were captured, ascending
        self._finished = 0  # how many graphs are of these

    def __len__(self) -> int:
        return len(self._graphs)

    def clear(self) -> None:
        """Lets go of all graphs."""
        self._graphs.clear()
        self._sizes_of.clear()
        self._finished = 0
        self.later.clear()

    def key(self, shape: TreeShape, size: int) -> Key | None:
        """Returns the key under which a batch of `size` rows was captured, None if it was not."""
        sizes = self._sizes_of.get(shape, ())
        at = bisect_left(sizes, size)
        return Key(shape, sizes[at]) if at < len(sizes) else None

    def count(self, shape: TreeShape, size: int) -> None:
        """Counts a step of a batch of `size` rows, if there will be a graph that suits it better."""
        at = bisect_left(self.sizes, size)
        if at < len(self.sizes) and (key := Key(shape, self.sizes[at])) in self.later:
            self.later[key] += 1

    @property
    def wanted(self) -> float:
        """Returns how many steps were padded further for want of the same graph, at most, over `WANTED`; from 1 on that
        graph is worth an interruption."""
        return max(self.later.values(), default=0) / WANTED

    def set_rows(self, rows: IntArray, size: int) -> None:
        """Fills the first `size` of `rows`; no copy where they are what they were."""
        wanted = size, rows.tobytes()
        if wanted == self._wanted_rows:
            return
        self._wanted_rows = wanted
        padded = np.full(size, self._dummy_row, np.int64)
        padded[: len(rows)] = rows
        if not np.array_equal(padded, self._host_rows[:size]):
            self._host_rows[:size] = padded
            self._device.upload_into(self.rows[:size], padded)

    def run(self, stage: str, key: Hashable | None, fn: Callable[..., T], *inputs: Any, keep: bool = False) -> T:
        """Replays what was captured; without a key it calls the function. Beside adapters it does, too, and leaves what
        that gives where the captured stage does."""
        if key is None:
            return fn(*inputs)
        if isinstance(key, Beside) and (stage, key) not in self._graphs:
            return _in_place(self.left(stage, key.key), fn(*inputs))
        replay, output = self._graphs[stage, key]
        replay()
        self.replays += 1
        return cast(T, output)

    def forward_key(self, shape: TreeShape, size: int) -> Key | None:
        """Returns the key whose target's forward can be replayed over drafts made without graphs, if there is one."""
        return self.key(shape, size)

    def give(self, key: Key, drafted: T) -> T:
        """Copies drafts made without graphs to where the key's graphs read them, and returns these copies."""
        return cast(T, _in_place(self.left(FIRST, key), drafted))

    def left(self, stage: str, key: Hashable) -> Any:
        """Returns where a stage that was captured leaves what it gives."""
        return self._graphs[stage, key][1]

    def capture(self, stage: str, key: Hashable, fn: Callable[..., T], *inputs: Any, keep: bool = False) -> T:
        """Captures a stage and runs it, on whatever rows `rows` names; returns its tensors, which later stages of this
        key are to be given."""
        replay, output = self._device.record(lambda: fn(*inputs))
        replay()  # what was only captured has not run, and the next stage wants its result
        self._graphs[stage, key] = replay, (output if keep else _tensors(output, self._device.alias))
        return output

    def capture_beside(self, stage: str, key: Hashable, fn: Callable[..., Any], *inputs: Any) -> None:
        """Captures what runs beside adapters in place of a stage whose outputs are still held."""
        where = self.left(stage, key)
        replay, _ = self._device.record(lambda: _in_place(where, fn(*inputs)))
        self._graphs[stage, Beside(key)] = replay, where

    def finish(self, key: Key) -> None:
        """Notes that all stages of the key are captured."""
        sizes = self._sizes_of.setdefault(key.shape, [])
        if key.size not in sizes:
            insort(sizes, key.size)
        self._finished = len(self._graphs)

    def drop_unfinished(self) -> None:
        """Lets go of the graphs of a key whose other stages are not captured."""
        while len(self._graphs) > self._finished:
            self._graphs.popitem()


def _tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Returns what a stage gave, with its tensors changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        parts = [_tensors(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def _in_place(where: Any, found: Any) -> Any:
    """Copies the tensors of what a stage gave into those of the same place, and returns these."""
    if isinstance(where, Tensor):
        assert isinstance(found, Tensor), "what a graph reads was not made"
        if where.data_ptr() != found.data_ptr():  # else both are what all steps read
            where.copy_(found)
    elif isinstance(where, tuple):
        for to, value in zip(where, found, strict=True):
            _in_place(to, value)
    return where


def graph_keys(menu: Sequence[TreeShape], sizes: Sequence[int]) -> list[Key]:
    """Returns what is captured of steps of these shapes and batch sizes, which ascend, the largest batches first."""
    return [Key(s, size) for size in reversed(sizes) for s in menu if size * s.queries <= MAX_NODES]


def first_sizes(sizes: Sequence[int]) -> set[int]:
    """Returns those of ascending batch sizes that are captured before the first request: no batch is padded to more
    than twice its rows then."""
    return {size for size in sizes if size & (size - 1) == 0} | {*sizes[-1:]}


def batch_sizes(largest: int) -> list[int]:
    """Returns batch sizes to capture, ascending: a step costs about the same for all sizes between two of them."""
    sizes = [1, 2, 4, *range(8, 33, 4), *range(40, 65, 8), *range(80, 129, 16), *range(160, largest, 32)]
    return [*(size for size in sizes if size < largest), largest] if largest else []


def foreign_steps(drafter: Drafter | None) -> Literal["", "drafts", "all"]:
    """Finds the steps in which a user's drafter runs code of its own. That may read tensors in Python, by `tolist` or
    by an array that it keeps, count its calls or throw dice, of which a recording would know nothing: it would do for
    ever what the first call did."""
    kind = type(drafter)
    if drafter is None or kind.__module__.partition(".")[0] == __package__.partition(".")[0]:
        return ""
    idle = all(getattr(kind, name) is getattr(Drafter, name) for name in ("extend", "watch", "confidence"))
    found: Literal["drafts", "all"] = "drafts" if idle else "all"
    logger.debug("steps with %s are not recorded (%s): it is code from outside", kind.__qualname__, found)
    return found


class RecordedStages(GraphCache):
    """A `GraphCache` that captures in passing.

    A step of few rows is recorded if all that its stages do are calls of the C kernels, as with weights in blocks or in
    bfloat16. `refused` has those of which this turned out not to be so, and last stages, where it is they alone; these
    run as they are written. So do steps in which code from outside of this package runs. What the last stage gives
    lasts to the next step, no longer.
    """

    def __init__(self, device: Device, dummy_row: int, drafter: Drafter | None = None) -> None:
        super().__init__(device, dummy_row, 0)
        assert device.ops.replay_calls is not None, "made where `ops.can_record` alone"
        self._foreign, self._make_calls = foreign_steps(drafter), device.ops.replay_calls
        self.rows = torch.full((RECORDED_ROWS,), dummy_row, dtype=torch.int64, device=device.device)
        self._host_rows = np.full(RECORDED_ROWS, dummy_row, np.int64)
        self.refused: set[Hashable] = set()
        self._met: set[tuple[str, Hashable]] = set()
        # With what each gives, and where the memory of the stage after it begins.
        self._recorded: dict[tuple[str, Hashable], tuple[Recording, Any, Place]] = {}
        self.memory = StepMemory()  # of all of them

    def __len__(self) -> int:
        return len(self._recorded)

    def clear(self) -> None:
        """Lets go of all recordings and their memory; what cannot be recorded is still known."""
        super().clear()
        self._recorded.clear()
        self.memory = StepMemory()

    def key(self, shape: TreeShape, size: int) -> Key | None:
        key = Key(shape, size)
        foreign = self._foreign == "all" or (self._foreign == "drafts" and shape.depth > 0)
        return key if size * shape.queries <= RECORDED_ROWS and key not in self.refused and not foreign else None

    def forward_key(self, shape: TreeShape, size: int) -> Key | None:
        return None  # recorded forwards were no faster there (SmolLM2, two threads, AVX2: 0.95 to 1.01)

    def run(self, stage: str, key: Any, fn: Callable[..., T], *inputs: Any, keep: bool = False) -> T:
        if key is None:
            return fn(*inputs)
        known = self._recorded.get((stage, key))
        if known is not None:
            known[0].replay()
            self.replays += 1
            self.memory.next = known[2]
            return known[1]
        plain: Any = key.key if isinstance(key, Beside) else key
        step: Hashable = plain if isinstance(plain, Key) else plain[0]  # a commit's has more
        refused = step in self.refused
        if isinstance(key, Beside):
            step = Beside(step)  # which may not be recorded though others are
        first = (stage, key) not in self._met  # it may make constants, which are no part of a step
        self._met.add((stage, key))
        if first or refused or step in self.refused or (stage, key) in self.refused:
            return fn(*inputs)
        # The results of the stages before the last have to be where the next ones were recorded to read them.
        unit: Hashable = (stage, key) if stage == LAST else step
        if stage == FIRST:
            self.memory.next = Place()
        recording, out = record(lambda: fn(*inputs), self._make_calls, self.memory)
        if isinstance(recording, Recording):
            self._recorded[stage, key] = recording, out, self.memory.next
        else:
            self.refused.add(unit)
            logger.debug("steps of %s are not recorded: %s of %s is torch's own", step, recording, stage)
        return out
