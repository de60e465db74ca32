"""When a request ends, and what its last output reports of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from draftwing.errors import RequestError
from draftwing.sched.req import Req


def append_until_stop(req: Req, new: Sequence[int]) -> tuple[list[int], dict[str, Any] | None]:
    """Adds tokens up to the first that ends the request. Returns those, and why it ends; None if it goes on."""
    kept: list[int] = []
    for token in new:
        req.tokens.append(token)
        kept.append(token)
        reason = _stop_reason(req, token)
        if reason is None:
            continue
        if reason["type"] == "abort":  # the newest token is not one that the request allows
            req.tokens.pop()
            kept.pop()
        return kept, reason
    return kept, None


def _stop_reason(req: Req, token: int) -> dict[str, Any] | None:
    """Returns why the request ends with `token`, its newest; None if it goes on."""
    found = req.scanner.push(token) if req.scanner is not None else None
    if req.scanner is not None and req.scanner.failed is not None:
        return {"type": "abort", "message": req.scanner.failed}
    if token in req.stop_ids:
        return {"type": "stop", "matched": token}
    complete = False
    if req.grammar is not None:
        try:
            complete = req.follow(token)
        except RequestError as error:
            return {"type": "abort", "message": str(error)}
    if found is None and not complete and len(req.tokens) < req.max_total:
        return None
    if found is None and req.scanner is not None:
        # Text that is certain only now that nothing follows may hold a stop string.
        found = req.scanner.finish()
    if found is not None or complete:
        return {"type": "stop", "matched": found}
    return {"type": "length", "length": req.completion_tokens}


def finish_meta(req: Req, credited: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Returns the metadata of a request that has ended. credited: whom a draft counts for, by its source."""
    correct = sum(drafts * times for drafts, times in enumerate(req.accepted))
    return {
        "prompt_tokens": req.prompt_len,
        "completion_tokens": req.completion_tokens,
        "cached_tokens": req.cached_tokens,
        "num_retractions": req.retractions,
        "e2e_latency": time.monotonic() - req.created,
        "queue_time": (req.admitted or time.monotonic()) - req.created,
        "spec_verify_ct": req.verify_steps,
        "spec_num_proposed_drafts": req.proposed,
        "spec_num_correct_drafts": correct,
        "spec_accept_length": 1 + correct / req.verify_steps if req.verify_steps else 1.0,
        "spec_accept_rate": correct / req.proposed if req.proposed else 0.0,
        "spec_correct_drafts_histogram": list(req.accepted),
        "spec_drafters": _by_drafter(req, credited),
    }


def _by_drafter(req: Req, credited: Sequence[Sequence[str]]) -> dict[str, dict[str, int]]:
    """Returns what each drafter has proposed, and what of it was accepted; drafts of two drafters count for both."""
    found: dict[str, dict[str, int]] = {}
    for source, names in enumerate(credited):
        for name in names if source or req.proposed_by[0] else ():
            counts = found.setdefault(name, {"proposed": 0, "accepted": 0})
            counts["proposed"] += req.proposed_by[source]
            counts["accepted"] += req.accepted_by[source]
    return found
