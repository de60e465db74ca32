"""Models in GGUF files: their config, and their tensors under Hugging Face names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwing.errors import CheckpointError
from draftwing.gguf_file import GGUFFile, is_quantized
from draftwing.layers.attention import AttentionConfig
from draftwing.layers.config import LayerConfig, NormConfig
from draftwing.layers.delta_net import DeltaNetConfig
from draftwing.layers.latent import LatentAttentionConfig
from draftwing.layers.rope import RopeConfig, yarn_attention_factor
from draftwing.models import gguf_experts, gguf_gemma4, gguf_hybrids, gguf_latents
from draftwing.models.config import FAMILIES, Family, ModelConfig, layers_like
from draftwing.models.fields import LARGEST, MAX_LAYERS, WIDEST, Fields
from draftwing.models.gguf_names import hf_name, layer_name
from draftwing.models.latents import parts
from draftwing.models.neutral import refuse_unread_metadata
from draftwing.models.positions import context
from draftwing.models.quantised.config import IN_MXFP4
from draftwing.models.unserved import nearest, unserved_in_gguf
from draftwing.models.weight_map import expert_names
from draftwing.ops.types import BlockRows, MXRows
from draftwing.requests.refusals import show

PER_LAYER = gguf_gemma4.PER_LAYER  # the tensor of embeddings by layer
Progress = Callable[[int, int], None]  # (bytes read, bytes in all)

OSS = "gpt-oss"
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    gguf_gemma4.ARCH: "Gemma4ForCausalLM",
    OSS: "GptOssForCausalLM",
    "glm4moe": "Glm4MoeForCausalLM",
    "minimax-m2": "MiniMaxM2ForCausalLM",
    gguf_latents.ARCH: "DeepseekV3ForCausalLM",  # or V2's (`gguf_latents.architecture`)
    **gguf_hybrids.ARCHITECTURES,
}
WITH_EXPERTS = {"llama": "MixtralForCausalLM"}  # where the metadata speak of experts

GEMMA_27B = 62  # layers of the one model whose scale is not that of its heads' size, which files do not say
# [experts, rows, columns], of which gates and ups may be one tensor, the gates first
EXPERT_TENSORS = {
    "ffn_gate_exps": ("gate",), "ffn_up_exps": ("up",), "ffn_down_exps": ("down",), "ffn_gate_up_exps": ("gate", "up"),
}  # fmt: skip
MXFP4 = "MXFP4"  # GGML's name of the type

# Files often name only one end-of-text id, or a wrong one; tokens of these names always end an answer.
END_TOKENS = (
    "<end_of_turn>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|return|>",
    "<|call|>", "<turn|>",
)  # fmt: skip


def model_config(file: GGUFFile) -> ModelConfig:
    """Returns the `ModelConfig` that the metadata and the set of tensors describe."""
    meta, arch = file.metadata, file.metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        missing, expected = unserved_in_gguf(arch), nearest(str(arch), ARCHITECTURES)
        if missing is not None:
            raise CheckpointError(f"{file.path}: {arch} has {missing}, which is not served yet; {expected}")
        raise CheckpointError(f"{file.path}: unknown architecture {show(arch)}; {expected}")

    stored = Fields(meta, str(file.path), f"{arch}.")
    fields = _OWN_FIELDS[arch](stored) if arch in _OWN_FIELDS else stored
    size, tokenizer = fields.whole, Fields(meta, str(file.path), "tokenizer.ggml.")
    _refuse_longrope(file)
    named = WITH_EXPERTS.get(arch, ARCHITECTURES[arch])
    if arch == gguf_latents.ARCH:
        named = gguf_latents.architecture(file, fields)
    experts = gguf_experts.experts(file, fields, FAMILIES[named], arch in WITH_EXPERTS)
    architecture = ARCHITECTURES[arch] if experts is None else named
    hidden, heads = size("embedding_length", high=WIDEST), size("attention.head_count", high=WIDEST)
    layers, family = own_layers(fields), FAMILIES[architecture]
    if layers > len(file.tensors):
        raise CheckpointError(f"{file.path}: {arch}.block_count is {layers}, and there are {len(file.tensors)} tensors")
    attention = _attention(file, fields, family, hidden, heads, layers)
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path}: token_embd.weight is missing")
    file.raw("token_embd.weight")  # its shape is believed, so its values must be there
    rope = replace(_rope(file, fields, arch, 10000.0 if arch in WITH_EXPERTS else family.theta), dims=attention.rotary)
    positions = context(rope, size("context_length"))
    norm = NormConfig(fields.number("attention.layer_norm_rms_epsilon", 0, 1), family.wide_norms, family.norm_offset)
    layer = LayerConfig(
        hidden,
        attention,
        ffn=size("feed_forward_length", high=WIDEST, default=experts.ffn if experts is not None else None),
        norm=norm,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        experts=experts,
        activation=family.activation,
        out_norms=family.out_norms,
    )
    dense = {i for i in range(layers) if f"blk.{i}.ffn_gate_inp.weight" not in file.tensors}
    local_rope = _local_rope(fields, family)
    reach = () if arch == gguf_gemma4.ARCH else _windows(fields, layers, family, positions)
    made = layers_like(layer, attention, layers, reach, local_rope is not None, dense)
    if arch in _OWN_LAYERS:
        own = _OWN_LAYERS[arch](file, stored, layer, layers)
        made = tuple(replace(one, experts=like.experts) for one, like in zip(own, made, strict=True))
    found = ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        max_positions=positions,
        layers=made,
        ropes=(rope,) if local_rope is None else (rope, local_rope),
        norm=norm,
        embed_scale=hidden**0.5 if family.scaled_embeddings else 1.0,
        soft_cap=fields.number("final_logit_softcapping", 0, 1e6, 0.0) if family.soft_cap else 0.0,
        tie_embeddings="output.weight" not in file.tensors,
        stop_ids=_stop_ids(tokenizer),
        suppressed=_ids(tokenizer, "suppress_tokens"),
        quantization=IN_MXFP4 if _holds_mxfp4(file) else None,
    )
    refuse_unread_metadata(fields)
    return found


def _attention(file: GGUFFile, fields: Fields, family: Family, hidden: int, heads: int, layers: int) -> AttentionConfig:
    """Returns that of a layer as most are: what differs by layer, `_OWN_LAYERS` knows."""
    size = fields.whole
    head_dim = size("attention.key_length", high=WIDEST, default=hidden // heads)
    size("attention.value_length", head_dim, head_dim, head_dim)
    least, usual = (2, int(head_dim * family.rotary)) if family.turns_parts else (head_dim, head_dim)
    turned = size("rope.dimension_count", least, head_dim, usual)
    rotary = turned if turned < head_dim else 0
    return AttentionConfig(
        heads,
        kv_heads=gguf_hybrids.kv_heads(fields, heads),
        head_dim=head_dim,
        sinks=family.sinks,
        scalar=(hidden // heads if layers == GEMMA_27B else head_dim) if family.attention_scalar else 0,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors if family.qk_norm == "key" else bool(family.qk_norm),
        whole_norms=family.qk_norm == "whole",
        gated=family.gated,
        rotary=rotary,
    )


# What layers have in common, where a file says it otherwise; and layers that differ in more than windows and experts.
_OWN_FIELDS = {gguf_gemma4.ARCH: gguf_gemma4.of_first, gguf_latents.ARCH: gguf_latents.of_turned}
_OWN_LAYERS = dict.fromkeys(gguf_hybrids.ARCHITECTURES, gguf_hybrids.layers) | {
    gguf_gemma4.ARCH: gguf_gemma4.layers,
    gguf_latents.ARCH: gguf_latents.layers,
}


def own_layers(fields: Fields) -> int:
    """Returns layers of the model itself, without those that predict."""
    return gguf_hybrids.own_layers(fields, fields.whole("block_count", high=MAX_LAYERS))


def tensors(
    file: GGUFFile,
    config: ModelConfig,
    progress: Progress | None = None,
    in_blocks: bool = False,
    predicting: bool = False,
    experts: range | None = None,
) -> Iterator[tuple[str, Tensor | BlockRows | MXRows]]:
    """Yields (Hugging Face name, float32 tensor), dequantised one at a time; `progress(done, total)` in bytes. Experts
    in MXFP4 stay so.

    in_blocks: quantised matrices come as they are stored, and mostly are views of the file.  predicting: those of the
    prediction layers come, in place of the model's own.  experts: those that come, None: all.
    """
    arch = file.metadata["general.architecture"]
    own = own_layers(Fields(file.metadata, str(file.path), f"{arch}."))
    nets = [layer.mixer for layer in config.layers if isinstance(layer.mixer, DeltaNetConfig)]
    latent = config.layers[0].mixer
    permuted = arch == "llama"
    total, done = file.size, 0
    for name in file.tensors:
        block = BLOCK.match(name)
        # Of the model's embedding and head, or of what is there in two parts.
        copied = name.endswith(gguf_hybrids.NEXTN_COPIES) or gguf_latents.is_copy(name, file.tensors)
        if name == "rope_freqs.weight" or copied or (block is not None and int(block[1]) >= own) != predicting:
            continue  # part of the config, or nobody asks for it
        match = EXPERT_PARTS.fullmatch(name)
        if match:
            yield from _of_experts(file, config, name, match, in_blocks, own, experts)
            done += file.raw(name).nbytes
            continue
        info = file.tensors[name]
        if name == PER_LAYER:  # larger than all others
            raw = torch.from_numpy(file.mapped(name))
            yield hf_name(name, config, own), BlockRows(file.kind(name), raw, info.shape[-1])
            done += raw.nbytes
            continue
        of_heads = isinstance(latent, LatentAttentionConfig) and len(info.shape) == 3  # a matrix for each
        as_stored = in_blocks and (len(info.shape) == 2 or of_heads) and is_quantized(info.type_id)
        rows = torch.from_numpy(file.raw(name) if as_stored else file.dequantized(name))
        rows = rows.flatten(0, -2) if of_heads else rows
        attention = config.attention
        heads = {"attn_q": attention.heads, "attn_k": attention.kv_heads}.get(
            name.rpartition(".")[0].rpartition(".")[2], 0
        )
        if config.norm.offset and name.endswith("norm.weight") and not name.endswith("ssm_norm.weight"):
            rows = rows - config.norm.offset  # as a checkpoint in folders has them
        if permuted and heads and len(rows) == heads * attention.head_dim:  # others have the wrong shape anyway
            rows = unpermuted(rows, heads)
        value = BlockRows(file.kind(name), rows, info.shape[-1]) if as_stored else rows
        for part, one in gguf_hybrids.taken_apart(name, value, nets[0]) if nets else ((name, value),):
            theirs = hf_name(part, config, own)
            made = gguf_hybrids.made(theirs, one) if isinstance(one, Tensor) else one
            yield from parts(theirs, made, latent) if isinstance(latent, LatentAttentionConfig) else ((theirs, made),)
        done += file.raw(name).nbytes
        if progress is not None:
            progress(done, total)
    if progress is not None:
        progress(total, total)


BLOCK = re.compile(r"blk\.(\d+)\.")
EXPERT_PARTS = re.compile(rf"blk\.(\d+)\.({'|'.join(EXPERT_TENSORS)})\.(weight|bias)")


def _of_experts(
    file: GGUFFile,
    config: ModelConfig,
    name: str,
    match: re.Match[str],
    in_blocks: bool,
    own: int,
    experts: range | None,
) -> Iterator[tuple[str, Tensor | BlockRows | MXRows]]:
    """Yields the matrices, or biases, of a tensor of all experts, one by one. own: layers of the model itself."""
    info, names, bias = file.tensors[name], expert_names(config), match[3] == "bias"
    dims = 2 if bias else 3
    if len(info.shape) != dims:
        raise CheckpointError(f"{file.path}: {name}: expected {dims} dimensions, found shape {list(info.shape)}")
    count, parts = info.shape[0], EXPERT_TENSORS[match[2]]
    raw, kind = file.raw(name).reshape(count, 1 if bias else info.shape[1], -1), file.kind(name)
    as_stored = in_blocks and is_quantized(info.type_id)
    if bias and len(parts) > 1:
        raise CheckpointError(f"{file.path}: {name} is not supported: expected biases of gates and ups apart")
    each = [
        (expert, getattr(names, part), rows)
        for expert, stored in enumerate(raw)
        if experts is None or expert in experts
        for part, rows in zip(parts, np.array_split(stored, len(parts)), strict=True)
    ]
    for expert, part, stored in each:
        theirs = f"{layer_name(int(match[1]), own)}.{names.experts}.{expert}.{part}.{match[3]}"
        if bias:
            yield theirs, torch.from_numpy(file.decoded(name, stored)[0])
        elif as_stored:
            yield theirs, BlockRows(kind, torch.from_numpy(stored), info.shape[2])
        elif kind == MXFP4:
            yield theirs, mx_rows(stored)
        else:
            yield theirs, torch.from_numpy(file.decoded(name, stored))


def mx_rows(stored: NDArray[np.uint8]) -> MXRows:
    """stored [rows, columns / 32 * 17]: of a block its exponent, then its values, the first half in the low bits of 16
    bytes and the second in the high bits."""
    blocks = stored.reshape(len(stored), -1, 17)
    halves = np.concatenate((blocks[..., 1:] & 15, blocks[..., 1:] >> 4), -1)  # [rows, blocks, 32]
    codes = halves[..., ::2] | halves[..., 1::2] << 4
    return MXRows(torch.from_numpy(codes.reshape(len(stored), -1)), torch.from_numpy(blocks[..., 0].copy()))


def _holds_mxfp4(file: GGUFFile) -> bool:
    return any(EXPERT_PARTS.fullmatch(name) and file.kind(name) == MXFP4 for name in file.tensors)


def unpermuted(rows: Tensor, heads: int) -> Tensor:
    """Undoes the row order of the `llama` architecture, which pairs rows (2i, 2i + 1) of a head for rotation.

    rows [heads * head_dim, ...], weight or bias; row 2i of a head becomes row i, row 2i + 1 row head_dim / 2 + i.
    """
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _refuse_longrope(file: GGUFFile) -> None:
    for name in file.tensors:
        if name.startswith("rope_factors_"):
            raise CheckpointError(f"{file.path}: {name} (longrope scaling) is not supported")


def _windows(fields: Fields, layers: int, family: Family, positions: int) -> tuple[int, ...]:
    """Of families whose layers follow a pattern, which files need not say; raises CheckpointError for others' windows
    that are shorter than the context."""
    if not family.window_pattern:
        window = fields.whole("attention.sliding_window", 0, 2**40, 0)
        if 0 < window < positions:
            raise fields.unlike("attention.sliding_window", f"none, or at least {positions}")
        return ()
    window = fields.whole("attention.sliding_window", 1, 2**40)
    every = fields.whole("attention.sliding_window_pattern", 1, default=family.window_pattern)
    return tuple(window if (i + 1) % every else 0 for i in range(layers))


def _local_rope(fields: Fields, family: Family) -> RopeConfig | None:
    if family.local_theta is None:
        return None
    return RopeConfig(fields.number("rope.freq_base_swa", 1, 1e15, family.local_theta))


def _rope(file: GGUFFile, fields: Fields, arch: str, default: float) -> RopeConfig:
    theta = fields.number("rope.freq_base", 1, 1e15, default)
    divisors: tuple[float, ...] = ()
    if "rope_freqs.weight" in file.tensors:
        divisors = tuple(file.dequantized("rope_freqs.weight").tolist())
    kind = fields.text("rope.scaling.type", "none")
    # Files from before `rope.scaling.*` have the linear factor under this key.
    old = fields.number("rope.scale_linear", 1e-3, 1e6, 1.0)
    factor = fields.number("rope.scaling.factor", 1e-3, 1e6, old)
    if kind == "linear" or (kind == "none" and fields.has("rope.scale_linear")):
        return RopeConfig(theta, "linear", factor, divisors=divisors)
    if kind == "yarn":
        return _yarn(fields, theta, factor, arch)
    if kind != "none":
        raise fields.unsupported("rope.scaling.type", kind)
    return RopeConfig(theta, divisors=divisors)


def _yarn(fields: Fields, theta: float, factor: float, arch: str) -> RopeConfig:
    if theta <= 1:
        raise fields.unlike("rope.freq_base", "more than 1")
    given = fields.number("rope.scaling.yarn_attn_factor", 0, 1e3, 1.0)
    by_scores = arch == gguf_latents.ARCH and fields.number(gguf_latents.YARN_LOG, 0, 1e3, 0.0) > 0
    inferred = 1.0 if by_scores else yarn_attention_factor(factor)
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original_max_positions=fields.whole(
            "rope.scaling.original_context_length", 1, LARGEST, fields.whole("context_length")
        ),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 1e-3, 1e6, 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1e-3, 1e6, 1.0),
        truncate=arch != OSS,  # as the model was trained; files do not say
        attention_factor=given * inferred,
    )


def _ids(fields: Fields, key: str) -> tuple[int, ...]:
    """Returns token ids of an array; none where there is none."""
    value = fields.get(key)
    if value is None:
        return ()
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu" or not all(0 <= i <= LARGEST for i in value):
        raise fields.unlike(key, "a list of token ids")
    return tuple(value.tolist())


def _stop_ids(fields: Fields) -> tuple[int, ...]:
    named = [i for key in ("eos", "eot", "eom") for i in fields.ids(f"{key}_token_id")]
    wanted = set(END_TOKENS)
    known = [i for i, token in enumerate(fields.texts("tokens")) if token in wanted]
    return tuple(dict.fromkeys((*named, *known)))
