"""Measures throughput, latency and acceptance length of an engine, or of whatever else answers prompts.

The load is closed: `concurrency` requests run, and each one that ends is followed by the next. Times are those of the
client, so that of a server they include HTTP, tokenizing and detokenizing.
"""

from __future__ import annotations

import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Protocol

from draftwing.engine.session import Session
from draftwing.requests.request import GenerationRequest, SpecLimits
from draftwing.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    from draftwing.engine.engine import Engine


@dataclass
class Sample:
    """One answered request. Times are monotonic seconds."""

    start: float
    first: float = 0.0
    end: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    meta: dict[str, Any] = field(default_factory=dict)

    def seen(self, tokens: int) -> None:
        """Notes that a request has so many `tokens` so far."""
        self.end = time.monotonic()
        if tokens and not self.tokens:
            self.first = self.end
        self.tokens = tokens


Ended = Callable[[Sample], None]  # is called with each request that has ended


def ignored(sample: Sample) -> None:
    pass


class Target(Protocol):
    """What is measured."""

    def encode(self, prompt: str) -> list[int]:
        """Returns ids of a conversation with one question."""

    def run(
        self, prompts: Sequence[list[int]], params: dict[str, Any], concurrency: int, drafts: bool = True,
        ended: Ended = ignored,
    ) -> list[Sample]:  # fmt: skip
        """Answers all prompts, at most `concurrency` at once. drafts: False asks for none with each request."""

    def drafter(self) -> str | None:
        """Returns who drafts, where requests can be asked not to be drafted for; None: nobody, or it is not known."""

    def flush(self) -> None:
        """Forgets what earlier runs left in caches."""

    def weight_bytes(self) -> dict[str, int]:
        """Returns bytes of weights that every step of the target reads, by type; empty where they are not known."""

    def min_step_seconds(self) -> float:
        """Returns seconds that the target's device takes to read its weights; 0 where that is not known."""

    def stages(self) -> dict[str, float]:
        """Returns mean milliseconds of each stage of a step since the last call; empty where they are not known."""


class Local:
    """An engine of this process."""

    def __init__(self, engine: Engine, adapter: str | None = None) -> None:
        """adapter: the name of one of the engine's, which answers."""
        self._engine, self._adapters = engine, () if adapter is None else ((adapter, 1.0),)
        engine.measure_read_rate()
        self._before = engine.stats()  # as of the last call of `stages`

    def encode(self, prompt: str) -> list[int]:
        return self._engine.tokenizer.encode_chat([{"role": "user", "content": prompt}])

    def run(
        self, prompts: Sequence[list[int]], params: dict[str, Any], concurrency: int, drafts: bool = True,
        ended: Ended = ignored,
    ) -> list[Sample]:  # fmt: skip
        checked, running, done = SamplingParams.read(params), dict[str, Sample](), list[Sample]()
        limits = None if drafts or not self._engine.info.speculates else SpecLimits(0, 1, 1)

        def load() -> Iterator[GenerationRequest]:
            for prompt in prompts:
                request = GenerationRequest(uuid.uuid4().hex, prompt, checked, limits=limits, adapters=self._adapters)
                running[request.uid] = Sample(time.monotonic(), prompt_tokens=len(prompt))
                yield request

        with closing(Session(self._engine).run(load(), concurrency)) as outputs:
            for output in outputs:
                sample = running[output.uid]
                sample.seen(sample.tokens + len(output.token_ids))
                if output.finish_reason is not None:
                    sample.meta = self._engine.options.label | output.meta
                    done.append(running.pop(output.uid))
                    ended(sample)
        return done

    def drafter(self) -> str | None:
        return self._engine.options.drafter if self._engine.info.speculates else None

    def flush(self) -> None:
        self._engine.flush_cache()

    def weight_bytes(self) -> dict[str, int]:
        return dict(self._engine.info.weight_bytes)

    def min_step_seconds(self) -> float:
        return self._engine.info.floor

    def stages(self) -> dict[str, float]:
        """Returns those of decode steps that were measured; `host` is the time between two steps of any kind."""
        before, now = self._before, self._engine.stats()
        self._before = now
        measured = now["staged_steps"] - before["staged_steps"]
        steps = sum(now["steps"].values()) - sum(before["steps"].values())
        if not measured:
            return {}
        spent = {name: total - before["stage_seconds"][name] for name, total in now["stage_seconds"].items()}
        host = (now["host_seconds"] - before["host_seconds"]) / steps
        return {name: seconds / measured * 1e3 for name, seconds in spent.items()} | {"host": host * 1e3}


def timed_run(
    target: Target, prompts: Sequence[list[int]], params: dict[str, Any], concurrency: int, drafts: bool = True,
    ended: Ended = ignored,
) -> tuple[list[Sample], float]:  # fmt: skip
    """Runs all prompts after a flush; returns what came of them, and how many seconds it took."""
    target.flush()
    target.stages()
    start = time.monotonic()
    samples = target.run(prompts, params, concurrency, drafts, ended)
    return samples, time.monotonic() - start


def record_of(target: Target, concurrency: int, samples: Sequence[Sample], seconds: float) -> dict[str, Any]:
    """Returns the figures of runs that took so many seconds together.

    share_of_floor: of the time of a step, as its client sees it, what reading the target's weights takes.
    step_ms: of the last run.
    """
    tokens = sum(sample.tokens for sample in samples)
    steps, correct, proposed = (
        sum(sample.meta.get(name, 0) for sample in samples)
        for name in ("spec_verify_ct", "spec_num_correct_drafts", "spec_num_proposed_drafts")
    )
    record: dict[str, Any] = {
        "concurrency": concurrency,
        "requests": len(samples),
        "seconds": seconds,
        "prompt_tokens": sum(sample.prompt_tokens for sample in samples),
        "completion_tokens": tokens,
        "throughput": tokens / seconds,
        "ttft_ms": _spread([sample.first - sample.start for sample in samples]),
        "tbt_ms": _spread([(s.end - s.first) / (s.tokens - 1) for s in samples if s.tokens > 1]),
        "latency_ms": _spread([sample.end - sample.start for sample in samples]),
        "accept_length": 1 + correct / steps if steps else 1.0,
        "accept_rate": correct / proposed if proposed else 0.0,
    }
    record["accept_by_depth"] = _by_depth([sample.meta.get("spec_correct_drafts_histogram", ()) for sample in samples])
    record["accept_by_output"] = _by_output([sample.meta.get("spec_by_output_position", ()) for sample in samples])
    weights = target.weight_bytes()
    record |= {"weight_bytes": weights} if weights else {}
    bound, between = 1e3 * target.min_step_seconds(), record["tbt_ms"].get("p50", 0.0)
    if bound and between:
        record |= {"floor_ms": bound, "share_of_floor": bound / (between * record["accept_length"])}
    simulated = next((sample.meta["simulated"] for sample in samples if "simulated" in sample.meta), None)
    record |= {"simulated": simulated} if simulated else {}
    stages = target.stages()
    return record | ({"step_ms": stages} if stages else {})


def _by_depth(histograms: Sequence[Sequence[int]]) -> list[float]:
    """Shares of the steps that accepted at least 1, 2, ... drafts. histograms: steps by accepted drafts."""
    steps = [sum(counts) for counts in zip_longest(*histograms, fillvalue=0)]
    return [sum(steps[depth:]) / sum(steps) for depth in range(1, len(steps))] if sum(steps) else []


def _by_output(counts: Sequence[Sequence[Sequence[int]]]) -> dict[str, float]:
    """Returns acceptance lengths by the first output position of the stretch that they are of. counts: of answers."""
    sums: dict[int, list[int]] = {}
    for start, steps, correct in (one for answer in counts for one in answer):
        found = sums.setdefault(start, [0, 0])
        found[0] += steps
        found[1] += correct
    return {str(start): 1 + correct / steps for start, (steps, correct) in sorted(sums.items()) if steps}


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    """Returns milliseconds: mean, median and 99th percentile."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    worst = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return {"mean": statistics.fmean(ordered) * 1e3, "p50": statistics.median(ordered) * 1e3, "p99": worst * 1e3}
