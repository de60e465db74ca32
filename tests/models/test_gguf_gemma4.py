"""Gemma 4 in GGUF files, against transformers: as they are stored, and dequantised."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gemma4_models import KINDS, Type, reference, write_gguf
from gguf.quants import dequantize, quantize
from hybrid_models import Pooled, tokens, whole_logits
from torch import Tensor

from draftwing.errors import CheckpointError
from draftwing.layers.linear_ops.blocks import BlockFormat
from draftwing.layers.linear_ops.formats import DENSE
from draftwing.models.config import from_hf
from draftwing.models.loader import load_config, load_model, mapped_bytes
from draftwing.ops import make_ops
from draftwing.ops.attention import Batch
from draftwing.ops.cpu.extension import load_extension
from draftwing.ops.cpu.tape import Recording, record

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_equals_transformers(tmp_path: Path, kind: str) -> None:
    theirs = reference(kind)
    model = load_model(write_gguf(tmp_path / "m.gguf", theirs), torch.float32, "cpu")
    ids = tokens(60)
    torch.testing.assert_close(whole_logits(model, ids), theirs(ids[None]).logits[0], atol=1e-4, rtol=1e-4)
    expected = from_hf({**theirs.config.to_dict(), "architectures": ["Gemma4ForCausalLM"]})
    found = tuple(replace(layer, norm=expected.norm) for layer in model.config.layers)  # whose eps is in float32 there
    assert found == expected.layers and model.config.soft_cap == expected.soft_cap
    assert model.config.stop_ids == (0, 1)


@pytest.mark.parametrize("table", [Type.Q6_K, Type.BF16, Type.Q8_0])
@torch.inference_mode()
def test_embeddings_by_layer_stay_in_the_file(tmp_path: Path, table: Type) -> None:
    """Whatever the others become. The rows that are read are those of the whole table dequantised."""
    theirs = reference("per-layer", hidden_size_per_layer_input=256)
    own = theirs.model.embed_tokens_per_layer.weight
    stored = quantize(own.numpy(), Type.Q8_0 if table == Type.Q6_K else table)
    if table == Type.Q6_K:  # which gguf-py does not make: any bytes are some values
        stored = torch.randint(0, 100, (101, 1280 // 256 * 210), dtype=torch.uint8).numpy()
    values = torch.from_numpy(dequantize(stored, table))
    file = write_gguf(tmp_path / "m.gguf", theirs, Type.Q8_0, table, stored)
    ops, ids = make_ops(CPU), tokens(40)
    logits = []
    for form in (DENSE, BlockFormat("Q8_0", ops)):
        model = load_model(file, torch.float32, "cpu", weight_format=form)
        op = model.per_layer.embed.table.op
        assert op.stored is None and not list(model.per_layer.embed.parameters())
        assert torch.equal(op.rows(ids), values[ids])
        model.pack(ops)
        assert torch.equal(model.per_layer.embed.table.rows(ids), values[ids])
        logits.append(whole_logits(model, ids))
    difference = (logits[0] - logits[1]).abs().median()  # activations are rounded to 8 bits
    assert 0 < difference < 0.1 * logits[0].std()
    whole = load_model(write_gguf(tmp_path / "wide.gguf", theirs, table=table, stored=stored), torch.float32, "cpu")
    own.data.copy_(values)
    torch.testing.assert_close(whole_logits(whole, ids), theirs(ids[None]).logits[0], atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(load_extension() is None, reason="the C extension was not built")
@torch.inference_mode()
def test_a_step_is_kernels_alone(tmp_path: Path) -> None:
    """So that it is recorded: the replay of one token's step is the step of another token."""
    ops = make_ops(CPU)
    file = write_gguf(tmp_path / "m.gguf", reference("per-layer"), Type.Q8_0)
    model = load_model(file, torch.float32, "cpu", weight_format=BlockFormat("Q8_0", ops))
    model.pack(ops)
    pooled, ids, zero = Pooled(model, ops), tokens(21), torch.zeros(1, dtype=torch.int64)
    pooled.chunk(ids[:20], 0)
    batch = Batch(
        zero, ids[20:].clone(), zero + 20, pooled.table[0, 20:21], pooled.table, zero + 20, zero.view(1, 1, 1),
        zero.view(1, 1) + 1, window=1, bound=21,
    )  # fmt: skip

    def step() -> Tensor:
        return model.logits(model(batch.ids, batch.positions, pooled.attn.bind(batch, 0))[0])

    recording, out = record(step)
    assert isinstance(recording, Recording), recording
    first = out.clone()
    batch.ids.copy_(ids[:1])
    recording.replay()
    assert torch.equal(out, step()) and not torch.equal(out, first)


def test_a_file_without_the_table_is_refused(tmp_path: Path) -> None:
    theirs = reference("per-layer")
    others = {name: value for name, value in theirs.state_dict().items() if "embed_tokens_per_layer" not in name}
    file = write_gguf(tmp_path / "m.gguf", SimpleNamespace(config=theirs.config, state_dict=lambda: others))
    assert mapped_bytes(file, load_config(file)) == 0
    with pytest.raises(CheckpointError, match=r"tensors missing .*: model\.embed_tokens_per_layer\.weight"):
        load_model(file, torch.float32, "cpu")
