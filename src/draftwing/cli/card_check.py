"""Runs `draftwing bench --check-card`: says whether a head accepts on this machine what was measured when it was
made."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from draftwing.config.trees import TreeShape
from draftwing.errors import CheckpointError, ConfigError
from draftwing.files import load_json
from draftwing.train.data import Skipped, first_turns
from draftwing.train.evaluate import Trial, evaluate, prompts_digest

TOLERANCE = 0.03  # relative: a length that is further from the one in the card is another one
Emit = Callable[[dict[str, Any]], None]


def check_card(head: Path, options: Mapping[str, Any], prompts: str | None, emit: Emit) -> None:
    """Measures the greedy acceptance length again, in the first tree of the report, on the prompts of the report.

    head: folder of a head, with the eval.json of its training in it or next to it.  options: of the engine.
    prompts: the file of one of the report's sets.

    Raises CheckpointError for an acceptance length that is not within `TOLERANCE` of the report's, and ConfigError
    for a report or prompts that nothing can be compared with.
    """
    report = read_report(head)
    if prompts is None:
        raise ConfigError(f"--check-card needs --prompts, the file of one of the sets {', '.join(report['prompts'])}")
    texts = first_turns(prompts, Skipped())
    name, texts = _known_set(report, texts, prompts)
    greedy = [r for r in report["records"] if r["set"] == name and r["temperature"] == 0]
    if not greedy:
        raise ConfigError(f"the report of {head} has no greedy figures for {name}")
    expected = greedy[0]
    shape = TreeShape(*expected["shape"])
    trial = Trial([shape], (0.0,), report["max_tokens"], report["concurrency"])
    own = {"speculative_algorithm": report["algorithm"], "speculative_draft_model_path": str(head)}
    with tempfile.TemporaryDirectory() as folder:
        (found,) = evaluate({"random_seed": 0, **options, **own}, {name: texts}, trial, Path(folder) / "eval.json")
    emit(found)
    wanted, got = expected["accept_length"], found["accept_length"]
    line = f"{name}, {shape.tree}: expected an acceptance length of {wanted:.3f}, found {got:.3f}"
    if not math.isclose(got, wanted, rel_tol=TOLERANCE):
        raise CheckpointError(f"{head}: {line}, more than {TOLERANCE:.0%} away")
    print(f"{line}, within {TOLERANCE:.0%}")


def read_report(head: Path) -> dict[str, Any]:
    """Reads the report of `draftwing train eval` on this head: eval.json in its folder or, as training leaves it,
    next to it. Raises ConfigError."""
    file = next((path for path in (head / "eval.json", head.parent / "eval.json") if path.is_file()), None)
    if file is None:
        raise ConfigError(f"{head} has no eval.json, in it or next to it: `draftwing train eval` writes one")
    try:
        report: dict[str, Any] = load_json(file)
        keys = {"algorithm", "prompts", "max_tokens", "concurrency", "records"}
        missing = keys - report.keys()
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    if missing:
        raise ConfigError(f"{file}: expected a report of `draftwing train eval`, found none of {sorted(missing)}")
    return report


def _known_set(report: Mapping[str, Any], texts: list[str], file: str) -> tuple[str, list[str]]:
    """Returns the set of the report that these prompts, or the first of them, are; with its prompts."""
    for name, known in report["prompts"].items():
        part = texts[: int(known.split()[0])]
        if prompts_digest(part) == known:
            return name, part
    raise ConfigError(f"--prompts: {file} holds none of the sets {', '.join(report['prompts'])} as they were measured")
