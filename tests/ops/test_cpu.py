"""The C kernels against formulas in float64 and against the torch operations that they stand for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from draftwing.core import TreeShape
from draftwing.engine.device import Device
from draftwing.engine.row_table import SlotTable
from draftwing.kv.pool import KVPool, LayerSpec
from draftwing.layers.norm import RMSNorm
from draftwing.models.config import ModelConfig
from draftwing.models.decoder import DecoderLayer, DecoderModel
from draftwing.ops.cpu import tree as cpu_tree
from draftwing.ops.cpu.attention import NativeAttention
from draftwing.ops.cpu.kernels import Kernels, load
from draftwing.ops.torch import growth as grow
from draftwing.ops.torch.sampling import SamplingRows

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
@needs_kernels
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])  # a wider one finds a mistake without harm
def test_buffers_do_not_take_the_default_dtype(kernels: Kernels, default: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 40, generator=generator)
    seed, positions, depth = torch.tensor([1, 2]), torch.arange(6).view(2, 3), torch.zeros(2, 3, dtype=torch.int64)
    ones, zero = torch.ones(2), torch.zeros_like(seed)
    params = SamplingRows(seed, ones, zero + 20, ones * 0.9, ones * 0.01, zero, zero[:, None])
    weight, hidden, ids = torch.randn(40, 64), torch.randn(2, 64), torch.arange(8).view(2, 4)
    trees = cpu_tree.load()
    assert trees is not None

    def floats() -> list[torch.Tensor]:
        found = [kernels.draw(logits, positions, depth, params, seed - 1, 4)[1]]
        found.append(kernels.gumbel(seed, positions, None, 40))
        found.append(kernels.top_tokens(logits, 4, (seed, seed, ones), None)[1])
        found.append(trees.exact_logits(hidden, weight, ids))
        return found

    expected = floats()
    first = grow.First(torch.arange(8).view(2, 4), -torch.arange(8.0).view(2, 4), torch.empty(2, 0))
    slots = SlotTable(1, 40, Device(torch.device("cpu")))
    pool = KVPool([LayerSpec(2, 16)], 40, torch.float32, torch.device("cpu"))
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(default)
        found = floats()
        growth = cpu_tree.RowGrowth(trees, slots, zero[:1], TreeShape(1, 4, 4), first, 0, 1)
        draft = growth.draft()
        scratch = NativeAttention(pool, kernels).scratch(9)
    finally:
        torch.set_default_dtype(before)
    assert all(x.dtype == torch.float32 and torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert growth._floats.dtype == scratch.dtype == torch.float32
    assert draft.tokens.tolist() == [[0, 0, 1, 2]] and bool(draft.alive.all())


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
