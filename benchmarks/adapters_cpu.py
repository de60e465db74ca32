"""What an adapter costs a step on a CPU: plain decoding of the default model without one, and with one of rank 16 on
all linear layers, by turns in one process; beside llama.cpp with `--lora`, with `--llama-cpp`.

    python benchmarks/adapters_cpu.py [--rounds 20] [--tokens 100] [--requests 1 4] [--rank 16] [--llama-cpp]

It prints milliseconds a step, the median and the least of the rounds, and what the adapter adds: the median of the
rounds' own ratios, for a machine that others use is slow at times for both, and the ratio of the least.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import torch
from chat_servers import Server, llama_server
from gguf import GGUFReader, GGUFWriter
from llama_cpp_build import build
from safetensors.torch import save_file

from draftwing import LLM, SamplingParams
from draftwing.models.hub import resolve_model

FEW = 4  # tokens of the run whose time is taken off, with the prompt's
TARGETS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapters(folder: Path, rank: int) -> None:
    """Writes random factors for each matrix of the model's layers, as PEFT and as llama.cpp have them."""
    generator, tensors = torch.Generator().manual_seed(0), {}
    writer = GGUFWriter(folder / "adapter.gguf", "llama")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    for tensor in GGUFReader(resolve_model("smollm2")).tensors:
        parts = tensor.name.split(".")
        if parts[-2] not in TARGETS:
            continue
        inputs, outputs = (int(size) for size in tensor.shape)
        down = torch.randn(rank, inputs, generator=generator) / inputs**0.5
        up = torch.randn(outputs, rank, generator=generator) * 0.01
        module = MODULES[TARGETS.index(parts[-2])]
        place = "mlp" if parts[-2].startswith("ffn") else "self_attn"
        name = f"base_model.model.model.layers.{parts[1]}.{place}.{module}"
        tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = down, up
        writer.add_tensor(f"{tensor.name}.lora_a", down.numpy())
        writer.add_tensor(f"{tensor.name}.lora_b", up.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(MODULES)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")


def report(what: str, sides: dict[str, Callable[[], float]], rounds: int) -> None:
    """Prints the times of two sides, seconds, which take turns."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds):
        for name in sorted(sides, reverse=turn % 2 == 1):
            times[name].append(sides[name]())
    plain, adapted = times["plain"], times["with the adapter"]
    for name, own in times.items():
        print(f"{what}, {name}: {statistics.median(own) * 1e3:.3f} ms a step, least {min(own) * 1e3:.3f}")
    more = statistics.median(one / other for one, other in zip(adapted, plain, strict=True)) - 1
    print(f"{what}: the adapter adds {more:+.1%}, of the least {min(adapted) / min(plain) - 1:+.1%}", flush=True)


def ours(folder: Path, requests: int, tokens: int, rounds: int) -> None:
    options = {"device": "cpu", "speculative_algorithm": "none", "context_length": 2048}
    with LLM("smollm2", lora_modules=[f"one={folder}"], **options) as llm:  # type: ignore[arg-type]

        def seconds(adapter: str | None, count: int) -> float:
            params = SamplingParams(temperature=0, ignore_eos=True, max_new_tokens=count)
            prompts = [[100 + i, 2000, 300] for i in range(requests)]
            begin = time.perf_counter()
            llm.generate(prompts, params, adapter=adapter)
            return time.perf_counter() - begin

        def step(adapter: str | None) -> float:
            few = seconds(adapter, FEW)
            return (seconds(adapter, tokens + FEW) - few) / tokens

        sides = {"plain": lambda: step(None), "with the adapter": lambda: step("one")}
        for side in sides.values():
            side()
        report(f"draftwing, {requests} requests", sides, rounds)


def theirs(folder: Path, tokens: int, rounds: int, isa: str) -> None:
    """One request: llama.cpp runs requests with different adapters one after the other."""
    contender = llama_server(
        "llama.cpp", build(isa), Path(resolve_model("smollm2")), torch.get_num_threads(), 2048,
        "--lora", str(folder / "adapter.gguf"),
    )  # fmt: skip
    with Server(contender, folder / "llama.log") as server:

        def step(scale: float) -> float:
            body = {
                "prompt": [100, 2000, 300], "n_predict": tokens, "temperature": 0, "ignore_eos": True,
                "cache_prompt": False, "lora": [{"id": 0, "scale": scale}],
            }  # fmt: skip
            request = urllib.request.Request(
                f"http://127.0.0.1:{server.port}/completion",
                json.dumps(body).encode(),
                {"content-type": "application/json"},
            )
            with urllib.request.urlopen(request) as answer:
                return float(json.load(answer)["timings"]["predicted_per_token_ms"]) / 1e3

        server.ready(lambda: step(0.0))
        step(1.0)
        sides = {"plain": lambda: step(0.0), "with the adapter": lambda: step(1.0)}
        report("llama.cpp, 1 request", sides, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--llama-cpp", action="store_true", help="also llama.cpp, built where it is not: minutes")
    parser.add_argument("--isa", default="native", help="llama.cpp's; ours is DRAFTWING_CPU_ISA")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_adapters(folder, args.rank)
        for requests in args.requests:
            ours(folder, requests, args.tokens, args.rounds)
        if args.llama_cpp:
            theirs(folder, args.tokens, args.rounds, args.isa)


if __name__ == "__main__":
    main()
