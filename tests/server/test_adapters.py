"""Adapters over HTTP: by name in every dialect, and loaded and unloaded while others are answered."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted import launched
from tiny_adapters import write_adapter
from tiny_checkpoint import write_checkpoint

from draftwing import LLM

pytestmark = pytest.mark.slow

PROMPT = "to be or not"
KEYS = '[user]\nkey = "user-key"\n[boss]\nkey = "boss-key"\nadmin = true\n'
USER, BOSS = {"Authorization": "Bearer user-key"}, {"Authorization": "Bearer boss-key"}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    model = write_checkpoint(folder / "tiny")
    for name, seed in (("first", 1), ("below/second", 2), ("below/third", 3)):
        write_adapter(folder / name, model, seed, strength=3.0)
    keys = folder / "keys.toml"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    command = (
        f"--model {folder / 'tiny'} --served-model-name base --lora-modules first={folder / 'first'} "
        f"--lora-dir {folder / 'below'} --max-loras 2 --speculative-algorithm NGRAM --dtype float32 "
        f"--max-total-tokens 8192 --api-key-file {folder / 'keys.toml'}"
    )
    with launched(command) as (_, url):
        yield url


@pytest.fixture(scope="module")
def texts(folder: Path) -> dict[str, str]:
    """Of each adapter, and of none."""
    paths = {"first": folder / "first", "second": folder / "below/second", "third": folder / "below/third"}
    with LLM(
        str(folder / "tiny"), dtype="float32", speculative_algorithm="none", max_total_tokens=8192,
        lora_modules=[f"{name}={path}" for name, path in paths.items()],
    ) as llm:  # fmt: skip
        params = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
        return {name: llm.generate(PROMPT, params, adapter=name or None)[0].text for name in ("", *paths)}


def completed(url: str, model: str, **more: Any) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    return httpx.post(f"{url}/v1/completions", headers=USER, json=body | more)


def post(url: str, path: str, headers: dict[str, str] = BOSS, **body: Any) -> httpx.Response:
    return httpx.post(url + path, headers=headers, json=body)


def test_an_adapter_answers_by_its_name(url: str, texts: dict[str, str]) -> None:
    assert len(set(texts.values())) == 4
    for model, name in (("base", ""), ("first", "first"), ("base:first", "first")):
        answer = completed(url, model).json()
        assert answer["choices"][0]["text"] == texts[name] and answer["model"] == model
    assert completed(url, "base", lora_path="first").json()["choices"][0]["text"] == texts["first"]
    params = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    body = {"text": [PROMPT, PROMPT], "lora_path": [None, "first"], "sampling_params": params}
    both = post(url, "/generate", USER, **body).json()
    assert [one["text"] for one in both] == [texts[""], texts["first"]]


def test_scales_as_llama_cpp_has_them(url: str, texts: dict[str, str], folder: Path) -> None:
    assert post(url, LOAD, lora_name="second", lora_path="second").status_code == 200
    listed = httpx.get(f"{url}/lora-adapters", headers=BOSS).json()
    assert [(one["id"], one["name"], one["scale"]) for one in listed] == [(0, "first", 0.0), (1, "second", 0.0)]
    assert listed[0]["path"] == str(folder / "first")

    def text(**more: Any) -> str:
        response = completed(url, "base", **more)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["text"]

    assert text(lora=[{"id": 1, "scale": 1.0}]) == texts["second"]
    assert text(lora=[{"id": 1, "scale": 0.0}]) == text(lora=[]) == texts[""]
    half, both = text(lora=[{"id": 0, "scale": 0.5}]), text(lora=[{"id": 0, "scale": 1}, {"id": 1, "scale": 1}])
    assert len({half, both, *texts.values()}) == 6
    assert both == text(lora=[{"id": 0, "scale": 1}, {"id": 1, "scale": 1}])
    for scales, found in ([{"id": 1, "scale": 1}], "second"), ([], ""):
        assert httpx.post(f"{url}/lora-adapters", headers=BOSS, json=scales).status_code == 200
        assert text() == texts[found]
    assert httpx.post(f"{url}/lora-adapters", headers=USER, json=[]).status_code == 403
    for wrong in ([{"id": 2, "scale": 1}], [{"id": -1, "scale": 1}], [{"id": 0}], {"id": 0}, [{"id": 0, "scale": "x"}]):
        assert completed(url, "base", lora=wrong).status_code == 400
    assert completed(url, "first", lora=[{"id": 1, "scale": 1}]).status_code == 400
    assert post(url, UNLOAD, lora_name="second").status_code == 200


def test_a_new_engine_serves_what_the_one_before_did(folder: Path, texts: dict[str, str], tmp_path: Path) -> None:
    """Not what it began with: adapters of the command line that were unloaded or replaced, and those that came later;
    and numbers of llama.cpp's are still those of the same adapters."""
    write_adapter(tmp_path / "gone", folder / "tiny", 3, strength=3.0)
    command = (
        f"--model {folder / 'tiny'} --served-model-name base:1b --lora-modules first={folder / 'first'} "
        f"old={folder / 'first'} --lora-dir {folder / 'below'} --speculative-algorithm NGRAM --dtype float32 "
        f"--max-total-tokens 8192"
    )

    def numbers() -> dict[str, int]:
        return {one["name"]: one["id"] for one in httpx.get(f"{url}/lora-adapters").json()}

    def check() -> None:
        for name, found in (("first", "second"), ("later", "third"), ("base:1b:later", "third"), ("base:1b", "")):
            assert completed(url, name).json()["choices"][0]["text"] == texts[found], name
        assert completed(url, "old").status_code == 404
        assert numbers() == {"first": 0, "later": 2}
        assert completed(url, "base:1b", lora=[{"id": 1, "scale": 1}]).status_code == 400
        later = completed(url, "base:1b", lora=[{"id": 2, "scale": 1}])
        assert later.json()["choices"][0]["text"] == texts["third"]

    with launched(command) as (process, url):
        assert numbers() == {"first": 0, "old": 1}
        assert post(url, LOAD, lora_name="first", lora_path="second", load_inplace=True).status_code == 200
        assert post(url, LOAD, lora_name="later", lora_path="third").status_code == 200
        assert post(url, UNLOAD, lora_name="old").status_code == 200
        check()
        (engine,) = [
            int(child)
            for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            if b"worker" in Path(f"/proc/{child}/cmdline").read_bytes()
        ]
        os.kill(engine, signal.SIGKILL)
        until = time.monotonic() + 60
        while httpx.get(f"{url}/health").status_code == 200 and time.monotonic() < until:
            time.sleep(0.01)
        while len(numbers()) < 2 or completed(url, "later").status_code != 200:
            assert time.monotonic() < until
            time.sleep(0.1)
        check()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"model": "first", "lora_path": "second"}, "exclude each other"),
        ({"lora": [{"id": 0, "scale": 1}], "lora_path": "first"}, "exclude each other"),
        ({"lora": [], "lora_path": "first"}, "exclude each other"),
        ({"model": "first", "lora": [{"id": 0, "scale": 1}]}, "exclude each other"),
    ],
)
def test_two_adapters_by_two_fields_are_refused(url: str, body: dict[str, Any], words: str) -> None:
    assert post(url, LOAD, lora_name="second", lora_path="second").status_code == 200
    try:
        response = completed(url, **{"model": "base"} | body)
        assert response.status_code == 400 and words in response.text
        assert completed(url, "first", lora_path="first").status_code == 200
    finally:
        assert post(url, UNLOAD, lora_name="second").status_code == 200


def test_every_dialect_has_it(url: str) -> None:
    found = {}
    for model in ("base", "first"):
        messages = [{"role": "user", "content": PROMPT}]
        asked = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 12}
        chat = post(url, "/v1/chat/completions", USER, **asked).json()
        anthropic = post(url, "/v1/messages", USER, **asked).json()
        response = post(url, "/v1/responses", USER, model=model, input=PROMPT, temperature=0, max_output_tokens=12)
        options = {"temperature": 0, "num_predict": 12}
        ollama = post(url, "/api/chat", USER, model=model, messages=messages, stream=False, options=options).json()
        assert {one["model"] for one in (chat, anthropic, response.json(), ollama)} == {model}
        texts = [chat["choices"][0]["message"]["content"], anthropic["content"][0]["text"]]
        texts += [response.json()["output"][0]["content"][0]["text"], ollama["message"]["content"]]
        found[model] = set(texts)
    assert len(found["base"]) == len(found["first"]) == 1 and found["base"] != found["first"]


def test_models_name_their_parents(url: str, folder: Path) -> None:
    base, first = httpx.get(f"{url}/v1/models", headers=USER).json()["data"][:2]
    assert base["id"] == "base" and base["parent"] is None
    assert first["id"] == "first" and first["parent"] == "base" and first["root"] == str(folder / "first")
    assert httpx.get(f"{url}/v1/models/first", headers=USER).json()["parent"] == "base"
    tags = httpx.get(f"{url}/api/tags", headers=USER).json()["models"]
    assert {one["name"]: one["details"]["parent_model"] for one in tags}["first"] == "base"


def test_adapters_come_and_go(url: str, texts: dict[str, str]) -> None:
    assert completed(url, "second").status_code == 404
    assert post(url, LOAD, lora_name="second", lora_path="second").status_code == 200
    assert post(url, "/load_lora_adapter", lora_name="third", lora_path="third").json()["success"]
    for name in ("second", "third", "first", "second"):  # of which two have room at once
        assert completed(url, name).json()["choices"][0]["text"] == texts[name]
    refused = post(url, LOAD, lora_name="second", lora_path="third")
    assert refused.status_code == 400 and "load_inplace" in refused.text
    assert post(url, LOAD, lora_name="second", lora_path="third", load_inplace=True).status_code == 200
    assert completed(url, "second").json()["choices"][0]["text"] == texts["third"]
    for name in ("second", "third"):
        assert post(url, UNLOAD, lora_name=name).status_code == 200
        assert completed(url, name).status_code == 404
    gone = post(url, "/unload_lora_adapter", lora_name="third")
    assert gone.status_code == 404 and "'first'" in gone.text


def test_a_name_that_clients_of_ollama_write_behind_the_models(url: str, texts: dict[str, str]) -> None:
    assert post(url, LOAD, lora_name="latest", lora_path="second").status_code == 200
    try:
        for name, found in (("base:latest", ""), ("latest", "second"), ("base:first:latest", "first")):
            assert completed(url, name).json()["choices"][0]["text"] == texts[found]
    finally:
        assert post(url, UNLOAD, lora_name="latest").status_code == 200


def test_metrics_tell_how_often_slots_change(url: str) -> None:
    """Which a third adapter needs where two have slots, and one that has one does not."""

    def numbers() -> dict[str, float]:
        lines = httpx.get(f"{url}/metrics", headers=BOSS).text.splitlines()
        named = (line.split(" ") for line in lines if line.startswith("draftwing:adapter"))
        return {name.partition("{")[0].removeprefix("draftwing:"): float(value) for name, value in named}

    for name in ("second", "third"):
        assert post(url, LOAD, lora_name=name, lora_path=name).status_code == 200
    for name in ("first", "second", "third"):
        assert completed(url, name).status_code == 200
    time.sleep(1.1)  # for which numbers may be those of before
    before = numbers()
    assert before["adapters"] == 3 and before["adapters_on_device"] == 2
    for name in ("third", "second", "third", "first"):
        assert completed(url, name).status_code == 200
    time.sleep(1.1)
    assert numbers() == before | {"adapter_loads_total": before["adapter_loads_total"] + 1}
    for name in ("second", "third"):
        assert post(url, UNLOAD, lora_name=name).status_code == 200


def test_adapters_that_are_not_in_memory(folder: Path, texts: dict[str, str], tmp_path: Path) -> None:
    """Are read again; a client whose adapter cannot be is told so, and the server goes on."""
    place = tmp_path / "second"
    shutil.copytree(folder / "below/second", place)
    command = (
        f"--model {folder / 'tiny'} --served-model-name base --lora-modules first={folder / 'first'} second={place} "
        f"third={folder / 'below/third'} --max-loaded-loras 1 --max-loras 1 --dtype float32 --max-total-tokens 8192 "
        f"--api-key-file {folder / 'keys.toml'} --speculative-algorithm none"
    )
    with launched(command) as (_, url):
        for name in ("first", "second", "third", "first"):
            assert completed(url, name).json()["choices"][0]["text"] == texts[name]
        (place / "adapter_model.safetensors").unlink()
        for more in ({}, {"stream": True}):
            refused = completed(url, "second", **more)
            assert refused.status_code == 500 or more, refused.text
            assert "'second'" in refused.text and "load it again" in refused.text and str(place) not in refused.text
        assert completed(url, "third").json()["choices"][0]["text"] == texts["third"]
        time.sleep(1.1)  # for which numbers may be those of before
        lines = httpx.get(f"{url}/metrics", headers=BOSS).text.splitlines()
        (reads,) = [float(line.split(" ")[1]) for line in lines if line.startswith("draftwing:adapter_reads_total")]
        assert reads >= 3


def test_changed_files_are_another_adapter(url: str, folder: Path, texts: dict[str, str]) -> None:
    model, place = folder / "tiny", folder / "below/changing"
    write_adapter(place, model, 2, strength=3.0)
    assert post(url, LOAD, lora_name="changing", lora_path="changing").status_code == 200
    assert completed(url, "changing").json()["choices"][0]["text"] == texts["second"]
    for file in place.iterdir():
        file.unlink()
    place.rmdir()
    write_adapter(place, model, 3, strength=3.0)
    assert completed(url, "changing").json()["choices"][0]["text"] == texts["second"], "as it was loaded"
    assert post(url, LOAD, lora_name="changing", lora_path="changing", load_inplace=True).status_code == 200
    assert completed(url, "changing").json()["choices"][0]["text"] == texts["third"], "no cached prefix of the other"
    assert post(url, UNLOAD, lora_name="changing").status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "../first",
        "/etc",
        "{root}/first",
        "second/../../first",
        ".",
        "",
        "gone",
        "link",
        "file-link",
        "head-link",
        "a\0b",
        "loop",
    ],
)
def test_no_path_leads_out_of_the_folder(url: str, folder: Path, path: str) -> None:
    below = folder / "below"
    links = {"link": folder / "first", "loop": below / "loop"}
    for name, to in links.items():
        if not (below / name).is_symlink():
            (below / name).symlink_to(to)
    (below / "file-link").mkdir(exist_ok=True)
    (below / "head-link").mkdir(exist_ok=True)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        if not (below / "file-link" / file).is_symlink():
            (below / "file-link" / file).symlink_to(folder / "first" / file)
            (below / "head-link" / file).write_bytes((folder / "first" / file).read_bytes())
    if not (below / "head-link" / "draft_head").is_symlink():
        (below / "head-link" / "draft_head").symlink_to(folder / "first")
    refused = post(url, LOAD, lora_name="out", lora_path=path.format(root=folder))
    assert refused.status_code == 400 and "lora_path" in refused.text
    assert completed(url, "out").status_code == 404


def test_what_is_below_the_folder_may_be_named_in_full(url: str, folder: Path) -> None:
    assert post(url, LOAD, lora_name="full", lora_path=str(folder / "below/second")).status_code == 200
    assert post(url, UNLOAD, lora_name="full").status_code == 200


@pytest.mark.parametrize("name", ["base", "", " x", "a\nb", "x" * 2000])
def test_names_that_cannot_be(url: str, name: str) -> None:
    refused = post(url, LOAD, lora_name=name, lora_path="second")
    assert refused.status_code == 400 and "lora_name" in refused.text


def test_only_an_administrator_loads(url: str) -> None:
    for headers, status in ((USER, 403), ({}, 401)):
        assert post(url, LOAD, headers, lora_name="second", lora_path="second").status_code == status
        assert post(url, UNLOAD, headers, lora_name="first").status_code == status


def test_a_pipe_is_not_waited_for(url: str, folder: Path) -> None:
    place = folder / "below/pipe"
    place.mkdir()
    os.mkfifo(place / "adapter_config.json")
    refused = post(url, LOAD, lora_name="pipe", lora_path="pipe")
    assert refused.status_code == 400
    (place / "adapter_config.json").unlink()
    (place / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    os.mkfifo(place / "adapter_model.safetensors")
    assert post(url, LOAD, lora_name="pipe", lora_path="pipe").status_code == 400
    assert completed(url, "first").status_code == 200


@pytest.mark.exhaustive  # as in tests/engine/test_adapters.py, in one process
def test_a_storm_of_loads_loses_no_slot_and_changes_no_text(url: str, texts: dict[str, str]) -> None:
    stop, wrong = threading.Event(), list[str]()

    def load(name: str) -> None:
        while not stop.is_set():
            post(url, LOAD, lora_name=name, lora_path="second")
            post(url, UNLOAD, lora_name=name)

    def ask(name: str) -> None:
        for _ in range(12):
            response = completed(url, name)
            if response.status_code == 200 and response.json()["choices"][0]["text"] != texts[name]:
                wrong.append(name + response.text)
            elif response.status_code not in (200, 404):
                wrong.append(response.text)

    storm = [threading.Thread(target=load, args=(name,)) for name in ("second", "x", "y")]
    asking = [threading.Thread(target=ask, args=(name,)) for name in ("first", "second", "first", "second")]
    for thread in (*storm, *asking):
        thread.start()
    for thread in asking:
        thread.join()
    stop.set()
    for thread in storm:
        thread.join()
    assert not wrong
    for name in ("second", "third"):
        assert post(url, LOAD, lora_name=name, lora_path=name).status_code == 200
        assert completed(url, name).json()["choices"][0]["text"] == texts[name]
        assert post(url, UNLOAD, lora_name=name).status_code == 200
