"""The page's files and data over HTTP: who gets what, and what a browser is allowed to do with it."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from scripted import client_of, serving
from starlette.testclient import TestClient

import draftwing
from draftwing.config.options import Options
from draftwing.server.ui.routes import ASSETS, load_assets

FOLDER = Path(draftwing.__file__).parent / "server" / "ui" / "assets"
KEY = "a key"
MARKUP = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|style=\"| on\w+=\"")
ELSEWHERE = ["..%2f..%2froutes.py", "%2e%2e/routes.py", "nothing.js", "index.html/x", "..\\routes.py"]


def app(**options: Any) -> TestClient:
    return client_of(FakeEngine(Options(random_seed=7, **options)))


@pytest.fixture
def locked() -> Iterator[TestClient]:
    with app(api_key=KEY) as client:
        yield client


def texts() -> dict[str, str]:
    """The page's own files by name."""
    return {path.name: path.read_text(encoding="utf8") for path in FOLDER.iterdir() if path.is_file()}


def vendored() -> dict[str, bytes]:
    """Scripts of others by their path."""
    return {str(path.relative_to(FOLDER)): path.read_bytes() for path in FOLDER.glob("vendor/**/*.js")}


def test_the_page_and_its_files(client: TestClient) -> None:
    page = client.get("/")
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    for name, asset in load_assets().items():
        response = client.get(ASSETS + name)
        assert response.content == asset.body and response.headers["content-type"] == asset.type
        again = client.get(ASSETS + name, headers={"if-none-match": response.headers["etag"]})
        assert again.status_code == 304 and not again.content
    assert set(load_assets()) == set(texts()) | set(vendored()), "a file of a type that is not served"


def test_files_are_sent_compressed_to_those_who_can_read_it(client: TestClient) -> None:
    path = ASSETS + "vendor/temml.js"
    plain = client.get(path, headers={"accept-encoding": "identity"})
    packed = client.get(path, headers={"accept-encoding": "gzip"})
    assert "content-encoding" not in plain.headers and packed.headers["content-encoding"] == "gzip"
    assert packed.content == plain.content, "the client unpacks it"
    assert int(packed.headers["content-length"]) < len(plain.content) / 3
    assert {one.headers["vary"] for one in (plain, packed)} == {"accept-encoding"}


def test_files_of_others_are_those_that_the_list_names() -> None:
    listed = re.findall(
        r"^\| `([\w/.]+)` \| `[^`]+` \| `([0-9a-f]{64})` \|$", (FOLDER / "vendor/README.md").read_text(), re.M
    )
    assert dict(listed) == {
        path.removeprefix("vendor/"): hashlib.sha256(body).hexdigest() for path, body in vendored().items()
    }
    assert {path.name for path in FOLDER.glob("vendor/LICENSE*")} == {
        f"LICENSE-{name}.txt" for name in ("marked", "temml", "highlight")
    }


def test_a_browser_loads_nothing_else(client: TestClient) -> None:
    policy = client.get("/").headers["content-security-policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == rules["frame-ancestors"] == "'none'"
    assert {rules[name] for name in ("script-src", "style-src", "img-src", "connect-src")} == {"'self'"}
    named = set()
    for name, text in texts().items():
        addresses = re.findall(r"https?://[^\s\"'`]+|[\"'(]//\w[^\s\"'`]*", text)
        assert set(addresses) <= {"http://www.w3.org/2000/svg"}, name
        assert not MARKUP.search(text), f"{name}: what others write could become markup, or the policy forbids it"
        named |= set(re.findall(r"ui/assets/([\w./]+)", text)) | set(
            re.findall(r'(?:from |import\()"\./([\w./]+)"', text)
        )
    languages = {name for name in vendored() if name.startswith("vendor/highlight/")} - {"vendor/highlight/core.js"}
    assert named | languages == set(texts()) - {"index.html"} | set(vendored()), (
        "files that are named, and that there are"
    )
    listed = re.search(r"LANGUAGES = new Set\(\((.*?)\)", texts()["code.js"], re.S)
    assert listed is not None
    assert set(re.findall(r"[a-z]+", listed[1])) == {Path(name).stem for name in languages}


@pytest.mark.slow
def test_the_scripts_are_javascript() -> None:
    """A look at their syntax where there is no browser."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("Node.js is not installed")
    modules = [name for name in texts() if name.endswith(".js")]
    look = "for (const identifier of process.argv.slice(1)) "
    look += "new vm.SourceTextModule(fs.readFileSync(identifier, 'utf8'), { identifier });"
    command = [node, "--experimental-vm-modules", "-e", look, *(FOLDER / name for name in modules)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    exported = {
        name: set(re.findall(r"^export (?:async )?(?:class|const|function) (\w+)", texts()[name], re.M))
        for name in modules
    } | {"vendor/marked.js": {"Lexer", "Marked"}}
    for name in modules:
        for wanted, source in re.findall(r'^import \{([^}]*)\} from "\./([\w./]+)"', texts()[name], re.M):
            missing = {one.strip() for one in wanted.split(",")} - exported[source]
            assert not missing, f"{name} imports {missing} of {source}"


@pytest.mark.parametrize("name", ELSEWHERE)
def test_no_other_file_is_served(client: TestClient, name: str) -> None:
    assert client.get(ASSETS + name).status_code == 404


def test_files_need_no_key_and_data_does(locked: TestClient) -> None:
    assert locked.get("/").status_code == 200
    assert all(locked.get(ASSETS + name).status_code == 200 for name in load_assets())
    for path in ("/ui/info", "/ui/engine", "/v1/models", "/ui/assets"):
        assert locked.get(path).status_code == 401, path
    assert locked.post("/").status_code in (401, 405)
    assert locked.get("/ui/info", headers={"authorization": f"Bearer {KEY}"}).json()["model"] == "echo"
    assert KEY not in locked.get("/ui/info", headers={"authorization": f"Bearer {KEY}"}).text


def test_disabled(locked: TestClient) -> None:
    with app(disable_ui=True) as client:
        for path in ("/", ASSETS + "main.js", "/ui/info", "/ui/engine"):
            assert client.get(path).status_code == 404, path
        assert client.get("/v1/models").status_code == 200


def test_facts() -> None:
    with app(speculative_algorithm="NGRAM") as client:
        facts = client.get("/ui/info").json()
    assert facts["algorithm"] == "NGRAM" and facts["num_steps"] > 0 and facts["shows_texts"] is False
    assert facts["sampling_defaults"]["temperature"] == 1 and facts["sampling_defaults"]["top_k"] == -1
    assert facts["weight_bytes"] == {"Q8_0": 34} and facts["knows_effort"] is False
    with client_of(FakeEngine(Options(random_seed=7), defaults={"temperature": 0.2, "max_new_tokens": 64})) as client:
        facts = client.get("/ui/info").json()
    assert facts["algorithm"] == "none"
    found = facts["sampling_defaults"]
    assert (found["temperature"], found["max_tokens"], found["min_p"]) == (0.2, 64, 0)


def snapshots(url: str, count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    with httpx.stream("GET", f"{url}/ui/engine", timeout=20) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line:
                found.append(json.loads(line.removeprefix("data: ")))
            if len(found) == count:
                break
    return found


@pytest.mark.slow
def test_the_stream_of_the_engine() -> None:
    with serving(FakeEngine(Options(random_seed=7))) as url:
        first, second = snapshots(url, 2)
    assert first["engine"] == "up" and first["running"] == 0 and first["requests"] == []
    assert first["kv"]["capacity"] == first["kv"]["used"] + first["kv"]["cached"] + first["kv"]["free"]
    assert first["totals"]["committed_tokens"] == 3 and second["time"] > first["time"]
