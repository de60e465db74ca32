"""Reads an adapter in whichever format it is stored."""

from __future__ import annotations

from pathlib import Path

from draftwing.errors import CheckpointError
from draftwing.models.adapters import peft
from draftwing.models.adapters.adapter import MAX_RANK, Adapter
from draftwing.models.adapters.files import CONFIG, read_config


def read_adapter(path: Path, most: int) -> Adapter:
    """Returns the adapter of a folder of PEFT's, on the CPU. Raises CheckpointError. most: bytes of its tensors."""
    _check(path)
    return peft.read_folder(path, most)


def stored_rank(path: Path) -> int:
    """Returns the largest rank that an adapter says it has, without its tensors. Raises CheckpointError."""
    _check(path)
    config, _ = read_config(path)
    patterns = config.get("rank_pattern") or {}
    ranks = [config.get("r", 8), *(patterns.values() if isinstance(patterns, dict) else ())]
    return max((rank for rank in ranks if isinstance(rank, int) and 0 < rank <= MAX_RANK), default=1)


def _check(path: Path) -> None:
    if not path.is_dir():
        raise CheckpointError(f"{path}: expected the folder of an adapter, with {CONFIG}; found none")
