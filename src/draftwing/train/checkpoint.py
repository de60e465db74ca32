"""Writes a trained head as published heads are: the tensor names and config keys of EAGLE, EAGLE-3, DFlash, DSpark and
MiMo.

Names and shapes come from the head's own `stored_tensors`, the table that the loader reads by.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftwing.errors import CheckpointError, ConfigError
from draftwing.files import replace_file, write_json
from draftwing.layers.attention import AttentionConfig
from draftwing.layers.rope import RopeConfig
from draftwing.models.config import ModelConfig
from draftwing.models.families import FAMILIES
from draftwing.models.heads.base import FeatureHead
from draftwing.models.heads.block import BlockHead
from draftwing.models.heads.config import MARKOV, BlockConfig, resolve_aux_layers
from draftwing.models.heads.eagle import Eagle3Head, EagleHead
from draftwing.models.heads.mtp import MTPHead

_EAGLE_CLASSES = ["LlamaForCausalLMEagle", "LlamaForCausalLM"]

_HEADER = 256  # bytes of a safetensors header that a tensor takes at most, its name included
_ALIGNMENT = 64  # bytes of a header besides that


def save_head(
    head: FeatureHead,
    folder: str | Path,
    dtype: torch.dtype = torch.bfloat16,
    max_file_bytes: int = 5 << 30,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Writes config.json and the weights into `folder`, in the place of a head that was there; returns the folder.

    dtype: of floating point tensors.  max_file_bytes: weights that do not fit one file of this size are split into
    shards with an index.  extra: further keys of the config.

    Files appear complete under their names, config.json last. Raises ConfigError for a tensor that alone is larger
    than a file may be.
    """
    folder = Path(folder)
    tensors = {
        name: tensor.to("cpu", dtype if tensor.is_floating_point() else None).contiguous()
        for name, tensor in head.stored_tensors()
    }
    shards = _shards(tensors, max_file_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    # A folder in the middle of being replaced has no config, so that it is not taken for a head.
    for stale in (folder / "config.json", *folder.glob("model*.safetensors"), folder / "model.safetensors.index.json"):
        stale.unlink(missing_ok=True)
    where: dict[str, str] = {}
    for i, names in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        where |= dict.fromkeys(names, file)
        partial = folder / f"{file}.partial"
        # Views of one parameter share its memory, which the format refuses: each tensor in memory of its own.
        save_file({name: tensors[name].clone() for name in names}, partial, metadata={"format": "pt"})
        partial.chmod(0o644)  # the library lets only the owner read it
        replace_file(partial, folder / file)
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where}, 2)
    write_json(folder / "config.json", {**head_config(head, dtype), **(extra or {})}, 2)
    return folder


def head_config(head: FeatureHead, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the config.json of a head whose tensors are stored in `dtype`."""
    if isinstance(head, MTPHead):
        return _mtp_config(head, dtype)
    if isinstance(head, BlockHead):
        return _block_keys(head, dtype)
    if not isinstance(head, EagleHead | Eagle3Head):
        raise ConfigError(f"{type(head).__name__} has no published format")
    config = head.config
    # The class names that engines look for: of EAGLE's two, some know the first and some the second.
    classes = ["LlamaForCausalLMEagle3"] if isinstance(head, Eagle3Head) else _EAGLE_CLASSES
    keys = {"architectures": classes, "model_type": "llama", **_sizes(config, dtype)}
    keys |= {"attention_bias": False, "mlp_bias": False, "bias": head.fc is not None and head.fc.bias is not None}
    windows = [mixer.window for mixer in (one.mixer for one in config.layers) if isinstance(mixer, AttentionConfig)]
    if any(windows):
        kinds = ["sliding_attention" if window else "full_attention" for window in windows]
        keys |= {"layer_types": kinds, "sliding_window": max(windows)}
    if isinstance(head, EagleHead):
        return keys | ({"qkv_bias": True} if config.attention.qkv_bias else {})
    eagle, layers = head.eagle, head.target.config.num_layers
    keys["draft_vocab_size"] = eagle.draft_vocab or config.vocab_size
    keys["target_hidden_size"] = eagle.aux_size
    switches = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    keys |= {key: True for key in switches if getattr(eagle, key)}
    if eagle.mask is not None:
        keys["pard_token"] = eagle.mask
    ids = aux_layer_ids(eagle.aux_layers, layers) if eagle.fused else None
    if not eagle.fused:
        keys["eagle_config"] = {"use_aux_hidden_state": False}
    if ids is not None:
        keys["num_aux_hidden_states"] = len(ids)
        keys["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
    return keys


def aux_layer_ids(aux_layers: Sequence[int], layers: int) -> list[int] | None:
    """Returns the ids by which a config names the residual streams `aux_layers` of a target with so many layers; None
    where nothing need be said.

    Ids count the layers whose output is meant, unless that would be read otherwise; see `resolve_aux_layers`. Raises
    ConfigError for auxiliary hidden states that no ids name without being misread.
    """
    checked_aux_layers(aux_layers, layers)
    for ids in (None, [layer - 1 for layer in aux_layers], list(aux_layers)):
        raw = {} if ids is None else {"eagle_aux_hidden_state_layer_ids": ids}
        try:
            if resolve_aux_layers(raw, len(aux_layers), layers, "auto") == tuple(aux_layers):
                return ids
        except CheckpointError:
            continue
    raise ConfigError(
        f"auxiliary layers {list(aux_layers)}: a config could only name them in a way that is taken for others; "
        "let the first be neither 0 nor 3, or the last the number of layers"
    )


def checked_aux_layers(aux_layers: Sequence[int], layers: int) -> tuple[int, ...]:
    """Returns `aux_layers`. Raises ConfigError for residual streams that a target of so many layers does not have."""
    if min(aux_layers) < 0 or max(aux_layers) > layers:
        raise ConfigError(
            f"aux_layers: expected 0 to {layers} for a target of {layers} layers, found {list(aux_layers)}"
        )
    return tuple(aux_layers)


def _block_keys(head: BlockHead, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the config of a head that drafts blocks: DeepSpec's of one with a Markov head, else z-lab's; with the
    speculators library's key of a vocabulary of its own, where it has one."""
    block, config = head.config_of_block, head.config
    layer_ids = [layer - 1 for layer in block.aux_layers]
    own = {"block_size": block.rows, "mask_token_id": block.mask, "target_layer_ids": layer_ids}
    keys = {"model_type": "qwen3", **_sizes(config, dtype), "num_target_layers": head.target.config.num_layers}
    if any(block.windows):
        keys["layer_types"] = ["sliding_attention" if window else "full_attention" for window in block.windows]
        keys["sliding_window"] = max(block.windows)
    if block.draft_vocab:
        keys["draft_vocab_size"] = block.draft_vocab
    if not any(block.windows) or block.causal != tuple(map(bool, block.windows)):  # what the kinds of layers say
        own["is_causal"] = all(block.causal)
    if block.markov == "domino":
        own |= {"projector_type": "domino", "emb_dim": block.rank, "gru_hidden_dim": block.memory}
        own["pure_draft_prefix_len"] = 1
    own |= _dflash2_keys(block)
    if block.markov not in MARKOV:
        name = "DFlash2DraftModel" if block.taps or block.candidates else "DFlashDraftModel"
        keys = {"architectures": [name], **keys, "block_size": block.rows}
        return keys | {"sample_from_anchor": block.from_anchor, "dflash_config": own}
    return {
        "architectures": ["Qwen3DSparkModel"],
        **keys,
        **own,
        "num_draft_layers": config.num_layers,
        "sample_from_anchor": block.from_anchor,
        "markov_rank": block.rank,
        "markov_head_type": block.markov,
        "enable_confidence_head": bool(block.confidence),
        "confidence_head_with_markov": block.confidence == "markov",
    }


def _dflash2_keys(block: BlockConfig) -> dict[str, Any]:
    own: dict[str, Any] = {}
    if block.taps:
        own |= {"conv_kernel_size": block.taps, "conv_group_size": block.group}
    if block.candidates:
        own |= {"selector_rank": block.rank, "selector_top_k": block.candidates}
    scalars = ("input_embedding_scale", block.embed_scale, 1), ("output_multiplier", block.logit_scale, 1)
    return own | {name: value for name, value, neutral in scalars if value != neutral}


def _mtp_config(head: MTPHead, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the target's config: the layers are stored as a part of it. How far they see is said beside it."""
    target, known = head.target.config, head.config.max_positions
    own = {"draftwing": {"window": known}} if known < target.max_positions else {}
    return own | {
        "architectures": [target.architecture],
        "model_type": FAMILIES[target.architecture].model_type,
        **_sizes(target, dtype),
        "num_nextn_predict_layers": head.config.num_layers,
        "attention_bias": target.attention.qkv_bias,
        "mlp_bias": target.layers[0].mlp_bias,
    }


def _sizes(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.layers[0].ffn,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.attention.heads,
        "num_key_value_heads": config.attention.kv_heads,
        "head_dim": config.attention.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm.eps,
        "rope_theta": config.ropes[0].theta,
        "rope_scaling": _rope_scaling(config.ropes[0], config.attention.head_dim),
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def _rope_scaling(rope: RopeConfig, head_dim: int) -> dict[str, Any] | None:
    factor, original = {"factor": rope.factor}, {"original_max_position_embeddings": rope.original_max_positions}
    ends = {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    betas = {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
    divisors = {"short_factor": [*rope.divisors], "long_factor": [*rope.long_divisors]}
    scale = {"attention_factor": rope.attention_factor}
    of_kind: dict[str, dict[str, Any]] = {
        "linear": factor,
        "llama3": factor | original | ends,
        "yarn": factor | original | betas | scale,
        "longrope": factor | original | divisors | scale,
        "proportional": (factor if rope.factor != 1 else {}) | {"partial_rotary_factor": rope.share},
    }
    keys, share = of_kind.get(rope.kind, {}), rope.dims / head_dim
    if int(head_dim * share) < rope.dims:  # as readers round
        share = math.nextafter(share, 1)
    part = {"partial_rotary_factor": share} if rope.dims else {}
    return {"rope_type": rope.kind if keys else "default", **keys, **part} if keys or part else None


def _shards(tensors: Mapping[str, Tensor], limit: int) -> list[list[str]]:
    """Splits the tensors into files; returns the names of each, in order."""
    shards: list[list[str]] = []
    size = limit
    for name, tensor in tensors.items():
        needed = tensor.nbytes + _HEADER
        if needed + _ALIGNMENT > limit:
            raise ConfigError(f"{name} has {tensor.nbytes} bytes: expected the largest file to be larger than {limit}")
        if size + needed > limit:
            shards.append([])
            size = _ALIGNMENT
        shards[-1].append(name)
        size += needed
    return shards
