"""Gated delta nets as layers."""

from __future__ import annotations

import torch
from plain_attention import FunctionAttend

from draftwing.layers.attention import AttentionConfig
from draftwing.layers.config import LayerConfig, Placement
from draftwing.layers.delta_net import DeltaNetConfig, GatedDeltaNet
from draftwing.layers.linear_ops.base import PackMode
from draftwing.models.decoder import pack_layers
from draftwing.ops.table import TorchOps


def test_matrices_that_become_one_make_the_same(triton_ops: TorchOps) -> None:
    generator = torch.Generator().manual_seed(0)
    config, layer = DeltaNetConfig(2, 4, 8, 16, 4), LayerConfig(64, AttentionConfig(4, 2, 16), 96)
    place = Placement(layer, 0, torch.float32, torch.device("cpu"), 64)
    plain, packed = (GatedDeltaNet(config, place) for _ in range(2))
    for one, other in zip(plain.parameters(), packed.parameters(), strict=True):
        one.data.normal_(0, 0.3, generator=generator)
        other.data.copy_(one)
    packed.to(triton_ops.device)
    pack_layers(packed, triton_ops, PackMode())
    assert len(plain.linears()) == 3 and len(packed.linears()) == 2
    x, attend = torch.randn(7, 64, generator=generator), FunctionAttend(lambda *_: torch.empty(0))
    nothing = torch.empty(0)
    found = packed(x.to(triton_ops.device), nothing, nothing, attend).cpu()
    torch.testing.assert_close(found, plain(x, nothing, nothing, attend), atol=1e-5, rtol=1e-4)
