"""Fixtures that several test folders share."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, so before any test module is

from draftwing.models.hub import fetch_default_model


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """The tests' tensors are tiny: a second thread only waits, and on a busy machine for long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's GGUF file, downloaded on first use."""
    return fetch_default_model(progress=False)


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """Commands set the level of the package's log, which other tests read."""
    logger = logging.getLogger("draftwing")
    before = logger.level
    yield
    logger.setLevel(before)
