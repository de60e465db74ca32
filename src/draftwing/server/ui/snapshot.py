"""What a viewer of the engine is shown: its state now, and totals, whose differences are rates."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import draftwing
from draftwing.core import SOURCES
from draftwing.engine.process.link import EngineDead
from draftwing.requests.sampling_params import SamplingParams
from draftwing.server.learning import Learning
from draftwing.server.service import Service
from draftwing.server.telemetry.observer import AnswerRecord

MAX_AGE = 0.1  # seconds since the engine gave its numbers, from which on it did not answer this time
MAX_REQUESTS = 32  # the oldest unfinished ones that are listed
MAX_TEXT = 600  # characters of the end of a prompt or an answer
_PROMPT_TOKENS = 160  # of its end that are decoded to show it
_ASKED = {"max_new_tokens": "max_tokens"}  # fields of `SamplingParams` by their names in the page's requests
_SAMPLING = (  # fields of SamplingParams whose defaults the page shows
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
)  # fmt: skip
TOTALS = (
    "committed_tokens", "verified_rows", "prefilled_tokens", "queried_tokens", "hit_tokens", "retractions", "steps",
    "step_seconds", "host_seconds", "stage_seconds", "staged_steps",
)  # fmt: skip


def facts(service: Service, knows_effort: bool = False) -> dict[str, Any]:
    """Returns what does not change while the engine lives. knows_effort: whether the chat template reads how much to
    reason."""
    info = service.engine.info
    params = SamplingParams()
    depth, topk, nodes = info.shape.tree
    return {
        "version": draftwing.__version__,
        "model": service.model,
        "architecture": info.architecture,
        "device": info.device,
        "device_names": list(info.capability.get("devices", ())),
        "kernels": info.capability.get("kernels"),
        "dtype": info.dtype,
        "weight_bytes": dict(info.weight_bytes),
        "model_path": info.options.model,
        "draft_model_path": service.draft_model_path,
        "context_length": info.context_length,
        "max_total_tokens": info.max_total_tokens,
        "algorithm": info.options.drafter if info.speculates else "none",
        "num_steps": depth,
        "topk": topk,
        "num_draft_tokens": nodes,
        "sources": list(SOURCES),
        "sampling_defaults": {name: getattr(params, name) for name in _SAMPLING}
        | {_ASKED.get(name, name): value for name, value in info.defaults.items()},
        "knows_effort": knows_effort,
        "shows_texts": info.options.ui_show_texts,
        **info.options.label,
    }


class Snapshots:
    """Takes them, one after the other."""

    def __init__(self, service: Service, learning: Learning | None = None) -> None:
        self._service, self._learning = service, learning
        self._stats: Mapping[str, Any] = {}  # the newest numbers
        self._answered = 0.0  # monotonic, when the engine gave them

    async def take(self) -> dict[str, Any] | None:
        """Returns a snapshot; None when the server is about to end."""
        engine = self._service.engine
        if engine.draining:
            return None
        try:
            self._stats = await engine.stats()
            self._answered = time.monotonic() - self._stats["age"]
            state = "busy" if self._stats["age"] > MAX_AGE else "up"
        except EngineDead:
            state = "down"
        answers = engine.observer.unfinished()
        return {
            "time": round(time.time(), 3),
            "engine": state,
            "age": round(time.monotonic() - self._answered, 3) if self._answered else None,
            **self._numbers(),
            **({} if self._learning is None else {"learning": self._learning.facts()}),
            "unfinished": len(answers),
            "requests": self._listed(answers),
        }

    def _numbers(self) -> dict[str, Any]:
        """Returns the engine's newest numbers; nothing before there are any."""
        stats, capacity = self._stats, self._service.engine.info.max_total_tokens
        if not stats:
            return {}
        free, cached = stats["free_tokens"], stats["cached_tokens"]
        return {
            "running": stats["running"],
            "waiting": stats["waiting"],
            "kv": {"capacity": capacity, "used": capacity - free - cached, "cached": cached, "free": free},
            "totals": {name: stats[name] for name in TOTALS if name in stats},
            "drafters": stats.get("drafters", {}),
            "speedup": stats.get("speedup"),
            "explain": stats.get("explain"),
        }

    def _listed(self, answers: Sequence[AnswerRecord]) -> list[dict[str, Any]]:
        now = self._service.engine.observer.clock()
        return [self._one(answer, now) for answer in answers[:MAX_REQUESTS]]

    def _one(self, answer: AnswerRecord, now: float) -> dict[str, Any]:
        """Lists a request: with texts if the server may show them, never with the id by which it could be aborted."""
        request, limits = answer.request, answer.request.limits
        found: dict[str, Any] = {
            "number": answer.number,
            "prompt_tokens": len(request.prompt_ids),
            "tokens": answer.tokens,
            "seconds": round(now - answer.arrived, 3),
            "first_token_seconds": None if answer.first is None else round(answer.first - answer.arrived, 3),
            "drafts": limits is None or limits.depth > 0,
            "grammar": request.params.grammar is not None,
        }
        if self._service.options.ui_show_texts:
            prompt = self._service.tokenizer.decode(request.prompt_ids[-_PROMPT_TOKENS:], skip_special_tokens=True)
            text = answer.answer.text if answer.answer is not None else ""
            found |= {"prompt": prompt[-MAX_TEXT:], "text": text[-MAX_TEXT:]}
        return found
