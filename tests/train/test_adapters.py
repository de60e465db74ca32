"""A target with an adapter in its weights, against the same served beside them."""

from __future__ import annotations

from pathlib import Path

import moe_models
import pytest
import torch
from tiny_adapters import ATTENTION, MLP, shapes_of, write_adapter

from draftwing.errors import CheckpointError
from draftwing.models.adapters.adapter import AdapterSlots
from draftwing.models.adapters.peft import read_folder
from draftwing.models.decoder import WIDE
from draftwing.models.loader import load_model
from draftwing.ops import make_ops
from draftwing.train.adapters import merge_adapter
from draftwing.train.capture import Causal

LENGTH = 20


@torch.inference_mode()
def test_merged_logits_are_those_beside_the_weights(tmp_path: Path) -> None:
    """Of experts and latents, too, whose matrices are several in one."""
    moe_models.reference("deepseek-v3").save_pretrained(tmp_path / "model")
    names = {
        name: shape for name, shape in shapes_of(tmp_path / "model").items()
        if not name.endswith("mlp.gate")
    }  # fmt: skip
    own = (*ATTENTION, *MLP, "kv_b_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")
    write_adapter(tmp_path / "adapter", tmp_path / "model", targets=own, shapes=names, strength=0.3)
    merged, plain = (load_model(tmp_path / "model", torch.float32, "cpu") for _ in range(2))
    merge_adapter(merged, tmp_path / "adapter")
    for model in (merged, plain):
        model.pack(make_ops(torch.device("cpu")))
    slots = AdapterSlots(plain, 1, 4, wide=WIDE)
    adapter = slots.targets.fit(read_folder(tmp_path / "adapter", 1 << 24))
    assert adapter.factors.keys() == slots.targets.targets.keys()
    slots.put(1, adapter)
    ids, positions = torch.randint(1, 101, (LENGTH,), generator=torch.Generator().manual_seed(1)), torch.arange(LENGTH)
    found = merged.logits(merged(ids, positions, Causal(1, LENGTH))[0])
    beside = [
        plain.logits(plain(ids, positions, Causal(1, LENGTH), adapted=which)[0])
        for which in (torch.ones(LENGTH, dtype=torch.int64), None)
    ]
    torch.testing.assert_close(found, beside[0], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(found, beside[1], atol=0.1)


def test_an_adapter_of_another_model(tmp_path: Path) -> None:
    moe_models.reference("glm4-moe").save_pretrained(tmp_path / "model")
    write_adapter(tmp_path / "adapter", tmp_path / "model", shapes={"model.layers.0.self_attn.q_proj": (8, 8)})
    with pytest.raises(CheckpointError, match="another"):
        merge_adapter(load_model(tmp_path / "model", torch.float32, "cpu"), tmp_path / "adapter")
