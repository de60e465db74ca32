"""Models of three more families on a CPU beside llama.cpp, on the same GGUF file of random weights in their real sizes.

    python benchmarks/families_cpu.py [--families LFM2-8B-A1B] [--contexts 100 4000] [--rounds 3]

Both decode behind each context and prefill it, in turn, without drafts; a figure is the better of the rounds. `read` is
what a plain step reads, weights in Q4_K (the embedding, which is the head as well, in Q6_K), keys and values in 16
bits, and states; the share is that of plain reads by all threads. llama.cpp is built where it is not: minutes
(`llama_cpp_build.py`).
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf_files import add_tokens, finish, random_blocks
from llama_cpp_build import build
from turns import ask_engine, cpu_engine, read_bandwidth

DECODE = 32
Tensor = tuple[str, str, tuple[int, ...]]  # name; type, or `ones`, `small` and `decay` in float32; shape


class Sizes(NamedTuple):
    """Of a model. attends: which layers do.  ffn: of dense layers, the first of them all where there are experts.
    width: of an expert.  shared: of the shared expert."""

    arch: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    attends: tuple[int, ...] = ()
    dense: int = 0
    experts: int = 0
    top_k: int = 0
    width: int = 0
    shared: int = 0
    state_heads: int = 0


FAMILIES = {
    "SmolLM3-3B": Sizes("smollm3", 36, 2048, 16, 4, 128, 11008, 128256, tuple(range(36)), dense=36),
    "LFM2-8B-A1B": Sizes("lfm2moe", 24, 2048, 32, 8, 64, 7168, 65536, (2, 6, 10, 14, 18, 21), 2, 32, 4, 1792),
    "Granite-4-Tiny": Sizes(
        "granitehybrid", 40, 1536, 12, 4, 128, 512, 100352, (5, 15, 25, 35), 0, 64, 6, 512, 1024, 48
    ),
}
STATE, STATE_HEAD, TAPS = 128, 64, 4  # of Granite's state-space layers


def tensors(size: Sizes) -> Iterator[Tensor]:
    hidden = size.hidden
    yield "token_embd.weight", "Q6_K", (size.vocab, hidden)
    yield f"{'token_embd' if size.arch == 'lfm2moe' else 'output'}_norm.weight", "ones", (hidden,)
    for layer in range(size.layers):
        parts = [*mixer(size, layer), *mlp(size, layer)]
        for name, kind, shape in [
            ("attn_norm.weight", "ones", (hidden,)),
            ("ffn_norm.weight", "ones", (hidden,)),
            *parts,
        ]:
            yield f"blk.{layer}.{name}", kind, shape


def mixer(size: Sizes, layer: int) -> Iterator[Tensor]:
    hidden, queries, kv = size.hidden, size.heads * size.head_dim, size.kv_heads * size.head_dim
    if layer in size.attends:
        for name, rows, columns in (
            ("q", queries, hidden),
            ("k", kv, hidden),
            ("v", kv, hidden),
            ("output", hidden, queries),
        ):
            yield f"attn_{name}.weight", "Q4_K", (rows, columns)
        if size.arch == "lfm2moe":
            yield "attn_q_norm.weight", "ones", (size.head_dim,)
            yield "attn_k_norm.weight", "ones", (size.head_dim,)
    elif size.arch == "lfm2moe":
        yield "shortconv.in_proj.weight", "Q4_K", (3 * hidden, hidden)
        yield "shortconv.conv.weight", "small", (hidden, 3)
        yield "shortconv.out_proj.weight", "Q4_K", (hidden, hidden)
    else:
        inner = size.state_heads * STATE_HEAD
        yield "ssm_in.weight", "Q4_K", (2 * inner + 2 * STATE + size.state_heads, hidden)
        yield "ssm_conv1d.weight", "small", (inner + 2 * STATE, TAPS)
        yield "ssm_conv1d.bias", "small", (inner + 2 * STATE,)
        yield "ssm_dt.bias", "small", (size.state_heads,)
        yield "ssm_a", "decay", (size.state_heads, 1)
        yield "ssm_d", "ones", (size.state_heads, 1)
        yield "ssm_norm.weight", "ones", (1, inner)
        yield "ssm_out.weight", "Q4_K", (hidden, inner)


def mlp(size: Sizes, layer: int) -> Iterator[Tensor]:
    hidden = size.hidden
    if layer < size.dense:
        for name, rows, columns in (("gate", size.ffn, hidden), ("up", size.ffn, hidden), ("down", hidden, size.ffn)):
            yield f"ffn_{name}.weight", "Q4_K", (rows, columns)
        return
    yield "ffn_gate_inp.weight", "small", (size.experts, hidden)
    if size.arch == "lfm2moe":
        yield "exp_probs_b.bias", "small", (size.experts,)
    for name, of_expert in (("gate", True), ("up", True), ("down", False)):
        for suffix, wide, count in (("exps", size.width, (size.experts,)), ("shexp", size.shared, ())):
            if wide:
                yield (
                    f"ffn_{name}_{suffix}.weight",
                    "Q4_K",
                    (*count, *((wide, hidden) if of_expert else (hidden, wide))),
                )


def write_random(path: Path, size: Sizes, longest: int) -> None:
    rng, writer = np.random.default_rng(0), GGUFWriter(path, size.arch)
    add_tokens(writer, "gpt-2", size.vocab)
    writer.add_block_count(size.layers)
    writer.add_context_length(longest)
    writer.add_embedding_length(size.hidden)
    writer.add_head_count(size.heads)
    kv_heads = [size.kv_heads * (layer in size.attends) for layer in range(size.layers)]
    writer.add_head_count_kv(size.kv_heads if all(kv_heads) else kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e6)
    writer.add_rope_dimension_count(size.head_dim)
    writer.add_vocab_size(size.vocab)
    writer.add_feed_forward_length(size.ffn)
    if size.experts:
        writer.add_expert_count(size.experts)
        writer.add_expert_used_count(size.top_k)
        writer.add_expert_feed_forward_length(size.width)
    if size.arch == "lfm2moe":
        writer.add_shortconv_l_cache(3)
        writer.add_leading_dense_block_count(size.dense)
        writer.add_uint32("lfm2moe.expert_gating_func", 2)
    if size.arch == "granitehybrid":
        writer.add_expert_shared_feed_forward_length(size.shared)
        writer.add_rope_scaling_finetuned(False)
        writer.add_embedding_scale(12.0)
        writer.add_residual_scale(0.22)
        writer.add_attention_scale(1 / 128)
        writer.add_logit_scale(6.0)
        writer.add_ssm_conv_kernel(TAPS)
        writer.add_ssm_state_size(STATE)
        writer.add_ssm_group_count(1)
        writer.add_ssm_inner_size(size.state_heads * STATE_HEAD)
        writer.add_ssm_time_step_rank(size.state_heads)
    for name, kind, shape in tensors(size):
        if kind in ("ones", "small", "decay"):
            value = np.ones(shape, np.float32) if kind == "ones" else rng.standard_normal(shape, np.float32)
            value = (
                -np.exp(value) if kind == "decay" else value * np.float32(1 if kind == "ones" else shape[-1] ** -0.5)
            )
            writer.add_tensor(name, value)
            continue
        data = random_blocks(kind, int(np.prod(shape[:-1])), shape[-1], rng).reshape(*shape[:-1], -1)
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[kind])
    finish(writer)


def step_bytes(size: Sizes, context: int) -> float:
    read = 0.0
    for name, kind, shape in tensors(size):
        values, block = GGML_QUANT_SIZES[GGMLQuantizationType[kind]] if kind.startswith("Q") else (1, 4)
        share = size.top_k / size.experts if "_exps" in name else 1
        read += share * np.prod(shape) / values * block
    states = (size.layers - len(size.attends)) * size.state_heads * STATE_HEAD * STATE * 4
    return float(read + states + len(size.attends) * 2 * size.kv_heads * size.head_dim * 2 * context)


def ours(
    path: Path, threads: int, contexts: list[int], size: Sizes, **given: Any
) -> Iterator[dict[int, tuple[float, float]]]:
    """Yields (tokens/s of decoding, tokens/s of the prompt) by context, a round each."""
    draw = random.Random(0)
    pool = 3 * max(contexts) + (1 << 17 if size.state_heads else 1 << 14)  # a state takes as much as 7,000 tokens
    engine = cpu_engine(str(path), threads, pool, context_length=max(contexts) + 256, **given)
    while True:
        found = {}
        for context in contexts:
            prompt = [draw.randrange(size.vocab) for _ in range(context)]
            first = ask_engine(engine, prompt, 2).first
            ask_engine(engine, prompt, 16)  # who comes after another program has to wake
            found[context] = ask_engine(engine, prompt, DECODE).decode, context / first
        yield found


def theirs(program: Path, path: Path, threads: int, contexts: list[int]) -> Iterator[dict[int, tuple[float, float]]]:
    command = [str(program / "llama-bench"), "-m", str(path), "-t", str(threads), "-r", "1", "-o", "json"]

    def rate(*what: object) -> float:
        out = subprocess.run([*command, *map(str, what)], check=True, stdout=subprocess.PIPE).stdout
        return float(json.loads(out)[0]["avg_ts"])

    while True:
        yield {
            context: (rate("-p", 0, "-n", DECODE, "-d", context), rate("-p", context, "-n", 0)) for context in contexts
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--contexts", nargs="+", type=int, default=[100, 4000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--isa", default="native", help="llama.cpp's; ours is DRAFTWING_CPU_ISA")
    args = parser.parse_args()
    program = build(args.isa)
    for family in args.families:
        size = FAMILIES[family]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"{family}.gguf")
            write_random(path, size, max(args.contexts) + 512)
            sides = {
                "draftwing": ours(path, args.threads, args.contexts, size, speculative_algorithm="none"),
                "llama.cpp": theirs(program, path, args.threads, args.contexts),
            }
            best = {name: dict.fromkeys(args.contexts, (0.0, 0.0)) for name in sides}
            for _ in range(args.rounds):
                for name, side in sides.items():
                    for context, rates in next(side).items():
                        decode, prompt = best[name][context]
                        best[name][context] = max(decode, rates[0]), max(prompt, rates[1])
            floor = read_bandwidth(1 << 30, args.threads, 3)
            for context in args.contexts:
                read, (one, other) = step_bytes(size, context), (best[name][context] for name in sides)
                print(
                    f"{family} {context}: decode {one[0]:.1f}, {other[0]:.1f}: {one[0] / other[0]:.2f}; "
                    f"prompt {one[1]:.0f}, {other[1]:.0f}: {one[1] / other[1]:.2f}; read {read / 1e6:.0f} MB, "
                    f"{one[0] * read / floor:.0%} of {floor / 1e9:.0f} GB/s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
