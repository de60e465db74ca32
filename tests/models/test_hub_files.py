"""Repositories of a hub on this machine: what is fetched, what an interrupted download leaves, and the cache alone."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fake_hub
import huggingface_hub
import huggingface_hub.file_download
import pytest
from fake_hub import COMMIT, REPO, FakeHub

from draftwing.errors import CheckpointError
from draftwing.models import hub_files
from draftwing.models.hub import resolve_model

WEIGHTS = bytes(range(256)) * 400
FILES = {
    "config.json": b"{}", "tokenizer.json": b"[]", "model.safetensors": WEIGHTS, "modeling_x.py": b"raise SystemExit",
    "README.md": b"# tiny",
}  # fmt: skip


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub.running(FILES) as server:
        fake_hub.connect(monkeypatch, server.url, tmp_path / "cache")
        yield server


def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_hub.connect(monkeypatch, "http://hub.invalid", tmp_path / "cache")


def blobs(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models--org--tiny" / "blobs"


def test_a_model_is_fetched_once_and_without_code(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = resolve_model(REPO)
    assert sorted(file.name for file in path.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (path / "model.safetensors").read_bytes() == WEIGHTS and f"{REPO} (102.4 kB)" in caplog.text
    assert resolve_model(REPO) == path and len(hub.asked) == 3
    offline(monkeypatch, tmp_path)
    assert resolve_model(REPO) == path and "comes from its cache" in caplog.text
    caplog.clear()
    assert resolve_model(REPO, COMMIT) == path and not caplog.text  # cannot have changed: the hub is not asked
    with pytest.raises(CheckpointError, match=r"not in the hub's cache .*hub\.invalid"):
        resolve_model(REPO, "v2")


@pytest.mark.parametrize("left", [len(WEIGHTS) // 3, len(WEIGHTS) + 5])
def test_an_interrupted_download_is_resumed(hub: FakeHub, tmp_path: Path, left: int) -> None:
    part = blobs(tmp_path) / f"{hashlib.sha256(WEIGHTS).hexdigest()}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes((WEIGHTS + b"more than there is")[:left])
    path = resolve_model(REPO)
    assert (path / "model.safetensors").read_bytes() == WEIGHTS and not part.exists()
    ranges = [ranged for name, ranged in hub.asked if name == "model.safetensors"]
    assert ranges == [f"bytes={left}-" if left < len(WEIGHTS) else None]


def test_what_an_interruption_leaves_is_what_is_resumed(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        real = huggingface_hub.file_download.http_get
        patch.setattr(huggingface_hub.file_download, "http_get", partial(_stopped, real))
        with pytest.raises(KeyboardInterrupt):
            resolve_model(REPO)
    assert hub_files.cached(REPO, None) is None and hub_files.cached(REPO, None, weights=False) is not None
    assert (resolve_model(REPO) / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.asked[-1] == ("model.safetensors", "bytes=1000-")


def _stopped(real: Any, url: str, stored: Any, **options: Any) -> None:
    if not url.endswith("model.safetensors"):
        return real(url, stored, **options)
    stored.write(WEIGHTS[:1000])
    raise KeyboardInterrupt


@pytest.mark.slow
def test_a_connection_that_breaks_off_is_resumed(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    hub.broken = 1
    assert (resolve_model(REPO) / "model.safetensors").read_bytes() == WEIGHTS
    assert [ranged is None for name, ranged in hub.asked if name == "model.safetensors"] == [True, False]


def test_other_bytes_are_refused_and_leave_nothing(hub: FakeHub, tmp_path: Path) -> None:
    part = blobs(tmp_path) / f"{hashlib.sha256(WEIGHTS).hexdigest()}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * 1000)
    with pytest.raises(CheckpointError, match="SHA-256"):
        resolve_model(REPO)
    assert not part.exists() and (resolve_model(REPO) / "model.safetensors").read_bytes() == WEIGHTS


def test_without_a_connection_one_attempt_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    offline(monkeypatch, tmp_path)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **named: pytest.fail("asks all the same"))
    with pytest.raises(CheckpointError, match=r"MODEL: org/tiny is not in the hub's cache .*hub\.invalid"):
        resolve_model(REPO, option="MODEL")
    assert capfd.readouterr() == ("", "")


def test_what_the_hub_refuses(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=r"no folder and no hub model 'org/other'"):
        resolve_model("org/other")
    hub.files = {"q4.gguf": b"", "README.md": b""}
    with pytest.raises(CheckpointError, match=r"q4\.gguf"):
        resolve_model(REPO)


def test_shards_of_the_index_have_to_be_there(hub: FakeHub, tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    hub.files = {
        "config.json": b"{}", "model-1.safetensors": WEIGHTS, "model-2.safetensors": WEIGHTS[1:],
        "model.safetensors.index.json": json.dumps(index).encode(),
    }  # fmt: skip
    path = resolve_model(REPO)
    assert hub_files.cached(REPO, None) == path
    (path / "model-2.safetensors").unlink()
    assert hub_files.cached(REPO, None) is None and hub_files.cached(REPO, None, weights=False) == path


def test_files_hold_no_code_and_no_second_copy() -> None:
    files = ["config.json", "tokenizer.json", "chat_template.jinja", "merges.txt", "tokenizer.model", "modeling_x.py"]
    weights = ["model-1.safetensors", "model-2.safetensors"]
    other = ["consolidated.safetensors", "pytorch_model.bin", "training_args.bin", "onnx/model.json", "README.md"]
    assert hub_files.wanted("a/b", files + weights + other) == files[:-1] + weights
    assert hub_files.wanted("a/b", files + weights + other, weights=False) == files[:-1]
    assert hub_files.wanted("a/b", [*files, *other]) == [*files[:-1], "pytorch_model.bin"]
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        hub_files.wanted("a/b", files)


def test_weights_of_a_model_that_is_not_served_are_not_downloaded(hub: FakeHub) -> None:
    hub.files["config.json"] = b'{"architectures": ["DeepseekV32ForCausalLM"]}'
    with pytest.raises(CheckpointError, match="DSA"):
        resolve_model(REPO)
    assert not [name for name, _ in hub.asked if name == "model.safetensors"]


def test_a_file_that_only_has_to_be_compared(hub: FakeHub, tmp_path: Path) -> None:
    """The process was stopped after the last byte: the hub refuses a range that begins there."""
    blobs(tmp_path).mkdir(parents=True)
    (blobs(tmp_path) / f"{hashlib.sha256(WEIGHTS).hexdigest()}.part").write_bytes(WEIGHTS)
    assert (resolve_model(REPO) / "model.safetensors").read_bytes() == WEIGHTS
    assert not [name for name, _ in hub.asked if name == "model.safetensors"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_a_disk_that_takes_nothing_is_not_the_connection(
    number: int, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(hub_files, "_download", fail)
    with pytest.raises(CheckpointError, match="cannot be stored"):
        resolve_model(REPO)
