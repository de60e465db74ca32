"""Loads what reads images beside a language model."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from draftwing.errors import CheckpointError
from draftwing.layers.linear_ops.base import WeightFormat
from draftwing.layers.linear_ops.dense import DENSE, blocks_or_dense
from draftwing.models.dummy import SEED
from draftwing.models.folder import folder_tensors
from draftwing.models.loader import allocate, fill_parameters
from draftwing.models.towers import projector_file
from draftwing.models.towers.base import Tower, TowerConfig, TowerModule
from draftwing.models.weight_map import canonical
from draftwing.models.weight_map import stored_tensors as in_checkpoint
from draftwing.ops.table import LayerOps

logger = logging.getLogger(__name__)


def load_tower(
    config: TowerConfig,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    device: torch.device,
    weight_format: WeightFormat,
    ops: LayerOps,
    dummy: bool = False,
) -> Tower:
    """Loads a tower, packed. tensors: by name of the module's parameters.  dtype: of features, and of weights that are
    not in blocks.  weight_format: of the language model's matrices.  dummy: random weights. Raises CheckpointError."""
    module = config.build(dtype, torch.device("meta"), blocks_or_dense(weight_format))
    try:
        given = _random(config.build(dtype, torch.device("meta"), DENSE), device) if dummy else tensors
        fill_parameters(module, dict(module.table()), given, device)
    except CheckpointError as error:
        raise CheckpointError(f"what reads images: {error}; --disable-images serves the model without it") from None
    module.requires_grad_(False)
    module.settle(device)
    size = sum(param.nbytes for param in module.parameters())
    module.pack(ops)
    logger.info("what reads images is loaded, %.2f GB; --disable-images leaves it out", size / 1e9)
    return Tower(config, module, dtype)


def stored_tensors(path: Path, config: TowerConfig) -> Iterable[tuple[str, Tensor]]:
    """Returns the tensors of the tower in a folder, or of the file beside a `.gguf` file, as `load_tower` takes
    them."""
    return projector_file.tensors(path, config) if path.suffix == ".gguf" else config.tensors(_own(path, config))


def _own(path: Path, config: TowerConfig) -> Iterator[tuple[str, Tensor]]:
    def is_others(name: str) -> bool:
        return not name.startswith(config.prefixes)

    for stored, value in folder_tensors(path, unread=is_others):
        name = canonical(stored)
        prefix = next(prefix for prefix in config.prefixes if name.startswith(prefix))
        yield name.removeprefix(prefix), value


def _random(module: TowerModule, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yields random tensors as a checkpoint has them. module: without blocks, on the meta device."""
    generator = torch.Generator().manual_seed(SEED)
    for name, meta in list(module.named_parameters()):
        param = allocate(module, name, meta, device)
        values = (
            torch.randn(meta.shape, generator=generator) / meta.shape[-1] ** 0.5
            if meta.dim() > 1
            else torch.ones(meta.shape)
        )
        param.data.copy_(values)
    yield from in_checkpoint(module, dict(module.table()))
