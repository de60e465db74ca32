"""Adapters as PEFT stores them, of random factors; and the same merged into a model, in float64."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def shapes_of(model: Path) -> dict[str, tuple[int, int]]:
    """Returns outputs and inputs of the matrices of a checkpoint's layers, by module."""
    tensors = load_file(model / "model.safetensors")
    return {
        name.removesuffix(".weight"): (value.shape[0], value.shape[1])
        for name, value in tensors.items()
        if value.dim() == 2 and ".layers." in name
    }


def write_adapter(
    folder: Path, model: Path, seed: int = 0, rank: int = 4, targets: Sequence[str] = ATTENTION + MLP,
    strength: float = 1.0, dtype: torch.dtype = torch.float32, shapes: Mapping[str, tuple[int, int]] | None = None,
    **config: Any,
) -> Path:  # fmt: skip
    """strength: about what the adapter adds, of what the matrix gives. config: further keys of adapter_config.json."""
    generator = torch.Generator().manual_seed(1000 + seed)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets)} | config
    found: dict[str, torch.Tensor] = {}
    for module, (outputs, inputs) in (shapes or shapes_of(model)).items():
        if module.rpartition(".")[2] not in targets:
            continue
        own = next((r for name, r in settings.get("rank_pattern", {}).items() if module.endswith(name)), rank)
        down = torch.randn(own, inputs, generator=generator) / inputs**0.5
        up = torch.randn(outputs, own, generator=generator) * strength / (2 * own**0.5)
        found[f"base_model.model.{module}.lora_A.weight"] = down.to(dtype).contiguous()
        found[f"base_model.model.{module}.lora_B.weight"] = up.to(dtype).contiguous()
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(found, folder / "adapter_model.safetensors")
    return folder


def scale_of(config: Mapping[str, Any], module: str, rank: int) -> float:
    alpha = next((a for name, a in config.get("alpha_pattern", {}).items() if module.endswith(name)), None)
    alpha = config["lora_alpha"] if alpha is None else alpha
    return float(alpha / rank**0.5 if config.get("use_rslora") else alpha / rank)


def merged(model: Path, adapter: Path, folder: Path) -> Path:
    """Writes the checkpoint with scale * B @ A added to its matrices, computed in float64."""
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors, config = load_file(model / "model.safetensors"), json.loads((adapter / "adapter_config.json").read_text())
    factors = load_file(adapter / "adapter_model.safetensors")
    for name, down in factors.items():
        if ".lora_A." in name:
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            added = factors[name.replace("lora_A", "lora_B")].double() @ down.double()
            whole = tensors[f"{module}.weight"].double() + scale_of(config, module, len(down)) * added
            tensors[f"{module}.weight"] = whole.to(tensors[f"{module}.weight"].dtype)
    save_file(tensors, folder / "model.safetensors")
    return folder


def mutated(data: bytes, draw: random.Random, most: int | None = None) -> bytes:
    """Returns a file's content with one to four faults, in its first `most` bytes: bits, bytes, what is missing or too
    much."""
    found = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at, how = draw.randrange(min(len(found), most or len(found))), draw.randrange(4)
        if how == 0:
            found[at] ^= 1 << draw.randrange(8)
        elif how == 1:
            found[at] = draw.randrange(256)
        elif how == 2:
            del found[at : at + draw.randint(1, 40)]
        else:
            found[at:at] = draw.randbytes(draw.randint(1, 20))
    return bytes(found)
