"""Mixtures of experts on a CPU vs llama.cpp, on the same GGUF file of random weights with the shapes of a real one.

    python benchmarks/mixtures_cpu.py [--families gpt-oss-20b Qwen3-30B-A3B GLM-4.7-Flash] [--layers 6] [--rounds 3]

Layers have the real sizes and there are fewer of them, so that a file fits in memory; the vocabulary is the default
model's. Both decode 32 tokens of one request and prefill 512, in turn; it prints tokens per second, best of the rounds.
llama.cpp is built where it is not (`llama_cpp_build.py`: minutes).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf_files import copy_metadata, finish, random_blocks
from llama_cpp_build import build

from draftwing import LLM, SamplingParams
from draftwing.models.hub import resolve_model

DECODE, PROMPT = 32, 512
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": {
        "arch": "gpt-oss", "hidden": 2880, "ffn": 2880, "heads": 64, "kv_heads": 8, "head_dim": 64, "count": 32,
        "top_k": 4, "dense": "Q8_0", "experts": "MXFP4",
    },
    "Qwen3-30B-A3B": {
        "arch": "qwen3moe", "hidden": 2048, "ffn": 768, "heads": 32, "kv_heads": 4, "head_dim": 128, "count": 128,
        "top_k": 8, "dense": "Q4_K", "experts": "Q4_K",
    },
    "GLM-4.7-Flash": {  # without its first layer, which is dense
        "arch": "deepseek2", "hidden": 2048, "ffn": 1536, "heads": 20, "kv_heads": 1, "head_dim": 576, "count": 64,
        "top_k": 4, "dense": "Q4_K", "experts": "Q4_K", "shared": 1, "latent": 512, "of_queries": 768, "turned": 64,
        "plain": 192, "value": 256,
    },
}  # fmt: skip


def tensors(shape: dict[str, Any], layers: int, vocab: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(name, kind, shape); kind F32: of ones, or small numbers for a router."""
    hidden, ffn, count, dense = shape["hidden"], shape["ffn"], shape["count"], shape["dense"]
    q, kv = shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]
    oss = shape["arch"] == "gpt-oss"
    yield "token_embd.weight", dense, (vocab, hidden)
    yield "output.weight", dense, (vocab, hidden)
    yield "output_norm.weight", "F32", (hidden,)
    for layer in range(layers):
        of = f"blk.{layer}."
        yield f"{of}attn_norm.weight", "F32", (hidden,)
        yield f"{of}{'post_attention_norm' if oss else 'ffn_norm'}.weight", "F32", (hidden,)
        if "latent" in shape:
            yield from latent_attention(of, shape)
        else:
            for name, rows, columns in (("q", q, hidden), ("k", kv, hidden), ("v", kv, hidden), ("output", hidden, q)):
                yield f"{of}attn_{name}.weight", dense, (rows, columns)
                if oss:
                    yield f"{of}attn_{name}.bias", "F32", (rows,)
        if oss:
            yield f"{of}attn_sinks.weight", "F32", (shape["heads"],)
            yield f"{of}ffn_gate_inp.bias", "F32", (count,)
        elif "latent" not in shape:
            yield f"{of}attn_q_norm.weight", "F32", (shape["head_dim"],)
            yield f"{of}attn_k_norm.weight", "F32", (shape["head_dim"],)
        yield f"{of}ffn_gate_inp.weight", "F32", (count, hidden)
        if "latent" in shape:
            yield f"{of}exp_probs_b.bias", "F32", (count,)
        for name, rows, columns in (("gate", ffn, hidden), ("up", ffn, hidden), ("down", hidden, ffn)):
            yield f"{of}ffn_{name}_exps.weight", shape["experts"], (count, rows, columns)
            if "shared" in shape:
                yield f"{of}ffn_{name}_shexp.weight", dense, (rows, columns)
            if oss:
                yield f"{of}ffn_{name}_exps.bias", "F32", (count, rows)


def latent_attention(of: str, shape: dict[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    hidden, heads, latent, dense = shape["hidden"], shape["heads"], shape["latent"], shape["dense"]
    yield f"{of}attn_q_a.weight", dense, (shape["of_queries"], hidden)
    yield f"{of}attn_q_a_norm.weight", "F32", (shape["of_queries"],)
    yield f"{of}attn_q_b.weight", dense, (heads * (shape["plain"] + shape["turned"]), shape["of_queries"])
    yield f"{of}attn_kv_a_mqa.weight", dense, (latent + shape["turned"], hidden)
    yield f"{of}attn_kv_a_norm.weight", "F32", (latent,)
    yield f"{of}attn_k_b.weight", "Q8_0", (heads, latent, shape["plain"])
    yield f"{of}attn_v_b.weight", dense, (heads, shape["value"], latent)
    yield f"{of}attn_output.weight", dense, (hidden, heads * shape["value"])


def latent_sizes(shape: dict[str, Any]) -> dict[str, int]:
    return {
        "attention.q_lora_rank": shape["of_queries"],
        "attention.kv_lora_rank": shape["latent"],
        "attention.value_length": shape["latent"],
        "attention.key_length_mla": shape["plain"] + shape["turned"],
        "attention.value_length_mla": shape["value"],
        "rope.dimension_count": shape["turned"],
        "leading_dense_block_count": 0,
        "expert_shared_count": shape["shared"],
        "expert_gating_func": 2,
        "vocab_size": 49152,
    }


def write_model(path: Path, shape: dict[str, Any], layers: int) -> int:
    """-> bytes of weights that a token reads"""
    reader, rng, read = GGUFReader(resolve_model("smollm2")), np.random.default_rng(0), 0.0
    vocab = len(reader.fields["tokenizer.ggml.tokens"].data)
    arch = shape["arch"]
    writer = GGUFWriter(path, arch)
    copy_metadata(reader, writer, only="tokenizer.")
    for key, value in {
        "block_count": layers,
        "context_length": 4096,
        "embedding_length": shape["hidden"],
        "feed_forward_length": shape["ffn"],
        "expert_feed_forward_length": shape["ffn"],
        "expert_count": shape["count"],
        "expert_used_count": shape["top_k"],
        "attention.head_count": shape["heads"],
        "attention.head_count_kv": shape["kv_heads"],
        "attention.key_length": shape["head_dim"],
        "attention.value_length": shape["head_dim"],
        "attention.sliding_window": 128,
        **(latent_sizes(shape) if "latent" in shape else {}),
    }.items():
        if arch == "gpt-oss" or not key.endswith("window"):
            writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32(f"{arch}.rope.freq_base", 150000.0)
    if "latent" in shape:
        writer.add_float32(f"{arch}.expert_weights_scale", 1.8)
        writer.add_bool(f"{arch}.expert_weights_norm", True)
    for name, kind, size in tensors(shape, layers, vocab):
        if kind == "F32":
            value = np.ones(size, np.float32) if name.endswith("norm.weight") else rng.standard_normal(size, np.float32)
            writer.add_tensor(name, value * np.float32(1 if len(size) == 1 else size[-1] ** -0.5))
            continue
        data = random_blocks(kind, math.prod(size[:-1]), size[-1], rng).reshape(*size[:-1], -1)
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[kind])
        share = shape["top_k"] / shape["count"] if "_exps" in name else name != "token_embd.weight"
        read += share * data.nbytes
    finish(writer)
    return round(read)


def ours(path: Path) -> Iterator[dict[str, float]]:
    rng, best = random.Random(0), SamplingParams(temperature=0, ignore_eos=True, max_new_tokens=1)
    with LLM(str(path), device="cpu", speculative_algorithm="none", context_length=2048, max_total_tokens=4096) as llm:

        def seconds(prompt: int, tokens: int) -> float:
            ids = [rng.randrange(100, 40000) for _ in range(prompt)]
            start = time.perf_counter()
            llm.generate([ids], best.model_copy(update={"max_new_tokens": tokens}))
            return time.perf_counter() - start

        seconds(64, 8)
        while True:
            decode = seconds(16, DECODE + 2) - seconds(16, 2)
            yield {"decode": DECODE / decode, "prompt": PROMPT / seconds(PROMPT, 1)}


def theirs(program: Path, path: Path) -> Iterator[dict[str, float]]:
    threads = str(torch.get_num_threads())
    command = [str(program / "llama-bench"), "-m", str(path), "-t", threads, "-r", "1", "-o", "json"]
    while True:
        out = subprocess.run([*command, "-p", str(PROMPT), "-n", str(DECODE)], check=True, capture_output=True).stdout
        prompt, decode = (row["avg_ts"] for row in json.loads(out))
        yield {"decode": decode, "prompt": prompt}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--isa", default="native", help="llama.cpp's; ours is DRAFTWING_CPU_ISA")
    args = parser.parse_args()
    program = build(args.isa)
    for family in args.families:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"{family}.gguf")
            read = write_model(path, FAMILIES[family], args.layers)
            sides = {"draftwing": ours(path), "llama.cpp": theirs(program, path)}
            best: dict[str, dict[str, float]] = {name: {} for name in sides}
            for _ in range(args.rounds):
                for name, side in sides.items():
                    best[name] = {what: max(rate, best[name].get(what, 0)) for what, rate in next(side).items()}
            for name, rates in best.items():
                speed = read * rates["decode"] / 1e9
                print(f"{family} {name}: decode {rates['decode']:.1f}, {speed:.1f} GB/s; prompt {rates['prompt']:.0f}")


if __name__ == "__main__":
    main()
