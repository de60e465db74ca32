"""The kernels on aarch64, in an emulator: the bits of this machine."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
PATH = Path(__file__).resolve().parents[2] / "tools" / "neon.py"


def test_aarch64_computes_the_same_bits() -> None:
    spec = importlib.util.spec_from_file_location("neon", PATH)
    assert spec is not None and spec.loader is not None
    neon = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(neon)
    if not neon.ready():
        pytest.skip("needs what `make neon` downloads, and its tools")
    assert neon.compare() == []
