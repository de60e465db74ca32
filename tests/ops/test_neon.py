"""aarch64, in an emulator: the kernels' bits are those of this machine, and so is the default model's text."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.slow
PATH = Path(__file__).resolve().parents[2] / "tools" / "neon.py"


@pytest.fixture(scope="module")
def neon() -> ModuleType:
    spec = importlib.util.spec_from_file_location("neon", PATH)
    assert spec is not None and spec.loader is not None
    neon = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(neon)
    if not neon.ready():
        pytest.skip("needs what `make neon` downloads, and its tools")
    return neon


def test_aarch64_computes_the_same_bits(neon: ModuleType) -> None:
    assert neon.compare(neon.KERNELS) == []


@pytest.mark.exhaustive  # two minutes for each instruction set
def test_aarch64_writes_the_same_text(neon: ModuleType, smollm2_path: Path) -> None:
    assert neon.compare(neon.TEXT) == []
