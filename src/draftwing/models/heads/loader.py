"""Loads draft heads: what kind one is and which parts it has are told by its weights, sizes by its config.

Published configs name their architecture in a dozen ways, and some keys mean different things to different trainers,
so a key is only believed where the weights cannot tell.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import torch
from torch import Tensor

from draftwing.config.drafters import find_drafter, head_drafter
from draftwing.errors import CheckpointError
from draftwing.layers.linear import operations
from draftwing.layers.linear_ops.base import WeightFormat
from draftwing.layers.linear_ops.blocks import log_blocks
from draftwing.layers.linear_ops.dense import DENSE
from draftwing.layers.linear_ops.groups import log_groups
from draftwing.models.config import ModelConfig
from draftwing.models.decoder import DecoderModel
from draftwing.models.dummy import draft_weights, fill_random
from draftwing.models.folder import folder_tensors
from draftwing.models.heads.assistant import AssistantHead
from draftwing.models.heads.base import FeatureHead
from draftwing.models.heads.block import BlockHead
from draftwing.models.heads.config import (
    MASK,
    AuxLayerIds,
    Weights,
    block_config,
    block_within_known,
    check_target,
    config_of_layers,
    draft_config,
    eagle3_config,
    read_config,
    with_positions,
    within_known,
)
from draftwing.models.heads.eagle import Eagle3Head, EagleHead, first_layer_name
from draftwing.models.heads.gguf_heads import gguf_weights
from draftwing.models.heads.mtp import MTPHead, mtp_head_of, untrained
from draftwing.models.heads.own_layers import UNSERVED, mtp_tensors, of_prediction_layer, unserved
from draftwing.models.loader import Tensors, fill_parameters
from draftwing.models.quantised.read import assembled, is_quantised
from draftwing.models.weight_map import (
    MTP_LAYERS,
    canonical,
    is_elsewhere,
    own_experts,
)
from draftwing.ops.gemm.stored import QuantizedRows

logger = logging.getLogger(__name__)

Kind = Literal["eagle", "eagle3", "dflash", "dflash2", "dspark", "mtp"]  # what `DrafterSpec.heads` names
Head = TypeVar("Head", bound=FeatureHead)

_WORDS: dict[Kind, str] = {
    "eagle": "an EAGLE head",
    "eagle3": "an EAGLE-3 head",
    "dflash": "a DFlash head",
    "dflash2": "a DFlash2 head",
    "dspark": "a DSpark head",
    "mtp": "multi-token prediction layers",
}

# EAGLE-3.1's first names for its norms before fc.
_AUX_NORMS = {f"aux_norm_{part}": f"fc_norm.{i}.weight" for i, part in enumerate(("low", "mid", "high"))}
# Other names of what a block head reads the target with.
_BLOCK_ALIASES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"} | {
    f"{name}.weight": name
    for name in ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
}
# What layers compute without: rotary tables, scales of a cache in 8 bits, and copies of the target's parts.
_HARMLESS = re.compile(r"rotary_emb\.inv_freq$|\.[kv]_scale$|^verifier_")
_MIDLAYER, _FIRST_NORM = re.compile(r"midlayer\."), "layers.0.input_layernorm.weight"
# Heads of kinds that are not served, by how their tensors are called.
_OTHER_HEADS = {
    re.compile(r"(medusa_head\.)?\d+\.\d+\.(linear\.)?weight$|blocks\.\d+\.layers\."): "a Medusa head",
    re.compile(r"hydra_|prefix_layer\."): "a Hydra head",
    re.compile(r"speculator\."): "an MLP speculator",
    re.compile(r"layer_fusion_weights$"): "a DFlare head",
}
_DFLASH2 = re.compile(r"candidate_selector\.|layers\.\d+\.(attention|mlp)_conv\.")


def load_draft_head(
    path: str | Path,
    target: DecoderModel,
    algorithm: str,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    aux_layer_ids: AuxLayerIds = "auto",
    token_ids: Tensor | None = None,
    context_length: int | None = None,
    dummy: bool = False,
    weight_format: WeightFormat = DENSE,
    as_stored: bool = True,
    trains: bool = False,
) -> EagleHead | Eagle3Head | BlockHead | MTPHead:
    """Returns the head in the folder or `.gguf` file `path` for `target`; `algorithm` is that of a drafter that loads
    heads.

    aux_layer_ids: what ids of an EAGLE-3 config count: layers whose output is meant, boundaries between layers (0 the
    embedding), or the one that the ids look like.
    token_ids [n] int64: the target's tokens that may be drafted, all different; EAGLE-3 heads have their own.
    context_length: positions that will be used, where these are fewer than the target's.
    device: of a `.gguf` file "meta" checks names and sizes alone.  dummy: random weights from the config alone.
    weight_format: of the head's matrices.  as_stored: as of `load_mtp_head`.  trains: it is trained further, on texts
    that may be longer than those that it knows.

    Raises CheckpointError for a head of another kind, target, vocabulary or size, and for missing tensors.
    """
    started, path, drafter = time.perf_counter(), Path(path), find_drafter(algorithm)
    of_model = partial(
        load_mtp_head, path, target, dtype, device, token_ids=token_ids, dummy=dummy, weight_format=weight_format,
        as_stored=as_stored,
    )  # fmt: skip
    if path.suffix == ".gguf" and "mtp" in drafter.heads:
        return of_model()
    if dummy:
        flat = read_config(path)
        weights = draft_weights(flat, drafter.heads[0], target.config, dtype, path)
    else:
        held = _draft_weights(path, target.config, dtype, device)
        weights = _dequantised(held, path, dtype, target.config)
    kind = head_kind(weights, path, target.config)
    if kind not in drafter.heads:
        expected = head_drafter(kind).name
        raise CheckpointError(
            f"{path} holds {_WORDS[kind]}: expected --speculative-algorithm {expected}, found {algorithm}"
        )
    if kind == "mtp":
        return of_model()
    head: EagleHead | Eagle3Head | BlockHead
    try:
        raw = read_config(path)
        config = replace(draft_config(raw, weights), weight_format=weight_format, vocab_format=weight_format)
        check_target(config, raw, target, kind == "eagle3")
        if trains:
            config = with_positions(config, raw, target.config)
        elif kind in ("eagle", "eagle3"):
            config = within_known(config, raw, target.config)
        if kind in ("dflash", "dflash2", "dspark"):
            block = block_config(config, raw, weights, target)
            block = block if trains else block_within_known(block, config, raw, target.config)
            head = BlockHead(config, block, target, dtype, "meta")
        elif kind == "eagle3":
            head = Eagle3Head(config, eagle3_config(config, raw, weights, target, aux_layer_ids), target, dtype, "meta")
        else:
            head = EagleHead(config, target, "fc.bias" in weights, dtype, "meta")
        _fill_from_own(head, weights, device, dummy)
    except CheckpointError as error:
        raise CheckpointError(f"draft model {path}: {error}") from None
    if device == "meta" and not dummy:
        return head
    stored = dtype  # blocks are said of by themselves
    if not weight_format.takes_blocks:
        stored = weights["fc.weight" if "fc.weight" in weights else "norm.weight"].dtype
    _warn_of_changes(head, stored, dtype, context_length)
    return _finish(head, token_ids, started, dummy)


def load_mtp_head(
    path: str | Path,
    target: DecoderModel,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    token_ids: Tensor | None = None,
    dummy: bool = False,
    weight_format: WeightFormat = DENSE,
    as_stored: bool = True,
) -> MTPHead:
    """Returns the multi-token prediction layers stored with a model, mostly the target itself: `path` is its folder or
    `.gguf` file, or a file that holds little else.

    token_ids, dummy, weight_format: as for `load_draft_head`.  as_stored: whether what a file has in blocks or groups
    stays so; False: layers that can be trained are loaded as a head in a folder of its own, which may take their place.
    Raises CheckpointError where there are none that can be served.
    """
    started, path = time.perf_counter(), Path(path)
    # The layers of a quantised checkpoint are stored as the target's are.
    stored_format = target.config.weight_format if weight_format == DENSE else weight_format
    as_stored = as_stored or untrained(target.config) is not None
    own = mtp_tensors(path, target, dummy, as_stored and stored_format.takes_blocks)
    if not as_stored:
        own = {name: value.dense(dtype) if isinstance(value, QuantizedRows) else value for name, value in own.items()}
    head = mtp_head_of(own, target, dtype, stored_format)
    fill_head(head, own.items(), device, dummy)
    return _finish(head, token_ids, started, dummy)


def head_kind(weights: Weights, path: Path, target: ModelConfig) -> Kind:
    """Returns what the tensors are, without the `model.` of their names; raises CheckpointError for what is no head
    served here."""
    for name in weights:
        if of_prediction_layer(name, target):
            return "mtp"
        if UNSERVED.search(name):
            raise unserved(path, name)
    if "pre_projection.weight" in weights:
        raise CheckpointError(
            f"{path} holds an assistant, which reads the target's keys and values: expected "
            "--speculative-algorithm FROZEN_KV_MTP"
        )
    if {"fc.weight", "hidden_norm.weight"} <= set(weights):
        if any(name.startswith("markov_head.") for name in weights):
            return "dspark"
        return "dflash2" if any(map(_DFLASH2.match, weights)) else "dflash"
    for name, what in ((name, what) for name in weights for form, what in _OTHER_HEADS.items() if form.match(name)):
        raise CheckpointError(f"{path} holds {what} ({name}), which is not supported")
    if {"d2t", "t2d", "layers.0.hidden_norm.weight"} & set(weights) or any(map(_MIDLAYER.match, weights)):
        return "eagle3"
    fc = weights.get("fc.weight")
    if fc is not None and fc.dim() == 2 and fc.shape[1] == 2 * fc.shape[0] and _FIRST_NORM not in weights:
        if MASK in weights:
            raise CheckpointError(
                f"{path} holds an EAGLE head for parallel drafting ({MASK}), which is not supported: expected one of "
                "EAGLE-3's kind (P-EAGLE)"
            )
        return "eagle"
    hint = "" if fc is not None else ", or --speculative-algorithm STANDALONE for a language model"
    first = sorted(weights, key=lambda name: (name != "fc.weight", name))[:4]
    raise CheckpointError(
        f"{path} holds no draft head of a kind that is served: expected the tensors of an EAGLE or EAGLE-3 head "
        f"(fc.weight with layers.0.* or midlayer.*) or multi-token prediction layers ({MTP_LAYERS}* or mtp.*){hint}; "
        f"found {', '.join(f'{name} {list(weights[name].shape)}' for name in first)}, ..."
    )


# ---- the kinds -------------------------------------------------------------------------------------------------------


def fill_head(
    head: FeatureHead | AssistantHead,
    tensors: Tensors,
    device: torch.device | str,
    dummy: bool,
    harmless: Iterable[str] = (),
) -> None:
    """Puts a head of the meta device on `device`, with random values or with what this rank has of tensors.
    harmless: as of `fill_parameters`."""
    if dummy:
        fill_random(head, device)
        return
    own = own_experts(head.config, head.ranks)
    here = ((name, value) for name, value in tensors if not is_elsewhere(name, head.config, own))
    fill_parameters(head, head.names(), here, device, harmless, cuts=True)


def _fill_from_own(head: FeatureHead, weights: Weights, device: torch.device | str, dummy: bool) -> None:
    """Fills a head of the meta device from a checkpoint of its own. What it shares with the target is not read."""
    first = first_layer_name(head.config.num_layers) if isinstance(head, Eagle3Head) else "layers.0"
    tensors = {re.sub(r"^(midlayer|layers\.0)\.", f"{first}.", name): tensor for name, tensor in weights.items()}
    offsets, kept, names = tensors.pop("d2t", None), tensors.pop("t2d", None), set(head.names())
    if MASK in tensors:  # some have an axis for the batch and one for the text
        tensors[MASK] = tensors[MASK].flatten()
    shared = {"embed_tokens.weight", "lm_head.weight"} - names
    if isinstance(head, BlockHead | Eagle3Head):
        strange = [name for name in set(tensors) - names - shared if not _HARMLESS.search(name)]
        if strange:
            raise CheckpointError(f"tensors of a part that is not served: {', '.join(sorted(strange)[:4])}")
    for name in shared & set(tensors):  # exports carry frozen copies of these, and some carry random values
        logger.info("%s of the draft model is not read: the target's own is used", name)
        del tensors[name]
    fill_head(head, tensors.items(), device, dummy)
    head.draft_only(_target_ids(offsets, kept, head.vocab, head.target.config.vocab_size))


def _target_ids(offsets: Tensor | None, kept: Tensor | None, vocab: int, target_vocab: int) -> Tensor | None:
    """Returns the target's id of each draft token [vocab] int64; None where they are the same.

    offsets: `d2t`, the target's id minus the draft's.  kept: `t2d`, which of the target's tokens are among them.
    """
    if kept is not None and kept.shape != (target_vocab,):
        raise CheckpointError(f"t2d: expected shape {[target_vocab]}, found {list(kept.shape)}")
    if offsets is not None:
        if offsets.shape != (vocab,):
            raise CheckpointError(f"d2t: expected shape {[vocab]}, found {list(offsets.shape)}")
        ids = torch.arange(vocab) + offsets.to(torch.int64)
        if kept is not None and not torch.equal(kept.nonzero().flatten(), ids.sort().values):
            logger.warning("d2t and t2d of the draft model disagree; d2t is used")
    elif vocab == target_vocab:
        return None
    elif kept is not None:
        ids = kept.nonzero().flatten()
        if ids.shape[0] != vocab:
            raise CheckpointError(f"t2d: expected {vocab} tokens, one for each row of the head, found {ids.shape[0]}")
    else:
        raise CheckpointError(f"tensors missing from the checkpoint: d2t (for {vocab} of {target_vocab} tokens)")
    different = ids.unique().shape[0]
    if ids.min() < 0 or ids.max() >= target_vocab or different != vocab:
        raise CheckpointError(
            f"d2t: expected offsets to {vocab} different ids below {target_vocab}, found {different} different ones "
            f"from {int(ids.min())} to {int(ids.max())}"
        )
    return None if vocab == target_vocab and torch.equal(ids, torch.arange(vocab)) else ids


# ---- names and checks ------------------------------------------------------------------------------------------------


def _draft_weights(
    path: Path, target: ModelConfig, dtype: torch.dtype, device: torch.device | str
) -> dict[str, Tensor]:
    """Name without the `model.` prefix, but for multi-token prediction layers -> tensor, mapped from its file; of a
    GGUF file in a dtype, for the meta device without values."""
    if path.suffix == ".gguf":
        return gguf_weights(path, dtype, device == "meta")
    if not path.is_dir():
        raise CheckpointError(f"draft model: expected a folder or a .gguf file, found neither at {path}")
    weights: dict[str, Tensor] = {}
    for stored, tensor in folder_tensors(path):
        name = canonical(stored)
        if not of_prediction_layer(name, target):
            name = stored.removeprefix("model.")
            name = _BLOCK_ALIASES.get(name, name)
            name = _AUX_NORMS.get(name.removesuffix(".weight"), name)
        if name in weights:
            raise CheckpointError(f"draft model {path}: {name} is in the checkpoint twice")
        weights[name] = tensor
    return weights


def _dequantised(weights: dict[str, Tensor], path: Path, dtype: torch.dtype, target: ModelConfig) -> dict[str, Tensor]:
    """Returns the weights of a head, of which none is quantised any more: how the device holds them is said by their
    format."""
    some = next((name for name, tensor in weights.items() if is_quantised(name, tensor)), None)
    if some is None or any(of_prediction_layer(name, target) for name in weights):
        return weights
    try:
        quantization = config_of_layers(read_config(path), 1).quantization
        if quantization is None:
            raise CheckpointError(
                f"expected quantization_config in its config.json, for {some} is of a quantised matrix"
            )
        values = assembled(quantization, weights.items())
        return {name: value.dense(dtype) if isinstance(value, QuantizedRows) else value for name, value in values}
    except CheckpointError as error:
        raise CheckpointError(f"draft model {path}: {error}") from None


def _warn_of_changes(
    head: EagleHead | Eagle3Head | BlockHead, stored: torch.dtype, dtype: torch.dtype, context_length: int | None
) -> None:
    config, target = head.config, head.target
    if stored != dtype:
        names = (str(one).removeprefix("torch.") for one in (stored, dtype))
        logger.warning("the draft model is stored in %s and cast to %s", *names)
    positions = min(context_length or target.config.max_positions, target.config.max_positions)
    if config.max_positions >= positions:
        return
    windows = [getattr(layer.mixer, "window", 0) for layer in config.layers]
    if isinstance(head, BlockHead):
        windows = list(head.config_of_block.windows)
    if all(windows):
        window = max(windows)
        logger.info(
            "the draft model knows %d positions, and is used up to %d: its own attention sees the last %d",
            config.max_positions, positions, window,
        )  # fmt: skip
    else:
        logger.warning(
            "the draft model's limit of %d positions is raised to %d: fewer drafts may be accepted beyond it",
            config.max_positions,
            positions,
        )


def _finish(head: Head, token_ids: Tensor | None, started: float, dummy: bool) -> Head:
    without_data = head.target.norm.weight.is_meta  # as `engine.startup.precompile` has models
    assert without_data or not any(param.is_meta for param in head.parameters()), "names() is not complete"
    if token_ids is not None:
        if isinstance(head, Eagle3Head | BlockHead):
            logger.warning("the token map is ignored: this head is trained for tokens of its own")
        else:
            head.restrict(token_ids)
    logger.info(
        "draft head %s: %.2f s, %.2f GB; %s, layers %d, hidden states %s of the target, %d tokens",
        "made of random weights (load_format dummy)" if dummy else "loaded",
        time.perf_counter() - started,
        (sum(p.nbytes for p in head.parameters()) + sum(op.sizes.total() for op in operations(head))) / 1e9,
        type(head).__name__,
        head.config.num_layers,
        ", ".join(map(str, head.aux_layers)),
        head.vocab,
    )
    log_blocks(head)
    log_groups(head)
    return head.requires_grad_(False)
