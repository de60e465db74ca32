"""Published configs with a key less, or with another value of one: each is refused with one sentence, or read as
transformers reads it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_models import Pooled, check_steps, tokens, whole_logits
from published import PROMPT, published, rows, written

from draftwing.errors import CheckpointError
from draftwing.models.config import from_hf
from draftwing.models.loader import load_model
from draftwing.ops import make_ops

pytestmark = pytest.mark.slow
OPS = make_ops(torch.device("cpu"))
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


def is_the_same(folder: Path, name: str, config: dict[str, Any], near: float) -> bool | None:
    """Whether logits are those of transformers; False: it is refused with one sentence, None: transformers takes no
    such config."""
    try:
        positions = from_hf(config).max_positions
    except CheckpointError as refusal:
        assert "\n" not in str(refusal)
        return False
    ids = tokens(min(PROMPT, positions))
    try:
        theirs = written(folder, name, lambda _: config)
        expected = theirs(input_ids=ids[None]).logits[0].log_softmax(-1)
    except Exception:
        return None
    try:
        model = load_model(folder, torch.float32, "cpu")
    except CheckpointError:
        return None
    found = whole_logits(model, ids).log_softmax(-1)
    torch.testing.assert_close(found, expected, atol=near, rtol=0, msg=str(config))
    if near < 1e-3 and len(ids) >= 40:
        model.pack(OPS)
        check_steps(theirs, Pooled(model, OPS), near)
    return True


@pytest.mark.further(seed=[1, 2, 3])
@pytest.mark.further(name=MORE)
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize("name", NAMES + MORE)
@torch.inference_mode()
def test_it_is_refused_or_what_transformers_makes_of_it(tmp_path: Path, name: str, seed: int) -> None:
    configs = changed(published(name), random.Random(seed))
    found = [is_the_same(tmp_path / str(i), name, config, 1e-3) for i, config in enumerate(configs)]
    assert found.count(True) > 3 and False in found


ABSENT = object()
DEFAULT = {"rope_type": "default", "rope_theta": 5000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
# What people change, and what libraries read under another name, or not at all.
SWITCHES: list[dict[str, Any]] = [
    {"tie_word_embeddings": True}, {"tie_word_embeddings": False}, {"attention_bias": True}, {"mlp_bias": True},
    {"use_bias": True}, {"head_dim": ABSENT}, {"head_dim": 48}, {"num_key_value_heads": 1},
    {"num_key_value_heads": ABSENT}, {"rope_parameters": DEFAULT}, {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_scaling": LLAMA3}, {"rope_scaling": YARN}, {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1}},
    {"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.5}}, {"partial_rotary_factor": 0.25},
    {"sliding_window": 5}, {"sliding_window": None}, {"sliding_window_pattern": 3}, {"num_experts_per_tok": 2},
    {"num_experts_per_tok": ABSENT}, {"norm_topk_prob": False}, {"routed_scaling_factor": 0.5},
    {"attention_multiplier": None}, {"moe_renormalize": None}, {"rms_norm_eps": ABSENT}, {"layer_norm_eps": 1e-3},
]  # fmt: skip
SWITCHED = [
    "afm-4.5b", "apertus-8b-instruct", "aya-expanse-8b", "bamba-9b-v2",
    "internlm3-8b-instruct", "command-r7b-12-2024", "deepseek-v3.2", "ernie-4.5-0.3b",
    "ernie-4.5-21b-a3b", "exaone-3.5-7.8b-instruct", "exaone-4.0-32b", "falcon-h1-7b-instruct", "gemma-2-9b-it",
    "glm-5", "granite-3.3-8b-instruct", "granite-3.1-1b-a400m-instruct", "granite-4.0-h-tiny", "hunyuan-7b-instruct",
    "hunyuan-a13b-instruct", "kimi-linear-48b-a3b", "minicpm3-4b", "minitron-4b-base", "nemotron-3-nano-30b-a3b",
    "nemotron-3-super-120b-a12b", "nemotron-h-56b", "olmo-3.1-32b-instruct", "phi-2", "phi-3.5-moe",
    "pythia-1.4b", "solar-open-100b",
    "stablelm-2-1_6b", "starcoder2-7b",
]  # fmt: skip
QUICK = {"gemma-2-9b-it", "granite-3.1-1b-a400m-instruct"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.exhaustive) for name in SWITCHED]
)
@torch.inference_mode()
def test_switches_are_refused_or_what_transformers_makes_of_them(tmp_path: Path, name: str) -> None:
    """In prompts, chunks, single tokens and trees."""
    found = []
    for i, switch in enumerate(SWITCHES):
        config = {key: value for key, value in {**published(name), **switch}.items() if value is not ABSENT}
        if "pattern" in str(switch):
            config["num_hidden_layers"] = max(3, config.get("num_hidden_layers", 3))
        found.append(is_the_same(tmp_path / str(i), name, config, 3e-4))
    assert found.count(True) > 5


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("hy3-preview", {"route_norm": False}),
        ("hy3-preview", {"norm_topk_prob": False}),
        ("qwen3-vl-8b-instruct", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
        ("qwen3-vl-30b-a3b-instruct", {"use_sliding_window": True, "sliding_window": 5}),
        ("glm-4.1v-9b-thinking", {"attention_bias": False}),
    ],
)
def test_what_transformers_does_not_read(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    config = published(name)
    inner = config.get("text_config")
    config = {**config, "text_config": {**inner, **changes}} if inner else {**config, **changes}
    assert is_the_same(tmp_path, name, config, 1e-3) is not None
