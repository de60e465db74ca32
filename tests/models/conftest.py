"""Draft checkpoints as they are published, small."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decoder_configs import decoder_config
from dense_cache import DenseCache
from safetensors.torch import save_file
from torch import Tensor

from draftwing.models.decoder import DecoderModel

HIDDEN, FFN, HEADS, KV_HEADS, VOCAB, LAYERS = 32, 40, 4, 2, 50, 8

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": HIDDEN, "intermediate_size": FFN,
    "max_position_embeddings": 64, "model_type": "llama", "num_attention_heads": HEADS, "num_hidden_layers": 1,
    "num_key_value_heads": KV_HEADS, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "float32",
    "vocab_size": VOCAB,
}  # fmt: skip


def make_target(
    dtype: torch.dtype = torch.float64, hidden: int = HIDDEN, vocab: int = VOCAB, tied: bool = False
) -> DecoderModel:
    config = decoder_config(
        LAYERS,
        hidden_size=hidden,
        num_heads=4,
        num_kv_heads=2,
        head_dim=hidden // 4,
        ffn_size=48,
        vocab_size=vocab,
        max_positions=64,
        norm_eps=1e-5,
        tie_embeddings=tied,
    )
    model = DecoderModel(config, dtype, "cpu").requires_grad_(False)
    generator = torch.Generator().manual_seed(7)
    for param in model.parameters():
        values = torch.randn(param.shape, generator=generator, dtype=torch.float64)
        param.copy_(1 + 0.3 * values if param.dim() == 1 else 0.2 * values)
    model.set_max_positions(64)
    return model


class Weights(dict[str, Tensor]):
    """Random tensors by name, float32 values so that nothing is lost in a float32 file."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def matrix(self, name: str, rows: int, columns: int) -> None:
        self[name] = 0.25 * torch.randn(rows, columns, generator=self.generator)

    def norm(self, name: str, size: int = HIDDEN) -> None:
        self[name] = 1 + 0.4 * torch.randn(size, generator=self.generator)

    def bias(self, name: str, size: int) -> None:
        self[name] = 0.5 * torch.randn(size, generator=self.generator)

    def layer(
        self, prefix: str, in_size: int = HIDDEN, head_dim: int = 8, heads: int = HEADS, kv: int = KV_HEADS
    ) -> None:
        self.matrix(f"{prefix}.self_attn.q_proj.weight", heads * head_dim, in_size)
        self.matrix(f"{prefix}.self_attn.k_proj.weight", kv * head_dim, in_size)
        self.matrix(f"{prefix}.self_attn.v_proj.weight", kv * head_dim, in_size)
        self.matrix(f"{prefix}.self_attn.o_proj.weight", HIDDEN, heads * head_dim)
        self.matrix(f"{prefix}.mlp.gate_proj.weight", FFN, HIDDEN)
        self.matrix(f"{prefix}.mlp.up_proj.weight", FFN, HIDDEN)
        self.matrix(f"{prefix}.mlp.down_proj.weight", HIDDEN, FFN)
        self.norm(f"{prefix}.post_attention_layernorm.weight")


def eagle_weights(fc_bias: bool = True, layers: int = 1, qkv_bias: bool = False) -> Weights:
    weights = Weights(1)
    weights.matrix("fc.weight", HIDDEN, 2 * HIDDEN)
    if fc_bias:
        weights.bias("fc.bias", HIDDEN)
    for i in range(layers):
        weights.layer(f"layers.{i}")
        if i:
            weights.norm(f"layers.{i}.input_layernorm.weight")
        if qkv_bias:
            for name, size in (("q", 32), ("k", 16), ("v", 16)):
                weights.bias(f"layers.{i}.self_attn.{name}_proj.bias", size)
    return weights


def eagle3_weights(
    first: str = "midlayer", aux: int = 3, aux_size: int = HIDDEN, draft_vocab: int | None = 20, **layer: int
) -> Weights:
    weights = Weights(2)
    weights.matrix("fc.weight", HIDDEN, aux * aux_size)
    weights.layer(first, 2 * HIDDEN, **layer)
    for name in ("hidden_norm", "input_layernorm"):
        weights.norm(f"{first}.{name}.weight")
    weights.norm("norm.weight")
    if draft_vocab is not None:
        weights.matrix("lm_head.weight", draft_vocab, HIDDEN)
        if draft_vocab != VOCAB:
            weights.update(vocab_maps(kept_ids(draft_vocab)))
    return weights


def kept_ids(count: int) -> Tensor:
    return torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[:count].sort().values


def vocab_maps(ids: Tensor) -> dict[str, Tensor]:
    kept = torch.zeros(VOCAB, dtype=torch.bool)
    kept[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": kept}


def write(folder: Path, weights: Mapping[str, Tensor], pickled: bool = False, **changes: Any) -> Path:
    """changes: of the config; `...` drops a key."""
    folder.mkdir(exist_ok=True)
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(dict(weights), folder / "pytorch_model.bin")
    else:
        save_file(dict(weights), folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def drafts() -> SimpleNamespace:
    """What the tests of draft heads are made of."""
    return SimpleNamespace(
        CONFIG=CONFIG, Weights=Weights, DenseCache=DenseCache, make_target=make_target,
        eagle_weights=eagle_weights, eagle3_weights=eagle3_weights, kept_ids=kept_ids, vocab_maps=vocab_maps,
        write=write,
    )  # fmt: skip
