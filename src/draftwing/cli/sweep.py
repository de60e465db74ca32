"""`draftwing bench --sweep`: measures fixed shapes against each other, no drafts, and what the engine chooses.

Every point has an engine of its own, one after the other, on the same prompts. The last one chooses by itself. Before
it runs it measures costs of steps, longer than a start does, and keeps them for the next start.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwing.cli.bench import Progress, counted
from draftwing.config.drafters import DRAFTERS, NO_DRAFTER, shipped_head, token_map_in
from draftwing.config.fields import flag
from draftwing.config.options import Options
from draftwing.config.trees import PLAIN, TREE, TreeShape
from draftwing.engine.benchmark import Local, record_of, timed_run
from draftwing.errors import ConfigError
from draftwing.sched.explain import number_of, table

if TYPE_CHECKING:
    from draftwing.engine.engine import Engine

COST_SECONDS = 20.0  # to measure costs; a start has less time

Emit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Grid:
    steps: Sequence[int]
    topk: Sequence[int]
    draft_tokens: Sequence[int]
    batch: Sequence[int]


@dataclass(frozen=True)
class Found:
    """best: options by batch size.  choices: what the engine chose by itself, and its costs: lines of text by batch
    size.  tree: of those that draft, the one with the highest geometric mean of throughputs
    over the batch sizes.  device: "cpu" or "cuda"."""

    best: dict[int, Options]
    choices: dict[int, list[str]]
    tree: TreeShape
    device: str


def points(options: dict[str, Any], grid: Grid) -> Iterator[Options]:
    """Yields resolved options of every shape of the grid that is possible, each once, none first."""
    plain = {name: value for name, value in options.items() if not name.startswith("speculative_")}
    if not Options.from_kwargs(**options).resolve().drafts:
        raise ConfigError("--sweep needs --speculative-algorithm, whose shapes it measures")
    yield Options.from_kwargs(**plain, speculative_algorithm=NO_DRAFTER.name).resolve()
    seen = set()
    for shape in itertools.product(grid.steps, grid.topk, grid.draft_tokens):
        if shape[1] == 1 and shape[2] != shape[0] + 1:
            continue  # a chain has one size
        try:
            tree = dict(zip(TREE, shape, strict=False)) | {"speculative_fixed_shape": True}
            point = Options.from_kwargs(**{**options, **tree}).resolve()
        except ConfigError:
            continue
        if point.speculative_shape not in seen:
            seen.add(point.speculative_shape)
            yield point


def sweep(
    options: dict[str, Any], grid: Grid, prompts: Sequence[str], params: dict[str, Any], emit: Emit, progress: Progress
) -> Found:
    """Measures every point at every batch size; `emit` gets each record."""
    from draftwing.engine.engine import Engine  # late: it imports torch

    todo = list(points(options, grid))
    if not any(point.drafts for point in todo):
        raise ConfigError(f"--sweep: no tree has any of these numbers of steps, topk and draft tokens: {grid}")
    best: dict[int, tuple[float, Options]] = {}
    overall: tuple[float, TreeShape] = (-math.inf, PLAIN)
    device = ""
    choices: dict[int, list[str]] = {}
    todo.append(Options.from_kwargs(**{**options, "speculative_fixed_shape": False}).resolve())
    total, numbers = len(todo) * len(grid.batch), itertools.count(1)
    for point in todo:
        engine = Engine(point)
        chooses = engine.parts.costs is not None
        if chooses:
            engine.measure_costs(grid.batch, COST_SECONDS)
        target, device = Local(engine), engine.info.device
        ids = [target.encode(prompt) for prompt in prompts]
        target.run(ids[:1], params, 1)  # first use of everything
        logs = 0.0  # of the throughputs, summed: each batch size has the same say
        for batch in grid.batch:
            if engine.explainer is not None:
                engine.explainer.forget()
            number = next(numbers)
            where = f"{number} of {total}, {number_of(batch)} at once"
            samples, seconds = timed_run(target, ids, params, batch, ended=counted(progress, where, len(ids)))
            progress.clear()
            record = record_of(target, batch, samples, seconds)
            depth, topk, nodes = engine.options.speculative_shape.tree
            shape = {"batch_size": batch, "steps": depth, "topk": topk, "num_draft_tokens": nodes, "fixed": not chooses}
            emit({"point": number, "points": total, **shape, "speculative_algorithm": point.drafter, **record})
            if chooses:
                choices[batch] = _choice(engine, batch, record["throughput"], best[batch][0])
                continue
            logs += math.log(record["throughput"])
            if batch not in best or record["throughput"] > best[batch][0]:
                best[batch] = record["throughput"], point
        if point.drafts and not chooses:
            overall = max(overall, (logs, point.speculative_shape))
        engine.close()
        del engine, target
        gc.collect()
    return Found({batch: point for batch, (_, point) in best.items()}, choices, overall[1], device)


def _choice(engine: Engine, batch: int, throughput: float, best: float) -> list[str]:
    """Returns lines on what the engine did by itself. best: throughput of the best fixed shape, or of no drafts."""
    load = f"{number_of(batch)} at once"
    lines = [f"chosen by the engine at {load}: {throughput / best:.2f} of the best fixed throughput"]
    if engine.explainer is None or engine.explainer.busiest is None:
        return lines
    seen = engine.explainer.busiest
    return [*lines, f"  {seen['summary']}", *(f"  {line}" for line in table(seen))]


def head_folder(options: dict[str, Any]) -> Path:
    """Returns the folder of the head that would draft, to write into. Raises ConfigError where there is none."""
    resolved = Options.from_kwargs(**options).resolve()
    draft = resolved.speculative_draft_model_path
    if not resolved.drafter_spec.heads or draft is None:
        able = ", ".join(spec.name for spec in DRAFTERS if spec.heads)
        raise ConfigError(f"--save-shape needs a head that drafts ({able}); found {resolved.drafter}")
    folder = Path(draft).expanduser()
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--save-shape writes into the head's folder: expected one with config.json, found {draft}")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"--save-shape writes into the head's folder: {folder} is read-only; copy it")
    return folder


def flags(options: Options) -> str:
    """Returns what to type for a point of the sweep."""
    if not options.drafts:
        return f"--speculative-algorithm {NO_DRAFTER.name}"
    shape = dict(zip(TREE, options.speculative_shape, strict=False))
    head = shipped_head(options.model, options.drafter_spec)
    # What comes with a head of this package need not be typed.
    own = () if head is None else (str(head), str(token_map_in(head)))
    words = []
    for spec in dataclasses.fields(Options):
        value = shape.get(spec.name, getattr(options, spec.name))
        chosen = spec.name.startswith("speculative_") and spec.name != "speculative_fixed_shape"
        if spec.name in shape or (chosen and value not in (spec.default, *own)):
            words += [flag(spec.name), str(value)]
    return shlex.join(words)
