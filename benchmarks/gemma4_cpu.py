"""Gemma 4 E2B's shape on a CPU: tokens per second and resident memory, and llama.cpp's on the same file in turn.

    python benchmarks/gemma4_cpu.py --out result.json [--contexts 100,1000] [--files FOLDER]

Weights are random, in Q4_K, those of both embeddings in Q6_K. The embeddings by layer, 1.9 of 3.5 GB, are read row by
row from the mapped file. `hybrid_cpu.py` has the runs; `llama_cpp_build.py` says what a build of llama.cpp needs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from gguf_files import MIXTURES, add_random, add_tokens, finish
from hybrid_cpu import LLAMA, compare
from llama_cpp_build import CACHE, ISAS, build
from load_runs import let_go, listed, machine
from turns import cpu_engine

VOCAB, HIDDEN, FFN, HEADS = 262_144, 1536, 6144, 8
LAYERS, SHARED, EVERY = 35, 20, 5  # those that read earlier ones' keys; one in so many sees everything
NEAR, FAR, WINDOW, PER_LAYER = 256, 512, 512, 256  # head sizes; the window of `NEAR` ones


def sees_all(block: int) -> bool:
    return (block + 1) % EVERY == 0


def width(block: int) -> int:
    """Of a layer's MLP: layers without keys of their own have a wider one."""
    return FFN * (2 if block >= LAYERS - SHARED else 1)


def metadata(writer: GGUFWriter, longest: int) -> None:
    writer.add_block_count(LAYERS)
    writer.add_context_length(longest)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length([width(block) for block in range(LAYERS)])
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_key_length(FAR)
    writer.add_value_length(FAR)
    writer.add_key_length_swa(NEAR)
    writer.add_value_length_swa(NEAR)
    writer.add_rope_dimension_count(FAR)
    writer.add_rope_dimension_count_swa(NEAR)
    writer.add_rope_freq_base(1e6)
    writer.add_rope_freq_base_swa(1e4)
    writer.add_sliding_window(WINDOW)
    writer.add_sliding_window_pattern([not sees_all(block) for block in range(LAYERS)])
    writer.add_shared_kv_layers(SHARED)
    writer.add_embedding_length_per_layer_input(PER_LAYER)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_final_logit_softcapping(30.0)
    add_tokens(writer, "gpt-2", VOCAB)


def write_random(path: Path, mixture: tuple[str, str], longest: int) -> None:
    """mixture: of `MIXTURES`."""
    rng, (kind, table_kind) = np.random.default_rng(0), mixture
    writer = GGUFWriter(path, "gemma4")
    metadata(writer, longest)
    add_random(writer, "token_embd", (VOCAB, HIDDEN), table_kind, rng)
    add_random(writer, "per_layer_token_embd", (VOCAB, LAYERS * PER_LAYER), table_kind, rng)
    add_random(writer, "per_layer_model_proj", (LAYERS * PER_LAYER, HIDDEN), kind, rng)
    factors = [1.0] * (FAR // 8) + [1e30] * (FAR * 3 // 8)  # a quarter of a head's pairs is turned
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    ones = {"output_norm": HIDDEN, "per_layer_proj_norm": PER_LAYER}
    for block in range(LAYERS):
        head, here = FAR if sees_all(block) else NEAR, f"blk.{block}"
        sizes = {
            "attn_q": (HEADS * head, HIDDEN), "attn_output": (HIDDEN, HEADS * head), "ffn_gate": (width(block), HIDDEN),
            "ffn_up": (width(block), HIDDEN), "ffn_down": (HIDDEN, width(block)), "inp_gate": (PER_LAYER, HIDDEN),
            "proj": (HIDDEN, PER_LAYER),
        }  # fmt: skip
        if block < LAYERS - SHARED:
            sizes |= {"attn_k": (head, HIDDEN), "attn_v": (head, HIDDEN)}
            ones[f"{here}.attn_k_norm"] = head
        for name, size in sizes.items():
            add_random(writer, f"{here}.{name}", size, kind, rng)
        norms = "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_norm"
        ones |= {f"{here}.{name}": HIDDEN for name in norms}
        ones |= {f"{here}.attn_q_norm": head, f"{here}.layer_output_scale": 1}
    for name, size in ones.items():
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))
    finish(writer)


def resident(process: int | str) -> dict[str, int]:
    """Bytes that a process has in memory: of its own, and pages of files."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return {name: int(status[name].split()[0]) << 10 for name in ("RssAnon", "RssFile") if name in status}


def most_of_theirs(args: Any, file: Path) -> dict[str, int]:
    """The same of llama.cpp where both together are most."""
    command = [build(args.isa, args.cache) / "llama-bench", "-m", file, "-t", args.threads, "-r", 1, "-p", 64, "-n", 16]
    most: dict[str, int] = {}
    with subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL) as running:
        while running.poll() is None:
            now = resident(running.pid)
            most = max(most, now, key=lambda one: sum(one.values()))
            time.sleep(0.02)
    return most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quantised", choices=MIXTURES, default="Q4_K")
    parser.add_argument("--contexts", type=listed(int), default=[100, 1000])
    parser.add_argument("--tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--isa", choices=ISAS, default="native", help="that llama.cpp is built for")
    parser.add_argument("--cache", type=Path, default=CACHE, help="of builds of llama.cpp")
    parser.add_argument("--files", type=Path, help="a folder that keeps the file")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = (args.files or Path(folder)) / f"random-E2B-{args.quantised}.gguf"
        if not file.exists():
            write_random(file, MIXTURES[args.quantised], 32768)
        engine = cpu_engine(str(file), args.threads, 4096, speculative_algorithm="none")
        results = {context: compare(args, file, context, {"none": engine}) for context in args.contexts}
        memory = {"none": resident("self"), LLAMA: most_of_theirs(args, file)}
        let_go(engine)
    if args.out:
        about = {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "kind": args.quantised, "memory": memory}
        args.out.write_text(json.dumps(about | {"contexts": results}, indent=1), encoding="utf8")
    for context, found in results.items():
        print(context, *(f"{name} {rate:.1f} ({found['ratio'][name]:.2f}x)" for name, rate in found["decode"].items()))
    for name, held in memory.items():
        print(name, *(f"{kind} {size / 1e9:.2f} GB" for kind, size in held.items()))


if __name__ == "__main__":
    main()
