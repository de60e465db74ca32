"""Measures how good a head is, by the engine that will run it: acceptance lengths on unseen prompts.

Runs and counts are those of `draftwing bench`, so its figures are the same.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from draftwing.config.options import MODEL, SPECULATION, Options
from draftwing.config.trees import TREE
from draftwing.core import TreeShape
from draftwing.engine.benchmark import Local, Sample, record_of, timed_run
from draftwing.errors import ConfigError
from draftwing.files import load_json, write_json

logger = logging.getLogger(__name__)

MIN_SET = 20  # prompts of a set, below which its acceptance length says little
# Options of the model and of speculation change what is accepted, and so do these of other groups. Apart are those that
# a report or a record has under another name; of the head it has what it is, wherever it lies.
_MORE = ("kv_cache_dtype", "enable_deterministic_inference")
_APART = ("model", "speculative_algorithm", "speculative_draft_model_path", *TREE, "speculative_fixed_shape")


@dataclass(frozen=True)
class Trial:
    """What is measured: every set of prompts, in every shape, at every temperature."""

    shapes: Sequence[TreeShape]
    temperatures: Sequence[float]
    max_tokens: int
    concurrency: int


def evaluate(
    options: Mapping[str, Any], sets: Mapping[str, Sequence[str]], trial: Trial, report: Path
) -> list[dict[str, Any]]:
    """Measures what `options` (of an engine, with a speculative algorithm) accepts, and writes `report`, JSON.

    sets: first user turns by the name of their set. A record has bench's fields, and `positions`: of the steps whose
    first k drafts were accepted, the share in which one more was. Shapes that `report` has whole, of the same head and
    trial, are kept, so a run that was killed goes on. Raises ConfigError and CheckpointError.
    """
    if not any(sets.values()):
        raise ConfigError("there are no prompts to evaluate on: give --eval-prompts FILES")
    same = {
        "model": options.get("model", Options.model),
        "algorithm": options["speculative_algorithm"],
        "head": fingerprint(options.get("speculative_draft_model_path")),
        "max_tokens": trial.max_tokens,
        "concurrency": trial.concurrency,
        "prompts": {name: prompts_digest(prompts) for name, prompts in sets.items()},
        "options": _deciding(options),
    }
    for name, prompts in sets.items():
        if 0 < len(prompts) < MIN_SET:
            logger.warning("%s: number of prompts %d; the acceptance length of fewer than %d says little: give "
                           "more by --eval-prompts or a larger --held-out", name, len(prompts), MIN_SET)  # fmt: skip
    records = _known(report, same)
    runs = [(temperature, name) for temperature in trial.temperatures for name in sets if sets[name]]
    for shape in trial.shapes:
        done = [(r["temperature"], r["set"]) for r in records if r["shape"] == list(shape.tree)]
        if done == runs:
            continue
        # Seeds come from the engine one after the other, so a shape is measured whole to be what it would have been.
        records = [r for r in records if r["shape"] != list(shape.tree)]
        for record in _measure_shape(options, shape, runs, sets, trial):
            records.append(record)
            write_json(report, {**same, "records": records})
    return records


def _measure_shape(
    options: Mapping[str, Any],
    shape: TreeShape,
    runs: Sequence[tuple[float, str]],
    sets: Mapping[str, Sequence[str]],
    trial: Trial,
) -> Iterator[dict[str, Any]]:
    from draftwing.engine.engine import Engine  # late: it imports torch

    tree = dict(zip(TREE, shape, strict=False)) | {"speculative_fixed_shape": True}
    engine = Engine(Options.from_kwargs(**{**options, **tree}))
    target, tokenizer = Local(engine), engine.tokenizer
    encode = target.encode if tokenizer.chat_template is not None else tokenizer.encode  # a text to complete
    for temperature, name in runs:
        ids = [encode(prompt) for prompt in sets[name]]
        params = {"temperature": temperature, "ignore_eos": False, "max_new_tokens": trial.max_tokens}
        target.run(ids[:1], params, 1)  # first use of everything
        samples, seconds = timed_run(target, ids, params, trial.concurrency)
        record = record_of(target, trial.concurrency, samples, seconds)
        found = {"set": name, "shape": list(shape.tree), "temperature": temperature, **record}
        error = standard_error(samples)
        found |= {} if error is None else {"accept_length_error": error}
        logger.info("%s %s, temperature %g: acceptance length %s", name, shape.tree, temperature, _length(found, 3))
        yield found | {"positions": positions(samples, shape.depth)}
    engine.close()
    del engine, target
    gc.collect()


def positions(samples: Sequence[Sample], depth: int) -> list[float]:
    """Returns [depth]: of the steps that accepted at least k drafts, the share that accepted another; 0 of no steps."""
    steps = [0] * (depth + 1)  # that accepted exactly d
    for sample in samples:
        for accepted, count in enumerate(sample.meta.get("spec_correct_drafts_histogram", ())):
            steps[accepted] += count
    reached = [sum(steps[d:]) for d in range(depth + 1)]
    return [reached[d + 1] / reached[d] if reached[d] else 0.0 for d in range(depth)]


def standard_error(samples: Sequence[Sample]) -> float | None:
    """Returns the standard error of the acceptance length, a ratio of sums, from how prompts differ; None of fewer than
    two with steps."""
    counts = [(s.meta.get("spec_num_correct_drafts", 0), s.meta.get("spec_verify_ct", 0)) for s in samples]
    counts = [(correct, steps) for correct, steps in counts if steps]
    if len(counts) < 2:
        return None
    total = sum(steps for _, steps in counts)
    mean = sum(correct for correct, _ in counts) / total
    squares = sum((correct - mean * steps) ** 2 for correct, steps in counts)
    return math.sqrt(squares * len(counts) / (len(counts) - 1)) / total


def _length(record: Mapping[str, Any], digits: int = 2) -> str:
    """2.32 ± 0.05"""
    error = record.get("accept_length_error")
    return f"{record['accept_length']:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def summary(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table in Markdown: a row for each set and temperature, a column for each shape. Acceptance lengths have
    their standard errors where these are known."""
    shapes = list(dict.fromkeys(tuple(record["shape"]) for record in records))
    runs = list(dict.fromkeys((record["set"], record["temperature"]) for record in records))
    found = {(r["set"], r["temperature"], tuple(r["shape"])): _length(r) for r in records}
    head = ["prompts", "temperature", *(f"({', '.join(map(str, shape))})" for shape in shapes)]
    lines = [head, ["---"] * len(head)]
    for name, temperature in runs:
        lines.append([name, f"{temperature:g}", *(found.get((name, temperature, shape), "") for shape in shapes)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def fingerprint(folder: str | Path | None) -> str | None:
    """Returns a hash of a head's config and weights; None without a folder."""
    if folder is None:
        return None
    digest = sha256()
    config = load_json(Path(folder) / "config.json")
    config.pop("draftwing", None)  # how it is best run is not what it is
    digest.update(json.dumps(config, sort_keys=True).encode())
    for file in sorted(Path(folder).glob("*")):
        if file.suffix in (".safetensors", ".bin"):
            digest.update(file.name.encode())
            with file.open("rb") as content:
                while block := content.read(1 << 20):
                    digest.update(block)
    return digest.hexdigest()[:16]


def prompts_digest(prompts: Sequence[str]) -> str:
    return f"{len(prompts)} {sha256(json.dumps(list(prompts)).encode()).hexdigest()[:16]}"


def _deciding(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that what is accepted depends on, where they are not as they are by default."""
    asked = Options.from_kwargs(**options)
    names = (
        spec.name
        for spec in dataclasses.fields(Options)
        if spec.name not in _APART and (spec.metadata["group"] in (MODEL, SPECULATION) or spec.name in _MORE)
    )
    return {name: getattr(asked, name) for name in names if getattr(asked, name) != getattr(Options, name)}


def _known(report: Path, same: Mapping[str, Any]) -> list[dict[str, Any]]:
    try:
        found = load_json(report)
        return list(found["records"]) if all(found.get(key) == value for key, value in same.items()) else []
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("%s cannot be read (%s); everything is measured again", report, error)
        return []
