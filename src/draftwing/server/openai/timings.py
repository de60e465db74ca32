"""How a finished answer was made: times and drafts, in the words of the peers whose benchmark clients read them."""

from __future__ import annotations

from typing import Any

from draftwing.server.telemetry.observer import AnswerRecord
from draftwing.text.answer import Answer


def timings_and_metrics(answer: Answer, record: AnswerRecord, speculates: bool) -> dict[str, Any]:
    """Returns `timings` as llama.cpp has it, and `metrics.speculative_decoding` as vLLM has it. Without the first for
    an answer that ended before its first token, and without the second where nothing was verified."""
    found: dict[str, Any] = {}
    if record.first is not None:
        found["timings"] = _timings(answer, record, speculates)
    if speculates and (drafted := _drafted(answer.meta)) is not None:
        found["metrics"] = {"speculative_decoding": drafted}
    return found


def durations(answer: Answer, record: AnswerRecord) -> tuple[float, float]:
    """Returns seconds of a finished answer that its prompt took, and from its first token to the last: what the engine
    took before the first one, but for waiting, is the prompt's. Zeros where there is none."""
    if record.first is None or record.ended is None:
        return 0.0, 0.0
    decode, meta = record.ended - record.first, answer.meta
    return max(meta.get("e2e_latency", 0.0) - meta.get("queue_time", 0.0) - decode, 0.0), decode


def _timings(answer: Answer, record: AnswerRecord, speculates: bool) -> dict[str, Any]:
    meta, (prefill, decode) = answer.meta, durations(answer, record)
    cached = meta.get("cached_tokens", 0)
    found = {"cache_n": cached}
    found |= _rates("prompt", len(answer.request.prompt_ids) - cached, prefill)
    found |= _rates("predicted", len(answer.token_ids), decode)
    if speculates:
        found["draft_n"] = meta.get("spec_num_proposed_drafts", 0)
        found["draft_n_accepted"] = meta.get("spec_num_correct_drafts", 0)
    return found


def _rates(name: str, tokens: int, seconds: float) -> dict[str, Any]:
    return {
        f"{name}_n": tokens,
        f"{name}_ms": 1e3 * seconds,
        f"{name}_per_token_ms": 1e3 * seconds / tokens if tokens else 0.0,
        f"{name}_per_second": tokens / seconds if seconds else 0.0,
    }


def _drafted(meta: dict[str, Any]) -> dict[str, Any] | None:
    histogram: list[int] = meta.get("spec_correct_drafts_histogram", [])
    steps = sum(histogram)
    if not steps:
        return None
    accepted, proposed = meta["spec_num_correct_drafts"], meta["spec_num_proposed_drafts"]
    return {
        "mean_acceptance_length": 1 + accepted / steps,
        "draft_acceptance_rate": accepted / proposed if proposed else 0.0,
        "acceptance_histogram": histogram,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": proposed,
        "num_spec_steps": steps,
        "num_spec_tokens": None,  # drafts of a step: no fixed number
    }
