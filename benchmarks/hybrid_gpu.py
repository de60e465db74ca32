"""Decoding of models with recurrent layers on a GPU: the shapes of Qwen3.5 with random weights.

    python benchmarks/hybrid_gpu.py [--sizes 9B,27B,35B-A3B] [--requests 1,16,64] [--prompts 100,512] [--mixed 100x16]
        [--tree] [--out result.json] [option=value ...]

Acceptance is simulated (`--accept-length`, of three drafts of the prediction layer), so texts are worthless. One engine
per size: `none` is its plain steps, pinned. The floor of one request is the time to read the weights of a step, at the
rate of a pure read in the same process. A tree of 16 nodes is a second engine's, whose steps are timed against its
plain ones. `--prompts`: milliseconds of the target's forward over one prompt of so many tokens, from its graph and
launched, by turns, the host's part in them, and what its graphs take. `--mixed`: waves of requests without drafts, with
prompts beside their steps and in turn, as mixed_steps.py does. FP8 has blocks of 128 x 128, as published.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from load_runs import drive, fixed_shapes, jobs_of, let_go, listed, machine, name_of, options_of, pinned, watched
from mixed_steps import both_ways, shown
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tqdm import tqdm

from draftwing.config.options import Options
from draftwing.config.trees import PLAIN, TreeShape
from draftwing.engine.engine import Engine
from draftwing.engine.startup.memory import first_step

sys.path.insert(0, str(Path(__file__).parent / "gpu_kernels"))
from step import weights_read
from timing import read_rate

VOCAB, PROMPT = 248_320, 100
# Layers, hidden, intermediate, heads, KV heads, key heads and value heads of delta nets, FP8, of experts.
SIZES: dict[str, tuple[int, int, int, int, int, int, int, bool, bool]] = {
    "tiny": (4, 256, 512, 4, 2, 2, 4, False, False),
    "tiny-moe": (4, 256, 128, 4, 2, 2, 4, True, True),
    "0.8B": (24, 1024, 3584, 8, 2, 16, 16, False, False),
    "9B": (32, 4096, 12288, 16, 4, 16, 32, False, False),
    "27B": (64, 5120, 17408, 24, 4, 16, 48, True, False),
    "35B-A3B": (40, 2048, 512, 16, 2, 16, 32, True, True),
    "122B-A10B": (48, 3072, 1024, 32, 2, 16, 64, True, True),
}
FP8 = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    "modules_to_not_convert": [
        "lm_head", "embed_tokens", "in_proj_a", "in_proj_b", "mlp.gate", "shared_expert_gate", "mtp.fc",
    ],
}  # fmt: skip


def config_of(size: str) -> dict[str, Any]:
    layers, hidden, ffn, heads, kv_heads, key_heads, value_heads, fp8, experts = SIZES[size]
    config: dict[str, Any] = {
        "architectures": ["Qwen3_5MoeForCausalLM" if experts else "Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_moe_text" if experts else "qwen3_5_text",
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": 256, "vocab_size": VOCAB, "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "attn_output_gate": True,
        "layer_types": ["linear_attention" if i % 4 < 3 else "full_attention" for i in range(layers)],
        "full_attention_interval": 4,  # SGLang looks at this
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "mtp_num_hidden_layers": 1, "eos_token_id": 0,
    }  # fmt: skip
    if experts:
        config |= {
            "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": ffn,
            "shared_expert_intermediate_size": ffn, "norm_topk_prob": True,
        }  # fmt: skip
    else:
        config["intermediate_size"] = ffn
    return config | ({"quantization_config": FP8} if fp8 else {})


def engine_of(folder: str, shape: tuple[int, int, int], accept_length: float, given: dict[str, Any]) -> Engine:
    names = "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"
    return Engine(
        Options.from_kwargs(
            model=folder, load_format="dummy", log_level="warning", simulate_accept_length=accept_length,
            **{"speculative_algorithm": "NEXTN", "context_length": 4096} | dict(zip(names, shape, strict=True)) | given,
        )
    )  # fmt: skip


def timed(engine: Engine, shape: TreeShape, count: int, tokens: int) -> dict[str, float]:
    """Tokens per second of all requests while all of them write, and a step's median milliseconds."""
    rng = random.Random(count)
    prompts = [[rng.randrange(1000, VOCAB - 1000) for _ in range(PROMPT)] for _ in range(count)]
    with pinned(engine, shape):
        drive(engine, jobs_of(prompts, 0.0, 8), count)
        with watched(engine) as steps:
            drive(engine, jobs_of(prompts, 0.0, tokens), count)
    whole = [step for step in steps if step.kind == "tree" and step.rows == count and step.shape == shape]
    ms = statistics.median(later.at - step.at for step, later in itertools.pairwise(whole)) * 1e3
    return {"ms": ms, "accept_length": sum(step.tokens for step in whole) / sum(step.rows for step in whole)} | {
        "rate": 1e3 * sum(step.tokens for step in whole) / len(whole) / ms
    }


def prompt_ms(engine: Engine, lengths: list[int], repeats: int = 15) -> dict[str, Any]:
    """Medians in milliseconds, (host, whole), from graphs and launched; of rows that nobody reads."""
    executor, found = engine.parts.executor, {}
    prefills, from_graphs = executor.prefills, executor.prefills.run
    for length in lengths:
        took: dict[str, list[tuple[float, float]]] = {"graph": [], "launched": []}
        for _ in range(repeats):
            for name, run in (("graph", from_graphs), ("launched", lambda *asked: None)):
                prefills.run = run  # type: ignore[method-assign]
                assert executor.table.states is not None
                with torch.inference_mode():
                    executor.table.states.clear_dummy()
                executor.device.synchronize()
                began = time.perf_counter()
                pending = executor.launch(first_step(length, length, executor.table.length))
                host = time.perf_counter() - began
                executor.device.synchronize()
                took[name].append((host * 1e3, (time.perf_counter() - began) * 1e3))
                executor.commit(pending).wait()
        prefills.run = from_graphs  # type: ignore[method-assign]
        found[str(length)] = {
            name: [round(statistics.median(part), 2) for part in zip(*some[2:], strict=True)]
            for name, some in took.items()
        }
    return found


def captured_again(engine: Engine) -> dict[str, float]:
    """Graphs of prompts alone, the seconds that they take, and MB."""
    prefills, device = engine.parts.executor.prefills, engine.parts.executor.device
    prefills.clear()
    device.trim()
    free, began = device.free_memory(), time.perf_counter()
    with torch.inference_mode(), tqdm(disable=True) as bar:
        prefills.capture(bar)
    device.synchronize()
    taken = (free - device.free_memory()) / 1e6
    return {"count": len(prefills), "seconds": time.perf_counter() - began, "MB": taken}


def waves(engine: Engine, length: int, count: int, tokens: int) -> dict[str, Any]:
    """Three waves of requests, so many at once, with answers of half to one and a half of `tokens`."""

    def run(engine: Any, turn: int) -> Any:
        rng = random.Random(turn)
        prompts = [[rng.randrange(1000, VOCAB - 1000) for _ in range(length)] for _ in range(3 * count)]
        return drive(engine, jobs_of(prompts, 0.0, tokens, 0.5, turn), count)

    with pinned(engine, PLAIN):
        return both_ways(engine, run, 1)


def measure(args: argparse.Namespace, size: str, folder: str) -> dict[str, Any]:
    began = time.monotonic()
    engine = engine_of(folder, (3, 1, 4), args.accept_length, args.options)
    found: dict[str, Any] = {"start": time.monotonic() - began}
    (chain,) = [shape for shape in fixed_shapes(engine) if shape.tree == (3, 1, 4)]
    found["floor_ms"] = weights_read(engine.parts, 1)[0] / read_rate() / 1e3
    if args.prompts:
        found["prompts"] = prompt_ms(engine, args.prompts)
        print(size, found["start"], found["prompts"], flush=True)
    for name in args.mixed:
        length, count = map(int, name.split("x"))
        found[name] = waves(engine, length, count, args.tokens)
        print(shown(name, "none", found[name]), flush=True)
    rows = engine.parts.options.max_running_requests or 1
    for count in sorted({min(count, rows) for count in args.requests}):
        found[count] = {
            "none": timed(engine, PLAIN, count, args.tokens),
            "NEXTN": timed(engine, chain, count, args.tokens),
        }
        print(size, count, found[count], flush=True)
    if args.prompts:
        found["graphs of prompts"] = captured_again(engine)
        print(size, found["graphs of prompts"], flush=True)
    let_go(engine)
    if args.tree:
        engine = engine_of(folder, (5, 4, 16), args.accept_length, args.options)
        (tree,) = [shape for shape in fixed_shapes(engine) if shape.tree == (5, 4, 16)]
        found["tree of 16"] = {name_of(shape): timed(engine, shape, 1, 64)["ms"] for shape in (PLAIN, tree)}
        let_go(engine)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=listed(str), default=["9B", "27B", "35B-A3B"])
    parser.add_argument("--requests", type=listed(int), default=[1, 16, 64])
    parser.add_argument("--mixed", type=listed(str), default=[], metavar="CELLS", help="100x64: length, at once")
    parser.add_argument("--prompts", type=listed(int), default=[])
    parser.add_argument("--accept-length", type=float, default=2.51)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--tree", action="store_true", help="the second engine, too")
    parser.add_argument("--out", type=Path)
    parser.add_argument("options", nargs="*", metavar="option=value")
    args = parser.parse_args()
    args.options = options_of(args.options)
    results: dict[str, Any] = {"machine": machine(), "TB/s read": read_rate() / 1e6}  # before memory is taken
    for size in args.sizes:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config_of(size)))
            Tokenizer(WordLevel({"a": 0}, "a")).save(f"{folder}/tokenizer.json")  # prompts are token ids
            results[size] = measure(args, size, folder)
        print(size, json.dumps(results[size]), flush=True)
        if args.out:
            args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
