"""What the kernels compute has the same bits in every instruction set that this CPU runs."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from draftwing.ops.cpu.extension import load_extension, usable_sets

pytestmark = pytest.mark.slow  # processes of their own

PROBE = Path(__file__).with_name("isa_probe.py")
SETS = [isa.name for isa in usable_sets()] if load_extension() is not None else []


@functools.cache
def hashes(isa: str) -> dict[str, str]:
    """{case: sha256} of a process that runs this set."""
    environ = {**os.environ, "DRAFTWING_CPU_ISA": isa}
    out = subprocess.run([sys.executable, PROBE], env=environ, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout)


@pytest.mark.skipif(not SETS, reason="the C extension was not built, or is not wanted")
@pytest.mark.further(isa=SETS[2:-1])  # between the first with vectors and the best
@pytest.mark.parametrize("isa", SETS[1:])
def test_every_set_computes_the_same_bits(isa: str) -> None:
    expected, found = hashes("plain"), hashes(isa)
    assert len(expected) > 16
    assert [name for name in expected if expected[name] != found[name]] == []
