"""What a run is said to take: against sizes counted by hand, real heads and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference.checkpoints import llama_target

from draftwing.models.config import from_hf
from draftwing.models.loader import load_config, load_model
from draftwing.train import forecast as forecasting
from draftwing.train.capture import FeatureModel, bytes_per_token, capture
from draftwing.train.data import Prompt
from draftwing.train.forecast import FASTEST, SLOWEST, Text, count_text, forecast, head_size, longest_text
from draftwing.train.heads import new_head
from draftwing.train.progress import duration
from draftwing.train.settings import Settings
from draftwing.train.store import FeatureStore, Tokens

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip
TEXT = Text(100, 70, 100)


@pytest.mark.parametrize(
    ("algorithm", "drafted", "parameters", "operations"),
    [("EAGLE3", 8192, 9.8, 0.36), ("EAGLE3", None, 12.2, 0.43), ("EAGLE", None, 4.2, 0.14), ("MTP", None, 4.2, 0.77)],
)
def test_the_table_of_the_guide(algorithm: str, drafted: int | None, parameters: float, operations: float) -> None:
    """docs/train_a_draft.md has millions of parameters and 10^9 operations per token."""
    settings = Settings(algorithm=algorithm, draft_vocab_size=drafted, held_out=0.0)
    target = from_hf(SMOLLM2)
    found = forecast(settings, target, 3, TEXT, 1)
    assert head_size(settings, target, 3).parameters / 1e6 == pytest.approx(parameters, abs=0.05)
    assert found.training / 100 / 1e9 == pytest.approx(operations, abs=0.005)


@pytest.mark.parametrize("algorithm", ["EAGLE3", "EAGLE", "MTP"])
def test_the_matrices_of_a_head(algorithm: str, tmp_path: Path) -> None:
    path = llama_target(0, num_hidden_layers=7).write(tmp_path / "target")
    config, settings = load_config(path), Settings(algorithm=algorithm, draft_vocab_size=None)
    target = load_model(path, torch.float32, torch.device("cpu"))
    ids = torch.arange(config.vocab_size // 4) if algorithm == "EAGLE3" else None
    head = new_head(settings.drafter.heads[0], target, ids, (2, 3, 4) if algorithm == "EAGLE3" else (8,), 0, 0)
    matrices = sum(one.numel() for one in head.parameters() if one.requires_grad and one.ndim == 2)
    assert head_size(settings, config, 3).parameters == matrices


def test_bytes_of_hidden_states(tmp_path: Path) -> None:
    path = llama_target(0, num_hidden_layers=7).write(tmp_path / "target")
    target = FeatureModel.load(path, "EAGLE3", "cpu", "float32")
    meta = target.meta("m", "EAGLE3")
    samples = [Tokens(np.arange(40 + i, dtype=np.int32), np.arange(40 + i) > 9, f"k{i}") for i in range(8)]
    text = count_text(samples)
    assert text == (8 * 40 + 28, 8 * 30 + 28, 8 * 40 + 28)
    found = forecast(Settings(), target.model.config, 3, text, bytes_per_token(meta))
    store = FeatureStore.create(tmp_path / "store", meta)
    capture(target, store, samples[:4])
    left = count_text(samples, store.keys).missing
    assert left == sum(len(one.ids) for one in samples[4:])
    capture(target, store, samples)
    assert store.bytes == pytest.approx(found.features, rel=0.05)
    assert forecast(Settings(online=True), target.model.config, 3, text, bytes_per_token(meta)).features == 0


def test_the_longest_answers() -> None:
    settings = Settings(max_tokens=100, max_length=250)
    prompts = [(Prompt(("a",)), [0] * 20), (Prompt(("a", "b")), [0] * 30), (Prompt(("a", "b", "c")), [0] * 40)]
    answers = 100 + 200 + 210  # the last one ends at max_length
    assert longest_text(Text(5, 4, 3), prompts, settings) == (5 + 90 + answers, 4 + answers, 3 + 90 + answers)


@pytest.mark.parametrize(
    ("changes", "seen"), [({}, 98), ({"epochs": 2.5}, 245), ({"steps": 3, "batch_tokens": 10, "gpus": 2}, 60)]
)
def test_tokens_seen_in_training(changes: dict[str, Any], seen: int) -> None:
    assert forecast(Settings(**changes), from_hf(SMOLLM2), 3, TEXT, 1).seen == seen


def test_the_report() -> None:
    settings, rate = Settings(), 1e9
    found = forecast(settings, from_hf(SMOLLM2), 3, TEXT, 4613)
    tokens, disk, time, _ = found.report(settings, rate, 1, 10**6, at_most=False)
    assert "98 seen" in tokens and "--online" in disk and "at most" not in tokens + disk + time
    span = f"{duration(found.training / rate / FASTEST)} to {duration(found.training / rate / SLOWEST)}"
    assert f"training {span}" in time and "capturing" in time
    assert "--online" not in found.report(settings, rate, 1, 10**12, at_most=True)[1]
    clock = Settings(minutes=7)
    timed = forecast(clock, from_hf(SMOLLM2), 3, TEXT, 1).report(clock, rate, 1, 10**12, at_most=True)
    assert "training 7 min" in timed[2] and "seen" not in timed[0] and all("at most" in line for line in timed)


@pytest.mark.parametrize("rate", [1e9, 1e13])
def test_the_rate_of_products_is_what_they_take(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """On slow and on fast devices, whose products are larger."""
    monkeypatch.setattr(forecasting, "_products", lambda size, times, device, dtype: 2 * size**3 * times / rate)
    assert forecasting.product_rate(torch.device("cpu"), torch.float32) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("tokens", "chosen", "said"),
    [
        (4_000, {}, ["at most 1 of", "100 times", "--epochs 100,", "--batch-tokens 81"]),
        (4_000, {"epochs": 3.0}, ["2 of the optimizer", "50 times", "--epochs 150,"]),
        (100_000, {}, ["13 of the optimizer", "8 times", "--epochs 8,", "--batch-tokens 1024"]),
        (100_000, {"steps": 5}, ["5 of the optimizer", "--steps 100,"]),
        (4_000, {"init_head": ("a",)}, ["1 of the optimizer", "at least 10 take 10 times"]),
        (4_000, {"batch_tokens": 39}, None),
        (100_000, {"init_head": ("a",)}, None),
        (4_000, {"steps": 100}, None),
        (4_000, {"minutes": 5.0}, None),
        (4_000, {"epochs": 0.0, "init_head": ("a",)}, None),
    ],
)
def test_too_few_steps_are_said(tokens: int, chosen: dict[str, Any], said: list[str] | None) -> None:
    settings = Settings(**{"held_out": 0.0, **chosen})
    found = forecast(settings, from_hf(SMOLLM2), 3, Text(tokens, tokens // 2, tokens), 1)
    lines = found.report(settings, 1e9, 1, 10**12, at_most=True)[3:]
    assert len(lines) == (said is not None) and all(part in lines[0] for part in said or ())
