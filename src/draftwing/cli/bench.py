"""`draftwing bench`: throughput and latency at given concurrencies, of a server or of an engine in this process, and
the tables of its records.

`engine.benchmark.record_of` says what a record holds.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

from draftwing.cli.client import Client, part
from draftwing.config.drafters import NO_DRAFTER
from draftwing.config.trees import TreeShape
from draftwing.engine.benchmark import Ended, Sample, Target, ignored, record_of, timed_run
from draftwing.errors import ConfigError
from draftwing.sched.explain import aligned, described, number_of

SECONDS = 10.0  # between two lines, where they do not replace each other


class Progress:
    """On a terminal one line that changes, and goes at the end of a `with` statement; else a new line now and then."""

    def __init__(self, file: TextIO | None = None) -> None:
        """file: standard error unless it is given."""
        self._file = file or sys.stderr
        self._terminal = self._file.isatty()
        self._last = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()

    def show(self, text: str) -> None:
        """Says where the work is."""
        if self._terminal:
            print(f"\r\x1b[K{text}", end="", file=self._file, flush=True)
        elif time.monotonic() - self._last >= SECONDS:
            print(text, file=self._file, flush=True)
            self._last = time.monotonic()

    def clear(self) -> None:
        """Takes the line off a terminal, so that results can be printed."""
        if self._terminal:
            print("\r\x1b[K", end="", file=self._file, flush=True)


PROMPTS = (
    "Write a short travel report about a trip to Lisbon.",
    "Explain to a child why the sky is blue.",
    "List ten countries with their capitals and languages.",
    "Write a Python function that merges two sorted lists, with an explanation.",
    "Draft a polite email that asks for a later deadline.",
    "Compare trains and planes for journeys within Europe.",
    "Repeat this list three times: apple, pear, plum, cherry, quince.",
    "Describe how bread is baked, step by step.",
)


MIN_WARMUPS = 4  # prompts: some hundred steps, after which the choice of drafts is steady
ROUNDS = 2  # with drafts and without, alternately


class Remote:
    """A server that is measured, an `engine.benchmark.Target`."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @cached_property
    def _info(self) -> dict[str, Any]:
        found: dict[str, Any] = self._client.get("/server_info")
        return found

    def encode(self, prompt: str) -> list[int]:
        ids: list[int] = self._client.post("/tokenize", {"messages": [{"role": "user", "content": prompt}]}, "tokens")
        return ids

    def run(
        self, prompts: Sequence[list[int]], params: dict[str, Any], concurrency: int, drafts: bool = True,
        ended: Ended = ignored,
    ) -> list[Sample]:  # fmt: skip
        speculative = {} if drafts else {"speculative": "off"}

        def answered(prompt: list[int]) -> Sample:
            sample = self._one(prompt, {"sampling_params": params, **speculative})
            ended(sample)
            return sample

        pool = ThreadPoolExecutor(concurrency)
        try:
            return list(pool.map(answered, prompts))
        finally:
            pool.shutdown(cancel_futures=True)

    def _one(self, prompt: list[int], body: dict[str, Any]) -> Sample:
        sample = Sample(time.monotonic(), prompt_tokens=len(prompt))
        for event in self._client.stream("/generate", {"input_ids": prompt, **body}):
            sample.meta = part(event, ("meta_info",), "/generate")
            sample.seen(sample.meta["completion_tokens"])
        return sample

    def drafter(self) -> str | None:
        # Servers of other engines do not have `speculative`, here or in requests.
        name = self._info.get("speculative_algorithm") if "speculative" in self._info else None
        return None if name == NO_DRAFTER.name else name

    def flush(self) -> None:
        self._client.flush_cache()

    def weight_bytes(self) -> dict[str, int]:
        found = self._info.get("weight_bytes")
        return found if isinstance(found, dict) else {}

    def min_step_seconds(self) -> float:
        found = self._info.get("floor")
        return float(found["read_ms"] or 0.0) / 1e3 if isinstance(found, dict) else 0.0

    def stages(self) -> dict[str, float]:
        return {}


def compare(
    target: Target, prompts: Sequence[list[int]], params: dict[str, Any], concurrency: int, progress: Progress
) -> dict[str, Any]:
    """Returns a record. Where drafts can be left out, rounds without and with them alternate: the record is of all
    rounds with them, `without_drafts` that of the others, and `speedup` the ratio of throughputs."""
    drafter = target.drafter()
    sides, rounds = ((True,), 1) if drafter is None else ((False, True), ROUNDS)
    warmup = [prompts[i % len(prompts)] for i in range(max(concurrency, MIN_WARMUPS))]
    samples: dict[bool, list[Sample]] = {drafts: [] for drafts in sides}
    seconds = dict.fromkeys(sides, 0.0)
    for number in range(1, rounds + 1):
        for drafts in sides:
            where = f"concurrency {concurrency}"
            if drafter is not None:
                where += ", with drafts" if drafts else ", without drafts"
            if number == 1:
                target.run(warmup, params, concurrency, drafts, counted(progress, f"{where}, warm-up", len(warmup)))
            where += f", round {number} of {rounds}"
            show = counted(progress, where, len(prompts))
            found, took = timed_run(target, prompts, params, concurrency, drafts, show)
            samples[drafts] += found
            seconds[drafts] += took
    progress.clear()
    record = record_of(target, concurrency, samples[True], seconds[True])
    record |= {"rounds": rounds, "warmup_prompts": len(warmup), "drafter": drafter}
    if drafter is None:
        return record
    plain = record_of(target, concurrency, samples[False], seconds[False])
    plain.pop("step_ms", None)  # only those of the last run are known, which had drafts
    return record | {"without_drafts": plain, "speedup": record["throughput"] / plain["throughput"]}


def counted(progress: Progress, where: str, total: int) -> Ended:
    """Returns what shows how many prompts of so many are answered."""
    count = itertools.count(1)

    def ended(sample: Sample) -> None:
        progress.show(f"{where}: {next(count)} of {total} prompts")

    return ended


def load_prompts(path: str | None, count: int) -> list[str]:
    """Returns `count` prompts, from a file of JSON lines (a string, or an object with `prompt` or `turns`) or built in;
    they are repeated when there are fewer."""
    prompts: Sequence[str] = PROMPTS
    if path is not None:
        try:
            lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
            prompts = [_prompt(json.loads(line)) for line in lines if line.strip()]
        except OSError as error:
            raise ConfigError(f"--prompts: {path} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ConfigError(f"--prompts: {path} is not a file of JSON lines with prompts: {error}") from None
        if not prompts:
            raise ConfigError(f"--prompts: {path} is empty")
    return [prompts[i % len(prompts)] for i in range(count)]


def _prompt(entry: Any) -> str:
    text = entry if isinstance(entry, str) else entry["prompt"] if "prompt" in entry else entry["turns"][0]
    if not isinstance(text, str):
        raise TypeError(f"a prompt must be a string; found {text!r}")
    return text


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
