"""Models with latent attention against transformers, which multiplies keys and values out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dense_cache import DenseCache
from hybrid_models import Pooled, check_steps, tokens
from moe_models import reference

from draftwing.kv.pool import KVSpec
from draftwing.models.decoder import DecoderModel
from draftwing.models.loader import load_model
from draftwing.ops.table import TorchOps
from draftwing.train.capture import Causal

CPU = torch.device("cpu")
SLOW = ["deepseek-v2", "deepseek-v2-groups", "glm4-moe-lite-halves", "glm-5"]
KINDS = ["deepseek-v3", "deepseek-v3.2", *SLOW]


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, DecoderModel, Path]:
    theirs, folder = reference(request.param), tmp_path_factory.mktemp("model")
    theirs.save_pretrained(folder)
    return theirs, load_model(folder, torch.float32, "cpu"), folder


@pytest.mark.slower(pair=SLOW)
@torch.inference_mode()
def test_whole_sequences_equal_transformers(pair: tuple[Any, DecoderModel, Path]) -> None:
    theirs, model, _ = pair
    ids, indexed = tokens(150), any(spec.index_size for spec in model.kv_layers)
    kind = theirs.config.model_type
    index = {"deepseek_v32": (32, 32, 32), "glm_moe_dsa": (32, 0, 32)}.get(kind, (0, 0, 0))
    assert model.kv_layers == [KVSpec(1, 56, shared=True, index_size=size) for size in index]
    attend = DenseCache() if indexed else Causal(1, 150)
    logits = model.logits(model(ids, torch.arange(150), attend)[0])
    torch.testing.assert_close(logits, theirs(ids[None]).logits[0], atol=1e-4, rtol=1e-4)


@pytest.mark.slower(pair=SLOW)
@pytest.mark.further(ops="triton", pair=SLOW)
@pytest.mark.further(ops="torch")
@pytest.mark.further(ops="triton", pair="deepseek-v3")  # v3.2 has its layers, and an indexer
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
    own = [len(layer.mixer.linears()) - 2 * (layer.mixer.index is not None) for layer in model.layers]
    assert set(own) == {count}
    check_steps(theirs, Pooled(model, Merging(CPU)))
