"""The first token of a long conversation that the KV pool has evicted: from host memory, from the disk, by its prefill.

    python benchmarks/gpu_kernels/host_level.py [--shapes 8b,27b] [--tokens 100000] [--folder DIR] [--tiny]
        [--out FILE] [option=value ...]

Random weights in the shapes of Llama 3.1 8B and of Qwen3.5-27B in FP8, three delta nets to one attention. Each prompt
is prefilled once, copied and written; then the pool is emptied, and the same prompt comes back from host memory, and,
when that was emptied, too, from the disk: `cold` with its files out of the system's cache, `warm` with them in it.
Answers must be the same. --tiny: small models, on any device.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from hybrid_gpu import config_of
from load_runs import let_go, listed, machine, options_of, sampling
from loading import CONFIG
from restarts import forget_pages

from draftwing.config.options import Options
from draftwing.engine.client_data import ClientData
from draftwing.engine.engine import Engine
from draftwing.engine.saved_prefixes import SavedPrefixes
from draftwing.kv.prefix_index import digest_of
from draftwing.kv.prefix_store import PrefixStore
from draftwing.requests.request import GenerationRequest

ANSWER, PROMPTS = 16, (1, 1000)  # tokens of an answer, and between which those of prompts lie
DISK = 40 << 30  # bytes
HOST = {"8b": 15.0, "27b": 10.0, "tiny": 0.1}  # GB, which 100,000 tokens fit in
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}


def shape_of(name: str, tiny: bool) -> dict[str, Any]:
    """Returns the config of a model."""
    if name == "27b":
        return config_of("tiny" if tiny else "27B")
    more = {**SMALL, "num_hidden_layers": 4, "vocab_size": 1024} if tiny else {"num_hidden_layers": 32}
    return {**CONFIG, **more, "max_position_embeddings": 131072}


class Run(NamedTuple):
    """Seconds until the first token. parts: turns of the engine until then."""

    first_token: float
    cached: int
    parts: int
    tokens: list[int]


def ask(engine: Engine, prompt: list[int]) -> Run:
    began, first, parts = time.perf_counter(), 0.0, 0
    engine.submit(GenerationRequest("one", prompt, sampling(0.0, ANSWER, 1)))
    tokens, meta = list[int](), dict[str, Any]()
    while not engine.idle():
        parts += not first
        for output in engine.step():
            tokens += output.token_ids
            first = first or time.perf_counter() - began
            meta = output.meta or meta
    return Run(first, meta["cached_tokens"], parts, tokens)


def evict(engine: Engine) -> None:
    """Takes all prefixes out of the pool, and out of nothing else."""
    assert engine.parts.sched.flush_cache()
    assert not engine.parts.sched.kv.radix.size


def copy_all(saved: SavedPrefixes) -> None:
    """Copies what waits for it to host memory."""
    assert saved._host is not None
    while saved._host.pending:
        saved.keep_some()


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def measure(shape: str, args: argparse.Namespace, place: Path) -> dict[str, Any]:
    folder = place / shape
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape_of(shape, args.tiny)))
    words = tokenizers.models.WordLevel({str(i): i for i in range(PROMPTS[1])}, unk_token="0")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
    began = time.perf_counter()
    named: dict[str, Any] = {
        "speculative_algorithm": "none", "max_running_requests": 1, "max_total_tokens": args.tokens + 2048,
        "disable_cuda_graph": True, "log_level": "warning",
    }  # fmt: skip
    engine = Engine(Options.from_kwargs(model=str(folder), load_format="dummy", **{**named, **args.options}))
    # Made-up weights have no digest by which another process could know them; here this process reads what it wrote.
    store = PrefixStore(place / "prefixes", digest_of(shape.encode()), DISK)
    saved = SavedPrefixes(store, engine.parts, HOST["tiny" if args.tiny else shape])
    engine._saved, engine._clients = saved, ClientData(engine.parts, engine._checks, None, saved)
    assert saved._host is not None
    started = time.perf_counter() - began
    rng = random.Random(0)
    ask(engine, [rng.randrange(*PROMPTS) for _ in range(min(args.tokens // 4, 2000))])  # compiles
    evict(engine)
    prompt = [rng.randrange(*PROMPTS) for _ in range(args.tokens)]
    runs = {"prefill": ask(engine, prompt)}
    copied = seconds(lambda: copy_all(saved))
    written = seconds(saved.write_all)
    size = saved._host.store.size
    for name in ("host, first", "host, again"):
        evict(engine)
        runs[name] = ask(engine, prompt)
    forget_pages(place)
    for name in ("disk, cold", "disk, warm"):
        copy_all(saved)
        evict(engine)
        saved._host.forget()
        runs[name] = ask(engine, prompt)
    prefill = runs["prefill"]
    print(f"{machine()}; {shape}, {args.tokens} tokens, {size / 1e9:.2f} GB: start {started:.1f} s")
    print(f"the rest of it copied in {copied:.2f} s, written in {written:.1f} s")
    for name, one in runs.items():
        share = f"({one.first_token / prefill.first_token:6.1%})"
        print(f"{name:12} first token {one.first_token:8.3f} s {share}  cached {one.cached:6}  turns {one.parts:5}")
        assert one.tokens == prefill.tokens, "a text differs"
        assert one is prefill or one.cached > 0.9 * args.tokens, "it did not come back"
    saved.clear()
    let_go(engine)
    found = {name: one._replace(tokens=[])._asdict() for name, one in runs.items()}
    return {"start": started, "bytes": size, "copied": copied, "written": written, "runs": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=listed(str), default=["8b", "27b"])
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--folder", help="where models and files are, for so long")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("options", nargs="*", metavar="option=value")
    args = parser.parse_args()
    args.options = options_of(args.options)
    found: dict[str, Any] = {"machine": machine(), "torch": torch.__version__, "tokens": args.tokens}
    with tempfile.TemporaryDirectory(dir=args.folder) as place:
        for shape in args.shapes:
            found[shape] = measure(shape, args, Path(place))
            if args.out is not None:
                args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
