"""What the metadata and the tensors of a GGUF file say of its model's config."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from draftwing.errors import CheckpointError
from draftwing.gguf_file import GGUFFile
from draftwing.layers.attention import AttentionConfig
from draftwing.layers.config import LayerConfig
from draftwing.layers.part_configs import ExpertConfig, NormConfig
from draftwing.layers.rope import NOPE, RopeConfig, yarn_attention_factor
from draftwing.models.config import ModelConfig
from draftwing.models.families import FAMILIES, in_gguf
from draftwing.models.families.unserved import nearest, refused_head, unserved_in_gguf
from draftwing.models.family import ExpertMetadata, Family, InGGUF, layers_like, query_scalar
from draftwing.models.fields import LARGEST, MAX_LAYERS, WIDEST, Fields, max_experts, refuse_unread_metadata
from draftwing.models.gguf_tensors import EXPERT_PARTS, MXFP4, own_layers
from draftwing.models.hub_files import HEAD
from draftwing.models.pooling import encoder_of
from draftwing.models.positions import SLIDING, context
from draftwing.models.quantised.config import IN_MXFP4
from draftwing.ops.experts.routing import Routing
from draftwing.requests.refusals import show

# Files often name only one end-of-text id, or a wrong one; tokens of these names always end an answer.
END_TOKENS = (
    "<end_of_turn>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|return|>",
    "<|call|>", "<turn|>",
)  # fmt: skip


def model_config(file: GGUFFile) -> ModelConfig:
    """Returns the `ModelConfig` that the metadata and the set of tensors describe."""
    meta, arch, known = file.metadata, file.metadata.get("general.architecture"), in_gguf()
    if not isinstance(arch, str) or arch not in known:
        if isinstance(arch, str) and HEAD.search(arch):
            raise CheckpointError(f"{file.path}: {refused_head(arch)}")
        missing, expected = unserved_in_gguf(arch), nearest(str(arch), known)
        if missing is not None:
            raise CheckpointError(f"{file.path}: {arch} has {missing}, which is not served yet; {expected}")
        raise CheckpointError(f"{file.path}: unknown architecture {show(arch)}; {expected}")

    stored = Fields(meta, str(file.path), f"{arch}.")
    by_file = FAMILIES[known[arch]].gguf
    assert by_file is not None
    fields = stored if by_file.fields is None else by_file.fields(stored)
    size, tokenizer = fields.whole, Fields(meta, str(file.path), "tokenizer.ggml.")
    if not by_file.longrope:
        _refuse_longrope(file)
    architecture = _other(file, fields, arch) or known[arch]
    family = FAMILIES[architecture]
    form = family.gguf
    assert form is not None
    experts = _experts(file, fields, family)
    hidden, heads = size("embedding_length", high=WIDEST), size("attention.head_count", high=WIDEST)
    layers = own_layers(fields)
    if layers > len(file.tensors):
        raise CheckpointError(f"{file.path}: {arch}.block_count is {layers}, and there are {len(file.tensors)} tensors")
    turns = form.turns if isinstance(form.turns, bool) else form.turns(fields)
    attention = _attention(file, fields, family, hidden, heads, turns)
    if form.scalar is not None:
        attention = replace(attention, scalar=form.scalar(attention, hidden, layers))
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path}: token_embd.weight is missing")
    file.raw("token_embd.weight")  # its shape is believed, so its values must be there
    theta = family.theta if form.theta is None else form.theta
    rope = replace(_rope(file, fields, form, theta), dims=attention.rotary)
    positions = context(rope, size("context_length"))
    if family.query_scale and (beta := fields.number("attention.temperature_scale", 0, 1e3, 0.0)):
        rope = replace(rope, query_beta=beta, apart=family.query_scale == "apart")
        attention = replace(attention, scaled_queries=True)
    if not turns:
        rope = NOPE
    eps = fields.number(f"attention.layer_norm_{'' if family.centred else 'rms_'}epsilon", 0, 1)
    norm = NormConfig(eps, family.wide_norms, family.norm_offset, family.centred, family.norm_bias, family.bare_norms)
    layer = LayerConfig(
        hidden,
        attention,
        ffn=size("feed_forward_length", high=WIDEST, default=experts.ffn if experts is not None else None),
        norm=norm,
        mlp_bias=_has(file, "ffn_down.bias"),
        experts=experts,
        activation=family.activation,
        in_norms=family.in_norms,
        out_norms=family.out_norms,
        parallel=family.parallel,
        residual_scale=_multiplier(fields, family, "residual_scale"),
    )
    dense = {i for i in range(layers) if f"blk.{i}.ffn_gate_inp.weight" not in file.tensors}
    local_rope = _local_rope(fields, family, rope.theta)
    reach = (() if form.own_windows else _windows(fields, layers, family, positions)) or (0,) * layers
    if family.predicts_kind:  # of which files say nothing
        reach = (*reach, max(reach) if family.predicts_kind == SLIDING else 0)
    nope = () if family.nope is None else family.nope(fields, reach)
    made = layers_like(layer, attention, reach, local_rope is not None, dense, nope)
    local_rope = NOPE if nope else local_rope
    if form.layers is not None:
        own = form.layers(file, stored, layer, layers)
        made = tuple(replace(one, experts=like.experts) for one, like in zip(own, made, strict=True))
    encoder = None if form.encoder is None else encoder_of(file.path, form.encoder(file, stored))
    found = ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        max_positions=positions if encoder is None else encoder.context,
        learned_positions=positions if family.learned_positions else 0,
        layers=made[:layers],
        ropes=(rope,) if local_rope is None else (rope, local_rope),
        norm=norm,
        embed_scale=hidden**0.5 if family.scaled_embeddings else _multiplier(fields, family, "embedding_scale"),
        logit_scale=1 / _multiplier(fields, family, "logit_scale"),
        soft_cap=fields.number("final_logit_softcapping", 0, 1e6, 0.0) if family.soft_cap else 0.0,
        tie_embeddings="output.weight" not in file.tensors,
        head_bias="output.bias" in file.tensors,
        stop_ids=_stop_ids(tokenizer),
        suppressed=_ids(tokenizer, "suppress_tokens"),
        quantization=IN_MXFP4 if _holds_mxfp4(file) else None,
        encoder=encoder,
        ahead=made[layers:],
    )
    refuse_unread_metadata(fields)
    return found


def _attention(file: GGUFFile, fields: Fields, family: Family, hidden: int, heads: int, turns: bool) -> AttentionConfig:
    """Returns that of a layer as most are: what differs by layer, `InGGUF.layers` knows."""
    size = fields.whole
    head_dim = size("attention.key_length", high=WIDEST, default=hidden // heads)
    size("attention.value_length", head_dim, head_dim, head_dim)
    least, usual = (2, int(head_dim * family.rotary)) if family.turns_parts else (head_dim, head_dim)
    # Where nothing turns, converters count the hidden size by heads, which need not be a head's size.
    turned = (
        size("rope.dimension_count", least, head_dim, usual) if turns else size("rope.dimension_count", 0, default=0)
    )
    rotary = turned if turns and turned < head_dim else 0
    return AttentionConfig(
        heads,
        kv_heads=_kv_heads(fields, heads),
        head_dim=head_dim,
        sinks=family.sinks,
        qkv_bias=_has(file, "attn_qkv.bias") or _has(file, "attn_q.bias"),
        o_bias=_has(file, "attn_output.bias"),
        qk_norm=_has(file, "attn_q_norm.weight") if family.qk_norm == "key" else bool(family.qk_norm),
        whole_norms=family.qk_norm == "whole",
        norms_after=family.norms_after,
        bare_norms=family.bare_norms,
        clip=fields.number("attention.clamp_kqv", 0, 1e6, 0.0) if family.clips else 0.0,
        gated=family.gated,
        gate_rows=family.rows_of_gate(head_dim),
        rotary=rotary,
        # Of text whose positions are of three kinds converters put what is turned together into halves.
        interleaved=family.rope_interleaved and not fields.has("rope.dimension_sections"),
        fused=bool(family.fused_qkv) and _has(file, "attn_qkv.weight"),  # which some converters take apart
        scalar=query_scalar(fields, "attention.scale", 0.0) if family.multipliers else 0,
        cap=fields.number("attn_logit_softcapping", 0, 1e6, 0.0) if family.score_cap else 0.0,
    )


def _has(file: GGUFFile, part: str) -> bool:
    """Returns whether a block has such a tensor; the first may be of another kind than others."""
    return any(name.startswith("blk.") and name.endswith(f".{part}") for name in file.tensors)


def _multiplier(fields: Fields, family: Family, key: str) -> float:
    return fields.number(key, 1e-3, 1e3, 1.0) if family.multipliers else 1.0


def _kv_heads(fields: Fields, heads: int) -> int:
    """Returns the key/value heads of layers with attention; others may be listed with 0."""
    named = fields.get("attention.head_count_kv")
    if not isinstance(named, np.ndarray):
        return fields.whole("attention.head_count_kv", high=WIDEST, default=heads)
    different = {int(one) for one in named.tolist()} - {0} if named.dtype.kind in "iu" else set()
    if len(different) != 1 or not 0 < min(different) <= WIDEST:
        raise fields.unlike("attention.head_count_kv", "one number for all layers with attention")
    return different.pop()


def _other(file: GGUFFile, fields: Fields, arch: str) -> str | None:
    """Returns the family that a file is of where it is not the one that its architecture else means."""
    stored = ((name, family.gguf) for name, family in FAMILIES.items())
    own = ((name, form.when) for name, form in stored if form is not None and form.architecture == arch)
    return next((name for name, when in own if when is not None and when(file, fields)), None)


def _experts(file: GGUFFile, fields: Fields, family: Family) -> ExpertConfig | None:
    """Returns the experts of layers that have them; None where the file speaks of none."""
    assert family.gguf is not None
    own = family.gguf.experts
    said = own or ExpertMetadata()
    for key, served in {"expert_gating_func": said.gating, **said.neutral}.items():
        fields.check(key, served or ())
    count = fields.whole("expert_count", 0, max_experts(fields.whole("block_count", high=MAX_LAYERS)), 0)
    if not count:
        return None
    if own is None:
        raise fields.unsupported("expert_count", count)
    top_k = fields.whole("expert_used_count", high=count)
    ffn = fields.whole("feed_forward_length", high=WIDEST, default=0) if said.as_mlp else 0
    return ExpertConfig(
        count,
        _of_groups(fields, top_k, said) if said.grouped else _plain(top_k, said),
        ffn=fields.whole("expert_feed_forward_length", high=WIDEST, default=ffn or None),
        shared=_shared_width(file, fields, family) if said.shared else 0,
        latent=fields.whole("moe_latent_size", 0, WIDEST, 0) if said.latent else 0,
        **said.more,
    )


def _plain(top_k: int, said: ExpertMetadata) -> Routing:
    return Routing(top_k, sigmoid=said.sigmoid, corrected=said.corrected, near=said.near)


def _of_groups(fields: Fields, top_k: int, said: ExpertMetadata) -> Routing:
    groups = fields.whole("expert_group_count", 0, default=1) or 1
    return Routing(
        top_k,
        renormalise=fields.flag("expert_weights_norm", said.renormalised),
        sigmoid=said.sigmoid,
        groups=groups,
        top_groups=fields.whole("expert_group_used_count", 0, groups, 1) or 1,
        scale=fields.number("expert_weights_scale", 0, 1e3, 1.0) or 1.0,
    )


def _shared_width(file: GGUFFile, fields: Fields, family: Family) -> int:
    """Returns the width of the expert that all rows go to, 0 where there is none."""
    info = next((info for name, info in file.tensors.items() if name.endswith(".ffn_up_shexp.weight")), None)
    fused = family.activation in ("silu", "gelu") and not _has(file, "ffn_gate_shexp.weight")  # gates and ups are one
    stored = 0 if info is None else info.shape[0] // (1 + fused)
    return fields.whole("expert_shared_feed_forward_length", stored, stored, stored)


def _holds_mxfp4(file: GGUFFile) -> bool:
    return any(EXPERT_PARTS.fullmatch(name) and file.kind(name) == MXFP4 for name in file.tensors)


def _refuse_longrope(file: GGUFFile) -> None:
    for name in file.tensors:
        if name.startswith("rope_factors_"):
            raise CheckpointError(f"{file.path}: {name} (longrope scaling) is not supported")


def _windows(fields: Fields, layers: int, family: Family, positions: int) -> tuple[int, ...]:
    """Of families whose layers follow a pattern, which files need not say; raises CheckpointError for others' windows
    that are shorter than the context."""
    if not family.window_pattern:
        window = fields.whole("attention.sliding_window", 0, 2**40, 0)
        # Who has a window only where the key is there, and no switch beside it, has it in all layers.
        if 0 < window < positions and family.sliding_window == 0 and not family.window_switch:
            return (window,) * layers
        if 0 < window < positions:
            raise fields.unlike("attention.sliding_window", f"none, or at least {positions}")
        return ()
    if family.gguf is not None and family.gguf.windowless and not fields.has("attention.sliding_window"):
        return ()
    window = fields.whole("attention.sliding_window", 1, 2**40)
    pattern = fields.get("attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray) and pattern.dtype == bool and len(pattern) >= layers:
        return tuple(window * int(one) for one in pattern[:layers])
    every = fields.whole("attention.sliding_window_pattern", 1, default=family.window_pattern)
    return tuple(window if (i + 1) % every else 0 for i in range(layers))


def _local_rope(fields: Fields, family: Family, theta: float) -> RopeConfig | None:
    """Returns the second rotary embedding. theta: of the first, which it has where the family has none."""
    if family.other_rope is not None:
        return family.other_rope(fields)
    if family.local_theta is None:
        return None
    return RopeConfig(fields.number("rope.freq_base_swa", 1, 1e15, family.local_theta or theta))


def _rope(file: GGUFFile, fields: Fields, form: InGGUF, default: float) -> RopeConfig:
    theta = fields.number("rope.freq_base", 1, 1e15, default)
    divisors: tuple[float, ...] = ()
    if form.longrope and any(name.startswith("rope_factors_") for name in file.tensors):
        return _longrope(file, fields, theta)
    if "rope_freqs.weight" in file.tensors:
        divisors = tuple(file.dequantized("rope_freqs.weight").tolist())
    kind = fields.text("rope.scaling.type", "none")
    # Files from before `rope.scaling.*` have the linear factor under this key.
    old = fields.number("rope.scale_linear", 1e-3, 1e6, 1.0)
    factor = fields.number("rope.scaling.factor", 1e-3, 1e6, old)
    if kind == "linear" or (kind == "none" and fields.has("rope.scale_linear")):
        return RopeConfig(theta, "linear", factor, divisors=divisors)
    if kind == "yarn":
        return _yarn(fields, theta, factor, form)
    if kind != "none":
        raise fields.unsupported("rope.scaling.type", kind)
    return RopeConfig(theta, divisors=divisors)


def _longrope(file: GGUFFile, fields: Fields, theta: float) -> RopeConfig:
    names = [f"rope_factors_{kind}.weight" for kind in ("short", "long")]
    for name in names:
        if name not in file.tensors:
            raise CheckpointError(f"{file.path}: expected {' and '.join(names)}, found no {name}")
        values = file.dequantized(name)
        if values.ndim != 1 or not bool(((values >= 1e-3) & (values <= 1e6)).all()):
            raise CheckpointError(f"{file.path}: {name}: expected a list of numbers from 0.001 to 1e+06")
    short, long = (tuple(file.dequantized(name).tolist()) for name in names)
    original = fields.whole("rope.scaling.original_context_length", 1, LARGEST)
    scale = fields.number("rope.scaling.attn_factor", 1e-3, 1e3, 1.0)
    return RopeConfig(
        theta,
        "longrope",
        original_max_positions=original,
        divisors=short,
        attention_factor=scale,
        long_divisors=long,
    )


def _yarn(fields: Fields, theta: float, factor: float, form: InGGUF) -> RopeConfig:
    if theta <= 1:
        raise fields.unlike("rope.freq_base", "more than 1")
    by_scores = form.yarn_log and fields.number(form.yarn_log, 0, 1e3, 0.0) > 0
    inferred = 1.0 if by_scores else yarn_attention_factor(factor)
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original_max_positions=fields.whole(
            "rope.scaling.original_context_length", 1, LARGEST, fields.whole("context_length")
        ),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 1e-3, 1e6, 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1e-3, 1e6, 1.0),
        truncate=form.yarn_truncates,
        attention_factor=fields.number("rope.scaling.yarn_attn_factor", 0, 1e3, inferred),  # of all, as in configs
    )


def _ids(fields: Fields, key: str) -> tuple[int, ...]:
    """Returns token ids of an array; none where there is none."""
    value = fields.get(key)
    if value is None:
        return ()
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu" or not all(0 <= i <= LARGEST for i in value):
        raise fields.unlike(key, "a list of token ids")
    return tuple(value.tolist())


def _stop_ids(fields: Fields) -> tuple[int, ...]:
    named = [i for key in ("eos", "eot", "eom") for i in fields.ids(f"{key}_token_id")]
    wanted = set(END_TOKENS)
    known = [i for i, token in enumerate(fields.texts("tokens")) if token in wanted]
    return tuple(dict.fromkeys((*named, *known)))
