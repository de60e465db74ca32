"""GEMMs of few rows against float64 and, bit for bit, oneDNN; layers made of them against their parts."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from decoder_configs import changed, decoder_config
from torch import Tensor

from draftwing.kv.pool import KVPool, KVSpec
from draftwing.layers.decoder_layer import DecoderLayer
from draftwing.layers.linear import Linear
from draftwing.layers.linear_ops.base import PackMode
from draftwing.models.decoder import DecoderModel
from draftwing.ops import make_ops
from draftwing.ops.attention import Attend, Batch
from draftwing.ops.contracts import FEW_ROWS
from draftwing.ops.cpu.attention import NativeAttention
from draftwing.ops.cpu.blocks import BlockedGemm
from draftwing.ops.cpu.extension import load_extension
from draftwing.ops.cpu.gemm import PackedGemm, has_gemm, summed_in_blocks
from draftwing.ops.cpu.layer import NativeLayers
from draftwing.ops.cpu.workers import Workers
from draftwing.ops.torch import onednn

KERNELS = load_extension()
pytestmark = pytest.mark.skipif(
    not has_gemm() or not onednn.takes(torch.empty(0, dtype=torch.bfloat16)),
    reason="the C kernels were not built, or this CPU has no AVX-512 BF16",
)
CPU = torch.device("cpu")
OPS = make_ops(CPU)


@functools.cache
def own_gemm_is_used() -> bool:
    """Whether oneDNN lays out weights and sums on this CPU as the kernel does: with AMX, say, it may not. On which
    CPUs it must is in test_built."""
    linear = Linear(64, 64, False, torch.bfloat16, CPU)
    linear.weight.data.copy_(numbers(64, 64, seed=1))
    linear.pack(OPS)
    return isinstance(linear.op.first_gemm, PackedGemm)


@pytest.fixture
def known_layout() -> None:
    if not own_gemm_is_used():
        pytest.skip("this oneDNN packs weights, or sums, in another way than the kernel")


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.usefixtures("known_layout")
@pytest.mark.parametrize("block", [64, 192, 4096])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 64), (576, 192), (1184, 320)])
def test_equals_float64(inputs: int, outputs: int, block: int) -> None:
    weight, bias = numbers(outputs, inputs, seed=1), numbers(outputs, seed=2)
    gemm = PackedGemm(onednn.pack(weight), block, Workers())
    for rows in range(1, 14):
        x, residual = numbers(rows, inputs, seed=3), numbers(rows, outputs, seed=rows)
        expected = x.double() @ weight.double().T
        # Half a unit of bfloat16, and what float32 sums are off by.
        tolerance = {"rtol": 2**-8, "atol": 1e-3}
        torch.testing.assert_close(gemm.linear(x, None, None).double(), expected, **tolerance)
        expected += bias.double() + residual.double()
        torch.testing.assert_close(gemm.linear(x, bias, residual).double(), expected, **tolerance)


@pytest.mark.usefixtures("known_layout")
def test_rows_may_be_views() -> None:
    weight, x = numbers(64, 96, seed=1), numbers(4, 128, seed=2)
    gemm = PackedGemm(onednn.pack(weight), 64, Workers())
    assert torch.equal(gemm.linear(x[:, 32:], None, None), gemm.linear(x[:, 32:].contiguous(), None, None))


@pytest.mark.parametrize("shape", [(64, 100), (96, 64), (50, 64)])
def test_other_layouts_are_left_to_onednn(shape: tuple[int, int]) -> None:
    assert not PackedGemm.takes(onednn.pack(torch.zeros(shape, dtype=torch.bfloat16)))
    assert not PackedGemm.takes(onednn.pack(torch.zeros(64, 64)))


def test_a_wrong_block_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1,728 inputs no oneDNN is known to sum blocks of 192."""
    threads = torch.get_num_threads()
    monkeypatch.setattr("draftwing.ops.cpu.gemm._BLOCKS", (192,))
    assert summed_in_blocks.__wrapped__(1728, 64, threads) == 0


def tiny(eight_bits: bool = False, **changes: Any) -> DecoderModel:
    """changes: of the config."""
    config = decoder_config(
        hidden_size=128, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=32,
        ffn_size=160, vocab_size=50, max_positions=64,
    )  # fmt: skip
    config = changed(config, **changes)
    model = DecoderModel(config, torch.float32, "cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1 + (weight.dim() == 1))
    model = model.to(torch.bfloat16)
    model.set_max_positions(64)
    for module in model.layers.modules() if eight_bits else ():
        if isinstance(module, Linear):
            module.pack(OPS, PackMode(draft_8bit=True))
    model.pack(OPS)
    return model


def attend_to(pool: KVPool, rows: int) -> Attend:
    """Row 1 of two: a chain of `rows` queries after 19 cached tokens."""
    assert KERNELS is not None
    table = torch.stack((torch.zeros(64, dtype=torch.int64), torch.randperm(90, generator=torch.manual_seed(1))[:64]))
    step = torch.arange(rows)
    batch = Batch(
        torch.tensor([1]), step, 19 + step, table[1, 19 : 19 + rows], table, torch.tensor([19]),
        step.expand(1, rows, rows).contiguous(), (step + 1)[None], rows, bound=19 + rows,
    )  # fmt: skip
    return NativeAttention(pool, KERNELS, Workers()).bind(batch, 0)


@pytest.mark.parametrize("eight_bits", [False, True])
@pytest.mark.parametrize(("bias", "qk_norm"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("rows", [1, 2, 5, FEW_ROWS])
def test_a_layer_equals_its_parts(rows: int, bias: bool, qk_norm: bool, eight_bits: bool) -> None:
    if not eight_bits and not own_gemm_is_used():
        pytest.skip("this oneDNN packs weights, or sums, in another way than the kernel")
    model, pools = tiny(eight_bits, qkv_bias=bias, qk_norm=qk_norm), []
    layer = model.layers[1]
    assert isinstance(layer, DecoderLayer) and layer._whole is not None
    assert isinstance(layer.mlp.down.op.first_gemm, BlockedGemm) == eight_bits
    for _ in range(2):
        pools.append(KVPool([KVSpec(2, 32)] * 2, 100, torch.bfloat16, CPU))
        for kv in pools[-1].kv:
            kv.copy_(numbers(*kv.shape, seed=5))
    x = numbers(rows, 128, seed=6)
    cos, sin = model.ropes[0].table.index_select(0, 19 + torch.arange(rows)).unsqueeze(2).unbind(1)
    kept = x.clone()
    found = layer(x, cos, sin, attend_to(pools[0], rows))
    also = layer.mix(layer.attn_norm(x), x, cos, sin, attend_to(pools[0], rows))
    layer._whole = None
    expected = layer(x, cos, sin, attend_to(pools[1], rows))
    assert torch.equal(found, expected) and torch.equal(also, expected) and torch.equal(x, kept)
    assert all(torch.equal(*both) for both in zip(pools[0].kv, pools[1].kv, strict=True))


@pytest.mark.usefixtures("known_layout")
@pytest.mark.parametrize("aux_layers", [(), (1, 2), (3, 1), (2,), (1, 2, 1), (4,)])
@pytest.mark.parametrize("rows", [1, 5])
def test_a_model_in_one_call_equals_its_layers(rows: int, aux_layers: tuple[int, ...]) -> None:
    model, found = tiny(num_layers=3), []
    ids = 19 + torch.arange(rows)
    for whole in (True, False):
        pool = KVPool([KVSpec(2, 32)] * 3, 100, torch.bfloat16, CPU)
        for kv in pool.kv:
            kv.copy_(numbers(*kv.shape, seed=5))
        if not whole:
            model._whole[aux_layers] = model._whole[()] = None
        assert (model._whole_layers(aux_layers) is None) != whole
        hidden, kept = model(ids, ids, attend_to(pool, rows), aux_layers)
        assert (kept is None) == (not aux_layers)
        found.append([hidden, *pool.kv, *([kept] if kept is not None else [])])
    assert all(torch.equal(*both) for both in zip(*found, strict=True))
    assert model.final_aux_layer == 4 and model._whole_layers((0,)) is None and model._whole_layers((1, 4)) is None


@pytest.mark.usefixtures("known_layout")
def test_the_number_of_threads_changes_nothing() -> None:
    """Of a layer whose four GEMMs are all large enough for threads to share their outputs."""
    before, found = torch.get_num_threads(), []
    model, x = tiny(hidden_size=512, num_heads=10, ffn_size=1120), numbers(5, 512, seed=6)
    assert model.layers[0]._whole is not None
    cos, sin = model.ropes[0].table.index_select(0, 19 + torch.arange(5)).unsqueeze(2).unbind(1)
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            pool = KVPool([KVSpec(2, 32)] * 2, 100, torch.bfloat16, CPU)
            for kv in pool.kv:
                kv.copy_(numbers(*kv.shape, seed=5))
            found.append(model.layers[0](x, cos, sin, attend_to(pool, 5)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(y, found[0]) for y in found)


@pytest.mark.usefixtures("known_layout")
def test_a_layer_holds_the_memory_that_it_reads() -> None:
    """Though its modules' weights are moved, as `Module.to` does it."""
    model = tiny(qkv_bias=True)
    layer = model.layers[0]
    assert isinstance(layer, DecoderLayer) and layer._whole is not None and layer.mixer.qkv.bias is not None
    weights = layer.attn_norm.weight, layer.mlp_norm.weight, layer.mixer.qkv.bias
    before = [weight.data_ptr() for weight in weights]
    model._apply(lambda tensor: tensor.clone())
    assert not any(weight.data_ptr() in before for weight in weights)
    assert isinstance(layer._whole, NativeLayers)
    (own,) = layer._whole.layers
    held, passed = own.held[0], own.numbers.tolist()
    assert [tensor.data_ptr() for tensor in held if tensor is not None] == before
    assert set(before) <= set(passed)


@pytest.mark.usefixtures("known_layout")
def test_other_layers_are_run_by_parts() -> None:
    layer = tiny(head_dim=16).layers[0]
    assert isinstance(layer, DecoderLayer) and layer._whole is None
    assert isinstance(layer.mlp.down.op.first_gemm, PackedGemm)


def test_own_gemms_are_used_where_the_sums_are_onednns() -> None:
    linear = Linear(576, 192, False, torch.bfloat16, CPU)
    linear.weight.data.copy_(numbers(192, 576, seed=1))
    linear.pack(OPS)
    own = linear.op.first_gemm
    if not isinstance(own, PackedGemm):
        pytest.skip("this oneDNN sums in another order")
    x = numbers(300, 576, seed=2)
    every = linear(x)  # by oneDNN
    assert torch.equal(torch.cat([own.linear(part, None) for part in x.split(FEW_ROWS)]), every)
