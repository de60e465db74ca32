"""A complete checkpoint of a few hundred kilobytes: a random Qwen2 with one token per byte."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_tokenizers import byte_level

VOCAB = 258  # 256 bytes, <eos>, <pad>
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def write_checkpoint(
    folder: Path, seed: int = 0, layers: int = 2, hidden: int = 32, heads: int = 2, size: int = 16, vocab: int = VOCAB
) -> Path:
    """Writes config.json, tokenizer.json, tokenizer_config.json and model.safetensors.

    heads, size: of attention; every head has keys and values of its own.  vocab: rows of the embedding; the tokenizer
    gives the first `VOCAB` ids.
    """
    folder.mkdir(parents=True)
    ffn = 2 * hidden
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": hidden, "intermediate_size": ffn,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads,
        "head_dim": size, "vocab_size": vocab,
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
        "hidden_act": "silu", "torch_dtype": "float32", "eos_token_id": 256,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    weights = {"model.embed_tokens.weight": normal(vocab, hidden) * 4, "model.norm.weight": torch.ones(hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = torch.ones(hidden)
        for name in "qkv":
            weights[f"{prefix}self_attn.{name}_proj.weight"] = normal(heads * size, hidden)
            weights[f"{prefix}self_attn.{name}_proj.bias"] = torch.zeros(heads * size)
        weights[f"{prefix}self_attn.o_proj.weight"] = normal(hidden, heads * size)
        weights[f"{prefix}mlp.gate_proj.weight"] = normal(ffn, hidden)
        weights[f"{prefix}mlp.up_proj.weight"] = normal(ffn, hidden)
        weights[f"{prefix}mlp.down_proj.weight"] = normal(hidden, ffn)
    save_file(weights, str(folder / "model.safetensors"))
    return folder


def write_tokenizer(folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json: a token per byte, <eos> 256, <pad> 257."""
    byte_level("<eos>", "<pad>").save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "chat_template": TEMPLATE}))
