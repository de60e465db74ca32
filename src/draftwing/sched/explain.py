"""Says in words why a policy drafts what it drafts, or nothing: for the log, `/server_info` and `draftwing bench`."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from draftwing.config.trees import LOOKUP_ALONE, MODEL_ALONE, PLAIN, TreeShape

if TYPE_CHECKING:
    from draftwing.sched.scheduler import Scheduler

log = logging.getLogger("draftwing")
LOG_SECONDS, REPORT_SECONDS = 10.0, 0.5  # between two lines, and two reports
Entry = Mapping[str, Any]  # of one option, as `ShapePolicy.explain` gives them


def described(shape: TreeShape) -> str:
    """Returns an option in words."""
    if shape == PLAIN:
        return "no drafts"
    who = {MODEL_ALONE: " of the model alone", LOOKUP_ALONE: " of the lookup alone"}.get(shape.proposer, "")
    kind = f"chains of {shape.depth}" if shape.topk == 1 else f"trees of {shape.nodes} tokens, {shape.depth} deep"
    part = f", {shape.verified} of {shape.nodes} verified" if shape.verified else ""
    return kind + who + part


def report(entries: Sequence[Entry], requests: int, context: int, suspended: bool = False) -> dict[str, Any]:
    """Returns plain data: the load, a `summary` in words, and the `options` with the reason for or against each.

    requests: of the batch.  context: tokens in the KV of all of them.  suspended: whether prompts wait at every step,
    so that nothing is drafted which takes longer.
    """
    chosen = next((entry for entry in entries if entry["chosen"]), None)
    return {
        "requests": requests,
        "context_tokens": context,
        "suspended": suspended,
        "summary": summary(entries, requests, suspended),
        "options": [_option(entry, chosen) for entry in entries],
    }


def summary(entries: Sequence[Entry], requests: int, suspended: bool = False) -> str:
    """Returns one sentence on what is drafted and why."""
    if not requests:
        return "no request is being answered"
    plain = next((entry for entry in entries if entry["shape"] == PLAIN), None)
    drafts = [entry for entry in entries if entry["shape"] != PLAIN]
    chosen = next((entry for entry in entries if entry["chosen"]), None)
    with_rate = [entry for entry in drafts if entry["rate"] is not None]
    if plain is None or chosen is None or not drafts:
        return "nothing is drafted: there is no drafter"
    if plain["rate"] is None or chosen["rate"] is None or not with_rate:
        if chosen["shape"] != PLAIN:
            return f"{described(chosen['shape'])} are drafted, whatever they cost"
        return "nothing is drafted: there is nothing to propose, or drafts are too large for so many requests"
    best = chosen if chosen["shape"] != PLAIN else max(with_rate, key=lambda entry: entry["rate"])
    if not best["gain"] and chosen["shape"] == PLAIN:
        return f"nothing is drafted: for none of {number_of(requests)} is there anything to propose"
    cost, brings = best["price_ms"] / plain["price_ms"], (requests + best["gain"]) / requests
    shape = best["shape"]
    if chosen["shape"] == PLAIN and best["late"]:
        why = "prompts wait at every step" if suspended else "a prompt was prefilled right before this step"
        return f"nothing is drafted: {why}, and drafts would make requests that are answered wait longer"
    what = (
        f"verifying {shape.queries} nodes a request at {number_of(requests)} costs {cost:.2f}x and brings {brings:.2f}x"
    )
    if chosen["shape"] != PLAIN:
        tried = ", to learn what they bring" if chosen["tried"] else ""
        return f"{described(shape)} are drafted{tried}: {what}"
    return f"nothing is drafted: {what}"


def table(report: Mapping[str, Any]) -> list[str]:
    """Returns lines of text for a `report`, one for each option, aligned."""
    rows = [("", "ms a step", "drafts accepted", "tokens/s")]
    for option in report["options"]:
        accepted = option["expected_accepted_drafts"]
        rows.append(
            (
                ("> " if option["chosen"] else "  ") + option["option"],
                _number(option["price_ms"], 2),
                _number(None if accepted is None else accepted / max(report["requests"], 1), 2),
                _number(option["expected_tokens_per_second"], 0),
            )
        )
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns rows as lines with columns of equal width, the first one's texts on the left, the others' on the
    right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join((row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:]))).rstrip() for row in rows]


def _option(entry: Entry, chosen: Entry | None) -> dict[str, Any]:
    shape = entry["shape"]
    steps, topk, nodes = shape.tree
    return {
        "option": described(shape),
        "num_steps": steps,
        "topk": topk,
        "num_draft_tokens": nodes,
        "verified": shape.queries,
        "price_ms": entry["price_ms"],
        "expected_accepted_drafts": entry["gain"],
        "expected_tokens_per_second": entry["rate"],
        "chosen": entry["chosen"],
        "tried": entry["tried"],
        "why": _why(entry, chosen),
    }


def _why(entry: Entry, chosen: Entry | None) -> str:
    if entry["chosen"]:
        return "tried, to learn what it brings" if entry["tried"] else "chosen"
    if entry["late"]:
        return "longer than requests that have waited for a prompt may wait"
    if entry["rate"] is None:
        return "too large for so many requests, or nothing is known of its cost"
    if chosen is None or chosen["rate"] is None:
        return "not chosen"
    return f"{100 * (entry['rate'] / chosen['rate'] - 1):+.1f}% tokens per second"


def number_of(count: int, noun: str = "request") -> str:
    """Returns a number of requests, or of others, in words."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


class Explainer:
    """Looks at a running engine now and then, in the engine's own thread.

    now: the newest report; None before the first.  busiest: the newest of those with the most requests.
    """

    def __init__(self, sched: Scheduler, logs: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """logs: whether there is a line in the log."""
        self._sched, self._logs, self._clock = sched, logs, clock
        self._reported = self._logged = -math.inf
        self.now: dict[str, Any] | None = None
        self.busiest: dict[str, Any] | None = None

    def look(self) -> None:
        """Looks whether the choice has changed; to be called after every step."""
        at = self._clock()
        if at < self._reported + REPORT_SECONDS:
            return
        context, entries = self._sched.explain()
        requests = len(context.confidences)
        if not requests:
            return
        self._reported = at
        self.now = report(entries, requests, context.kv_tokens, self._sched.choice.suspended)
        if self.busiest is None or requests >= self.busiest["requests"]:
            self.busiest = self.now
        if self._logs and at >= self._logged + LOG_SECONDS:
            self._logged = at
            log.info("drafts: %s", self.now["summary"])

    def forget(self) -> None:
        """Begins anew, for another load."""
        self.busiest, self._reported = None, -math.inf

    def rest(self) -> None:
        """Notes that there is nothing to do."""
        self.now = report([], 0, 0)
