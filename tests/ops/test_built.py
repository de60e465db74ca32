"""Everything falls back to torch where the C kernels are missing, and their tests are skipped: so this one is not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from draftwing.errors import ConfigError
from draftwing.ops import make_ops
from draftwing.ops.cpu.extension import checked, chosen_isa, load_extension, usable_sets
from draftwing.ops.cpu.gemm import PackedGemm
from draftwing.ops.cpu.isa import PLAIN

wanted = pytest.mark.skipif(os.environ.get("DRAFTWING_NATIVE") == "0", reason="they are not wanted")
compiled = pytest.mark.skipif(shutil.which("gcc") is None and shutil.which("cc") is None, reason="needs a C compiler")


@wanted
@compiled
def test_the_extension_was_built() -> None:
    """For this CPU, too: of what it runs, only what a compiler does not know may be missing."""
    assert PLAIN in usable_sets()
    assert chosen_isa() is not None and load_extension() is not None


def cpu_flags() -> set[str]:
    """Of the first core; empty where there is no such list."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())


@wanted
@compiled
def test_gemms_of_few_rows_are_ours() -> None:
    """On the CPUs that the kernel was written for; where oneDNN packs or sums in another way, it is left out."""
    import torch

    from draftwing.layers.linear import Linear

    flags = cpu_flags()
    if not {"avx512_bf16", "avx512_vnni"} <= flags or any(flag.startswith("amx") for flag in flags):
        pytest.skip("another CPU than one with AVX-512 BF16 and without AMX")
    generator = torch.Generator().manual_seed(0)
    for inputs, outputs in ((64, 64), (576, 960), (1536, 576)):
        linear = Linear(inputs, outputs, False, torch.bfloat16, torch.device("cpu"))
        linear.weight.data.copy_(torch.randn(outputs, inputs, generator=generator))
        linear.pack(make_ops(torch.device("cpu")))
        assert isinstance(linear.op.first_gemm, PackedGemm), (inputs, outputs)


def test_an_extension_of_other_sources_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"found 0; build it again \(pip install"):
        checked(ModuleType("old"))
