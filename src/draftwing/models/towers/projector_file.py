"""What reads images beside a GGUF file of a language model: a second file, as llama.cpp has it (`mmproj`). Its metadata
are those of the architecture `clip`."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import TokenType
from torch import Tensor

from draftwing.errors import CheckpointError
from draftwing.gguf_file import GGUFFile, open_gguf
from draftwing.models.config import ModelConfig
from draftwing.models.fields import WIDEST, Fields
from draftwing.models.towers.base import TowerConfig
from draftwing.models.towers.patch_merger import PatchMergerConfig
from draftwing.models.towers.tiles import MeanConfig
from draftwing.requests.refusals import show

logger = logging.getLogger(__name__)
# Names of tensors, and of parameters of the module.
_MERGER_NAMES = {
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
_MEAN_NAMES = {
    r"v\.blk\.(\d+)\.ln(\d)\.(weight|bias)": r"encoder.layers.\1.layer_norm\2.\3",
    r"v\.blk\.(\d+)\.attn_(q|k|v|out)\.(weight|bias)": r"encoder.layers.\1.self_attn.\2_proj.\3",
    r"v\.blk\.(\d+)\.ffn_up\.(weight|bias)": r"encoder.layers.\1.mlp.fc1.\2",
    r"v\.blk\.(\d+)\.ffn_down\.(weight|bias)": r"encoder.layers.\1.mlp.fc2.\2",
    r"v\.position_embd\.weight": "embeddings.position_embedding.weight",
    r"v\.patch_embd\.(weight|bias)": r"embeddings.patch_embedding.\1",
    r"v\.post_ln\.(weight|bias)": r"post_layernorm.\1",
    r"mm\.input_projection\.weight": "mm_input_projection_weight",
    r"mm\.soft_emb_norm\.weight": "mm_soft_emb_norm.weight",
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
        return _read(open_gguf(file), open_gguf(path), config)
    except CheckpointError as error:
        if named:
            raise
        logger.warning("images are not read: %s", error)
        return config


def _read(file: GGUFFile, model: GGUFFile, config: ModelConfig) -> ModelConfig:
    meta = Fields(file.metadata, str(file.path))
    kind = meta.get("clip.vision.projector_type") or meta.get("clip.projector_type")
    read = _READERS.get(kind) if isinstance(kind, str) else None
    if read is None:
        raise CheckpointError(f"{file.path}: clip.projector_type: expected {' or '.join(_READERS)}, found {show(kind)}")
    vision = Fields(file.metadata, str(file.path), "clip.vision.")
    width = vision.whole("projection_dim", high=WIDEST)
    if width != config.hidden_size:
        raise CheckpointError(
            f"{file.path}: expected features of the model's hidden size, {config.hidden_size}, found {width}"
        )
    return read(file, model, config)


def _with_merger(file: GGUFFile, model: GGUFFile, config: ModelConfig) -> ModelConfig:
    """Qwen3-VL, and Qwen3.5 and later."""
    sections = _sections(model)
    taps = tuple(np.flatnonzero(_array(file, "clip.vision.is_deepstack_layers")).tolist())
    key = f"{model.metadata.get('general.architecture')}.n_deepstack_layers"
    deep = model.metadata.get(key, len(taps))
    if deep != len(taps):
        raise CheckpointError(f"{file.path}: expected {deep} layers that add features, as {key}, found {len(taps)}")
    vision = Fields(file.metadata, str(file.path), "clip.vision.")
    positions = file.tensors.get("v.position_embd.weight")
    side = round(positions.shape[0] ** 0.5) if positions is not None else 48
    defaults = PatchMergerConfig(0, 0)
    tower = PatchMergerConfig(
        _token(model, "<|image_pad|>"),
        config.hidden_size,
        len(taps),
        **_layers(vision),
        patch=vision.whole("patch_size", high=256, default=16),
        merge=vision.whole("spatial_merge_size", high=16, default=2),
        side=side,
        taps=taps,
        **_shades(file),
        least=vision.whole("image_min_pixels", high=1 << 40, default=defaults.least),
        most=vision.whole("image_max_pixels", high=1 << 40, default=defaults.most),
    )
    return replace(config, tower=tower, ropes=(replace(config.ropes[0], sections=sections), *config.ropes[1:]))


def _with_means(file: GGUFFile, model: GGUFFile, config: ModelConfig) -> ModelConfig:
    """Gemma 3."""
    vision = Fields(file.metadata, str(file.path), "clip.vision.")
    patch = vision.whole("patch_size", high=256, default=14)
    side, factor = vision.whole("image_size", high=4096, default=896) // patch, 4
    if vision.has("projector.scale_factor"):
        factor = vision.whole("projector.scale_factor", high=64)
    if not side or side % factor:
        raise CheckpointError(f"{file.path}: projector.scale_factor: expected a divisor of {side}, found {factor}")
    tower = MeanConfig(
        _soft_token(model),
        config.hidden_size,
        mutual="all",
        **_layers(vision),
        eps=vision.number("attention.layer_norm_epsilon", 0, 1, 1e-6),
        patch=patch,
        factor=factor,
        side=side,
        **_shades(file),
        around=(_token(model, "<start_of_image>"), _token(model, "<end_of_image>")),
    )
    return replace(config, tower=tower)


_READERS = {"qwen3vl_merger": _with_merger, "gemma3": _with_means}


def _layers(vision: Fields) -> dict[str, Any]:
    """Returns the sizes of layers that all towers have."""
    keys = {
        "hidden": "embedding_length", "ffn": "feed_forward_length", "heads": "attention.head_count",
        "depth": "block_count",
    }  # fmt: skip
    return {name: vision.whole(key, high=1000 if name == "depth" else WIDEST) for name, key in keys.items()}


def _token(model: GGUFFile, text: str) -> int:
    tokens = model.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or text not in tokens:
        raise CheckpointError(f"{model.path}: expected a token {text}, found none")
    return tokens.index(text)


def _soft_token(model: GGUFFile) -> int:
    """Returns the token that stands for images of Gemma 3, or in a file that has left it out one that nothing uses:
    features take the place of its embedding."""
    tokens, kinds = (model.metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    text = "<image_soft_token>"
    if isinstance(tokens, list) and text not in tokens and kinds is not None and len(kinds) == len(tokens):
        found = (kind in (TokenType.CONTROL, TokenType.USER_DEFINED) for kind in kinds)  # which texts can hold
        free = (own for own, fits in zip(tokens, found, strict=True) if fits and str(own).startswith("<unused"))
        text = next(free, text)
    return _token(model, text)


def _shades(file: GGUFFile) -> dict[str, Any]:
    """Returns `mean` and `std` as they were before they became 32 bits, where the file has three numbers."""
    found = {name: _array(file, f"clip.vision.image_{name}") for name in ("mean", "std")}
    return {name: tuple(round(float(one), 7) for one in some) for name, some in found.items() if len(some) == 3}


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


def tensors(path: Path, config: TowerConfig) -> Iterable[tuple[str, Tensor]]:
    """Yields the parameters of the module by name."""
    file = open_gguf(path)
    if isinstance(config, MeanConfig):
        return config.tensors(_of_means(file, config))
    assert isinstance(config, PatchMergerConfig)
    return _of_merger(file, config)


def _of_merger(file: GGUFFile, config: PatchMergerConfig) -> Iterator[tuple[str, Tensor]]:
    at = {layer: i for i, layer in enumerate(config.taps)}
    for name in file.tensors:
        if name == "v.patch_embd.weight":  # of the first of two times, which see the same pixels
            both = [_dense(file, one) for one in (name, f"{name}.1") if one in file.tensors]
            yield "patch_embed.weight", torch.stack(both).sum(0).flatten(1)
        elif (deep := _DEEP.fullmatch(name)) is not None:
            layer, part, leaf = int(deep[1]), deep[2], deep[3]
            part = part if part == "norm" else f"linear_{part}"
            yield f"deepstack_merger_list.{at.get(layer, layer)}.{part}.{leaf}", _dense(file, name)
        elif (own := _own_name(name, _MERGER_NAMES)) is not None:
            yield own, _dense(file, name)


def _of_means(file: GGUFFile, config: MeanConfig) -> Iterator[tuple[str, Tensor]]:
    """As a folder has them: there the norm's weights have 0 for 1, and files add it."""
    up = file.tensors.get("v.blk.0.ffn_up.weight")
    swapped = up is not None and up.shape[0] == config.hidden != config.ffn  # as early files name both
    for name in file.tensors:
        own = _own_name(name, _MEAN_NAMES)
        if own is None:
            continue
        if swapped:
            own = re.sub(r"\.fc([12])\.", lambda found: f".fc{3 - int(found[1])}.", own)
        yield own, _dense(file, name) - (1 if own == "mm_soft_emb_norm.weight" else 0)


def _own_name(name: str, names: Mapping[str, str]) -> str | None:
    for pattern, own in names.items():
        if re.fullmatch(pattern, name):
            return re.sub(pattern, own, name)
    return None


def _dense(file: GGUFFile, name: str) -> Tensor:
    return torch.from_numpy(file.dequantized(name))
