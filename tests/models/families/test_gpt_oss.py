"""gpt-oss from a file that the gguf package writes, as llama.cpp's converter lays it out, against transformers."""

from __future__ import annotations

from pathlib import Path

import gguf as gguf_package
import pytest
import torch
import transformers
from block_ops import BlockTorchOps
from gguf import GGMLQuantizationType as Type
from gguf.quants import quantize
from tiny_gguf import finish
from torch import Tensor

from draftwing.gguf_file import open_gguf
from draftwing.layers.linear_ops.base import WeightFormat
from draftwing.layers.linear_ops.dense import DENSE
from draftwing.layers.linear_ops.groups import GroupFormat
from draftwing.models.loader import load_model
from draftwing.ops.gemm.stored import MXRows
from draftwing.train.capture import Causal as windowed

HIDDEN, FFN, VOCAB, EXPERTS, HEADS, KV_HEADS, HEAD_DIM, WINDOW = 64, 96, 50, 4, 4, 2, 32, 9
OURS = {
    "attn_norm.weight": "input_layernorm.weight", "post_attention_norm.weight": "post_attention_layernorm.weight",
    "attn_sinks.weight": "self_attn.sinks", "ffn_gate_inp.weight": "mlp.router.weight",
    "ffn_gate_inp.bias": "mlp.router.bias",
    **{f"attn_{x}.{kind}": f"self_attn.{x}_proj.{kind}" for x in "qkv" for kind in ("weight", "bias")},
    **{f"attn_output.{kind}": f"self_attn.o_proj.{kind}" for kind in ("weight", "bias")},
}  # fmt: skip


def made() -> transformers.PreTrainedModel:
    """A model whose experts are values of MXFP4."""
    torch.manual_seed(3)
    config = transformers.GptOssConfig(
        hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=2, num_attention_heads=HEADS, vocab_size=VOCAB,
        num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, num_local_experts=EXPERTS, num_experts_per_tok=2,
        sliding_window=WINDOW, rms_norm_eps=1e-5, rope_theta=150000.0, max_position_embeddings=4096,
        rope_scaling={"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 32.0,
                      "beta_slow": 1.0, "truncate": False},
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    for name, param in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            count, columns, rows = param.shape
            codes = torch.randint(0, 256, (count, rows, columns // 2), generator=generator, dtype=torch.uint8)
            exponents = torch.randint(121, 126, (count, rows, columns // 32), generator=generator, dtype=torch.uint8)
            values = [MXRows(codes[i], exponents[i]).dense(torch.float32).t() for i in range(count)]
            param.data.copy_(torch.stack(values))
        else:
            param.data.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=generator)
    return model


def written(path: Path, model: transformers.PreTrainedModel, kind: Type) -> Path:
    config, state = model.config, {name: value.detach() for name, value in model.state_dict().items()}
    writer = gguf_package.GGUFWriter(path, "gpt-oss")
    writer.add_block_count(2)
    writer.add_context_length(4096)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_expert_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(150000.0)
    writer.add_sliding_window(WINDOW)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(2)
    writer.add_rope_scaling_type(gguf_package.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(8.0)
    writer.add_rope_scaling_orig_ctx_len(16)
    writer.add_token_list(["a", "<|return|>", "<|call|>", *(f"t{i}" for i in range(VOCAB - 3))])
    writer.add_eos_token_id(1)

    def add(name: str, value: Tensor, kind: Type = Type.F32) -> None:
        writer.add_tensor(name, quantize(value.contiguous().float().numpy(), kind), raw_dtype=kind)

    add("token_embd.weight", state["model.embed_tokens.weight"])
    add("output_norm.weight", state["model.norm.weight"])
    add("output.weight", state["lm_head.weight"])
    for layer in range(2):
        theirs = f"model.layers.{layer}"
        for ours, name in OURS.items():
            add(f"blk.{layer}.{ours}", state[f"{theirs}.{name}"])
        gate_up, bias = (state[f"{theirs}.mlp.experts.gate_up_proj{suffix}"] for suffix in ("", "_bias"))
        for part, start in (("gate", 0), ("up", 1)):
            add(f"blk.{layer}.ffn_{part}_exps.weight", gate_up.transpose(1, 2)[:, start::2], kind)
            add(f"blk.{layer}.ffn_{part}_exps.bias", bias[:, start::2])
        add(f"blk.{layer}.ffn_down_exps.weight", state[f"{theirs}.mlp.experts.down_proj"].transpose(1, 2), kind)
        add(f"blk.{layer}.ffn_down_exps.bias", state[f"{theirs}.mlp.experts.down_proj_bias"])
    finish(writer)
    return path


@pytest.mark.slower(form="dense")
@pytest.mark.parametrize(("kind", "form"), [(Type.MXFP4, "groups"), (Type.MXFP4, "dense"), (Type.F32, "dense")])
@torch.inference_mode()
def test_it_is_the_model_of_transformers(tmp_path: Path, kind: Type, form: str) -> None:
    reference, ops = made(), BlockTorchOps(torch.device("cpu"))
    path = written(tmp_path / "m.gguf", reference, kind)
    formats: dict[str, WeightFormat] = {"dense": DENSE, "groups": GroupFormat(ops=ops)}
    model = load_model(path, torch.float32, "cpu", weight_format=formats[form])
    assert (
        [layer.mixer.window for layer in model.config.layers] == [WINDOW, 0]
        and model.config.attention.sinks
        and model.config.stop_ids == (1, 2)
    )
    kept = set(model.layers[0].mlp.down.op.sizes)
    assert kept == ({"mxfp4"} if (form, kind) == ("groups", Type.MXFP4) else set())
    model.pack(ops)
    ids = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(2))
    hidden, _ = model(ids, torch.arange(40), windowed(1, 40))
    theirs = reference(ids[None]).logits[0]
    torch.testing.assert_close(model.logits(hidden), theirs, atol=1e-4 * float(theirs.abs().max()), rtol=1e-4)


def test_blocks_of_mxfp4_are_those_of_the_gguf_package(tmp_path: Path) -> None:
    from draftwing.models.gguf_tensors import mx_rows

    stored = torch.randint(0, 256, (5, 3 * 17), generator=torch.Generator().manual_seed(4), dtype=torch.uint8).numpy()
    stored[:, ::17] = 100 + stored[:, ::17] % 60  # exponents that float32 has
    expected = gguf_package.quants.dequantize(stored, Type.MXFP4)
    assert torch.equal(mx_rows(stored).dense(torch.float32), torch.from_numpy(expected))


def test_the_router_may_be_named(tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", made(), Type.MXFP4)
    file = open_gguf(path)
    file.metadata["gpt-oss.expert_gating_func"] = 3
    from draftwing.models.gguf_config import model_config

    assert model_config(file).experts is not None
