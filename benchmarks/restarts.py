"""The first token of a long conversation after a restart, beside its prefill.

    python benchmarks/restarts.py [--shape smollm2|hybrid] [--tokens 30000] [--out FILE] [option=value ...]

The model has random weights and a published shape: SmolLM2's 135M, or layers of Qwen3.5-0.8B, three delta nets to one
attention. An engine prefills a prompt, answers and is closed; the next one gets the same prompt. `cold` is with the
files out of the system's cache, `warm` with them in it. Answers must be the same.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import torch
from load_runs import let_go, machine, options_of, sampling
from transformers import AutoConfig, AutoModelForCausalLM

from draftwing.config.options import Options
from draftwing.engine.engine import Engine
from draftwing.requests.request import GenerationRequest

VOCAB, CONTEXT, ANSWER = 1024, 65536, 16
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2": {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "rms_norm_eps": 1e-5,
    },
    "hybrid": {
        "model_type": "qwen3_5_text", "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
        "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    },
}  # fmt: skip


class Run(NamedTuple):
    """Seconds: of the start, of the first token, and of the end, which writes what is new."""

    start: float
    first_token: float
    end: float
    cached: int
    tokens: list[int]


def write_model(folder: Path, shape: str) -> None:
    settings = dict(SHAPES[shape])
    config = AutoConfig.for_model(
        settings.pop("model_type"), **settings, vocab_size=VOCAB, max_position_embeddings=CONTEXT, eos_token_id=0,
        bos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    words = tokenizers.models.WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))


def run(model: Path, folder: Path, prompt: list[int], more: dict[str, Any]) -> Run:
    began = time.perf_counter()
    named = {"max_total_tokens": len(prompt) + 2048, "speculative_algorithm": "none", "max_running_requests": 1}
    engine = Engine(Options(**{"model": str(model), "prefix_cache_dir": str(folder), **named, **more}))
    started = time.perf_counter()
    engine.submit(GenerationRequest("one", prompt, sampling(0.0, ANSWER, 1)))
    first, tokens, meta = 0.0, list[int](), dict[str, Any]()
    while not engine.idle():
        for output in engine.step():
            tokens += output.token_ids
            first = first or time.perf_counter()
            meta = output.meta or meta
    ends = time.perf_counter()
    let_go(engine)
    return Run(started - began, first - started, time.perf_counter() - ends, meta["cached_tokens"], tokens)


def forget_pages(folder: Path) -> None:
    """Takes files out of the system's cache."""
    os.sync()
    for path in folder.rglob("*.kv"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2")
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--out", type=Path)
    parser.add_argument("options", nargs="*", metavar="option=value")
    args = parser.parse_args()
    rng, more = random.Random(0), options_of(args.options)
    prompt = [rng.randrange(1, VOCAB) for _ in range(args.tokens)]
    with tempfile.TemporaryDirectory() as place:
        model, folder = Path(place) / "model", Path(place) / "prefixes"
        write_model(model, args.shape)
        prefill = run(model, folder, prompt, more)
        size = sum(path.stat().st_size for path in folder.rglob("*.kv"))
        forget_pages(folder)
        cold = run(model, folder, prompt, more)
        warm = run(model, folder, prompt, more)
    assert prefill.tokens == cold.tokens == warm.tokens, "a text differs"
    assert not prefill.cached and cold.cached == warm.cached > 0.9 * args.tokens
    print(f"{machine()}; {args.shape}, {args.tokens} tokens, {size / 1e6:.0f} MB on the disk")
    for name, one in (("prefill", prefill), ("cold", cold), ("warm", warm)):
        share = one.first_token / prefill.first_token
        print(
            f"{name:8} first token {one.first_token:8.3f} s ({share:6.1%})  cached {one.cached:6}  "
            f"start {one.start:5.2f} s  end {one.end:5.2f} s"
        )
    if args.out is not None:
        runs = {"prefill": prefill, "cold": cold, "warm": warm}
        found = {name: one._replace(tokens=[])._asdict() for name, one in runs.items()}
        args.out.write_text(json.dumps({"machine": machine(), "shape": args.shape, "bytes": size, "runs": found}))


if __name__ == "__main__":
    main()
