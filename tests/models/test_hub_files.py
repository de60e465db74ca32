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
from draftwing.models.hub_files import models_in

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
    hub.files = {"README.md": b""}
    with pytest.raises(CheckpointError, match=r"no config\.json"):
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
    hub.files["config.json"] = b'{"architectures": ["DeepseekV4ForCausalLM"]}'
    with pytest.raises(CheckpointError, match="hyper-connections"):
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


def gguf_files() -> dict[str, bytes]:
    """Large files of a repository of GGUF files, each with other bytes."""
    names = [
        "m-Q2_K.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "m-BF16-00001-of-00002.gguf", "m-BF16-00002-of-00002.gguf",
        "UD-Q5_K_XL/m-UD-Q5_K_XL-00001-of-00001.gguf", "mmproj-F16.gguf", "m-imatrix.gguf", "mtp-m-Q4_K_M.gguf",
        "a-DFlash2-Q4_K_M.gguf",
    ]  # fmt: skip
    return {"README.md": b"", "config.json": b"{}"} | {name: name.encode() * 100 for name in names}


@pytest.mark.slower(name=[REPO, f"{REPO}:q2_k", f"hf.co/{REPO}:Q8_0", f"{REPO}:m-Q2_K.gguf", f"{REPO}:UD-Q5_K_XL"])
@pytest.mark.parametrize(
    ("name", "file"),
    [
        (f"huggingface.co/{REPO}", "m-Q4_K_M.gguf"),
        (f"{REPO}:BF16", "m-BF16-00001-of-00002.gguf"),
        (f"{REPO}:q5_k_xl", "UD-Q5_K_XL/m-UD-Q5_K_XL-00001-of-00001.gguf"),
        (REPO, "m-Q4_K_M.gguf"), (f"{REPO}:q2_k", "m-Q2_K.gguf"), (f"hf.co/{REPO}:Q8_0", "m-Q8_0.gguf"),
        (f"{REPO}:m-Q2_K.gguf", "m-Q2_K.gguf"),
        (f"{REPO}:UD-Q5_K_XL", "UD-Q5_K_XL/m-UD-Q5_K_XL-00001-of-00001.gguf"),
    ],
)  # fmt: skip
def test_a_file_of_a_repository_of_gguf_files(
    name: str, file: str, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It alone is fetched, with all of its parts, and found again without a connection."""
    hub.files = files = gguf_files()
    path = resolve_model(name)
    assert path.read_bytes() == files[file] and path.as_posix().endswith(f"{COMMIT}/{file}")
    parts = {one for one in files if "BF16" in one} if "BF16" in file else {file}
    assert {asked for asked, _ in hub.asked} == parts
    assert all(path.with_name(part.rpartition("/")[2]).read_bytes() == files[part] for part in parts)
    assert resolve_model(name) == path and len(hub.asked) == len(parts)
    offline(monkeypatch, tmp_path)
    assert resolve_model(name) == resolve_model(name, COMMIT) == path
    with pytest.raises(CheckpointError, match="only in part in the hub's cache"):
        resolve_model(f"{REPO}:Q3_K_S")


@pytest.mark.parametrize(
    ("left_out", "file"),
    [
        (["m-Q4_K_M.gguf"], "m-Q8_0.gguf"),
        (["m-Q4_K_M.gguf", "m-Q8_0.gguf", "m-BF16-00002-of-00002.gguf"], "UD-Q5_K_XL/m-UD-Q5_K_XL-00001-of-00001.gguf"),
    ],
)
def test_the_next_best_without_the_default(left_out: list[str], file: str, hub: FakeHub) -> None:
    hub.files = {name: content for name, content in gguf_files().items() if name not in left_out}
    assert resolve_model(REPO).as_posix().endswith(file)


def test_what_there_is_stands_in_the_refusal(hub: FakeHub) -> None:
    hub.files = gguf_files()
    with pytest.raises(CheckpointError, match=r"has no 'Q3_K_S'; it has UD-Q5_K_XL, BF16, Q2_K, Q4_K_M, Q8_0$"):
        resolve_model(f"{REPO}:Q3_K_S")
    hub.files = FILES
    with pytest.raises(CheckpointError, match="has no 'Q4_K_M'; it holds no GGUF files"):
        resolve_model(f"{REPO}:Q4_K_M")
    assert not hub.asked


def test_a_repository_of_both_is_its_folder_unless_a_file_is_asked_for(hub: FakeHub) -> None:
    hub.files = FILES | {"m-Q4_0.gguf": b"g" * 50}
    assert resolve_model(REPO).is_dir() and "m-Q4_0.gguf" not in {name for name, _ in hub.asked}
    assert resolve_model(f"{REPO}:Q4_0").read_bytes() == b"g" * 50


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("Qwen3-30B-A3B-Q4_K_M.gguf", "Q4_K_M"), ("SmolLM2.Q4_1.gguf", "Q4_1"), ("x-IQ2_XXS.gguf", "IQ2_XXS"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"), ("m-UD-IQ1_S-00001-of-00001.gguf", "UD-IQ1_S"),
        ("a/Q3_K_L/m.gguf", "Q3_K_L"), ("model-f16.gguf", "F16"), ("plain.gguf", "plain"),
        ("qwen2.5-0.5b-instruct-q5_k_m.gguf", "Q5_K_M"),
    ],
)  # fmt: skip
def test_quantisations_of_names(name: str, tag: str) -> None:
    (found,) = models_in([name, "README.md"])
    assert found == (tag, (name,))
