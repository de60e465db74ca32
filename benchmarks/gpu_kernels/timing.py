"""How the kernels of this folder are timed: as they run in the engine, from a captured graph."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable

import torch

LAUNCHES = 20  # of a call in a graph
REPLAYS = 50
READ_BYTES = 1 << 32  # of a pure read: many times what the L2 cache holds


@functools.cache
def read_rate() -> float:
    """Bytes per microsecond of a pure read, of this GPU: a sum of float32."""
    x = torch.zeros(READ_BYTES // 4, device="cuda")
    return READ_BYTES / replay_us(x.sum, least=True)


def replayed(call: Callable[[], object], calls: int = LAUNCHES) -> float:
    """Microseconds of one call among `calls` in a graph."""
    return replayed_layers(lambda layer: call(), calls)


def replayed_layers(call: Callable[[int], object], layers: int) -> float:
    """Microseconds of one of `layers` calls in a graph; call i is layer i's."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call(0)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for layer in range(layers):
            call(layer)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000 / (layers * REPLAYS)


def replay_us(fn: Callable[[], object], repeats: int = 9, least: bool = False) -> float:
    """Microseconds of one replay of `fn` as a CUDA graph, the median of several, or the least, beside others."""
    fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    times = []
    for _ in range(repeats + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return min(times[2:]) if least else statistics.median(times[2:])
