"""What `draftwing bench` prints for people: tables of its records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from draftwing.sched.explain import aligned, described, number_of
from draftwing.tree_shape import TreeShape

Record = Mapping[str, Any]


def table(record: Record) -> list[str]:
    """Returns the lines of a table for one concurrency: a figure in each line, with drafts and without, and how many
    times as good it is with drafts."""
    plain: Record | None = record.get("without_drafts")
    head = [f"{number_of(record['concurrency'])} at once", record.get("drafter") or "measured"]
    rows = [head if plain is None else [*head, "without drafts", "speedup"]]
    for name, figure, better in FIGURES:
        value = figure(record)
        cells = [f"  {name}", _number(value)]
        if plain is not None:
            other = figure(plain)
            cells += [_number(other), f"{(value / other) ** better:.2f}x" if better and value and other else ""]
        rows.append(cells)
    return [*aligned(rows), ""]


def _quantile(key: str, name: str) -> Callable[[Record], float | None]:
    return lambda record: record[key].get(name)


# Name, figure of a record, and 1 where more of it is better, -1 where less is; 0: it is no matter of good or bad.
FIGURES: tuple[tuple[str, Callable[[Record], float | None], int], ...] = (
    ("output tokens/s", lambda record: record["throughput"], 1),
    ("requests/s", lambda record: record["requests"] / record["seconds"], 1),
    ("time to first token, median, ms", _quantile("ttft_ms", "p50"), -1),
    ("time to first token, p99, ms", _quantile("ttft_ms", "p99"), -1),
    ("time per output token, median, ms", _quantile("tbt_ms", "p50"), -1),
    ("time per output token, p99, ms", _quantile("tbt_ms", "p99"), -1),
    ("acceptance length", lambda record: record["accept_length"], 0),
)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if value < 100 else f"{value:.1f}"


def footer(records: Sequence[Record], remote: bool) -> str:
    """Returns lines on how the records were measured. remote: by a server."""
    first, warmups = records[0], ", ".join(str(record["warmup_prompts"]) for record in records)
    prompts = first["requests"] // first["rounds"]
    compared = "without_drafts" in first
    how = f", {first['rounds']} rounds with drafts and {first['rounds']} without, alternately" if compared else ""
    measured = f"{number_of(prompts, 'prompt')}{how}; not counted: {warmups} warm-up prompts"
    if compared:
        return f"{measured} on each side"
    why = "the server drafts nothing, or its requests have no field `speculative`" if remote else "nothing is drafted"
    return f"{measured}\nno column without drafts: {why}"


def sweep_lines(record: Record) -> list[str]:
    """Returns one line for a point of a sweep."""
    shape = TreeShape(record["steps"], record["topk"], record["num_draft_tokens"])
    name = described(shape) if record["fixed"] else "chosen by the engine"
    rate = f"{record['throughput']:.1f} tokens/s, acceptance length {record['accept_length']:.2f}"
    where = f"{record['point']} of {record['points']}"
    return [f"{where}: {name}, {number_of(record['batch_size'])} at once: {rate}"]
