"""The models in the hub's cache, as what a server of several models has."""

from __future__ import annotations

from pathlib import Path

import fake_hub
import pytest
from fake_hub import COMMIT, REPO

from draftwing.config.model_list import read_models
from draftwing.errors import NotFound
from draftwing.models.hub import resolve_model
from draftwing.server.router.cached import in_cache
from draftwing.server.router.memory import model_files
from draftwing.server.router.models import Models

FOLDER = {"config.json": b'{"architectures": ["LlamaForCausalLM"]}', "model.safetensors": b"x" * 100}
HEAD = {"config.json": b'{"architectures": ["LlamaForCausalLMEagle3"]}', "model.safetensors": b"x" * 100}
FILES = {"it.Q8_0.gguf": b"a" * 50, "it.Q4_K_M.gguf": b"b" * 40, "mmproj-it.gguf": b"c"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    fake_hub.connect(monkeypatch, "http://hub.invalid", tmp_path / "cache")
    return tmp_path / "cache"


def pull(monkeypatch: pytest.MonkeyPatch, cache: Path, files: dict[str, bytes], *names: str) -> None:
    """Fetches models of a hub with these files, which is gone afterwards."""
    with monkeypatch.context() as patch, fake_hub.running(files) as hub:
        fake_hub.connect(patch, hub.url, cache)
        for name in names:
            resolve_model(name)


def test_what_was_fetched_is_found_without_the_hub(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    assert in_cache({}, []) == [], "no cache"
    pull(monkeypatch, cache, FOLDER, REPO)
    (found,) = in_cache({"model": "another", "max_total_tokens": 7, "served_model_name": ("x",)}, [])
    assert found.names == (REPO,) and found.arguments["max_total_tokens"] == 7
    place = resolve_model(found.model, found.arguments["revision"])  # as its server does; the hub is not there
    assert place.name == COMMIT and {file.name for file in model_files(found)} == set(FOLDER)
    assert not in_cache({}, read_models({}, [{"model": REPO, "name": "mine"}])), "one that is named is there once"
    (place / "model.safetensors").unlink()
    assert not in_cache({}, []), "one that is there in part cannot be served"


def test_gguf_files_of_a_repository(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    pull(monkeypatch, cache, FILES, REPO, f"{REPO}:Q8_0")
    found = {one.names: one for one in in_cache({}, [])}
    assert set(found) == {(f"{REPO}:Q4_K_M", REPO), (f"{REPO}:Q8_0",)}
    assert {names[0]: file.name for names, one in found.items() for file in model_files(one)} == {
        f"{REPO}:Q4_K_M": "it.Q4_K_M.gguf", f"{REPO}:Q8_0": "it.Q8_0.gguf",
    }  # fmt: skip


def test_draft_heads_are_no_models(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    pull(monkeypatch, cache, HEAD, REPO)
    assert not in_cache({}, [])


async def test_they_come_and_go_while_the_server_runs(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    models = Models([], further=lambda named: in_cache({}, named))
    with pytest.raises(NotFound, match="does not exist"):
        models.find(REPO)
    pull(monkeypatch, cache, FOLDER, REPO)
    model = models.find(REPO)
    models.look()
    assert models.find(f"{REPO}:latest") is model
    (cache / f"models--{REPO.replace('/', '--')}" / "snapshots" / COMMIT / "config.json").unlink()
    models.look()
    assert models.every == []
    await models.close()
