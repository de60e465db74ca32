"""The table of aliases, and the heads of the hub that draft for them if nothing else is asked for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from draftwing.config.aliases import ALIASES, HubModel
from draftwing.config.drafters import head_drafter
from draftwing.config.options import Options

HEAD, DFLASH = ALIASES["qwen3-8b"].heads["eagle3"], ALIASES["qwen3-8b"].heads["dflash"]


def drafting(**given: Any) -> tuple[Any, ...]:
    options = Options.from_kwargs(**given).resolve()
    assert options.resolve() == options
    return options.speculative_algorithm, options.speculative_draft_model_path, options.speculative_draft_model_revision


def test_entries_are_repositories_at_commits() -> None:
    for name, alias in ALIASES.items():
        heads = [alias.hub, *alias.heads.values()]
        for found in filter(None, heads):
            assert isinstance(found, HubModel) and re.fullmatch(r"[\w.-]+/[\w.-]+", found.repo)
            assert found.commit is None or re.fullmatch(r"[0-9a-f]{40}", found.commit)
        assert name == name.lower() and "/" not in name and alias.licence
        assert all(head_drafter(kind).draft_model for kind in alias.heads)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"model": "qwen3-8b"}, ("EAGLE3", *(HEAD or ()))),
        ({"model": "qwen3-8b", "speculative_algorithm": "DFLASH"}, ("DFLASH", *(DFLASH or ()))),
        ({"model": "qwen3-8b", "speculative_algorithm": "EAGLE3+NGRAM"}, ("EAGLE3+NGRAM", *(HEAD or ()))),
        (
            {"model": "qwen3-8b", "speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "mine"},
            ("EAGLE3", "mine", None),
        ),
        ({"model": "qwen3-8b", "speculative_algorithm": "NGRAM"}, ("NGRAM", None, None)),
        ({"model": "qwen3-8b", "speculative_algorithm": "none"}, ("none", None, None)),
        ({"model": "qwen3-8b", "load_format": "dummy"}, ("none", None, None)),
        ({"model": "Qwen/Qwen3-8B"}, (None, None, None)),  # left to its files
        ({"model": "mimo-7b"}, ("NEXTN", None, None)),
        ({"model": "qwen3-0.6b"}, ("none", None, None)),
        ({"model": "qwen3.8-27b"}, ("DFLASH2", "z-lab/Qwen3.8-27B-DFlash2", None)),
        ({"model": "qwen3.8-27b", "speculative_algorithm": "NEXTN+SUFFIX"}, ("NEXTN+SUFFIX", None, None)),
    ],
)
def test_who_drafts_for_an_alias(given: dict[str, Any], expected: tuple[Any, ...]) -> None:
    assert drafting(**given) == expected


def test_the_page_has_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs/model_library.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip(" `") for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:3] == "| `"
    ]
    assert [row[0] for row in rows] == list(ALIASES)
    for name, model, parameters, licence, drafts in rows:
        alias = ALIASES[name]
        assert parameters == alias.parameters and licence == alias.licence + (", gated" if alias.gated else "")
        assert alias.hub is None or model == alias.hub.repo
        head = next(iter(alias.heads.values()), None)
        assert head is None or drafts == head.repo
