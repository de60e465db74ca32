"""Reads an adapter in whichever format it is stored."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from draftwing.errors import CheckpointError
from draftwing.models.adapters import gguf, peft
from draftwing.models.adapters.adapter import MAX_RANK, Adapter
from draftwing.models.adapters.files import CONFIG, WEIGHTS, read_config
from draftwing.models.adapters.groups import kinds_of
from draftwing.models.config import ModelConfig


def read_adapter(path: Path, config: ModelConfig, most: int) -> Adapter:
    """Returns the adapter of a folder of PEFT's or a GGUF file, on the CPU. Raises CheckpointError. config: of the
    model.  most: bytes of its tensors."""
    return gguf.read_file(path, config, most) if _is_file(path) else peft.read_folder(path, most)


def stored_rank(path: Path) -> int:
    """Returns the largest rank that an adapter says it has, without its tensors. Raises CheckpointError."""
    if _is_file(path):
        return gguf.stored_rank(path)
    config, _ = read_config(path)
    patterns = config.get("rank_pattern") or {}
    ranks = [config.get("r", 8), *(patterns.values() if isinstance(patterns, dict) else ())]
    return max((rank for rank in ranks if isinstance(rank, int) and 0 < rank <= MAX_RANK), default=1)


def stored_kinds(path: Path) -> set[str]:
    """Returns which kinds an adapter has matrices of, as `kind_of` has them, by the names of its tensors; none of one
    that cannot be read. Raises CheckpointError where there is none."""
    if _is_file(path):
        return kinds_of(gguf.stored_names(path))
    try:
        with safe_open(path / WEIGHTS, "pt") as file:
            # Of all experts a module is called so itself.
            return kinds_of(name.replace(".lora_", ".") for name in file.keys())  # noqa: SIM118
    except (OSError, SafetensorError):
        return set()


def _is_file(path: Path) -> bool:
    if path.is_file() and path.suffix == ".gguf":
        return True
    if not path.is_dir():
        raise CheckpointError(f"{path}: expected the folder of an adapter, with {CONFIG}, or a .gguf file; found none")
    return False
