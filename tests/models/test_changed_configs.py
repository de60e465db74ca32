"""Published configs with a key less, or with another value of one: each is refused with one sentence, or read as
transformers reads it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_models import tokens, whole_logits
from published import PROMPT, published, rows, written

from draftwing.errors import CheckpointError
from draftwing.models.config import from_hf
from draftwing.models.loader import load_model

pytestmark = pytest.mark.slow
NAMES = ["gemma-4-26b-a4b-it"]
MORE = [
    "qwen2.5-1.5b-transformers-5", "glm-4.5-air", "qwen3-235b-a22b", "qwen3.5-9b", "deepseek-v3-bf16",
    "llama-3.2-1b-instruct", "mixtral-8x7b", "qwen3-8b-yarn", "qwen3-next-80b-a3b-instruct", "gemma-3-1b-it",
    "deepseek-v2-chat", "minimax-m2-bf16", "gpt-oss-20b-bf16", "lfm2-1.2b", "granite-4.0-h-tiny", "granite-4.0-micro",
    "nemotron-3-nano-30b-a3b", "nemotron-3-super-120b-a12b", "nemotron-h-56b", "falcon-h1-7b-instruct",
]  # fmt: skip
# What no logits follow from, or so much that other tests have it.
LEFT = {
    "architectures", "auto_map", "initializer_range", "model_type", "num_hidden_layers", "quantization_config",
    "text_config", "transformers_version", "use_cache", "vision_config", "vocab_size",
}  # fmt: skip


def changed(config: dict[str, Any], generator: random.Random) -> Iterator[dict[str, Any]]:
    """Of a model around a language model, those of the latter."""
    if "text_config" in config:
        yield from ({**config, "text_config": inner} for inner in changed(config["text_config"], generator))
        return
    others = [published(name) for name in generator.sample(sorted(rows()), 20)]
    for key in generator.sample(sorted(config.keys() - LEFT), 6):
        yield {name: value for name, value in config.items() if name != key}
        said = [None, *(other[key] for other in others if key in other)]
        if isinstance(config[key], bool):
            said.append(not config[key])
        elif isinstance(config[key], int | float):
            said.append(2 * config[key])
        yield {**config, key: generator.choice(said)}
    for other in others:
        new = sorted(other.keys() - config.keys() - LEFT)
        if new:
            key = generator.choice(new)
            yield {**config, key: other[key]}


@pytest.mark.further(seed=[1, 2, 3])
@pytest.mark.further(name=MORE)
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize("name", NAMES + MORE)
@torch.inference_mode()
def test_it_is_refused_or_what_transformers_makes_of_it(tmp_path: Path, name: str, seed: int) -> None:
    compared = refused = 0
    for i, config in enumerate(changed(published(name), random.Random(seed))):
        try:
            positions = from_hf(config).max_positions
        except CheckpointError as refusal:
            refused += 1
            assert "\n" not in str(refusal)
            continue
        ids, folder = tokens(min(PROMPT, positions)), tmp_path / str(i)
        try:
            theirs = written(folder, name, lambda _, config=config: config)  # type: ignore[misc]
            expected = theirs(input_ids=ids[None]).logits[0].log_softmax(-1)
        except Exception:
            continue  # transformers takes no such config
        try:
            model = load_model(folder, torch.float32, "cpu")
        except CheckpointError:
            continue
        found = whole_logits(model, ids).log_softmax(-1)
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=0, msg=str(config))
        compared += 1
    assert compared > 3 and refused
