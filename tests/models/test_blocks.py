"""Models and draft heads whose weights stay in blocks: they give what the same weights give in float32."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from block_ops import BlockTorchOps
from gguf import GGMLQuantizationType as Type
from plain_attention import FunctionAttend
from reference import exact_heads
from safetensors.torch import load_file, save_file
from tiny_checkpoint import write_checkpoint
from tiny_gguf import HEAD_DIM, HEADS, KV_HEADS, causal, write
from torch import Tensor

from draftwing.layers.linear import Linear
from draftwing.layers.linear_ops.base import PackedBlocks
from draftwing.layers.linear_ops.blocks import BlockFormat, block_sizes
from draftwing.models.decoder import DecoderModel
from draftwing.models.heads.loader import load_draft_head, load_mtp_head
from draftwing.models.loader import load_model
from draftwing.ops.table import TorchOps

CPU = torch.device("cpu")
OPS = BlockTorchOps(CPU)
Q8 = BlockFormat("Q8_0", OPS)


@torch.inference_mode()
def outputs(model: DecoderModel) -> tuple[Tensor, Tensor]:
    ids = torch.tensor([3, 1, 7, 7, 30, 2, 39, 0, 12])
    hidden, _ = model(ids, torch.arange(9), FunctionAttend(causal))
    return hidden, model.logits(hidden)


def linears(model: torch.nn.Module) -> dict[str, Linear]:
    return {name: part for name, part in model.named_modules() if isinstance(part, Linear)}


@pytest.mark.further(kind=[Type.Q4_1, Type.F16], tied=False)
@pytest.mark.further(kind=[Type.Q8_0, Type.F16], arch=["qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", [Type.Q4_1, Type.Q8_0, Type.F16])
def test_a_file_gives_what_it_gives_dequantised(tmp_path: Path, arch: str, kind: Type, tied: bool) -> None:
    head = np.random.default_rng(2).standard_normal((40, 64), np.float32)
    path = write(tmp_path / "m.gguf", arch, kind, extra=None if tied else {"output.weight": head})
    wide, model = load_model(path, torch.float32, "cpu"), load_model(path, torch.float32, "cpu", weight_format=Q8)
    assert (model.lm_head is model.embed.table) == tied
    total = block_sizes(model).total()
    assert set(block_sizes(model)) == {"Q8_0" if kind == Type.F16 else kind.name}
    model.pack(OPS)
    assert block_sizes(model).total() == total
    assert all(isinstance(linear.op, PackedBlocks) for linear in linears(model).values())
    assert all(param.dim() == 1 for param in model.parameters()), "a matrix is there twice"
    for name, linear in linears(wide).items():
        error = 0 if kind != Type.F16 else float(linear.weight.abs().max()) / 200
        torch.testing.assert_close(linears(model)[name].dense_weight(), linear.weight.detach(), rtol=0, atol=error)
    if kind != Type.F16:
        for mine, theirs in zip(outputs(model), outputs(wide), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_blocks_are_views_of_the_file_until_they_are_packed(tmp_path: Path) -> None:
    """But for the queries and keys of llama, whose rows are put in another order."""
    path = write(tmp_path / "m.gguf", "llama", Type.Q8_0)
    model = load_model(path, torch.float32, "cpu", weight_format=Q8)
    parts = {name: linear.op._parts for name, linear in linears(model).items()}  # type: ignore[attr-defined]
    owns = {name: [rows.data.untyped_storage().resizable() for rows in kept.values()] for name, kept in parts.items()}
    ends = HEADS * HEAD_DIM, (HEADS + KV_HEADS) * HEAD_DIM
    assert sorted(parts["layers.0.mixer.qkv"]) == [0, *ends]
    assert owns["layers.0.mixer.qkv"] == [True, True, False]
    assert not any(any(part) for name, part in owns.items() if "qkv" not in name)


def test_kinds_that_have_no_kernel_are_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "m.gguf", "qwen3", Type.Q4_1)
    with caplog.at_level(logging.INFO):
        model = load_model(
            path, torch.float32, "cpu", weight_format=BlockFormat("Q8_0", BlockTorchOps(CPU, frozenset({"Q8_0"})))
        )
    (line,) = [record.getMessage() for record in caplog.records if "Q4_1" in record.getMessage()]
    assert line == "8 tensors in Q4_1 have no kernel here and are quantised again, to Q8_0"
    assert set(block_sizes(model)) == {"Q8_0"}
    assert re.search(r"weights: \d+ MB block-quantised \(Q8_0\)", caplog.text)


@pytest.mark.parametrize("dummy", [False, True])
def test_a_folder_is_quantised_as_it_is_read(tmp_path: Path, dummy: bool) -> None:
    path = write_checkpoint(tmp_path / "m")
    wide = load_model(path, torch.float32, "cpu", dummy=dummy)
    model = load_model(path, torch.float32, "cpu", dummy=dummy, weight_format=BlockFormat("Q4_0", OPS))
    assert set(block_sizes(model)) == {"Q4_0"}
    for name, linear in linears(wide).items():
        rounded = gguf.dequantize(gguf.quantize(linear.weight.detach().numpy(), Type.Q4_0), Type.Q4_0)
        assert np.array_equal(linears(model)[name].dense_weight().numpy(), rounded), name
    model.pack(OPS)
    assert all(logits.isfinite().all() for logits in outputs(model))


def test_what_is_missing_or_misshapen_is_said_as_of_others(tmp_path: Path) -> None:
    from draftwing.errors import CheckpointError

    path = write_checkpoint(tmp_path / "m")
    tensors, name = load_file(path / "model.safetensors"), "model.layers.1.self_attn.k_proj.weight"
    save_file({key: value for key, value in tensors.items() if key != name}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"missing from the checkpoint: {name}"):
        load_model(path, torch.float32, "cpu", weight_format=Q8)
    save_file(tensors | {name: tensors[name][1:].contiguous()}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name}: expected shape \[32, 32\], found \[31, 32\]"):
        load_model(path, torch.float32, "cpu", weight_format=Q8)


@torch.inference_mode()
@pytest.mark.slow
@pytest.mark.further(kind="EAGLE3", restricted=True)
@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize("kind", ["EAGLE", "EAGLE3", "NEXTN"])
def test_heads_give_what_they_give_in_float32(tmp_path: Path, kind: str, restricted: bool) -> None:
    make = {"EAGLE": exact_heads.exact_eagle2, "EAGLE3": exact_heads.exact_eagle3, "NEXTN": exact_heads.exact_mtp}
    exact = make[kind]()
    target_path = exact.target.write(tmp_path / "target")
    head_path = exact.head.write(tmp_path / "head") if exact.head is not None else None
    token_ids = torch.tensor([3, 0, 41, 7]) if restricted and kind != "EAGLE3" else None
    found = []
    for ops in (OPS, TorchOps(CPU)):
        form = Q8 if ops is OPS else BlockFormat("", TorchOps(CPU))
        options = {"weight_format": form} if ops is OPS else {}
        target = load_model(target_path, torch.float32, "cpu", **options)  # type: ignore[arg-type]
        target.pack(ops)
        if head_path is None:
            head = load_mtp_head(target_path, target, torch.float32, "cpu", token_ids=token_ids, **options)  # type: ignore[arg-type]
        else:
            head = load_draft_head(head_path, target, kind, torch.float32, "cpu", token_ids=token_ids, **options)  # type: ignore
        head.pack(ops)
        head.set_max_positions(16)
        assert bool(block_sizes(head)) == (ops is OPS)
        ids, positions = torch.tensor([3, 9, 1, 1]), torch.arange(4)
        aux = torch.randn(4, len(head.aux_layers) * target.config.hidden_size, generator=torch.manual_seed(0))
        hidden = head.run(ids, positions, head.features(aux), 0, FunctionAttend(causal))
        found.append((hidden, head.logits(hidden)))
    (hidden, logits), (wide_hidden, wide_logits) = found
    for mine, theirs in ((hidden, wide_hidden), (logits, wide_logits)):
        assert mine.shape == theirs.shape
        torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.05 * float(theirs.abs().max()))
