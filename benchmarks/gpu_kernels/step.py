"""A step of the 8B Llama shape, stage by stage: microseconds of a replay of each graph, and of its kernels.

    python benchmarks/gpu_kernels/step.py [--profile SIZE] [--sizes 1,16] [--tiny] [option=value ...]

Random weights, from configs that are written here. Options are those of the engine; `speculative_algorithm=EAGLE3` and
`STANDALONE` get a draft model of their usual size. The rows' contexts are empty.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
SMALL = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3,
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 2048,
}  # fmt: skip
REPLAYS = 20


def build(folder: Path, given: dict[str, Any], tiny: bool) -> Any:
    from draftwing.config import Options
    from draftwing.engine.build import build as build_engine
    from draftwing.models.loader import load_config

    own: dict[str, Any] = {}
    target = {**LLAMA, **(TINY if tiny else {})}
    draft = {**target, "num_hidden_layers": 1, "draft_vocab_size": 500 if tiny else 32000}
    if given.get("speculative_algorithm") == "STANDALONE":
        draft = {**target, **({} if tiny else SMALL)}
    if given.get("speculative_algorithm") in ("EAGLE", "EAGLE3", "STANDALONE"):
        own["speculative_draft_model_path"] = str(folder / "draft")
    for name, config in (("target", target), ("draft", draft)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    options = Options.from_kwargs(model=str(folder / "target"), load_format="dummy", **own, **given).resolve()
    path = folder / "target"
    return build_engine(options.for_architecture(load_config(path).architecture), path)


def stages(graphs: Any, sizes: list[int]) -> list[tuple[Any, str, Any]]:
    """(key, stage, replay), greedy and without filters."""
    found = []
    for (stage, key), (replay, _) in graphs._graphs.items():
        key, filtered = key if stage == "settle" else (key, False)
        if key.size in sizes and not filtered:
            found.append((key, stage, replay))
    return found


def microseconds(replay: Any) -> float:
    replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPLAYS):
        replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000 / REPLAYS


def profile(name: str, replay: Any) -> None:
    """Kernels by the time they take. They overlap, so that their sum may be more than the graph's time."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA]) as seen:
        replay()
        torch.cuda.synchronize()
    by: dict[str, list[float]] = defaultdict(list)
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            by[event.name].append(event.device_time)
    print(f"-- {name}: {sum(map(len, by.values()))} kernels, {sum(map(sum, by.values())):.0f} us")
    for kernel, times in sorted(by.items(), key=lambda item: -sum(item[1]))[:16]:
        print(f"{sum(times):9.1f} us  {len(times):4d} x {sum(times) / len(times):7.2f}  {kernel[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="1,4,8,16,64,128")
    parser.add_argument("--profile", type=int)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("options", nargs="*")
    args = parser.parse_args()
    given = {}
    for option in args.options:
        name, _, value = option.partition("=")
        try:
            given[name] = json.loads(value)
        except json.JSONDecodeError:
            given[name] = value
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        parts = build(Path(folder), given, args.tiny)
    graphs = parts.executor.graphs
    print(f"built in {time.monotonic() - begin:.1f} s, {len(graphs)} graphs, {parts.pool_tokens} tokens in the pool")
    totals: dict[Any, float] = defaultdict(float)
    with torch.inference_mode():
        found = stages(graphs, [int(size) for size in args.sizes.split(",")])
        for key, stage, replay in found:
            took = microseconds(replay)
            totals[key] += took
            print(f"{took:9.1f} us  {stage:7s} {tuple(key.shape)} x {key.size}")
        for key, took in totals.items():
            print(f"{took:9.1f} us  step    {tuple(key.shape)} x {key.size}")
        for key, stage, replay in found:
            if key.size == args.profile:
                profile(f"{stage} {tuple(key.shape)} x {key.size}", replay)


if __name__ == "__main__":
    main()
