"""Models with latent attention against transformers, which multiplies keys and values out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_models import Pooled, check_steps, on_two_ranks, tokens, whole_logits
from moe_models import reference

from draftwing.kv.pool import KVSpec
from draftwing.models.decoder import DecoderModel
from draftwing.models.loader import load_model
from draftwing.ops import make_ops
from draftwing.ops.torch.ops import TorchOps

CPU = torch.device("cpu")
KINDS = ["deepseek-v2", "deepseek-v2-groups", "deepseek-v3", "glm4-moe-lite-halves"]


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, DecoderModel, Path]:
    theirs, folder = reference(request.param), tmp_path_factory.mktemp("model")
    theirs.save_pretrained(folder)
    return theirs, load_model(folder, torch.float32, "cpu"), folder


@torch.inference_mode()
def test_whole_sequences_equal_transformers(pair: tuple[Any, DecoderModel, Path]) -> None:
    theirs, model, _ = pair
    ids = tokens(150)
    assert model.kv_layers == [KVSpec(1, 56, shared=True)] * 3
    torch.testing.assert_close(whole_logits(model, ids), theirs(ids[None]).logits[0], atol=1e-4, rtol=1e-4)


@pytest.mark.further(ops="triton", pair=[kind for kind in KINDS if kind != "deepseek-v3"])
def test_chunks_tokens_and_trees_equal_transformers(pair: tuple[Any, DecoderModel, Path], ops: TorchOps) -> None:
    theirs, _, folder = pair
    model = load_model(folder, torch.float32, ops.device)
    model.pack(ops)
    check_steps(theirs, Pooled(model, ops))


class Merging(TorchOps):
    merges_matrices = True


@torch.inference_mode()
def test_queries_and_latents_of_one_input_are_one_product(pair: tuple[Any, DecoderModel, Path]) -> None:
    theirs, _, folder = pair
    model = load_model(folder, torch.float32, "cpu")
    model.pack(Merging(CPU))
    count = 2 if theirs.config.q_lora_rank is None else 3
    assert {len(layer.mixer.linears()) for layer in model.layers} == {count}
    check_steps(theirs, Pooled(model, Merging(CPU)))


def test_two_ranks_have_shares_of_the_heads(pair: tuple[Any, DecoderModel, Path]) -> None:
    _, whole, folder = pair
    ids = tokens(9)
    torch.testing.assert_close(on_two_ranks(folder, make_ops(CPU), ids), whole_logits(whole, ids), atol=2e-4, rtol=1e-4)
