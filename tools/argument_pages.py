"""Writes the tables of options in docs/: `python tools/argument_pages.py`, after a change of options.

docs/server_arguments.md has every option of `draftwing serve`, docs/migrating.md the names of other programs,
docs/python.md the fields of `SamplingParams`, docs/routes.md the routes of other servers. What stands between their
marks is made of the code.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from draftwing.config import foreign_names as compat
from draftwing.config.fields import flag
from draftwing.config.foreign_names import OURS, WITHOUT_COUNTERPART
from draftwing.config.options import Options
from draftwing.requests.sampling_params import OTHER_NAMES, SamplingParams
from draftwing.server.edge.paths import UNSERVED

DOCS = Path(__file__).parents[1] / "docs"
PAGES = ("server_arguments.md", "migrating.md", "python.md", "routes.md")
_DEFAULT = re.compile(r" ?\(default:? ((?:[^()]|\([^()]*\))*)\)")


def main() -> None:
    for name in PAGES:
        page = DOCS / name
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")


def written(page: str) -> str:
    """The page with what is between its marks made anew."""
    parts = {
        "options": options(),
        "SGLang's options": sglang_options(),
        "other names": other_names(),
        "sampling fields": sampling_fields(),
        "routes of others": routes_of_others(),
    }
    for name, lines in parts.items():
        start, end = f"<!-- {name}: made by tools/argument_pages.py -->", f"<!-- end of {name} -->"
        if start in page:
            before, _, rest = page.partition(start)
            _, mark, after = rest.partition(end)
            assert mark, f"the page has no end of {name}"
            page = f"{before}{start}\n\n" + "\n".join(lines) + f"\n\n{mark}{after}"
    return page


def options() -> Iterator[str]:
    """A section with a table for each group of options."""
    specs = dataclasses.fields(Options)
    for number, group in enumerate(dict.fromkeys(spec.metadata["group"] for spec in specs)):
        yield from [""] * (number > 0)
        yield f"## {group[0].upper()}{group[1:]}"
        yield ""
        yield "| option | default | meaning |"
        yield "|---|---|---|"
        for spec in specs:
            if spec.metadata["group"] == group:
                yield row(spec.name, spec.default, spec.metadata)


def row(name: str, default: Any, meta: Mapping[str, Any]) -> str:
    """An option's line. A default that follows from other things stands in the option's help."""
    text, shown = meta["help"], "not set" if default is None else f"`{default}`"
    if default is False:
        shown = "off"
    elif default is None and (found := _DEFAULT.search(text)):
        shown, text = found[1], text[: found.start()] + text[found.end() :]
    if meta["choices"]:
        text += f". One of {', '.join(f'`{choice}`' for choice in meta['choices'])}"
    names = ", ".join(f"`{flag(one)}`" for one in (name, *meta["aliases"]))
    names = f"**{names}**" if meta.get("common") else names
    return f"| {names} | {cell(shown)} | {cell(text)} |"


def sglang_options() -> Iterator[str]:
    yield "| option | what becomes of it |"
    yield "|---|---|"
    for name, foreign in compat.FOREIGN.items():
        refused = name in compat.REFUSED
        what = "refused" if refused else "no effect"
        neutral = [str(value) for value in foreign.neutral]
        but = f" unless it is {' or '.join(f'`{value}`' for value in neutral)}" if refused and neutral else ""
        yield f"| `{flag(name)}` | {what}{but}: {cell(foreign.why)} |"


def other_names() -> Iterator[str]:
    yield "| option there | here |"
    yield "|---|---|"
    answers = {name: f"`{flag(ours)}`" for name, ours in OURS.items()}
    answers |= {name: cell(why) for name, why in WITHOUT_COUNTERPART.items()}
    for name in sorted(answers):
        yield f"| `{flag(name)}` | {answers[name]} |"


def sampling_fields() -> Iterator[str]:
    yield "| field | default | meaning |"
    yield "|---|---|---|"
    other = {name: f", `{other}`" for other, name in OTHER_NAMES.items()}
    for name, field in SamplingParams.model_fields.items():
        if field.description is not None:  # others are made of several fields
            shown = "not set" if field.default in (None, ()) else f"`{field.default}`"
            yield f"| `{name}`{other.get(name, '')} | {shown} | {cell(field.description)} |"


def routes_of_others() -> Iterator[str]:
    yield "| route | of | what to do here |"
    yield "|---|---|---|"
    for row in UNSERVED:
        paths = ", ".join(f"`{path}`" for path in row.paths.split())
        yield f"| {paths} | {row.whose} | {cell(row.instead)} |"


def cell(text: str) -> str:
    """As it can stand in a table: option names as code, no bars."""
    text = re.sub(r"(?<![\w`-])(--[a-z][a-z0-9-]+)", r"`\1`", text)
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    main()
