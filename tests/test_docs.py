"""Every command of the documentation, executed as it is typed, with small stand-ins for the checkpoints it names."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import test_page_commands
from stand_ins import accept_length, chat, llama2, llama3, llama31, mimo, model_of, qwen3, qwen25, served, write_all

from draftwing.cli import main

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "docs/constrained.md", "docs/migrating.md", "docs/speculative_decoding.md")
PORT_OF_PAGES = "http://127.0.0.1:30000"
HOST_OPTIONS = ("host", "port", "log_level", "dtype", "mem_fraction_static", "cuda_graph_max_bs")
PYTHON = shlex.quote(sys.executable)


def commands(page: str) -> list[str]:
    """Those of every ```bash block; lines that end in a backslash or inside quotes go on, comments do not count."""
    text = (ROOT / page).read_text(encoding="utf8")
    found = []
    for block in re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        command = ""
        for line in block.replace("\\\n", " ").splitlines():
            command += line + "\n"
            if command.count("'") % 2 == 0:
                words, command = shlex.split(command, comments=True), ""
                if words:
                    found.append(shlex.join(words))
        assert not command, f"{page}: a quotation does not end in {block!r}"
    return found


def is_server(command: str) -> bool:
    return command.startswith("draftwing serve") or "launch_server" in command


def configuration(command: str) -> dict[str, Any]:
    """What a server command chooses; not the host it is typed for: memory, precision, graphs, logs."""
    words = shlex.split(command.replace("\\\n", " "))
    start = next(i for i, word in enumerate(words) if word.startswith("--"))
    parser, _, _ = main._parser()
    given = vars(parser.parse_args(["serve", *main.dashed(words[start:])]))
    asked = main.serve_options({name: value for name, value in given.items() if name != "command"}, {})
    return {name: value for name, value in dataclasses.asdict(asked).items() if name not in HOST_OPTIONS}


EVERY = sorted({command for page in PAGES for command in commands(page)})
SERVERS = [command for command in EVERY if is_server(command)]
OTHERS = [command for command in EVERY if not is_server(command)]
# What SGLang's page starts too, in test_page_commands.py, is started once.
STARTED = [configuration(command) for command, _ in test_page_commands.COMMANDS.values()]
RIGHT = 1.5  # tokens of a step with drafts
OWN = [command for command in SERVERS if configuration(command) not in STARTED]
LIKE_ANOTHER = ("--model smollm2 --speculative-algorithm NGRAM", "--model smollm2 --speculative-algorithm SUFFIX",
                "DFLASH", "NEXTN", "--speculative-aux-layer-ids")  # fmt: skip


def typed(command: str) -> str:
    """With this interpreter, whatever the PATH says."""
    return re.sub(r"^draftwing\b", f"{PYTHON} -m draftwing", command)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory of the commands, with the files that they name."""
    folder = write_all(tmp_path_factory.mktemp("docs"), llama2, llama3, llama31, mimo, qwen3, qwen25)
    # Most bytes of UTF-8, and so most tokens
    (folder / "notes.txt").write_text("".join(map(chr, (*range(1, 0x800), *range(0x1000, 0x110000, 0x1000)))))
    (folder / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "Hello?"}]}\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        patch.setenv("HF_HUB_OFFLINE", "1")
        make_map = next(command for command in OTHERS if "token-map" in command)
        subprocess.run(typed(make_map), shell=True, check=True)
        yield folder


@pytest.fixture(scope="module")
def answers(folder: Path, smollm2_path: Path, request: pytest.FixtureRequest) -> Iterator[dict[str, Future[float]]]:
    """The accept length of each server that a test asks for. Two run at a time: mostly they start."""

    def ask(command: str) -> float:
        # On a busy machine drafts of such a small model may not pay, which is not the head's fault.
        always = " --speculative-fixed-shape" if has_head(command) else ""
        with served(typed(command) + always) as url:
            if command == asked:
                send_requests(url)
            assert httpx.get(f"{url}/health").status_code == 200
            answer = chat(url, model_of(command))
            assert answer["choices"][0]["finish_reason"] in ("stop", "length")
            assert answer["usage"]["completion_tokens"] >= 1
            return accept_length(url)

    asked = next(command for command in OWN if "Qwen" in command and "NGRAM" in command)
    with ThreadPoolExecutor(2) as pool:
        tests = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
        wanted = {params["command"] for params in tests if params.get("command") in OWN}
        yield {command: pool.submit(ask, command) for command in OWN if command in wanted}


def send_requests(url: str) -> None:
    """Every `curl` of the pages, to a server of the model that they name."""
    for command in OTHERS:
        if command.startswith("curl "):
            assert PORT_OF_PAGES in command
            there = command.replace(PORT_OF_PAGES, url).replace("curl", "curl --silent --fail-with-body", 1)
            done = subprocess.run(there, shell=True, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stdout
            if "/generate" in command:
                assert '"spec_accept_length"' in done.stdout


@pytest.mark.further(command=[command for command in OWN if any(part in command for part in LIKE_ANOTHER)])
@pytest.mark.parametrize("command", OWN)
def test_server(command: str, answers: dict[str, Future[float]]) -> None:
    accepted = answers[command].result()
    if has_head(command):
        assert accepted > RIGHT, "the stand-in's head is right wherever it may be"


def has_head(command: str) -> bool:
    return any(name in command for name in ("EAGLE", "NEXTN", "DSPARK"))


@pytest.mark.parametrize("command", [command for command in OTHERS if command.startswith("draftwing ")])
def test_tool(command: str, folder: Path) -> None:
    done = subprocess.run(typed(command), shell=True, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def scripts(page: str) -> list[str]:
    """Its ```python blocks that load a model."""
    text = (ROOT / page).read_text(encoding="utf8")
    return [b for b in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL) if "LLM(" in b]


@pytest.mark.parametrize("page", ["README.md", "docs/constrained.md", "docs/speculative_decoding.md"])
def test_python(page: str, smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (script,) = scripts(page)
    exec(compile(script, page, "exec"), {})
    assert capsys.readouterr().out.strip()


def test_make_targets() -> None:
    """Setting up an environment is no unit test; that make knows what to do is."""
    for command in OTHERS:
        if command.startswith("make "):
            subprocess.run([*shlex.split(command), "--dry-run"], cwd=ROOT, check=True, capture_output=True)


def test_nothing_is_left_out() -> None:
    assert len(commands("docs/speculative_decoding.md")) >= 10 and len(SERVERS) >= 9
    assert len(OWN) < len(SERVERS) and any(command.startswith("curl ") for command in OTHERS)
    for command in OTHERS:
        assert command.startswith(("draftwing ", "curl ", "make ")), command
