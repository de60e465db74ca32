"""Small random checkpoints in the formats people have: (tensors, config) of a target, of a draft head, or of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

VOCAB = 64
MASKS = {"pard_token", "ptd_token_id", "mask_token_id"}  # of heads that draft in parallel


class Checkpoint(NamedTuple):
    tensors: dict[str, Tensor]
    config: dict[str, Any]

    def write(self, folder: Path, file: str = "model.safetensors") -> Path:
        """As a folder with `config.json` and one weights file (`model.safetensors` or `pytorch_model.bin`)."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=1))
        if file.endswith(".safetensors"):
            from safetensors.torch import save_file

            save_file({k: v.contiguous().clone() for k, v in self.tensors.items()}, folder / file)
        else:
            torch.save(self.tensors, folder / file)
        return folder


class Maker:
    """Seeded tensors: matrices that keep the scale of what they act on, norm weights around one."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=self.generator) * scale / columns**0.5

    def vector(self, size: int, scale: float = 0.3) -> Tensor:
        return torch.randn(size, generator=self.generator) * scale

    def norm(self, size: int) -> Tensor:
        return torch.rand(size, generator=self.generator) + 0.5

    def attention(
        self, name: str, c: dict[str, Any], inputs: int | None = None, bias: bool = False
    ) -> dict[str, Tensor]:
        heads, kv_heads = c["num_attention_heads"], c.get("num_key_value_heads") or c["num_attention_heads"]
        head_dim = c.get("head_dim") or c["hidden_size"] // heads
        out = {}
        for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            # queries and keys large enough for attention to be far from uniform
            scale = 1.0 if part == "v" else 1.6
            out[f"{name}.{part}_proj.weight"] = self.matrix(count * head_dim, inputs or c["hidden_size"], scale)
            if bias:
                out[f"{name}.{part}_proj.bias"] = self.vector(count * head_dim)
        out[f"{name}.o_proj.weight"] = self.matrix(c["hidden_size"], heads * head_dim)
        return out

    def mlp(self, name: str, c: dict[str, Any]) -> dict[str, Tensor]:
        hidden, ffn = c["hidden_size"], c["intermediate_size"]
        return {
            f"{name}.gate_proj.weight": self.matrix(ffn, hidden),
            f"{name}.up_proj.weight": self.matrix(ffn, hidden),
            f"{name}.down_proj.weight": self.matrix(hidden, ffn),
        }

    def layer(
        self, name: str, c: dict[str, Any], inputs: int | None = None, bias: bool = False,
        norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm"),
    ) -> dict[str, Tensor]:  # fmt: skip
        out = self.attention(f"{name}.self_attn", c, inputs, bias) | self.mlp(f"{name}.mlp", c)
        return out | {f"{name}.{norm}.weight": self.norm(c["hidden_size"]) for norm in norms}

    def language_model(self, c: dict[str, Any], bias: bool = False) -> dict[str, Tensor]:
        out = {"model.embed_tokens.weight": self.matrix(c["vocab_size"], c["hidden_size"], c["hidden_size"] ** 0.5)}
        for i in range(c["num_hidden_layers"]):
            out |= self.layer(f"model.layers.{i}", c, bias=bias)
        out["model.norm.weight"] = self.norm(c["hidden_size"])
        if not c["tie_word_embeddings"]:
            out["lm_head.weight"] = self.matrix(c["vocab_size"], c["hidden_size"], 3.0)
        return out


def sizes(**changes: Any) -> dict[str, Any]:
    return {
        "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 2, "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "max_position_embeddings": 256, "tie_word_embeddings": False, "torch_dtype": "float32",
        "bos_token_id": 1, "eos_token_id": 2,
    } | changes  # fmt: skip


def llama_target(seed: int = 0, **changes: Any) -> Checkpoint:
    """LLaMA-3 in small: its theta, and llama3 rope scaling, which no draft may inherit."""
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    config = sizes(architectures=["LlamaForCausalLM"], model_type="llama", rope_theta=500000.0, rope_scaling=scaling)
    config |= changes
    return Checkpoint(Maker(seed).language_model(config), config)


def qwen2_target(seed: int = 0, **changes: Any) -> Checkpoint:
    config = sizes(architectures=["Qwen2ForCausalLM"], model_type="qwen2", rope_theta=1000000.0, rms_norm_eps=1e-6)
    config |= {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 2} | changes
    return Checkpoint(Maker(seed).language_model(config, bias=True), config)


def mimo(seed: int = 0, layers: int = 1, **changes: Any) -> Checkpoint:
    """Target and MTP layers in one checkpoint."""
    config = sizes(
        architectures=["MiMoForCausalLM"], model_type="mimo", rope_theta=640000.0, num_nextn_predict_layers=layers,
        attention_bias=True, rope_scaling=None, use_sliding_window=False, head_dim=8,
    )  # fmt: skip
    config |= changes
    make = Maker(seed)
    tensors, hidden = make.language_model(config, bias=True), config["hidden_size"]
    for i in range(layers):
        name = f"model.mtp_layers.{i}"
        tensors |= make.layer(name, config, bias=True)
        for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            tensors[f"{name}.{norm}.weight"] = make.norm(hidden)
        tensors[f"{name}.input_proj.weight"] = make.matrix(hidden, 2 * hidden)
    return Checkpoint(tensors, config)


def eagle2_head(
    target: Checkpoint, seed: int = 100, fc_bias: bool = False, embedding: bool = False, **changes: Any
) -> Checkpoint:
    """An EAGLE-1/2 head for the target: a Qwen2 head has q/k/v biases, the config's `bias` speaks of fc alone.

    embedding: also stores one, of random values, which no engine may use.
    """
    qwen = target.config["model_type"] == "qwen2"
    config = sizes(architectures=["LlamaForCausalLM"], model_type="llama", num_hidden_layers=1, bias=fc_bias)
    config |= {"max_position_embeddings": 32, "rms_norm_eps": 1e-6, "intermediate_size": 40}
    if qwen:
        config |= {"qkv_bias": True, "rope_theta": target.config["rope_theta"]}
    if fc_bias:
        del config["bias"]  # LLaMA-2 heads: no key, and a bias in the file
    config |= changes
    make, hidden = Maker(seed), config["hidden_size"]
    tensors = {"fc.weight": make.matrix(hidden, 2 * hidden, 1.4)}
    if fc_bias:
        tensors["fc.bias"] = make.vector(hidden)
    if embedding:
        tensors["embed_tokens.weight"] = make.matrix(config["vocab_size"], hidden, hidden**0.5)
    tensors |= make.layer("layers.0", config, bias=qwen, norms=("post_attention_layernorm",))
    return Checkpoint(tensors, config)


def draft_vocabulary(vocab: int, rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """d2t [rows] int64 and t2d [vocab] bool of a random kept set, ascending."""
    generator = torch.Generator().manual_seed(seed)
    kept = torch.randperm(vocab, generator=generator)[:rows].sort().values
    t2d = torch.zeros(vocab, dtype=torch.bool)
    t2d[kept] = True
    return kept - torch.arange(rows), t2d


def eagle3_head(
    target: Checkpoint, seed: int = 200, rows: int | None = 40, aux: int = 3, layers: int = 1,
    style: str = "midlayer", prefix: str = "", later_norm: str = "hidden_norm",
    embedding: bool = False, **changes: Any,
) -> Checkpoint:  # fmt: skip
    """An EAGLE-3 head: style "midlayer" (official), "layers" or "speculators".

    rows: draft vocabulary, None to share the target's head.  aux: hidden states that fc reads, 0: there is no fc.
    prefix: "model." for the exports that have it.
    embedding: also stores one of random values, as some exports do, for which the target's must be used.
    changes: config keys, among them norm_before_residual, fc_norm, norm_before_fc, norm_output, target_hidden_size,
    head_dim, eagle_aux_hidden_state_layer_ids; with that of a mask the head drafts in parallel.
    """
    config = sizes(architectures=["LlamaForCausalLM"], model_type="llama", num_hidden_layers=layers)
    config |= {"max_position_embeddings": 32, "intermediate_size": 40, "draft_vocab_size": rows}
    config |= changes
    if rows is None:
        del config["draft_vocab_size"]
    make, hidden, target_hidden = Maker(seed), config["hidden_size"], target.config["hidden_size"]
    body: dict[str, Tensor] = {}
    first = "midlayer" if style == "midlayer" and layers == 1 else "layers.0"
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    body |= make.layer(first, config, 2 * hidden, norms=norms)
    for i in range(1, layers):
        body |= make.layer(f"layers.{i}", config, norms=(later_norm, "post_attention_layernorm"))
    if aux:
        body["fc.weight"] = make.matrix(hidden, aux * target_hidden, 1.4)
    body["norm.weight"] = make.norm(hidden)
    if config.get("fc_norm"):
        for i in range(aux):
            body[f"fc_norm.{i}.weight"] = make.norm(target_hidden)
    if config.get("use_aux_norm"):
        for part in ("low", "mid", "high"):
            body[f"aux_norm_{part}.weight"] = make.norm(target_hidden)
    if config.get("norm_before_fc"):
        body["input_norm.weight"] = make.norm(aux * target_hidden)
    if hidden != target_hidden or embedding:
        body["embed_tokens.weight"] = make.matrix(config["vocab_size"], hidden, hidden**0.5)
    elif style == "speculators":
        body["embed_tokens.weight"] = target.tensors["model.embed_tokens.weight"].clone()
    tensors = {prefix + name: value for name, value in body.items()}
    if rows is not None:
        tensors["lm_head.weight"] = make.matrix(rows, hidden, 3.0)
        if rows != config["vocab_size"]:
            tensors["d2t"], tensors["t2d"] = draft_vocabulary(config["vocab_size"], rows, seed)
    if MASKS & set(config):
        tensors["mask_hidden"] = make.matrix(1, max(aux, 1) * target_hidden, target_hidden**0.5).unsqueeze(0)
    if style == "speculators":
        config = speculators_layout(config)
    return Checkpoint(tensors, config)


def speculators_layout(config: dict[str, Any]) -> dict[str, Any]:
    """The same head as the `speculators` library writes it: the layer's config nested, the rest on top."""
    own = ("draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output",
           "eagle_aux_hidden_state_layer_ids", "mask_token_id")  # fmt: skip
    inner = {k: v for k, v in config.items() if k not in (*own, "architectures")}
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "peagle" if MASKS & set(config) else "eagle3",
        "speculators_version": "0.1.0",
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [proposal],
            "verifier": {"name_or_path": "stand-in", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": inner,
        "target_hidden_size": config.get("target_hidden_size"),
        "embed_requires_grad": False,
    } | {k: config[k] for k in own if k in config}  # fmt: skip


def small_llama_draft(seed: int = 300, **changes: Any) -> Checkpoint:
    """A language model of its own for STANDALONE."""
    config = sizes(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=24, intermediate_size=32,
        num_attention_heads=3, num_key_value_heads=1, rope_theta=10000.0, tie_word_embeddings=True,
    )  # fmt: skip
    config |= changes
    make = Maker(seed)
    tensors = make.language_model(config)
    if config["tie_word_embeddings"]:  # logits of a tied head grow with the hidden size: keep them far from one-hot
        tensors["model.embed_tokens.weight"] *= 0.4
    return Checkpoint(tensors, config)
