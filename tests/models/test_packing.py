"""Packed models and heads give what they gave before, on each implementation of the operations."""

from __future__ import annotations

import pytest
import torch
from decoder_configs import changed, decoder_config
from plain_attention import FunctionAttend
from torch import Tensor, nn

from draftwing.layers.part_configs import ExpertConfig
from draftwing.layers.rope import RopeConfig
from draftwing.models.decoder import DecoderModel
from draftwing.models.heads.eagle import Eagle3Config, Eagle3Head, EagleHead
from draftwing.models.heads.mtp import MTPHead
from draftwing.ops import make_ops
from draftwing.ops.experts.routing import Routing
from draftwing.ops.table import TorchOps

CONFIG = decoder_config(
    hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    ffn_size=96, vocab_size=50, max_positions=32, norm_eps=1e-5, rope=RopeConfig(), qk_norm=True,
)  # fmt: skip


def own_value(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention to oneself, with enough of the queries and keys in it to notice them."""
    return (q * k.repeat_interleave(2, 1) + v.repeat_interleave(2, 1)).flatten(1)


ATTEND = FunctionAttend(own_value)


def filled(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in module.parameters():
        values = torch.randn(param.shape, generator=generator)
        param.data.copy_(values * 0.1 if param.dim() == 2 else 1 + 0.1 * values)
        param.requires_grad_(False)


@pytest.fixture(params=["torch", "triton"])
def ops(request: pytest.FixtureRequest, device: torch.device) -> TorchOps:
    """Triton's kernels, and torch's GEMMs, on the CPU too; what the device has is in the other tests."""
    if request.param == "torch":
        return make_ops(device)
    made: TorchOps = request.getfixturevalue("triton_ops")
    return made


@pytest.mark.parametrize(
    "experts", [None, ExpertConfig(6, Routing(2), 48), ExpertConfig(4, Routing(3, False), 32, True, True, 1.5)]
)
@torch.inference_mode()
def test_packed_decoder_gives_the_same(device: torch.device, ops: TorchOps, experts: ExpertConfig | None) -> None:
    model = DecoderModel(changed(CONFIG, experts=experts), torch.float32, device)
    filled(model, 0)
    model.set_max_positions(32)
    ids, positions = torch.arange(5, device=device), torch.arange(5, device=device)
    expected, expected_taps = model(ids, positions, ATTEND, (0, 1, 2))
    model.pack(ops)
    found, aux_hidden = model(ids, positions, ATTEND, (0, 1, 2))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    hidden, chosen = found[:4].view(2, 2, -1), torch.tensor([[[3, 1], [0, 49]], [[7, 7], [2, 5]]], device=device)
    weighed = model.exact_logits(hidden, chosen)
    torch.testing.assert_close(weighed, (hidden @ model.lm_head.weight.T).gather(2, chosen), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(aux_hidden, expected_taps, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "eagle3 from normed", "mtp"])
@torch.inference_mode()
def test_packed_head_gives_the_same(kind: str, device: torch.device, ops: TorchOps) -> None:
    target = DecoderModel(CONFIG, torch.float32, device)
    head: EagleHead | Eagle3Head | MTPHead
    if kind == "eagle":
        head = EagleHead(CONFIG, target, False, torch.float32, device)
    elif kind == "mtp":
        head = MTPHead(target, 1, torch.float32, device)
    else:
        eagle = Eagle3Config((0, 1), 64, 20, norm_before_residual=kind != "eagle3")
        head = Eagle3Head(CONFIG, eagle, target, torch.float32, device)
    filled(target, 0)
    filled(head, 1)
    head.set_max_positions(32)
    ids, positions = torch.tensor([3, 9, 49], device=device), torch.tensor([0, 1, 2], device=device)
    features = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(device)
    before = features.clone()
    expected = head.run(ids, positions, features, 0, ATTEND)
    head.pack(ops)
    found = head.run(ids, positions, features, 0, ATTEND)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(features, before)
