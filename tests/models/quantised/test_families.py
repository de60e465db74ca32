"""Architectures take quantised weights: their logits are those of the same weights dequantised. (Others are in
`tests/models/test_family_formats.py`.)"""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_quantised as tiny
import torch
from dense_cache import DenseCache
from hybrid_models import whole_logits
from models.test_decoder import random_reference
from moe_models import by_expert
from published import written
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftwing.models.loader import load_model

FAMILIES = [
    "apertus",
    "starcoder2",
    "neox",
    "falcon-grouped",
    "gpt-bigcode",
    "mimo-v2",
    "llama-biases",
    "mistral-window",
    "qwen2.5",
    "cohere2",
    "gemma2",
    "gemma3",
    "hunyuan",
    "granite",
    "glm4",
    "phi3",
    "olmo3",
    "qwen3",
    "qwen3-moe",
    "mixtral",
    "llama4",
    "afmoe",
    "laguna",
]


# Of families with layers or experts of their own; formats are theirs by turns.
PUBLISHED = {
    "lfm2-8b-a1b": ("fp8 block", "awq"), "lfm3-1.7b": ("fp8 block", "awq"), "ernie-4.5-21b-a3b": ("fp8 block", "awq"),
    "dots.llm1.inst": ("fp8 block", "awq"), "hy3-preview": ("fp8 block", "awq"), "ling-mini-2.0": ("fp8 block", "awq"),
    "ling-3.0-flash": ("fp8 block", "awq"), "qwen3.8-flash-next": ("fp8 block", "awq"),
    "jamba-1.5-mini": ("fp8 block", "awq"), "nemotron-h-56b": ("fp8 block", "awq"),
    "smollm3-3b": ("gptq", "compressed int4"), "glm-4-9b-0414": ("gptq", "compressed int4"),
}  # fmt: skip
# What quantisers leave: small matrices of recurrent layers, routers, and what reads n-grams and streams.
LEFT = (
    "_proj_a", "_proj_b", "_proj_ba", ".b_proj", ".a_proj", ".g_proj", "x_proj", "dt_proj", ".router", "weights_proj",
)  # fmt: skip


@torch.inference_mode()
def logits(folder: Path) -> Tensor:
    model = load_model(folder, torch.float32, "cpu")
    ids = torch.arange(40) * 7 % 101  # longer than windows are
    return model.logits(model(ids, torch.arange(len(ids)), DenseCache())[0])


@torch.inference_mode()
def of_any_layers(folder: Path) -> Tensor:
    return whole_logits(load_model(folder, torch.float32, "cpu"), torch.arange(40) * 7 % 101)


@pytest.mark.slow
@pytest.mark.further(name="fp8 block", family=[one for one in FAMILIES if one != "qwen3-moe"])
@pytest.mark.further(name="awq", family=["mistral-window", "qwen2.5", "qwen3", "qwen3-moe", "mixtral"])
@pytest.mark.parametrize("name", ["fp8 block", "awq"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits(tmp_path: Path, family: str, name: str) -> None:
    config, write = tiny.FORMATS[name]
    for part in ("quantised", "wide", "plain"):
        random_reference(family).save_pretrained(tmp_path / part)
    save_file(tiny.quantise(tmp_path / "quantised", config, lambda _: write), tmp_path / "wide/model.safetensors")
    stored = load_file(tmp_path / "quantised/model.safetensors")
    experts = [key for key in stored if ".experts." in key and key.endswith(("scale_inv", "qweight"))]
    assert (len(experts) > 9) == (family in ("qwen3-moe", "mixtral", "afmoe", "laguna", "mimo-v2"))
    found, expected, plain = (logits(tmp_path / part) for part in ("quantised", "wide", "plain"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (found - plain).norm() > 0.01 * plain.norm()


@pytest.mark.slow
@pytest.mark.further(name=["awq", "compressed int4"])
@pytest.mark.parametrize(("family", "name"), [(one, name) for one, names in PUBLISHED.items() for name in names])
def test_logits_of_published_configs(tmp_path: Path, family: str, name: str) -> None:
    """Of the same weights in a file, and dequantised in another."""
    config, write = tiny.FORMATS[name]
    for part in ("quantised", "plain"):
        written(tmp_path / part, family)
        file = tmp_path / part / "model.safetensors"
        save_file({key: value.clone() for key, value in by_expert(load_file(file)).items()}, file)
    (tmp_path / "wide").mkdir()
    (tmp_path / "wide/config.json").write_bytes((tmp_path / "plain/config.json").read_bytes())
    exact = tiny.quantise(
        tmp_path / "quantised",
        config,
        lambda module: None if module.endswith(LEFT) or "visual" in module else write,
    )
    save_file(exact, tmp_path / "wide/model.safetensors")
    found, expected, plain = (of_any_layers(tmp_path / part) for part in ("quantised", "wide", "plain"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (found - plain).norm() > 0.01 * plain.norm()
