"""Adapters of every matrix of every family, against transformers with the same merged into its weights in float64."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hybrid_models
import moe_models
import pytest
import torch
from models.test_decoder import FAMILIES, random_reference
from safetensors.torch import save_file
from torch import Tensor, nn

from draftwing.models.adapters.adapter import AdapterSlots
from draftwing.models.adapters.peft import read_folder
from draftwing.models.decoder import DecoderModel
from draftwing.models.loader import load_model
from draftwing.ops import make_ops
from draftwing.train.capture import Causal

CPU = torch.device("cpu")
MAKERS = {"dense": (FAMILIES, random_reference), "moe": (moe_models.KINDS, moe_models.reference)}
MAKERS["hybrid"] = hybrid_models.KINDS, hybrid_models.reference
# Which transformers has no class of, or one whose modules have other names; and whose indexers need a cache.
ELSEWHERE = ("ling2", "sarvam", "kimi-linear", "deepseek-v3.2", "glm-5")
CASES = [(kind, name) for kind, (names, _) in MAKERS.items() for name in names if name not in ELSEWHERE]
QUICK = {"llama3.2-tied", "qwen3.5-every", "phi3", "gemma3", "lfm2-plain"}
# Of layers, what no adapter is served of.
UNSERVED = ("experts", "router", "kv_b_proj", "per_layer", "block_sparse_moe", "weights_proj", "latent_proj")
OF_EXPERTS = ("shared_mlp", "shared_expert", "mlp.gate.")
LENGTH = 70


def write(folder: Path, modules: Mapping[str, nn.Linear], rank: int = 3) -> dict[str, Tensor]:
    """Writes an adapter of these matrices; returns what it adds to each, float64."""
    generator, added, tensors = torch.Generator().manual_seed(5), {}, {}
    for name, module in modules.items():
        outputs, inputs = module.weight.shape
        down = torch.randn(rank, inputs, generator=generator) / inputs**0.5
        up = torch.randn(outputs, rank, generator=generator) * module.weight.std() * inputs**0.5 / 8
        tensors[f"base_model.model.{name}.lora_A.weight"], tensors[f"base_model.model.{name}.lora_B.weight"] = down, up
        added[name] = 2 * up.double() @ down.double()
    folder.mkdir()
    (folder / "adapter_config.json").write_text(f'{{"peft_type": "LORA", "r": {rank}, "lora_alpha": {2 * rank}}}')
    save_file(tensors, folder / "adapter_model.safetensors")
    return added


def logits(model: DecoderModel, ids: Tensor, slots: Tensor | None) -> Tensor:
    hidden, _ = model(ids, torch.arange(LENGTH).repeat(2), Causal(2, LENGTH), adapted=slots)
    return model.logits(hidden).view(2, LENGTH, -1)


@pytest.mark.parametrize(
    ("kind", "name"),
    [pytest.param(*case, marks=() if case[1] in QUICK else pytest.mark.exhaustive, id=case[1]) for case in CASES],
)
@torch.inference_mode()
def test_equal_to_transformers(kind: str, name: str, tmp_path: Path) -> None:
    theirs: Any = MAKERS[kind][1](name)
    theirs.save_pretrained(tmp_path / "model")
    model = load_model(tmp_path / "model", torch.float32, "cpu")
    model.pack(make_ops(CPU))
    slots = AdapterSlots(model, 3, 4)
    every = {module: one for module, one in theirs.named_modules() if type(one) is nn.Linear and "layers." in module}
    left = UNSERVED if model.config.experts is None else (*UNSERVED, *OF_EXPERTS)
    served = {module: one for module, one in every.items() if not any(part in module for part in left)}
    ids = torch.randint(1, 101, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    plain = theirs(ids).logits
    for module, added in write(tmp_path / "adapter", served).items():
        served[module].weight.copy_((served[module].weight.double() + added).float())
    adapter = read_folder(tmp_path / "adapter", 1 << 24)
    fitted = slots.targets.fit(adapter)
    assert fitted.factors.keys() == slots.targets.targets.keys()
    slots.put(2, fitted)
    adapted = theirs(ids).logits
    assert not torch.allclose(adapted, plain, atol=0.1)
    found = logits(model, ids.flatten(), torch.tensor([2] * LENGTH + [0] * LENGTH))
    torch.testing.assert_close(found[0], adapted[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[1], plain[1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits(model, ids.flatten(), None), plain, atol=1e-4, rtol=1e-4)
