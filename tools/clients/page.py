"""Writes docs/integrations.md: between its marks stand the table of what ran, and how each program was set up."""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from programs import HERE, ROOT, Program, filled, load, split

PAGE = ROOT / "docs" / "integrations.md"
RECORD = HERE / "record.json"
ENDPOINTS = {
    "chat": "`/v1/chat/completions`",
    "responses": "`/v1/responses`",
    "anthropic": "`/v1/messages`",
    "ollama": "`/api/chat`",
}
# What the page has where the test has values of its own.
SHOWN = {
    "url": "http://127.0.0.1:30000",
    "key": "local-key",
    "model": "smollm2",
    "context": "32768",
    "output": "4096",
    "home": "~",
    "prompt": "Read README.md and say what it is about.",
}


def written(page: str, programs: Mapping[str, Program], record: Mapping[str, Any]) -> str:
    """The page with what is between its marks made anew."""
    parts = {"table": table(programs, record), "programs": set_ups(programs, record)}
    for name, lines in parts.items():
        start, end = f"<!-- {name}: made by tools/clients/page.py -->", f"<!-- end of {name} -->"
        before, _, rest = page.partition(start)
        _, mark, after = rest.partition(end)
        assert mark, f"{PAGE.name} has no marks of {name}"
        page = f"{before}{start}\n\n" + "\n".join(lines) + f"\n\n{mark}{after}"
    return page


def write() -> None:
    programs, _ = load()
    PAGE.write_text(written(PAGE.read_text(), programs, json.loads(RECORD.read_text())))


# ---- what ran --------------------------------------------------------------------------------------------------------


def table(programs: Mapping[str, Program], record: Mapping[str, Any]) -> Iterator[str]:
    yield "| program | endpoint | pinned version | newest version | default model |"
    yield "|---|---|---|---|---|"
    for name, program in programs.items():
        cells = [cell(program, record.get(name, {}).get(way)) for way in ("pinned", "newest", "model")]
        yield f"| {program.title} | {ENDPOINTS[program.dialect]} | {' | '.join(cells)} |"


def cell(program: Program, run: Mapping[str, Any] | None) -> str:
    """What a run came to."""
    if run is None:
        return "not run"
    version = next(iter(run.get("versions", {}).values()), "")
    if "install" in run["wrong"]:
        return "does not install here"
    where = f"Node.js {run['node'].split('.')[0]}" if "node" in run else f"Python {run['python'].rpartition('.')[0]}"
    wrong = [f"{kind}: {' '.join(text.split())[:160]}" for kind, text in run["wrong"].items()]
    what = f"**fails**: {'; '.join(wrong)}".replace("|", "\\|") if wrong else "works"
    what = f"is answered; {program.form}" if run.get("useless") and not wrong else what
    what += ", with a picture, too" if run.get("pictures") and not wrong else ""
    what += ", also a pasted one" if run.get("pasted") and not wrong else ""
    what += ", its answer without end was cut off" if run.get("cut") else ""
    return f"{version}: {what} ({where}, {run['date']})"


# ---- how to set it up ------------------------------------------------------------------------------------------------


def set_ups(programs: Mapping[str, Program], record: Mapping[str, Any]) -> Iterator[str]:
    """A section for each program; what shares its packages stands together."""
    for index, (_, group) in enumerate(groupby(programs.values(), lambda program: program.folder)):
        first, *others = group
        yield from [""] * bool(index) + [f"### {first.title}", ""]
        yield from set_up(first)
        run = [ways for one in (first, *others) for ways in record.get(one.name, {}).values()]
        if fields := sorted({field for ways in run for field in ways.get("ignored", [])}):
            listed = ", ".join(f"`{field}`" for field in fields)
            yield from ["", *textwrap.wrap(f"Of what it sends, these have no effect: {listed}.", 120)]


def set_up(program: Program) -> Iterator[str]:
    names = " ".join(shlex.quote(split(package)[0]) for package in program.packages)
    install = "pip install" if program.pypi else "npm install -g" if program.command else "npm install"
    if program.note:
        yield from [*program.note.strip().splitlines(), ""]
    for path, text in program.files.items():
        path = filled(path, {**SHOWN, "work": "."}).removeprefix("./")
        yield from [f"`{path}`:", "", f"```{kind_of(path)}", *filled(text, SHOWN).strip().splitlines(), "```", ""]
    if program.script:
        code = (HERE / "scripts" / program.script).read_text()
        part = re.search(r"^(?://|#) set-up\n(.*?)^(?://|#) end$", code, re.MULTILINE | re.DOTALL)
        assert part, f"{program.script} has no set-up"
        language = "python" if program.pypi else "js"
        yield from [
            f"```{language}",
            f"{'#' if program.pypi else '//'} {install} {names}",
            *part[1].strip().splitlines(),
            "```",
        ]
        return
    yield from ["```sh", f"{install} {names}"]
    yield from [f"export {name}={filled(value, SHOWN)}" for name, value in program.environ.items()]
    words = [filled(word, SHOWN) for word in program.command if word != "{alone}"]
    yield from [shlex.join(words), "```"]


def kind_of(path: str) -> str:
    suffix = path.rpartition(".")[2]
    return {"yml": "yaml"}.get(suffix, suffix)
