"""Models in GGUF files: their config, and their tensors under Hugging Face names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwing.errors import CheckpointError
from draftwing.gguf_file import GGUFFile, is_quantized
from draftwing.layers.rope import RopeConfig
from draftwing.models.config import FAMILIES, ModelConfig
from draftwing.ops.types import BlockRows

Progress = Callable[[int, int], None]  # (bytes read, bytes in all)

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}

# Metadata below `<architecture>.` that changes the arithmetic, with the values at which it does not.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "use_parallel_residual": (False,),
}

LARGEST = 1 << 24  # no size of a model comes near it, nor is one that large a sound one

# Files often name only one end-of-text id, or a wrong one; tokens of these names always end an answer.
END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")


def model_config(file: GGUFFile) -> ModelConfig:
    """The `ModelConfig` that the metadata and the set of tensors describe."""
    meta, arch = file.metadata, file.metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        raise CheckpointError(f"{file.path}: unknown architecture {arch}; expected one of {', '.join(ARCHITECTURES)}")

    def get(key: str, default: Any = None) -> Any:
        value = meta.get(f"{arch}.{key}", default)
        if value is None:
            raise CheckpointError(f"{file.path}: metadata lacks {arch}.{key}")
        if isinstance(value, np.ndarray | list):
            raise CheckpointError(f"{file.path}: {arch}.{key} differs by layer, which is not supported")
        return value

    def size(key: str, default: int | None = None) -> int:
        value = get(key, default)
        if type(value) is not int or not 1 <= value < LARGEST:
            raise CheckpointError(f"{file.path}: {arch}.{key}: expected 1 to {LARGEST - 1}, found {value!r}")
        return value

    _refuse_unsupported(file, arch)
    hidden, heads, layers = size("embedding_length"), size("attention.head_count"), size("block_count")
    if layers > len(file.tensors):
        raise CheckpointError(f"{file.path}: {arch}.block_count is {layers}, and there are {len(file.tensors)} tensors")
    head_dim = size("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if get(key, head_dim) != head_dim:
            raise CheckpointError(f"{file.path}: expected {arch}.{key} = {head_dim}, the head size; found {get(key)}")
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path}: token_embd.weight is missing")
    file.raw("token_embd.weight")  # its shape is believed, so its values must be there
    return ModelConfig(
        architecture=ARCHITECTURES[arch],
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=size("attention.head_count_kv", heads),
        head_dim=head_dim,
        ffn_size=size("feed_forward_length"),
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        max_positions=size("context_length"),
        norm_eps=get("attention.layer_norm_rms_epsilon"),
        rope=_rope(file, arch),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm=FAMILIES[ARCHITECTURES[arch]].qk_norm,
        tie_embeddings="output.weight" not in file.tensors,
        stop_ids=_stop_ids(meta),
    )


def tensors(
    file: GGUFFile, config: ModelConfig, progress: Progress | None = None, in_blocks: bool = False
) -> Iterator[tuple[str, Tensor | BlockRows]]:
    """(Hugging Face name, float32 tensor), dequantised one at a time; `progress(done, total)` in bytes.

    in_blocks: quantised matrices come as they are stored, and mostly are views of the file.
    """
    permuted = file.metadata["general.architecture"] == "llama"
    total, done = len(file.data), 0
    for name in file.tensors:
        if name == "rope_freqs.weight":  # part of the config
            continue
        theirs, info = hf_name(name), file.tensors[name]
        as_stored = in_blocks and len(info.shape) == 2 and is_quantized(info.type_id)
        rows = torch.from_numpy(file.raw(name) if as_stored else file.dequantized(name))
        heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(
            name.rpartition(".")[0].rpartition(".")[2], 0
        )
        if permuted and heads and len(rows) == heads * config.head_dim:  # others have the wrong shape anyway
            rows = unpermuted(rows, heads)
        yield theirs, BlockRows(file.kind(name), rows, info.shape[1]) if as_stored else rows
        done += file.raw(name).nbytes
        if progress is not None:
            progress(done, total)
    if progress is not None:
        progress(total, total)


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; one that has none keeps its own."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match and match[2] in BLOCK_NAMES:
        return f"model.layers.{match[1]}.{BLOCK_NAMES[match[2]]}.{match[3]}"
    return TOP_NAMES.get(name, name)


def unpermuted(rows: Tensor, heads: int) -> Tensor:
    """Undoes the row order of the `llama` architecture, which pairs rows (2i, 2i + 1) of a head for rotation.

    rows [heads * head_dim, ...], weight or bias; row 2i of a head becomes row i, row 2i + 1 row head_dim / 2 + i.
    """
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _refuse_unsupported(file: GGUFFile, arch: str) -> None:
    meta = file.metadata
    for key, neutral in NEUTRAL_VALUES.items():
        value = meta.get(f"{arch}.{key}")
        if value is not None and value not in neutral:
            raise CheckpointError(f"{file.path}: {arch}.{key} = {value} is not supported")
    window = meta.get(f"{arch}.attention.sliding_window", 0)
    if isinstance(window, int) and 0 < window < meta.get(f"{arch}.context_length", 0):
        raise CheckpointError(f"{file.path}: {arch}.attention.sliding_window = {window} is not supported")
    for name in file.tensors:
        if name.startswith("rope_factors_"):
            raise CheckpointError(f"{file.path}: {name} (longrope scaling) is not supported")


def _rope(file: GGUFFile, arch: str) -> RopeConfig:
    meta = file.metadata
    theta = float(meta.get(f"{arch}.rope.freq_base", 10000.0))
    divisors: tuple[float, ...] = ()
    if "rope_freqs.weight" in file.tensors:
        divisors = tuple(file.dequantized("rope_freqs.weight").tolist())
    kind = meta.get(f"{arch}.rope.scaling.type", "none")
    # Files from before `rope.scaling.*` have the linear factor under this key.
    factor = float(meta.get(f"{arch}.rope.scaling.factor", meta.get(f"{arch}.rope.scale_linear", 1.0)))
    if kind == "linear" or (kind == "none" and f"{arch}.rope.scale_linear" in meta):
        return RopeConfig(theta, "linear", factor, divisors=divisors)
    if kind != "none":
        raise CheckpointError(f"{file.path}: {arch}.rope.scaling.type = {kind} is not supported")
    return RopeConfig(theta, divisors=divisors)


def _stop_ids(meta: dict[str, Any]) -> tuple[int, ...]:
    named = [meta.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    wanted = set(END_TOKENS)
    known = [i for i, token in enumerate(meta.get("tokenizer.ggml.tokens", ())) if token in wanted]
    return tuple(dict.fromkeys(int(i) for i in (*named, *known) if i is not None))
