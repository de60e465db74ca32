"""Requests with pictures on a GPU, many at once: the text is the same with drafts as that of each alone without."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from image_models import TEXT, encoded, picture, with_prediction_layer, write_model
from reference.checkpoints import Checkpoint, eagle3_head

from draftwing import LLM, SamplingParams

pytestmark = pytest.mark.slow

SIZES = (40, 30), (30, 40), (64, 16), (8, 8), (56, 72), (96, 64)
TOKENS = 32
ALONE: dict[str, Any] = {
    "speculative_algorithm": "none", "max_running_requests": 1, "disable_radix_cache": True, "disable_cuda_graph": True,
}  # fmt: skip


def conversations(count: int) -> list[list[dict[str, Any]]]:
    """One to three pictures in each, some of them the same as in another, before, behind and between words."""
    found = []
    for i in range(count):
        shown = [(*SIZES[(i + j) % len(SIZES)], (i + j) % 11) for j in range(1 + i % 3)]
        images = [{"type": "image", "image": encoded(picture(*one), "PNG")} for one in shown]
        words = [{"type": "text", "text": "abc" * (1 + (i + j) % 5)} for j in range(2)]
        parts = [*images, *words] if i % 2 else [words[0], *images, words[1]]
        found.append([{"role": "user", "content": parts}])
    return found


def texts(folder: Path, count: int, **options: Any) -> tuple[list[list[int]], float]:
    """Greedy and drawn ones, and tokens a step."""
    params = [
        SamplingParams(temperature=i % 2 * 0.8, sampling_seed=i, max_new_tokens=TOKENS, ignore_eos=True)
        for i in range(count)
    ]
    with LLM(str(folder), max_total_tokens=8192, chunked_prefill_size=64, **options) as llm:
        done = llm.chat(conversations(count), params)
    steps = sum(one.meta_info["spec_verify_ct"] for one in done) if options["speculative_algorithm"] != "none" else 1
    return [one.token_ids for one in done], count * TOKENS / max(steps, 1)


def check(folder: Path, kind: str, count: int, algorithms: Sequence[str], **device: Any) -> None:
    model = write_model(folder / "model", kind)
    if kind.startswith("qwen3.5"):
        with_prediction_layer(model, kind)
    sizes = {"hidden_size": 64, "vocab_size": TEXT["vocab_size"], "head_dim": 64, "max_position_embeddings": 1024}
    target = Checkpoint({}, {"hidden_size": 64, "vocab_size": TEXT["vocab_size"], "num_hidden_layers": 4})
    head = eagle3_head(target, rows=None, num_attention_heads=4, num_key_value_heads=2, **sizes).write(folder / "head")
    expected, _ = texts(model, count, **ALONE, **device)
    assert len({token for ids in expected for token in ids}) > 12, "answers say nothing"
    rates = []
    for algorithm in algorithms:
        own: dict[str, Any] = {"speculative_draft_model_path": str(head)} if algorithm == "EAGLE3" else {}
        for fixed in (False, True):
            found, rate = texts(
                model, count, speculative_algorithm=algorithm, speculative_fixed_shape=fixed, **own, **device
            )
            rates.append(rate)
            differ = [i for i in range(count) if found[i] != expected[i]]
            assert not differ, f"{algorithm}: {count - len(differ)} of {count} texts are alike"
    assert max(rates) > 1.05, "no draft is accepted"


CASES = [
    ("qwen3.5 on a gpu", ["NEXTN", "EAGLE3", "NGRAM"]),
    ("qwen3-vl on a gpu", ["NGRAM"]),
    ("gemma4 on a gpu", ["EAGLE3", "NGRAM"]),
    ("gemma4-mutual on a gpu", ["EAGLE3", "NGRAM"]),
    ("gemma3 on a gpu", ["EAGLE3", "NGRAM"]),
]


@pytest.mark.exhaustive  # tests/engine/test_images.py and test_random_images.py have it
@pytest.mark.parametrize(("kind", "algorithms"), CASES)
def test_on_a_cpu(tmp_path: Path, kind: str, algorithms: list[str]) -> None:
    check(tmp_path, kind, 8, algorithms, device="cpu", num_threads=1, dtype="float32")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("kind", "algorithms"), CASES)
def test_drafts_change_no_text(tmp_path: Path, kind: str, algorithms: list[str]) -> None:
    check(tmp_path, kind, 80, algorithms, device="cuda", dtype="bfloat16", enable_deterministic_inference=True)
