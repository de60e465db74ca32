"""`Family`: what an architecture's name implies of its config, its layers and the names of its tensors, and what the
functions of families have in common."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
from torch import Tensor

from draftwing.errors import CheckpointError
from draftwing.gguf_file import GGUFFile
from draftwing.layers.attention import AttentionConfig
from draftwing.layers.config import LayerConfig, MixerConfig
from draftwing.layers.encoder import EncoderConfig
from draftwing.layers.part_configs import Activation, ExpertConfig
from draftwing.layers.rope import RopeConfig
from draftwing.models.fields import WIDEST, Fields, Values, max_experts
from draftwing.models.positions import WindowSwitch
from draftwing.models.towers.base import TowerConfig
from draftwing.ops.experts.routing import Routing

# Values of `expert_gating_func` in GGUF files: none said, a softmax, sigmoids, and a softmax of those chosen, which is
# one of all, renormalised.
UNSAID, SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 0, 1, 2, 3


class ExpertNames(NamedTuple):
    """What a checkpoint calls the parts of a mixture of experts, below the layer; gate, up and down below an expert."""

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "mlp.shared_expert"
    correction: str = "mlp.gate.e_score_correction_bias"
    into: str = "mlp.fc1_latent_proj"
    back: str = "mlp.fc2_latent_proj"


_EXPERT_NAMES = ExpertNames()


class Whole(NamedTuple):
    """A model for texts and images around a language model: its `model_type`, and what files leave out of the config of
    that within; and the `model_type` of that, where several families are in such models.

    tower: makes what reads images of its config and of `vision_config`; None: that is not served.  sections: pairs of a
    head that are turned by time, height and width, by turns, where a config does not say; none: positions are plain.
    only: values that keys of the language model may have, which means something else, or nothing, within this one.
    """

    model_type: str
    defaults: Mapping[str, Any]
    text: str = ""
    tower: Callable[[Fields, Fields], TowerConfig] | None = None
    sections: tuple[int, ...] = ()
    only: Mapping[str, tuple[Any, ...]] = MappingProxyType({})


_PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "backbone.": "model.",
    "language_model.lm_head.": "lm_head.",
}


def own_name(name: str) -> str:
    """Returns the name of a language model's tensor without that of the model around it."""
    for prefix, instead in _PREFIXES.items():
        if name.startswith(prefix):
            return instead + name.removeprefix(prefix)
    return name


class ExpertMetadata(NamedTuple):
    """What the metadata of GGUF files say of experts, and what they need not say.

    gating: values of `expert_gating_func` that are served.  neutral: other keys, with the values at which they change
    nothing.  grouped: whether keys speak of groups, of a scale and of norms; renormalised: the last where they do not.
    shared: whether there may be one for all rows.  latent: whether keys speak of another size of rows.  as_mlp: whether
    one may be as wide as a file says of an MLP.  near: as `Routing` has it.
    Others: as `ExpertConfig` has them.
    """

    gating: tuple[int, ...] = (UNSAID, SOFTMAX)
    neutral: Mapping[str, Values] = {
        "expert_group_count": (0, 1),
        "expert_group_used_count": (0, 1),
        "expert_shared_count": (0,),
        "expert_weights_scale": (0, 1),
    }
    sigmoid: bool = False
    corrected: bool = False
    grouped: bool = False
    renormalised: bool = True
    shared: bool = False
    latent: bool = False
    as_mlp: bool = False
    near: float = 0.0
    more: Mapping[str, Any] = {}


@dataclass(frozen=True)
class InGGUF:
    """How a family is stored in GGUF files.

    architecture: `general.architecture`.  others: of files that say another one.  when: says of a file whether it is of
    this family, which is not the one that the architecture else means; None: it is that.
    names: of tensors of a block, besides those that
    all have, with what they are called in a folder; top_names: of other tensors.  experts: None where no file speaks of
    any.  fields: makes metadata of what layers have in common.  layers: makes so many of the metadata as they are in
    the file and of what layers have in common.  own_windows: whether that reads of windows, too.  windowless: whether
    a file that says of no window has none.
    encoder: makes what an encoder has beside its layers.  next_norm: the part of a block that is the first norm of the
    next one.  assistant: the architecture of its assistants.
    theta: of the rotary embedding where a file has none.  scalar: of attention, by itself, the hidden size and the
    number of layers.  yarn_log: the key that says that scores are scaled in place of heads.  yarn_truncates: as
    `RopeConfig.truncate`.  permuted: whether rows of queries and keys are in pairs for rotation.
    longrope: whether files have its factors.  turns: whether any layer turns its heads.  more: makes tensors, under the
    names of folders, of the metadata of a file with so many layers.
    """

    architecture: str
    others: tuple[str, ...] = ()
    when: Callable[[GGUFFile, Fields], bool] | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    top_names: Mapping[str, str] = field(default_factory=dict)
    experts: ExpertMetadata | None = None
    fields: Callable[[Fields], Fields] | None = None
    layers: Callable[[GGUFFile, Fields, LayerConfig, int], tuple[LayerConfig, ...]] | None = None
    own_windows: bool = False
    windowless: bool = False
    encoder: Callable[[GGUFFile, Fields], EncoderConfig] | None = None
    next_norm: str = ""
    assistant: str = ""
    theta: float | None = None
    scalar: Callable[[AttentionConfig, int, int], int] | None = None
    yarn_log: str = ""
    yarn_truncates: bool = True
    permuted: bool = False
    longrope: bool = False
    turns: Callable[[Fields], bool] | bool = True
    more: Callable[[GGUFFile, int], Iterator[tuple[str, Tensor]]] | None = None


@dataclass(frozen=True)
class Family:
    """What an architecture name implies. `True` / `False` for a bias is fixed, else it is the key that says it."""

    model_type: str
    qkv_bias: bool | str = "attention_bias"
    o_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = "mlp_bias"
    head_bias: bool | str = False  # of the head
    qk_norm: bool | Literal["key", "whole"] = False  # "key": `use_qk_norm`, "whole": of whole projections
    norms_after: bool = False  # whether heads are normed when they are turned
    head_dim: int | None = None  # when the config has none; None: hidden_size / heads
    sliding_window: int | None = None  # when the config has no such key, 0: none; None: the key is a leftover
    window_switch: WindowSwitch = ""
    window_pattern: int = 0  # without `layer_types` one in so many layers has no window, 0: none of them
    pattern_key: bool = True  # whether `sliding_window_pattern` may say another number
    theta: float = 10000.0  # `rope_theta` when the config has none
    eps: float = 1e-6  # when the config has none
    eps_key: str = "rms_norm_eps"
    bias: bool = False  # that of queries, keys and values when the config has none
    scaled: bool = False  # whether a config without a rotary embedding means a scaled one, which is refused
    # The same of `rope_local_base_freq`, 0: it is that of all, not scaled; None: all layers have one rotary embedding.
    local_theta: float | None = None
    nope: Callable[[Fields, Sequence[int]], Collection[int]] | None = None  # by windows: which layers turn nothing
    turns: Callable[[Fields], bool] | bool = True  # whether any layer does
    query_scale: Literal["", "whole", "apart"] = ""  # "": it reads no `llama_4_scaling_beta`; see `RopeConfig.apart`
    sinks: bool = False
    wide_norms: bool = False
    norm_offset: float = 0.0
    in_norms: bool = True
    out_norms: bool = False
    centred: bool = False  # whether norms are LayerNorm
    norm_bias: bool = False  # whether these have biases
    learned_positions: bool = False  # whether embeddings have those of positions added
    bare_norms: bool = False  # whether norms of layers have no weights, and those of heads, where these are normed
    normed_embeddings: bool = False
    clips: bool = False  # whether it reads `clip_qkv`
    reversed: bool = False  # as `AttentionConfig` has it
    parallel: bool = False  # whether mixer and MLP are beside each other
    activation: Activation = "silu"
    scaled_embeddings: bool = False  # whether they are multiplied with the root of the hidden size
    multipliers: bool = False  # whether it reads factors of embeddings and of what layers add, and a divisor of logits
    attention_scalar: int = 0  # `query_pre_attn_scalar` when the config has none, 0: there is no such key
    tied: bool = False  # `tie_word_embeddings` when the config has none
    soft_cap: bool = False  # whether it reads `final_logit_softcapping`
    score_cap: bool = False  # whether it reads `attn_logit_softcapping`
    gated: bool = False  # whether attention has gates
    gate_rows: Literal["", "head", "element"] = ""  # in a matrix of their own, of what each is; "": in that of queries
    turns_parts: bool = False  # whether a part of each head may be turned
    rotary: float = 1.0  # that share, `partial_rotary_factor` when the config has none
    rope_interleaved: bool = False  # whether a checkpoint has elements that are turned together beside each other
    # Whether it has one matrix of queries, keys and values, "heads": in a folder with those of a key head together.
    fused_qkv: bool | Literal["heads"] = False
    parted: bool = False  # whether it is three in transformers, which such a family's adapters may be of
    fused_mlp: bool = False  # the same of gates and ups
    # Of the config and the number of layers: experts of layers that have them, None where none has; and which layers
    # have an MLP in their place.
    experts: Callable[[Fields, int], ExpertConfig | None] | None = None
    dense_layers: Callable[[Fields, int], Collection[int]] | None = None
    # Where layers differ in more than windows: makes so many of the config and of what all have in common.
    layers: Callable[[Fields, LayerConfig, int], tuple[LayerConfig, ...]] | None = None
    other_rope: Callable[[Fields], RopeConfig] | None = None  # the second rotary embedding of what this makes
    keys: Callable[[Fields], dict[str, Any]] | None = None  # what its config says in keys of others
    # Keys that nobody reads, with the values at which they change nothing, None: any: what the architecture does
    # anyway, or what its own code in transformers does not look at.
    neutral: Mapping[str, Values] = field(default_factory=dict)
    wholes: Mapping[str, Whole] = field(default_factory=dict)  # by their own architecture
    # Names of tensors in a folder: of experts, what is called otherwise than in Llama below a layer, the last norm.
    expert_names: ExpertNames = _EXPERT_NAMES
    layer_names: Mapping[str, str] = field(default_factory=dict)
    final_norm: str = "model.norm"  # {}: the number of layers
    # Yields name and value of a folder's tensor as they are here, where it has another name there or is several in one.
    apart: Callable[[str, Any], Iterable[tuple[str, Any]]] | None = None
    # What matrices are multiplied with, by their names below a layer.
    factors: Callable[[Fields], Mapping[str, float]] | None = None
    # Whether tensors of all experts have a gate, its up and so on, transposed, and may be in MXFP4.
    interleaved: bool = False
    across: bool = False  # whether they are transposed alone
    # How prediction layers are named: `model.mtp_layers.N`; `mtp`, of which there is one, that reads the embedding
    # first; or such a one as the layer behind the model's own. "": there are none with the model.
    predicts: Literal["", "mtp_layers", "mtp", "numbered"] = ""
    predicts_dense: bool = False  # whether such a layer has an MLP, though others have experts
    predicts_kind: str = ""  # `mtp_layer_types` of it when the config has none; "": as the first layer with attention
    mtp_names: Mapping[str, str] = field(default_factory=dict)  # what is called otherwise below `mtp`, without layers
    assistants: tuple[str, ...] = ()  # `model_type` of models that draft by its keys and values
    encoder: Callable[[Fields], EncoderConfig] | None = None  # what it has beside its layers, which see whole texts
    gguf: InGGUF | None = None

    def rows_of_gate(self, head_dim: int) -> int:
        """Returns `AttentionConfig.gate_rows` of heads of this size."""
        return {"": 0, "head": 1, "element": head_dim}[self.gate_rows]

    @property
    def one_predicts(self) -> bool:
        """Returns whether there is one prediction layer, which reads the embedding first."""
        return self.predicts in ("mtp", "numbered")


def softmax_experts(
    fields: Fields, layers: int, count_key: str, ffn_key: str, renormalise: bool = True, **more: Any
) -> ExpertConfig:
    """Returns experts that rows choose by a softmax. count_key: of how many there are, where neither it nor its other
    name is there: one is in files of old, the other in those of newer libraries.  more: as `ExpertConfig` has it."""
    named = [key for key in ("num_experts", "num_local_experts") if fields.get(key) is not None]
    count = fields.whole((*named, count_key)[0], high=max_experts(layers))
    routing = Routing(fields.whole("num_experts_per_tok", high=count), renormalise=renormalise)
    return ExpertConfig(count, routing, fields.whole(ffn_key, high=WIDEST), **more)


def renamed(parts: Mapping[str, str]) -> Callable[[str, Any], Iterable[tuple[str, Any]]]:
    """Returns a function as `Family.apart` that changes parts of names alone. parts: what they are here, by what they
    are in a folder."""

    def apart(name: str, value: Any) -> Iterable[tuple[str, Any]]:
        for theirs, ours in parts.items():
            name = name.replace(theirs, ours)
        return [(name, value)]

    return apart


def query_scalar(fields: Fields, key: str, default: float) -> int:
    """Returns the number by whose root scores are divided, of a factor of scores: a whole number in all published
    models. default: of the factor, 0: none. Raises CheckpointError for a factor of which it is not one."""
    if default and fields.has(key) and fields.get(key) is None:  # which others take for a scale of their own
        raise fields.unlike(key, "a number")
    factor = fields.number(key, 1e-3, 1, default)
    scalar = round(factor**-2) if factor else 0
    if scalar and abs(scalar**-0.5 - factor) > 1e-6 * factor:
        raise fields.unsupported(key, factor)
    return scalar


def unscaled(fields: Fields) -> dict[str, Any]:
    """Returns factors of Granite's configs as they are in those of a family that has others, or none. Raises
    CheckpointError where a config has one of them all the same."""
    keys = "embedding_multiplier", "residual_multiplier", "logits_scaling"
    for key in keys:
        fields.check(key, (1,))
    return dict.fromkeys(keys, 1.0)


def layers_like(
    layer: LayerConfig,
    attention: AttentionConfig,
    windows: Sequence[int],
    local_rope: bool = False,
    dense: Collection[int] = (),
    nope: Collection[int] = (),
) -> tuple[LayerConfig, ...]:
    """Returns as many layers like one as there are windows, with its attention, as families have them whose layers
    differ in little.

    windows: of each layer, 0: none.  local_rope: whether layers with a window are turned
    by the second rotary embedding.  dense: which layers have an MLP in place of experts.  nope: which turn nothing, of
    which the second rotary embedding is then.
    """
    kinds = [(window, int((local_rope and window > 0) or i in nope)) for i, window in enumerate(windows)]
    of_kind = {kind: replace(attention, window=kind[0], rope=kind[1]) for kind in kinds}
    made = [replace(layer, mixer=of_kind[kind]) for kind in kinds]
    return tuple(replace(one, experts=None) if i in dense else one for i, one in enumerate(made))


def without_window(fields: Fields, windows: Sequence[int]) -> Collection[int]:
    """Returns which layers have no window, as `Family.nope`."""
    return {i for i, window in enumerate(windows) if not window}


ATTENTION, RECURRENT = "full_attention", "linear_attention"  # in `layer_types`
MOST_TAPS = 64  # of a layer's convolution: published ones have 3 or 4


def layers_by_kind(
    fields: Fields, layer: LayerConfig, kinds: list[str], mixers: Mapping[str, MixerConfig]
) -> tuple[LayerConfig, ...]:
    """Returns layers like one but for their mixers. kinds: of each layer, where `layer_types` does not say.  Raises
    CheckpointError where none has attention."""
    given = fields.texts("layer_types")
    for kind in set(given) - set(mixers):
        raise fields.unsupported("layer_types", kind)
    if given and len(given) < len(kinds):
        raise fields.unlike("layer_types", f"one for each of {len(kinds)} layers")
    kinds = (given or kinds)[: len(kinds)]
    if ATTENTION not in kinds:
        raise CheckpointError(f"{fields.where}: expected a layer with attention, found none")
    of_kind = {kind: replace(layer, mixer=mixer) for kind, mixer in mixers.items()}
    return tuple(of_kind[kind] for kind in kinds)


def attends_by_heads(fields: Fields, count: int) -> list[bool]:
    """Returns which layers of a GGUF file attend: all but those for which it lists no heads of keys."""
    key = "attention.head_count_kv"
    named = fields.get(key)
    if not isinstance(named, np.ndarray):
        return [True] * count
    if len(named) < count:
        raise fields.unlike(key, f"one for each of {count} layers")
    return [bool(one) for one in named[:count].tolist()]


def layers_by_attention(
    file: GGUFFile, layer: LayerConfig, attends: Sequence[bool], other: MixerConfig
) -> tuple[LayerConfig, ...]:
    """Returns layers like one, which has attention, with another mixer where they do not attend. Raises CheckpointError
    where none does."""
    if not any(attends):
        raise CheckpointError(f"{file.path}: expected a layer with attention, found none")
    return tuple(replace(layer, mixer=layer.mixer if one else other) for one in attends)


def dense_by_kinds(fields: Fields, layers: int) -> frozenset[int] | None:
    """Returns layers with an MLP in place of experts by `mlp_layer_types`, None where a config does not say."""
    kinds = fields.texts("mlp_layer_types")
    if not kinds:
        return None
    if len(kinds) != layers or not {*kinds} <= {"dense", "sparse"}:
        raise fields.unlike("mlp_layer_types", f"dense or sparse for each of {layers} layers")
    return frozenset(i for i, kind in enumerate(kinds) if kind == "dense")


def first_of(fields: Fields) -> Fields:
    """Returns the metadata of a GGUF file with numbers of the first layer in place of one for each."""
    named = {key: fields.get(key) for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length")}
    own = {key: every[0].item() for key, every in named.items() if isinstance(every, np.ndarray) and len(every)}
    return fields.overruled(own)


def each_of(fields: Fields, key: str, count: int, kinds: str) -> list[Any] | None:
    """Returns the first `count` values of an array of one of numpy's kinds; None where it is no array."""
    value = fields.get(key)
    if not isinstance(value, np.ndarray):
        return None
    if value.dtype.kind not in kinds or len(value) < count:
        raise fields.unlike(key, f"one for each of {count} layers")
    found: list[Any] = value[:count].tolist()
    return found


def numbers(fields: Fields, key: str, count: int) -> list[int]:
    """Returns a number for each layer; there may be one for all."""
    found = each_of(fields, key, count, "iu")
    if found is None:
        return [fields.whole(key, 1, WIDEST)] * count
    if not all(0 < one <= WIDEST for one in found):
        raise fields.unlike(key, f"numbers from 1 to {WIDEST}")
    return found
