"""Triton kernels run on the GPU where there is one and in Triton's interpreter elsewhere (tests/shared_fixtures.py)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_triton_*.py"]


@pytest.fixture
def same_threads() -> Iterator[None]:
    """The test may change how many threads torch has."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
