"""`draftwing heads` and `draftwing traffic`: what is in the folder of `--learn`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from draftwing.cli.models import table
from draftwing.errors import ConfigError
from draftwing.learn.history import HeadHistory, HeadRecord
from draftwing.learn.traffic import TrafficStore, names_of

Run = Callable[[dict[str, Any]], None]


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

    traffic = commands.add_parser(
        "traffic", help="prompts and answers that are kept for learning",
        description="Shows whose prompts and answers are in the folder of --learn, and deletes a client's.",
    ).add_subparsers(dest="action", metavar="ACTION", required=True)  # fmt: skip
    traffic.add_parser("list", aliases=["ls"], parents=[folder, as_json], help="list what is kept, by client")
    removed = traffic.add_parser("rm", help="delete all that is kept of a client")
    removed.add_argument("client", metavar="CLIENT", help='name of its API key; "anonymous" for requests without one')
    removed.add_argument("--learn", metavar="DIR", help="from this folder, which no server has open")
    removed.add_argument("--speculative-memory", metavar="FILE", help="from this file, which no server has open")
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
        history.use(arguments["number"])
    elif action == "rm":
        history.remove(arguments["number"])
    else:
        records = [history.get(arguments["number"])] if action == "show" else [*history.list()]
        facts = [_head(record, history.current()) for record in records]
        if arguments["json"]:
            print(json.dumps(facts[0] if action == "show" else facts, indent=1))
        elif action == "show":
            print(table([(name, _shown(name, value)) for name, value in facts[0].items()]))
        else:
            print(_heads_table(records, history.current()))


def _head(record: HeadRecord, current: int | None) -> dict[str, Any]:
    return asdict(record) | {"folder": str(record.folder), "served": record.number == current}


def _shown(name: str, value: Any) -> str:
    if name == "made":
        return _time(value)
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "-"
    return json.dumps(value) if isinstance(value, dict) else "-" if value is None else str(value)


def _heads_table(records: list[HeadRecord], current: int | None) -> str:
    if not records:
        return "no heads were trained yet"
    rows = [("", "NUMBER", "PARENT", "ALGORITHM", "MADE", "EXCHANGES", "DELETED SINCE")]
    for one in records:
        exchanges = sum(one.data.get("clients", {}).values())
        rows.append(
            (
                "*" * (one.number == current), str(one.number), _shown("parent", one.parent), one.algorithm or "-",
                _time(one.made), str(exchanges), ", ".join(one.deleted),
            )
        )  # fmt: skip
    return table(rows)


def run_traffic(arguments: dict[str, Any]) -> None:
    if arguments["action"] == "rm":
        _remove(**{name: arguments[name] for name in ("client", "learn", "speculative_memory", "url", "api_key")})
        return
    found = TrafficStore(_folder(arguments["learn"])).clients()
    if arguments["json"]:
        print(json.dumps([asdict(one) for one in found], indent=1))
        return
    from draftwing.models.hub_files import readable

    rows = [("CLIENT", "EXCHANGES", "TOKENS OF ANSWERS", "SIZE", "FIRST", "LAST")]
    rows += [
        (one.client, str(one.exchanges), str(one.tokens), readable(one.bytes), _time(one.first), _time(one.last))
        for one in found
    ]
    print(table(rows) if found else "nothing is kept")


def _remove(
    client: str, learn: str | None, speculative_memory: str | None, url: str | None, api_key: str | None
) -> None:
    """Deletes a client's traffic where it is told to, and says what there was."""
    if (url is None) == (learn is None and speculative_memory is None):
        raise ConfigError("give --url of a running server, or --learn and --speculative-memory where none runs")
    found: dict[str, Any] = {"exchanges": 0, "heads": [], "lookups": 0}
    if url is not None:
        from draftwing.cli.client import Client

        found = Client(url, api_key).post("/delete_traffic", {"client": client})
    if learn is not None:
        store = TrafficStore(_folder(learn))
        found["exchanges"] = store.delete(client)
        store.close()
        found["heads"] = HeadHistory(_folder(learn) / "heads").mark_deleted(client)
    if speculative_memory is not None:
        from draftwing.engine.lookup_memory import delete_client

        found["lookups"] = sum(delete_client(speculative_memory, name) for name in names_of(client))
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
