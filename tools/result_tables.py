"""Writes the tables of README.md and the pages that come from benchmarks/results/*.json, or from the code.

    python tools/result_tables.py           # writes the pages that are not current
    python tools/result_tables.py --check   # names them, and exits with 1 if there are any

A page has `<!-- results: NAME -->` and `<!-- end -->`; what stands between is written here: the table of NAME.json, and
under it what was measured, when, on what and by which command. `<!-- results: NAME headline -->` has the rows of the
result's "headline" alone. `<!-- default trees -->` is what the drafters and the bundled heads ask for, `<!-- published
configs -->` what tests/models/published is read as, which tests/models/test_published.py sees to.

A result is a JSON object:

- date, commit (of draftwing), hardware, software (versions), model, workload, commands (none: not recorded)
- columns: their titles, with units; rows: lists of as many numbers, texts or nulls
- headline: first cells of the rows that stand in the README
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PUBLISHED = ROOT / "tests" / "models" / "published"
BLOCK = re.compile(
    r"(<!-- (?:results: (?P<name>\w+)(?P<headline> headline)?|(?P<code>default trees|published configs)) -->\n)"
    r".*?(<!-- end -->)",
    re.DOTALL,
)
WIDTH = 120


def cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else str(value)


def table(columns: list[str], rows: list[list[Any]]) -> str:
    lines = ["|" + "".join(f" {cell(value)} |" for value in row).replace("  ", " ") for row in [columns, *rows]]
    return "\n".join([lines[0], "|" + "---|" * len(columns), *lines[1:]]) + "\n"


def result_table(result: dict[str, Any], headline: bool) -> str:
    rows = [row for row in result["rows"] if not headline or row[0] in result["headline"]]
    facts = {
        "Measured": "; ".join([f"{result['date']}, {result['hardware']}", *result["software"]]),
        "Model": result["model"],
        "Work": result["workload"],
        "Command": "; ".join(f"`{command}`" for command in result["commands"]) or "not recorded",
    }
    if headline:
        del facts["Command"]
    lines = [
        textwrap.fill(
            f"- {name}: {fact}", WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        for name, fact in facts.items()
    ]
    return f"\n{table(result['columns'], rows)}\n" + "\n".join(lines) + "\n\n"


def shown(tree: Sequence[int]) -> str:
    return "({}, {}, {})".format(*tree)


def default_trees() -> str:
    """The largest trees if nothing is asked for, as (steps, topk, draft tokens)."""
    sys.path.insert(0, str(ROOT / "src"))
    from draftwing.config.drafters import DRAFTERS, HEADS

    rows = []
    for spec in DRAFTERS[1:]:
        rows.append([f"`{spec.name}`", shown(spec.llama_tree or spec.tree), shown(spec.tree)])
    for path in sorted(HEADS.glob("*/*/config.json")):
        shapes = json.loads(path.read_text(encoding="utf8")).get("draftwing", {}).get("shapes", {})
        model, kind = path.parts[-3:-1]
        rows += [[f"`{kind.upper()}` of `{model}`, {device}", shown(shape), None] for device, shape in shapes.items()]
    return "\n" + table(["drafter", "target is a Llama", "other targets"], rows) + "\n"


def published_configs() -> str:
    """Which models' configs are served, by architecture and by whether they are quantised, and which are refused for
    what."""
    sys.path.insert(0, str(ROOT / "src"))
    from draftwing.models.families.unserved import unserved_part

    index = json.loads((PUBLISHED / "index.json").read_text(encoding="utf8"))
    served: dict[str, tuple[list[str], list[str]]] = {}
    refused: dict[str, list[str]] = {}
    for name, row in index.items():
        config = json.loads((PUBLISHED / f"{name}.json").read_text(encoding="utf8"))
        (architecture,) = config["architectures"]
        if row.get("missing") is None:
            served.setdefault(architecture, ([], []))["stored" in row].append(row["models"])
        else:
            missing = row["missing"] or unserved_part([architecture], config["model_type"])
            refused.setdefault(missing, []).append(row["models"])
    lines = [[f"`{one}`", *map("; ".join, models)] for one, models in served.items()]
    count, seen = sum(map(len, refused.values())), sum(row["from"].startswith("seen") for row in index.values())
    return (
        f"\nOf {len(index)} configs {seen} were seen; others are written from transformers' classes and what is known "
        f"of them.\n\n{len(index) - count} are served:\n\n"
        + table(["`architectures`", "models", "quantised"], lines)
        + f"\n{count} are refused:\n\n"
        + table(["what is missing", "models"], [[part, "; ".join(refused[part])] for part in sorted(refused)])
        + "\n"
    )


def written(page: str) -> str:
    """The text of a page with its tables as they are to be."""

    def block(match: re.Match[str]) -> str:
        if match["code"]:
            made = published_configs() if match["code"] == "published configs" else default_trees()
            return match[1] + made + match[5]
        result = json.loads((RESULTS / f"{match['name']}.json").read_text(encoding="utf8"))
        return match[1] + result_table(result, match["headline"] is not None) + match[5]

    return BLOCK.sub(block, page)


def main() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    texts = {page: page.read_text(encoding="utf8") for page in pages}
    stale = [page for page, text in texts.items() if written(text) != text]
    for page in stale:
        print(page.relative_to(ROOT))
        if "--check" not in sys.argv:
            page.write_text(written(texts[page]), encoding="utf8")
    sys.exit("--check" in sys.argv and bool(stale))


if __name__ == "__main__":
    main()
