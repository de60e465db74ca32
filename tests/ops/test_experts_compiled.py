"""Kernels of experts compiled for GPUs that are not there: tiles fit into shared memory."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from absent_gpu import compiled

pytestmark = pytest.mark.slow

LAUNCHING = """
from draftwing.ops.contracts import Routing
from draftwing.ops.cuda import gemm_experts
from draftwing.ops.groups import WHOLE, PackedGroups
from draftwing.ops.triton import experts
from draftwing.ops.triton.expert_gemm import ExpertGemm
from draftwing.ops.types import MXRows
def packed(rows, columns, bits, shift, fp8=False):
    scales = empty(rows // 16, 1 if shift == WHOLE else columns // 128, 8, 2, dtype=half)
    return PackedGroups(empty(rows // 16, columns * 2 * bits, dtype=torch.uint8), scales, None, bits, shift, None, fp8)
def mxfp4(rows, columns):
    return MXRows(*(empty(rows, columns // part, dtype=torch.uint8) for part in (2, 32)))
gemm_experts.takes = lambda *_: False  # weights that only Triton's kernels take have the same
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
def test_gemms_of_experts_fit(tmp_path: Path, capability: int, limit: int, tokens: int) -> None:
    sizes = [int(shared) for shared, *_ in compiled(LAUNCHING, tmp_path, capability, str(tokens))]
    assert len(sizes) > 2 * 4, "two GEMMs of each kind of weights, routing and sums"
    assert max(sizes) <= limit, sizes
