"""Models with latent attention against transformers, which multiplies keys and values out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_models import Pooled, check_steps, tokens, whole_logits
from moe_models import reference

from draftwing.kv.pool import KVSpec
from draftwing.models.decoder import DecoderModel
from draftwing.models.loader import load_model
from draftwing.ops.table import TorchOps

CPU = torch.device("cpu")
SLOW = ["deepseek-v2", "deepseek-v2-groups", "glm4-moe-lite-halves"]
KINDS = ["deepseek-v3", *SLOW]


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, DecoderModel, Path]:
    theirs, folder = reference(request.param), tmp_path_factory.mktemp("model")
    theirs.save_pretrained(folder)
    return theirs, load_model(folder, torch.float32, "cpu"), folder


@pytest.mark.slower(pair=SLOW)
@torch.inference_mode()
def test_whole_sequences_equal_transformers(pair: tuple[Any, DecoderModel, Path]) -> None:
    theirs, model, _ = pair
    ids = tokens(150)
    assert model.kv_layers == [KVSpec(1, 56, shared=True)] * 3
    torch.testing.assert_close(whole_logits(model, ids), theirs(ids[None]).logits[0], atol=1e-4, rtol=1e-4)


@pytest.mark.slower(pair=SLOW)
@pytest.mark.further(ops="triton", pair=SLOW)
@pytest.mark.further(ops="torch")
def test_chunks_tokens_and_trees_equal_transformers(pair: tuple[Any, DecoderModel, Path], ops: TorchOps) -> None:
    theirs, _, folder = pair
    model = load_model(folder, torch.float32, ops.device)
    model.pack(ops)
    check_steps(theirs, Pooled(model, ops))


class Merging(TorchOps):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.merges_matrices = True


@pytest.mark.slow
@torch.inference_mode()
def test_queries_and_latents_of_one_input_are_one_product(pair: tuple[Any, DecoderModel, Path]) -> None:
    theirs, _, folder = pair
    model = load_model(folder, torch.float32, "cpu")
    model.pack(Merging(CPU))
    count = 2 if theirs.config.q_lora_rank is None else 3
    assert {len(layer.mixer.linears()) for layer in model.layers} == {count}
    check_steps(theirs, Pooled(model, Merging(CPU)))
