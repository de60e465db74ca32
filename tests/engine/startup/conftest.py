"""For tests of an engine's start."""

from __future__ import annotations

import pytest
from tiny_checkpoint import write_checkpoint


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose rows are whole blocks, so that the steps of quantised weights are recorded."""
    return str(write_checkpoint(tmp_path_factory.mktemp("models") / "tiny", hidden=64, heads=2, size=32))
