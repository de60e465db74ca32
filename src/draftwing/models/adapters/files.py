"""The files of an adapter: what they are called, and their digests. Needs no torch, as servers import it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from draftwing.errors import CheckpointError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FILES = (CONFIG, WEIGHTS)
HEAD = "draft_head"  # folder of an adapter's own head
MOST_CONFIG = 1 << 20  # bytes
PART: Final = 4 << 20  # bytes of a file that are read at once, and have a digest of their own


def folder_of(adapter: Path) -> Path:
    """Returns where an adapter's own draft head lies, if it has one."""
    return adapter.with_suffix(f".{HEAD}") if adapter.suffix == ".gguf" else adapter / HEAD


def read_file(path: Path, most: int) -> bytes:
    """Returns a file's content. Raises CheckpointError for one that is missing, no file (a pipe would be waited for),
    or larger than `most` bytes."""
    try:
        if not path.is_file():
            raise CheckpointError(f"{path.name} is missing in {path.parent}")
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > most:
        raise CheckpointError(f"{path}: expected at most {most} bytes, for no adapter of this model has more")
    return data


def read_config(folder: Path) -> tuple[dict[str, Any], bytes]:
    """Returns adapter_config.json, and its bytes. Raises CheckpointError."""
    data = read_file(folder / CONFIG, MOST_CONFIG)
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder / CONFIG} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder / CONFIG}: expected a JSON object, found {type(config).__name__}")
    return config, data


def part_digest(part: memoryview) -> bytes:
    """Returns the digest of `PART` bytes of a file, or of what is left of it."""
    return hashlib.blake2b(part, digest_size=16).digest()


def digest_of_bytes(data: memoryview) -> str:
    """Returns the digest that `read_whole` gives a file of these bytes."""
    parts = (data[begin : begin + PART] for begin in range(0, len(data), PART))
    return joined_digest(map(part_digest, parts))


def joined_digest(digests: Iterable[bytes]) -> str:
    """Returns the digest of a file whose parts have these."""
    return hashlib.blake2b(b"".join(digests), digest_size=16).hexdigest()


def folder_digest(config: bytes, weights: str) -> str:
    """Returns the digest of a folder. config: what its file holds.  weights: their file's digest."""
    return hashlib.blake2b(config + weights.encode(), digest_size=16).hexdigest()
