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
from draftwing.models.towers.pooled import PooledConfig
from draftwing.models.towers.tiles import GridConfig, MeanConfig, SplitConfig, TilesConfig
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
_TILE_NAMES = {
    r"v\.blk\.(\d+)\.ln(\d)\.(weight|bias)": r"encoder.layers.\1.layer_norm\2.\3",
    r"v\.blk\.(\d+)\.attn_(q|k|v|out)\.(weight|bias)": r"encoder.layers.\1.self_attn.\2_proj.\3",
    r"v\.blk\.(\d+)\.ffn_up\.(weight|bias)": r"encoder.layers.\1.mlp.fc1.\2",
    r"v\.blk\.(\d+)\.ffn_down\.(weight|bias)": r"encoder.layers.\1.mlp.fc2.\2",
    r"v\.position_embd\.weight": "embeddings.position_embedding.weight",
    r"v\.patch_embd\.(weight|bias)": r"embeddings.patch_embedding.\1",
    r"v\.post_ln\.(weight|bias)": r"post_layernorm.\1",
    r"mm\.input_projection\.weight": "mm_input_projection_weight",
    r"mm\.soft_emb_norm\.weight": "mm_soft_emb_norm.weight",
    r"mm\.model\.fc\.weight": "projection.proj.weight",
    r"mm\.input_norm\.(weight|bias)": r"layer_norm.\1",
    r"mm\.([12])\.(weight|bias)": r"linear_\1.\2",
}
_CLIPS = "input_min|input_max|output_min|output_max"
_POOLED_NAMES = {
    r"v\.blk\.(\d+)\.ln1\.weight": r"encoder.layers.\1.input_layernorm.weight",
    r"v\.blk\.(\d+)\.ln2\.weight": r"encoder.layers.\1.pre_feedforward_layernorm.weight",
    r"v\.blk\.(\d+)\.attn_post_norm\.weight": r"encoder.layers.\1.post_attention_layernorm.weight",
    r"v\.blk\.(\d+)\.ffn_post_norm\.weight": r"encoder.layers.\1.post_feedforward_layernorm.weight",
    r"v\.blk\.(\d+)\.attn_([qk])_norm\.weight": r"encoder.layers.\1.self_attn.\2_norm.weight",
    r"v\.blk\.(\d+)\.attn_out\.weight": r"encoder.layers.\1.self_attn.o_proj.linear.weight",
    rf"v\.blk\.(\d+)\.attn_out\.({_CLIPS})": r"encoder.layers.\1.self_attn.o_proj.\2",
    r"v\.blk\.(\d+)\.attn_(q|k|v)\.weight": r"encoder.layers.\1.self_attn.\2_proj.linear.weight",
    rf"v\.blk\.(\d+)\.attn_(q|k|v)\.({_CLIPS})": r"encoder.layers.\1.self_attn.\2_proj.\3",
    r"v\.blk\.(\d+)\.ffn_(gate|up|down)\.weight": r"encoder.layers.\1.mlp.\2_proj.linear.weight",
    rf"v\.blk\.(\d+)\.ffn_(gate|up|down)\.({_CLIPS})": r"encoder.layers.\1.mlp.\2_proj.\3",
    r"v\.patch_embd\.weight": "patch_embedder.input_proj.weight",
    r"v\.position_embd\.weight": "patch_embedder.position_embedding_table",
    r"v\.std_(bias|scale)": r"std_\1",
    r"mm\.input_projection\.weight": "embedding_projection.weight",
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
    defaults = PatchMergerConfig(0, 0)
    tower = PatchMergerConfig(
        _token(model, "<|image_pad|>"),
        config.hidden_size,
        len(taps),
        **_layers(vision),
        patch=vision.whole("patch_size", high=256, default=16),
        merge=vision.whole("spatial_merge_size", high=16, default=2),
        side=_side(file, 48),
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


def _with_tiles(file: GGUFFile, model: GGUFFile, config: ModelConfig) -> ModelConfig:
    """SmolVLM and Idefics3."""
    vision = Fields(file.metadata, str(file.path), "clip.vision.")
    sizes = _of_squares(file, config.hidden_size)
    side = vision.whole("image_size", high=4096, default=512) // sizes["patch"]
    longest = vision.whole("preproc_image_size", high=4096, default=4 * side * sizes["patch"])
    return replace(config, tower=SplitConfig(_token(model, "<image>"), **sizes, side=side, longest=longest))


def _with_grids(file: GGUFFile, model: GGUFFile, config: ModelConfig) -> ModelConfig:
    """LFM2-VL."""
    projector = file.tensors.get("mm.1.weight")
    if projector is None:
        raise CheckpointError(f"{file.path}: expected a tensor mm.1.weight, found none")
    tower = GridConfig(
        _token(model, "<image>"), **_of_squares(file, config.hidden_size), side=_side(file, 16),
        projector=projector.shape[0], joined_norm="mm.input_norm.weight" in file.tensors,
    )  # fmt: skip
    return replace(config, tower=tower)


def _of_squares(file: GGUFFile, width: int) -> dict[str, Any]:
    """Returns what towers of plain layers have in common that join a square of patches to a token."""
    vision = Fields(file.metadata, str(file.path), "clip.vision.")
    return {
        "width": width, **_layers(vision), **_shades(file), "patch": vision.whole("patch_size", high=256, default=16),
        "eps": vision.number("attention.layer_norm_epsilon", 0, 1, 1e-6),
        "factor": vision.whole("projector.scale_factor", high=64, default=2),
    }  # fmt: skip


def _with_pools(file: GGUFFile, model: GGUFFile, config: ModelConfig) -> ModelConfig:
    """Gemma 4. Tokens of an image see each other in models without embeddings by layer, which no file says."""
    vision = Fields(file.metadata, str(file.path), "clip.vision.")
    sizes = _layers(vision)
    queries, positions = (file.tensors.get(name) for name in ("v.blk.0.attn_q.weight", "v.position_embd.weight"))
    if queries is None or positions is None or len(positions.shape) != 3:
        raise CheckpointError(f"{file.path}: expected queries of a layer and two tables of positions, found others")
    tower = PooledConfig(
        _token(model, "<|image|>"),
        config.hidden_size,
        blank=Fields(model.metadata, str(model.path)).whole("tokenizer.ggml.padding_token_id", 0, default=0),
        mutual="" if config.layers[0].per_layer else "windows",
        **sizes,
        head_dim=queries.shape[0] // sizes["heads"],
        eps=vision.number("attention.layer_norm_epsilon", 0, 1, 1e-6),
        patch=vision.whole("patch_size", high=256, default=16),
        pool=vision.whole("projector.scale_factor", high=64, default=3),
        positions=positions.shape[1],
        clipped=any(name.endswith(".input_max") for name in file.tensors),
        standardised="v.std_bias" in file.tensors,
        around=(_token(model, "<|image>"), _token(model, "<image|>")),
    )
    return replace(config, tower=tower)


_READERS = {
    "qwen3vl_merger": _with_merger, "gemma3": _with_means, "idefics3": _with_tiles, "lfm2": _with_grids,
    "gemma4v": _with_pools,
}  # fmt: skip


def _layers(vision: Fields) -> dict[str, Any]:
    """Returns the sizes of layers that all towers have."""
    keys = {
        "hidden": "embedding_length", "ffn": "feed_forward_length", "heads": "attention.head_count",
        "depth": "block_count",
    }  # fmt: skip
    return {name: vision.whole(key, high=1000 if name == "depth" else WIDEST) for name, key in keys.items()}


def _side(file: GGUFFile, default: int) -> int:
    """Returns the side of the square of positions."""
    positions = file.tensors.get("v.position_embd.weight")
    return default if positions is None else round(positions.shape[0] ** 0.5)


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
    if isinstance(config, PatchMergerConfig):
        return _of_merger(file, config)
    if isinstance(config, PooledConfig):
        return _of_pools(file)
    assert isinstance(config, TilesConfig)
    return config.tensors(_of_tiles(file, config))


def _of_pools(file: GGUFFile) -> Iterator[tuple[str, Tensor]]:
    for name in file.tensors:
        own = _own_name(name, _POOLED_NAMES)
        if own is None:
            continue
        value = _dense(file, name)
        if value.dim() == 4:  # [hidden, 3, patch, patch]
            value = value.permute(0, 2, 3, 1).flatten(1)
        yield own, value.squeeze() if own.endswith(("_min", "_max")) else value


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


def _of_tiles(file: GGUFFile, config: TilesConfig) -> Iterator[tuple[str, Tensor]]:
    """As a folder has them: there the norm's weights have 0 for 1, and files add it."""
    up = file.tensors.get("v.blk.0.ffn_up.weight")
    swapped = up is not None and up.shape[0] == config.hidden != config.ffn  # as early files name both
    for name in file.tensors:
        own = _own_name(name, _TILE_NAMES)
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
