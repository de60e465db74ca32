"""Decoding of models with recurrent layers on a CPU, and llama.cpp on the same file in the same run.

    python benchmarks/hybrid_cpu.py --out result.json [--size 0.8B] [--quantised Q8_0] [--contexts 100,2000,8000]

The files have the shapes of Qwen3.5 and random weights, so acceptance is simulated (`--accept-length`, of three drafts)
and texts are worthless; llama.cpp decodes without drafts. Everyone takes turns; a figure is the median of the rounds, a
ratio the median of the rounds' ratios. `plain reads` is a floor: how often a second all threads could read what a plain
step reads, by sums of an array. Prompts are computed once, and the rounds go on from cached prefixes. With `--made`
prompts are not computed but made up (`made_contexts.py`), and llama.cpp is its server. What `--out` has of other sizes,
types and contexts stays there, so that long runs can be made in pieces. `llama_cpp_build.py` says what a build of
llama.cpp needs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import GGUFWriter
from gguf_files import MIXTURES, add_random, add_sizes, add_tokens, finish
from llama_cpp_build import CACHE, ISAS, VERSION, build
from load_runs import let_go, listed, machine
from made_contexts import MOST_READ, fill, llama
from turns import Answer, Ask, ask_engine, cpu_engine, in_turn, median_ratio, read_bandwidth

from draftwing.engine.engine import Engine
from draftwing.gguf_file import open_gguf

VOCAB, HEAD_DIM, STATE, TAPS, INTERVAL = 248_320, 256, 128, 4, 4
LLAMA, READS = "llama.cpp", "plain reads"
SETTLING = 64  # tokens before the first round: steps are recorded, and a policy learns what they take and bring
DRAFTERS = {  # options of each engine
    "none": {},
    "NEXTN": {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4},
    "NGRAM": {"speculative_num_steps": 3, "speculative_num_draft_tokens": 4},
}


class Size(NamedTuple):
    """heads, kv_heads: of attention; key_heads, value_heads: of delta nets."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    key_heads: int
    value_heads: int


SIZES = {"0.8B": Size(24, 1024, 3584, 8, 2, 16, 16), "4B": Size(32, 2560, 9216, 16, 4, 16, 32)}


def matrices(size: Size, block: int) -> dict[str, tuple[int, int]]:
    """Rows and columns of those of a layer, or of the prediction layer, which comes last and attends."""
    hidden, keys, values = size.hidden, size.key_heads * STATE, size.value_heads * STATE
    queries, kv = size.heads * HEAD_DIM, size.kv_heads * HEAD_DIM
    found = {"ffn_gate": (size.ffn, hidden), "ffn_up": (size.ffn, hidden), "ffn_down": (hidden, size.ffn)}
    if block == size.layers:
        found["nextn.eh_proj"] = (hidden, 2 * hidden)
    elif (block + 1) % INTERVAL:
        return found | {
            "attn_qkv": (2 * keys + values, hidden), "attn_gate": (values, hidden), "ssm_out": (hidden, values),
            "ssm_beta": (size.value_heads, hidden), "ssm_alpha": (size.value_heads, hidden),
        }  # fmt: skip
    return found | {
        "attn_q": (2 * queries, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden),
        "attn_output": (hidden, queries),
    }  # fmt: skip


def vectors(size: Size, block: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """What is float32 of a layer."""
    ones = np.ones(size.hidden, np.float32)
    found = {"attn_norm.weight": ones, "post_attention_norm.weight": ones}
    if block == size.layers:
        found |= {f"nextn.{name}.weight": ones for name in ("enorm", "hnorm", "shared_head_norm")}
    elif (block + 1) % INTERVAL:
        channels = (2 * size.key_heads + size.value_heads) * STATE
        return found | {
            "ssm_conv1d.weight": rng.standard_normal((channels, TAPS), np.float32) / 2,
            "ssm_norm.weight": np.ones(STATE, np.float32),
            "ssm_a": -np.exp(rng.uniform(-3, 0.5, size.value_heads)).astype(np.float32),
            "ssm_dt.bias": np.zeros(size.value_heads, np.float32),
        }
    return found | {f"attn_{name}_norm.weight": np.ones(HEAD_DIM, np.float32) for name in "qk"}


def write_random(path: Path, size: Size, mixture: tuple[str, str], longest: int) -> None:
    """A file with random weights and a prediction layer. mixture: of `MIXTURES`."""
    rng, (kind, head_kind) = np.random.default_rng(0), mixture
    writer = GGUFWriter(path, "qwen35")
    add_sizes(writer, size, size.layers + 1, longest, HEAD_DIM, 1e7)
    writer.add_nextn_predict_layers(1)
    writer.add_rope_dimension_count(HEAD_DIM // 4)
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_ssm_conv_kernel(TAPS)
    writer.add_ssm_state_size(STATE)
    writer.add_ssm_group_count(size.key_heads)
    writer.add_ssm_time_step_rank(size.value_heads)
    writer.add_ssm_inner_size(size.value_heads * STATE)
    writer.add_full_attention_interval(INTERVAL)
    add_tokens(writer, "qwen35", VOCAB)
    add_random(writer, "token_embd", (VOCAB, size.hidden), head_kind, rng)
    writer.add_tensor("output_norm.weight", np.ones(size.hidden, np.float32))
    for block in range(size.layers + 1):
        for name, shape in matrices(size, block).items():
            add_random(writer, f"blk.{block}.{name}", shape, kind, rng)
        for name, values in vectors(size, block, rng).items():
            writer.add_tensor(f"blk.{block}.{name}", values)
    finish(writer)


def make_engine(args: Any, file: Path, drafter: str) -> Engine:
    given: dict[str, Any] = {**DRAFTERS[drafter], "speculative_algorithm": drafter}
    if drafter != "none":
        given["simulate_accept_length"] = args.accept_length
    tokens = max(4 * max(args.contexts), 32768)  # a state takes as much memory as 1,600 of them
    return cpu_engine(str(file), args.threads, tokens, **given)


def theirs(args: Any, file: Path, context: int, tokens: int, prompt: bool) -> float:
    """Tokens per second of llama-bench: of a prompt, or of an answer after a prompt."""
    what = ["-p", context, "-n", 0] if prompt else ["-p", 0, "-n", tokens, "-d", context]
    programs = build(args.isa, args.cache)
    command = [programs / "llama-bench", "-m", file, "-t", args.threads, "-fa", args.flash, *what]
    command += ["-r", 1, "-o", "json"]
    out = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, check=True).stdout
    return float(json.loads(out)[0]["avg_ts"])


def step_bytes(file: Path, size: Size, context: int) -> int:
    """What a plain step reads: all weights but the prediction layer's, keys and values in 16 bits, and states."""
    opened = open_gguf(file)
    weights = sum(opened.raw(name).nbytes for name in opened.tensors if f"blk.{size.layers}." not in name)
    attending = size.layers // INTERVAL
    kv = attending * 2 * size.kv_heads * HEAD_DIM * 2 * context
    return weights + kv + (size.layers - attending) * size.value_heads * STATE * STATE * 4


def warmed(engine: Engine, prompt: list[int], tokens: int) -> Answer:
    """As llama-bench, which runs before it measures: whoever comes after another program has to wake."""
    ask_engine(engine, prompt, 16)
    return ask_engine(engine, prompt, tokens)


def served(ask: Ask, prompt: list[int], tokens: int) -> Answer:
    """As `warmed`."""
    ask(prompt, 16)
    answer = ask(prompt, tokens)
    assert answer.computed <= 64, f"{answer.computed} tokens were computed: the context is not cached"
    return answer


def compare(args: Any, file: Path, context: int, engines: dict[str, Engine]) -> dict[str, Any]:
    prompt = [random.Random(context).randrange(VOCAB) for _ in range(context)]
    prompts: dict[str, float] = {}
    asks: dict[str, Ask] = {name: partial(warmed, engine) for name, engine in engines.items()}
    with ExitStack() as stack:
        if args.made:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            asks[LLAMA] = partial(served, stack.enter_context(llama(args, file, args.flash, prompt, folder, axes=True)))
            for engine in engines.values():
                fill(engine, prompt)
            prompt = [*prompt, 7]  # one more token: recurrent states cannot go back
            for engine in engines.values():
                ask_engine(engine, prompt, SETTLING)
        else:
            prompts[LLAMA] = theirs(args, file, context, args.tokens, True)
            asks[LLAMA] = lambda _, tokens: Answer(decode=theirs(args, file, context, tokens, False))
            for name, engine in engines.items():
                prompts[name] = len(prompt) / ask_engine(engine, prompt, SETTLING).first
        read = step_bytes(file, SIZES[args.size], context)
        part = min(read, MOST_READ)
        asks[READS] = lambda _, tokens: Answer(decode=read_bandwidth(part, args.threads, 3) / read)
        rounds = in_turn(asks, [prompt] * args.rounds, args.tokens)
    rates = {name: [answer.decode for answer in answers] for name, answers in rounds.items()}
    found = {"decode": {name: statistics.median(own) for name, own in rates.items()}}
    found["ratio"] = {name: median_ratio(own, rates[LLAMA]) for name, own in rates.items()}
    lengths = {name: [round(answer.accept_length, 2) for answer in answers] for name, answers in rounds.items()}
    recorded = {name: len(engine.parts.executor.graphs) for name, engine in engines.items()}
    return {**found, "prompt": prompts, "rounds": rates, "lengths": lengths, "recorded": recorded}


def result(runs: dict[str, Any], hardware: str, commit: str) -> dict[str, Any]:
    """In the form of benchmarks/results. runs: by size, type and context, each in the order of its measurement."""
    names = [LLAMA, *dict.fromkeys(name for found in runs.values() for name in found["decode"] if name != LLAMA)]
    titles, rows = ["no speculation" if name == "none" else name for name in names], []
    for what, found in runs.items():
        rates, ratios, prompts = (found[part] for part in ("decode", "ratio", "prompt"))
        ours = [f"{rates[name]:.1f} ({ratios[name]:.2f}x)" if name in rates else None for name in names[1:]]
        own = next((rate for name, rate in prompts.items() if name != LLAMA), None)
        read = [None if rate is None else round(rate) for rate in (prompts.get(LLAMA), own)]
        rows.append([what, round(rates[LLAMA], 1), *ours, *read])
    return {
        "date": max(found["date"] for found in runs.values()),
        "commit": commit,
        "hardware": hardware,
        "software": [f"torch {torch.__version__.partition('+')[0]}", f"llama.cpp of llama-cpp-python {VERSION}"],
        "model": "shapes of Qwen3.5 with random weights, one GGUF file for both; Q4_K has its head in Q6_K",
        "workload": "1 request, greedy, an answer behind a context that is cached; tokens/s, medians of the rounds, "
        "and in brackets the median of the rounds' ratios to llama.cpp without drafts; acceptance is simulated, "
        + ", ".join(sorted({f"{found['accept_length']} tokens a step" for found in runs.values()})),
        "commands": list(dict.fromkeys(found["command"] for found in runs.values())),
        "columns": ["size, type, tokens of context", *titles, f"prompt of that length: {LLAMA}", "the same: ours"],
        "rows": rows,
    }  # fmt: skip


def write(args: Any, runs: dict[str, Any]) -> None:
    for path, what in ((args.out, runs), (args.result, result(runs, args.hardware, args.commit))):
        if path is not None:
            path.write_text(json.dumps(what, indent=1) + "\n", encoding="utf8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="0.8B")
    parser.add_argument("--quantised", choices=MIXTURES, default="Q8_0")
    parser.add_argument("--contexts", type=listed(int), default=[100, 2000, 8000])
    parser.add_argument("--made", action="store_true", help="contexts are made up")
    parser.add_argument("--flash", choices=["on", "off", "auto"], default="off", help="flash attention of llama.cpp")
    parser.add_argument("--drafters", type=listed(str), default=list(DRAFTERS))
    parser.add_argument("--accept-length", type=float, default=2.51)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--isa", choices=ISAS, default="native", help="that llama.cpp is built for")
    parser.add_argument("--cache", type=Path, default=CACHE, help="of builds of llama.cpp")
    parser.add_argument("--files", type=Path, help="a folder that keeps the files")
    parser.add_argument("--hardware", default=machine(), help="for the result")
    parser.add_argument("--commit", default="", help="the same")
    parser.add_argument("--out", type=Path, help="JSON of the runs, to which these are added")
    parser.add_argument("--result", type=Path, help="in the form of benchmarks/results")
    args = parser.parse_args()
    runs: dict[str, Any] = json.loads(args.out.read_text(encoding="utf8")) if args.out and args.out.exists() else {}
    about = {
        "date": time.strftime("%Y-%m-%d"), "accept_length": args.accept_length,
        "command": f"python benchmarks/hybrid_cpu.py --size {args.size} --quantised {args.quantised} --isa {args.isa} "
        f"--tokens {args.tokens} --rounds {args.rounds} --threads {args.threads} "
        f"--contexts {','.join(map(str, args.contexts))} --drafters {','.join(args.drafters)}"
        + " --made" * args.made + f" --flash {args.flash}" * (args.flash != "off"),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        file = (args.files or Path(folder)) / f"random-{args.size}-{args.quantised}.gguf"
        if not file.exists():
            write_random(file, SIZES[args.size], MIXTURES[args.quantised], 32768)
        engines = {name: make_engine(args, file, name) for name in args.drafters}
        for context in args.contexts:
            found = compare(args, file, context, engines)
            print(context, found, flush=True)
            runs[f"{args.size}, {args.quantised}, {context:,}{' made up' * args.made}"] = {**about, **found}
            write(args, runs)
        for engine in engines.values():
            let_go(engine)


if __name__ == "__main__":
    main()
