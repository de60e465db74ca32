"""The pages agree with each other and with the code: links, files, flags, endpoints, and figures that stand twice."""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import json
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from fake_engine import FakeEngine, byte_tokenizer, local
from scripts import script

from draftwing.cli.chat import COMMANDS as CHAT_COMMANDS
from draftwing.cli.main import main
from draftwing.config.options import Options
from draftwing.server.app import create_app
from draftwing.server.edge.paths import unserved

ROOT = Path(__file__).parent.parent
CODE = ROOT / "src" / "draftwing"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
HEADS = CODE / "heads" / "smollm2"
CARDS = {  # as performance.md names the heads
    "EAGLE-3": HEADS / "eagle3" / "README.md",
    "EAGLE, whole vocabulary": HEADS / "eagle" / "README.md",
    "MTP": HEADS / "mtp" / "README.md",
}
ELSEWHERE = {  # flags of other programs
    "--inplace", "--worker-urls", "--policy", "--load-monitor-interval", "--disable-worker-overload-protection",
    "--head", "--address", "--backend", "--endpoint-type", "--extra-inputs", "--extra-index-url", "--torch-backend",
    "--build-arg", "--upgrade", "--include", "--local-dir", "--from-literal",
}  # fmt: skip
TO_WRITE = {"src/draftwing/layers/linear_ops/int8_rows.py"}  # files that CONTRIBUTING.md lets the reader write
COMMANDS = ("serve", "chat", "pull", "bench", "token-map", "train")


@functools.cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf8")


def without_code(text: str) -> str:
    return re.sub(r"^( *)```.*?^\1```", "", text, flags=re.MULTILINE | re.DOTALL)


@functools.cache
def anchors(page: Path) -> set[str]:
    """Of the page's headings, as the forges make them."""
    headings = re.findall(r"^#+ (.+)$", without_code(text_of(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def table_rows(text: str) -> list[list[str]]:
    lines = re.findall(r"^\|(.*)\|$", text, re.MULTILINE)
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)] for line in lines]


def ours(page: Path) -> str:
    """What the page says of draftwing: in migrating.md the last column, since others' names stand before it.

    In integrations.md all but the code, which is other programs'.
    """
    text = text_of(page)
    if page.name == "integrations.md":
        return without_code(text)
    return "\n".join(row[-1] for row in table_rows(text)) if page.name == "migrating.md" else text


def test_links() -> None:
    for page in PAGES:
        links = re.findall(r"\]\(([^)\s]+)\)", without_code(text_of(page)))
        for link in links:
            if re.match(r"https?:", link):
                continue
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


@pytest.mark.parametrize("folder", [ROOT / "docs", ROOT / "docs" / "dev"], ids=lambda folder: folder.name)
def test_index_has_every_page(folder: Path) -> None:
    """Pages of docs/dev are in an index of their own."""
    index = folder / "index.md"
    linked = {(index.parent / link).resolve() for link in re.findall(r"\]\(([^)#]+)\)", text_of(index))}
    above = [*folder.glob("*.md")] if folder.name == "dev" else [*ROOT.glob("*.md"), *folder.glob("*.md")]
    assert linked >= {*above, ROOT / "docs" / "dev" / "index.md"} - {index}


def test_files() -> None:
    """Files of this repository that a page names, from its root or from the package's."""
    for page in PAGES:
        for name in re.findall(r"(?<![\w./-])((?:[\w-]+/)+[\w.-]+\.(?:py|c|cu|md|jsonl))\b", ours(page)):
            found = any((folder / name).exists() for folder in (page.parent, ROOT, CODE))
            assert found or name in TO_WRITE, f"{page.name}: {name}"


@pytest.mark.slow
def test_names() -> None:
    """Identifiers that a page for developers names stand somewhere in the code or in its file names."""
    files = [path for folder in ("src", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.*")]
    code = [text_of(path) for path in files if path.suffix in (".py", ".c", ".h", ".cu")]
    every = "\n".join([*map(str, files), *code])

    def stands(word: str) -> bool:
        at = every.find(word)
        while at >= 0 and re.search(r"\w", every[at - 1] + every[at + len(word)]):
            at = every.find(word, at + 1)
        return at >= 0

    for name in ("architecture.md", "dev/grammar.md"):
        spans = re.findall(r"`([^`\n]+)`", without_code(text_of(ROOT / "docs" / name)))
        named = {word for span in spans for word in re.findall(r"[A-Za-z_]\w*", span)} - {"my_module", "MyDrafter"}
        assert not {word for word in named if not stands(word)}, name


def test_nouns() -> None:
    """The classes of architecture.md's table are defined in the file or folder next to them."""
    section = text_of(ROOT / "docs" / "architecture.md").split("## Nouns")[1].split("\n## ")[0]
    rows = [row for row in table_rows(section) if row[1].startswith("`")]
    assert len(rows) > 20
    for nouns, where, *_ in rows:
        place = CODE / where.strip("`")
        code = "".join(map(text_of, place.rglob("*.py") if place.is_dir() else [place]))
        for noun in re.findall(r"`(\w+)", nouns):
            assert re.search(rf"^class {noun}\b", code, re.MULTILINE), f"{noun} is not in {where}"


@pytest.fixture(scope="module")
def flags() -> set[str]:
    """Of all commands and of the benchmarks' scripts."""
    found = set()
    for command, option in itertools.product(COMMANDS, ("--help", "--help-all")):
        text = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(text), pytest.raises(SystemExit):
            patch.setenv("COLUMNS", "1000")
            main([command, option])
        found |= set(re.findall(r"--[a-z][a-z0-9-]*", text.getvalue()))
    scripts = [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
    return found | {flag for file in scripts for flag in re.findall(r'"(--[a-z][a-z0-9-]*)"', text_of(file))}


def test_flags(flags: set[str]) -> None:
    for page in (*PAGES, *CARDS.values()):
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*(?![\w{-])", ours(page)):
            assert flag in flags | ELSEWHERE, f"{page.name}: {flag}"


@pytest.fixture(scope="module")
def endpoints() -> set[str]:
    engine = local(FakeEngine())
    app = create_app(engine, byte_tokenizer())
    return {route.path for route in app.routes}  # type: ignore[attr-defined]


def test_endpoints(endpoints: set[str]) -> None:
    for page in PAGES:
        for endpoint in re.findall(r"`(?:GET |POST )?(/[a-z_0-9/]+)[?{`]", ours(page)):
            known = endpoint in CHAT_COMMANDS or any(path.startswith(endpoint) for path in endpoints)
            known = known or unserved(endpoint) is not None
            assert known, f"{page.name}: {endpoint}"


def test_the_commands_of_a_chat_are_all_on_their_page() -> None:
    rows = table_rows(text_of(ROOT / "docs" / "terminal.md"))
    assert {row[0].strip("`").split()[0] for row in rows if row[0].startswith("`/")} == set(CHAT_COMMANDS)


def test_defaults_of_speculation() -> None:
    """The table of parameters has every option of speculation, with its default where that is a number."""
    text = text_of(ROOT / "docs" / "speculative_decoding.md").split("## Parameters")[1].split("\n## ")[0]
    listed = {row[0].strip("`-").replace("-", "_"): row[1] for row in table_rows(text)}
    fields = {field.name: field.default for field in dataclasses.fields(Options)}
    for name, default in fields.items():
        if name.startswith("speculative_"):
            assert name in listed, name
            assert listed[name] == str(default) or not isinstance(default, int) or isinstance(default, bool), name


def test_constants_of_the_policy() -> None:
    """At most twenty, each on its page with the value that it has."""
    section = text_of(ROOT / "docs" / "dev" / "policy.md").split("\n## ")
    (table,) = [part for part in section if part.startswith("Constants\n")]
    told = {name.strip("`"): float(value.replace(",", "")) for name, value, *_ in table_rows(table)[2:]}
    lines = "\n".join(text_of(file) for file in (CODE / "sched" / "policy").glob("*.py"))
    found = dict(re.findall(r"^([A-Z]\w*) = ([\d.]+)(?:  #.*)?$", lines, re.MULTILINE))
    del found["VERSION"]
    assert told == {name: float(value) for name, value in found.items()} and len(found) <= 20


def test_results_are_current() -> None:
    """Tables of results, and of default trees, are those that tools/result_tables.py writes."""
    written = script(ROOT / "tools" / "result_tables.py").written
    assert [page.name for page in PAGES if written(text_of(page)) != text_of(page)] == []


def test_every_result_is_shown() -> None:
    """With a value for each of its columns, and those rows in the README that it has."""
    shown = {name for page in PAGES for name in re.findall(r"<!-- results: (\w+)", text_of(page))}
    results = {path.stem: json.loads(text_of(path)) for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    assert shown == set(results)
    for name, result in results.items():
        assert {len(row) for row in result["rows"]} == {len(result["columns"])}, name
        assert set(result.get("headline", ())) <= {row[0] for row in result["rows"]}, name


def test_performance_quotes_the_cards() -> None:
    """Acceptance lengths of the bundled heads, greedy / at temperature 1, are those of the cards next to them."""
    section = text_of(ROOT / "docs" / "performance.md").split("## Acceptance length of the bundled heads")[1]
    rows = [row for row in table_rows(section) if len(row) == 4 and re.fullmatch(r"\(\d+, \d+, \d+\)", row[1])]
    assert len(rows) == 9
    for head, tree, *cells in rows:
        card = table_rows(text_of(CARDS[head]))
        column = next(row for row in card if row[0] == "prompts").index(tree)
        found = {(row[0], row[1]): row[column] for row in card}
        for prompts, cell in zip(("mt_bench", "gsm8k"), cells, strict=True):
            assert cell == f"{found[prompts, '0']} / {found[prompts, '1']}", (head, tree, prompts)
