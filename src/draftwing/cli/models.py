"""`draftwing pull`, `list`, `show` and `rm`: the models on this machine."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

from draftwing.config.aliases import ALIASES
from draftwing.errors import CheckpointError

logger = logging.getLogger(__name__)
Run = Callable[[dict[str, Any]], None]
_MODEL = "an alias (`draftwing list` shows them) or a hub id, org/name or org/name:Q4_K_M"


def add_model_commands(commands: Any) -> dict[str, Run]:
    """Adds a parser for each command to argparse's `commands`; returns what runs them, by name."""
    pull = commands.add_parser(
        "pull",
        help="fetch a model",
        description="Fetches a model, and for an alias the head that drafts for it, so that a server starts with them "
        "at once. Goes on with a download that was interrupted. Prints where the model is.",
    )
    pull.add_argument("model", help=_MODEL)
    pull.add_argument("--revision", metavar="STR", help="branch, tag or commit of a hub id")
    listed = commands.add_parser(
        "list", aliases=["ls"], help="list the models on this machine",
        description="Lists the models in the caches of draftwing and of the hub, and the aliases to fetch others by.",
    )  # fmt: skip
    shown = commands.add_parser(
        "show", help="describe a model",
        description="Prints what the files of a model say, and what drafts for it. Downloads nothing.",
    )  # fmt: skip
    shown.add_argument("model", help=f"{_MODEL}, a folder or a .gguf file")
    for parser in (listed, shown):
        parser.add_argument("--json", action="store_true", help="print JSON")
    removed = commands.add_parser(
        "rm", help="delete a model from the cache",
        description="Deletes a model from the cache that `pull` and `serve` fetch into, with all of its revisions.",
    )  # fmt: skip
    removed.add_argument("model", help=_MODEL)
    return {"pull": run_pull, "list": run_list, "ls": run_list, "show": run_show, "rm": run_rm}


def run_pull(arguments: dict[str, Any]) -> None:
    from draftwing.models.hub import resolve_model

    name = arguments["model"]
    path = resolve_model(name, arguments["revision"], option="MODEL")
    head = next(iter(ALIASES[name].heads.values()), None) if name in ALIASES else None
    if head is not None:
        resolve_model(*head, option=f"the head of {name}")
        logger.info("%s, which drafts for it, is in the cache, too", head.repo)
    print(path)


def run_list(arguments: dict[str, Any]) -> None:
    from draftwing.models.library import describe, stored_models

    stored = stored_models()
    # What all revisions take counts here, and is what `rm` frees.
    facts = [describe(model.name, model.path) | {"size": model.size} for model in stored]
    if arguments["json"]:
        print(json.dumps(facts, indent=1))
        return
    rows: list[Sequence[str]] = [("MODEL", "SIZE", "FORMAT", "ARCHITECTURE", "DRAFTER", "SERVED")]
    rows += [_row(one) for one in facts]
    print(table(rows) if stored else "no models are in the caches")
    others = [name for name in ALIASES if name not in {model.name for model in stored}]
    if others:
        print(f"\n`draftwing pull NAME` fetches others: {', '.join(others)}, or a hub id org/name")


def _row(facts: dict[str, Any]) -> tuple[str, ...]:
    from draftwing.models.hub_files import readable

    reason = facts["unserved"]
    size = readable(facts["size"])
    served = "yes" if reason is None else reason if len(reason) < 60 else f"no (`draftwing show {facts['model']}`)"
    return (
        facts["model"], size, facts.get("format") or "-", facts.get("architecture") or "-", facts.get("drafter", ""),
        served,
    )  # fmt: skip


def table(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows as lines with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def run_show(arguments: dict[str, Any]) -> None:
    from draftwing.models.hub_files import readable
    from draftwing.models.library import describe, describe_requests, find

    name = arguments["model"]
    path = find(name)
    if path is None or not path.exists():
        fetch = f"; `draftwing pull {name}` fetches it" if name in ALIASES or "/" in name else ""
        raise CheckpointError(f"MODEL: {name} is not on this machine{fetch}")
    facts = describe(name, path)
    if facts["unserved"] is None:
        facts |= describe_requests(name, path)
    if arguments["json"]:
        print(json.dumps(facts, indent=1))
        return
    shown = facts | {
        "size": readable(facts["size"]),
        "served": "yes" if facts["unserved"] is None else f"no: {facts['unserved']}",
        "licence": facts.get("licence") or "not stated in the files; see the model's page",
    }
    if facts["unserved"] is None:
        defaults = ", ".join(f"{key} {value}" for key, value in facts["sampling_defaults"].items())
        shown |= {"parameters": f"{facts['parameters'] / 1e6:,.0f} million", "sampling_defaults": defaults or "none"}
    del shown["unserved"]
    print(table([(key.replace("_", " "), str(value)) for key, value in shown.items() if value is not None]))


def run_rm(arguments: dict[str, Any]) -> None:
    from draftwing.models.hub_files import readable
    from draftwing.models.library import remove

    name = arguments["model"]
    try:
        freed = remove(name)
    except CheckpointError as error:
        raise CheckpointError(f"MODEL: {error}") from None
    print(f"deleted {name} ({readable(freed)})")
