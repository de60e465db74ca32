"""Adapters that PEFT itself makes and writes: logits are those of its model, greedy text is that of what it merges."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hybrid_models
import peft
import pytest
import torch
from models.adapters.test_families import LENGTH, MAKERS, logits
from tiny_checkpoint import VOCAB, write_tokenizer
from torch import nn

from draftwing import LLM
from draftwing.models.adapters.adapter import AdapterSlots
from draftwing.models.adapters.peft import read_folder
from draftwing.models.adapters.read import stored_rank
from draftwing.models.decoder import WIDE
from draftwing.models.loader import load_model
from draftwing.ops import make_ops

FULL, FUSED = ["q_proj", "k_proj", "v_proj", "o_proj"], ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
# Of one family of each kind, what PEFT is asked for.
ASKED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dense": ("dense", "llama2", {"r": 64, "use_rslora": True, "target_modules": "all-linear"}),
    "dense, patterns": (
        "dense",
        "qwen2-tied",
        {
            "r": 4,
            "target_modules": [*FULL, "down_proj"],
            "rank_pattern": {"q_proj": 64, r"layers\.[01]\.mlp\.down_proj": 3},
            "alpha_pattern": {"^model.layers.1.self_attn.k_proj": 3, "o_proj": 12},
        },
    ),
    "dense, some layers": (
        "dense",
        "gemma3",
        {
            "r": 4,
            "target_modules": r".*layers\.\d\.(self_attn\.[qv]|mlp\.up)_proj",
            "exclude_modules": ["layers.2.mlp"],
        },
    ),
    "fused": ("dense", "phi3", {"r": 64, "target_modules": FUSED, "alpha_pattern": {"qkv_proj": 5}}),
    "fused, rsLoRA": (
        "dense",
        "phi3",
        {"r": 4, "use_rslora": True, "target_modules": "all-linear", "rank_pattern": {"gate_up_proj": 64}},
    ),
    "experts": (
        "dense",
        "mixtral",
        {"r": 4, "target_modules": [*FULL, "w1", "w2", "w3"], "rank_pattern": {"v_proj": 64}, "use_rslora": True},
    ),
    "experts, parameters": (
        "dense",
        "qwen3-moe",
        {
            "r": 4,
            "target_modules": ["q_proj", "o_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            "alpha_pattern": {"o_proj": 3},
        },
    ),
    "experts, transposed": (
        "dense",
        "llama4",
        {"r": 4, "target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    ),
    "experts, of pairs": (
        "dense",
        "gpt-oss",
        {"r": 4, "target_modules": ["v_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    ),
    "experts, of 64": (
        "moe",
        "deepseek-v3",
        {"r": 64, "target_modules": ["kv_b_proj", "q_a_proj", "gate_proj", "up_proj", "down_proj"]},
    ),
    "embeddings of layers": ("gemma4", "gemma4-per-layer", {"r": 4, "target_modules": "all-linear"}),
    "experts, of other rows": (
        "hybrid",
        "nemotron-h-latent",
        {"r": 4, "target_modules": ["fc1_latent_proj", "fc2_latent_proj", "in_proj", "q_proj", "up_proj"]},
    ),
    "hybrid": ("hybrid", "qwen3.5-every", {"r": 4, "target_modules": "all-linear", "use_rslora": True}),
    "hybrid, patterns": (
        "hybrid",
        "lfm2-plain",
        {
            "r": 64,
            "target_modules": ["in_proj", "out_proj", "w1", "w2", "w3", "q_proj"],
            "rank_pattern": {"out_proj": 4},
            "alpha_pattern": {r"layers\.0\.conv\.in_proj": 1},
        },
    ),
    "hybrid, names": (
        "hybrid",
        "kimi-linear",
        {"r": 4, "target_modules": ["f_a_proj", "f_b_proj", "q_proj", "b_proj", "kv_b_proj", "o_proj", "up_proj"]},
    ),
}
QUICK = {"dense", "fused", "experts", "hybrid"}
CASES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.exhaustive) for name in ASKED]


def adapted(kind: str, family: str, asked: Mapping[str, Any], folder: Path, sizes: Mapping[str, Any]) -> Any:
    """Writes a model and PEFT's adapter of it, whose factors are random; returns PEFT's model."""
    theirs: Any = MAKERS[kind][1](family, **sizes)
    hybrid_models.saved(folder / "model", theirs)
    model = peft.get_peft_model(theirs, peft.LoraConfig(lora_alpha=8, **asked)).eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for name, values in model.named_parameters():
            if "lora_B" in name:
                values.normal_(0, 0.4 / values.shape[1] ** 0.5)
    model.save_pretrained(folder / "adapter")
    return model


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_logits_are_those_of_its_model(case: str, tmp_path: Path) -> None:
    theirs = adapted(*ASKED[case], tmp_path, {})
    model = load_model(tmp_path / "model", torch.float32, "cpu")
    model.pack(make_ops(torch.device("cpu")), shared_apart=True)
    slots = AdapterSlots(model, 2, stored_rank(tmp_path / "adapter"), wide=WIDE)
    slots.put(1, slots.targets.fit(read_folder(tmp_path / "adapter", 1 << 24)))
    ids = torch.randint(1, 101, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    expected = theirs(ids).logits
    with theirs.disable_adapter():
        assert not torch.allclose(theirs(ids).logits, expected, atol=0.1)
    found = logits(model, ids.flatten(), torch.ones(2 * LENGTH, dtype=torch.int64))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_text_is_that_of_what_it_merges(case: str, tmp_path: Path) -> None:
    theirs = adapted(*ASKED[case], tmp_path, {"vocab_size": VOCAB})
    write_tokenizer(tmp_path / "model")
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(1, 250, (12,), generator=generator).tolist() for _ in range(3)]
    with torch.inference_mode():
        merged: nn.Module = theirs.merge_and_unload()
        expected = [greedy(merged, prompt, 16) for prompt in prompts]
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_threads": 1, "max_total_tokens": 2048}
    params = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}
    drafts = {"speculative_algorithm": "NGRAM", "speculative_fixed_shape": True}
    with LLM(str(tmp_path / "model"), lora_modules=[f"one={tmp_path / 'adapter'}"], **options, **drafts) as llm:
        found = [one.token_ids for one in llm.generate(prompts, params, adapter="one")]
        plain = [one.token_ids for one in llm.generate(prompts, params)]
    assert found == expected != plain


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]
