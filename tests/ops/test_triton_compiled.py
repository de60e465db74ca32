"""Triton's kernels compiled for GPUs that are not there: tiles fit into shared memory, and products go 16 keys at a
time. Their hashes do not depend on the order in which they are made."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from absent_gpu import ARITHMETIC
from absent_gpu import compiled as compiled_by
from forked_scripts import Forks

# Tiling, type of the pool, compute capability, and bytes of a block there: 8.6 has the least of those that Triton
# kernels run on.
TARGETS = [
    ("TILING_HOPPER", "bfloat16", 90, 227 << 10), ("TILING_HOPPER", "float8_e4m3fn", 90, 227 << 10),
    ("TILING", "bfloat16", 86, 99 << 10),
]  # fmt: skip
ATTENTION = """
from draftwing.ops.attention.batch import FULL, AttentionKind, Ragged
from draftwing.ops.attention import triton_common, triton_decode as attention
every = sys.argv[4] == "every"
windowed = AttentionKind(128, empty(32, dtype=torch.float32), cap=30.0)
kinds = [(1, 32, 6, True, FULL)]
if every:
    kinds += [(*case, FULL) for case in ((1, 1, 1, True), (1, 4, 4, True), (1, 7, 4, False), (16, 32, 6, False))]
if every and sys.argv[1:3] == ["90", "bfloat16"]:
    kinds += [(1, nodes, depth, True, windowed) for nodes, depth in [(32, 6), (1, 1)]]
for batch, nodes, depth, exact, kind in kinds:
    kv = empty(4096, 8, 2, 128, dtype=getattr(torch, sys.argv[2]))
    attention.tree_attention(
        empty(batch * nodes, 32, 128, dtype=half), kv, empty(batch + 1, 8192), empty(batch), empty(batch),
        empty(batch, nodes, depth), empty(batch, nodes), empty(batch * nodes, 4096, dtype=half),
        attention.Workspace(torch.device("meta")), exact, nodes, getattr(triton_common, sys.argv[3]),
        kind=kind, inputs_ready=True,
    )
if every:
    attention.tree_attention(  # as drafters have it: nothing is read early
        empty(32, 32, 128, dtype=half), kv, empty(2, 8192), empty(1), empty(1), empty(1, 32, 6), empty(1, 32),
        empty(32, 4096, dtype=half), attention.Workspace(torch.device("meta")), True, 32,
        getattr(triton_common, sys.argv[3]),
    )
for exact in (True, False)[: 1 + every]:  # 16 trees of 4 nodes on average
    ragged = Ragged(empty(16), empty(16), empty(17), 32, 4)
    attention.tree_attention(
        empty(64, 32, 128, dtype=half), kv, empty(17, 8192), empty(64), empty(64), empty(64, 1, 6), empty(64, 1),
        empty(64, 4096, dtype=half), attention.Workspace(torch.device("meta")), exact, 32,
        getattr(triton_common, sys.argv[3]), ragged, inputs_ready=True,
    )
"""


Compiled = Callable[..., list[list[str]]]


@pytest.fixture
def compiled(forks: Forks, tmp_path: Path) -> Compiled:
    """Compiles what a script launches, see `absent_gpu.compiled`."""
    return partial(compiled_by, forks, tmp_path)


@pytest.mark.further(pool="float8_e4m3fn")
@pytest.mark.further(capability=86)
@pytest.mark.further(cases="every")
@pytest.mark.parametrize("cases", ["largest", "every"])
@pytest.mark.parametrize(("tiling", "pool", "capability", "limit"), TARGETS)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton")
def test_attention_fits(compiled: Compiled, tiling: str, pool: str, capability: int, limit: int, cases: str) -> None:
    launches = compiled(ATTENTION, capability, pool, tiling, cases)
    launches = [each for each in launches if len(each) > 1]  # without what finds the groups of nodes, once a forward
    windowed = (capability, pool) == (90, "bfloat16")
    many = 10 + 3 * windowed if cases == "every" else 3
    assert len(launches) == many, "a large tree takes two launches"
    assert max(int(shared) for shared, *_ in launches) <= limit, launches
    # Neighbours along a product that a lane holds. With 4 two instructions have 32 keys between them, and a row's bits
    # would depend on what lies next to its own chunk of 16.
    assert all(widths == ["2"] for _, *widths in launches), launches


LATENTS = """
from draftwing.ops.attention.batch import AttentionKind
from draftwing.ops.attention import triton_common, triton_decode as attention, triton_prefill
tiling = getattr(triton_common, sys.argv[3])
kv, kind = empty(4096, 1, 1, 576, dtype=getattr(torch, sys.argv[2])), AttentionKind(scalar=192, values=512)
for nodes, depth, exact in [(1, 1, True), (8, 5, True), (8, 5, False), (60, 6, True)]:
    attention.tree_attention(
        empty(nodes, 16, 576, dtype=half), kv, empty(2, 8192), empty(1), empty(1), empty(1, nodes, depth),
        empty(1, nodes), empty(nodes, 16 * 512, dtype=half), attention.Workspace(torch.device("meta")), exact, nodes,
        tiling, kind=kind, inputs_ready=True,
    )
for exact in (True, False):
    triton_prefill.prefill_attention(
        empty(512, 16, 576, dtype=half), kv, empty(2, 8192), empty(1), empty(32, 6, dtype=torch.int32),
        empty(512, 16 * 512, dtype=half), attention.Workspace(torch.device("meta")), exact, tiling, kind=kind,
    )
"""


@pytest.mark.exhaustive  # of other heads the same is seen in less time
@pytest.mark.parametrize(
    ("tiling", "pool", "capability"),
    [
        ("TILING_WIDEST", "bfloat16", 86),
        ("TILING_LATENT_HOPPER", "bfloat16", 90),
        ("TILING_LATENT_HOPPER", "float8_e4m3fn", 90),
    ],
)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton")
def test_latents_fit(compiled: Compiled, tiling: str, pool: str, capability: int) -> None:
    launches = [each for each in compiled(LATENTS, capability, pool, tiling) if len(each) > 1]
    limit = next(most for *_, of, most in TARGETS if of == capability)
    assert len(launches) == 6 and max(int(shared) for shared, *_ in launches) <= limit, launches
    assert all(widths == ["2"] for _, *widths in launches), launches


SHARES = """
from draftwing.ops.gemm.triton_shares import TritonSharesGemm
gemm = TritonSharesGemm()
for features, columns in ((4096, 4096), (2, 8128)):
    x, weight = empty(1000, columns, dtype=half), empty(features, columns, dtype=half)
    gemm.linear(x, weight, None)
    gemm.gated(x, weight, None)
"""


@pytest.mark.exhaustive  # compiled by an engine of a card as well
@pytest.mark.parametrize("capability", [86, 120])
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton")
def test_products_in_shares_compile(compiled: Compiled, capability: int) -> None:
    """An instruction has the columns that lie together, as gemm.cu's has."""
    launches = compiled(SHARES, capability)
    assert launches and all(int(shared) <= 99 << 10 and widths == ["2"] for shared, *widths in launches), launches


ADAPTERS = """
from draftwing.ops.adapters.spec import AdapterWeights
from draftwing.ops.adapters.triton import TritonAdapterOps
rank, dtype = int(sys.argv[2]), getattr(torch, sys.argv[3])
for inputs, ends in ((4096, [4096, 5120, 6144]), (4096, [14336, 28672]), (11008, [4096])):
    weights = AdapterWeights.empty(8, rank, inputs, ends, dtype, torch.device("meta"))
    for rows in (1, 65):
        x, y = empty(rows, inputs, dtype=dtype), empty(rows, ends[-1], dtype=dtype)
        TritonAdapterOps().adapt(y, x, weights, empty(rows))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rank", [16, 64, 256])
@pytest.mark.parametrize("capability", [90, 86])
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton")
def test_adapters_compile(compiled: Compiled, capability: int, rank: int, dtype: str) -> None:
    launches = compiled(ADAPTERS, capability, str(rank), dtype)
    # With more than 48 KB a kernel would leave the next ones little of their L1 cache.
    assert len(launches) == 8 and max(int(shared) for shared, *_ in launches) <= 48 << 10, launches


EXPERTS = """
from draftwing.ops.experts import cuda, triton as experts
from draftwing.ops.experts.routing import Routing
from draftwing.ops.gemm.groups import WHOLE, PackedGroups
from draftwing.ops.experts.triton_gemm import ExpertGemm
from draftwing.ops.gemm.stored import MXRows
def packed(rows, columns, bits, shift, fp8=False):
    scales = empty(rows // 16, 1 if shift == WHOLE else columns // 128, 8, 2, dtype=half)
    return PackedGroups(empty(rows // 16, columns * 2 * bits, dtype=torch.uint8), scales, None, bits, shift, None, fp8)
def mxfp4(rows, columns):
    return MXRows(*(empty(rows, columns // part, dtype=torch.uint8) for part in (2, 32)))
cuda.takes = lambda *_: False  # weights that only Triton's kernels take have the same
count, top_k, hidden, ffn = 128, 8, 2880, 768
for tokens in [int(sys.argv[2])]:
    routed = experts.route(empty(tokens, count, dtype=half), Routing(top_k))
    for make in (
        lambda rows, columns: empty(rows, columns, dtype=half), lambda rows, columns: packed(rows, columns, 4, 1),
        lambda rows, columns: packed(rows, columns, 8, WHOLE, True), mxfp4,
    ):
        x = empty(tokens, hidden, dtype=half)
        inner = ExpertGemm(make(count * 2 * ffn, hidden), count).gated(x, None, routed, 0.0)
        outs = ExpertGemm(make(count * hidden, ffn), count).linear(inner, None, routed)
    experts.mix(outs, routed, empty(tokens, hidden, dtype=half))
"""


@pytest.mark.further(capability=86)
@pytest.mark.further(tokens=8)  # whose tiles are smaller
@pytest.mark.parametrize("tokens", [8, 512])
# Compute capability and bytes of a block there; 8.6 has the least of those that Triton kernels run on.
@pytest.mark.parametrize(("capability", "limit"), [(90, 227 << 10), (86, 99 << 10)])
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton")
def test_gemms_of_experts_fit(compiled: Compiled, capability: int, limit: int, tokens: int) -> None:
    sizes = [int(shared) for shared, *_ in compiled(EXPERTS, capability, str(tokens))]
    assert len(sizes) > 2 * 4, "two GEMMs of each kind of weights, routing and sums"
    assert max(sizes) <= limit, sizes


NORMS = """
from draftwing.ops.experts import triton as experts
from draftwing.ops.experts.routing import Routed
from draftwing.ops.norms import triton as norms
size, dtype, its = int(sys.argv[2]), getattr(torch, sys.argv[3]), getattr(torch, sys.argv[4])
x, delta = (empty(4, size, dtype=dtype) for _ in range(2))
weight, other = empty(size, dtype=its), empty(size, dtype=its)
norms.rms_norm(x, weight, 1e-5)
norms.fuse_inputs(empty(4), empty(9, size, dtype=dtype), x, (weight, other), 1e-5)
for scale in (1.0, 0.21875):
    norms.add_rms_norm(x, delta, weight, 1e-5, scale)
routed, y = Routed(empty(4, 3), empty(4, 3, dtype=torch.float32), 6, None), empty(12, size, dtype=dtype)
for scale in (1.0, 0.21875):
    experts.mix_norm(y, routed, x, weight, 1e-5, scale)
"""


@pytest.mark.slow
@pytest.mark.further(dtype="bfloat16")
@pytest.mark.further(size=[304, 1000, 2880])
@pytest.mark.parametrize("size", [304, 576, 1000, 2880])
@pytest.mark.parametrize(("dtype", "weights"), [("float32",) * 2, ("bfloat16",) * 2, ("bfloat16", "float32")])
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton")
def test_fused_norms_round_as_separate_ones(compiled: Compiled, dtype: str, weights: str, size: int) -> None:
    """A product with a factor is rounded before it is added, which the interpreter shows in any case, and a row's sum
    has one order. The factor is one of bfloat16, in which the compiler multiplies then."""
    found = compiled(NORMS, 90, str(size), dtype, weights, end=ARITHMETIC)
    norms, layouts = found, [layout for _, _, _, _, *layout in found]
    assert len(norms) == 6 and len(layouts[0]) == 3 and all(layout == layouts[0] for layout in layouts), found
    rms, fused, plain, scaled, mixed, scaled_mixed = ([int(count) for count in counts[1:4]] for counts in norms)
    assert fused[0] == 2 * rms[0] and plain[0] == scaled[0] == rms[0] and mixed[0] == scaled_mixed[0], found
    if dtype == "float32":  # else sums of two numbers may be made in 16 bits, which rounds alike
        assert plain[2] == scaled[2] and mixed[2] == scaled_mixed[2], found


PEER_NORMS = """
from draftwing.ops.norms import triton as norms
from draftwing.ops.peer_sums.triton import Peers, sum_under
size, its = int(sys.argv[2]), getattr(torch, sys.argv[3])
x, weight = empty(4, size, dtype=half), empty(size, dtype=its)
peers = Peers(1, (1 << 40, 1 << 41, 1 << 42, 1 << 43), 1 << 40, empty(4), empty(128))
norms.rms_norm(x, weight, 1e-5)
norms.rms_norm_fp8(x, weight, 1e-5)
for quantises in (False, True):
    sum_under(peers, x, None, x, weight, 1e-5, quantises)
"""


@pytest.mark.slow
@pytest.mark.further(size=[1024, 4096])
@pytest.mark.further(weights="float32")
@pytest.mark.parametrize("size", [1024, 4096, 8192])
@pytest.mark.parametrize("weights", ["bfloat16", "float32"])
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton")
def test_norms_of_sums_over_ranks_have_the_order_of_others(compiled: Compiled, weights: str, size: int) -> None:
    """A row's sum of squares, and as many products that are rounded with a sum as alone."""
    found = compiled(PEER_NORMS, 90, str(size), weights, end=ARITHMETIC)
    layouts = [layout for _, _, _, _, *layout in found]
    assert len(found) == 4 and len(layouts[0]) == 3 and all(layout == layouts[0] for layout in layouts), found
    plain, plain_fp8, under, under_fp8 = ([int(count) for count in counts[1:3]] for counts in found)
    assert under == plain and under_fp8 == plain_fp8, found


pytest.importorskip("triton.experimental.gluon")
COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from draftwing.ops.attention import triton_hopper as hopper
from draftwing.ops.attention.triton_common import TILING_HOPPER

kernel = hopper._hopper_prefill_kernel
for words in sys.argv[1:]:
    exact, dtype, slots, *numbers = words.split()
    heads, kv_heads, dim, aligned = map(int, numbers)
    constants = dict(
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, ROWS=128, LAST=hopper.MULTIPLYING, FETCHING=hopper.FETCHING, PDL=True,
        num_warps=hopper.WARPS, **hopper.shape_of(TILING_HOPPER, exact == "exact"),
    )
    types = dict.fromkeys(constants, "constexpr") | dict.fromkeys(["q", "kv", "out"], "*" + dtype)
    types |= dict.fromkeys(["parts", "stats"], "*fp32") | dict.fromkeys(["tiles", "tickets"], "*i32")
    types |= {"table": "*" + slots, "rows": "*i64"} | dict.fromkeys(["scale", "v_scale"], "fp32")
    types |= dict.fromkeys(["q_stride", "table_stride"], "i32")
    names = kernel.arg_names
    even = ["q", "kv", "table", "out", "parts", "stats", "tickets", "q_stride", *["table_stride"] * aligned]
    source = GluonASTSource(
        fn=kernel, signature={name: types[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in even},
    )
    options = dict(num_warps=hopper.WARPS, launch_pdl=True)
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).metadata
    assert found.num_warps == 3 * hopper.WARPS and found.shared <= 227 << 10, found
"""


@pytest.mark.slow
def test_prefill_of_hopper_compiles_for_all_that_an_engine_asks_for() -> None:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    words = [
        "exact bf16 i32 32 8 128 1",
        "fast bf16 i32 32 8 128 1",
        "fast fp16 i64 5 5 128 0",
        "exact bf16 i64 14 2 64 1",
    ]
    subprocess.run([sys.executable, "-c", COMPILE, *words], env=environ, check=True, timeout=240)


# -- hashes -----------------------------------------------------------------------------------------------------------

HASHES = """
import json, os, random, sys
import draftwing.ops.triton.ops
from draftwing.ops.triton.hashes import hash_all
from triton.runtime.jit import JITFunction
found = {f"{name}.{key}": value for name, module in [*sys.modules.items()] if name.startswith("draftwing.ops.")
         for key, value in vars(module).items() if isinstance(value, JITFunction)}
for all_at_once, seed in ((True, 1), (True, 2), (False, 2)):
    if child := os.fork():  # which nothing of the others is hashed in
        assert not os.waitpid(child, 0)[1]
        continue
    if all_at_once:
        hash_all()
    order = sorted(found)
    random.Random(seed).shuffle(order)
    print(json.dumps({name: found[name].cache_key for name in order}), flush=True)
    os._exit(0)
"""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_order_of_launches_does_not_matter() -> None:
    run = [sys.executable, "-c", HASHES]
    done = subprocess.run(run, env=os.environ | {"TRITON_INTERPRET": "0"}, check=True, capture_output=True, text=True)
    first, second, launched = map(json.loads, done.stdout.splitlines())
    assert len(first) > 100 and first == second
    assert launched != second, "Triton has mended it: nothing has to be done any more"


def test_every_rank_hashes_before_it_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    from draftwing.engine import build
    from draftwing.engine.devices import pick_device

    class Hashed(Exception):
        pass

    def hashing() -> None:
        raise Hashed

    device = pick_device("cpu")
    monkeypatch.setattr(device.ops, "hash_kernels", hashing)
    monkeypatch.setattr(build, "pick_device", lambda *asked: device)
    monkeypatch.setattr(device, "set_threads", lambda *threads: None)
    setup = SimpleNamespace(options=SimpleNamespace(device="cpu", num_threads=1), rank=1)
    with pytest.raises(Hashed):
        build.build_rank(setup, lambda: None)
