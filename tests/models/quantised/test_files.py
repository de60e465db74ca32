"""Files that libraries wrote (`write_files.py`): the logits are those of what each library makes of its file again."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from plain_attention import FunctionAttend
from safetensors.torch import load_file
from tiny_gguf import causal
from torch import Tensor

from draftwing.models.loader import load_model

FILES = Path(__file__).parent / "files"
NAMES = sorted(folder.name for folder in FILES.iterdir() if folder.is_dir())


@pytest.fixture(scope="module")
def logits() -> dict[str, Tensor]:
    return load_file(FILES / "logits.safetensors")


def test_files_of_each_library_differ_by_more_than_is_let_through(logits: dict[str, Tensor]) -> None:
    assert {name.partition("-")[0] for name in NAMES} == {"awq", "ct", "fp8", "gptq"} and set(NAMES) == set(logits)
    for one, other in itertools.combinations(NAMES, 2):
        same = one == "ct-w4a16" and other == "ct-w4a16-order"  # which says more, and has the same codes
        assert same or (logits[one] - logits[other]).norm() > 0.02 * logits[one].norm(), (one, other)


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_logits(name: str, logits: dict[str, Tensor]) -> None:
    model = load_model(FILES / name, torch.float32, "cpu")
    ids = torch.tensor([3, 1, 7, 7, 30, 2, 39, 0, 12])
    found = model.logits(model(ids, torch.arange(len(ids)), FunctionAttend(causal))[0])
    assert (found - logits[name]).norm() <= 1e-3 * logits[name].norm()
