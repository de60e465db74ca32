"""`draftwing bench`: throughput and latency at given concurrencies, of a server or of an engine in this process.

`engine.benchmark.record_of` says what a record holds.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

from draftwing.cli.client import Client
from draftwing.cli.progress import Progress
from draftwing.config.drafters import NO_DRAFTER
from draftwing.engine.benchmark import Ended, Sample, Target, ignored, record_of, timed_run
from draftwing.errors import ConfigError

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
        ids: list[int] = self._client.post("/tokenize", {"messages": [{"role": "user", "content": prompt}]})["tokens"]
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
            sample.meta = event["meta_info"]
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
            lines = Path(path).read_text(encoding="utf-8").splitlines()
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
