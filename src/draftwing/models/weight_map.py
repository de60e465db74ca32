"""Which rows of which of our parameters each Hugging Face tensor fills: the one table for loading and saving."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor, nn

from draftwing.models.config import ModelConfig

# Multi-token prediction layers that are stored with the model; they belong to the drafter.
MTP_PREFIX = "model.mtp_layers."


class Slot(NamedTuple):
    """Rows `[start, start + rows)` of a parameter."""

    param: str
    start: int
    rows: int


def checkpoint_names(config: ModelConfig) -> dict[str, Slot]:
    """Hugging Face tensor name -> slot, complete for this config. A tied head has no entry of its own."""
    table = {
        "model.embed_tokens.weight": Slot("embed.weight", 0, config.vocab_size),
        "model.norm.weight": Slot("norm.weight", 0, config.hidden_size),
    }
    if not config.tie_embeddings:
        table["lm_head.weight"] = Slot("lm_head.weight", 0, config.vocab_size)
    for i in range(config.num_layers):
        table |= layer_names(config, f"model.layers.{i}", f"layers.{i}")
    return table


def layer_names(
    config: ModelConfig, theirs: str, ours: str, attn_norm: str | None = "input_layernorm"
) -> dict[str, Slot]:
    """The entries of one `DecoderLayer`, with both prefixes. attn_norm: their name of it, None where it is missing."""
    hidden, ffn = config.hidden_size, config.ffn_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = (  # (theirs, ours, first row, rows, has a bias)
        ("self_attn.q_proj", "qkv", 0, q_rows, config.qkv_bias),
        ("self_attn.k_proj", "qkv", q_rows, kv_rows, config.qkv_bias),
        ("self_attn.v_proj", "qkv", q_rows + kv_rows, kv_rows, config.qkv_bias),
        ("self_attn.o_proj", "o", 0, hidden, config.o_bias),
        ("mlp.gate_proj", "gate_up", 0, ffn, config.mlp_bias),
        ("mlp.up_proj", "gate_up", ffn, ffn, config.mlp_bias),
        ("mlp.down_proj", "down", 0, hidden, config.mlp_bias),
    )
    norms = [("post_attention_layernorm", "mlp_norm", hidden)]
    if attn_norm is not None:
        norms.append((attn_norm, "attn_norm", hidden))
    if config.qk_norm:
        norms += [("self_attn.q_norm", "q_norm", config.head_dim), ("self_attn.k_norm", "k_norm", config.head_dim)]
    table = {}
    for name, param, start, rows, bias in linears:
        for kind in ("weight", "bias") if bias else ("weight",):
            table[f"{theirs}.{name}.{kind}"] = Slot(f"{ours}.{param}.{kind}", start, rows)
    for name, param, rows in norms:
        table[f"{theirs}.{name}.weight"] = Slot(f"{ours}.{param}.weight", 0, rows)
    return table


def canonical(name: str) -> str:
    """The name with the `model.` prefix, which some checkpoints leave out."""
    return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"


def checkpoint_tensors(model: nn.Module, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) as a Hugging Face checkpoint stores them; the tensors are views of the parameters."""
    return stored_tensors(model, checkpoint_names(config))


def stored_tensors(module: nn.Module, table: Mapping[str, Slot]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every entry of `table`, which names parameters of `module`."""
    params = dict(module.named_parameters(remove_duplicate=False))
    for name, slot in table.items():
        yield name, params[slot.param].detach()[slot.start : slot.start + slot.rows]
