"""Adapters beside weights of each quantised format, held as a CPU or a GPU holds them: logits are those of the same
weights dequantised with the factors merged, and drafts change no text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_quantised as tiny
import torch
from block_ops import BlockTorchOps
from group_ops import Fp8TorchOps, GroupTorchOps
from models.adapters.test_families import LENGTH, PARAMETERS, logits, write
from models.quantised.test_groups import FORMATS as KEPT
from models.test_decoder import random_reference, write_gpt_oss
from moe_models import by_expert
from safetensors.torch import load_file, save_file
from tiny_checkpoint import VOCAB, write_tokenizer
from torch import Tensor, nn

from draftwing import LLM
from draftwing.layers.linear_ops.base import WeightFormat
from draftwing.layers.linear_ops.blocks import BlockFormat
from draftwing.layers.linear_ops.dense import DENSE
from draftwing.layers.linear_ops.groups import GroupFormat
from draftwing.models.adapters.adapter import AdapterSlots
from draftwing.models.adapters.peft import read_folder
from draftwing.models.decoder import WIDE
from draftwing.models.loader import load_model
from draftwing.ops import make_ops
from draftwing.ops.table import TorchOps

CPU = torch.device("cpu")
SIZES = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": VOCAB}
OF_EXPERTS = {"moe_intermediate_size": 128}
FORMATS = {name: tiny.FORMATS[name] for name in ("gptq order", "modelopt nvfp4")} | KEPT
HELD = ("dequantised", "as it is", "in blocks")
MXFP4 = "mxfp4"


def made(folder: Path, name: str, family: str) -> tuple[Path, Any, dict[str, Tensor]]:
    """A quantised checkpoint, an adapter of it, and transformers' model of the same weights dequantised, float64; what
    the adapter adds to these."""
    if name == MXFP4:
        theirs = write_gpt_oss(folder / "model", **SIZES)
    else:
        sizes = SIZES | (OF_EXPERTS if family == "qwen3-moe" else {})
        for part in ("model", "wide"):
            random_reference(family, **sizes).save_pretrained(folder / part)
        config, writer = FORMATS[name]
        stored = folder / "model" / "model.safetensors"
        save_file({one: part.clone() for one, part in by_expert(load_file(stored)).items()}, stored)
        exact = tiny.quantise(folder / "model", config, lambda _: writer)
        save_file(exact, folder / "wide" / "model.safetensors", {"format": "pt"})
        theirs = type(random_reference(family)).from_pretrained(folder / "wide", dtype=torch.float32).eval()
    write_tokenizer(folder / "model")
    named = theirs.named_modules()
    served = {one: part.weight for one, part in named if type(part) is nn.Linear and "layers." in one}
    experts = {one: part for one, part in theirs.named_parameters() if one.endswith(PARAMETERS)}
    if experts:
        theirs.set_experts_implementation("eager")
    with torch.no_grad():
        added = write(folder / "adapter", served, experts, across=name == MXFP4)
    return folder / "model", theirs.double(), added


def held(how: str, name: str) -> tuple[WeightFormat, TorchOps, torch.dtype]:
    """Returns the format of weights, operations, and the type of activations."""
    if how == "in blocks":
        return BlockFormat("Q8_0", make_ops(CPU)), make_ops(CPU), torch.float32
    if how == "dequantised":
        return DENSE, make_ops(CPU), torch.float32
    if name == MXFP4:
        blocks = BlockTorchOps(CPU)
        return GroupFormat(None, blocks), blocks, torch.float32
    in_fp8 = how == "activations in fp8"
    group = Fp8TorchOps(CPU) if in_fp8 else GroupTorchOps(CPU)
    return GroupFormat(None, group, 0 if in_fp8 else None), group, torch.bfloat16


CASES = [(name, family, how) for name in FORMATS for family in ("llama2", "qwen3-moe") for how in HELD]
CASES += [("fp8 block", "llama2", "activations in fp8"), *((MXFP4, "gpt-oss", how) for how in HELD)]
QUICK = [
    ("awq", "llama2", "as it is"), (MXFP4, "gpt-oss", "as it is"), ("fp8 block", "llama2", "activations in fp8"),
    ("gptq", "qwen3-moe", "in blocks"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "family", "how"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.exhaustive) for case in CASES],
)
@torch.inference_mode()
def test_logits(name: str, family: str, how: str, tmp_path: Path) -> None:
    """To 1e-4 in float32 (of MXFP4, whose logits are larger, 3e-4: transformers' own float32 is 1.8e-4 off), else as
    near as without an adapter: activations have 8 or 16 bits, and rows may go to other experts by that."""
    folder, theirs, added = made(tmp_path, name, family)
    form, ops, dtype = held(how, name)
    model = load_model(folder, dtype, "cpu", weight_format=form)
    kept = {"fp8", "int4", "mxfp4", "MXFP4", "Q8_0"} & set(model.weight_bytes())
    assert bool(kept) == (how != "dequantised" and (how == "in blocks" or name not in ("gptq order", "modelopt nvfp4")))
    model.pack(ops, shared_apart=True)
    slots = AdapterSlots(model, 2, 4, wide=WIDE)
    slots.put(2, slots.targets.fit(read_folder(tmp_path / "adapter", 1 << 24)))
    ids = torch.randint(1, 101, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    plain = theirs(ids).logits.float()
    for one, value in (*theirs.named_parameters(), *theirs.named_modules()):
        if one in added:
            (value.weight if isinstance(value, nn.Linear) else value).add_(added[one])
    adapted = theirs(ids).logits.float()
    assert not torch.allclose(adapted, plain, atol=0.1)
    found = logits(model, ids.flatten(), torch.tensor([2] * LENGTH + [0] * LENGTH)).float()
    if dtype == torch.float32 and how != "in blocks":
        for row, expected in enumerate((adapted, plain)):
            torch.testing.assert_close(found[row], expected[row], atol=3e-4 if name == MXFP4 else 1e-4, rtol=1e-4)
        return
    off, usual = (
        float((one - two).abs().median() / two.std()) for one, two in zip(found, (adapted[0], plain[1]), strict=True)
    )
    assert off < 2.5 * usual < 0.4, (off, usual)


QUICK_TEXTS = QUICK[0], QUICK[3]
TEXTS = [(name, family, how) for name, family, how in CASES if how in ("as it is", "in blocks")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "family", "how"),
    [pytest.param(*case, marks=() if case in QUICK_TEXTS else pytest.mark.exhaustive) for case in TEXTS],
)
def test_drafts_change_no_token(
    name: str, family: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does who runs beside a request."""
    folder, _, _ = made(tmp_path, name, family)
    if how == "as it is":
        monkeypatch.setattr("draftwing.engine.devices.base.make_ops", GroupTorchOps)
    options: dict[str, Any] = {
        "device": "cpu", "num_threads": 1, "max_total_tokens": 1024, "lora_modules": [f"one={tmp_path / 'adapter'}"],
        "dtype": "auto" if how == "in blocks" else "bfloat16",
    }  # fmt: skip
    generator, names = torch.Generator().manual_seed(2), ["one", None, "one", None]
    prompts = [torch.randint(1, 250, (9 + 20 * (i % 2),), generator=generator).tolist() for i in range(4)]
    params = [{"temperature": 0.8 * (i // 2), "sampling_seed": i, "max_new_tokens": 12, "ignore_eos": True}
              for i in range(4)]  # fmt: skip
    with LLM(str(folder), speculative_algorithm="none", **options) as llm:
        alone = [
            llm.generate(prompt, one, adapter=name)[0].token_ids
            for prompt, one, name in zip(prompts, params, names, strict=True)
        ]
        assert llm.generate(prompts[0], params[0])[0].token_ids != alone[0]
    with LLM(str(folder), speculative_algorithm="NGRAM", speculative_fixed_shape=True, **options) as llm:
        for _ in range(2):
            assert [one.token_ids for one in llm.generate(prompts, params, adapter=names)] == alone
        assert sum(llm.engine.stats()[one] for one in ("adapter_loads", "adapters_on_device")) == 2
