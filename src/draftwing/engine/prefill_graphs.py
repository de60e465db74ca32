"""Graphs of prompts. A short prompt keeps a GPU busy for less time than its launches take; and while the host launches,
the result of the step before waits to be looked at, and with it whoever reads the answer.

A graph is of a number of queries, not of certain prompts: whose they are, where they stand and how attention is cut
into tiles is read from one fixed buffer (`PrefillInputs`). What a plan has less than that is a chunk of the slot
table's dummy row, from its beginning: it reads and writes the pool's dummy slot. Recurrent layers leave it out.

Where a model reads images any query of a graph may have a row of features in place of its embedding, and in text none
has: that takes some microseconds. Adapters take more, so queries with adapters have graphs of their own.

Where prompts are mixed with rows that decode, there are graphs of both: of a number of queries in all, and of a shape
and a number of rows for which there are graphs of tree steps. Matrices are multiplied with tiles of rows, and one row
more than fills them takes a whole tile. They stand in place of the stage `verify`: they read what `draft` has left, and
leave what `commit` reads. So their memory is another than that of the stages."""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from draftwing.config.trees import TreeShape
from draftwing.core import Chunk
from draftwing.engine.devices.base import Device
from draftwing.engine.graphs import WANTED, Key
from draftwing.engine.prefill_inputs import ImageShape, PrefillInputs
from draftwing.engine.row_table import RowTable
from draftwing.ops.attention.attend import TiledAttention
from draftwing.ops.attention.batch import Batch, HeadShape
from draftwing.ops.upload import evens

# Queries. On an H200 768 of an 8B model take as long as their launches do. More than 1,024 are rarely prefilled at once
# while requests decode; where they are, the result of the step before waits for up to 18 ms of launches.
SIZES = tuple(evens(1024))

# That decode beside prompts: a row more costs what a token of a prompt does. Swept, as MIXED_QUERIES, in
# docs/dev/mixed_steps.md. Powers of two, see `first_sizes`.
MIXED_ROWS = (8, 16, 32, 64, 128)
MIXED_NODES = 128  # most of their trees, which are verified: a node costs what a token of a prompt does, too
MIXED_QUERIES = 256  # least of such a forward: fewer are rounded up
# Tokens of prompts whose attention fills a device: fewer take as long. An H100 has a block for each tile of an 8B model
# with 512. Where few have the price of their own keys, those look dear after short parts, and parts are cut shorter
# still. Swept in docs/dev/mixed_steps.md. Where tiles are cut into pieces (`prefill_tiles`) some 64 fill a device; in
# mixed steps that makes no difference.
AT_ONCE = 256
TIMES = 2  # that a graph runs when it is timed, of which the faster one counts
# Times the seconds of a token of a smaller size, from which a size makes fewer: less may be noise. It and PADDED are
# swept in docs/dev/mixed_steps.md.
FEWER = 1.02
PADDED = 1.1  # times the seconds of a size without a graph, that a prompt may take which is padded past it

log = logging.getLogger("draftwing")
States = tuple[Tensor, Tensor | None]  # hidden states [M, H], and auxiliary ones
Forward = Callable[[Batch, Batch | None, bool], States]
Mixed = tuple[int, Key, bool]  # queries of prompts, what decodes beside them, and whether any may have adapters


class Sizes(NamedTuple):
    """Of which sizes there are graphs. prompts: queries of prompts alone, ascending; mixed: of prompts and rows that
    decode, both together; rows: that decode beside prompts."""

    prompts: list[int]
    mixed: list[int]
    rows: list[int]

    @classmethod
    def of(cls, max_queries: int, length: int, rows: int) -> Sizes:
        """max_queries: of a plan; length: of a row; rows: most that decode beside prompts, 0 where nothing is mixed."""
        prompts = [size for size in prefill_sizes(max_queries) if size <= length]
        mixed = [size for size in prompts if size >= MIXED_QUERIES]
        return cls(prompts, mixed, [size for size in MIXED_ROWS if size <= rows and mixed])

    def beside(self, key: Key) -> list[int]:
        """Returns queries of prompts that there are graphs of beside a step of this key, ascending."""
        if key.size not in self.rows or not takes(key):
            return []
        nodes = key.size * key.shape.queries
        left = [size - nodes for size in self.mixed]
        return [size - size % 2 for size in left if size > 1]  # even: `Inputs` begin at even places

    def planned(self, keys: Sequence[Key]) -> int:
        """Returns how many graphs of prompts there are where these are the keys of steps."""
        return len(self.prompts) + sum(len(self.beside(key)) for key in keys)


class PrefillGraphs:
    def __init__(
        self,
        device: Device,
        table: RowTable,
        attn: TiledAttention,
        shapes: Sequence[HeadShape],
        max_queries: int,
        forward: Forward,
        rows: int,
        images: ImageShape | None = None,
    ) -> None:
        """shapes: of the target's attention; max_queries: of a plan, 0 where there are no graphs of prompts; forward:
        the target's, of prompts and of the trees in front of them, with adapters or without; rows: most that decode
        beside prompts, 0 where nothing is mixed; images: None where no graph is for prompts with such."""
        self._device, self._table, self._forward = device, table, forward
        self._pool = "prompts" if rows else "steps"  # of these graphs' memory
        self._sizes = Sizes.of(max_queries, table.length, rows)
        self.sizes, self.mixed_sizes = self._sizes.prompts, self._sizes.mixed
        self.seconds: dict[int, float] = {}  # of prompts alone, by queries, where that was measured
        self.replays = self.mixed_replays = 0  # of prompts alone, and beside rows that decode
        self._inputs = PrefillInputs(device, table, attn, shapes, self.sizes, images)
        # By queries, and whether any may have adapters: then these leave what they give where the others do.
        self._graphs: dict[tuple[int, bool], tuple[Callable[[], None], States]] = {}
        self._mixed: dict[Mixed, Callable[[], None]] = {}
        self.later: dict[Mixed, int] = {}  # what is still to be captured, and forwards that took turns for want of it
        self._mixed_states: States | None = None  # where all of these leave what they give of prompts

    def __len__(self) -> int:
        return len(self._graphs) + len(self._mixed)

    def planned(self, keys: Sequence[Key]) -> int:
        """Returns how many graphs there are beside those of steps, once all are captured, of these keys."""
        return self._sizes.planned(keys) + len(self.sizes) * (self._table.adapters is not None)

    def capture(self, bar: tqdm[Any]) -> None:
        """Captures all sizes, the largest first."""
        for size in reversed(self.sizes):
            self._inputs.fill(size, ())
            self._graphs[size, False] = self._device.record(partial(self._run, size), self._pool)
            bar.update()
            if self._table.adapters is not None:
                states = self._graphs[size, False][1]
                self._graphs[size, True] = self._device.record(partial(self._run, size, states), self._pool)
                bar.update()

    @torch.inference_mode()
    def drop_slow(self) -> None:
        """Drops sizes that take as long as a larger one, or little less and make fewer tokens a second than a smaller
        one, as 896 rows of an 8B model do on an H100; prompts are padded past them, or cut. Those below `MIXED_QUERIES`
        are not looked at. Nothing may run."""
        for size in reversed(self.sizes):
            if size >= MIXED_QUERIES:
                self._inputs.fill(size, [Chunk(self._table.rows, 0, size, True)])  # recurrent layers run for no padding
                self.seconds[size] = min(self._device.timed(self._graphs[size, False][0], TIMES))
        for size in slow_sizes(self.seconds):
            log.debug("%d tokens of prompts take too long: they have no graph", size)
            self.sizes.remove(size)
            self.mixed_sizes.remove(size)
            self._graphs.pop((size, True), None)
            del self._graphs[size, False], self.seconds[size]
        self.later = {one: lost for one, lost in self.later.items() if one[0] in self._sizes.beside(one[1])}

    @property
    def wanted(self) -> float:
        """Returns how many forwards took turns for want of the same graph, at most, over `WANTED`; from 1 on that graph
        is worth an interruption."""
        return max(self.later.values(), default=0) / WANTED

    def took_turns(self, chunks: Sequence[Chunk], key: Key, batch: Batch | None = None, adapted: bool = False) -> None:
        """Notes a prefill beside a step of this key that had a forward of its own, for want of a graph. batch: as of
        `run`."""
        wanted = self.size(chunks, key, batch), key, adapted
        if wanted in self.later:
            self.later[wanted] += 1

    def leave(self, key: Key, adapted: bool = False) -> None:
        """Leaves all sizes beside a step of this key to `capture_mixed`. adapted: with adapters, too."""
        every = [(size, key, kind) for kind in (False, True)[: 1 + adapted] for size in self._sizes.beside(key)[::-1]]
        self.later |= dict.fromkeys(every, 0)

    def capture_mixed(self, one: Mixed, trees: Batch, states: States) -> None:
        """Captures what was left of prompts beside a step. trees, states: what its stage `draft` has left, and where
        `verify` leaves what it gives."""
        del self.later[one]
        size, _, adapted = one
        self._inputs.fill(size, ())
        run = partial(self._run_mixed, size, adapted, trees, states)
        self._mixed[one], _ = self._device.record(run, self._pool)

    def clear(self) -> None:
        """Lets go of all graphs."""
        self._graphs.clear()
        self._mixed.clear()
        self.later.clear()
        self._mixed_states = None

    def run(self, chunks: Sequence[Chunk], batch: Batch | None = None, adapted: bool = False) -> States | None:
        """Returns what the forward gives of the chunks' queries, as long as no graph runs after it; None where there is
        no graph of so many queries or chunks. batch: theirs, where images may be in it.  adapted: whether any has an
        adapter."""
        tokens = sum(chunk.length for chunk in chunks)
        at = bisect_left(self.sizes, tokens)
        size = self.sizes[at] if at < len(self.sizes) else 0
        if (size, adapted) not in self._graphs or not self._inputs.takes(size, chunks, batch):
            return None
        self._inputs.fill(size, chunks, batch)
        replay, (hidden, aux_hidden) = self._graphs[size, adapted]
        replay()
        self.replays += 1
        return hidden[:tokens], None if aux_hidden is None else aux_hidden[:tokens]

    def mixed_key(self, shape: TreeShape, rows: int) -> Key | None:
        """Returns the key of graphs of a step of so many rows that prompts may be beside; None: there are none."""
        sizes = self._sizes.rows
        at = bisect_left(sizes, rows)
        key = Key(shape, sizes[at]) if at < len(sizes) else None
        return key if key is not None and self._sizes.beside(key) else None

    def size(self, chunks: Sequence[Chunk], key: Key, batch: Batch | None = None) -> int:
        """Returns the queries of prompts of the graph of these beside a step of this key; 0: there is none. batch: as
        of `run`."""
        tokens = sum(chunk.length for chunk in chunks)
        size = next((size for size in self._sizes.beside(key) if size >= tokens), 0)
        return size if self._inputs.takes(size, chunks, batch) else 0

    def run_mixed(
        self, chunks: Sequence[Chunk], key: Key, batch: Batch | None = None, adapted: bool = False
    ) -> States | None:
        """Runs one forward of what `draft` of the key has left, and of the chunks' queries, of which it returns what it
        gives; as `run` otherwise. adapted: whether a query of either has an adapter."""
        tokens, size = sum(chunk.length for chunk in chunks), self.size(chunks, key, batch)
        if (size, key, adapted) not in self._mixed:
            return None
        self._inputs.fill(size, chunks, batch)
        self._mixed[size, key, adapted]()
        self.mixed_replays += 1
        assert self._mixed_states is not None
        return cut(self._mixed_states, 0, tokens)[1]

    def _run(self, size: int, beside: States | None = None) -> States:
        """beside: where the same without adapters leaves what it gives; None: it is without."""
        found = self._forward(self._inputs.batch(size), None, beside is not None)
        if beside is None:
            return found
        put(beside, found)
        return beside

    def _run_mixed(self, size: int, adapted: bool, trees: Batch, states: States) -> None:
        nodes = trees.ids.shape[0]
        of_trees, (hidden, aux_hidden) = cut(self._forward(self._inputs.batch(size), trees, adapted), nodes)
        if self._mixed_states is None:
            most = self.mixed_sizes[-1]
            aux = None if aux_hidden is None else aux_hidden.new_empty(most, aux_hidden.shape[1])
            self._mixed_states = hidden.new_empty(most, hidden.shape[1]), aux
        put(states, of_trees)
        put(cut(self._mixed_states, hidden.shape[0])[0], (hidden, aux_hidden))


def slow_sizes(times: Mapping[int, float]) -> list[int]:
    """Returns sizes that are not worth a graph, ascending, never the largest. times: seconds by size."""
    slow, above = list[int](), math.inf  # seconds of the next larger size that has a graph
    for size, seconds in sorted(times.items(), reverse=True):
        fewer = any(seconds / size > FEWER * its / smaller for smaller, its in times.items() if smaller < size)
        if above <= (PADDED if fewer else 1.0) * seconds:
            slow.append(size)
        else:
            above = seconds
    return slow[::-1]


def put(into: States, states: States) -> None:
    """Copies them."""
    for place, part in zip(into, states, strict=True):
        if place is not None and part is not None:
            place.copy_(part)


def cut(states: States, first: int, end: int | None = None) -> tuple[States, States]:
    """Returns those of the first queries, and of the others up to `end`."""
    hidden, aux_hidden = states
    if aux_hidden is None:
        return (hidden[:first], None), (hidden[first:end], None)
    return (hidden[:first], aux_hidden[:first]), (hidden[first:end], aux_hidden[first:end])


def takes(key: Key) -> bool:
    """Returns whether there are graphs of a step of this key beside prompts, if of any."""
    return key.size in MIXED_ROWS and key.size * key.shape.queries <= MIXED_NODES


def prefill_sizes(max_queries: int) -> list[int]:
    """Queries of the graphs that plans of up to `max_queries` queries need, ascending."""
    return [size for before, size in pairwise((0, *SIZES)) if before < max_queries]


def kept_bytes(
    max_queries: int, hidden: int, aux_layers: tuple[int, ...], dtype: torch.dtype, mixed: bool = False
) -> int:
    """Returns the bytes of the outputs that these graphs keep."""
    sizes = prefill_sizes(max_queries)
    states = sum(sizes) + (sizes[-1] if mixed else 0)
    return states * hidden * (1 + len(aux_layers)) * dtype.itemsize
