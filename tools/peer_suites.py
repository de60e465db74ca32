"""Runs the server tests of SGLang, vLLM and llama.cpp against a server of ours that is running.

    draftwing serve --model smollm2 --tool-call-parser hermes &
    python tools/peer_suites.py sglang vllm llama.cpp --url http://127.0.0.1:30000

The tests are downloaded when this runs, from the projects' packages: SGLang's test kits are in its wheel, vLLM's tests
in its source archive, llama.cpp's in that of llama-cpp-python. They run as they are. What they import of their own
project is replaced by stand-ins, and what starts a server by the address of ours; a test that calls such a stand-in
tests their code and is skipped. What passes, and what differs and why, is in docs/migrating.md.

Needs, beside the packages of `dev`: requests, aiohttp, pytest-asyncio. A test that expects what their model or their
server's options imply fails here.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.parse
import urllib.request
import xml.etree.ElementTree as ElementTree
import zipfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from packaging.utils import parse_sdist_filename, parse_wheel_filename


class Suite(NamedTuple):
    """package: of the registry.  folder: what is unpacked of its archive.  tests: below that, globs."""

    package: str
    folder: str
    tests: tuple[str, ...]


SUITES = {
    "sglang": Suite("sglang", "sglang/test", ("test_kits.py",)),
    "vllm": Suite(
        "vllm",
        "tests",
        (
            "entrypoints/openai/chat_completion/test_*.py",
            "entrypoints/openai/completion/test_*.py",
            "entrypoints/openai/responses/test_*.py",
            "entrypoints/openai/models/test_*.py",
            "entrypoints/openai/test_*.py",
            "entrypoints/anthropic/test_*.py",
            "entrypoints/serve/tokenize/test_tokenization.py",
            "entrypoints/serve/instrumentator/test_basic.py",
        ),
    ),
    "llama.cpp": Suite(
        "llama-cpp-python",
        "vendor/llama.cpp/tools/server/tests",
        tuple(
            f"unit/test_{name}.py"
            for name in (
                "basic",
                "chat_completion",
                "compat_anthropic",
                "compat_oai_responses",
                "completion",
                "ignore_eos",
                "security",
                "speculative",
                "stream",
                "tokenize",
                "tool_call",
            )
        ),
    ),
}
PEERS = Path(__file__).with_name("peers")  # what runs in the process of the tests
FROM_OUTSIDE = re.compile(r"RemoteOpenAIServer|client: openai")
OTHERS = re.compile("harmony|lora|embeds|serving|tensorizer|mcp|uds|decisions|batched|thinking_token|root_path|_schema")
STUBS = {
    "sglang": "sglang.srt sglang.benchmark sglang.test.test_utils sglang.test.run_eval sglang.utils sglang.lang",
    "vllm": "vllm tests.utils tests.conftest tests.models tests.evals tests.rocm tblib mteb schemathesis "
    "openai_harmony mistral_common compressed_tensors tests.tool_use tests.reasoning",
    "llama.cpp": "wget",
}


def links(package: str) -> list[str]:
    """Addresses of the package's files, in pip's index."""
    from pip._internal.models.index import PyPI

    reported = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True
    )
    address = f"{reported.stdout.strip() or PyPI.simple_url}/{package}/"
    with urllib.request.urlopen(address, timeout=60) as response:
        page = response.read().decode()
    found = re.findall(r'href="([^"]+)"', page)
    return [urllib.parse.urljoin(address, html.unescape(link)).partition("#")[0] for link in found]


def newest(package: str) -> str:
    """The newest source archive, or wheel where the tests are in that: the one that has them for SGLang."""
    wheels = package == "sglang"
    best = []
    for link in links(package):
        name = link.rsplit("/")[-1]
        if wheels and name.endswith(".whl") and ("x86_64" in name or "any" in name):
            best.append((parse_wheel_filename(name)[1], link))  # its Python does not matter here
        elif not wheels and name.endswith(".tar.gz"):
            best.append((parse_sdist_filename(name)[1], link))
    return max((found for found in best if not found[0].is_prerelease), key=lambda found: found[0])[1]


def fetch(suite: Suite, cache: Path) -> Path:
    """The unpacked folder of tests."""
    link = newest(suite.package)
    name = link.rsplit("/")[-1]
    archive, place = cache / name, cache / name.removesuffix(".tar.gz").removesuffix(".whl")
    if not place.exists():
        cache.mkdir(parents=True, exist_ok=True)
        if not archive.exists():
            print(f"fetching {name}", flush=True)
            urllib.request.urlretrieve(link, archive)
        _unpack(archive, suite.folder, place)
    print(f"tests of {name}")
    return place / suite.folder


def _unpack(archive: Path, folder: str, place: Path) -> None:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(place, [name for name in wheel.namelist() if name.startswith(folder + "/")])
        return
    with tarfile.open(archive) as source:
        members = []
        for member in source.getmembers():
            member.name = member.name.partition("/")[2]
            if member.name.startswith(folder + "/"):
                members.append(member)
        source.extractall(place, members, filter="data")


def run(name: str, root: Path, url: str, model: str, extra: list[str], report: Path) -> Counter[str]:
    """Runs a suite; what its tests came to."""
    suite, path = SUITES[name], [PEERS]
    if name == "sglang":
        shutil.copy(PEERS / "sglang_kits.py", root / "test_kits.py")
        path.append(root.parents[1])
    elif name == "vllm":
        path.append(root.parent)
    else:
        path.append(root)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*map(str, path), os.environ.get("PYTHONPATH", "")]),
        "PEER_URL": url,
        "PEER_MODEL": model,
        "PEER_STUBS": STUBS[name],
        "DEBUG_EXTERNAL": "1",
        "HF_HUB_OFFLINE": "1",
        "PORT": str(urllib.parse.urlsplit(url).port or 80),
    }
    files = {file for glob in suite.tests for file in root.glob(glob)}
    if name == "vllm":  # the others test its code, or need their own kind of model
        files = {file for file in files if FROM_OUTSIDE.search(file.read_text()) and not OTHERS.search(file.stem)}
    tests = sorted(str(file.relative_to(root)) for file in files)
    command = [sys.executable, "-m", "pytest", "-p", "peer_plugin", "-p", "no:cacheprovider", "-c", "/dev/null"]
    command += ["--rootdir", str(root), "-q", "--tb=line", "--continue-on-collection-errors"]
    # Fixtures of the folder; those above start what is theirs.
    command += [f"--confcutdir={root / 'entrypoints'}"] if name == "vllm" else ["--noconftest"]
    command += ["-W", "ignore", "-o", "asyncio_mode=auto", f"--junitxml={report}", "-o", "addopts=", *extra, *tests]
    with open(report.with_suffix(".log"), "w") as log:
        subprocess.run(command, cwd=root, env=environment, stdout=log, stderr=log)
    return tell(report)


def tell(report: Path) -> Counter[str]:
    """Prints what failed, and how many passed by file."""
    files: dict[str, Counter[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        found = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        kind = {None: "passed", "failure": "failed", "error": "error", "skipped": "skipped"}[
            None if found is None else found.tag
        ]
        where = str(case.get("classname") or case.get("name")).rpartition(".")[2]
        files.setdefault(where, Counter())[kind] += 1
        if kind in ("failed", "error"):
            assert found is not None
            print(f"  {where}::{case.get('name')}: {' '.join((found.get('message') or '').split())[:300]}")
    total: Counter[str] = Counter()
    for where, counts in files.items():
        print(f"{where}: {json.dumps(dict(counts))}")
        total += counts
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="+", choices=list(SUITES))
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--cache", type=Path, default=Path("peer_suites"), help="folder for sources and reports")
    parser.add_argument("--pytest", default="", help="further arguments for pytest")
    asked = parser.parse_args()
    with urllib.request.urlopen(f"{asked.url}/v1/models") as response:
        model = json.load(response)["data"][0]["id"]
    cache, totals = asked.cache.resolve(), {}
    for name in asked.suites:
        root = fetch(SUITES[name], cache)
        totals[name] = run(name, root, asked.url, model, asked.pytest.split(), cache / f"{name}.xml")
    for name, counts in totals.items():
        print(f"{name}: {json.dumps(dict(counts))}")


if __name__ == "__main__":
    main()
