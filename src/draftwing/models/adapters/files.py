"""The files of an adapter: what they are called, and what is in them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from draftwing.errors import CheckpointError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FILES = (CONFIG, WEIGHTS)
MOST_CONFIG = 1 << 20  # bytes


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


def stored_digest(path: Path) -> str:
    """Returns the digest that an adapter has when it is read: of its files. Raises CheckpointError."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (path,) if path.is_file() else tuple(path / name for name in FILES):
        if not part.is_file():
            raise CheckpointError(f"{part.name} is missing in {part.parent}")
        try:
            with part.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
        except OSError as error:
            raise CheckpointError(f"{part} cannot be read: {error.strerror}") from None
    return digest.hexdigest()
