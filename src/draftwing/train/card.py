"""Writes the card of a trained head, README.md next to its weights: what it is, how it was made, how good it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import draftwing
from draftwing.config.drafters import DrafterSpec
from draftwing.files import load_json, write_text
from draftwing.models.config import ModelConfig
from draftwing.train.evaluate import summary
from draftwing.train.run import Run
from draftwing.train.settings import Settings


def write_card(run: Run, target: ModelConfig, records: Sequence[Mapping[str, Any]]) -> Path:
    path = run.out / "head" / "README.md"
    write_text(path, card(run, target, records))
    return path


def card(run: Run, target: ModelConfig, records: Sequence[Mapping[str, Any]]) -> str:
    """Returns Markdown. records: of `evaluate`."""
    settings, model = run.settings, run.options.get("model", "smollm2")
    algorithm = settings.drafter.name
    flags = f"--model {model} --speculative-algorithm {algorithm} --speculative-draft-model-path FOLDER"
    return "\n\n".join(
        [
            f"# {settings.training.title} for {model}",
            "Drafts for its target in speculative decoding. The text stays the target's own, only sooner.",
            f"```\ndraftwing serve {flags}\n```",
            *_note(settings.drafter, target),
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


def _note(drafter: DrafterSpec, target: ModelConfig) -> list[str]:
    if drafter.heads[0] != "mtp" or target.architecture == "MiMoForCausalLM":
        return []
    return [
        f"The layer has MiMo's tensor names, for a target that is a {target.architecture}. Only draftwing loads this "
        "layout."
    ]


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
    if greedy in (0, count):
        return f": {count} answers at temperature {0 if greedy else warm}"
    return f": {count} answers, {greedy} of them ({greedy / count:.0%}) at temperature 0, the others at {warm}"


def _training(run: Run) -> str:
    report, vocabulary = _json(run.out / "fit.json"), _json(run.out / "vocabulary.json")
    lines = [f"Seed {run.settings.seed}, draftwing {draftwing.__version__}."]
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
