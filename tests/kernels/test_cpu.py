"""The C kernels against formulas in float64 and against the torch operations that they stand for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from draftwing.kernels.cpu import Kernels, load
from draftwing.layers.norm import RMSNorm
from draftwing.models.config import ModelConfig
from draftwing.models.decoder import DecoderLayer, DecoderModel

DTYPES = [torch.float32, torch.bfloat16]
KERNELS = load()
needs_kernels = pytest.mark.skipif(KERNELS is None, reason="the C kernels were not built")


@pytest.fixture
def kernels() -> Kernels:
    assert KERNELS is not None
    return KERNELS


@needs_kernels
@pytest.mark.parametrize("size", [16, 100, 576, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(kernels: Kernels, dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(300, size) * 3).to(dtype), torch.rand(size).add(0.5).to(dtype)
    wide = x.double()
    unit = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-2).sqrt()
    found = kernels.rms_norm(x, weight, 1e-2)
    assert found.dtype == dtype
    if dtype == torch.float32:
        torch.testing.assert_close(found.double(), unit * weight.double(), rtol=1e-6, atol=1e-7)
        return
    # Rounded before it is weighted, and after: the same but where float32 and float64 fall to two sides of a tie.
    assert (found != unit.to(dtype) * weight).float().mean() < 1e-3
    torch.testing.assert_close(found.double(), unit * weight.double(), rtol=1e-2, atol=0)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_strided_rows_and_heads(kernels: Kernels, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 9, 48).to(dtype), torch.rand(48).to(dtype)
    found = kernels.rms_norm(x[:, 2:6], weight, 1e-5)
    assert found.shape == (5, 4, 48)
    for i in range(5):
        for j in range(4):
            assert torch.equal(found[i, j], kernels.rms_norm(x[i, 2 + j], weight, 1e-5))


@needs_kernels
@pytest.mark.parametrize("ffn", [16, 100, 1536])
@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(kernels: Kernels, dtype: torch.dtype, ffn: int) -> None:
    torch.manual_seed(0)
    x = (torch.randn(300, 2 * ffn) * 5).to(dtype)
    x[0, :8] = torch.tensor([0.0, -0.0, 1e4, -1e4, 88.0, -88.0, 1e-30, -150.0])
    gate, up = x.double().chunk(2, -1)
    found = kernels.silu_mul(x)
    torch.testing.assert_close(
        found.double(), F.silu(gate) * up, rtol=2e-6 if dtype == torch.float32 else 1e-2, atol=1e-30
    )
    if dtype == torch.bfloat16:  # rounded where torch rounds
        assert (found != F.silu(gate.to(dtype)) * up.to(dtype)).float().mean() < 1e-3
    assert torch.equal(found, torch.cat([kernels.silu_mul(row[None]) for row in x]))


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_so(kernels: Kernels, dtype: torch.dtype) -> None:
    """A broken model must show as such."""
    x = torch.zeros(3, 32, dtype=dtype)
    x[0, 3], x[1, 3] = torch.nan, torch.inf
    norm = kernels.rms_norm(x, torch.ones(32, dtype=dtype), 1e-5)
    assert norm[0].isnan().all() and norm[1, 3].isnan() and norm[2].eq(0).all()
    x[:, 16:] = 1.0
    assert kernels.silu_mul(x)[0, 3].isnan() and kernels.silu_mul(x)[1, 3].isinf()


@needs_kernels
def test_packing_switches_them_on() -> None:
    config = ModelConfig(
        architecture="LlamaForCausalLM", hidden_size=64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16,
        ffn_size=96, vocab_size=50, max_positions=32,
    )  # fmt: skip
    model = DecoderModel(config, torch.float32, "cpu")
    x, gate_up = torch.randn(3, 64), torch.randn(3, 192)
    layer = model.layers[0]
    assert isinstance(layer, DecoderLayer) and isinstance(layer.mlp_norm, RMSNorm)
    before = layer.mlp_norm(x), layer._silu_mul(gate_up)
    assert before[0].requires_grad
    model.pack()
    after = layer.mlp_norm(x), layer._silu_mul(gate_up)
    assert not after[0].requires_grad, "the kernel takes no gradient"
    for found, expected in zip(after, before, strict=True):
        torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-6)
