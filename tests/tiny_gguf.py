"""Small GGUF files, written by the gguf package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf as gguf_package
import numpy as np
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Type
from gguf.quants import quantize
from torch import Tensor

HIDDEN, FFN, VOCAB, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 40, 4, 2, 16


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """What a converter does to q and k of the llama architecture: row i of a half goes to row 2i (+ 1)."""
    out = np.empty_like(rows)
    half = len(rows) // heads // 2
    for head in range(heads):
        for i in range(half):
            out[head * 2 * half + 2 * i] = rows[head * 2 * half + i]
            out[head * 2 * half + 2 * i + 1] = rows[head * 2 * half + half + i]
    return out


def weights(arch: str, experts: int = 0) -> dict[str, np.ndarray]:
    """GGUF names with the rows in Hugging Face order. experts: in place of the MLP."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for name, rows, columns in (
        ("attn_q", HEADS * HEAD_DIM, HIDDEN),
        ("attn_k", KV_HEADS * HEAD_DIM, HIDDEN),
        ("attn_v", KV_HEADS * HEAD_DIM, HIDDEN),
        ("attn_output", HIDDEN, HEADS * HEAD_DIM),
        ("ffn_gate", FFN, HIDDEN),
        ("ffn_up", FFN, HIDDEN),
        ("ffn_down", HIDDEN, FFN),
    ):
        if experts and name.startswith("ffn"):
            shapes[f"blk.0.{name}_exps.weight"] = (experts, rows, columns)
            continue
        shapes[f"blk.0.{name}.weight"] = (rows, columns)
        if arch == "qwen2" and name in ("attn_q", "attn_k", "attn_v"):
            shapes[f"blk.0.{name}.bias"] = (rows,)
    for name in ("attn_norm", "ffn_norm"):
        shapes[f"blk.0.{name}.weight"] = (HIDDEN,)
    if experts:
        shapes["blk.0.ffn_gate_inp.weight"] = (experts, HIDDEN)
    if arch == "gemma3":
        shapes |= {f"blk.0.{name}.weight": (HIDDEN,) for name in ("post_attention_norm", "post_ffw_norm")}
    if arch.startswith("qwen3") or arch == "gemma3":
        shapes |= {"blk.0.attn_q_norm.weight": (HEAD_DIM,), "blk.0.attn_k_norm.weight": (HEAD_DIM,)}
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write(
    path: Path,
    arch: str,
    kind: Type = Type.F32,
    extra: dict[str, np.ndarray] | None = None,
    edit: Callable[[gguf_package.GGUFWriter], None] | None = None,
    experts: int = 0,
    split: int = 0,
    small_first: bool = False,
) -> Path:
    """split: tensors of a part, whose file has a name of its own; small_first: whether the first has none."""
    writer = gguf_package.GGUFWriter(path, arch, split_max_tensors=split, small_first_shard=small_first)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    writer.add_token_list(["a", "<|im_end|>", "<|endoftext|>", *(f"t{i}" for i in range(VOCAB - 3))])
    writer.add_eos_token_id(4)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)
        if arch == "qwen3moe":
            writer.add_expert_feed_forward_length(FFN)
    if arch in ("cohere2", "exaone-moe", "gemma3", "gpt-oss"):
        writer.add_sliding_window(7)
    if edit is not None:
        edit(writer)
    for name, values in (weights(arch, experts) | (extra or {})).items():
        if arch == "llama" and (".attn_q." in name or ".attn_k." in name):
            values = permuted(values, HEADS if ".attn_q." in name else KV_HEADS)
        raw = kind if values.ndim > 1 and "gate_inp" not in name else Type.F32  # a router stays as it is
        writer.add_tensor(name, quantize(values, raw), raw_dtype=raw)
    finish(writer)
    return path


def finish(writer: gguf_package.GGUFWriter) -> None:
    """Writes what was added, and closes the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1).flatten(1)
