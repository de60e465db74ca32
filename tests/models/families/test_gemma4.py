"""Gemma 4 against transformers: heads by kind of layer, keys that are values or other layers', embeddings by layer,
experts beside the MLP; of GGUF files, as they are stored and dequantised."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from gemma4_models import KINDS, Type, reference, write_gguf
from gguf.quants import dequantize, quantize
from hybrid_models import Pooled, check_steps, tokens, whole_logits
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftwing.errors import CheckpointError
from draftwing.kv.pool import KVSpec
from draftwing.layers.linear_ops.blocks import BlockFormat
from draftwing.layers.linear_ops.dense import DENSE
from draftwing.models.config import from_hf
from draftwing.models.decoder import DecoderModel
from draftwing.models.loader import load_config, load_model, mapped_bytes
from draftwing.ops import make_ops
from draftwing.ops.attention.batch import Batch
from draftwing.ops.cpu.extension import load_extension
from draftwing.ops.cpu.tape import Recording, record
from draftwing.train.capture import Causal

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, DecoderModel, Path]:
    theirs, folder = reference(request.param), tmp_path_factory.mktemp("model")
    theirs.save_pretrained(folder)
    return theirs, load_model(folder, torch.float32, "cpu"), folder


@pytest.mark.slower(pair=["dense", "experts"])
@torch.inference_mode()
def test_whole_sequences_equal_transformers(pair: tuple[Any, DecoderModel, Path]) -> None:
    theirs, model, _ = pair
    ids = tokens(150)
    expected = theirs(ids[None], output_hidden_states=True)
    torch.testing.assert_close(whole_logits(model, ids), expected.logits[0], atol=1e-4, rtol=1e-4)
    asked = (0, 2, model.config.num_layers - 1, model.final_aux_layer)  # what draft heads read
    _, found = model(ids, torch.arange(len(ids)), Causal(1, len(ids)), asked)
    states = [expected.hidden_states[min(i, model.config.num_layers)][0] for i in asked]
    torch.testing.assert_close(found, torch.cat(states, 1), atol=1e-3, rtol=1e-4)  # of 15, before the last norm


@pytest.mark.slower(pair=["dense", "experts"])
@pytest.mark.further(native=False)
@pytest.mark.parametrize("native", [False, True])
def test_chunks_tokens_and_trees_equal_transformers(pair: tuple[Any, DecoderModel, Path], native: bool) -> None:
    theirs, _, folder = pair
    model, ops = load_model(folder, torch.float32, "cpu"), make_ops(CPU)
    model.pack(ops)
    check_steps(theirs, Pooled(model, ops if native else None))


@pytest.mark.slow
@pytest.mark.further(pair=["dense", "per-layer"])  # whose heads those with experts have
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted where there is a GPU")
@pytest.mark.usefixtures("mended_interpreter")
def test_the_kernels_of_a_gpu_equal_transformers(pair: tuple[Any, DecoderModel, Path]) -> None:
    ops_of = pytest.importorskip("draftwing.ops.triton.ops")
    theirs, _, folder = pair
    model, ops = load_model(folder, torch.float32, "cpu"), ops_of.TritonOps(CPU)
    model.pack(ops)
    check_steps(theirs, Pooled(model, ops))


def test_layers_that_read_others_keys_keep_nothing(tmp_path: Path) -> None:
    reference("per-layer").save_pretrained(tmp_path)
    model = load_model(tmp_path, torch.float32, "cpu")
    assert model.kv_layers == [KVSpec(1, 32), KVSpec(1, 64), KVSpec(1, 32)]
    assert [layer.mixer.pool_layer for layer in model.layers] == [0, 1, 2, 1, 1]
    assert [layer.mlp.down.in_features for layer in model.layers] == [96, 96, 96, 192, 192]


@torch.inference_mode()
def test_embeddings_by_layer_stay_where_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs = reference("per-layer")
    theirs.to(torch.bfloat16).save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO):
        model = load_model(tmp_path, torch.float32, "cpu")
    assert "read row by row" in caplog.text
    model.pack(ops := make_ops(CPU))
    assert not any(name.startswith("per_layer.embed") for name, _ in model.named_parameters())
    ids = tokens(30)
    own = theirs.model.embed_tokens_per_layer.weight.float()
    assert torch.equal(model.per_layer.embed.table.rows(ids), own[ids])
    blocks = load_model(tmp_path, torch.float32, "cpu", weight_format=BlockFormat("Q8_0", ops))
    assert torch.equal(blocks.per_layer.embed.table.rows(ids), own[ids])  # no other format is made of them


@pytest.mark.slow
@torch.inference_mode()
def test_the_language_model_of_a_model_for_images_and_sound(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As they are published: keys and values also of layers that do not read their own, and sizes in keys of old."""
    theirs = reference("per-layer", attention_k_eq_v=False)
    text = {**theirs.config.to_dict(), "global_head_dim": 64}
    del text["per_layer_config"]
    config = {
        "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "eos_token_id": [1, 106],
        "text_config": {key: value for key, value in text.items() if key != "architectures"}, "vision_config": {},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    tensors = {f"model.language_model.{name.removeprefix('model.')}": value.clone() for name, value in
               theirs.state_dict().items() if name != "lm_head.weight"}  # fmt: skip
    for name in ("k_proj", "v_proj", "k_norm"):
        tensors[f"model.language_model.layers.4.self_attn.{name}.weight"] = torch.zeros(2)
    others = {f"model.{part}.x.weight": torch.zeros(2) for part in ("vision_tower", "audio_tower", "embed_vision")}
    save_file({**tensors, **others}, tmp_path / "model.safetensors")
    with caplog.at_level(logging.INFO):
        model = load_model(tmp_path, torch.float32, "cpu")
    assert "3 tensors for images or sound are not loaded" in caplog.text and "not used" not in caplog.text
    ids = tokens(40)
    torch.testing.assert_close(whole_logits(model, ids), theirs(ids[None]).logits[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all' is not supported"),
        ({"num_kv_shared_layers": 4}, "none of some among the first 1"),
        ({"vocab_size_per_layer_input": 102}, "vocab_size_per_layer_input: expected vocab_size"),
        ({"layer_types": ["full_attention"]}, "layer_types: expected one for each of 5 layers"),
        (
            {"per_layer_config": {"2": {"sliding_window": 9}}},
            r"per_layer_config\.2\.sliding_window = 9 is not supported",
        ),
    ],
)
def test_what_is_refused(changes: dict[str, Any], expected: str) -> None:
    config = {**reference("per-layer").config.to_dict(), "architectures": ["Gemma4ForCausalLM"]}
    assert from_hf(config).per_layer == 64
    with pytest.raises(CheckpointError, match=expected):
        from_hf({**config, **changes})


def test_any_layer_may_have_heads_of_its_own() -> None:
    config = reference("dense").config.to_dict()
    each = {**config["per_layer_config"], "2": {"head_dim": 16, "num_key_value_heads": 4}}
    made = from_hf({**config, "per_layer_config": each, "architectures": ["Gemma4ForCausalLM"]})
    assert [layer.mixer.shape for layer in made.layers] == [(4, 2, 32), (4, 1, 64), (4, 4, 16), (4, 1, 64)]


def test_layers_are_numbered_as_libraries_write_them() -> None:
    """A model of 12 layers has keys 05 and 11."""
    theirs = transformers.Gemma4TextConfig(num_hidden_layers=12, architectures=["Gemma4ForCausalLM"])
    made = from_hf(json.loads(theirs.to_json_string(use_diff=False)))
    assert [layer.mixer.head_dim for layer in made.layers] == ([256] * 5 + [512]) * 2


def test_stored_values_are_not_asked_for(tmp_path: Path) -> None:
    """The matrix of keys is that of values, too, where a checkpoint has no other."""
    reference("dense").save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert "model.layers.1.self_attn.v_proj.weight" not in stored
    qkv = load_model(tmp_path, torch.float32, "cpu").layers[1].mixer.qkv.weight
    assert len(qkv) == 4 * 64 + 64  # queries and keys
    assert torch.equal(qkv[-64:], stored["model.layers.1.self_attn.k_proj.weight"])


def test_what_is_mapped_is_not_counted(tmp_path: Path) -> None:
    theirs = reference("per-layer")
    theirs.save_pretrained(tmp_path)
    file = write_gguf(tmp_path / "m.gguf", theirs)
    size = theirs.model.embed_tokens_per_layer.weight.nbytes
    assert [mapped_bytes(path, load_config(path)) for path in (tmp_path, file)] == [size, size]


@pytest.mark.slow
@pytest.mark.further(stored="file")
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="asks Linux what is in memory")
@pytest.mark.parametrize("stored", ["folder", "file", "parts"])
def test_no_other_pages_stay_in_memory(tmp_path: Path, stored: str) -> None:
    theirs = reference("per-layer", intermediate_size=512)
    if stored == "folder":
        theirs.save_pretrained(tmp_path)
    else:
        write_gguf(tmp_path / "m.gguf", theirs, split=30 if stored == "parts" else 0)
    model = load_model(tmp_path if stored == "folder" else min(tmp_path.iterdir()), torch.float32, "cpu")
    model.pack(make_ops(CPU))
    found, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            ours = str(tmp_path) in line
        elif first == "Rss:" and ours:
            found += int(rest[0]) << 10
    table = theirs.model.embed_tokens_per_layer.weight
    others = sum(file.stat().st_size for file in tmp_path.iterdir()) - table.nbytes
    assert found < table.nbytes + others / 4  # Linux maps some pages around one that is read
    assert torch.equal(model.per_layer.embed.table.rows(torch.arange(5)), table[:5])


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["folder", "gguf"])
@torch.inference_mode()
def test_tokens_that_are_never_drawn(tmp_path: Path, stored: str) -> None:
    """As the 12B's ends of images and of sound."""
    theirs, ids = reference("dense"), tokens(20)
    theirs.generation_config.suppress_tokens = [3, 90]
    theirs.save_pretrained(tmp_path)
    path = tmp_path if stored == "folder" else write_gguf(tmp_path / "m.gguf", theirs, suppressed=[3, 90])
    found, expected = whole_logits(load_model(path, torch.float32, "cpu"), ids), theirs(ids[None]).logits[0]
    others = [i for i in range(101) if i not in (3, 90)]
    torch.testing.assert_close(found[:, others], expected[:, others], atol=1e-4, rtol=1e-4)
    assert found.isfinite().all() and not found.softmax(1)[:, [3, 90]].any()


@pytest.mark.slower(kind=["dense", "per-layer"])
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


@pytest.mark.further(table=Type.BF16)
@pytest.mark.slow
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
