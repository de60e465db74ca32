"""Everything falls back to torch where the C kernels are missing, and their tests are skipped: so this one is not."""

from __future__ import annotations

import importlib
import os
import shutil

import pytest


@pytest.mark.skipif(os.environ.get("DRAFTWING_NATIVE") == "0", reason="they are not wanted")
@pytest.mark.skipif(shutil.which("gcc") is None and shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("name", ["_cpu", "_cpu_tree", "_cpu_ngram"])
def test_the_extensions_were_built(name: str) -> None:
    import torch  # noqa: F401 (the extensions look for its threads)

    importlib.import_module(f"draftwing.kernels.{name}")
