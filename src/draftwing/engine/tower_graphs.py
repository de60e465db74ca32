"""Graphs of a tower. A small picture keeps a GPU busy for less time than the launches of all layers take, and while the
host launches, no result of a step is looked at. A graph is of pictures of one size, and gives the bits that the same
operations give without. It is captured once so many of its size were read that the next ones make up for it, or when
nothing runs, of a size that came twice."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftwing.engine.devices.base import Device
from draftwing.models.towers.base import Tower, TowerConfig

# Patches of a picture: with 1,152 values in 27 layers an H200 takes 4 ms for 1,200, and the host 14 for their launches.
MOST_PATCHES = 2048
# Of the sizes that have graphs, together. These share the memory in which layers work, as far as pieces of it fit.
ALL_PATCHES = 4 * MOST_PATCHES
MOST_SIZES = 64  # without a graph, whose pictures are counted, and as many with one: the driver keeps some of each
WANTED = 4  # pictures of a size: a capture takes about as long as three, and saves about half of each

Size = tuple[int, ...]  # height and width


def kept_bytes(config: TowerConfig, dtype: torch.dtype) -> int:
    """Returns about how many bytes graphs keep: those in which layers work, of the largest picture (with 1,152 values
    and 4,304 between the two matrices of an MLP a patch took 68 KB), and pixels and rows of each."""
    layers = MOST_PATCHES * (4 * config.ffn + 16 * config.hidden) * dtype.itemsize
    side = math.isqrt(ALL_PATCHES) * config.patch
    return layers + 3 * ALL_PATCHES * config.patch**2 + config.rows_bytes(side, dtype.itemsize)


class _Graph(NamedTuple):
    """pixels: [height, width, 3] uint8, which it reads.  rows: [tokens, row_size], which it writes."""

    pixels: Tensor
    replay: Callable[[], None]
    rows: Tensor


class TowerGraphs:
    """replays: of all graphs so far."""

    def __init__(self, tower: Tower | None, device: Device) -> None:
        """tower: None where there are no graphs."""
        self._tower, self._device = tower, device
        self._graphs: OrderedDict[Size, _Graph] = OrderedDict()  # the one used last is the last
        self._seen: dict[Size, tuple[int, int]] = {}  # pictures and tokens of sizes without one, the newest last
        self.replays = 0

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, pixels: npt.NDArray[np.uint8], tokens: int) -> Tensor | None:
        """Returns what `Tower.features` does of a picture [height, width, 3]; None where there is no graph of its size,
        which is then counted."""
        size = pixels.shape[:2]
        graph = self._graphs.get(size)
        if graph is None:
            self._count(size, tokens)
            return None
        self._graphs.move_to_end(size)
        graph.pixels.copy_(self._device.upload_array(pixels))
        graph.replay()
        self.replays += 1
        return graph.rows.clone()

    def _count(self, size: Size, tokens: int) -> None:
        if self._tower is None or self._patches(size) > MOST_PATCHES:
            return
        count, _ = self._seen.pop(size, (0, 0))
        self._seen[size] = count + 1, tokens
        if len(self._seen) > MOST_SIZES:
            del self._seen[next(iter(self._seen))]

    def _patches(self, size: Size) -> int:
        assert self._tower is not None
        return size[0] * size[1] // self._tower.config.patch**2

    @property
    def later(self) -> int:
        """Returns how many sizes have come more than once, and have no graph."""
        return sum(count > 1 for count, _ in self._seen.values())

    @property
    def wanted(self) -> float:
        """Returns how many pictures of a size without a graph were read, at most, over `WANTED`; from 1 on that graph
        is worth an interruption."""
        return max((count for count, _ in self._seen.values()), default=0) / WANTED

    @torch.inference_mode()
    def capture_next(self) -> None:
        """Captures the graph that is wanted most, in place of those that were used least recently where there would be
        more than may be."""
        assert self._tower is not None
        size = max(self._seen, key=lambda one: self._seen[one][0])
        _, tokens = self._seen.pop(size)
        while len(self._graphs) == MOST_SIZES or sum(map(self._patches, (size, *self._graphs))) > ALL_PATCHES:
            self._graphs.popitem(last=False)
        pixels = torch.zeros(*size, 3, dtype=torch.uint8, device=self._device.device)
        features = partial(self._tower.features, pixels, tokens)
        self._graphs[size] = _Graph(pixels, *self._device.record(features, "towers"))

    def clear(self) -> None:
        """Lets go of all graphs, and of what was counted."""
        self._graphs.clear()
        self._seen.clear()

    def stop(self) -> None:
        """Captures no more: there is no room."""
        self._seen.clear()
        self._tower = None
