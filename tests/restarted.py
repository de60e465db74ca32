"""Engines that are closed and opened again, with a folder that keeps what they have cached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hybrid_models import layer_weights, mamba2, reference, saved, with_layer
from reference.checkpoints import llama_target
from tiny_checkpoint import VOCAB, write_tokenizer

from draftwing import SamplingParams
from draftwing.config.options import Options
from draftwing.engine.engine import Engine
from draftwing.requests.request import GenerationRequest

TOKENS = 24
OF = llama_target(
    3, vocab_size=VOCAB, num_hidden_layers=4, eos_token_id=256, max_position_embeddings=1024, intermediate_size=64
)  # whose matrices are in whole blocks: a step is a call of C, and takes a quarter of one in float32


class Reply(NamedTuple):
    tokens: list[int]
    cached: int  # tokens of the prompt
    steps: int = 0  # with drafts


def opened(model: Path, folder: Path | None = None, **more: Any) -> Engine:
    named = {} if folder is None else {"prefix_cache_dir": str(folder)}
    known: dict[str, Any] = {
        "device": "cpu", "num_threads": 1, "random_seed": 3, "max_total_tokens": 2048, "max_running_requests": 4,
        "speculative_algorithm": "none", "chunked_prefill_size": 128, "kv_cache_dtype": "float32",
    }  # fmt: skip
    return Engine(Options(model=str(model), **{**known, **named, **more}))


def ask(engine: Engine, prompt: Sequence[int], temperature: float = 0.8, **fields: Any) -> Reply:
    params = SamplingParams(max_new_tokens=TOKENS, temperature=temperature, sampling_seed=5, ignore_eos=True)
    engine.submit(GenerationRequest("one", list(prompt), params, **fields))
    tokens, meta = list[int](), dict[str, Any]()
    while not engine.idle():
        for output in engine.step():
            tokens += output.token_ids
            meta = output.meta or meta
            assert output.finish_reason is None or output.finish_reason["type"] == "length", output.finish_reason
    engine.parts.sched.check_integrity()
    return Reply(tokens, meta["cached_tokens"], meta.get("spec_verify_ct", 0))


def run(engine: Engine, asked: Mapping[Any, list[int]], count: int = TOKENS, after: int = 0) -> dict[str, list[int]]:
    """The answers by uid, each of so many tokens. after: steps behind each request, before the next one comes."""
    found: dict[str, list[int]] = {str(uid): [] for uid in asked}
    params = SamplingParams(max_new_tokens=count, temperature=0.8, sampling_seed=5, ignore_eos=True)

    def step() -> None:
        for output in engine.step():
            found[output.uid].extend(output.token_ids)
        engine.parts.sched.check_integrity()

    for uid, prompt in asked.items():
        engine.submit(GenerationRequest(str(uid), prompt, params))
        for _ in range(after):
            step()
    while not engine.idle():
        step()
    return found


def once(model: Path, folder: Path | None, prompt: Sequence[int], fields: Any = None, **more: Any) -> Reply:
    """The answer of an engine that is started for it, and closed."""
    engine = opened(model, folder, **more)
    try:
        return ask(engine, prompt, **(fields or {}))
    finally:
        engine.close()


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def write_hybrid(folder: Path, kind: str) -> Path:
    """Writes a model with recurrent layers, Qwen3.5 with its prediction layer."""
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": 1024}
    theirs = mamba2(VOCAB) if kind == "mamba2" else reference(kind, **sizes)
    if kind == "qwen3.5":
        with_layer(folder, theirs, layer_weights(theirs))
    else:
        saved(folder, theirs)
    write_tokenizer(folder)
    return folder
