"""A tiny target whose text is mostly a fixed permutation of its tokens, a little disturbed by the whole context: a head
can learn most of it in seconds, and knows nothing of it before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from reference.checkpoints import Checkpoint, Maker, llama_target
from reference.exact_heads import cycles, make_codes, still_target
from tiny_checkpoint import VOCAB, write_tokenizer

from draftwing import LLM
from draftwing.train.store import Tokens

PROMPT, ANSWER = 4, 28
ENGINE: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_threads": 1, "max_total_tokens": 2048,
                          "max_running_requests": 16}  # fmt: skip


def write_target(folder: Path, disturbance: float = 0.4, plain: Checkpoint | None = None, **changes: Any) -> Path:
    """plain: of another family, None: a Llama with these changes of the config."""
    sizes = {"vocab_size": VOCAB, "num_hidden_layers": 6, "eos_token_id": 256}
    plain = plain or llama_target(3, **sizes | changes)
    codes = make_codes(VOCAB, 32, 16, 4)
    target = still_target(plain, codes, cycles(VOCAB, list(range(VOCAB)), 5))
    make, tensors = Maker(6), dict(target.tensors)
    for name, value in tensors.items():
        if name.startswith("model.layers.") and ("o_proj" in name or "down_proj" in name):
            tensors[name] = make.matrix(*value.shape, disturbance)
    path = Checkpoint(tensors, target.config).write(folder)
    write_tokenizer(path)
    return path


def prompts(count: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (count, PROMPT), generator=generator).tolist()


def texts(target: Path, count: int, seed: int, temperature: float = 0.0) -> list[Tokens]:
    """On-policy text of the real engine."""
    starts = prompts(count, seed)
    params = {"temperature": temperature, "max_new_tokens": ANSWER, "ignore_eos": True}
    with LLM(str(target), **ENGINE, random_seed=seed) as llm:
        answers = llm.generate(starts, params)
    return [
        Tokens(np.array([*start, *answer.token_ids], np.int32), np.arange(PROMPT + ANSWER) >= PROMPT, str(i))
        for i, (start, answer) in enumerate(zip(starts, answers, strict=True))
    ]


def drafting(algorithm: str, head: Path, depth: int) -> dict[str, Any]:
    return {
        "speculative_algorithm": algorithm, "speculative_draft_model_path": str(head),
        "speculative_num_steps": depth, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": depth + 1,
        "speculative_fixed_shape": True,
    }  # fmt: skip


def accept_length(target: Path, head: Path, algorithm: str, depth: int = 4) -> float:
    """Tokens per verification, of greedy text in the real engine, by chains of `depth` drafts."""
    with LLM(str(target), **ENGINE, **drafting(algorithm, head, depth)) as llm:
        found = llm.generate(prompts(16, 99), {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True})
    metas = [answer.meta_info for answer in found]
    return 1 + sum(m["spec_num_correct_drafts"] for m in metas) / sum(m["spec_verify_ct"] for m in metas)
