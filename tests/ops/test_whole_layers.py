"""Layers, and the ends of draft heads, in one call: what their parts give, bit for bit. (The GEMMs themselves are in
gemm/test_gemm.py.)"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from block_ops import blocks
from decoder_configs import changed, decoder_config
from torch import Tensor

from draftwing.core import Chunk
from draftwing.kv.pool import KVPool, KVSpec
from draftwing.layers.block_indexer import BlockIndexConfig
from draftwing.layers.decoder_layer import DecoderLayer
from draftwing.layers.linear import Linear
from draftwing.layers.linear_ops.base import PackMode, ParamSlice
from draftwing.layers.linear_ops.blocks import BlockFormat
from draftwing.layers.mlp import UngatedMLP
from draftwing.layers.norm import RMSNorm
from draftwing.layers.part_configs import NormConfig
from draftwing.layers.rope import RopeConfig
from draftwing.models.decoder import DecoderModel
from draftwing.ops import make_ops
from draftwing.ops.attention.attend import Attend
from draftwing.ops.attention.batch import Batch, spans_of
from draftwing.ops.attention.cpu import NativeAttention
from draftwing.ops.cpu.arena import Arena
from draftwing.ops.cpu.extension import load_extension
from draftwing.ops.cpu.workers import Workers
from draftwing.ops.gemm.contract import FEW_ROWS
from draftwing.ops.gemm.cpu import HeadTopK, PackedGemm
from draftwing.ops.gemm.cpu_blocks import BlockedGemm
from draftwing.ops.gemm.stored import BlockRows
from draftwing.ops.types import NoiseKey
from draftwing.ops.whole_layers.cpu import NativeLayers
from draftwing.parallel.ranks import ALONE

KERNELS = load_extension()
pytestmark = [
    pytest.mark.skipif(KERNELS is None, reason="the C extension was not built"),
    pytest.mark.usefixtures("same_threads"),
]
CPU = torch.device("cpu")
OPS = make_ops(CPU)
ENTRIES = 80  # of a row's page table
# Nothing is a multiple of 64 but where K kinds want 256: 6 heads and 2 of keys and values of size 32, an MLP of 288.
CONFIG = decoder_config(
    hidden_size=256, num_layers=3, num_heads=6, num_kv_heads=2, head_dim=32,
    ffn_size=288, vocab_size=50, max_positions=ENTRIES, weight_format=BlockFormat("Q8_0", OPS),
)  # fmt: skip
BIASED = dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), True)


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight(kind: str, rows: int, columns: int, seed: int) -> BlockRows:
    if kind in ("Q8_0", "Q4_0", "Q4_K"):
        return OPS.quantize(numbers(rows, columns, seed=seed) / columns**0.5, kind)
    return blocks(kind, rows, columns, seed)


def fill(layer: DecoderLayer, seed: int) -> None:
    """With parts of all kinds."""
    attention, mlp = layer.mixer, layer.mlp
    q, kv, ffn = attention.o.in_features, attention.kv_heads * attention.head_dim, mlp.down.in_features
    parts: dict[Linear, list[tuple[str, int]]] = {
        attention.qkv: [("Q4_K", q), ("Q6_K", kv), ("Q5_1", kv)],
        attention.o: [("Q5_0", attention.o.out_features)],
        mlp.down: [("Q4_0" if seed % 2 else "Q8_0", mlp.down.out_features)],
    }
    if attention.index is not None:
        parts[attention.index.made] = [("Q8_0", attention.index.made.out_features)]
    if isinstance(mlp, UngatedMLP):
        parts[mlp.up] = [("Q5_K", ffn)]
    else:
        parts[mlp.gate_up] = [("Q5_K", ffn), ("Q4_1", ffn)]
    for linear, kinds in parts.items():
        start = 0
        for kind, rows in kinds:
            part = weight(kind, rows, linear.in_features, seed=100 * seed + start + linear.in_features)
            assert linear.op.keep(ParamSlice("a.weight", start, rows), part)
            start += rows
    with torch.no_grad():
        for vector in layer.parameters():
            vector.copy_(numbers(*vector.shape, seed=seed) * 0.2 + 1)


def tiny(**changes: Any) -> DecoderModel:
    """changes: of the config."""
    model = DecoderModel(changed(CONFIG, **changes), torch.float32, "cpu")
    for i, layer in enumerate(model.layers):
        assert isinstance(layer, DecoderLayer)
        fill(layer, i)
    with torch.no_grad():
        for part in (model.embed.weight, model.lm_head.weight, model.norm.weight):
            part.copy_(numbers(*part.shape, seed=9))
    model.set_max_positions(ENTRIES)
    model.pack(OPS)
    return model


def by_parts(model: DecoderModel) -> None:
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer)
        layer._whole = None
    model._whole = dict.fromkeys(model._whole)


def pool_of(model: DecoderModel, dtype: torch.dtype) -> KVPool:
    pool = KVPool(model.kv_layers, 3 * ENTRIES, dtype, CPU)
    for i, kv in enumerate(pool.kv):
        kv.copy_(numbers(*kv.shape, seed=i))
    return pool


def trees(count: int) -> Batch:
    """Of two rows, or one if the count is odd, after 19 and 33 tokens: each node under any of those before it."""
    rows = 2 - count % 2
    nodes, generator = count // rows, torch.Generator().manual_seed(count)
    table, prefix = page_table(), torch.tensor([19, 33])[:rows]
    paths: list[list[int]] = [[0]]
    for node in range(1, nodes):
        paths.append([*paths[int(torch.randint(node, (1,), generator=generator))], node])
    depth = max(map(len, paths))
    path = torch.tensor([own + [0] * (depth - len(own)) for own in paths])
    length = torch.tensor([len(own) for own in paths])
    positions = (prefix[:, None] + length - 1).flatten()
    slots = torch.stack([table[row, begin : begin + nodes] for row, begin in enumerate(prefix.tolist())]).flatten()
    return Batch(
        torch.arange(rows), torch.arange(count) % 50, positions, slots, table, prefix,
        path.expand(rows, nodes, depth).contiguous(), length.expand(rows, nodes).contiguous(), nodes,
    )  # fmt: skip


def chunks(count: int) -> Batch:
    """Of a row that begins, and perhaps one that has 11 tokens."""
    some = [Chunk(0, 0, count - count // 3, True)] + ([Chunk(1, 11, count // 3, True)] if count // 3 else [])
    table, spans = page_table(), spans_of(some)
    positions = torch.cat([torch.arange(span.start, span.start + span.length) for span in spans])
    slots = torch.cat([table[span.row, span.start : span.start + span.length] for span in spans])
    rows, none = torch.arange(len(spans)), torch.zeros(0, dtype=torch.int64)
    return Batch(rows, torch.arange(count) % 50, positions, slots, table, none, chunks=spans)


def page_table() -> Tensor:
    return torch.randperm(3 * ENTRIES, generator=torch.manual_seed(1))[: 2 * ENTRIES].view(2, -1) + 1


def attend_to(pool: KVPool, batch: Batch) -> Attend:
    """With memory of its own, just as large as it must be."""
    return NativeAttention(pool, KERNELS, Workers()).bind(batch, 0)


@pytest.mark.slow
@pytest.mark.further(pool_dtype=torch.float32, changes=[{}, BIASED, {"qk_norm": True}])
@pytest.mark.parametrize("pool_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "changes",
    [{}, BIASED, {"qk_norm": True}, {"num_heads": 2, "num_kv_heads": 1, "head_dim": 96, **BIASED, "qk_norm": True}],
    ids=["plain", "biases", "norms of heads", "large heads"],
)
@pytest.mark.parametrize("batch_of", [trees, chunks])
@pytest.mark.covering("batch_of")
def test_layers_equal_their_parts(
    batch_of: Callable[[int], Batch], changes: dict[str, Any], pool_dtype: torch.dtype
) -> None:
    whole, parts, aux = tiny(**changes), tiny(**changes), (1, 3)
    assert isinstance(whole._whole_layers(aux), NativeLayers) and parts._whole_layers(aux) is not None
    by_parts(parts)

    def run(model: DecoderModel, batch: Batch) -> list[Tensor]:
        pool = pool_of(model, pool_dtype)
        hidden, kept = model(batch.ids, batch.positions, attend_to(pool, batch), aux)
        assert kept is not None and hidden.isfinite().all()
        return [hidden, kept, *pool.kv]

    for rows in (1, 8, 9, 40):
        batch = batch_of(rows)
        torch.set_num_threads(1)
        expected = run(parts, batch)
        for threads in (1, 2, 3, 7) if rows == 9 else (3,):
            torch.set_num_threads(threads)
            assert all(torch.equal(*pair) for pair in zip(run(whole, batch), expected, strict=True)), (rows, threads)


@pytest.mark.parametrize("in_size", [256, 512])  # 512: two streams next to each other, as in EAGLE-3
@pytest.mark.slower(in_size=256)
@pytest.mark.further(rows=[8, 40], in_size=256)
@pytest.mark.parametrize("rows", [1, 8, 9, 40])
def test_a_layer_whose_input_is_normed_equals_its_parts(rows: int, in_size: int) -> None:
    layer = DecoderLayer(
        changed(CONFIG, qkv_bias=True).spread(ALONE)[0], 0, torch.float32, CPU, in_size, norms_input=False
    )
    fill(layer, 1)
    for part in layer.modules():
        if isinstance(part, (Linear, RMSNorm)):
            part.pack(OPS)
    layer.pack(OPS)
    model, batch = tiny(), trees(rows)
    cos, sin = model.ropes[0].table[batch.positions].unsqueeze(2).unbind(1)
    normed, x = numbers(rows, in_size, seed=1), numbers(rows, 256, seed=2)

    def run(threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        pool = pool_of(model, torch.bfloat16)
        return [layer.mix(normed, x, cos, sin, attend_to(pool, batch)), *pool.kv]

    assert isinstance(layer._whole, NativeLayers)
    found = [run(threads) for threads in (1, 2, 3, 7)]
    layer._whole = None
    expected = run(1)
    assert all(torch.equal(*pair) for some in found for pair in zip(some, expected, strict=True))


def test_one_call_takes_layers_that_follow_each_other_in_the_pool() -> None:
    every = [layer.weights() for layer in tiny().layers if isinstance(layer, DecoderLayer)]
    first, second, third = (one for one in every if one is not None)
    assert OPS.whole_layers([first, second, third]) is not None and OPS.whole_layers([second, third]) is not None
    assert OPS.whole_layers([first, third]) is None and OPS.whole_layers([second, first]) is None
    other = second._replace(shape=second.shape._replace(kv_heads=1))
    assert OPS.whole_layers([first, other]) is None


def test_a_model_with_two_rotary_embeddings_goes_layer_by_layer() -> None:
    layers = [replace(layer, mixer=replace(layer.mixer, rope=i % 2)) for i, layer in enumerate(CONFIG.layers)]  # type: ignore[type-var]
    model = tiny(layers=tuple(layers), ropes=(RopeConfig(), RopeConfig(100.0)))
    assert model._whole_layers(()) is None and all(layer._whole is not None for layer in model.layers)


def test_layers_that_the_call_does_not_know_go_part_by_part() -> None:
    wide, centred = (
        [replace(layer, norm=norm) for layer in CONFIG.layers]
        for norm in (NormConfig(wide=True), NormConfig(centred=True))
    )
    parallel = [replace(layer, parallel=True) for layer in centred]
    beside = [replace(layer, own_norm=True) for layer in parallel]
    scaled = [replace(layer, residual_scale=0.5) for layer in CONFIG.layers]
    after = [replace(layer, in_norms=False, out_norms=True) for layer in CONFIG.layers]
    queries, capped, chunks, clipped, later = (
        [replace(layer, mixer=replace(layer.mixer, **own)) for layer in CONFIG.layers]  # type: ignore[type-var]
        for own in (
            {"scaled_queries": True},
            {"cap": 30.0},
            {"chunk": 20},
            {"clip": 0.5},
            {"qk_norm": True, "norms_after": True},
        )
    )
    index = BlockIndexConfig(2, 32, 16, 2, 4)
    picking = [replace(layer, mixer=replace(layer.mixer, index=index)) for layer in CONFIG.layers]  # type: ignore[type-var]
    kinds = wide, centred, parallel, beside, scaled, after, queries, capped, chunks, clipped, later, picking
    for model in (tiny(activation="gelu"), tiny(activation="relu2"), *(tiny(layers=tuple(kind)) for kind in kinds)):
        assert model._whole_layers(()) is None and not any(layer._whole for layer in model.layers)


def test_layers_are_of_one_size() -> None:
    layers = [tiny(num_layers=1, ffn_size=size).layers[0] for size in (288, 320)]
    weights = [layer.weights() for layer in layers if isinstance(layer, DecoderLayer)]
    assert OPS.whole_layers(weights[:1]) is not None and OPS.whole_layers(weights) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("normed", "named", "threads"), [(False, False, 7), (True, True, 1), (True, False, 3), (False, True, 2)]
)
def test_a_readout_equals_its_parts(normed: bool, named: bool, threads: int, dtype: torch.dtype) -> None:
    dense, states = numbers(160, 96, seed=1).to(dtype), numbers(20, 160, seed=2).to(dtype)[:, 32:128]
    dense[7] = dense[150]  # a tie in another thread's outputs
    states[4] = dense[7] / 8
    names = torch.randperm(1000, generator=torch.manual_seed(0))[:160] if named else None
    norm = (numbers(96, seed=3).to(dtype), 1e-5) if normed else None
    gemm, bias = BlockedGemm([OPS.quantize(dense, "Q8_0")], dtype, Workers(), Arena()), numbers(160, seed=4).to(dtype)
    bias[7] = bias[150]
    assert HeadTopK.takes(gemm)
    readout = HeadTopK(gemm, bias, norm, names)
    x = OPS.rms_norm(states, *norm) if norm else states.contiguous()
    best, logp = OPS.top_tokens(gemm.linear(x, bias, None), 20, 3, None, None)
    best = best if names is None else names[best]
    torch.set_num_threads(threads)
    for places in (None, torch.tensor([4, 17, 0])):
        part = states if places is not None else states[:5]
        ids, scores = torch.full((len(part), 3), -1), torch.zeros(len(part), 3)
        readout.best(part, places, ids, scores)
        at = torch.arange(5) if places is None else places
        assert torch.equal(ids[at], best[at])
        torch.testing.assert_close(scores[at], logp[at])
        assert int((ids >= 0).any(1).sum()) == len(at)  # the others are as they were
    # With noise: two rows, the first of which is greedy, of three states each.
    floats = torch.tensor([[0.0, 1.3], [1.0, 1.0], [0.3, 0.2]])  # with min-p
    key = NoiseKey(torch.tensor([5, -(2**40)]), torch.tensor([70, 9]), floats)
    best, logp = OPS.top_tokens(gemm.linear(x[:6], bias, None), 2, 3, key, names)
    ids, scores = torch.full((6, 3), -1), torch.zeros(6, 3)
    readout.best(states[:6], None, ids, scores, key)
    assert torch.equal(ids, best if names is None else names[best])
    torch.testing.assert_close(scores, logp)


# -- with weights in bfloat16 -----------------------------------------------------------------------------------------


def half_numbers(*shape: int, seed: int) -> Tensor:
    return numbers(*shape, seed=seed).bfloat16()


def dense(eight_bits: bool = False, **changes: Any) -> DecoderModel:
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


def attend_to_chain(pool: KVPool, rows: int) -> Attend:
    """Row 1 of two: a chain of `rows` queries after 19 cached tokens."""
    assert KERNELS is not None
    table = torch.stack((torch.zeros(64, dtype=torch.int64), torch.randperm(90, generator=torch.manual_seed(1))[:64]))
    step = torch.arange(rows)
    batch = Batch(
        torch.tensor([1]), step, 19 + step, table[1, 19 : 19 + rows], table, torch.tensor([19]),
        step.expand(1, rows, rows).contiguous(), (step + 1)[None], rows, bound=19 + rows,
    )  # fmt: skip
    return NativeAttention(pool, KERNELS, Workers()).bind(batch, 0)


@pytest.mark.usefixtures("in_bfloat16")
@pytest.mark.parametrize("eight_bits", [False, True])
@pytest.mark.parametrize(("bias", "qk_norm"), [(True, False), (False, True)])
@pytest.mark.parametrize("rows", [1, 5, FEW_ROWS])
def test_a_layer_equals_its_parts(
    request: pytest.FixtureRequest, rows: int, bias: bool, qk_norm: bool, eight_bits: bool
) -> None:
    if not eight_bits:
        request.getfixturevalue("known_layout")
    model, pools = dense(eight_bits, qkv_bias=bias, qk_norm=qk_norm), []
    layer = model.layers[1]
    assert isinstance(layer, DecoderLayer) and layer._whole is not None
    assert isinstance(layer.mlp.down.op.first_gemm, BlockedGemm) == eight_bits
    for _ in range(2):
        pools.append(KVPool([KVSpec(2, 32)] * 2, 100, torch.bfloat16, CPU))
        for kv in pools[-1].kv:
            kv.copy_(half_numbers(*kv.shape, seed=5))
    x = half_numbers(rows, 128, seed=6)
    cos, sin = model.ropes[0].table.index_select(0, 19 + torch.arange(rows)).unsqueeze(2).unbind(1)
    kept = x.clone()
    found = layer(x, cos, sin, attend_to_chain(pools[0], rows))
    also = layer.mix(layer.attn_norm(x), x, cos, sin, attend_to_chain(pools[0], rows))
    layer._whole = None
    expected = layer(x, cos, sin, attend_to_chain(pools[1], rows))
    assert torch.equal(found, expected) and torch.equal(also, expected) and torch.equal(x, kept)
    assert all(torch.equal(*both) for both in zip(pools[0].kv, pools[1].kv, strict=True))


@pytest.mark.usefixtures("known_layout")
@pytest.mark.parametrize("aux_layers", [(), (1, 2), (3, 1), (2,), (1, 2, 1), (4,), (1, 4), (4, 1)])
@pytest.mark.parametrize("rows", [1, 5])
def test_a_model_in_one_call_equals_its_layers(rows: int, aux_layers: tuple[int, ...]) -> None:
    model, found = dense(num_layers=3), []
    ids = 19 + torch.arange(rows)
    for whole in (True, False):
        pool = KVPool([KVSpec(2, 32)] * 3, 100, torch.bfloat16, CPU)
        for kv in pool.kv:
            kv.copy_(half_numbers(*kv.shape, seed=5))
        if not whole:
            model._whole.update(dict.fromkeys([aux_layers, (1,), ()]))
        assert (model._whole_layers(aux_layers) is None) != whole
        hidden, kept = model(ids, ids, attend_to_chain(pool, rows), aux_layers)
        assert (kept is None) == (not aux_layers)
        found.append([hidden, *pool.kv, *([kept] if kept is not None else [])])
    assert all(torch.equal(*both) for both in zip(*found, strict=True))
    assert model.final_aux_layer == 4 and model._whole_layers((0,)) is None and model._whole_layers((1, 4, 2)) is None


@pytest.mark.usefixtures("known_layout")
def test_the_number_of_threads_changes_nothing() -> None:
    """Of a layer whose four GEMMs are all large enough for threads to share their outputs."""
    before, found = torch.get_num_threads(), []
    model, x = dense(hidden_size=512, num_heads=10, ffn_size=1120), half_numbers(5, 512, seed=6)
    assert model.layers[0]._whole is not None
    cos, sin = model.ropes[0].table.index_select(0, 19 + torch.arange(5)).unsqueeze(2).unbind(1)
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            pool = KVPool([KVSpec(2, 32)] * 2, 100, torch.bfloat16, CPU)
            for kv in pool.kv:
                kv.copy_(half_numbers(*kv.shape, seed=5))
            found.append(model.layers[0](x, cos, sin, attend_to_chain(pool, 5)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(y, found[0]) for y in found)


@pytest.mark.usefixtures("known_layout")
def test_a_layer_holds_the_memory_that_it_reads() -> None:
    """Though its modules' weights are moved, as `Module.to` does it."""
    model = dense(qkv_bias=True)
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
    layer = dense(head_dim=16).layers[0]
    assert isinstance(layer, DecoderLayer) and layer._whole is None
    assert isinstance(layer.mlp.down.op.first_gemm, PackedGemm)
