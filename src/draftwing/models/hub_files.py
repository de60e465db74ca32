"""Repositories of the Hugging Face hub and their cache: finds them, and fetches what is missing.

Large files are written into the hub's own cache by `_download`, which goes on where an interrupted download ended and
compares hashes; the client of the hub compares sizes alone, and its newer versions begin such a file anew.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies

from draftwing.errors import CheckpointError
from draftwing.files import load_json

logger = logging.getLogger(__name__)

_TEXT_SUFFIXES = (".json", ".txt", ".jinja", ".model")
_WEIGHT_SUFFIXES = (".safetensors", ".bin")
_INDEX = ".index.json"
# In names of architectures; Eagle 2 and 2.5 are models for images, too.
HEAD = re.compile(r"^(?!.*ForConditional).*(eagle|dflash|dspark|domino|speculator|medusa|DraftModel)", re.IGNORECASE)
_COMMIT = re.compile(r"[0-9a-f]{40}")
CONNECT_SECONDS = 10.0
MAX_HTTP_BYTES = 50 * 10**9  # bytes of a file; the hub gives out no larger ones that way
Tell = Callable[[str, int, int], None]  # the SHA-256 of a file, its bytes, and how many of them are there
THREADS = 8  # files that are downloaded at once


def fetch(
    repo: str, revision: str | None, weights: bool = True, gguf: str | None = None, tell: Tell | None = None
) -> Path:
    """Returns the folder with configuration, tokenizer and, if wanted, weights of `repo`, never its code, or the first
    part of a GGUF file; downloads what is missing. Of a commit that is in the cache the hub is not asked, and without a
    connection the cache counts.

    gguf: which of its GGUF files, see `chosen`; without it a repository is one if it has nothing else.  tell: is called
    by several threads as large files come.
    Raises CheckpointError for what does not exist, cannot be fetched, or is no model.
    """
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if revision is not None and _COMMIT.fullmatch(revision):
        found = cached(repo, revision, weights, gguf)
        if found is not None:
            return found
    try:
        with _quiet_client():
            connect()
            return _fetch(repo, revision, weights, gguf, tell)
    except GatedRepoError as error:
        raise CheckpointError(
            f"{repo} asks for consent: accept its terms on its page and log in with `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{repo} has no revision {revision!r}") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise CheckpointError(
            f"there is no folder and no hub model {repo!r} (a private one needs `hf auth login`)"
        ) from error
    except CheckpointError:
        raise
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            return _from_cache(repo, revision, weights, gguf, error)
        raise CheckpointError(f"{repo} cannot be stored in the hub's cache: {error}") from error
    # Offline mode, no route, a timeout: each version of the client has its own exceptions for them.
    except Exception as error:
        return _from_cache(repo, revision, weights, gguf, error)


def cached(repo: str, revision: str | None, weights: bool = True, gguf: str | None = None) -> Path | None:
    """Returns what `fetch` does if all of it is in the hub's cache."""
    folder = snapshot(repo, revision)
    if folder is None:
        return None
    try:
        names = wanted(repo, files_in(folder), weights, gguf)
    except CheckpointError:
        return None
    if names[0].endswith(".gguf"):
        return folder / names[0]
    indexes = [folder / name for name in names if weights and name.endswith(_INDEX)]
    try:
        shards = {shard for index in indexes for shard in load_json(index)["weight_map"].values()}
    except (ValueError, LookupError, AttributeError, TypeError):  # whoever reads the weights says what is wrong
        shards = set()
    return folder if all((folder / str(shard)).exists() for shard in shards) else None


def snapshot(repo: str, revision: str | None = None) -> Path | None:
    """Returns the folder of a repository in the hub's cache, whatever is in it."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    storage = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")
    revision, commit = revision or "main", revision
    if not _COMMIT.fullmatch(revision):
        with contextlib.suppress(OSError):
            commit = (storage / "refs" / revision).read_text(encoding="ascii").strip()
    folder = storage / "snapshots" / (commit or revision)
    return folder if folder.is_dir() else None


def files_in(folder: Path) -> list[str]:
    """Returns the files of a snapshot that are there, by their paths within."""
    return [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]


def wanted(repo: str, files: Sequence[str], weights: bool = True, gguf: str | None = None) -> list[str]:
    """Returns the files to fetch: those at the top of the repository, safetensors rather than pickles, or the parts of
    a GGUF file alone, see `fetch`. Raises CheckpointError for a repository that is no model."""
    top = [file for file in files if "/" not in file]
    models = models_in(files)
    plain = "config.json" in top and (not models or any(file.endswith(_WEIGHT_SUFFIXES) for file in top))
    if gguf is not None or (models and not plain):
        found = chosen(repo, models, gguf)
        if gguf is None and len(models) > 1:
            logger.info("%s: %s of %s", repo, found.tag, ", ".join(one.tag for one in models))
        return list(found.files)
    if not plain:
        raise CheckpointError(f"{repo} is not a transformers model: no config.json")
    texts = [file for file in top if file.endswith(_TEXT_SUFFIXES)]
    texts += [file for file in files if file.endswith("_Pooling/config.json")]  # of models that make vectors of texts
    if not weights:
        return texts
    # Some repositories hold the same weights twice, under the names of the original implementation.
    stored = [f for f in top if f.endswith(".safetensors") and not f.startswith("consolidated")]
    stored = stored or [f for f in top if f.startswith("pytorch_model") and f.endswith(".bin")]
    if not stored:
        raise CheckpointError(f"{repo} has no *.safetensors and no pytorch_model*.bin")
    return texts + stored


# ---- the hub ---------------------------------------------------------------------------------------------------------


def connect(seconds: float | None = None) -> None:
    """Raises OSError where the hub cannot be reached, after one attempt: its client makes five of each request.
    seconds: in which it has to answer, `CONNECT_SECONDS` if not given."""
    from huggingface_hub import constants

    address = urlsplit(constants.ENDPOINT)
    if constants.HF_HUB_OFFLINE or {address.scheme, "all"} & getproxies().keys():  # a proxy may know more names
        return
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), seconds or CONNECT_SECONDS).close()
    except OSError as error:
        raise ConnectionError(f"{address.hostname}: {error.strerror or error}") from error


@contextlib.contextmanager
def _quiet_client() -> Iterator[None]:
    """Keeps the client's warnings of its retries out of the log, and its progress bars out of files."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    client = logging.getLogger("huggingface_hub")
    level, bars = client.level, not sys.stderr.isatty() and not are_progress_bars_disabled()
    client.setLevel(logging.ERROR)
    if bars:
        disable_progress_bars()
    try:
        yield
    finally:
        client.setLevel(level)
        if bars:
            enable_progress_bars()


def _fetch(repo: str, revision: str | None, weights: bool, gguf: str | None, tell: Tell | None) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    info = HfApi().model_info(repo, revision=revision, files_metadata=True)
    files = {file.rfilename: file for file in info.siblings or ()}
    names = wanted(repo, list(files), weights, gguf)
    whole = names[0].endswith(".gguf")
    # Weights come last: a folder that has them has all.
    texts = [name for name in names if name.endswith(_TEXT_SUFFIXES)]
    folder = Path(snapshot_download(repo, revision=revision, allow_patterns=texts))
    if weights or whole:
        missing = None if whole else _unserved(folder / "config.json")
        if missing is not None:
            raise CheckpointError(f"{repo} has {missing}, which is not served yet; its weights are not downloaded")
        large = [file for name in names if (file := files[name]).lfs is not None and not (folder / name).exists()]
        if large:
            logger.info("downloading %s (%s)", repo, readable(sum(file.size or 0 for file in large)))
            _check_room(repo, large, folder.parents[1] / "blobs")
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda file: _download(repo, info.sha, file, folder, tell), large))
        snapshot_download(repo, revision=revision, allow_patterns=names)
    return folder / names[0] if whole else folder


def _unserved(file: Path) -> str | None:
    """Returns what `named_part` says of a config.json; None of one that cannot be read, which whoever loads it
    refuses."""
    from draftwing.models.families.unserved import named_part  # with torch, which a server's process does without

    try:
        config = load_json(file)
        return named_part(config.get("architectures") or (), config.get("model_type"))
    except (ValueError, AttributeError, TypeError):
        return None


def _check_room(repo: str, files: Sequence[Any], blobs: Path) -> None:
    """Raises CheckpointError where the disk has no room for what is missing of large files."""
    wanted = 0
    for file in files:
        part = blobs / f"{file.lfs.sha256}.part"
        there = (blobs / file.lfs.sha256).exists()
        wanted += 0 if there else max((file.size or 0) - (part.stat().st_size if part.exists() else 0), 0)
    free = shutil.disk_usage(blobs.parent).free
    if wanted > free:
        raise CheckpointError(
            f"{repo} needs {readable(wanted)} on the disk of {blobs.parent.parent}, and {readable(free)} are free: "
            "delete something (`draftwing rm`), or set HF_HUB_CACHE to another disk"
        )


class _Told:
    """A file that tells how long it is whenever something is written."""

    def __init__(self, file: BinaryIO, tell: Callable[[int], None]) -> None:
        self._file, self._tell = file, tell

    def write(self, data: bytes) -> int:
        written = self._file.write(data)
        self._tell(self._file.tell())
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _download(repo: str, commit: str | None, file: Any, folder: Path, tell: Tell | None) -> None:
    """Downloads a file of the hub's large file storage into its cache, to where its client expects it, by its hash.

    file: as `HfApi.model_info` has it.  folder: of the snapshot, whose cache it is. Raises CheckpointError for other
    bytes than the hub has.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import WeakFileLock, build_hf_headers

    name, size, digest = file.rfilename, file.size, file.lfs.sha256
    if size is None or size >= MAX_HTTP_BYTES:  # left to the client's own protocol
        return
    storage = folder.parents[1]
    blob, part = storage / "blobs" / digest, storage / "blobs" / f"{digest}.part"
    lock = storage.parent / ".locks" / storage.name / f"{digest}.lock"  # the client's
    for parent in (blob.parent, lock.parent):
        parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if blob.exists():
            return
        with part.open("ab") as stored:
            start = stored.tell()
            if start > size:
                stored.truncate(0)
                start = 0
            if start:
                logger.info("%s: going on at %s of %s", name, readable(start), readable(size))
            into: Any = stored if tell is None else _Told(stored, partial(tell, digest, size))
            if start < size:  # else it was stopped before the comparison
                url, headers = hf_hub_url(repo, name, revision=commit), build_hf_headers()
                http_get(url, into, resume_size=start, headers=headers, expected_size=size, displayed_filename=name)
        with part.open("rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
        if found != digest:
            part.unlink()
            raise CheckpointError(f"{name} of {repo} has the SHA-256 {found}; expected {digest}. Try it again")
        os.replace(part, blob)


def _from_cache(repo: str, revision: str | None, weights: bool, gguf: str | None, cause: Exception) -> Path:
    folder, path = snapshot(repo, revision), cached(repo, revision, weights, gguf)
    if path is not None:
        logger.warning("the hub cannot be reached; %s comes from its cache", repo)
        return path
    missing = "is not in the hub's cache" if folder is None else "is only in part in the hub's cache"
    raise CheckpointError(
        f"{repo} {missing} and cannot be downloaded ({cause}). Check the connection, or download the model elsewhere "
        "and pass its folder"
    ) from cause


def readable(size: int) -> str:
    """Returns a number of bytes as people read it: 1.2 GB."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} bytes"


# ---- GGUF files of a repository: which are models, as what they are quantised, which is meant ------------------------

DEFAULTS = ("Q4_K_M", "Q8_0")  # that are taken where a name does not say which, as llama.cpp does; else the first
_PART = re.compile(r"-(\d{5})-of-(\d{5})$")
_TAG = re.compile(r"(?:UD-)?(?:I?Q\d\w*|TQ\d_\d|MXFP4\w*|NVFP4|BF16|FP?16|FP?32)", re.IGNORECASE)
_NO_MODEL = re.compile(r"(?:^|[-_./])(?:mmproj|imatrix|mtp|dflash2?|dspark)(?=[-_.])", re.IGNORECASE)  # read with one


class Quantised(NamedTuple):
    """A model of a repository. tag: its quantisation, or its name where that does not tell.  files: its parts."""

    tag: str
    files: tuple[str, ...]


def models_in(names: Iterable[str]) -> list[Quantised]:
    """Returns the models whose parts are all among these files of a repository, by their names."""
    parts: dict[tuple[str, int], list[str]] = {}
    for name in sorted(name for name in names if name.endswith(".gguf")):
        stem = name.removesuffix(".gguf")
        part = _PART.search(stem)
        parts.setdefault((_PART.sub("", stem), int(part[2]) if part else 1), []).append(name)
    found = [Quantised(_tag(stem), tuple(files)) for (stem, count), files in parts.items() if len(files) == count]
    return [one for one in found if not _NO_MODEL.search(one.files[0])] or found


def chosen(repo: str, models: list[Quantised], asked: str | None) -> Quantised:
    """Returns the model that `asked` means: a quantisation or a file's name, in any case; None: the default one. Raises
    CheckpointError."""
    for wanted in DEFAULTS if asked is None else (asked,):
        for matches in (_is, _ends):
            for one in models:
                if matches(one, wanted.lower()):
                    return one
    if asked is None and models:
        return models[0]
    has = ", ".join(one.tag for one in models)
    raise CheckpointError(f"{repo} has no {asked!r}; " + (f"it has {has}" if has else "it holds no GGUF files"))


def _is(one: Quantised, wanted: str) -> bool:
    path = one.files[0].lower()
    return wanted in (one.tag.lower(), path, path.rpartition("/")[2], path.removesuffix(".gguf"))


def _ends(one: Quantised, wanted: str) -> bool:
    """As UD-Q4_K_XL is meant by Q4_K_XL."""
    return one.tag.lower().endswith(f"-{wanted}")


def _tag(stem: str) -> str:
    words = [word for word in re.split(r"(?<!UD)[-./]", stem, flags=re.IGNORECASE) if _TAG.fullmatch(word)]
    return words[-1].upper() if words else stem.rpartition("/")[2]
