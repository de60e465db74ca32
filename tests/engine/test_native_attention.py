"""Speculation on equals speculation off with the native attention, as in test_exact; here in bfloat16, packed, where
nothing but equal bits gives equal text, and with keys and values in int8."""

import pytest
import torch

from draftwing.config.trees import PLAIN, TreeShape
from draftwing.ops import make_ops
from draftwing.ops.attention.cpu import NativeAttention
from draftwing.ops.attention.spec import TorchAttention
from draftwing.ops.cpu.extension import load_extension
from draftwing.ops.cpu.workers import Workers
from draftwing.ops.gemm import onednn

KERNELS = load_extension()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(KERNELS is None, reason="the C kernels were not built"),
]
TREE = TreeShape(4, 3, 11)


def native(pool):
    return NativeAttention(pool, KERNELS, Workers())


@pytest.fixture(scope="module", params=["bfloat16", "int8"])
def case(on_cpu, one_thread, request):
    """Model, prompts, parameters and the answers of plain decoding. int8: the pool of a model in float32."""
    kv_dtype = getattr(torch, request.param)
    model = on_cpu.tiny_model(dtype=torch.float32 if kv_dtype == torch.int8 else kv_dtype)
    if not onednn.takes(model.norm.weight):
        pytest.skip("this CPU has no bfloat16 products")
    model.pack(make_ops(torch.device("cpu")))
    prompts = on_cpu.prompts_for(12)
    params = [on_cpu.greedy(40) if i % 2 else on_cpu.seeded(40, seed=i) for i in range(len(prompts))]
    expected = on_cpu.plain_answers(model, prompts, params, attn=native, kv_dtype=kv_dtype)
    return model, prompts, params, expected, on_cpu.make_book(prompts, expected), kv_dtype


@pytest.mark.further(lag=0, chunk=64)
@pytest.mark.further(lag=0, shape=PLAIN)
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("shape", [PLAIN, TREE], ids=["plain", "tree"])
@pytest.mark.parametrize("chunk", [5, 64])
def test_equals_plain_decoding(harness, case, shape, chunk, lag):
    model, prompts, params, expected, book, kv_dtype = case
    drafter = None if shape == PLAIN else "oracle"
    rig = harness.Rig(
        model, shapes=(shape,), drafter=drafter, book=book, miss=2, chunk=chunk, lag=lag, attn=native, kv_dtype=kv_dtype
    )
    assert rig.answer(prompts, params).tokens == expected.tokens
    if shape == TREE:
        assert rig.accept_length > 1.5 and rig.stats.moved > 50


def test_ngram_drafts(harness, case):
    model, prompts, params, expected, _, kv_dtype = case
    rig = harness.Rig(model, shapes=(TreeShape(7, 4, 8),), drafter="ngram", attn=native, kv_dtype=kv_dtype)
    assert rig.answer(prompts, params).tokens == expected.tokens
    assert rig.accept_length > 1.02


def test_equals_torchs_backend(on_cpu):
    """In float32: of other types the last bits differ."""
    model, prompts = on_cpu.tiny_model(), on_cpu.prompts_for(12)
    params = [on_cpu.greedy(40) if i % 2 else on_cpu.seeded(40, seed=i) for i in range(len(prompts))]
    found, expected = (on_cpu.plain_answers(model, prompts, params, attn=attn) for attn in (native, TorchAttention))
    assert found.tokens == expected.tokens


@pytest.mark.parametrize("drafter", ["oracle", "ngram"])
def test_the_default_dtype_changes_nothing(harness, case, drafter):
    """What the kernels fill is in float32, not in torch's default type."""
    model, prompts, params, expected, book, kv_dtype = case
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        rig = harness.Rig(model, shapes=(TREE,), drafter=drafter, book=book, miss=2, attn=native, kv_dtype=kv_dtype)
        found = rig.answer(prompts[:4], params[:4]).tokens
    finally:
        torch.set_default_dtype(before)
    assert found == {name: expected.tokens[name] for name in found} and len(found) == 4
