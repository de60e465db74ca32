"""`draftwing bench`: throughput and latency at given concurrencies, of a server or of an engine in this process.

`engine.measure` says what a record holds.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftwing.cli.client import Client
from draftwing.engine.benchmark import Sample
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


class Remote:
    """A server that is measured, an `engine.measure.Target`."""

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

    def weight_bytes(self) -> dict[str, int]:
        found = self._client.get("/server_info").get("weight_bytes")
        return found if isinstance(found, dict) else {}

    def floor(self) -> float:
        found = self._client.get("/server_info").get("floor")
        return float(found["read_ms"] or 0.0) / 1e3 if isinstance(found, dict) else 0.0

    def stages(self) -> dict[str, float]:
        return {}


def load_prompts(path: str | None, count: int) -> list[str]:
    """`count` prompts, from a file of JSON lines (a string, or an object with `prompt` or `turns`) or built in; they
    are repeated when there are fewer."""
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
