"""What adapters (LoRA) cost: the target's forward of plain steps of the 8B Llama shape, from graphs, with none of them,
with one for all rows, and with many, each of rank 16 on all linear layers; and how long a slot takes to fill.

    python benchmarks/gpu_kernels/adapters.py [--tiny] [--rows 1,16,64] [--many 32] [--rank 16] [--profile] [OPTION=..]

--profile: also how long each kernel of a step takes, and how often it runs; they overlap, so the sum is more.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
from step import build

from draftwing.config.trees import PLAIN
from draftwing.engine.graphs import Beside, Key
from draftwing.models.adapters.adapter import Adapter, Factors

sys.path.append(str(Path(__file__).parents[1]))
from load_runs import options_of

REPLAYS = 30
PROFILED = 5  # steps of a profile
MOST_KERNELS = 12  # of one that are printed


def adapter_for(executor, rank: int) -> Adapter:  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(0)
    factors = {}
    for name, target in executor.adapters.targets.targets.items():
        down = torch.randn(rank, target.inputs, generator=generator).bfloat16()
        factors[name] = Factors(down, torch.randn(target.outputs, rank, generator=generator).bfloat16(), 1e-3)
    return Adapter(factors, "random")


def replay_us(executor, key) -> float:  # type: ignore[no-untyped-def]
    graphs = executor.graphs._graphs
    graphs["draft", key.key if isinstance(key, Beside) else key][0]()  # makes what is read
    replay = graphs["verify", key][0]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(5):
        begin.record()
        for _ in range(REPLAYS):
            replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / REPLAYS)
    return min(times)


def profile(executor, key, what: str) -> None:  # type: ignore[no-untyped-def]
    """Prints the kernels of a step by name."""
    graphs = executor.graphs._graphs
    graphs["draft", key.key if isinstance(key, Beside) else key][0]()
    replay = graphs["verify", key][0]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(PROFILED):
            replay()
        torch.cuda.synchronize()
    events = sorted(found.key_averages(), key=lambda one: -one.self_device_time_total)
    print(f"  {what}:")
    for one in events[:MOST_KERNELS]:
        times = one.count / PROFILED
        us = one.self_device_time_total / PROFILED
        print(f"    {us:8.1f} us  {times:6.0f} x {us / max(times, 1e-9):6.2f}  {one.key[:90]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rows", default="1,16,64")
    parser.add_argument("--many", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("options", nargs="*")
    args = parser.parse_args()
    rows = [int(one) for one in args.rows.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        given = {"speculative_algorithm": "none", "cuda_graph_max_bs": max(rows), "max_running_requests": max(rows)}
        given |= {"max_total_tokens": 32768, "lora_dir": folder, "max_loras": args.many}
        given |= {"context_length": 2048 if args.tiny else 4096}
        parts = build(Path(folder), given | {"max_lora_rank": args.rank} | options_of(args.options), args.tiny)
    executor = parts.executor
    while parts.later:
        parts.run_later()
    adapter, seconds = adapter_for(executor, args.rank), []
    began = time.perf_counter()
    adapter = executor.adapters.imaged(adapter, executor.device.host_memory)
    print(f"an image of it: {1000 * (time.perf_counter() - began):.1f} ms, of another one: ", end="")
    began = time.perf_counter()
    other = executor.adapters.imaged(adapter, executor.device.host_memory)
    print(f"{1000 * (time.perf_counter() - began):.1f} ms", flush=True)
    del other
    for slot in range(1, args.many + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        executor.put_adapter(slot, adapter)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    print(f"{adapter.nbytes / 1e6:.0f} MB into a slot: {1000 * min(seconds):.1f} ms, at most {1000 * max(seconds):.1f}")
    for size in rows:
        key = Key(PLAIN, size)
        executor.set_rows(torch.arange(size).numpy(), size)
        base = replay_us(executor, key)
        found = []
        for count in (0, 1, args.many):
            slots = torch.arange(size, device="cuda") % max(count, 1) + (count > 0)
            executor.table.adapters[:size].copy_(slots)
            found.append(replay_us(executor, Beside(key)))
            if args.profile:
                profile(executor, Beside(key), f"{size} rows, {count} adapters")
        shares = ", ".join(f"{one:.0f} ({100 * (one / base - 1):+.1f}%)" for one in found)
        print(
            f"{size} rows: {base:.0f} us; the graph with adapters, of none, one and {args.many}: {shares}", flush=True
        )


if __name__ == "__main__":
    main()
