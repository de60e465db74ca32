"""What is on this machine: models (`draftwing pull`, `list`, `show`, `rm`), and draft heads and traffic in the folder
of --learn (`draftwing heads`, `traffic`).
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from draftwing.config.aliases import ALIASES
from draftwing.errors import CheckpointError, ConfigError
from draftwing.learn.history import HeadHistory, HeadRecord
from draftwing.learn.traffic import TrafficStore, names_of

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


def add_learning_commands(commands: Any) -> dict[str, Run]:
    """Adds a parser for each command to argparse's `commands`; returns what runs them, by name."""
    folder = argparse.ArgumentParser(add_help=False)
    folder.add_argument("--learn", metavar="DIR", required=True, help="the server's folder")
    as_json = argparse.ArgumentParser(add_help=False)
    as_json.add_argument("--json", action="store_true", help="print JSON")

    heads = commands.add_parser(
        "heads", help="draft heads that were trained with what was served",
        description="Shows the heads in the folder of --learn, and says which one is served.",
    ).add_subparsers(dest="action", metavar="ACTION", required=True)  # fmt: skip
    heads.add_parser("list", aliases=["ls"], parents=[folder, as_json], help="list them; * is served")
    texts = {
        "show": "say all that is known of one",
        "use": "serve one, or the command line's: none",
        "rm": "delete one",
    }
    for name, text in texts.items():
        one = heads.add_parser(name, parents=[folder, as_json] if name == "show" else [folder], help=text)
        one.add_argument("number", metavar="NUMBER", type=_number_or_none if name == "use" else int)
        if name == "use":
            one.add_argument("--adapter", metavar="DIGEST", help="with none: that of this adapter's files")

    traffic = commands.add_parser(
        "traffic", help="prompts and answers that are kept for learning",
        description="Shows whose prompts and answers are in the folder of --learn, and deletes a client's.",
    ).add_subparsers(dest="action", metavar="ACTION", required=True)  # fmt: skip
    traffic.add_parser("list", aliases=["ls"], parents=[folder, as_json], help="list what is kept, by client")
    removed = traffic.add_parser("rm", help="delete all that is kept of a client")
    removed.add_argument("client", metavar="CLIENT", help='name of its API key; "anonymous" for requests without one')
    removed.add_argument("--learn", metavar="DIR", help="from this folder, which no server has open")
    removed.add_argument("--speculative-memory", metavar="FILE", help="from this file, which no server has open")
    removed.add_argument("--prefix-cache-dir", metavar="DIR", help="from this folder")
    removed.add_argument("--url", metavar="URL", help="from all that a running server has")
    removed.add_argument("--api-key", metavar="STR", help="for --url: a key that may do so")
    return {"heads": run_heads, "traffic": run_traffic}


def _number_or_none(text: str) -> int | None:
    if text != "none" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be the number of a head, or none; found {text!r}")
    return None if text == "none" else int(text)


def run_heads(arguments: dict[str, Any]) -> None:
    history = HeadHistory(_folder(arguments["learn"]) / "heads")
    action = arguments["action"]
    if action == "use":
        number = arguments["number"]
        history.use(number, arguments["adapter"] or "" if number is None else history.get(number).adapter)
    elif action == "rm":
        history.remove(arguments["number"])
    else:
        records = [history.get(arguments["number"])] if action == "show" else [*history.list()]
        facts = [_head(record, history.served(record.number)) for record in records]
        if arguments["json"]:
            print(json.dumps(facts[0] if action == "show" else facts, indent=1))
        elif action == "show":
            print(table([(name, _shown(name, value)) for name, value in facts[0].items()]))
        else:
            print(_heads_table(records, [one.number for one in records if history.served(one.number)]))


def _head(record: HeadRecord, served: bool) -> dict[str, Any]:
    return asdict(record) | {"folder": str(record.folder), "served": served}


def _shown(name: str, value: Any) -> str:
    if name == "made":
        return _time(value)
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "-"
    return json.dumps(value) if isinstance(value, dict) else "-" if value is None else str(value)


def _heads_table(records: list[HeadRecord], served: Collection[int]) -> str:
    if not records:
        return "no heads were trained yet"
    rows = [("", "NUMBER", "PARENT", "ALGORITHM", "ADAPTER", "MADE", "EXCHANGES", "DELETED SINCE")]
    for one in records:
        exchanges = sum(one.data.get("clients", {}).values())
        adapter = f"{one.data.get('adapter', '')} {one.adapter}".strip() or "-"
        rows.append(
            (
                "*" * (one.number in served), str(one.number), _shown("parent", one.parent), one.algorithm or "-",
                adapter, _time(one.made), str(exchanges), ", ".join(one.deleted),
            )
        )  # fmt: skip
    return table(rows)


def run_traffic(arguments: dict[str, Any]) -> None:
    if arguments["action"] == "rm":
        names = ("client", "learn", "speculative_memory", "prefix_cache_dir", "url", "api_key")
        _remove(**{name: arguments[name] for name in names})
        return
    found = TrafficStore(_folder(arguments["learn"])).clients()
    if arguments["json"]:
        print(json.dumps([asdict(one) for one in found], indent=1))
        return
    from draftwing.models.hub_files import readable

    rows = [("CLIENT", "EXCHANGES", "TOKENS OF ANSWERS", "SIZE", "FIRST", "LAST", "ADAPTER")]
    rows += [
        (
            one.client, str(one.exchanges), str(one.tokens), readable(one.bytes), _time(one.first), _time(one.last),
            one.adapter,
        )
        for one in found
    ]  # fmt: skip
    print(table(rows) if found else "nothing is kept")


def _remove(
    client: str, learn: str | None, speculative_memory: str | None, prefix_cache_dir: str | None, url: str | None,
    api_key: str | None,
) -> None:  # fmt: skip
    """Deletes a client's traffic where it is told to, and says what there was."""
    if (url is None) == (learn is None and speculative_memory is None and prefix_cache_dir is None):
        raise ConfigError(
            "give --url of a running server, or --learn, --speculative-memory and --prefix-cache-dir where none runs"
        )
    found: dict[str, Any] = {"exchanges": 0, "heads": [], "lookups": 0}
    if url is not None:
        from draftwing.cli.client import Client, part

        answer = Client(url, api_key).post("/delete_traffic", {"client": client})
        found = {name: part(answer, (name,), f"{url}/delete_traffic") for name in found}
    if learn is not None:
        store = TrafficStore(_folder(learn))
        found["exchanges"] = store.delete(client)
        store.close()
        found["heads"] = HeadHistory(_folder(learn) / "heads").mark_deleted(client)
    if speculative_memory is not None:
        from draftwing.engine.lookup_memory import delete_client

        found["lookups"] = sum(delete_client(speculative_memory, name) for name in names_of(client))
    if prefix_cache_dir is not None:
        from draftwing.kv.prefix_store import delete_client as delete_prefixes

        path = Path(prefix_cache_dir).expanduser()
        if not path.is_dir():
            raise ConfigError(f"--prefix-cache-dir: {path} is no folder")
        print(f"deleted {sum(delete_prefixes(path, name) for name in names_of(client))} blocks of cached prefixes")
    print(f"deleted {found['exchanges']} exchanges and {found['lookups']} answers for lookups of {client}")
    if found["heads"]:
        numbers = ", ".join(map(str, found["heads"]))
        print(f"trained with them, and still there: heads {numbers} (`draftwing heads rm` deletes one)")


def _folder(name: str) -> Path:
    path = Path(name).expanduser()
    if not path.is_dir():
        raise ConfigError(f"--learn: {path} is no folder")
    return path


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
