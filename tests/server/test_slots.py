"""llama.cpp's /slots over HTTP: its shapes, clients apart, and what cannot be done in words."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from scripted import keys_file, launched, serving
from starlette.testclient import TestClient
from tiny_checkpoint import write_checkpoint

from draftwing.server import slots

KEYS = '[alice]\nkey = "alice-key"\n[bob]\nkey = "bob-key"\n'
ALICE, BOB = {"Authorization": "Bearer alice-key"}, {"Authorization": "Bearer bob-key"}
PROMPT = "to be or not to be, that is the question: whether it is nobler in the mind to suffer " * 3


def test_slots_are_listed(client: TestClient, engine: FakeEngine) -> None:
    found = client.get("/slots").json()
    assert [one["id"] for one in found] == list(range(engine.options.max_running_requests or 1))
    assert not any(one["is_processing"] for one in found) and found[0]["n_ctx"] == engine.info.context_length
    assert client.get("/slots?fail_on_no_slot=1").status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("/slots/0?action=load", {"filename": "a"}, "save, restore or erase"), ("/slots/0", {}, "action"),
        ("/slots/-1?action=save", {"filename": "a"}, "id_slot"), ("/slots/one?action=erase", {}, "id_slot"),
        ("/slots/0?action=save", {}, "filename"), ("/slots/0?action=save", {"filename": 1}, "filename"),
        ("/slots/0?action=restore", None, "filename"), ("/slots/0?action=save", {"file_name": "a"}, "file_name"),
    ],
)  # fmt: skip
def test_what_is_no_action_is_refused(client: TestClient, path: str, body: Any, word: str) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 400 and word in answer.json()["error"]["message"]


def test_a_slot_without_a_folder_has_no_effect_and_says_so(client: TestClient) -> None:
    for slot, named in ((2, True), (-1, False)):
        answer = client.post("/v1/completions", json={"prompt": "a", "id_slot": slot, "max_tokens": 2})
        assert answer.status_code == 200
        assert ("id_slot" in answer.headers.get("draftwing-ignored", "")) is named
    assert client.post("/v1/completions", json={"prompt": "a", "id_slot": -2}).status_code == 400


class Slow(FakeEngine):
    """Does nothing with a slot, until it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may = threading.Event()

    def act_on_slot(self, action: str, client: str, slot: int, filename: str) -> tuple[int, int]:
        assert self.may.wait(60)
        return slot, 0


def test_so_many_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "MAX_WAITING", 3)
    engine = Slow()
    with serving(engine) as url, ThreadPoolExecutor(6) as pool:
        ask = lambda slot: httpx.post(f"{url}/slots/{slot}?action=erase", timeout=60)  # noqa: E731
        every = [pool.submit(ask, slot) for slot in range(6)]
        refused = list(islice(as_completed(every), 3))
        assert all(one.result().status_code == 503 and "3 actions" in one.result().text for one in refused)
        assert ask(9).status_code == 503
        engine.may.set()
        rest = {one.result().json()["n_erased"] for one in every if one not in refused}
        assert len(rest) == 3 and ask(9).json() == {"id_slot": 9, "n_erased": 9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slots")
    write_checkpoint(folder / "tiny")
    keys_file(folder, KEYS)
    return folder


@pytest.fixture(scope="module")
def urls(folder: Path) -> Iterator[list[str]]:
    """Two servers, one with a folder."""
    command = (
        f"--model {folder / 'tiny'} --speculative-algorithm none --dtype float32 --max-total-tokens 8192 "
        f"--api-key-file {folder / 'keys.toml'}"
    )
    with launched(f"{command} --prefix-cache-dir {folder / 'kept'}") as (_, one), launched(command) as (_, other):
        yield [one, other]


@pytest.mark.exhaustive
def test_slots_of_a_server(urls: list[str], folder: Path) -> None:
    url, other = urls

    def act(action: str, slot: int = 1, headers: dict[str, str] = ALICE, at: str = url, **body: Any) -> httpx.Response:
        return httpx.post(f"{at}/slots/{slot}?action={action}", headers=headers, json=body or None, timeout=60)

    asked = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "id_slot": 1}
    assert httpx.post(f"{url}/v1/completions", headers=ALICE, json=asked, timeout=60).status_code == 200
    done = act("save", filename="talk.bin").json()
    assert done.keys() == {"id_slot", "filename", "n_saved", "n_written", "timings"}
    assert (done["id_slot"], done["filename"]) == (1, "talk.bin") and done["n_saved"] % 64 == 0 < done["n_saved"]
    assert done["n_written"] == sum(path.stat().st_size for path in (folder / "kept").rglob("*.kv"))
    assert done["timings"]["save_ms"] > 0
    back = act("restore", 3, filename="talk.bin").json()
    assert back.keys() == {"id_slot", "filename", "n_restored", "n_read", "timings"}
    assert back["n_restored"] == done["n_saved"] and 0 < back["n_read"] <= done["n_written"]

    assert act("restore", headers=BOB, filename="talk.bin").status_code == 404
    refused = act("save", headers=BOB, filename="talk.bin")
    assert refused.status_code == 400 and "empty" in refused.json()["error"]["message"]
    assert act("save", filename="../talk.bin").status_code == 400
    assert httpx.post(f"{url}/slots/1?action=erase", timeout=60).status_code == 401
    assert act("erase", 3).json() == {"id_slot": 3, "n_erased": done["n_saved"]}
    assert act("erase").json()["n_erased"] > done["n_saved"], "of the text, not of whole blocks alone"
    assert act("erase").json() == {"id_slot": 1, "n_erased": 0}
    assert act("save", filename="again").status_code == 400
    assert act("erase", filename="talk.bin").json() == {"id_slot": 1, "n_erased": done["n_saved"]}
    assert act("erase", filename="talk.bin").status_code == 404
    without = act("save", at=other, filename="talk.bin")
    assert without.status_code == 400 and "--prefix-cache-dir" in without.json()["error"]["message"]
