"""The kernel compiles for all that an engine asks for; what it gives is in `test_triton_attention`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton.experimental.gluon")
COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from draftwing.ops.triton import attention_hopper as hopper
from draftwing.ops.triton.attention_common import TILING_HOPPER

dtype, slots, heads, kv_heads, dim, aligned = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
kernel = hopper._hopper_prefill_kernel
constants = dict(
    HEADS=heads, KV_HEADS=kv_heads, DIM=dim, ROWS=128, UNIT=TILING_HOPPER.overlap_unit,
    STAGES=TILING_HOPPER.overlap_stages, LAST=hopper.MULTIPLYING, FETCHING=hopper.FETCHING, PDL=True,
    num_warps=hopper.WARPS,
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
@pytest.mark.parametrize("words", ["bf16 i32 32 8 128 1", "fp16 i64 5 5 128 0", "bf16 i64 14 2 64 1"])
def test_it_compiles_without_a_gpu(words: str) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", COMPILE, *words.split()], env=environ, check=True, timeout=240)
