"""Random weights from a config alone, to measure what a step of any shape costs. The text is worthless."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftwing.config.trees import names_mask
from draftwing.errors import CheckpointError
from draftwing.layers.experts import ExpertLinear
from draftwing.layers.linear import Linear
from draftwing.layers.linear_ops.base import ParamSlice
from draftwing.layers.linear_ops.groups import Groups
from draftwing.models.config import ModelConfig
from draftwing.models.families import FAMILIES, language_model
from draftwing.models.fields import Fields
from draftwing.models.quantised.config import Scheme
from draftwing.models.weight_map import MTP, MTP_LAYERS
from draftwing.ops.gemm.stored import MX_BLOCK, MXRows, QuantizedRows

SEED = 0
HEAD_SCALE = 16.0  # standard deviation of logits: the best of 128k tokens has a probability of 0.7 on average


def fill_random(
    module: nn.Module,
    device: torch.device | str,
    seed: int = SEED,
    mxfp4: bool = False,
    schemes: Mapping[str, Scheme] | None = None,
) -> None:
    """Puts every parameter of a meta `module` on `device`, where its values are made. mxfp4: those of experts. schemes:
    by which parameters are quantised, where weights may stay so.

    A GEMM of a normed row has a variance of about 1, so the residual stream grows by 1 or 2 a layer and stays far
    from the end of float16. Heads are sharper, as trained ones are: of even distributions draft trees come out flat.
    """
    if torch.empty(0, device=device).is_meta:
        return  # there are no values
    generator = torch.Generator(device).manual_seed(seed)
    lm_head = getattr(module, "lm_head", None)
    heads = {name for name, param in module.named_parameters() if lm_head is not None and param is lm_head.weight}
    for name, meta in list(module.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        layer = module.get_submodule(owner)
        is_weight, scale = leaf == "weight" and isinstance(layer, Linear), HEAD_SCALE if name in heads else 1.0
        value: Tensor | QuantizedRows | MXRows
        if is_weight and mxfp4 and isinstance(layer, ExpertLinear):
            value = _mx_rows(meta, device, generator)
        elif is_weight and schemes and name in schemes and isinstance(layer.op, Groups):
            value = _quantised_rows(meta, schemes[name], scale, device, generator)
        else:
            value = random_values(meta, leaf, scale, device, generator)
        if isinstance(layer, Linear) and layer.op.keep(ParamSlice(name, 0, meta.shape[0]), value):
            continue
        values = value if isinstance(value, Tensor) else value.dense(meta.dtype)
        setattr(layer, leaf, nn.Parameter(values, values.is_floating_point()))


def random_values(
    like: Tensor, leaf: str, scale: float, device: torch.device | str, generator: torch.Generator
) -> Tensor:
    """Makes those of a parameter that is called `leaf`, of the shape and type of `like`. scale: of a matrix, whose
    variance is its square over its columns."""
    values = torch.empty(like.shape, dtype=like.dtype, device=device)
    if leaf in ("bias", "conv_bias"):
        values.zero_()
    elif leaf == "decay":  # of a delta net's state, whose half is left after a token
        values.fill_(-1.0)
    elif leaf == "dt_bias":
        values.zero_()
    elif leaf == "token_ordering":  # of an assistant's clusters
        torch.arange(len(like), out=values)
    elif like.dim() == 1:  # of a norm
        values.fill_(1.0)
    elif not like.is_floating_point():  # a quantised weight
        values.random_(generator=generator)
    else:
        values.normal_(0.0, scale * like.shape[-1] ** -0.5, generator=generator)
    return values


def _mx_rows(like: Tensor, device: torch.device | str, generator: torch.Generator) -> MXRows:
    """With a variance of 1 / columns: that of all 16 codes is 8.56."""
    rows, columns = like.shape
    codes = torch.empty(rows, columns // 2, dtype=torch.uint8, device=device).random_(generator=generator)
    exponent = 127 - round(math.log2(8.56 * columns) / 2)
    return MXRows(codes, torch.full((rows, columns // MX_BLOCK), exponent, dtype=torch.uint8, device=device))


def _quantised_rows(
    like: Tensor, scheme: Scheme, scale: float, device: torch.device | str, generator: torch.Generator
) -> QuantizedRows:
    """As large as `random_values`, as a matrix of this scheme is stored but for the order of its columns."""
    (rows, columns), deviation = like.shape, _deviation(scheme)
    if scheme.real:
        codes = torch.empty(rows, columns, dtype=torch.bfloat16, device=device).normal_(generator=generator)
        codes = codes.mul_(deviation).to(torch.float8_e4m3fn)
    else:
        half = 1 << scheme.bits - 1
        codes = torch.empty(rows, columns, dtype=torch.int8, device=device).random_(-half, half, generator=generator)
    tall, wide = scheme.tall or rows, scheme.wide or columns
    groups = math.ceil(rows / tall), math.ceil(columns / wide)
    scales = torch.full(groups, scale * columns**-0.5 / deviation, device=device)
    zeros = None if scheme.symmetric else torch.zeros(groups, dtype=torch.int16, device=device)
    return QuantizedRows(codes, 8 if scheme.real else scheme.bits, scales, zeros, tall, wide, None, scheme.dynamic)


def _deviation(scheme: Scheme) -> float:
    """Of codes: normal ones in fp8, which ends at 448; else all are as frequent."""
    return 64.0 if scheme.real else float(1 << scheme.bits) / 12**0.5


def draft_weights(
    raw: Mapping[str, Any], kind: str, target: ModelConfig, dtype: torch.dtype, path: Path
) -> dict[str, Tensor]:
    """Returns the tensors by which a draft head is told and sized, on the meta device but for maps of vocabularies, as
    its config speaks of them.

    raw: flat keys (`flatten_config`).  kind: of head, "eagle", "eagle3", or "mtp", for which a config may also be an
    EAGLE head's.
    """
    if kind == "mtp" and (raw.get("num_nextn_predict_layers") or language_model(raw).get("mtp_num_hidden_layers")):
        return mtp_weights(raw, path)
    fields = Fields(raw, f"draft model {path}")
    hidden, layers = fields.whole("hidden_size"), fields.whole("num_hidden_layers")

    def meta(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    vocab = target.vocab_size
    if kind in ("dflash", "dflash2", "dspark"):
        return _block_weights(raw, kind == "dspark", hidden, layers, target, meta, path)
    eagle3 = kind == "eagle3"
    first = "midlayer" if eagle3 and layers == 1 else "layers.0"
    weights = {f"{first}.self_attn.q_proj.weight": meta(1, 2 * hidden if eagle3 else hidden)}
    weights |= {f"layers.{i}.mlp.down_proj.weight": meta(1) for i in range(1, layers)}
    if raw.get("attention_bias"):
        weights |= {f"{first}.self_attn.{part}_proj.bias": meta(1) for part in "qo"}
    if raw.get("mlp_bias"):
        weights[f"{first}.mlp.down_proj.bias"] = meta(1)
    if not eagle3:
        weights["fc.weight"] = meta(hidden, 2 * hidden)
        if raw.get("bias"):
            weights["fc.bias"] = meta(hidden)
        return weights
    ids = raw.get("eagle_aux_hidden_state_layer_ids") or raw.get("target_layer_ids")
    aux_hidden = raw.get("num_aux_hidden_states") or len(ids or (0, 0, 0))
    weights |= {"norm.weight": meta(hidden), f"{first}.hidden_norm.weight": meta(hidden)}
    if raw.get("use_aux_hidden_state") is not False:
        weights["fc.weight"] = meta(hidden, aux_hidden * target.hidden_size)
    if names_mask(raw):
        weights["mask_hidden"] = meta(aux_hidden * target.hidden_size)
    rows = raw.get("draft_vocab_size") or vocab
    weights["lm_head.weight"] = meta(rows, hidden)
    if rows != vocab:
        weights["d2t"] = _spread(rows, vocab, path)
    return weights


def _spread(rows: int, vocab: int, path: Path) -> Tensor:
    """Returns the map of draft tokens that lie evenly in the target's vocabulary."""
    if rows > vocab:
        raise CheckpointError(f"draft model {path}: draft_vocab_size {rows} exceeds the target's {vocab}")
    place = torch.arange(rows)
    return place * vocab // rows - place


def _block_weights(
    raw: Mapping[str, Any],
    markov: bool,
    hidden: int,
    layers: int,
    target: ModelConfig,
    meta: Callable[..., Tensor],
    path: Path,
) -> dict[str, Tensor]:
    count = len(raw.get("target_layer_ids") or raw.get("aux_hidden_state_layer_ids") or range(layers))
    weights = {"fc.weight": meta(hidden, count * target.hidden_size), "hidden_norm.weight": meta(hidden)}
    weights |= {f"layers.{i}.self_attn.q_norm.weight": meta(1) for i in range(layers)}
    rows = raw.get("draft_vocab_size") or target.vocab_size
    if rows != target.vocab_size:
        weights["d2t"] = _spread(rows, target.vocab_size, path)
    fields = Fields(raw, f"draft model {path}")
    if raw.get("conv_kernel_size"):
        weights["layers.0.attention_conv.base_kernel"] = meta(2, fields.whole("conv_kernel_size"), hidden)
    if raw.get("projector_type") == "domino":
        memory, rank = fields.whole("gru_hidden_dim", default=1024), fields.whole("emb_dim", default=256)
        weights |= {"prefix_gru.weight_hh_l0": meta(3 * memory, memory), "embed_proj.0.weight": meta(rank, 1)}
    elif raw.get("selector_top_k"):
        weights["candidate_selector.predecessor_codebook"] = meta(target.vocab_size, fields.whole("selector_rank"))
    elif markov:
        rank = raw.get("markov_rank") or 256
        weights |= {f"markov_head.markov_w{i}.weight": meta(target.vocab_size, rank) for i in (1, 2)}
        if raw.get("enable_confidence_head"):
            weights["confidence_head.proj.weight"] = meta(
                1, hidden + bool(raw.get("confidence_head_with_markov")) * rank
            )
    return weights


def mtp_weights(raw: Mapping[str, Any], path: Path) -> dict[str, Tensor]:
    """Names of as many multi-token prediction layers as the config says, by which they are told."""
    own = language_model(raw)
    families = [FAMILIES[name] for name in own.get("architectures") or () if name in FAMILIES]
    if own.get("mtp_num_hidden_layers") or any(family.one_predicts for family in families):
        return {f"{MTP}fc.weight": torch.empty(1, device="meta")}
    layers = Fields(raw, f"draft model {path}").whole("num_nextn_predict_layers")
    return {f"{MTP_LAYERS}{i}.input_proj.weight": torch.empty(1, device="meta") for i in range(layers)}
