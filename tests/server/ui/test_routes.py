"""The page's files and data over HTTP: who gets what, and what a browser is allowed to do with it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fake_engine import FakeEngine, local
from scripted import client_of, serving
from starlette.testclient import TestClient

import draftwing
from draftwing.config.options import Options
from draftwing.core import Output
from draftwing.engine.process.link import EngineDead
from draftwing.requests.images import RequestImage
from draftwing.requests.request import GenerationRequest, SpecLimits
from draftwing.requests.sampling_params import SamplingParams
from draftwing.server.service import Service
from draftwing.server.ui.routes import (
    ASSETS,
    MAX_OF_A_KEY,
    MAX_REQUESTS,
    MAX_TEXT,
    MAX_VIEWERS,
    Snapshot,
    Snapshots,
    Viewers,
    load_assets,
)

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


@pytest.mark.slow
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
    assert {rules[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert rules["img-src"] == "'self' data:"  # pictures that go along with a question
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
    assert all(locked.get(ASSETS + name).status_code == 200 for name in ("main.js", "vendor/marked.js"))
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
    assert facts["sources"] == ["other", "model", "lookup", "both"]
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


class Looks:
    """Counts how often somebody looked."""

    def __init__(self) -> None:
        self.count = 0
        self.last: int | None = None  # after which there is nothing more
        self.error: Exception | None = None

    async def __call__(self) -> Snapshot | None:
        if self.error is not None:
            raise self.error
        self.count += 1
        return None if self.count == self.last else {"number": self.count}


def look(viewers: Viewers) -> AsyncIterator[Snapshot]:
    viewer = viewers.enter()
    assert viewer is not None
    return viewers.watch(viewer)


def run(scenario: Coroutine[Any, Any, Any]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 20))


def test_nobody_looks_nothing_runs() -> None:
    async def scenario() -> None:
        looks = Looks()
        viewers = Viewers(looks, 0.001)
        await asyncio.sleep(0.02)
        assert looks.count == 0
        for _ in range(2):  # and again after all have left
            async with aclosing(look(viewers)) as stream:
                seen = [(await anext(stream))["number"] for _ in range(3)]
                assert seen == sorted(set(seen)) and len(viewers) == 1
            before = looks.count
            await asyncio.sleep(0.02)
            assert looks.count == before and len(viewers) == 0

    run(scenario())


def test_a_slow_viewer_skips_and_holds_up_nobody() -> None:
    async def scenario() -> None:
        looks = Looks()
        viewers = Viewers(looks, 0.001)
        async with aclosing(look(viewers)) as slow, aclosing(look(viewers)) as quick:
            assert (await anext(slow))["number"] == 1
            for _ in range(30):
                await anext(quick)
            newest = looks.count
            assert (await anext(slow))["number"] >= newest - 1, "only the newest was kept"

    run(scenario())


@pytest.mark.parametrize("error", [None, RuntimeError("a bug")])
def test_the_end(error: Exception | None, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        looks = Looks()
        looks.last, looks.error = 3, error
        viewers = Viewers(looks, 0.001)
        streams = await asyncio.gather(*(collected(viewers) for _ in range(3)))
        assert all(len(seen) == (0 if error else 2) for seen in streams) and not len(viewers)
        looks.last, looks.error = None, None
        async with aclosing(look(viewers)) as stream:
            await anext(stream)  # whoever comes later is shown again

    run(scenario())
    assert ("a bug" in caplog.text) == (error is not None)


async def collected(viewers: Viewers) -> list[Snapshot]:
    return [snapshot async for snapshot in look(viewers)]


def test_there_is_a_limit() -> None:
    async def scenario() -> None:
        viewers = Viewers(Looks(), 0.001)
        own = [viewers.enter("alice") for _ in range(MAX_OF_A_KEY)]
        assert all(own) and viewers.enter("alice") is None, "before any of them has read anything"
        others = [viewers.enter() for _ in range(MAX_VIEWERS - MAX_OF_A_KEY)]
        assert all(others) and viewers.enter() is viewers.enter("bob") is None
        for viewer in own:
            assert viewer is not None
            stream = viewers.watch(viewer)
            await anext(stream)
            await stream.aclose()  # type: ignore[attr-defined]
            viewers.leave(viewer)
        assert len(viewers) == len(others) and viewers.enter("alice") is not None

    run(scenario())


# -- what they are shown -----------------------------------------------------------------------------------------------


class Written:
    text = "an answer " * 200


def service(**options: Any) -> Service:
    engine = FakeEngine(Options(random_seed=7, **options))
    bridge = local(engine)
    service = Service(bridge, engine.tokenizer)

    async def stats() -> dict[str, Any]:
        return engine.stats() | {"age": 0.001}

    bridge.stats = stats  # type: ignore[method-assign]
    return service


def began(service: Service, count: int, **fields: Any) -> None:
    prompt = service.tokenizer.encode("a secret question")
    requests = [GenerationRequest(f"uid-{i}", prompt, SamplingParams(), name="job", **fields) for i in range(count)]
    service.engine.observer.begin("job", requests, [Written() for _ in requests])
    service.engine.observer.output(Output("uid-0", [1, 2]))


def taken(service: Service) -> dict[str, Any]:
    snapshot = asyncio.run(Snapshots(service).take())
    assert snapshot is not None
    return snapshot


def test_texts_are_not_shown() -> None:
    one = service()
    began(one, 2, limits=SpecLimits(0, 1, 1))
    snapshot = taken(one)
    assert [request["tokens"] for request in snapshot["requests"]] == [2, 0]
    first = snapshot["requests"][0]
    assert first["drafts"] is False and first["prompt_tokens"] == 17 and first["first_token_seconds"] >= 0
    for secret in ("secret", "answer", "uid-", "job"):
        assert secret not in str(snapshot)


def test_unless_they_are_to_be() -> None:
    one = service(ui_show_texts=True)
    began(one, 1)
    (request,) = taken(one)["requests"]
    assert request["prompt"] == "a secret question" and request["text"] == Written.text[-MAX_TEXT:]


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([], "a long question"),
        ([6], "a long[image, 1,200 tokens] question"),
        ([0, 15], "[image, 1,200 tokens]a long question[image, 1,200 tokens]"),
    ],
)
def test_an_image_in_a_prompt_is_one_span(places: list[int], expected: str) -> None:
    one = service(ui_show_texts=True)
    ids, images = one.tokenizer.encode("a long question"), list[RequestImage]()
    for place in places:
        start = place + sum(image.tokens for image in images)
        images.append(RequestImage(start, (30, 40), np.zeros((1, 1, 3), np.uint8), bytes(16)))
        ids[start:start] = [1] * 1200
    request = GenerationRequest("uid-0", ids, SamplingParams(), name="job", images=tuple(images))
    one.engine.observer.begin("job", [request], [Written()])
    assert taken(one)["requests"][0]["prompt"] == expected
    long = request._replace(prompt_ids=[*ids, *one.tokenizer.encode("b" * 500)], uid="uid-1")
    one.engine.observer.begin("more", [long], [Written()])
    assert set(taken(one)["requests"][1]["prompt"]) == {"b"}, "its end alone"


def test_what_is_shown_is_bounded() -> None:
    one = service()
    began(one, 3 * MAX_REQUESTS)
    snapshot = taken(one)
    assert len(snapshot["requests"]) == MAX_REQUESTS and snapshot["unfinished"] == 3 * MAX_REQUESTS


def test_an_engine_that_does_not_answer() -> None:
    one = service()

    async def scenario() -> None:
        snapshots = Snapshots(one)
        known = await snapshots.take()
        assert known is not None and known["engine"] == "up"

        async def late() -> Any:
            return known_stats | {"age": 2.5}

        known_stats = await one.engine.stats()
        one.engine.stats = late  # type: ignore[method-assign]
        busy = await snapshots.take()
        assert busy is not None and busy["engine"] == "busy" and busy["totals"] == known["totals"]
        assert busy["age"] >= 2.5

        async def dead() -> Any:
            raise EngineDead("it died")

        one.engine.stats = dead  # type: ignore[method-assign]
        gone = await snapshots.take()
        assert gone is not None and gone["engine"] == "down" and gone["age"] >= busy["age"]
        one.engine.draining = True
        assert await snapshots.take() is None, "a page does not keep a server from ending"

    run(scenario())
    one.engine.draining = False
    first = asyncio.run(Snapshots(one).take())
    assert first is not None and first["age"] is None and "totals" not in first
