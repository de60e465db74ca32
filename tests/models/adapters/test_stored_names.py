"""Adapters whose matrices are called as in checkpoints, as a model's own code does that is not in transformers, against
transformers with the same merged in float64: into a checkpoint, which it reads, or into those matrices that one is of.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import hybrid_models
import pytest
import torch
from models.adapters.test_families import LENGTH, MAKERS, OF_LAYERS, logits, write
from published import published, written
from reference.fused import AS_PUBLISHED as FUSED
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftwing.models.adapters.adapter import AdapterSlots
from draftwing.models.adapters.groups import kind_of
from draftwing.models.adapters.peft import read_folder
from draftwing.models.decoder import EXPERTS, WIDE
from draftwing.models.loader import load_model
from draftwing.ops import make_ops

STORED = {
    "dense": ("exaone", "laguna", "ling2", "mixtral", "phimoe", "sarvam"),
    "moe": ("deepseek-v3", "hunyuan-v3", "minimax-m2"),
    "hybrid": (
        "kimi-linear",
        "ling3",
        "ling3-plain",
        "lfm2-moe",
        "lfm3",
        "nemotron-h",
        "nemotron-h-latent",
        "jamba",
        "minimax",
    ),
}
QUICK = {"sarvam", "kimi-linear"}
# Names of matrices that no adapter is served of, but for routers.
UNSERVED = re.compile(r"norm|conv1d|conv\.conv|A_log|embed|altup|router|(?:^|\.)gate\.weight")


def matrices(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns those of layers that adapters are served of, by module."""
    return {
        name.removesuffix(".weight"): value
        for name, value in tensors.items()
        if value.dim() == 2 and name.endswith(".weight") and OF_LAYERS.search(name) and not UNSERVED.search(name)
    }


def check(folder: Path, adapter: Path, plain: Any, merged: Any) -> None:
    """folder: of a model.  adapter: of all of its matrices.  plain, merged: transformers', float64."""
    model = load_model(folder, torch.float32, "cpu")
    model.pack(make_ops(torch.device("cpu")), shared_apart=True)
    slots = AdapterSlots(model, 3, 4, wide=WIDE)
    fitted = slots.targets.fit(read_folder(adapter, 1 << 24))
    assert fitted.factors.keys() == slots.targets.targets.keys()
    slots.put(2, fitted)
    ids = torch.randint(1, 90, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    expected = [one(ids).logits.float() for one in (merged, plain)]
    assert not torch.allclose(*expected, atol=0.1)
    found = logits(model, ids.flatten(), torch.tensor([2] * LENGTH + [0] * LENGTH))
    for row, theirs in enumerate(expected):
        torch.testing.assert_close(found[row], theirs[row], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=() if name in QUICK else pytest.mark.exhaustive, id=name)
        for kind, names in STORED.items()
        for name in names
    ],
)
@torch.inference_mode()
def test_equal_to_a_merged_checkpoint(kind: str, name: str, tmp_path: Path) -> None:
    theirs: Any = MAKERS[kind][1](name)
    folder, other = hybrid_models.saved(tmp_path / "model", theirs), tmp_path / "merged"
    theirs.save_pretrained(other)
    tensors = load_file(folder / "model.safetensors")
    for module, added in write(tmp_path / "adapter", matrices(tensors), {}).items():
        tensors[f"{module}.weight"] = (tensors[f"{module}.weight"].double() + added).float()
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    merged: Any = type(theirs).from_pretrained(other, dtype=torch.float32)
    for one in (theirs, merged):
        if any(kind_of(name) == EXPERTS for name in tensors):
            one.set_experts_implementation("eager")  # others take no float64
    check(folder, tmp_path / "adapter", theirs.double().eval(), merged.double().eval())


@pytest.mark.parametrize("name", ["internlm2_5-7b-chat", "glm-4-9b-chat"])
@torch.inference_mode()
def test_equal_to_other_matrices_that_one_is_of(name: str, tmp_path: Path) -> None:
    folder, config = tmp_path / "model", published(name)
    plain, merged = (written(tmp_path / part, name).double() for part in ("model", "merged"))
    tensors = load_file(folder / "model.safetensors")
    own, first = merged.state_dict(), 0
    rows = {}
    for one, value in own.items():  # by rows: a number for each
        rows[one] = torch.arange(first, first + len(value)).unsqueeze(1)
        first += len(value)
    lies = FUSED[config["model_type"]](rows, merged.config)
    for module, added in write(tmp_path / "adapter", matrices(tensors), {}).items():
        at = lies[f"{module}.weight"].flatten()
        for one, numbers in rows.items():
            mine = (at >= numbers[0]) & (at <= numbers[-1])
            if mine.any():
                own[one][at[mine] - numbers[0]] += added[mine]
    check(folder, tmp_path / "adapter", plain, merged)
