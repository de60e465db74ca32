"""Decoding and prompts by length of context on a CPU: without drafts, with them, llama.cpp, and the memory floor.

    python benchmarks/cpu_contexts.py --isa avx512 --out runs.json --result result.json --plot contexts.svg

Everyone has the same GGUF file, prompts and threads, greedy, one request; llama.cpp runs once with flash attention and
once without. Engines measure themselves: ours in this process, llama.cpp's server by the timings that it returns. A
round asks all of them another question behind the same text, in turn; the text is computed once and cached, in the
order of contexts, which gives the speed of prompts. Figures are medians of rounds, ratios medians of the rounds'.

The floor is the time to read the weights and the KV cache of a step at the speed that plain reads by all threads reach
beside it. `--out` keeps the contexts that it has of earlier runs, and `--result` and `--plot` are of all of them;
`--redraw RESULT --plot FILE` draws what stands in a result. `--model Qwen3-0.6B` is a file of that shape with random
weights. `llama_cpp_build.py` says what a build needs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from chat_servers import Contender, Server, run_with
from gguf import GGUFWriter
from gguf_files import MIXTURES, add_random, add_sizes, add_tokens, finish
from llama_cpp_build import CACHE, ISAS, VERSION, build
from load_runs import let_go, listed, machine
from load_texts import questions
from svg_plot import Line, Panel, render
from turns import Answer, Ask, ask_engine, cpu_engine, in_turn, kv_bytes_per_token, median_ratio, read_bandwidth

from draftwing.engine.startup.measure_costs import delays, since
from draftwing.models.hub import resolve_model
from draftwing.text.tokenizer import load_tokenizer

LLAMAS = {"llama.cpp": "off", "llama.cpp, flash attention": "on"}
DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {"speculative_algorithm": "none"}, "default": {}, "NGRAM": {"speculative_algorithm": "NGRAM"},
}  # fmt: skip
TITLES = {"avx512": "AVX-512", "avx2": "AVX2"}
SPARE = 1024  # tokens of a context beyond the longest prompt and its answer, in which old answers may stay cached


class Shape(NamedTuple):
    """Of a model with random weights."""

    arch: str
    vocab: int
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: float


SHAPES = {"Qwen3-0.6B": Shape("qwen3", 151_936, 28, 1024, 3072, 16, 8, 128, 1e6)}


def write_random(path: Path, shape: Shape, longest: int, mixture: tuple[str, str]) -> None:
    """A file with random weights, whose embedding is the head as well. mixture: of `MIXTURES`."""
    rng, (kind, head_kind) = np.random.default_rng(0), mixture
    writer = GGUFWriter(path, shape.arch)
    add_sizes(writer, shape, shape.layers, longest, shape.head_dim, shape.rope)
    add_tokens(writer, "qwen2", shape.vocab)
    add_random(writer, "token_embd", (shape.vocab, shape.hidden), head_kind, rng)
    queries, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {
        "attn_q": (queries, shape.hidden), "attn_k": (kv, shape.hidden), "attn_v": (kv, shape.hidden),
        "attn_output": (shape.hidden, queries), "ffn_gate": (shape.ffn, shape.hidden),
        "ffn_up": (shape.ffn, shape.hidden), "ffn_down": (shape.hidden, shape.ffn),
    }  # fmt: skip
    norms = {"attn_norm": shape.hidden, "ffn_norm": shape.hidden, "attn_q_norm": shape.head_dim}
    norms["attn_k_norm"] = shape.head_dim
    writer.add_tensor("output_norm.weight", np.ones(shape.hidden, np.float32))
    for block in range(shape.layers):
        for name, size in sizes.items():
            add_random(writer, f"blk.{block}.{name}", size, kind, rng)
        for name, width in norms.items():
            writer.add_tensor(f"blk.{block}.{name}.weight", np.ones(width, np.float32))
    finish(writer)


# ---- prompts ---------------------------------------------------------------------------------------------------------


class Prompts:
    """Prompts of exactly the length that is asked for: the beginning of one long text, and a question behind it."""

    def __init__(self, file: Path, longest: int, vocab: int = 0) -> None:
        """vocab: of a model that has no text, whose tokens are random."""
        rng = random.Random(0)
        if vocab:
            self._text = [rng.randrange(3, vocab) for _ in range(longest)]
            self._ends = [[rng.randrange(3, vocab) for _ in range(48)] for _ in range(64)]
            return
        tokenizer, order = load_tokenizer(file), rng.sample(questions(), len(questions()))
        self._text = tokenizer.encode("\n\n".join(order))[:longest]
        asked = (tokenizer.encode_chat([{"role": "user", "content": text}]) for text in order)
        self._ends = [end for end in asked if len(end) < 80][:64]
        assert len(self._text) == longest, f"there are only {len(self._text)} tokens of text"

    def ending(self, length: int, number: int) -> list[int]:
        end = self._ends[number % len(self._ends)]
        return [*self._text[: length - len(end)], *end]


# ---- who takes part --------------------------------------------------------------------------------------------------


def ask_llama(server: Server, prompt: list[int], tokens: int) -> Answer:
    body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": True}
    timings = server.post("/completion", body)["timings"]
    decode = 1e3 * (timings["predicted_n"] - 1) / timings["predicted_ms"] if tokens > 1 else 0.0
    return Answer(decode, timings["prompt_ms"] / 1e3, timings["prompt_n"])  # its clock starts at the first token


@contextmanager
def running(args: Any, file: Path, logs: Path) -> Iterator[dict[str, Ask]]:
    """All who are asked, started and warm."""
    asks: dict[str, Ask] = {}
    size = max(args.contexts) + args.tokens + SPARE
    with ExitStack() as stack:
        for name in args.drafters:
            # By its name: a bundled head, which the default drafts with, is not found by a file's.
            engine = cpu_engine(
                str(file) if args.model in SHAPES else args.model, args.threads, 2 * size, **DRAFTERS[name]
            )
            stack.callback(let_go, engine)
            asks[name] = partial(ask_engine, engine)
        for name, flash in LLAMAS.items():
            if flash not in args.flash_attention:
                continue
            command = [build(args.isa, args.cache) / "llama-server", "-m", file, "-fa", flash, "-np", 1, "-c", size]
            command += ["-t", args.threads, "-tb", args.threads, "--cache-ram", 0, "--no-warmup"]
            contender = Contender(name, tuple(map(str, command)))
            server = stack.enter_context(Server(contender, logs / f"flash-{flash}.log"))
            asks[name] = partial(ask_llama, server)
            server.ready(partial(asks[name], [3, 4, 5], 1))
        yield asks


# ---- a context -------------------------------------------------------------------------------------------------------


def measure(
    args: Any, asks: dict[str, Ask], prompts: Prompts, context: int, bytes_read: float
) -> tuple[dict[str, Answer], dict[str, Any]]:
    """What the text up to there took of each, and the figures of rounds. waited: share of their time in which a thread
    of this process waited for a processor: others ran, too."""
    filled = {name: ask(prompts.ending(context, 0), 8) for name, ask in asks.items()}
    asked = [prompts.ending(context, number) for number in range(1, args.rounds + 1)]
    before, started = delays(), time.perf_counter()
    read = read_bandwidth(int(bytes_read), args.threads)
    rounds = in_turn(asks, asked, args.tokens)
    read = max(read, read_bandwidth(int(bytes_read), args.threads))
    waited = max(since(before)) / (time.perf_counter() - started)
    rates = {name: [answer.decode for answer in answers] for name, answers in rounds.items()}
    middle = {name: statistics.median(own) for name, own in rates.items()}
    better = max(set(LLAMAS) & set(asks), key=lambda name: middle[name])
    floor = bytes_read / read
    return filled, {
        "decode": middle,
        "ratio": {name: median_ratio(own, rates[better]) for name, own in rates.items()},
        "floor_ms": 1e3 * floor,
        "floor_share": {name: floor * rate for name, rate in middle.items()},
        "read_bytes_per_s": read,
        "accept_length": {name: statistics.mean(a.accept_length for a in own) for name, own in rounds.items()},
        "waited": waited,
        "rounds": rates,
    }


def measure_all(args: Any, file: Path, prompts: Prompts, asks: dict[str, Ask]) -> Iterator[tuple[int, dict[str, Any]]]:
    weights, kv = file.stat().st_size, kv_bytes_per_token(file)
    seconds, computed = dict.fromkeys(asks, 0.0), dict.fromkeys(asks, 0)
    for ask in asks.values():  # what is made once, and what drafts learn of themselves
        ask(prompts.ending(100, 63), args.tokens)
    for context in sorted(args.contexts):
        filled, found = measure(args, asks, prompts, context, weights + kv * (context + args.tokens / 2))
        for name, answer in filled.items():
            seconds[name] += answer.first
            computed[name] += answer.computed
        yield context, {**found, "prompt": {name: computed[name] / seconds[name] for name in asks}}


# ---- the report ------------------------------------------------------------------------------------------------------


def row(isa: str, context: int, found: dict[str, Any]) -> list[Any]:
    decode, prompt = found["decode"], found["prompt"]
    shown = [whole(decode.get(name)) for name in (*DRAFTERS, *LLAMAS)]
    prompts = [whole(prompt["none"]), whole(max(prompt[name] for name in LLAMAS if name in prompt))]
    share = f"{100 * found['floor_share']['none']:.0f}%"
    return [
        f"{TITLES.get(isa, isa)}, {context:,}",
        *shown,
        f"{found['ratio']['none']:.1f}x",
        share,
        *prompts,
    ]


def whole(rate: float | None) -> Any:
    return None if rate is None else round(rate) if rate >= 10 else round(rate, 1)


COLUMNS = [
    "instruction set, tokens of context", "no speculation", "default", "NGRAM", "llama.cpp",
    "llama.cpp, flash attention", "no speculation vs. the better of llama.cpp", "of the memory floor",
    "prompt of that length", "the same, the better of llama.cpp",
]  # fmt: skip


def result(record: dict[str, Any]) -> dict[str, Any]:
    """For benchmarks/results."""
    reads = [found["read_bytes_per_s"] for _, _, found in contexts_of(record)]
    return {
        "date": record["date"],
        "commit": record["commit"],
        "hardware": f"{record['hardware']}, {min(reads) / 1e9:.0f} to {max(reads) / 1e9:.0f} GB/s of plain reads",
        "software": [record["machine"].split(", ")[-1], f"llama.cpp of llama-cpp-python {VERSION}"],
        "model": record["model"],
        "workload": f"1 request, greedy, {record['tokens']} tokens behind a context that is cached; tokens/s, medians "
        f"of {record['rounds']} rounds; the floor is the time to read the weights and the KV cache of a step",
        "commands": record["commands"],
        "columns": COLUMNS,
        "rows": [row(*one) for one in contexts_of(record)],
    }


def contexts_of(record: dict[str, Any]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """(instruction set, context, figures), in order."""
    for isa, contexts in record["isas"].items():
        for context in sorted(contexts, key=int):
            yield isa, int(context), contexts[context]


def plot(rows: Sequence[Sequence[Any]]) -> str:
    """Tokens per second by context, whose axis doubles. rows: of a result, lines of each instruction set in order."""
    places = [str(first).split(", ") for first, *_ in rows]
    lengths = sorted({int(context.replace(",", "")) for _, context in places})

    def at(context: str) -> float:
        return math.log2(int(context.replace(",", "")) / lengths[0]) + 0.1

    def line(label: str, isa: str, column: int) -> Line:
        known = [(at(context), one[column]) for (name, context), one in zip(places, rows, strict=True) if name == isa]
        return Line(label, [(x, rate) for x, rate in known if rate is not None])

    panels = []
    for isa in dict.fromkeys(name for name, _ in places):
        decode = [line(COLUMNS[column], isa, column) for column in range(1, 6)]
        prompts = [line(COLUMNS[1], isa, 8), line("llama.cpp, the better", isa, 9)]
        for title, lines in (("decoding", decode), ("prompt of that length", prompts)):
            highest = max(rate for line in lines for _, rate in line.points)
            panels.append(Panel(f"{title}, tokens/s, {isa}", lines, ticks(highest)))
    marks = [(at(str(context)), f"{context:,}") for context in lengths]
    return render(panels, at(str(lengths[-1])), marks, "tokens of context")


def ticks(highest: float) -> list[tuple[float, str]]:
    """Up to ten round numbers, the last one not below `highest`."""
    step = 10 ** math.floor(math.log10(highest))
    return [(tick * step, f"{tick * step:,}") for tick in range(math.ceil(highest / step) + 1)]


def kept(args: Any) -> dict[str, Any]:
    """What earlier runs wrote to `--out`, if it is of the same work."""
    about = {
        "model": args.model, "quantised": args.quantised, "drafters": list(args.drafters), "tokens": args.tokens,
        "rounds": args.rounds, "threads": args.threads, "commit": args.commit, "hardware": args.hardware,
    }  # fmt: skip
    if args.out is not None and args.out.exists():
        record: dict[str, Any] = json.loads(args.out.read_text(encoding="utf8"))
        if about.items() <= record.items():
            return record
    return {**about, "isas": {}, "commands": []}


def main() -> None:
    args = parsed()
    if args.redraw is not None:
        args.plot.write_text(plot(json.loads(args.redraw.read_text(encoding="utf8"))["rows"]), encoding="utf8")
        return
    run_with(args.isa)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, so that the servers are ended
    record, shape = kept(args), SHAPES.get(args.model)
    record |= {"date": time.strftime("%Y-%m-%d"), "machine": machine()}
    contexts = ",".join(map(str, args.contexts))
    command = f"python benchmarks/cpu_contexts.py --model {args.model} --isa {args.isa} --contexts {contexts}"
    command += f" --tokens {args.tokens} --rounds {args.rounds} --threads {args.threads}"
    record["commands"] = sorted({*record["commands"], command})
    longest = max(args.contexts)
    with tempfile.TemporaryDirectory() as folder:
        file = resolve_model(args.model) if shape is None else Path(folder) / f"{args.model}.gguf"
        if shape is not None:
            write_random(file, shape, longest + args.tokens + SPARE, MIXTURES[args.quantised])
        prompts = Prompts(file, longest, 0 if shape is None else shape.vocab)
        with running(args, file, Path(tempfile.mkdtemp(prefix="logs-"))) as asks:
            for context, found in measure_all(args, file, prompts, asks):
                record["isas"].setdefault(args.isa, {})[str(context)] = found
                print(*row(args.isa, context, found), f"waited {found['waited']:.0%}", flush=True)
                print(found["accept_length"], flush=True)
                write(args, record)


def write(args: Any, record: dict[str, Any]) -> None:
    found = result(record)
    for path, text in (
        (args.out, json.dumps(record, indent=1)),
        (args.result, json.dumps(found, indent=1)),
        (args.plot, plot(found["rows"])),
    ):
        if path is not None:
            path.write_text(text.rstrip() + "\n", encoding="utf8")


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help=f"of a GGUF file, or the shape of one: {', '.join(SHAPES)}")
    parser.add_argument("--quantised", choices=MIXTURES, default="Q8_0", help="of random weights")
    parser.add_argument("--contexts", type=listed(int), default=[100, 500, 1000, 2000, 4000, 8000])
    parser.add_argument("--drafters", type=listed(str), default=list(DRAFTERS))
    parser.add_argument("--flash-attention", type=listed(str), default=list(LLAMAS.values()), help="llama.cpp's")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--isa", choices=ISAS, default="avx512")
    parser.add_argument("--cache", type=Path, default=CACHE, help="of builds of llama.cpp")
    parser.add_argument("--hardware", default="CPU", help="for the result")
    parser.add_argument("--commit", default="", help="the same")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--result", type=Path, help="in the form of benchmarks/results")
    parser.add_argument("--plot", type=Path, help="an SVG")
    parser.add_argument("--redraw", type=Path, metavar="RESULT", help="measure nothing: --plot is of this --result")
    args = parser.parse_args(argv)
    if args.redraw is not None and args.plot is None:
        parser.error("--redraw needs --plot: the file to draw")
    return args


if __name__ == "__main__":
    main()
