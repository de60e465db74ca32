"""What reads images beside a GGUF file of a language model: a second file, as llama.cpp has it (`mmproj`). Its metadata
are those of the architecture `clip`."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwing.errors import CheckpointError
from draftwing.gguf_file import GGUFFile, open_gguf
from draftwing.models.config import ModelConfig
from draftwing.models.fields import WIDEST, Fields
from draftwing.models.towers.base import TowerConfig
from draftwing.models.towers.patch_merger import PatchMergerConfig
from draftwing.requests.refusals import show

logger = logging.getLogger(__name__)
_MERGER = "qwen3vl_merger"  # the one projector that is read here
_IMAGE = "<|image_pad|>"  # as its tokenizers call the token of images
# Names of tensors, and of parameters of the module.
_NAMES = {
    r"v\.blk\.(\d+)\.ln(\d)\.(weight|bias)": r"blocks.\1.norm\2.\3",
    r"v\.blk\.(\d+)\.attn_qkv\.(weight|bias)": r"blocks.\1.attn.qkv.\2",
    r"v\.blk\.(\d+)\.attn_out\.(weight|bias)": r"blocks.\1.attn.proj.\2",
    r"v\.blk\.(\d+)\.ffn_up\.(weight|bias)": r"blocks.\1.mlp.linear_fc1.\2",
    r"v\.blk\.(\d+)\.ffn_down\.(weight|bias)": r"blocks.\1.mlp.linear_fc2.\2",
    r"v\.position_embd\.weight": "pos_embed.weight",
    r"v\.patch_embd\.bias": "patch_embed.bias",
    r"v\.post_ln\.(weight|bias)": r"merger.norm.\1",
    r"mm\.0\.(weight|bias)": r"merger.linear_fc1.\1",
    r"mm\.2\.(weight|bias)": r"merger.linear_fc2.\1",
}
_DEEP = re.compile(r"v\.deepstack\.(\d+)\.(norm|fc1|fc2)\.(weight|bias)")


def find(path: Path, named: str | None) -> Path | None:
    """Returns the file with what reads images of a model in a `.gguf` file: the one that is named, else the one beside
    it. Raises CheckpointError where there is none of this name."""
    if path.suffix != ".gguf":
        if named is not None:
            raise CheckpointError("--mmproj is for a model in a .gguf file; a folder has what reads images within")
        return None
    if named is not None:
        chosen = Path(named).expanduser()
        if not chosen.is_file():
            raise CheckpointError(f"--mmproj: expected a .gguf file, found none at {chosen}")
        return chosen
    found = sorted(path.parent.glob("mmproj*.gguf"))
    if len(found) > 1:
        logger.warning("of %d files mmproj*.gguf %s is read; --mmproj names another", len(found), found[0].name)
    return found[0] if found else None


def with_projector(config: ModelConfig, path: Path, file: Path, named: bool) -> ModelConfig:
    """Returns the config of a model in a `.gguf` file with that of what reads images. named: by the user: then what is
    not served is an error, else it is logged. Raises CheckpointError."""
    try:
        tower, sections = _read(open_gguf(file), open_gguf(path), config)
    except CheckpointError as error:
        if named:
            raise
        logger.warning("images are not read: %s", error)
        return config
    return replace(config, tower=tower, ropes=(replace(config.ropes[0], sections=sections), *config.ropes[1:]))


def _read(file: GGUFFile, model: GGUFFile, config: ModelConfig) -> tuple[TowerConfig, tuple[int, ...]]:
    meta = Fields(file.metadata, str(file.path))
    kind = meta.get("clip.vision.projector_type") or meta.get("clip.projector_type")
    if kind != _MERGER:
        raise CheckpointError(f"{file.path}: clip.projector_type: expected {_MERGER}, found {show(kind)}")
    vision = Fields(file.metadata, str(file.path), "clip.vision.")
    width = vision.whole("projection_dim", high=WIDEST)
    if width != config.hidden_size:
        raise CheckpointError(
            f"{file.path}: expected features of the model's hidden size, {config.hidden_size}, found {width}"
        )
    tokens = model.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or _IMAGE not in tokens:
        raise CheckpointError(f"{model.path}: expected a token {_IMAGE}, found none")
    sections = _sections(model)
    taps = tuple(np.flatnonzero(_array(file, "clip.vision.is_deepstack_layers")).tolist())
    key = f"{model.metadata.get('general.architecture')}.n_deepstack_layers"
    deep = model.metadata.get(key, len(taps))
    if deep != len(taps):
        raise CheckpointError(f"{file.path}: expected {deep} layers that add features, as {key}, found {len(taps)}")
    positions = file.tensors.get("v.position_embd.weight")
    side = round(positions.shape[0] ** 0.5) if positions is not None else 48
    defaults = PatchMergerConfig(0, 0)
    mean, std = (_array(file, f"clip.vision.{name}") for name in ("image_mean", "image_std"))
    tower = PatchMergerConfig(
        tokens.index(_IMAGE),
        width,
        len(taps),
        hidden=vision.whole("embedding_length", high=WIDEST),
        ffn=vision.whole("feed_forward_length", high=WIDEST),
        heads=vision.whole("attention.head_count", high=WIDEST),
        depth=vision.whole("block_count", high=1000),
        patch=vision.whole("patch_size", high=256, default=16),
        merge=vision.whole("spatial_merge_size", high=16, default=2),
        side=side,
        taps=taps,
        mean=_shades(mean) or defaults.mean,
        std=_shades(std) or defaults.std,
        least=vision.whole("image_min_pixels", high=1 << 40, default=defaults.least),
        most=vision.whole("image_max_pixels", high=1 << 40, default=defaults.most),
    )
    return tower, sections


def _shades(found: np.ndarray[Any, Any]) -> tuple[float, ...]:
    """Returns three numbers as they were before they became 32 bits; nothing of any other array."""
    return tuple(round(float(one), 7) for one in found) if len(found) == 3 else ()


def _sections(model: GGUFFile) -> tuple[int, ...]:
    """Returns pairs that are turned by time, height and width."""
    key = f"{model.metadata.get('general.architecture')}.rope.dimension_sections"
    found = _array(model, key).tolist()[:3]
    if len(found) != 3:
        raise CheckpointError(f"{model.path}: {key}: expected three numbers of pairs, found {show(found)}")
    return tuple(map(int, found))


def _array(file: GGUFFile, key: str) -> np.ndarray[Any, Any]:
    found = file.metadata.get(key)
    return found if isinstance(found, np.ndarray) else np.asarray(found if isinstance(found, list) else [])


def tensors(path: Path, config: TowerConfig) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters of the module by name."""
    assert isinstance(config, PatchMergerConfig)
    file, at = open_gguf(path), {layer: i for i, layer in enumerate(config.taps)}
    for name in file.tensors:
        if name == "v.patch_embd.weight":  # of the first of two times, which see the same pixels
            both = [_dense(file, one) for one in (name, f"{name}.1") if one in file.tensors]
            yield "patch_embed.weight", torch.stack(both).sum(0).flatten(1)
        elif (own := _own_name(name, at)) is not None:
            yield own, _dense(file, name)


def _own_name(name: str, at: Mapping[int, int]) -> str | None:
    deep = _DEEP.fullmatch(name)
    if deep is not None:
        layer, part, leaf = int(deep[1]), deep[2], deep[3]
        return f"deepstack_merger_list.{at.get(layer, layer)}.{part if part == 'norm' else f'linear_{part}'}.{leaf}"
    for pattern, own in _NAMES.items():
        if re.fullmatch(pattern, name):
            return re.sub(pattern, own, name)
    return None


def _dense(file: GGUFFile, name: str) -> Tensor:
    return torch.from_numpy(file.dequantized(name))
