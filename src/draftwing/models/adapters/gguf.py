"""Adapters as llama.cpp's converter stores them: one GGUF file, with the names and the row order of the model's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwing.errors import CheckpointError
from draftwing.gguf_file import GGUFFile, open_gguf
from draftwing.layers.delta_net import DeltaNetConfig
from draftwing.models.adapters.adapter import Adapter, Factors, checked_factors
from draftwing.models.adapters.files import digest_of_bytes
from draftwing.models.config import ModelConfig
from draftwing.models.gguf_tensors import (
    EXPERT_PARTS,
    EXPERT_TENSORS,
    hf_name,
    layer_name,
    unpermuted,
    without_key_heads,
)
from draftwing.requests.refusals import show

_PARTS = ".lora_a", ".lora_b"


def read_file(path: Path, config: ModelConfig, most: int) -> Adapter:
    """Returns the adapter of a `.gguf` file, on the CPU. Raises CheckpointError, naming what is not served. most: bytes
    of the file."""
    if path.stat().st_size > most:
        raise CheckpointError(f"{path}: expected at most {most} bytes, for no adapter of this model has more")
    file = open_gguf(path)
    _check(file, config)
    alpha = file.metadata.get("adapter.lora.alpha", 0.0)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) < 1e6:
        raise CheckpointError(f"{path}: adapter.lora.alpha: expected a number below a million, found {show(alpha)}")
    names = {name.removesuffix(part) for name in file.tensors for part in _PARTS if name.endswith(part)}
    odd = next((name for name in sorted(file.tensors) if not name.endswith(_PARTS)), None)
    if odd is not None or not names:
        found = "none" if odd is None else show(odd)
        raise CheckpointError(f"{path}: expected tensors .lora_a and .lora_b alone, found {found}")
    factors: dict[str, Factors] = {}
    for name in sorted(names):
        missing = [part for part in _PARTS if f"{name}{part}" not in file.tensors]
        if missing:
            raise CheckpointError(f"{path}: {show(name)} has no {missing[0]}; expected both factors")
        down, up = (torch.from_numpy(file.dequantized(f"{name}{part}")) for part in _PARTS)
        for own, one, other in _each(name, down, up, config, str(path)):
            checked_factors(one, other, f"{path}: {show(name)}")
            for theirs, part in _as_in_folders(own, other, config):
                factors[theirs.removesuffix(".weight")] = Factors(one, part, alpha / len(one) if alpha else 1.0)
    base = file.metadata.get("general.base_model.0.name", "")
    digest = digest_of_bytes(memoryview(file.data.tobytes()))
    return Adapter(factors, digest, base if isinstance(base, str) else "")


def stored_rank(path: Path) -> int:
    """Returns the largest rank of a file. Raises CheckpointError."""
    shapes = [info.shape for name, info in open_gguf(path).tensors.items() if name.endswith(_PARTS[0])]
    return max((shape[-2] for shape in shapes if len(shape) > 1), default=1)


def stored_names(path: Path) -> list[str]:
    """Returns the names of a file's tensors. Raises CheckpointError."""
    return list(open_gguf(path).tensors)


def _check(file: GGUFFile, config: ModelConfig) -> None:
    def found(key: str) -> Any:
        return file.metadata.get(key)

    if found("general.type") != "adapter" or found("adapter.type") != "lora":
        kinds = f"{show(found('general.type'))} and {show(found('adapter.type'))}"
        raise CheckpointError(f"{file.path}: general.type, adapter.type: expected adapter and lora, found {kinds}")
    form = config.family.gguf
    served = () if form is None else (form.architecture, *form.others)
    if found("general.architecture") not in served:
        raise CheckpointError(
            f"{file.path}: general.architecture: expected {' or '.join(served) or 'another model'}, that of the model, "
            f"found {show(found('general.architecture'))}"
        )
    if found("adapter.alora.invocation_tokens") is not None:
        raise CheckpointError(
            f"{file.path}: adapter.alora.invocation_tokens asks for activated LoRA, which begins at tokens of its own "
            "and is not served; expected a plain LoRA"
        )


def _each(name: str, down: Tensor, up: Tensor, config: ModelConfig, path: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yields (name, down, up) of a matrix; of those of all experts, down [experts, r, inputs] and up [experts, outputs,
    r], of each expert's under its name in a folder. Raises CheckpointError."""
    match, experts = EXPERT_PARTS.fullmatch(name), config.experts
    if match is None or experts is None:
        yield name, down, up
        return
    if not down.dim() == up.dim() == 3 or not len(down) == len(up) == experts.count:
        raise CheckpointError(
            f"{path}: {name}: expected factors of {experts.count} experts [experts, r, inputs] and [experts, outputs, "
            f"r]; found {list(down.shape)} and {list(up.shape)}"
        )
    names, parts = config.family.expert_names, EXPERT_TENSORS[match[2]]
    layer = layer_name(int(match[1]), match[2], config, config.num_layers)
    for expert, (one, other) in enumerate(zip(down, up, strict=True)):
        for part, rows in zip(parts, other.tensor_split(len(parts)), strict=True):
            yield f"{layer}.{names.experts}.{expert}.{getattr(names, part)}", one, rows


def _as_in_folders(name: str, up: Tensor, config: ModelConfig) -> list[tuple[str, Tensor]]:
    """Returns the outputs of a matrix under the names, and in the order, of a folder's checkpoint."""
    attention = config.attention
    heads = {"attn_q": attention.heads, "attn_k": attention.kv_heads}.get(name.split(".")[-2], 0) if "." in name else 0
    permuted = config.family.gguf is not None and config.family.gguf.permuted
    if permuted and heads and len(up) == heads * attention.head_dim:
        up = unpermuted(up, heads)
    net = next((layer.mixer for layer in config.layers if isinstance(layer.mixer, DeltaNetConfig)), None)
    parts = ((name, up),) if net is None else without_key_heads(name, up, net)
    return [(hf_name(part, config, config.num_layers), value) for part, value in parts if isinstance(value, Tensor)]
