"""Which rows of which of our parameters each Hugging Face tensor fills: the one table for loading and saving."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor, nn

from draftwing.layers.config import ExpertConfig
from draftwing.layers.linear_ops.base import ParamSlice, WeightFormat
from draftwing.layers.linear_ops.formats import DENSE
from draftwing.models.config import ModelConfig
from draftwing.models.language_model import own_name
from draftwing.parallel.cut import Cut
from draftwing.parallel.ranks import ALONE, Ranks, Share

# Multi-token prediction layers that are stored with the model; they belong to the drafter.
MTP_PREFIX = "model.mtp_layers."


def checkpoint_names(config: ModelConfig, ranks: Ranks = ALONE) -> dict[str, ParamSlice]:
    """Hugging Face tensor name -> slice, complete for this config. A tied head has no entry of its own. ranks: over
    which the model is spread."""
    vocab, form = ranks.share(config.vocab_size), config.vocab_format
    table = named(form, "model.embed_tokens", "embed.table", 0, vocab.size, Cut(0, vocab))
    table["model.norm.weight"] = ParamSlice("norm.weight", 0, config.hidden_size, added=float(config.gemma))
    if not config.tie_embeddings:
        table |= named(form, "lm_head", "lm_head", 0, vocab.size, Cut(0, vocab))
    for i in range(config.num_layers):
        table |= layer_names(config, f"model.layers.{i}", f"layers.{i}", ranks=ranks, index=i)
    return table


def layer_names(
    config: ModelConfig,
    theirs: str,
    ours: str,
    attn_norm: str | None = "input_layernorm",
    ranks: Ranks = ALONE,
    index: int = 0,
) -> dict[str, ParamSlice]:
    """The entries of one `DecoderLayer`, with both prefixes. attn_norm: their name of it, None where it is missing.
    index: of the layer in its model."""
    hidden, size, rank = config.hidden_size, ranks.size, ranks.rank
    layer = config.layer(index).spread(ranks)
    q_rows, kv_rows, ffn = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim, layer.ffn
    q = Share(rank * q_rows, q_rows, size * q_rows)
    first = rank * config.num_kv_heads // size  # a key/value head may be on several ranks
    kv = Share(first * layer.head_dim, kv_rows, config.num_kv_heads * layer.head_dim)
    inner = Share(rank * ffn, ffn, size * ffn)
    linears: tuple[
        tuple[str, str, int, int, bool, Cut], ...
    ] = (  # (theirs, ours, first row, rows, has a bias, what of it is read)
        ("self_attn.q_proj", "attention.qkv", 0, q_rows, config.qkv_bias, Cut(0, q)),
        ("self_attn.k_proj", "attention.qkv", q_rows, kv_rows, config.qkv_bias, Cut(0, kv)),
        ("self_attn.v_proj", "attention.qkv", q_rows + kv_rows, kv_rows, config.qkv_bias, Cut(0, kv)),
        ("self_attn.o_proj", "attention.o", 0, hidden, config.o_bias, Cut(1, q)),
    )
    if layer.experts is None:
        linears = (
            *linears,
            ("mlp.gate_proj", "mlp.gate_up", 0, ffn, config.mlp_bias, Cut(0, inner)),
            ("mlp.up_proj", "mlp.gate_up", ffn, ffn, config.mlp_bias, Cut(0, inner)),
            ("mlp.down_proj", "mlp.down", 0, hidden, config.mlp_bias, Cut(1, inner)),
        )
    norms = [("post_attention_layernorm", "attn_out_norm" if config.gemma else "mlp_norm", hidden)]
    if config.gemma:
        norms += [("pre_feedforward_layernorm", "mlp_norm", hidden)]
        norms += [("post_feedforward_layernorm", "mlp_out_norm", hidden)]
    if attn_norm is not None:
        norms.append((attn_norm, "attn_norm", hidden))
    if config.qk_norm:
        norms += [(f"self_attn.{name}", f"attention.{name}", config.head_dim) for name in ("q_norm", "k_norm")]
    table = {} if layer.experts is None else _expert_names(config, layer.experts, theirs, ours, ranks)
    for name, linear, start, rows, bias, cut in linears:
        table |= named(config.weight_format, f"{theirs}.{name}", f"{ours}.{linear}", start, rows, cut)
        if bias:
            of_outputs = cut if cut.axis == 0 and size > 1 else None
            table[f"{theirs}.{name}.bias"] = ParamSlice(f"{ours}.{linear}.bias", start, rows, cut=of_outputs)
    if config.sinks:
        heads = Share(rank * layer.heads, layer.heads, size * layer.heads)
        own = Cut(0, heads) if size > 1 else None
        table[f"{theirs}.self_attn.sinks"] = ParamSlice(f"{ours}.attention.sinks", 0, layer.heads, cut=own)
    for name, param, rows in norms:
        table[f"{theirs}.{name}.weight"] = ParamSlice(f"{ours}.{param}.weight", 0, rows, added=float(config.gemma))
    return table


def _expert_names(
    config: ModelConfig, experts: ExpertConfig, theirs: str, ours: str, ranks: Ranks
) -> dict[str, ParamSlice]:
    """The router and the experts of one layer. experts: of this rank."""
    names, ffn, hidden = expert_names(config), experts.ffn, config.hidden_size
    inner = Share(ranks.rank * ffn, ffn, ranks.size * ffn)
    table = named(DENSE, f"{theirs}.{names.router}", f"{ours}.mlp.router", 0, experts.count)
    for stored, linear, first, rows, every, axis in (
        (names.gate, "gate_up", 0, ffn, 2 * ffn, 0),
        (names.up, "gate_up", ffn, ffn, 2 * ffn, 0),
        (names.down, "down", 0, hidden, hidden, 1),
    ):
        cut = Cut(axis, inner)
        parts = named(config.weight_format, stored, f"{ours}.mlp.{linear}", first, rows, cut)  # of the first expert
        if experts.bias:
            of_outputs = cut if axis == 0 and ranks.size > 1 else None
            parts[f"{stored}.bias"] = ParamSlice(f"{ours}.mlp.{linear}.bias", first, rows, cut=of_outputs)
        for name, part in parts.items():
            for expert in range(experts.count):  # thousands of times: `_replace` would take twice as long
                at = f"{theirs}.{names.experts}.{expert}.{name}"
                table[at] = ParamSlice(part.param, first + expert * every, part.size, part.axis, part.cut, part.added)
    if experts.router_bias:
        table[f"{theirs}.{names.router}.bias"] = ParamSlice(f"{ours}.mlp.router.bias", 0, experts.count)
    return table


class ExpertNames(NamedTuple):
    """What a checkpoint calls the parts of a mixture of experts, below the layer; gate, up and down below an expert."""

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


OTHER_NAMES = {
    "MixtralForCausalLM": ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"),
    "GptOssForCausalLM": ExpertNames("mlp.router"),
}


def expert_names(config: ModelConfig) -> ExpertNames:
    return OTHER_NAMES.get(config.architecture, ExpertNames())


def named(
    form: WeightFormat, theirs: str, ours: str, start: int, rows: int, cut: Cut | None = None
) -> dict[str, ParamSlice]:
    """The entries of a stored matrix that is outputs `[start, start + rows)` of a `Linear`, with both names. cut: what
    of it is, which is nothing else where it is all."""
    some = cut if cut is not None and cut.share.size < cut.share.whole else None
    return {f"{theirs}.{suffix}": part._replace(cut=some) for suffix, part in form.slices(ours, start, rows).items()}


def canonical(name: str) -> str:
    """The name with the `model.` prefix, which some checkpoints leave out, and without that of a model around it."""
    name = own_name(name)
    return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"


def checkpoint_tensors(model: nn.Module, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) as a Hugging Face checkpoint stores them; the tensors mostly are views of the parameters."""
    return stored_tensors(model, checkpoint_names(config))


def stored_tensors(module: nn.Module, table: Mapping[str, ParamSlice]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every entry of `table`, which names parameters of `module`."""
    params = dict(module.named_parameters(remove_duplicate=False))
    for name, part in table.items():
        own = part.of(params[part.param])
        yield name, own - part.added if part.added else own
