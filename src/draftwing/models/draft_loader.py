"""Loads draft heads: what kind one is and which parts it has are told by its weights, sizes by its config.

Published configs name their architecture in a dozen ways, and some keys mean different things to different trainers,
so a key is only believed where the weights cannot tell.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from draftwing.errors import CheckpointError
from draftwing.models.config import ModelConfig, from_hf
from draftwing.models.decoder import DecoderModel
from draftwing.models.eagle3_head import Eagle3Config, Eagle3Head, first_layer_name
from draftwing.models.eagle_head import EagleHead
from draftwing.models.feature_head import FeatureHead
from draftwing.models.loader import fill_parameters, folder_tensors, load_config, read_json
from draftwing.models.mtp_head import MTPHead
from draftwing.models.names import MTP_PREFIX, canonical

if TYPE_CHECKING:
    from draftwing.spec.heads import DraftHead

logger = logging.getLogger(__name__)

AuxLayerIds = Literal["auto", "output", "boundary"]
Kind = Literal["EAGLE", "EAGLE3", "MTP"]
Weights = Mapping[str, Tensor]

# Multi-token prediction layers as DeepSeek and GLM (eh_proj) and Qwen3-Next (mtp.) name them.
_UNSERVED_MTP = re.compile(r"(^|\.)(eh_proj|shared_head)\.|^mtp\.")
_LAYER = re.compile(r"layers\.(\d+)\.")


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
) -> DraftHead:
    """The head in the folder `path` for `target`; `algorithm` is EAGLE, NEXTN or EAGLE3.

    aux_layer_ids: what ids of an EAGLE-3 config count: layers whose output is meant, boundaries between layers (0 the
    embedding), or the one that the ids look like.
    token_ids [n] int64: the target's tokens that may be drafted, distinct and ascending; EAGLE-3 heads have their own.
    context_length: positions that will be used, where these are fewer than the target's.

    Raises CheckpointError for a head of another kind, target, vocabulary or size, and for missing tensors.
    """
    started, path = time.perf_counter(), Path(path)
    weights = _draft_weights(path)
    kind = head_kind(weights, path)
    expected = "EAGLE3" if algorithm == "EAGLE3" else "EAGLE"
    if expected != ("EAGLE3" if kind == "EAGLE3" else "EAGLE"):
        raise CheckpointError(
            f"{path} holds {_ARTICLE[kind]}: expected --speculative-algorithm {_ALGORITHM[kind]}, found {algorithm}"
        )
    if kind == "MTP":
        return load_mtp_head(path, target, dtype, device, token_ids=token_ids)
    try:
        raw = flatten_config(read_json(path / "config.json"))
        config = draft_config(raw, weights)
        _check_target(config, raw, target, kind)
    except CheckpointError as error:
        raise CheckpointError(f"draft model {path}: {error}") from None
    head: EagleHead | Eagle3Head
    try:
        if kind == "EAGLE":
            head = _eagle(config, weights, target, dtype, device)
        else:
            head = _eagle3(config, raw, weights, target, aux_layer_ids, dtype, device)
    except CheckpointError as error:
        raise CheckpointError(f"draft model {path}: {error}") from None
    _warn_of_changes(config, weights["fc.weight"].dtype, dtype, target, context_length)
    return _finish(head, token_ids, started)


def load_mtp_head(
    path: str | Path,
    target: DecoderModel,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    token_ids: Tensor | None = None,
) -> DraftHead:
    """The multi-token prediction layers stored with a model, mostly the target itself: `path` is its folder.

    token_ids: as for `load_draft_head`.  Raises CheckpointError where there are none that can be served.
    """
    started, path = time.perf_counter(), Path(path)
    found = {} if path.suffix == ".gguf" else {canonical(n): t for n, t in folder_tensors(path) if _is_mtp(n)}
    weights = {name: tensor for name, tensor in found.items() if name.startswith(MTP_PREFIX)}
    if not weights:
        if found:
            raise _unserved_mtp(path, next(iter(found)))
        raise CheckpointError(
            f"{path} has no multi-token prediction layers ({MTP_PREFIX}*): give a draft model with "
            "--speculative-draft-model-path"
        )
    config = load_config(path)
    for name in ("hidden_size", "vocab_size"):
        _same(name, getattr(target.config, name), getattr(config, name))
    layers = 1 + max(int(name.removeprefix(MTP_PREFIX).partition(".")[0]) for name in weights)
    head = MTPHead(target, layers, dtype, "meta")
    fill_parameters(head, head.names(), weights.items(), device)
    return _finish(head, token_ids, started)


def head_kind(weights: Weights, path: Path) -> Kind:
    """What the tensors named as in `_draft_weights` are; raises CheckpointError for what is no head served here."""
    for name in weights:
        if name.startswith(MTP_PREFIX):
            return "MTP"
        if _UNSERVED_MTP.search(name):
            raise _unserved_mtp(path, name)
    if "mask_hidden" in weights:
        raise CheckpointError(f"{path} holds a head for parallel drafting (mask_hidden), which is not supported")
    fc, q = weights.get("fc.weight"), _first_q(weights)
    if fc is not None and q is not None and fc.dim() == q.dim() == 2:
        if q.shape[1] == 2 * fc.shape[0] or {"d2t", "t2d"} & set(weights):
            return "EAGLE3"
        if fc.shape[1] == 2 * fc.shape[0] and "layers.0.input_layernorm.weight" not in weights:
            return "EAGLE"
    if any(name.startswith("midlayer.") for name in weights):
        return "EAGLE3"
    hint = ", or --speculative-algorithm STANDALONE for a model of its own" if fc is None else ""
    shown = ", ".join(f"{name} {list(weights[name].shape)}" for name in sorted(weights)[:4])
    raise CheckpointError(
        f"{path} holds no draft head of a kind that is served: expected the tensors of an EAGLE, EAGLE-3 or "
        f"multi-token prediction head (fc.weight and layers.0.* or midlayer.*){hint}; found {shown}, ..."
    )


def flatten_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config.json on one level: those of `eagle_config`, and, in the speculators layout, of the one
    layer's own config, which the outer keys overrule."""
    flat = {key: value for key, value in raw.items() if key not in ("eagle_config", "transformer_layer_config")}
    if "transformer_layer_config" in raw or "speculators_model_type" in raw:
        kind = raw.get("speculators_model_type", "eagle3")
        if kind != "eagle3":
            raise CheckpointError(f"speculators_model_type: expected 'eagle3', found {kind!r}")
        inner = raw.get("transformer_layer_config") or {}
        flat = {**inner, **{key: value for key, value in flat.items() if value is not None}}
        flat.setdefault("norm_before_residual", True)
    for key, value in (raw.get("eagle_config") or {}).items():
        flat.setdefault(key, value)
    return flat


def draft_config(raw: Mapping[str, Any], weights: Weights) -> ModelConfig:
    """Sizes of the draft layers, from flat keys; layers, biases and head norms as the weights have them.

    `bias` speaks of fc in these configs. The rotary base is the draft's own, 10000 where its config has none.
    """
    later = [int(match[1]) for match in map(_LAYER.match, weights) if match]
    config = from_hf(
        {
            "max_position_embeddings": 2048,  # transformers' default for the family
            **raw,
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": 1 + max(later, default=0),
            "tie_word_embeddings": False,
        }
    )
    first = "midlayer" if any(name.startswith("midlayer.") for name in weights) else "layers.0"
    return replace(
        config,
        qkv_bias=f"{first}.self_attn.q_proj.bias" in weights,
        o_bias=f"{first}.self_attn.o_proj.bias" in weights,
        mlp_bias=f"{first}.mlp.down_proj.bias" in weights,
        qk_norm=f"{first}.self_attn.q_norm.weight" in weights,
    )


def resolve_taps(raw: Mapping[str, Any], count: int, layers: int, convention: AuxLayerIds) -> tuple[int, ...]:
    """Residual streams that an EAGLE-3 head reads, numbered as `DecoderModel.forward` does.

    count: how many fc has columns for.  layers: of the target.

    Ids are written in two ways: k for the output of layer k, or k for the stream after k layers. Files say nothing of
    it, but the first and last ids that trainers choose by default do.
    """
    ids = raw.get("eagle_aux_hidden_state_layer_ids")
    if raw.get("use_aux_hidden_state") is False:
        raise CheckpointError("use_aux_hidden_state = false is not supported")
    if ids is None:
        ids, boundary = [2, layers // 2, layers - 3], True
    elif convention != "auto":
        boundary = convention == "boundary"
    else:
        boundary = max(ids) == layers or (ids[0] == 2 and max(ids) < layers)
        meaning = "boundaries between layers" if boundary else "layers whose output is meant"
        logger.info("aux layer ids %s are taken as %s", ids, meaning)
    if len(ids) != count:
        raise CheckpointError(f"fc.weight has columns for {count} hidden states, the config names the layers {ids}")
    taps = tuple(i if boundary else i + 1 for i in ids)
    if not all(0 <= tap <= layers for tap in taps):
        highest = layers if boundary else layers - 1
        raise CheckpointError(f"aux layer ids: expected 0 to {highest} for a target of {layers} layers, found {ids}")
    return taps


# ---- the kinds -------------------------------------------------------------------------------------------------------


def _eagle(
    config: ModelConfig, weights: Weights, target: DecoderModel, dtype: torch.dtype, device: torch.device | str
) -> EagleHead:
    head = EagleHead(config, target, "fc.bias" in weights, dtype, "meta")
    fill_parameters(head, head.names(), _without_shared(weights, "embed_tokens.weight", "lm_head.weight"), device)
    return head


def _eagle3(
    config: ModelConfig,
    raw: Mapping[str, Any],
    weights: Weights,
    target: DecoderModel,
    convention: AuxLayerIds,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Eagle3Head:
    eagle = _eagle3_config(config, raw, weights, target, convention)
    head = Eagle3Head(config, eagle, target, dtype, "meta")
    weights = _published_names(weights, config.num_layers)
    maps = {name: weights.pop(name) for name in ("d2t", "t2d") if name in weights}
    tensors = weights.items() if eagle.own_embedding else _without_shared(weights, "embed_tokens.weight")
    fill_parameters(head, head.names(), tensors, device)
    ids = _target_ids(maps, head.vocab, target.config.vocab_size)
    head.target_ids = None if ids is None else ids.to(device)
    return head


def _eagle3_config(
    config: ModelConfig, raw: Mapping[str, Any], weights: Weights, target: DecoderModel, convention: AuxLayerIds
) -> Eagle3Config:
    tap_size, vocab = target.config.hidden_size, target.config.vocab_size
    columns = weights["fc.weight"].shape[1] if "fc.weight" in weights else 0
    if columns == 0 or columns % tap_size:
        raise CheckpointError(
            f"fc.weight: expected a multiple of the target's hidden size {tap_size} as columns, found {columns}"
        )
    count = columns // tap_size
    _same("num_aux_hidden_states", count, raw.get("num_aux_hidden_states") or count)
    own_embedding = tap_size != config.hidden_size
    lm_head, draft_vocab = weights.get("lm_head.weight"), raw.get("draft_vocab_size")
    rows = draft_vocab or (vocab if lm_head is None else lm_head.shape[0])
    if lm_head is None and (rows != vocab or own_embedding):
        raise CheckpointError("tensors missing from the checkpoint: lm_head.weight")
    if raw.get("norm_output"):
        logger.info("norm_output: what the head is fed back is normed; some trainers mean something else by this key")
    second = "layers.1.hidden_norm.weight"
    return Eagle3Config(
        taps=resolve_taps(raw, count, target.config.num_layers, convention),
        tap_size=tap_size,
        draft_vocab=0 if lm_head is None else rows,
        fc_bias="fc.bias" in weights,
        own_embedding=own_embedding,
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
        norm_before_fc=_has(raw, ("norm_before_fc",), "input_norm.weight" in weights),
        fc_norm=_has(raw, ("fc_norm", "use_aux_norm"), "fc_norm.0.weight" in weights),
        norm_output=bool(raw.get("norm_output", False)),
        later_norm="hidden_norm" if second in weights else "input_layernorm",
    )


def _target_ids(maps: Weights, vocab: int, target_vocab: int) -> Tensor | None:
    """The target's id of each draft token [vocab] int64: `d2t` holds the offset of each, `t2d` which are kept."""
    kept = maps.get("t2d")
    if kept is not None and kept.shape != (target_vocab,):
        raise CheckpointError(f"t2d: expected shape {[target_vocab]}, found {list(kept.shape)}")
    offsets = maps.get("d2t")
    if offsets is not None:
        if offsets.shape != (vocab,):
            raise CheckpointError(f"d2t: expected shape {[vocab]}, found {list(offsets.shape)}")
        ids = torch.arange(vocab) + offsets.to(torch.int64)
        if kept is not None and not torch.equal(kept.nonzero().flatten(), ids.sort().values):
            logger.warning("t2d and d2t of the draft model disagree; d2t is used")
    elif kept is not None and vocab != target_vocab:
        ids = kept.nonzero().flatten()
        if ids.shape[0] != vocab:
            raise CheckpointError(f"t2d: expected {vocab} tokens, one for each row of the head, found {ids.shape[0]}")
    elif vocab == target_vocab:
        return None
    else:
        raise CheckpointError(
            f"tensors missing from the checkpoint: d2t (the head has {vocab} of {target_vocab} tokens)"
        )
    if ids.min() < 0 or ids.max() >= target_vocab or ids.unique().shape[0] != vocab:
        raise CheckpointError(
            f"d2t: expected offsets to {vocab} different ids below {target_vocab}, found {ids.unique().shape[0]} "
            f"different ones from {int(ids.min())} to {int(ids.max())}"
        )
    return None if torch.equal(ids, torch.arange(target_vocab)) else ids


# ---- names and checks ------------------------------------------------------------------------------------------------

_ARTICLE = {"EAGLE": "an EAGLE head", "EAGLE3": "an EAGLE-3 head", "MTP": "multi-token prediction layers"}
_ALGORITHM = {"EAGLE": "EAGLE", "EAGLE3": "EAGLE3", "MTP": "NEXTN"}
_AUX_NORMS = {f"aux_norm_{name}.weight": f"fc_norm.{i}.weight" for i, name in enumerate(("low", "mid", "high"))}


def _draft_weights(path: Path) -> dict[str, Tensor]:
    """Name without the `model.` prefix (but for built-in layers) -> tensor, still in the file. Reads no weights."""
    if not path.is_dir():
        raise CheckpointError(f"draft model: expected a folder, found none at {path}")
    weights: dict[str, Tensor] = {}
    for stored, tensor in folder_tensors(path):
        name = stored if stored.startswith(MTP_PREFIX) else stored.removeprefix("model.")
        name = _AUX_NORMS.get(name, name)
        if name in weights:
            raise CheckpointError(f"{name} is in the checkpoint twice")
        weights[name] = tensor
    return weights


def _published_names(weights: Weights, layers: int) -> dict[str, Tensor]:
    """The first layer named as `Eagle3Head.names` has it."""
    first = first_layer_name(layers)
    return {re.sub(r"^(midlayer|layers\.0)\.", f"{first}.", name): tensor for name, tensor in weights.items()}


def _without_shared(weights: Weights, *shared: str) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights.items():
        if name not in shared:
            yield name, tensor
            continue
        # Exports carry frozen copies of these, and some random values.
        logger.info("%s of the draft model is not read: the target's own is used", name)


def _first_q(weights: Weights) -> Tensor | None:
    name = "self_attn.q_proj.weight"
    return weights.get(f"midlayer.{name}", weights.get(f"layers.0.{name}"))


def _has(raw: Mapping[str, Any], keys: tuple[str, ...], stored: bool) -> bool:
    """A part that the config asks for or forbids; where it says nothing, the part is there if its weights are."""
    said = [raw[key] for key in keys if raw.get(key) is not None]
    return any(said) if said else stored


def _is_mtp(name: str) -> bool:
    return canonical(name).startswith(MTP_PREFIX) or _UNSERVED_MTP.search(name) is not None


def _unserved_mtp(path: Path, name: str) -> CheckpointError:
    return CheckpointError(
        f"{path} holds multi-token prediction layers ({name}) of a target that is not served yet; expected MiMo's "
        f"({MTP_PREFIX}*)"
    )


def _check_target(config: ModelConfig, raw: Mapping[str, Any], target: DecoderModel, kind: Kind) -> None:
    _same("vocab_size", target.config.vocab_size, config.vocab_size)
    hidden = (raw.get("target_hidden_size") if kind == "EAGLE3" else None) or config.hidden_size
    _same("hidden_size of the target it was trained for", target.config.hidden_size, hidden)


def _same(what: str, expected: int, found: int) -> None:
    if found != expected:
        raise CheckpointError(f"{what}: expected {expected}, found {found}")


def _warn_of_changes(
    config: ModelConfig, stored: torch.dtype, dtype: torch.dtype, target: DecoderModel, context_length: int | None
) -> None:
    if stored != dtype:
        logger.warning("the draft model is stored in %s and cast to %s", _short(stored), _short(dtype))
    positions = min(context_length or target.config.max_positions, target.config.max_positions)
    if config.max_positions < positions:
        logger.warning(
            "the draft model's limit of %d positions is raised to the target's %d: fewer of its tokens may be accepted "
            "further on",
            config.max_positions,
            positions,
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _finish(head: FeatureHead, token_ids: Tensor | None, started: float) -> Any:
    if token_ids is not None:
        if isinstance(head, Eagle3Head):
            logger.warning("the token map is ignored: an EAGLE-3 head is trained with a vocabulary of its own")
        else:
            head.restrict(token_ids.to(head._norm_weight().device))
    parameters = list(head.parameters())
    size = sum(p.nbytes for p in parameters) / 1e9
    logger.info(
        "draft head loaded: %.2f s, %.2f GB; %s, %d layers, hidden states %s of the target, %d tokens",
        time.perf_counter() - started,
        size,
        type(head).__name__,
        head.config.num_layers,
        head.taps,
        head.vocab,
    )
    return head.requires_grad_(False)
