"""Gemma 3n against transformers: streams of which layers compute one, gates of which few are above 0, embeddings of
fewer tokens than there are, keys of other layers; from folders and from GGUF files, whole and in steps."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

import gguf as gguf_package
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from hybrid_models import Pooled, check_steps, tokens, whole_logits
from moe_models import quantised
from tiny_gguf import finish

from draftwing.errors import CheckpointError, ConfigError
from draftwing.models.config import from_hf
from draftwing.models.loader import load_model
from draftwing.ops import make_ops
from draftwing.parallel.ranks import Absent

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 101, "vocab_size_per_layer_input": 90, "hidden_size": 64, "intermediate_size": [96, 96, 64, 96, 96],
    "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "hidden_size_per_layer_input": 32, "max_position_embeddings": 256, "sliding_window": 20, "laurel_rank": 32,
    "final_logit_softcapping": 3.0, "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.0, 0.2],
    "layer_types": [*["sliding_attention", "full_attention"] * 2, "full_attention"],
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def reference(**overrides: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.Gemma3nTextConfig(**SIZES, **overrides)
    model = transformers.Gemma3nForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, values in model.named_parameters():
            values.uniform_(0.5, 1.5) if "norm" in name or "scale" in name else values.normal_(0, 0.15)
    return model


def write_gguf(path: Path, theirs: Any, kind: Type = Type.F32) -> Path:
    """A file as llama.cpp's converter lays it out. kind: of matrices of layers."""
    config, writer = theirs.config, gguf_package.GGUFWriter(path, "gemma3n")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([one == "sliding_attention" for one in config.layer_types])
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_altup_active_idx(0)
    writer.add_altup_num_inputs(config.altup_num_inputs)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    shares = config.activation_sparsity_pattern
    writer.add_activation_sparsity_scale([NormalDist().inv_cdf(one) if one else -math.inf for one in shares])
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    known = gguf_package.get_tensor_name_map(gguf_package.MODEL_ARCH.GEMMA3N, config.num_hidden_layers)
    state = {name: value for name, value in theirs.state_dict().items() if not name.startswith("lm_head")}
    for joined in ("altup_projections", "altup_unembed_projections"):
        parts = [state.pop(f"model.{joined}.{i}.weight") for i in range(config.altup_num_inputs - 1)]
        state[f"model.{joined}.weight"] = torch.stack(parts)
    rows = config.vocab_size - config.vocab_size_per_layer_input
    table = "model.embed_tokens_per_layer.weight"
    state[table] = torch.cat((state[table], torch.zeros(rows, state[table].shape[1])))
    for name, value in state.items():
        stored = known.get_name(name if name.endswith(".weight") else f"{name}.weight", (".weight", ".bias"))
        assert stored is not None, name
        whole = value.dim() != 2 or value.shape[-1] % 32 or "altup" in stored or "token_embd" in stored
        own = Type.F32 if whole else kind
        writer.add_tensor(stored, quantised(value.float().contiguous().numpy(), own), raw_dtype=own)
    finish(writer)
    return path


@torch.inference_mode()
def test_whole_sequences_equal_transformers(tmp_path: Path) -> None:
    theirs, ids = reference(), tokens(70)
    theirs.save_pretrained(tmp_path)
    expected = theirs(ids[None]).logits[0]
    model = load_model(tmp_path, torch.float32, "cpu")
    torch.testing.assert_close(whole_logits(model, ids), expected, atol=1e-4, rtol=1e-4)
    ids, file = ids % 90, write_gguf(tmp_path / "m.gguf", theirs)  # whose other tokens have embeddings of zeros
    model = load_model(file, torch.float32, "cpu")
    torch.testing.assert_close(whole_logits(model, ids), theirs(ids[None]).logits[0], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("native", [False, True])
def test_chunks_tokens_and_trees_equal_transformers(tmp_path: Path, native: bool) -> None:
    theirs = reference()
    theirs.save_pretrained(tmp_path)
    model, ops = load_model(tmp_path, torch.float32, "cpu"), make_ops(CPU)
    model.pack(ops)
    check_steps(theirs, Pooled(model, ops if native else None))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted where there is a GPU")
@pytest.mark.usefixtures("mended_interpreter")
def test_the_kernels_of_a_gpu_equal_transformers(tmp_path: Path) -> None:
    ops_of = pytest.importorskip("draftwing.ops.triton.ops")
    theirs = reference()
    theirs.save_pretrained(tmp_path)
    model, ops = load_model(tmp_path, torch.float32, "cpu"), ops_of.TritonOps(CPU)
    model.pack(ops)
    check_steps(theirs, Pooled(model, ops))


@pytest.mark.slow
@torch.inference_mode()
def test_a_quantised_file_is_near(tmp_path: Path) -> None:
    theirs, ids = reference(), tokens(40) % 90
    model = load_model(write_gguf(tmp_path / "m.gguf", theirs, Type.Q8_0), torch.float32, "cpu")
    model.pack(make_ops(CPU))
    expected = theirs(ids[None]).logits[0]
    assert (whole_logits(model, ids) - expected).abs().median() < 0.02 * expected.std()


def test_what_is_not_served_is_said() -> None:
    config = {**SIZES, "architectures": ["Gemma3nForCausalLM"]}
    found = from_hf(config)
    assert [layer.sparsity is None for layer in found.layers] == [False, False, True, True, False]
    with pytest.raises(ConfigError, match="gates that are compared with all others"):
        found.spread(Absent(2, 0))
    wrong: dict[str, Any] = {
        "altup_active_idx": 1, "altup_correct_scale": False, "activation_sparsity_pattern": [0.5], "laurel_rank": 0,
        "intermediate_size": [96, 96], "num_kv_shared_layers": 4, "layer_types": ["full_attention"],
    }  # fmt: skip
    for key, value in wrong.items():
        with pytest.raises(CheckpointError):
            from_hf({**config, key: value})
