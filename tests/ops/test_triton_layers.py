"""The layer kernels against float64."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.layers.rope import RopeConfig
from draftwing.models.config import ModelConfig
from draftwing.models.decoder import DecoderModel
from draftwing.models.heads.eagle import EagleHead
from draftwing.models.heads.eagle3 import Eagle3Config, Eagle3Head
from draftwing.models.heads.mtp import MTPHead

layers = pytest.importorskip("draftwing.ops.triton.layers")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [100, 128, 576, 4096]
# One rounding of the result. Triton's interpreter cuts bfloat16 off instead of rounding it.
CUTS = os.environ.get("TRITON_INTERPRET") == "1"
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7 if CUTS else 2**-8, torch.float16: 2**-11}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Outputs start as NaN, so that an element left unwritten shows."""
    empty = torch.empty

    def full_of_nan(*args: object, **kwargs: object) -> Tensor:
        return empty(*args, **kwargs).fill_(float("nan"))  # type: ignore[call-overload, no-any-return]

    with monkeypatch.context() as patch:
        patch.setattr(layers.torch, "empty", full_of_nan)
        yield


def norm64(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def close(found: Tensor, expected: Tensor, roundings: float = 1.05) -> None:
    tolerance = roundings * TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance * 1e-2)


def made(device: torch.device, dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm(size: int, dtype: torch.dtype, device: torch.device) -> None:
    x, weight = made(device, dtype, 7, size), made(device, dtype, size, seed=1)
    x[1] *= 1e-3
    x[2] *= 100
    found = layers.rms_norm(x, weight, 1e-5)
    close(found, norm64(x, weight, 1e-5))
    for rows in (1, 3):
        assert torch.equal(layers.rms_norm(x[2 : 2 + rows], weight, 1e-5), found[2 : 2 + rows])
    if device.type == "cuda":
        reference = F.rms_norm(x, (size,), weight, 1e-5)
        torch.testing.assert_close(found, reference, rtol=2.1 * TOLERANCE[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_heads_within_wider_rows(dtype: torch.dtype, device: torch.device) -> None:
    qkv, weight = made(device, dtype, 5, 7, 64), made(device, dtype, 64, seed=1)
    for part in (qkv[:, :4], qkv[:, 4:6]):
        close(layers.rms_norm(part, weight, 1e-6), norm64(part, weight, 1e-6))


def test_rms_norm_of_squares_beyond_the_range_of_float16(device: torch.device) -> None:
    x = torch.full((1, 100), 1000.0, dtype=torch.float16, device=device)
    assert torch.equal(layers.rms_norm(x, torch.ones_like(x[0]), 1e-6), torch.ones_like(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_add_rms_norm(size: int, dtype: torch.dtype, device: torch.device) -> None:
    wide = made(device, dtype, 5, 2 * size)
    x, delta, weight = wide[:, :size], made(device, dtype, 5, size, seed=1), made(device, dtype, size, seed=2)
    before = wide.clone()
    total, found = layers.add_rms_norm(x, delta, weight, 1e-5)
    if CUTS:
        close(total, x.double() + delta.double())
    else:
        assert torch.equal(total, x + delta)
    close(found, norm64(total, weight, 1e-5))
    assert torch.equal(wide, before)
    for row in range(2, 4):
        alone = layers.add_rms_norm(x[row : row + 1], delta[row : row + 1], weight, 1e-5)
        assert torch.equal(alone[0][0], total[row]) and torch.equal(alone[1][0], found[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ffn", [100, 1536, 2048])
def test_silu_mul(ffn: int, dtype: torch.dtype, device: torch.device) -> None:
    x = made(device, dtype, 5, 2 * ffn) * 4
    x[0, :4] = torch.tensor([-1e4, 1e3, 0.0, -0.0], dtype=dtype)
    found = layers.silu_mul(x)
    gate, up = x.double().chunk(2, -1)
    close(found, gate * gate.sigmoid() * up, 2.1)
    assert torch.equal(layers.silu_mul(x[3:4]), found[3:4])


def test_silu_mul_keeps_nan_and_infinity(device: torch.device) -> None:
    x = torch.ones(2, 200, device=device)
    x[0, 3], x[1, 3] = float("nan"), float("inf")
    found = layers.silu_mul(x)
    assert found[0, 3].isnan() and found[1, 3].isinf()
    assert found.isfinite().sum() == found.numel() - 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [104, 576])  # rows begin at multiples of 16 bytes
def test_fuse_inputs_with_norms(size: int, dtype: torch.dtype, device: torch.device) -> None:
    table, wide = made(device, dtype, 11, size), made(device, dtype, 6, 3 * size, seed=1)
    feature = wide[:, size : 2 * size]
    norms = made(device, dtype, size, seed=2), made(device, dtype, size, seed=3)
    ids = torch.tensor([3, 0, 10, 3, 7, 1], device=device)
    found = layers.fuse_inputs(ids, table, feature, norms, 1e-5)
    expected = torch.cat((norm64(table[ids], norms[0], 1e-5), norm64(feature, norms[1], 1e-5)), -1)
    close(found, expected)
    # As the separate norms give it, bit for bit; so training and serving differ by the norm's own rounding only.
    assert torch.equal(found[:, :size], layers.rms_norm(table[ids], norms[0], 1e-5))
    assert torch.equal(found[:, size:], layers.rms_norm(feature, norms[1], 1e-5))
    assert torch.equal(layers.fuse_inputs(ids[2:3], table, feature[2:3], norms, 1e-5), found[2:3])


def test_fuse_inputs_with_the_feature_first_and_no_token_at_position_0(device: torch.device) -> None:
    table, feature = made(device, torch.float32, 11, 100), made(device, torch.float32, 4, 100, seed=1)
    norms = made(device, torch.float32, 100, seed=2), made(device, torch.float32, 100, seed=3)
    ids, positions = torch.tensor([3, 0, 10, 3], device=device), torch.tensor([5, 0, 1, 0], device=device)
    found = layers.fuse_inputs(ids, table, feature, norms, 1e-5, positions, feature_first=True)
    token = norm64(table[ids], norms[0], 1e-5)
    token[positions == 0] = 0
    close(found, torch.cat((norm64(feature, norms[1], 1e-5), token), -1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [100, 576])
def test_fuse_inputs_without_norms(size: int, dtype: torch.dtype, device: torch.device) -> None:
    table, feature = made(device, dtype, 11, size), made(device, dtype, 4, size, seed=1)
    ids = torch.tensor([3, 0, 10, 3], device=device)
    assert torch.equal(layers.fuse_inputs(ids, table, feature), torch.cat((table[ids], feature), -1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [100, 2048])
def test_chosen_logits(size: int, dtype: torch.dtype, device: torch.device) -> None:
    weight, wide = made(device, dtype, 11, size), made(device, dtype, 4, 2 * size, seed=1)
    hidden = wide[:, :size]
    ids = torch.tensor([[3, 0, 10], [3, 3, 1], [0, 1, 2], [10, 9, 8]], device=device)
    found = layers.chosen_logits(hidden, weight, ids)
    expected = torch.einsum("mh,mkh->mk", hidden.double(), weight[ids].double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
    # A logit has the same bits among others.
    assert torch.equal(layers.chosen_logits(hidden[1:2], weight, ids[1:2, :1]), found[1:2, :1])


def test_no_rows(device: torch.device) -> None:
    x, ids = torch.zeros(0, 64, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    weight, table = torch.ones(64, device=device), torch.ones(3, 64, device=device)
    assert layers.rms_norm(x, weight, 1e-5).shape == (0, 64)
    assert layers.add_rms_norm(x, x, weight, 1e-5)[1].shape == (0, 64)
    assert layers.silu_mul(x).shape == (0, 32)
    assert layers.fuse_inputs(ids, table, x).shape == (0, 128)
    assert layers.chosen_logits(x, table, ids.view(0, 1)).shape == (0, 1)


# ---- in the models ---------------------------------------------------------------------------------------------------

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM", hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    ffn_size=96, vocab_size=50, max_positions=32, norm_eps=1e-5, rope=RopeConfig(), qk_norm=True,
)  # fmt: skip


def own_value(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention to oneself, with enough of the queries and keys in it to notice them."""
    return (q * k.repeat_interleave(2, 1) + v.repeat_interleave(2, 1)).flatten(1)


def filled(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in module.parameters():
        values = torch.randn(param.shape, generator=generator)
        param.data.copy_(values * 0.1 if param.dim() == 2 else 1 + 0.1 * values)
        param.requires_grad_(False)


@pytest.fixture
def on_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is packed takes these kernels, and torch's products, on the CPU too."""
    for module in ("ops.pick", "models.decoder"):
        monkeypatch.setattr(f"draftwing.{module}.use_triton", lambda tensor: True)
    monkeypatch.setattr("draftwing.layers.linear.can_pack", lambda weight: False)


@pytest.mark.usefixtures("on_kernels")
@torch.inference_mode()
def test_packed_decoder_gives_the_same(device: torch.device) -> None:
    model = DecoderModel(CONFIG, torch.float32, device)
    filled(model, 0)
    model.set_max_positions(32)
    ids, positions = torch.arange(5, device=device), torch.arange(5, device=device)
    expected, expected_taps = model(ids, positions, own_value, (0, 1, 2))
    model.pack()
    assert model.layers[0]._add_norm is layers.add_rms_norm
    found, taps = model(ids, positions, own_value, (0, 1, 2))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    hidden, chosen = found[:4].view(2, 2, -1), torch.tensor([[[3, 1], [0, 49]], [[7, 7], [2, 5]]], device=device)
    weighed = model.exact_logits(hidden, chosen)
    torch.testing.assert_close(weighed, (hidden @ model.lm_head.weight.T).gather(2, chosen), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(taps, expected_taps, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("on_kernels")
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "eagle3 from normed", "mtp"])
@torch.inference_mode()
def test_packed_head_gives_the_same(kind: str, device: torch.device) -> None:
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
    features = made(device, torch.float32, 3, 64)
    before = features.clone()
    expected = head.run(ids, positions, features, 0, own_value)
    head.pack()
    found = head.run(ids, positions, features, 0, own_value)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(features, before)
    fused = head if kind == "eagle" else head.layers[0] if kind == "mtp" else head.fusion
    assert fused._fuse is layers.fuse_inputs
