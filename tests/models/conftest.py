"""Draft checkpoints as they are published, small, with their float64 arithmetic written out anew."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
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
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "max_position_embeddings": 64,
    "model_type": "llama",
    "num_attention_heads": HEADS,
    "num_hidden_layers": 1,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": VOCAB,
}


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


# ---- float64 arithmetic ----------------------------------------------------------------------------------------------


class Reference:
    """Runs rows one by one over tensors by name; every row sees those before it."""

    def __init__(self, weights: Mapping[str, Tensor], head_dim: int = 8, theta: float = 10000.0, kv: int = KV_HEADS):
        self.w = {name: tensor.double() for name, tensor in weights.items() if tensor.is_floating_point()}
        self.head_dim, self.theta, self.kv = head_dim, theta, kv
        self.past: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def rms(self, x: Tensor, name: str) -> Tensor:
        return x / math.sqrt(float((x * x).mean()) + 1e-5) * self.w[name]

    def linear(self, x: Tensor, name: str) -> Tensor:
        y = self.w[f"{name}.weight"] @ x
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def turn(self, head: Tensor, position: int) -> Tensor:
        half = self.head_dim // 2
        out = head.clone()
        for i in range(half):
            angle = position * self.theta ** (-2 * i / self.head_dim)
            out[i] = head[i] * math.cos(angle) - head[half + i] * math.sin(angle)
            out[half + i] = head[half + i] * math.cos(angle) + head[i] * math.sin(angle)
        return out

    def layer(self, prefix: str, normed: Tensor, residual: Tensor, position: int) -> Tensor:
        q, k, v = (
            self.linear(normed, f"{prefix}.self_attn.{name}_proj").view(-1, self.head_dim) for name in ("q", "k", "v")
        )
        k = torch.stack([self.turn(head, position) for head in k])
        past = self.past.setdefault(prefix, [])
        past.append((k, v))
        out = []
        for i, head in enumerate(q):
            j = i // (len(q) // self.kv)
            head = self.turn(head, position)
            scores = torch.stack([head @ keys[j] for keys, _ in past]) / math.sqrt(self.head_dim)
            weights = scores.softmax(0)
            out.append(sum((p * values[j] for p, (_, values) in zip(weights, past, strict=True)), torch.zeros(())))
        h = residual + self.linear(torch.cat(out), f"{prefix}.self_attn.o_proj")
        x = self.rms(h, f"{prefix}.post_attention_layernorm.weight")
        gate, up = self.linear(x, f"{prefix}.mlp.gate_proj"), self.linear(x, f"{prefix}.mlp.up_proj")
        return h + self.linear(gate * gate.sigmoid() * up, f"{prefix}.mlp.down_proj")


@torch.inference_mode()
def check_chain(
    head: Any, target: DecoderModel, row: Callable[[int, Tensor | None, Tensor, int, int], tuple[Tensor, Tensor]]
) -> None:
    """Five committed tokens and four of growth, against `row(id, auxiliary hidden states, feature, position, level)` ->
    (hidden, logits), which gets the target's auxiliary hidden states for committed rows and its own last output as the
    feature for others."""
    ids = torch.tensor([4, 17, 3, 29, 8, 41])
    _, aux_hidden = target(ids[:5], torch.arange(5), DenseCache(), head.aux_layers)
    assert aux_hidden is not None
    assert not any(param.is_meta for param in head.parameters())  # any comparison with meta tensors would pass
    cache = DenseCache()
    hidden = head.run(ids[1:], torch.arange(5), head.features(aux_hidden), 0, cache)
    assert hidden.shape == (5, head.width)
    expected: list[tuple[Tensor, Tensor]] = []
    for i in range(5):
        expected.append(row(int(ids[i + 1]), aux_hidden[i], aux_hidden[i], i, 0))
    torch.testing.assert_close(hidden, torch.stack([h for h, _ in expected]), atol=1e-5, rtol=1e-5)
    logits = head.logits(hidden)
    assert logits.shape == (5, head.vocab)
    torch.testing.assert_close(logits, torch.stack([z for _, z in expected]), atol=1e-5, rtol=1e-5)
    hidden, feature = hidden[4:], expected[4][0]
    for level in range(1, 5):
        token = logits[-1:].argmax(-1)
        if head.target_ids is not None:
            token = head.target_ids[token]
        hidden = head.run(token, torch.tensor([4 + level]), hidden, level, cache)
        logits = head.logits(hidden)
        feature, z = row(int(token), None, feature, 4 + level, level)
        torch.testing.assert_close(logits[0], z, atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="session")
def drafts() -> SimpleNamespace:
    """What the tests of draft heads are made of."""
    return SimpleNamespace(
        CONFIG=CONFIG, Weights=Weights, Reference=Reference, DenseCache=DenseCache, make_target=make_target,
        eagle_weights=eagle_weights, eagle3_weights=eagle3_weights, kept_ids=kept_ids, vocab_maps=vocab_maps,
        write=write, check_chain=check_chain,
    )  # fmt: skip
