"""A complete checkpoint of a Qwen3 that makes vectors of texts, or judges them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from tiny_tokenizers import byte_level
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from transformers import Qwen3Config, Qwen3ForCausalLM

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS, YES, NO = 256, 259, 260


def write_embedder(
    folder: Path, pooling: dict[str, Any] | None = None, modules: tuple[str, ...] = ("Normalize",)
) -> Path:
    """Writes a Qwen3 of two layers, whose tokenizer ends texts with EOS where it makes vectors."""
    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=264, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, tie_word_embeddings=True,
        initializer_range=0.2,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    backend = byte_level(*SPECIAL)
    backend.add_tokens([AddedToken(word, single_word=True) for word in ("yes", "no")])
    assert [backend.token_to_id(word) for word in (SPECIAL[0], "yes", "no")] == [EOS, YES, NO]
    if pooling is not None:
        backend.post_processor = TemplateProcessing(single="$A <|endoftext|>", special_tokens=[(SPECIAL[0], EOS)])
        write_modules(folder, pooling, modules)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return folder


def write_modules(folder: Path, pooling: dict[str, Any], modules: tuple[str, ...] = ("Normalize",)) -> None:
    """Writes the files in which sentence-transformers says how vectors are made."""
    every = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(("Transformer", "Pooling", *modules))
    ]
    (folder / "modules.json").write_text(json.dumps(every))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 48, **pooling}))


LAST, MEAN = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, {"pooling_mode_mean_tokens": True}
CLS = {"pooling_mode": "cls"}


def ids_of(text: str) -> list[int]:
    """The tokenizer of `write_embedder`, by hand: bytes in the order of their characters, then EOS."""
    backend = byte_level()
    return [*backend.encode(text).ids, EOS]


IN_FILES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_embedder_gguf(path: Path, folder: Path, pooling: int, adds_eos: bool = True) -> Path:
    """Writes the model of a folder of `write_embedder` as llama.cpp's converter does, in float32."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config, writer = model.config, gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_pooling_type(gguf.PoolingType(pooling))
    vocabulary = byte_level(*SPECIAL).get_vocab()
    # A merge, which a file of this kind has to have, of a token that no text here has.
    named = {**{i: token for token, i in vocabulary.items()}, YES: "yes", NO: "no", 261: "qz"}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([named.get(i, f"[PAD{i}]") for i in range(config.vocab_size)])
    types = {**dict.fromkeys(range(256, 259), 3), YES: 4, NO: 4}
    writer.add_token_types([types.get(i, 1 if i in named else 5) for i in range(config.vocab_size)])
    writer.add_token_merges(["q z"])
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(adds_eos)
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    for name, value in model.state_dict().items():
        if name != "lm_head.weight":
            layer, _, part = name.removeprefix("model.layers.").removesuffix(".weight").partition(".")
            writer.add_tensor(top.get(name) or f"blk.{layer}.{IN_FILES[part]}.weight", value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
