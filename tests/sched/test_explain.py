"""What a user reads of a choice."""

from __future__ import annotations

import json
from typing import Any

from draftwing.config.trees import LOOKUP_ALONE, PLAIN, TreeShape
from draftwing.sched.explain import described, report, summary, table

TREE, PART, CHAIN = TreeShape(4, 2, 8), TreeShape(4, 2, 8, 2), TreeShape(3, 1, 4)


def entry(
    shape: TreeShape, price_ms: float | None, gain: float | None, batch: int, chosen: bool, **more: bool
) -> dict[str, Any]:
    rate = None if price_ms is None or gain is None else 1000 * (batch + gain) / price_ms
    return {"shape": shape, "price_ms": price_ms, "gain": gain, "rate": rate, "chosen": chosen, "tried": False,
            "late": False} | more  # fmt: skip


def options(batch: int, gains: tuple[float, float], chosen: int) -> list[dict[str, Any]]:
    """Of a whole tree, a part of it, and no drafts."""
    found = [entry(TREE, 20.0, gains[0], batch, False), entry(PART, 13.1, gains[1], batch, False),
             entry(PLAIN, 10.0, 0.0, batch, False)]  # fmt: skip
    found[chosen]["chosen"] = True
    return found


def test_why_nothing_is_drafted() -> None:
    text = summary(options(64, (32.0, 0.18 * 64), 2), 64)
    assert text == (
        "nothing is drafted: verifying 2 nodes a request at 64 requests costs 1.31x and brings 1.18x"
    )  # the best of those that draft
    nothing = summary(options(3, (0.0, 0.0), 2), 3)
    assert nothing == "nothing is drafted: for none of 3 requests is there anything to propose"
    assert "no request" in summary(options(1, (0.0, 0.0), 2), 0)
    assert "no drafter" in summary([entry(PLAIN, None, None, 1, True)], 1)


def test_why_something_is_drafted() -> None:
    text = summary(options(1, (2.5, 0.9), 0), 1)
    assert text.startswith("trees of 8 tokens, 4 deep are drafted: ") and "costs 2.00x and brings 3.50x" in text
    assert "at 1 request costs" in text


def test_a_try_is_called_one() -> None:
    found = options(1, (0.2, 0.1), 0)
    found[0]["tried"] = True
    assert "to learn what they bring" in summary(found, 1)
    assert "to learn" in report(found, 1, 10)["options"][0]["why"]


def test_drafts_that_would_make_others_wait() -> None:
    found = options(4, (20.0, 9.0), 2)
    found[0]["late"] = found[1]["late"] = True
    assert "right before this step" in summary(found, 4) and "prompts wait at every step" in summary(found, 4, True)
    seen = report(found, 4, 10, True)
    assert seen["suspended"] and "wait" in seen["options"][0]["why"] and seen["options"][2]["why"] == "chosen"


def test_what_has_no_price() -> None:
    fixed = [entry(CHAIN, None, None, 2, True), entry(PLAIN, None, None, 2, False)]
    assert summary(fixed, 2) == "chains of 3 are drafted, whatever they cost"
    fixed[0]["chosen"], fixed[1]["chosen"] = False, True
    assert summary(fixed, 2).startswith("nothing is drafted")
    seen = report(fixed, 2, 10)["options"]
    assert "nothing is known of its cost" in seen[0]["why"] and seen[1]["why"] == "chosen"


def test_what_runs_in_any_case() -> None:
    """A predicted output, of which no confidence says how good it is."""
    found = options(2, (0.0, 0.0), 0)
    assert summary(found, 2).startswith("trees of 8 tokens, 4 deep are drafted: ")
    found[0]["rate"] = found[0]["price_ms"] = found[0]["gain"] = None
    assert summary(found, 2) == "trees of 8 tokens, 4 deep are drafted, whatever they cost"


def test_a_report_is_plain_data() -> None:
    found = report(options(64, (32.0, 11.52), 2), 64, 9000)
    assert json.loads(json.dumps(found)) == found
    assert (found["requests"], found["context_tokens"]) == (64, 9000) and found["summary"].startswith("nothing")
    whole, part, plain = found["options"]
    assert (whole["num_steps"], whole["topk"], whole["num_draft_tokens"], whole["verified"]) == (4, 2, 8, 8)
    assert part["verified"] == 2 and part["why"] == "-9.9% tokens per second"
    assert plain["chosen"] and plain["expected_tokens_per_second"] == 6400.0


def test_options_in_words() -> None:
    assert described(PLAIN) == "no drafts" and described(CHAIN) == "chains of 3"
    assert described(PART) == "trees of 8 tokens, 4 deep, 2 of 8 verified"
    assert described(TreeShape(3, 1, 4, 0, LOOKUP_ALONE)) == "chains of 3 of the lookup alone"
    lines = table(report(options(2, (2.0, 1.0), 1), 2, 0))
    assert len({len(line) for line in lines}) == 1 and [line[0] for line in lines] == [" ", " ", ">", " "]
    assert lines[1].split()[-3:] == ["20.00", "1.00", "200"]
