"""Graphs of tree steps, of these beside prompts, and of towers: some are captured at the start, the others when there
is time."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from draftwing.config.trees import TreeShape
from draftwing.core import NOBODY
from draftwing.engine.devices.base import Device
from draftwing.engine.draft_kv_backlog import DraftKVBacklog
from draftwing.engine.graphs import GraphCache, Key, RecordedStages, first_sizes, graph_keys
from draftwing.engine.prefill_graphs import Mixed, PrefillGraphs
from draftwing.engine.row_table import RowTable
from draftwing.engine.tower_graphs import TowerGraphs
from draftwing.engine.tree_steps import TreeSteps
from draftwing.log import progress_bar
from draftwing.parallel.ranks import Ranks

log = logging.getLogger("draftwing")


class Captures:
    def __init__(
        self, steps: TreeSteps, graphs: GraphCache, prefills: PrefillGraphs, towers: TowerGraphs,
        backlog: DraftKVBacklog | None, table: RowTable, device: Device, ranks: Ranks,
    ) -> None:  # fmt: skip
        """graphs, prefills, towers: which are filled."""
        self._steps, self._graphs, self._prefills, self._towers = steps, graphs, prefills, towers
        self._backlog, self._table, self._device, self._ranks = backlog, table, device, ranks

    @torch.inference_mode()
    def capture(self, menu: Sequence[TreeShape], some: bool = False) -> list[Key]:
        """Captures the graphs of every shape for every batch size, the largest first, and returns of which. Works on
        the dummy row alone, so it may run at any time. some: of the `first_sizes`, none with parts of prompts beside
        them, and leaves the others to `capture_next`."""
        every = graph_keys(menu, self._graphs.sizes)
        first = {s: first_sizes([key.size for key in reversed(every) if key.shape == s]) for s in menu}
        todo = [key for key in every if not some or key.size in first[key.shape]]
        self._graphs.later = dict.fromkeys((key for key in reversed(every) if key not in todo), 0)
        prefills, quiet = self._prefills, self._ranks.rank > 0
        count = len(todo) + prefills.planned(() if some else todo)
        with progress_bar(total=count, desc="capturing graphs", disable=quiet) as bar:
            self._graphs.set_rows(NOBODY, max(self._graphs.sizes, default=0))
            prefills.capture(bar)
            if self._backlog is not None:
                self._backlog.warm_up()
            for key in todo:
                self._capture(key)
                bar.update()
                prefills.leave(key, some and self._table.adapters is not None)
                while not some and prefills.later:
                    self._capture_mixed(next(iter(prefills.later)))
                    bar.update()
        self._device.trim()  # what the first calls took
        return todo

    @property
    def later(self) -> int:
        """Returns how many batch sizes of steps, graphs of these beside prompts, and sizes of pictures are left to
        `capture_next`."""
        return len(self._graphs.later) + len(self._prefills.later) + self._towers.later

    @property
    def wanted(self) -> bool:
        """Returns whether steps were slower for want of a graph so often that it is worth an interruption."""
        return max(self._graphs.wanted, self._prefills.wanted, self._towers.wanted) >= 1

    @torch.inference_mode()
    def capture_next(self) -> None:
        """Captures what is wanted most of what `capture` has left, if there is anything."""
        steps, mixed = self._graphs.later, self._prefills.later
        trims = bool(steps or mixed)  # not behind each size of pictures, of which new ones may come all the time
        try:
            if self._towers.later and self._towers.wanted > max(self._graphs.wanted, self._prefills.wanted):
                self._towers.capture_next()
            elif mixed and (self._prefills.wanted > self._graphs.wanted or not steps):
                self._capture_mixed(max(mixed, key=lambda one: mixed[one]))
            elif steps:
                key = max(steps, key=lambda key: steps[key])
                del steps[key]
                self._capture(key)  # prompts are not mixed with so many rows: see `MIXED_ROWS`
            else:
                return
        except self._device.out_of_memory:
            log.warning("%d CUDA graphs are not captured, for want of memory: steps are padded further", self.later + 1)
            steps.clear()
            mixed.clear()
            self._towers.stop()
            self._graphs.drop_unfinished()
            trims = True
        if trims and not (steps or mixed):
            log.debug("captured %d CUDA graphs in all", len(self))
            self._device.trim()

    def __len__(self) -> int:
        """Returns how many graphs there are."""
        return len(self._graphs) + len(self._prefills) + len(self._towers)

    @property
    def replays(self) -> int:
        """Returns how often one of them, or on a CPU a recorded stage, was replayed."""
        steps, prefills = self._graphs.replays, self._prefills
        return steps + prefills.replays + prefills.mixed_replays + self._towers.replays

    @property
    def recorded_bytes(self) -> int:
        """Returns what recorded stages keep on a CPU."""
        return self._graphs.memory.nbytes if isinstance(self._graphs, RecordedStages) else 0

    def _capture(self, key: Key) -> None:
        self._graphs.set_rows(NOBODY, key.size)
        step = self._steps.graph_step(key, False)
        launched = self._steps.forward(step, self._graphs.capture)
        if self._table.adapters is not None:
            self._graphs.capture_beside("verify", key, self._steps.verify_adapted, launched[0])
        for filtered in (False, True) if self._device.ops.draws_by_row else (False,):
            self._steps.finish(step._replace(filtered=filtered), *launched, self._graphs.capture)
        if self._table.heads is not None:
            self._steps.capture_heads(step._replace(adapted=True), *launched)
        del launched  # its memory is for the next key's graphs
        self._graphs.finish(key)

    def _capture_mixed(self, one: Mixed) -> None:
        """Captures a graph of a step with parts of prompts beside it."""
        key = one[1]
        self._graphs.set_rows(NOBODY, key.size)
        drafted = self._graphs.run("draft", key, self._steps.draft, self._steps.graph_step(key, False))
        self._prefills.capture_mixed(one, drafted.batch, self._graphs.left("verify", key))
