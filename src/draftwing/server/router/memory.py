"""How much memory a model is going to take, from its files alone, and how much one takes: bytes of the host's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from draftwing.config.aliases import ALIASES
from draftwing.config.devices import on_host
from draftwing.config.model_list import ServedModel
from draftwing.config.options import Options
from draftwing.errors import CheckpointError
from draftwing.files import load_json
from draftwing.machine import free_memory

PROCESS_BYTES = 450 << 20  # of a model's processes, without weights and KV: measured, docs/several_models.md
GROWTH_BYTES = 32 << 20  # that they take later than their start, by steps
POOL_BYTES = 2 << 30  # of the KV pool on a CPU by default, a quarter of what is free at most
_LAYERS, _HEADS, _KV_HEADS, _SIZE = "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"
WEIGHTS = (".gguf", ".safetensors", ".bin", ".pt")  # endings of their files
_PART = re.compile(r"-\d{5}-(of-\d{5})$", re.ASCII)


class Forecast(NamedTuple):
    """Bytes. weights: of the model's files, 0 where they are not on this machine.  pool: of the KV cache, when all of
    it has been used, and of `--hicache-size`."""

    weights: int
    pool: int
    process: int = PROCESS_BYTES

    @property
    def all(self) -> int:
        return sum(self)

    def __str__(self) -> str:
        return f"{gigabytes(self.all)} (weights {gigabytes(self.weights)}, KV cache {gigabytes(self.pool)})"


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


def forecast(model: ServedModel, free: int | None = None) -> Forecast:
    """Returns what a model takes where the host computes; on a GPU weights and KV cache are not the host's. free: bytes
    that are, by default those of now."""
    arguments = model.arguments
    files, weights = model_files(model), weight_bytes(model)
    beneath = int((arguments.get("hicache_size") or 0) * 1e9)
    if not on_host(arguments.get("device", Options.device)):
        return Forecast(0, beneath)
    free = max((free_memory() if free is None else free) or 0, 0)
    tokens, fraction = arguments.get("max_total_tokens"), arguments.get("mem_fraction_static")
    if tokens and (slot := _slot_bytes(files)):
        return Forecast(weights, tokens * slot + beneath)
    pool = int(max(free - weights, 0) * fraction) if fraction else min(POOL_BYTES, max(free - weights, 0) // 4)
    return Forecast(weights, pool + beneath)


def weight_bytes(model: ServedModel) -> int:
    """Returns the bytes of a model's files of weights that are on this machine."""
    return sum(file.stat().st_size for file in model_files(model) if file.suffix in WEIGHTS)


def measured(weights: int, pool: int, resident: int) -> Forecast:
    """Returns what a model that has started takes at most. weights: bytes of its files.  pool: bytes of its KV cache
    when all of it has been used.  resident: bytes of its processes, with weights, when little of the cache was."""
    return Forecast(weights, pool, max(resident - weights, 0) + GROWTH_BYTES)


def model_files(model: ServedModel) -> list[Path]:
    """Returns the files of a model that are on this machine: a GGUF file with its parts, or all of a folder."""
    place = _place(model.model, model.arguments.get("revision"))
    if place is None or not place.exists():
        return []
    if place.is_dir():
        return [file for file in place.iterdir() if file.is_file()]
    first = _PART.search(place.stem)
    parts = f"{place.stem[: first.start()]}-*-{first[1]}.gguf" if first else place.name
    return sorted(place.parent.glob(parts)) if first else [place]


def _place(name: str, revision: str | None) -> Path | None:
    # Late: a front that serves a folder needs none of it.
    from draftwing.models.hub import default_model_file, hub_id
    from draftwing.models.hub_files import cached

    alias = ALIASES.get(name)
    if alias is not None:
        return default_model_file() if alias.hub is None else cached(alias.hub.repo, revision or alias.hub.commit)
    path = Path(name).expanduser()
    if path.exists():
        return path
    found = hub_id(name)
    return None if found is None else cached(found.repo, revision, gguf=found.gguf)


def _slot_bytes(files: list[Path]) -> int:
    """Returns about how many bytes a token has in the KV cache, at most; 0: a config does not say."""
    config = next((file for file in files if file.name == "config.json"), None)
    try:
        read = load_json(config) if config is not None else _gguf_config(files[0])
        read = read | (read.get("text_config") or {})
        heads = read.get(_KV_HEADS) or read[_HEADS]
        size = read.get(_SIZE) or read["hidden_size"] // read[_HEADS]
        return int(2 * read[_LAYERS] * heads * size * 4)  # keys and values in float32 at most
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, CheckpointError):
        return 0


def _gguf_config(file: Path) -> dict[str, Any]:
    from draftwing.gguf_file import open_gguf

    data = open_gguf(file).metadata
    family = data["general.architecture"]
    heads = data[f"{family}.attention.head_count"]
    return {
        _LAYERS: data[f"{family}.block_count"],
        _HEADS: heads,
        _KV_HEADS: data.get(f"{family}.attention.head_count_kv", heads),
        _SIZE: data.get(f"{family}.attention.key_length"),
        "hidden_size": data[f"{family}.embedding_length"],
    }


# -- of processes that run ---------------------------------------------------------------------------------------------


def taken(pid: int) -> int:
    """Returns the bytes that a process and those that it has started take; what they share is divided among them. 0
    where that is not known."""
    return sum(map(_taken_alone, [pid, *_descendants(pid)]))


def _descendants(pid: int) -> list[int]:
    found, waiting = [], [pid]
    while waiting:
        one = waiting.pop()
        for children in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                new = [int(child) for child in children.read_text().split()]
            except OSError:
                continue  # it has ended
            found += new
            waiting += new
    return found


def _taken_alone(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
