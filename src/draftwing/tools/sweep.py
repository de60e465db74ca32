"""`draftwing bench --sweep`: measures speculative shapes against each other and against none, and names the best.

Every point has an engine of its own, one after the other, on the same prompts.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from draftwing.config import Options
from draftwing.errors import ConfigError
from draftwing.tools.bench import Local, measure

SHAPE = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
Emit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Grid:
    steps: Sequence[int]
    topk: Sequence[int]
    draft_tokens: Sequence[int]
    batch: Sequence[int]


def points(options: dict[str, Any], grid: Grid) -> Iterator[Options]:
    """Resolved options of every shape of the grid that is possible, each once, none first."""
    plain = {name: value for name, value in options.items() if not name.startswith("speculative_")}
    yield Options.from_kwargs(**plain).resolve()
    if options.get("speculative_algorithm", "none").lower() == "none":
        raise ConfigError("--sweep needs --speculative-algorithm, whose shapes it measures")
    seen = set()
    for shape in itertools.product(grid.steps, grid.topk, grid.draft_tokens):
        if shape[1] == 1 and shape[2] != shape[0] + 1:
            continue  # a chain has one size
        try:
            point = Options.from_kwargs(**{**options, **dict(zip(SHAPE, shape, strict=True))}).resolve()
        except ConfigError:
            continue
        if point.speculative_shape not in seen:
            seen.add(point.speculative_shape)
            yield point


def sweep(
    options: dict[str, Any], grid: Grid, prompts: Sequence[str], params: dict[str, Any], emit: Emit
) -> dict[int, Options]:
    """Measures every point at every batch size; `emit` gets each record. Returns the best options of each size."""
    from draftwing.engine.engine import Engine  # late: it imports torch

    best: dict[int, tuple[float, Options]] = {}
    for point in list(points(options, grid)):
        engine = Engine(point)
        target = Local(engine)
        ids = [target.encode(prompt) for prompt in prompts]
        target.run(ids[:1], params, 1)  # first use of everything
        for batch in grid.batch:
            record = measure(target, ids, params, batch)
            depth, topk, nodes = point.speculative_shape
            shape = {"batch_size": batch, "steps": depth, "topk": topk, "num_draft_tokens": nodes}
            emit({**shape, "speculative_algorithm": point.speculative_algorithm, **record})
            if batch not in best or record["throughput"] > best[batch][0]:
                best[batch] = record["throughput"], point
        engine.close()
        del engine, target
        gc.collect()
    return {batch: point for batch, (_, point) in best.items()}


def flags(options: Options) -> str:
    """What to type for a point of the sweep."""
    if options.speculative_algorithm == "none":
        return "(no speculation)"
    shape = dict(zip(SHAPE, options.speculative_shape, strict=True))
    words = []
    for spec in dataclasses.fields(Options):
        value = shape.get(spec.name, getattr(options, spec.name))
        if spec.name in shape or (spec.name.startswith("speculative_") and value != spec.default):
            words += ["--" + spec.name.replace("_", "-"), str(value)]
    return shlex.join(words)
