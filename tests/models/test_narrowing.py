"""Layers that leave nothing to later tokens may see the last ones of a prompt alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from decoder_configs import decoder_config
from thread_ranks import shares_of
from torch import Tensor

from draftwing.kv.pool import KVPool
from draftwing.layers.attention import AttentionConfig
from draftwing.layers.part_configs import ExpertConfig
from draftwing.models.config import ModelConfig
from draftwing.models.decoder import DecoderModel, Narrowed
from draftwing.models.dummy import fill_random
from draftwing.ops.attention.batch import Batch, ChunkSpan
from draftwing.ops.experts.routing import Routing
from draftwing.ops.experts.spec import ExpertOps
from draftwing.ops.norms.spec import NormOps
from draftwing.ops.table import TorchOps

CPU = torch.device("cpu")


class UnderNorms(ExpertOps):
    """As on a GPU, a mixture of experts gives its result under the next layer's norm, too."""

    mixes_under_norms = True


def config_of(experts: ExpertConfig | None) -> ModelConfig:
    """The last two of four layers read keys of the second."""
    config = decoder_config(
        num_layers=4, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=96, vocab_size=50,
        max_positions=64, experts=experts,
    )  # fmt: skip
    reads = [replace(layer, mixer=replace(cast(AttentionConfig, layer.mixer), kv_from=1)) for layer in config.layers]
    return replace(config, layers=(*config.layers[:2], *reads[2:]))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("experts", [None, ExpertConfig(6, Routing(2), 32)], ids=["mlp", "experts"])
def test_last_tokens_have_the_hidden_states_that_they_have_among_all(experts: ExpertConfig | None, size: int) -> None:
    """Of one rank, and of two, whose sums come under the norms that read them next."""
    ops = TorchOps(CPU, experts=UnderNorms(NormOps(), reads_routes=True))
    model = DecoderModel(config_of(experts), torch.float32, "meta")
    fill_random(model, CPU)
    shares = shares_of(model, ops, size) if size > 1 else [model]
    if size == 1:
        model.pack(ops)
    with ThreadPoolExecutor(size) as pool:
        for last, whole, found in pool.map(partial(hidden_states, ops), shares):
            torch.testing.assert_close(found[last], whole[last], atol=1e-5, rtol=1e-5)
            others = torch.ones(14, dtype=torch.bool).index_fill(0, last, False)
            assert not found[others].any() and whole[others].any()


@torch.inference_mode()
def hidden_states(ops: TorchOps, model: DecoderModel) -> tuple[Tensor, Tensor, Tensor]:
    """Which queries are the last, and the hidden states [14, H] without narrowing and with it."""
    model.set_max_positions(64)
    none: Any = torch.zeros(0, dtype=torch.int64)
    lengths = (9, 5)
    table = 1 + torch.arange(32).view(2, 16)
    positions = torch.cat([torch.arange(length) for length in lengths])
    batch = Batch(
        torch.tensor([0, 1]), torch.arange(14) % 50, positions,
        torch.cat([table[row, :length] for row, length in enumerate(lengths)]), table, none,
        chunks=(ChunkSpan(0, 0, 0, 9), ChunkSpan(1, 9, 0, 5)), bound=9,
    )  # fmt: skip
    attention = ops.attention(KVPool(model.kv_layers, 40, torch.float32, CPU))
    last = torch.tensor([8, 13])
    whole, _ = model(batch.ids, positions, attention.bind(batch, 0))
    narrowed = Narrowed(last, attention.bind(batch.ends(last), 0))
    found, aux = model(batch.ids, positions, attention.bind(batch, 0), narrowed=narrowed)
    assert model.keepers == 2 and aux is None
    return last, whole, found
