"""An adapter (LoRA) in the weights of a target, whose features a head is trained on."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from draftwing.errors import ConfigError
from draftwing.models.adapters.adapter import MAX_RANK, AdapterTargets
from draftwing.models.adapters.read import read_adapter
from draftwing.models.decoder import WIDE, DecoderModel


@torch.no_grad()
def merge_adapter(model: DecoderModel, path: Path) -> None:
    """Adds what an adapter does to the weights of a model that is not packed, summed in float32. Raises
    CheckpointError, and ConfigError for weights that are quantised."""
    targets, linears = AdapterTargets(model, WIDE), model.adaptable(WIDE)
    adapter = targets.fit(read_adapter(path, targets.config, targets.most_bytes(MAX_RANK)))
    for name, factors in adapter.factors.items():
        target = targets.targets[name]
        weight, ends = getattr(linears[target.linear], "weight", None), targets.ends[target.linear]
        if not isinstance(weight, Tensor) or not weight.is_floating_point():
            raise ConfigError(
                f"--adapter: expected a model whose weights are stored in floating point; found {name} quantised: "
                "train on the model that it was made of"
            )
        rows = weight[ends[target.slice - 1] if target.slice else 0 : ends[target.slice]]
        down, up, scale = target.of(factors)
        added = scale * up.to(rows.device).float() @ down.to(rows.device).float()
        rows.copy_(rows.float() + added)
