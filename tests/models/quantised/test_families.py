"""Architectures take quantised weights: their logits are those of the same weights dequantised. (Others are in
`tests/models/test_family_formats.py`.)"""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_quantised as tiny
import torch
from dense_cache import DenseCache
from models.test_decoder import random_reference
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


@torch.inference_mode()
def logits(folder: Path) -> Tensor:
    model = load_model(folder, torch.float32, "cpu")
    ids = torch.arange(40) * 7 % 101  # longer than windows are
    return model.logits(model(ids, torch.arange(len(ids)), DenseCache())[0])


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
