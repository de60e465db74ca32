"""Which rows of which of our parameters each Hugging Face tensor fills: the one table for loading and saving."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from draftwing.layers.linear_ops.base import ParamSlice, WeightFormat
from draftwing.models.config import ModelConfig

# Multi-token prediction layers that are stored with the model; they belong to the drafter.
MTP_PREFIX = "model.mtp_layers."


def checkpoint_names(config: ModelConfig) -> dict[str, ParamSlice]:
    """Hugging Face tensor name -> slice, complete for this config. A tied head has no entry of its own."""
    table = named(config.vocab_format, "model.embed_tokens", "embed.table", 0, config.vocab_size)
    table["model.norm.weight"] = ParamSlice("norm.weight", 0, config.hidden_size)
    if not config.tie_embeddings:
        table |= named(config.vocab_format, "lm_head", "lm_head", 0, config.vocab_size)
    for i in range(config.num_layers):
        table |= layer_names(config, f"model.layers.{i}", f"layers.{i}")
    return table


def layer_names(
    config: ModelConfig, theirs: str, ours: str, attn_norm: str | None = "input_layernorm"
) -> dict[str, ParamSlice]:
    """The entries of one `DecoderLayer`, with both prefixes. attn_norm: their name of it, None where it is missing."""
    hidden, ffn = config.hidden_size, config.ffn_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = (  # (theirs, ours, first row, rows, has a bias)
        ("self_attn.q_proj", "attention.qkv", 0, q_rows, config.qkv_bias),
        ("self_attn.k_proj", "attention.qkv", q_rows, kv_rows, config.qkv_bias),
        ("self_attn.v_proj", "attention.qkv", q_rows + kv_rows, kv_rows, config.qkv_bias),
        ("self_attn.o_proj", "attention.o", 0, hidden, config.o_bias),
        ("mlp.gate_proj", "mlp.gate_up", 0, ffn, config.mlp_bias),
        ("mlp.up_proj", "mlp.gate_up", ffn, ffn, config.mlp_bias),
        ("mlp.down_proj", "mlp.down", 0, hidden, config.mlp_bias),
    )
    norms = [("post_attention_layernorm", "mlp_norm", hidden)]
    if attn_norm is not None:
        norms.append((attn_norm, "attn_norm", hidden))
    if config.qk_norm:
        norms += [(f"self_attn.{name}", f"attention.{name}", config.head_dim) for name in ("q_norm", "k_norm")]
    table: dict[str, ParamSlice] = {}
    for name, layer, start, rows, bias in linears:
        table |= named(config.weight_format, f"{theirs}.{name}", f"{ours}.{layer}", start, rows)
        if bias:
            table[f"{theirs}.{name}.bias"] = ParamSlice(f"{ours}.{layer}.bias", start, rows)
    for name, param, rows in norms:
        table[f"{theirs}.{name}.weight"] = ParamSlice(f"{ours}.{param}.weight", 0, rows)
    return table


def named(form: WeightFormat, theirs: str, ours: str, start: int, rows: int) -> dict[str, ParamSlice]:
    """The entries of a stored matrix that is outputs `[start, start + rows)` of a `Linear`, with both names."""
    return {f"{theirs}.{suffix}": part for suffix, part in form.slices(ours, start, rows).items()}


def canonical(name: str) -> str:
    """The name with the `model.` prefix, which some checkpoints leave out."""
    return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"


def checkpoint_tensors(model: nn.Module, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) as a Hugging Face checkpoint stores them; the tensors are views of the parameters."""
    return stored_tensors(model, checkpoint_names(config))


def stored_tensors(module: nn.Module, table: Mapping[str, ParamSlice]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every entry of `table`, which names parameters of `module`."""
    params = dict(module.named_parameters(remove_duplicate=False))
    for name, part in table.items():
        yield name, part.of(params[part.param])
