"""A step of the 8B Llama shape, stage by stage: microseconds of a replay of each graph, and of its kernels.

    python benchmarks/gpu_kernels/step.py [--profile 1,16] [--sizes 1,16] [--tiny] [--draft JSON] [option=value ...]

Random weights, from configs that are written here; `--config` names the config.json of another target. Options are
those of the engine; `speculative_algorithm=EAGLE3`, `DSPARK`, `DFLASH`, `STANDALONE` and, of a Gemma 4,
`FROZEN_KV_MTP` get a draft model of their usual size, of which `--draft` changes keys. The rows' contexts are empty. Of
a mixture of experts they choose independently of each other. The floor of a step is the time to read what the target
reads of its weights, at `timing.read_rate`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from timing import read_rate

from draftwing.engine.graphs import Key
from draftwing.ops.experts.routing import Routing

sys.path.append(str(Path(__file__).parents[1]))
from load_runs import options_of

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
BLOCK = {
    "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "num_hidden_layers": 3, "block_size": 7,
    "mask_token_id": 10, "target_layer_ids": [1, 8, 15, 22, 29], "sample_from_anchor": True, "draft_vocab_size": 32000,
}  # fmt: skip
ASSISTANT = {  # of Gemma 4's 12B
    "hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 4, "enable_moe_block": False,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"], "num_kv_shared_layers": 4,
}  # fmt: skip
MARKOV = {
    "markov_rank": 256, "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}  # fmt: skip
REPLAYS = 20
MAX_SHOWN = 60  # kernels of a layer


def build(
    folder: Path,
    given: dict[str, Any],
    tiny: bool,
    config_file: Path | None = None,
    changes: dict[str, Any] | None = None,
) -> Any:
    """changes: of the draft model's config."""
    from draftwing.config.options import Options
    from draftwing.engine.build import build as build_engine

    own: dict[str, Any] = {}
    target = {**LLAMA, **(TINY if tiny else {})}
    if config_file is not None:
        target = json.loads(config_file.read_text())
    of_draft = {**LLAMA, **{key: target[key] for key in ("hidden_size", "vocab_size")}} if config_file else target
    draft = {**of_draft, "num_hidden_layers": 1, "draft_vocab_size": 500 if tiny else 32000}
    if given.get("speculative_algorithm") == "STANDALONE":
        draft = {**target, **({} if tiny else SMALL)}
    if given.get("speculative_algorithm") in ("DSPARK", "DFLASH"):
        layers = [1, 2] if tiny else BLOCK["target_layer_ids"]
        markov = MARKOV if given["speculative_algorithm"] == "DSPARK" else {}
        head_dim = target["hidden_size"] // target["num_attention_heads"]
        own_keys = {"target_layer_ids": layers, "draft_vocab_size": draft["draft_vocab_size"], "head_dim": head_dim}
        draft = {**draft, **BLOCK, **markov, **own_keys}
    if given.get("speculative_algorithm") == "FROZEN_KV_MTP":
        text = {**target, **ASSISTANT, **(changes or {}).get("text_config", {})}
        draft = {"model_type": "gemma4_assistant", "backbone_hidden_size": target["hidden_size"]}
        changes = {**(changes or {}), "text_config": text}
    draft |= changes or {}
    if given.get("speculative_algorithm") in ("EAGLE", "EAGLE3", "DSPARK", "DFLASH", "STANDALONE", "FROZEN_KV_MTP"):
        own["speculative_draft_model_path"] = str(folder / "draft")
    for name, config in (("target", target), ("draft", draft)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    options = Options.from_kwargs(model=str(folder / "target"), load_format="dummy", **own, **given).resolve()
    return build_engine(options, folder / "target")


def stages(graphs: Any, sizes: list[int]) -> list[tuple[Any, str, Any]]:
    """(key, stage, replay), greedy, without filters, edits and adapters."""
    found = []
    for (stage, key), (replay, _) in graphs._graphs.items():
        key, *kinds = key if stage == "commit" else (key,)
        if isinstance(key, Key) and key.size in sizes and not any(kinds):
            found.append((key, stage, replay))
    return found


def weights_read(parts: Any, rows: int) -> tuple[float, float]:
    """Bytes of the target's weights that a step of so many rows reads, and the distinct experts of a layer."""
    from draftwing.layers.experts import ExpertLinear
    from draftwing.layers.linear import Linear

    model, device = parts.executor.model, parts.executor.device
    experts, distinct = model.config.experts, 0.0
    if experts is not None:
        logits = torch.zeros(rows, experts.count, dtype=torch.bfloat16, device=device.device)
        anything = torch.ones(1, dtype=torch.int32, device=device.device)
        distinct = device.ops.route(logits, Routing(experts.routing.top_k), scatter=anything).experts.unique().numel()
    total = 0.0
    for part in model.modules():
        if isinstance(part, Linear) and (part is not model.embed.table or part is model.lm_head):
            size = sum(p.nbytes for p in part.parameters(recurse=False)) + part.op.sizes.total()
            size = size or part.out_features * part.in_features * model.dtype.itemsize  # the device's own copy
            routed = isinstance(part, ExpertLinear) and not part.takes_all
            total += size * (distinct + part.shared) / part.count if routed else size
    return total, distinct


def print_steps(parts: Any, undrafted: dict[Any, float], totals: dict[Any, float]) -> None:
    """Microseconds of whole steps and of all but their drafts, by key."""
    heads = ("rows", "tokens", "experts", "MB", "floor", "target", "share", "step", "share")
    print(f"{'depth, topk, nodes, verified':29s}", *(f"{head:>7s}" for head in heads))
    for key in sorted(totals, key=lambda key: (key.size, key.shape.queries)):
        tokens = key.size * key.shape.queries
        size, distinct = weights_read(parts, tokens)
        bound, target, step = size / read_rate(), undrafted[key], totals[key]
        print(
            f"{tuple(key.shape)!s:29s} {key.size:7d} {tokens:7d} {distinct:7.0f} {size / 1e6:7.0f} {bound:7.0f} "
            f"{target:7.0f} {bound / target:7.0%} {step:7.0f} {bound / step:7.0%}", flush=True,
        )  # fmt: skip


def microseconds(replay: Any) -> float:
    replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPLAYS):
        replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000 / REPLAYS


def one_repeat(names: list[str]) -> tuple[int, int, int]:
    """(first kernel, kernels, times) of the longest stretch in which a sequence of kernels repeats, as layers do: where
    it begins, how long one repeat is, and how often it comes. Without any: everything, once."""
    best, most = (0, len(names), 1), 0
    for period in range(2, min(len(names) // 2, 100) + 1):
        begin = 0
        for i in range(len(names) - period + 1):
            if i < len(names) - period and names[i] == names[i + period]:
                continue
            if i - begin >= period and i - begin + period > most:  # twice at least; of equals the shortest period
                most = i - begin + period
                best = begin, period, most // period
            begin = i + 1
    return best


def timeline(kernels: list[tuple[float, float, str]]) -> None:
    """One layer's kernels in the middle of a graph, from (begin, end, name) in microseconds: where each begins after
    the first, how long it runs, and for how long nothing ran before it (below 0: it began under the one before). In
    brackets, means over all layers; a draft's levels are such layers, too."""
    kernels = sorted(kernels)
    first, period, times = one_repeat([name for _, _, name in kernels])
    shown = first + times // 2 * period
    ends = list(accumulate((end for _, end, _ in kernels), max))
    gaps = [0.0] + [kernels[i][0] - ends[i - 1] for i in range(1, len(kernels))]
    origin = kernels[shown][0]
    print(f"   layer {times // 2 + 1} of {times}: {period} kernels; start, duration [mean], gap before it [mean]")
    for i in range(shown, min(shown + period, shown + MAX_SHOWN)):
        begin, end, name = kernels[i]
        same = range(first + i - shown, first + times * period, period)
        duration = sum(kernels[j][1] - kernels[j][0] for j in same) / times
        gap = sum(gaps[j] for j in same) / times
        times_of_it = f"{begin - origin:9.2f} {end - begin:8.2f} [{duration:7.2f}] {gaps[i]:7.2f} [{gap:6.2f}]"
        print(f"{times_of_it}  {name[:64]}")
    if period > MAX_SHOWN:
        print(f"   and {period - MAX_SHOWN} more")
    if times > 1 and shown + period < len(kernels):
        print(f"{kernels[shown + period][0] - origin:9.2f} the next one's start")


def profile(name: str, replay: Any) -> None:
    """Kernels by the time they take, and one layer's in their order. They overlap, so that their sum may be more than
    the graph's time; being watched takes time, too, so that time is given without it first."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    alone = microseconds(replay)
    with profiler(activities=[ProfilerActivity.CUDA]) as seen:
        replay()
        torch.cuda.synchronize()
    by: dict[str, list[float]] = defaultdict(list)
    kernels: list[tuple[float, float, str]] = []
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            by[event.name].append(event.device_time)
            kernels.append((event.time_range.start, event.time_range.end, event.name))
    print(f"-- {name}: {alone:.0f} us; {len(kernels)} kernels, {sum(map(sum, by.values())):.0f} us in all")
    for kernel, times in sorted(by.items(), key=lambda item: -sum(item[1]))[:16]:
        print(f"{sum(times):9.1f} us  {len(times):4d} x {sum(times) / len(times):7.2f}  {kernel[:90]}")
    if kernels:
        span = max(end for _, end, _ in kernels) - min(begin for begin, _, _ in kernels)
        print(f"   from the first kernel's start to the last one's end {span:.0f} us")
        timeline(kernels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="1,4,8,16,64,128")
    parser.add_argument("--profile", default="", metavar="SIZES", help="of which batch sizes to show the kernels")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--config", type=Path, metavar="FILE", help="config.json of the target, in place of Llama's")
    parser.add_argument("--draft", type=json.loads, metavar="JSON", help="keys of the draft model's config")
    parser.add_argument("options", nargs="*")
    args = parser.parse_args()
    from draftwing.engine.startup.measure_costs import experts_at_random

    given = options_of(args.options)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        parts = build(Path(folder), given, args.tiny, args.config, args.draft)
    graphs = parts.executor.graphs
    print(f"built in {time.monotonic() - begin:.1f} s, {len(graphs)} graphs, "
          f"{parts.sched.config.slots} tokens in the pool")  # fmt: skip
    totals: dict[Any, float] = defaultdict(float)
    undrafted: dict[Any, float] = defaultdict(float)
    with torch.inference_mode(), experts_at_random(parts.executor):
        found = stages(graphs, [int(size) for size in args.sizes.split(",")])
        for key, stage, replay in found:
            took = microseconds(replay)
            totals[key] += took
            undrafted[key] += took if stage != "draft" else 0.0
            print(f"{took:9.1f} us  {stage:7s} {tuple(key.shape)} x {key.size}")
        print_steps(parts, undrafted, totals)
        for key, stage, replay in found:
            if str(key.size) in args.profile.split(","):
                profile(f"{stage} {tuple(key.shape)} x {key.size}", replay)


if __name__ == "__main__":
    main()
