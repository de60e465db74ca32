"""Measures how good a head is, by the engine that will run it: acceptance lengths on unseen prompts. Writes the head's
card, README.md next to its weights: what it is, how it was made, how good it is.

Runs and counts are those of `draftwing bench`, so its figures are the same."""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

from draftwing.config.option_fields import MODEL, SPECULATION
from draftwing.config.options import Options
from draftwing.config.trees import TREE, TreeShape
from draftwing.engine.benchmark import Local, Sample, record_of, timed_run
from draftwing.errors import ConfigError
from draftwing.files import load_json, write_json, write_text
from draftwing.models.config import ModelConfig
from draftwing.train.settings import Run, Settings
from draftwing.version import __version__

logger = logging.getLogger(__name__)

MIN_SET = 20  # prompts of a set, below which its acceptance length says little
# Options of the model and of speculation change what is accepted, and so do these of other groups. Apart are those that
# a report or a record has under another name; of the head it has what it is, wherever it lies.
_MORE = ("kv_cache_dtype", "fast_numerics")
_APART = ("model", "speculative_algorithm", "speculative_draft_model_path", *TREE, "speculative_fixed_shape")


@dataclass(frozen=True)
class Trial:
    """What is measured: every set of prompts, in every shape, at every temperature."""

    shapes: Sequence[TreeShape]
    temperatures: Sequence[float]
    max_tokens: int
    concurrency: int
    adapter: str | None = None  # the name of one of the engine's, which answers


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
        "adapter": trial.adapter,
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
    target, tokenizer = Local(engine, trial.adapter), engine.tokenizer
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
                file_digest(content, lambda: digest)
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


def write_card(run: Run, target: ModelConfig, records: Sequence[Mapping[str, Any]]) -> None:
    write_text(run.out / "head" / "README.md", card(run, target, records))


def card(run: Run, target: ModelConfig, records: Sequence[Mapping[str, Any]]) -> str:
    """Returns Markdown. records: of `evaluate`."""
    settings, model = run.settings, run.options.get("model", "smollm2")
    algorithm = settings.drafter.name
    flags = f"--model {model} --speculative-algorithm {algorithm} --speculative-draft-model-path FOLDER"
    if settings.adapter is not None:
        flags += f" --lora-modules {settings.adapter}"
    note = ""
    if settings.drafter.heads[0] == "mtp" and target.family.predicts != "mtp_layers":
        note = f"The layer has MiMo's tensor names, for a target that is a {target.architecture}."
        note += " Only draftwing loads this layout."
    return "\n\n".join(
        [
            f"# {settings.training.title} for {model}",
            "Drafts for its target in speculative decoding. The text stays the target's own, only sooner.",
            f"```\ndraftwing serve {flags}\n```",
            *([note] if note else []),
            "## Acceptance",
            "Acceptance length ± standard error: mean tokens per verification, the target's own token included. "
            f"Measured by the engine on first turns, {settings.eval_tokens} tokens an answer. Trees are (steps, topk, "
            "draft tokens).",
            summary(records),
            _positions(records),
            "## Data",
            _data(run),
            "## Training",
            _training(run),
        ]
    )


def _positions(records: Sequence[Mapping[str, Any]]) -> str:
    """Shares of the deepest tree, greedy."""
    greedy = [record for record in records if record["temperature"] == 0] or list(records)
    if not greedy:
        return ""
    deepest = max(record["shape"][0] for record in greedy)
    lines = ["Share of drafts accepted at each position, of the steps in which all before it were accepted:", ""]
    for record in greedy:
        if record["shape"][0] == deepest:
            shares = ", ".join(f"{share:.2f}" for share in record["positions"])
            lines.append(f"- {record['set']} ({', '.join(map(str, record['shape']))}): {shares}")
    return "\n".join(lines)


def _data(run: Run) -> str:
    settings, report = run.settings, _json(run.out / "data.json") or _json(run.data / "data.json")
    used = _json(run.out / "fit.json").get("used") or report  # older folders have no counts of what was used
    licences = [f"- {text}" for text in settings.licence] or ["- not stated by who trained it"]
    sources = "Sources and licences:\n\n" + "\n".join(licences)
    if not settings.trains:
        return f"That of the heads it is made of (see Training).\n\n{sources}"
    lines = [f"- {Path(file).name}" for file in (*settings.prompts, *settings.conversations)]
    answered = "Prompts were answered by the target itself" if settings.prompts or settings.regenerate else ""
    if answered:
        answered += f"{_answers(used, settings)}."
    counts = f"{used.get('prompts', 0)} prompts and {used.get('conversations', 0)} conversations were used."
    dropped = "; ".join(f"{count} {reason}" for reason, count in report.get("skipped", {}).items())
    if dropped:
        counts += f" Left out: {dropped}."
    return "\n\n".join(["\n".join(lines), f"{answered} {counts}".strip(), sources])


def _answers(used: Mapping[str, Any], settings: Settings) -> str:
    """Says how many answers were drawn how. The share that was asked for is of prompts, whose further answers are never
    greedy."""
    count, greedy = used.get("answers", 0), used.get("greedy", 0)
    if not count:
        return ""
    low, high = min(settings.temperatures), max(settings.temperatures)
    warm = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    if settings.default_share:
        warm += f", {settings.default_share:.0%} of these by the model's own default sampling"
    if greedy in (0, count):
        return f": {count} answers at temperature {0 if greedy else warm}"
    return f": {count} answers, {greedy} of them ({greedy / count:.0%}) at temperature 0, the others at {warm}"


def _training(run: Run) -> str:
    report, vocabulary = _json(run.out / "fit.json"), _json(run.out / "vocabulary.json")
    lines = [f"Seed {run.settings.seed}, draftwing {__version__}."]
    if not run.settings.trains:
        lines.append(f"Not trained any further: the mean of {', '.join(run.settings.init_head)}.")
    elif report and report["steps"]:
        lines.append(f"{report['steps']} steps over {report['tokens']} tokens in {report['seconds']:.0f} s.")
    if run.settings.training.aux_hidden_states and vocabulary:
        lines.append(f"Draft vocabulary: {len(vocabulary['ids'])} tokens, {vocabulary['coverage']:.2%} of the answers.")
    return " ".join(lines) + f"\n\n```\n{run.command()}\n```\n"


def _json(path: Path) -> dict[str, Any]:
    try:
        found = load_json(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
