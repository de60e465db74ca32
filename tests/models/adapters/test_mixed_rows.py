"""A row without an adapter has the bits beside adapted rows that it has in a forward without any."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_rig import adapters_for, tiny_model
from plain_attention import FunctionAttend
from torch import Tensor

from draftwing.engine.devices.cpu import CpuDevice
from draftwing.layers.linear_ops.blocks import BlockFormat
from draftwing.layers.part_configs import ExpertConfig
from draftwing.models.adapters.adapter import AdapterSlots
from draftwing.models.decoder import WIDE, DecoderModel
from draftwing.models.loader import fill_parameters
from draftwing.models.weight_map import checkpoint_names, stored_tensors
from draftwing.ops.experts.routing import Routing

FORMS = {"float32": ("", torch.float32), "bfloat16": ("", torch.bfloat16)}
FORMS |= {"Q8_0": ("Q8_0", torch.float32), "Q4_0, half": ("Q4_0", torch.bfloat16)}
SIGMOIDS = Routing(2, sigmoid=True, groups=2, top_groups=1, scale=2.5)
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": dict(experts=ExpertConfig(6, Routing(2), 32)),
    "with shares of all": dict(experts=ExpertConfig(6, Routing(3, renormalise=False), 32)),
    "shared": dict(experts=ExpertConfig(6, Routing(2), 32, shared=64)),
    "gated share": dict(experts=ExpertConfig(6, Routing(2), 32, shared=32, shared_gate=True)),
    "clamped": dict(experts=ExpertConfig(6, Routing(2), 64, bias=True, limit=7.0, router_bias=True)),
    "sigmoids": dict(experts=ExpertConfig(8, SIGMOIDS, 32, wide_router=True, shared=32)),
    "GELU, beside": dict(gemma=True, experts=ExpertConfig(6, Routing(2), 32, beside=True)),
    "ungated": dict(activation="relu2", experts=ExpertConfig(6, Routing(2), 32, shared=32)),
    "of latents": dict(experts=ExpertConfig(6, Routing(2), 64, latent=32)),
}


def adapted_model(kind: str, form: str) -> DecoderModel:
    """With three adapters in slots, each of some matrices."""
    blocks, dtype = FORMS[form]
    ops, made = CpuDevice().ops, tiny_model(seed=3, **KINDS[kind])
    config = made.config
    if blocks:
        config = replace(config, weight_format=BlockFormat(blocks, ops), vocab_format=BlockFormat(blocks, ops))
    model = DecoderModel(config, dtype, "cpu")
    tensors = stored_tensors(made, checkpoint_names(made.config))
    fill_parameters(model, checkpoint_names(config), tensors, "cpu")
    model.pack(ops)
    model.set_max_positions(64)
    slots = AdapterSlots(model, 3, 8, wide=WIDE)
    for slot, adapter in enumerate(adapters_for(made), 1):
        slots.put(slot, slots.targets.fit(adapter))
    return model.eval()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_beside_adapted_ones(kind: str, form: str, one_thread: None) -> None:
    model, generator = adapted_model(kind, form), torch.Generator().manual_seed(1)

    @torch.inference_mode()
    def run(ids: Tensor, adapted: Tensor | None) -> Tensor:
        attend = FunctionAttend(lambda _, q, k, v: q.flatten(1))
        hidden: Tensor = model(ids, torch.arange(len(ids)) % 32, attend, adapted=adapted)[0]
        return hidden

    for rows in (2, 7, 40):
        ids = torch.randint(0, 40, (rows,), generator=generator)
        which = torch.randint(1, 4, (rows,), generator=generator).masked_fill(torch.arange(rows) % 2 == 0, 0)
        alone, mixed, plain = run(ids, None), run(ids, which), which == 0
        assert torch.equal(mixed[plain], alone[plain]), rows
        assert not torch.equal(mixed[~plain], alone[~plain])
