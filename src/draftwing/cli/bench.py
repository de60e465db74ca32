"""`draftwing bench`: throughput and latency at given concurrencies, of a server or of an engine in this process.

The load is closed: `concurrency` requests run, and each one that ends is followed by the next. Times are those of the
client, so that of a server they include HTTP, tokenizing and detokenizing.
"""

from __future__ import annotations

import json
import queue
import statistics
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from draftwing.cli.client import Client
from draftwing.engine.session import Session
from draftwing.errors import ConfigError
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    from draftwing.engine.engine import Engine

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
        """`tokens`: so far."""
        self.end = time.monotonic()
        if tokens and not self.tokens:
            self.first = self.end
        self.tokens = tokens


class Target(Protocol):
    """What is measured."""

    def encode(self, prompt: str) -> list[int]:
        """Ids of a conversation with one question."""

    def run(self, prompts: Sequence[list[int]], params: dict[str, Any], concurrency: int) -> list[Sample]:
        """Answers all prompts, at most `concurrency` at once."""

    def flush(self) -> None:
        """Forgets what earlier runs left in caches."""

    def stages(self) -> dict[str, float]:
        """Mean milliseconds of each stage of a step since the last call; empty where they are not known."""


class Remote:
    def __init__(self, client: Client) -> None:
        self._client = client

    def encode(self, prompt: str) -> list[int]:
        ids: list[int] = self._client.post("/tokenize", {"messages": [{"role": "user", "content": prompt}]})["tokens"]
        return ids

    def run(self, prompts: Sequence[list[int]], params: dict[str, Any], concurrency: int) -> list[Sample]:
        todo: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
        for prompt in prompts:
            todo.put(prompt)
        samples: list[Sample] = []
        failures: list[Exception] = []

        def work() -> None:
            try:
                while not failures:
                    samples.append(self._one(todo.get_nowait(), params))
            except queue.Empty:
                pass
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(min(concurrency, len(prompts)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return samples

    def _one(self, prompt: list[int], params: dict[str, Any]) -> Sample:
        sample = Sample(time.monotonic(), prompt_tokens=len(prompt))
        for event in self._client.stream("/generate", {"input_ids": prompt, "sampling_params": params}):
            sample.meta = event["meta_info"]
            sample.seen(sample.meta["completion_tokens"])
        return sample

    def flush(self) -> None:
        self._client.flush_cache()

    def stages(self) -> dict[str, float]:
        return {}


class Local:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before = engine.stats()  # as of the last call of `stages`

    def encode(self, prompt: str) -> list[int]:
        return self._engine.tokenizer.encode_chat([{"role": "user", "content": prompt}])

    def run(self, prompts: Sequence[list[int]], params: dict[str, Any], concurrency: int) -> list[Sample]:
        checked, running, done = SamplingParams.read(params), dict[str, Sample](), list[Sample]()

        def load() -> Iterator[GenerationRequest]:
            for prompt in prompts:
                request = GenerationRequest(uuid.uuid4().hex, prompt, checked)
                running[request.uid] = Sample(time.monotonic(), prompt_tokens=len(prompt))
                yield request

        with closing(Session(self._engine).run(load(), concurrency)) as outputs:
            for output in outputs:
                sample = running[output.uid]
                sample.seen(sample.tokens + len(output.token_ids))
                if output.finish_reason is not None:
                    sample.meta = self._engine.options.label | output.meta
                    done.append(running.pop(output.uid))
        return done

    def flush(self) -> None:
        self._engine.flush_cache()

    def stages(self) -> dict[str, float]:
        """The stages are those of decode steps that were measured; `host` is the time between two steps of any kind."""
        before, now = self._before, self._engine.stats()
        self._before = now
        measured = now["staged_steps"] - before["staged_steps"]
        steps = sum(now["steps"].values()) - sum(before["steps"].values())
        if not measured:
            return {}
        spent = {name: total - before["stage_seconds"][name] for name, total in now["stage_seconds"].items()}
        host = (now["host_seconds"] - before["host_seconds"]) / steps
        return {name: seconds / measured * 1e3 for name, seconds in spent.items()} | {"host": host * 1e3}


def measure(target: Target, prompts: Sequence[list[int]], params: dict[str, Any], concurrency: int) -> dict[str, Any]:
    """One record: a run of all prompts after a flush."""
    target.flush()
    target.stages()
    start = time.monotonic()
    samples = target.run(prompts, params, concurrency)
    seconds = time.monotonic() - start
    tokens = sum(sample.tokens for sample in samples)
    steps, correct, proposed = (
        sum(sample.meta.get(name, 0) for sample in samples)
        for name in ("spec_verify_ct", "spec_num_correct_drafts", "spec_num_proposed_drafts")
    )
    record = {
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
    simulated = next((sample.meta["simulated"] for sample in samples if "simulated" in sample.meta), None)
    record |= {"simulated": simulated} if simulated else {}
    stages = target.stages()
    return record | ({"step_ms": stages} if stages else {})


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds: mean, median and 99th percentile."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    worst = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return {"mean": statistics.fmean(ordered) * 1e3, "p50": statistics.median(ordered) * 1e3, "p99": worst * 1e3}


def load_prompts(path: str | None, count: int) -> list[str]:
    """`count` prompts, from a file of JSON lines (a string, or an object with `prompt` or `turns`) or built in; they
    are repeated when there are fewer."""
    prompts: Sequence[str] = PROMPTS
    if path is not None:
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
            prompts = [_prompt(json.loads(line)) for line in lines if line.strip()]
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            raise ConfigError(f"--prompts: {path} is not a file of JSON lines with prompts: {error}") from None
        if not prompts:
            raise ConfigError(f"--prompts: {path} is empty")
    return [prompts[i % len(prompts)] for i in range(count)]


def _prompt(entry: Any) -> str:
    text = entry if isinstance(entry, str) else entry["prompt"] if "prompt" in entry else entry["turns"][0]
    if not isinstance(text, str):
        raise TypeError(f"a prompt must be a string; found {text!r}")
    return text
