"""llama.cpp and draftwing side by side: the same GGUF file, prompts, threads and client, in turn in one run.

    python benchmarks/llama_cpp.py --out result.json [--rows one,drafts,batch,prompt,start] [--isa native|avx2]

Builds llama.cpp first, from the source package of llama-cpp-python (`llama_cpp_build.py`), for this CPU or with AVX2
alone; draftwing then runs with the same instruction set. Both serve over HTTP, greedy, with the chat template of the
file and without cached prefixes. A round asks every contender the same prompts of MT-bench, no round those of another,
so that nothing can be drafted from an earlier answer. A figure is the median of the rounds, a ratio the median of the
rounds' ratios to llama.cpp without drafts. Linux only: it reads /proc.

one     one request at a time, with and without the EAGLE-3 head that is bundled for the default model
drafts  the same for llama.cpp's ways of drafting: that head in its format, n-grams, and the model as its own draft,
        for there is no smaller one of its vocabulary
batch   16 requests at once
prompt  a prompt of 512 tokens until the first token
start   start of the process to the first token, and memory after a text that fills the context of 1,024 tokens
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

from chat_servers import Contender, Server, draftwing_server, llama_server
from gguf_files import write_eagle3
from llama_cpp_build import CACHE, ISAS, VERSION, build
from load_texts import mt_bench
from turns import kv_bytes_per_token, read_bandwidth

import draftwing
from draftwing.models.hub import resolve_model
from draftwing.text.tokenizer import Tokenizer, load_tokenizer

PROMPTS = Path(__file__).parent / "data" / "mt_bench.jsonl"
HEAD = Path(draftwing.__file__).parent / "heads" / "smollm2" / "eagle3"
WARM_UP = [{"role": "user", "content": "Which animals live in the sea?"}]
BATCH, PROMPT_TOKENS, FULL_CONTEXT = 16, 512, 1024
SLOT = 1024  # context of a request: the longest prompt of MT-bench and its answer
BASE = "llama.cpp"  # what ratios are to

Messages = list[dict[str, str]]


class Setting(NamedTuple):
    """programs: llama.cpp's; file: the GGUF; head: the EAGLE-3 head in llama.cpp's format; serve: options of ours."""

    programs: Path
    model: str
    file: Path
    head: Path
    isa: str
    threads: int
    rounds: int
    prompts: int
    tokens: int
    serve: tuple[str, ...]
    logs: Path

    def llama(self, name: str, context: int, *more: str) -> Contender:
        return llama_server(name, self.programs, self.file, self.threads, context, *more)

    def ours(self, name: str, context: int, *more: str) -> Contender:
        return draftwing_server(name, self.model, self.threads, context, self.isa, *more, *self.serve)


Round = dict[str, float]  # figures of one contender in one round


def questions() -> Iterator[Messages]:
    """First turns of MT-bench, and then again from the first."""
    return ([{"role": "user", "content": turn}] for turn in cycle(mt_bench()))


def long_prompts(tokenizer: Tokenizer) -> Iterator[Messages]:
    """Prompts of exactly PROMPT_TOKENS, made of the words of MT-bench from another word on each time."""
    with PROMPTS.open(encoding="utf8") as lines:
        words = " ".join(chain.from_iterable(json.loads(line)["turns"] for line in lines)).split()
    for start in cycle(range(0, len(words) - PROMPT_TOKENS, 97)):
        for count in range(PROMPT_TOKENS // 2, PROMPT_TOKENS):
            messages = [{"role": "user", "content": " ".join(words[start : start + count])}]
            length = len(tokenizer.encode_chat(messages))
            if length >= PROMPT_TOKENS:
                break
        if length == PROMPT_TOKENS:
            yield messages


def fair_order(
    setting: Setting, contenders: Sequence[Contender], work: Callable[[Server, list[Messages]], Round],
    prompts: Iterator[Messages], each: int,
) -> dict[str, list[Round]]:  # fmt: skip
    """The rounds of each contender. All servers run all the time; who waits does nothing."""
    rounds: dict[str, list[Round]] = {contender.name: [] for contender in contenders}
    with ExitStack() as stack:
        servers = [stack.enter_context(Server(c, setting.logs / f"{c.name}.log")) for c in contenders]
        for server in servers:
            server.first_answer(WARM_UP)
            work(server, [WARM_UP] * each)
        for number in range(setting.rounds):
            asked = list(islice(prompts, each))
            for place in range(len(servers)):
                server = servers[(place + number) % len(servers)]  # nobody always runs after the same one
                rounds[server.contender.name].append(work(server, asked))
    return rounds


def one_by_one(tokens: int) -> Callable[[Server, list[Messages]], Round]:
    def work(server: Server, prompts: list[Messages]) -> Round:
        answers = [server.ask(prompt, tokens) for prompt in prompts]
        made = sum(answer.tokens for answer in answers)
        writing = sum(answer.total - answer.first for answer in answers)
        return {
            "tokens_per_s": made / sum(answer.total for answer in answers),
            "decode_tokens_per_s": (made - len(answers)) / writing,  # without the prompt and the first token
            "prompt_tokens": sum(answer.prompt_tokens for answer in answers),
        }

    return work


def at_once(tokens: int) -> Callable[[Server, list[Messages]], Round]:
    def work(server: Server, prompts: list[Messages]) -> Round:
        seconds, answers = server.ask_all(prompts, tokens)
        return {
            "tokens_per_s": sum(answer.tokens for answer in answers) / seconds,
            "prompt_tokens": sum(answer.prompt_tokens for answer in answers),
        }

    return work


def first_token(server: Server, prompts: list[Messages]) -> Round:
    (prompt,) = prompts
    answer = server.ask(prompt, 1)
    return {
        "prompt_tokens_per_s": answer.prompt_tokens / answer.total,
        "first_token_s": answer.total,
        "prompt_tokens": answer.prompt_tokens,
    }


def alone(setting: Setting, context: int) -> list[Contender]:
    """Servers of one request at a time."""
    return [
        setting.llama(BASE, context, "-np", "1"),
        setting.ours("draftwing none", context, "--speculative-algorithm", "none"),
        setting.ours("draftwing", context),
    ]


def one(setting: Setting) -> dict[str, list[Round]]:
    return fair_order(setting, alone(setting, SLOT), one_by_one(setting.tokens), questions(), setting.prompts)


def drafts(setting: Setting) -> dict[str, list[Round]]:
    def llama(kind: str, *more: str) -> Contender:
        return setting.llama(f"{BASE} {kind}", SLOT, "-np", "1", "--spec-type", kind, *more)

    contenders = [
        setting.llama(BASE, SLOT, "-np", "1"),
        llama("draft-eagle3", "-md", str(setting.head)),
        llama("draft-simple", "-md", str(setting.file)),
        *map(llama, ("ngram-cache", "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod")),
        setting.ours("draftwing", SLOT),
        setting.ours("draftwing NGRAM", SLOT, "--speculative-algorithm", "NGRAM"),
    ]
    return fair_order(setting, contenders, one_by_one(setting.tokens), questions(), setting.prompts)


def batch(setting: Setting) -> dict[str, list[Round]]:
    context, running = BATCH * SLOT, ("--max-running-requests", str(BATCH))
    contenders = [
        setting.llama(BASE, context, "-np", str(BATCH)),
        setting.ours("draftwing none", context, "--speculative-algorithm", "none", *running),
        setting.ours("draftwing", context, *running),
    ]
    return fair_order(setting, contenders, at_once(setting.tokens), questions(), BATCH)


def prompt(setting: Setting) -> dict[str, list[Round]]:
    return fair_order(setting, alone(setting, SLOT), first_token, long_prompts(load_tokenizer(setting.file)), 1)


def start(setting: Setting) -> dict[str, list[Round]]:
    """Every round starts every server anew."""
    contenders = alone(setting, FULL_CONTEXT)
    text = next(long_prompts(load_tokenizer(setting.file)))
    kv_bytes = FULL_CONTEXT * kv_bytes_per_token(setting.file)
    rounds: dict[str, list[Round]] = {contender.name: [] for contender in contenders}
    for _ in range(setting.rounds):
        for contender in contenders:
            with Server(contender, setting.logs / f"{contender.name}.log") as server:
                seconds = server.first_answer(WARM_UP)
                server.ask(text, FULL_CONTEXT - PROMPT_TOKENS - 64)
                rounds[contender.name].append({"start_s": seconds, **memory(server, kv_bytes)})
    return rounds


def memory(server: Server, kv_bytes: int) -> dict[str, float]:
    """Megabytes (10^6 bytes) of a server with its KV full, as a whole, without the KV, and by process.

    "engine" is the process that has the model: the last one, which in llama.cpp is the only one.
    """
    processes = server.memory()
    parts = {"server": processes[0], "engine": processes[-1]}
    by_process = {f"{part}_{key.lower()}_mb": used[key] / 1e6 for part, used in parts.items() for key in used}
    total = sum(used["Pss"] for used in processes)
    return {
        "pss_mb": total / 1e6,
        "engine_pss_without_kv_mb": (processes[-1]["Pss"] - kv_bytes) / 1e6,
        "kv_mb": kv_bytes / 1e6,
        **by_process,
    }


ROWS = {"one": one, "drafts": drafts, "batch": batch, "prompt": prompt, "start": start}
HEADLINES = {  # the figure of a row that ratios are made of
    "one": "tokens_per_s", "drafts": "tokens_per_s", "batch": "tokens_per_s", "prompt": "prompt_tokens_per_s",
    "start": "start_s",
}  # fmt: skip
REQUESTS = {"one": 1, "drafts": 1, "batch": BATCH}  # that a read of the weights serves, in rows with a floor


def summary(row: str, rounds: dict[str, list[Round]], floor_s: float) -> dict[str, dict[str, Any]]:
    """By contender: medians, ratios to BASE, and how near it comes to the floor, `floor_s` for a read of the weights.

    floor_share: 1 where a step without drafts takes as long as reading the weights once. Drafts may bring more.
    """
    key, found = HEADLINES[row], {}
    for name, own in rounds.items():
        figures: dict[str, Any] = {field: statistics.median(r[field] for r in own) for field in own[0]}
        ratios = [mine[key] / base[key] for mine, base in zip(own, rounds[BASE], strict=True)]
        figures |= {"ratio": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)}
        if row in REQUESTS:
            rate = figures.get("decode_tokens_per_s", figures["tokens_per_s"])
            figures["floor_share"] = rate * floor_s / REQUESTS[row]
        found[name] = {**figures, "rounds": own}
    return found


def table(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Rows of Markdown, one for each contender."""
    lines = [
        "| row | contender | figure | ratio to llama.cpp | least to most | of the floor |",
        "|---|---|---|---|---|---|",
    ]
    for row, contenders in results.items():
        for name, figures in contenders.items():
            value = f"{HEADLINES[row].replace('_per_s', '/s').replace('_', ' ')} {figures[HEADLINES[row]]:.4g}"
            if "pss_mb" in figures:
                value += f", PSS {figures['pss_mb']:.0f} MB, engine less KV {figures['engine_pss_without_kv_mb']:.0f}"
            share = f"{figures['floor_share']:.2f}" if "floor_share" in figures else ""
            span = f"{figures['ratio_min']:.2f} to {figures['ratio_max']:.2f}"
            lines.append(f"| {row} | {name} | {value} | {figures['ratio']:.2f}x | {span} | {share} |")
    return "\n".join(lines)


def make_setting(args: argparse.Namespace, logs: Path) -> Setting:
    programs, file = build(args.isa, args.build), resolve_model(args.model)
    head = args.build / f"{HEAD.name}.gguf"
    if not head.exists():
        write_eagle3(HEAD, file, head)
    return Setting(
        programs, args.model, file, head, args.isa, args.threads, args.rounds, args.prompts, args.tokens,
        tuple(args.serve.split()), logs,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="of a GGUF file; `drafts` needs the default one")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--isa", default="native", choices=ISAS)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=4, help="of a round with one request at a time")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--serve", default="", help="more options of draftwing, as one string")
    parser.add_argument("--build", type=Path, default=CACHE, help="folder for llama.cpp and its files")
    parser.add_argument("--out", type=Path, help="write the JSON to a file")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, so that the servers are ended
    setting = make_setting(args, Path(tempfile.mkdtemp(prefix="logs-")))  # which stay, for errors name them
    weights = setting.file.stat().st_size
    bandwidth = read_bandwidth(weights, args.threads)
    results = {}
    for row in args.rows.split(","):
        results[row] = summary(row, ROWS[row](setting), weights / bandwidth)
        print(table({row: results[row]}), flush=True)
    record = {
        "machine": f"{platform.processor() or platform.machine()}, {args.threads} threads",
        "date": time.strftime("%Y-%m-%d"), "llama_cpp_python": VERSION, "isa": args.isa, "model": args.model,
        "serve": args.serve, "load": os.getloadavg(), "weights_bytes": weights, "read_bytes_per_s": bandwidth,
        "floor_ms": 1e3 * weights / bandwidth, "rows": results,
    }  # fmt: skip
    print(f"floor: {record['floor_ms']:.2f} ms to read {weights / 1e6:.1f} MB at {bandwidth / 1e9:.1f} GB/s")
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
