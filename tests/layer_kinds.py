"""Models whose layers differ, and kinds of layers that are not in the package: a recurrence, whose state after each
token lies in the pool, and a convolution, whose inputs do. Beside each what it computes in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from draftwing.kv.pool import DeltaSpec, StateSpec
from draftwing.layers.attention import Attention, AttentionConfig
from draftwing.layers.block_indexer import BlockIndexConfig
from draftwing.layers.config import LayerConfig, Mixer, MixerConfig, Placement, StoredMatrix, StoredVector
from draftwing.layers.decoder_layer import DecoderLayer
from draftwing.layers.hybrid import HybridConfig
from draftwing.layers.indexer import IndexConfig
from draftwing.layers.kda import KdaConfig
from draftwing.layers.latent import LatentAttentionConfig
from draftwing.layers.linear import Linear
from draftwing.layers.mamba import Mamba2Config
from draftwing.layers.mamba1 import Mamba1Config
from draftwing.layers.part_configs import NgramConfig, StreamsConfig
from draftwing.layers.rope import RopeConfig, rope_table
from draftwing.layers.short_conv import ShortConvConfig
from draftwing.models.config import ModelConfig
from draftwing.models.decoder import DecoderModel
from draftwing.ops.attention.attend import Attend
from draftwing.ops.attention.batch import DeltaInputs, DeltaWeights
from draftwing.ops.row_states.spec import ancestor_slots, scan
from draftwing.parallel.cut import Cut
from draftwing.parallel.ranks import Ranks, Share

HIDDEN, VOCAB = 64, 48


@dataclass(frozen=True)
class StateConfig(MixerConfig):
    """width: of what lies in the pool for each token."""

    width: int

    def keeps(self) -> StateSpec:
        return StateSpec((self.width,), torch.float32)


class InOut(Mixer):
    """Two matrices around what lies in the pool."""

    def __init__(self, width: int, rows: int, place: Placement):
        """rows: of the first matrix."""
        super().__init__()
        self.pool_layer = place.pool_layer
        self.into = place.linear(rows)
        self.out = place.out("out", width)

    def linears(self) -> list[Linear]:
        return [self.into, self.out]


class RecurrenceConfig(StateConfig):
    """h_t = a_t * h_{t-1} + x_t. width: a multiple of 32, for bits that do not depend on the batch."""

    def weights(self, hidden: int) -> int:
        return 3 * hidden * self.width

    def stored(self, hidden: int, ranks: Ranks) -> Sequence[StoredMatrix | StoredVector]:
        made = Cut(0, Share(0, 2 * self.width, 2 * self.width))
        return [
            StoredMatrix("recurrence.in_proj", "into", 0, 2 * self.width, False, made),
            StoredMatrix("recurrence.out_proj", "out", 0, hidden, False, Cut(1, Share(0, self.width, self.width))),
        ]

    def build(self, place: Placement) -> Recurrence:
        return Recurrence(self.width, 2 * self.width, place)


class Recurrence(InOut):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, residual: Tensor | None = None) -> Tensor:
        gate, value = (part.contiguous() for part in self.into(x).float().chunk(2, -1))
        keep = gate.sigmoid()
        batch, kept = attend.state(self.pool_layer)
        states = scan(batch, kept, lambda before, queries: keep[queries] * before + value[queries])
        return self.out(states.to(x.dtype), residual)

    __call__ = forward


class ConvolutionConfig(StateConfig):
    """y_t = w_0 * u_t + w_1 * u_{t-1} + w_2 * u_{t-2}. width: of u."""

    def weights(self, hidden: int) -> int:
        return (2 * hidden + 3) * self.width

    def stored(self, hidden: int, ranks: Ranks) -> Sequence[StoredMatrix | StoredVector]:
        share = Share(0, self.width, self.width)
        return [
            StoredMatrix("conv.in_proj", "into", 0, self.width, False, Cut(0, share)),
            StoredMatrix("conv.out_proj", "out", 0, hidden, False, Cut(1, share)),
            StoredVector("conv.taps", "taps", 3),
        ]

    def build(self, place: Placement) -> Convolution:
        return Convolution(self.width, self.width, place)


class Convolution(InOut):
    def __init__(self, width: int, rows: int, place: Placement) -> None:
        super().__init__(width, rows, place)
        self.taps = nn.Parameter(torch.zeros(3, width, dtype=place.dtype, device=place.device))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, residual: Tensor | None = None) -> Tensor:
        own, (batch, kept) = self.into(x).float(), attend.state(self.pool_layer)
        kept.index_copy_(0, batch.write_slots, own)
        slots = ancestor_slots(batch, 2)
        one, two = torch.where(slots.unsqueeze(2) > 0, kept[slots], 0).unbind(1)
        return self.out(self.taps[0] * own + self.taps[1] * one + self.taps[2] * two, residual)

    __call__ = forward


@dataclass(frozen=True)
class DeltaConfig(MixerConfig):
    """A gated delta net, whose state is kept by row."""

    spec: DeltaSpec

    def keeps(self) -> DeltaSpec:
        return self.spec

    @property
    def width(self) -> int:
        return self.spec.value_heads * self.spec.value_dim

    def weights(self, hidden: int) -> int:
        return hidden * (self.spec.channels + 2 * self.width + 2 * self.spec.value_heads)

    def stored(self, hidden: int, ranks: Ranks) -> Sequence[StoredMatrix | StoredVector]:
        def whole(axis: int, size: int) -> Cut:
            return Cut(axis, Share(0, size, size))

        parts = (("qkv", self.spec.channels), ("z", self.width), ("ba", 32))
        return [
            *(StoredMatrix(f"delta.{name}", name, 0, size, False, whole(0, size)) for name, size in parts),
            StoredMatrix("delta.out", "out", 0, hidden, False, whole(1, self.width)),
            StoredVector("delta.conv", "conv", self.spec.channels),
            *(StoredVector(f"delta.{name}", name, self.spec.value_heads) for name in ("decay", "dt_bias")),
            StoredVector("delta.norm", "norm", self.spec.value_dim),
        ]

    def build(self, place: Placement) -> DeltaNet:
        return DeltaNet(self, place)


class DeltaNet(Mixer):
    needs_chunks = False

    def __init__(self, config: DeltaConfig, place: Placement) -> None:
        super().__init__()
        self.before_attention = 3
        self.pool_layer, spec, self.form = place.pool_layer, config.spec, place.layer.weight_format
        self.heads = spec.value_heads
        self.qkv, self.z, self.ba = (
            place.linear(size)
            for size in (spec.channels, config.width, 32)  # as many as one tile of a product has
        )
        self.out = place.out("out", config.width)
        self.conv = nn.Parameter(torch.zeros(spec.channels, spec.conv_width, dtype=place.dtype, device=place.device))
        self.decay, self.dt_bias = (nn.Parameter(torch.zeros(self.heads, device=place.device)) for _ in range(2))
        self.norm = nn.Parameter(torch.ones(spec.value_dim, device=place.device))

    def linears(self) -> list[Linear]:
        return [self.ba, self.qkv, self.z, self.out]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, residual: Tensor | None = None) -> Tensor:
        b, a = (part.contiguous() for part in self.ba(x)[:, : 2 * self.heads].chunk(2, 1))
        weights = DeltaWeights(self.conv.float(), self.decay, self.dt_bias, self.norm, 1e-6)
        y = attend.delta(self.pool_layer, DeltaInputs(self.qkv(x), self.z(x), b, a), weights)
        return self.out(y, residual)

    __call__ = forward


ATTENTION = AttentionConfig(4, 2, 16)
# As many heads of queries in all of the first three, and other keys and values in each; the fourth has fewer heads.
MIXED = (
    ATTENTION,
    AttentionConfig(4, 4, 32, rope=1, window=6),
    AttentionConfig(4, 1, 16, qk_norm=True),
    AttentionConfig(2, 1, 32, rope=1, qk_norm=True, whole_norms=True),
)
READS_0, READS_1 = AttentionConfig(4, 2, 16, kv_from=0, qk_norm=True), AttentionConfig(4, 4, 32, rope=1, kv_from=1)
SHARED = (ATTENTION, MIXED[1], READS_0, MIXED[3], READS_1)
BY_TOKEN = (RecurrenceConfig(64), ATTENTION, ConvolutionConfig(96), RecurrenceConfig(32))
DELTA = (
    DeltaConfig(DeltaSpec(2, 4, 16, 16, 4)),
    DeltaConfig(DeltaSpec(2, 4, 16, 16, 4, tiled=True)),
    ATTENTION,
    DeltaConfig(DeltaSpec(2, 2, 16, 32, 4, corrects=2)),
)
_PICKS = IndexConfig(6, 32, 9)
INDEXED = tuple(
    LatentAttentionConfig(4, 16, 8, 16, 32, query_latent=32, index=index)
    for index in (_PICKS, replace(_PICKS, shared=True), IndexConfig(4, 64, 5))
)
KINDS: dict[str, tuple[MixerConfig, ...]] = {"mixed": MIXED, "shared": SHARED, "recurrent": BY_TOKEN}
MAMBA = (
    Mamba2Config(2, 4, 16, 32, 4),
    ATTENTION,
    Mamba2Config(1, 4, 32, 16, 3, gates_first=False, conv_bias=False),
    HybridConfig(AttentionConfig(4, 1, 32), Mamba2Config(4, 4, 16, 16, 4, norm=False)),
)
KIMI = (
    KdaConfig(2, 32, 4),
    KdaConfig(4, 16, 3),
    LatentAttentionConfig(4, 16, 16, 16, 32),
    KdaConfig(4, 32, 4),
)
_BLOCKS = BlockIndexConfig(6, 32, 16, topk=2, ratio=4)
PICKING = (AttentionConfig(4, 2, 16, index=_BLOCKS), AttentionConfig(4, 1, 16, qk_norm=True, gated=True, index=_BLOCKS))
FLOORS = (
    KdaConfig(2, 32, 4, direct=True, floor=-5.0),
    LatentAttentionConfig(4, 16, 16, 16, 32, gated=True),
    KdaConfig(4, 16, 3, direct=True, floor=-1.0),
)
MAMBA1 = (Mamba1Config(64, 16, 32, 4), ATTENTION, Mamba1Config(96, 16, 32, 3, conv_bias=False))
# Without attention: of the first nothing is kept by token.
ALONE = (Mamba2Config(2, 4, 16, 32, 4), Mamba2Config(4, 4, 32, 16, 3, conv_bias=False))
MAMBA1_ALONE = (
    Mamba1Config(64, 16, 32, 4, norms="bare", norm_eps=1e-5),
    Mamba1Config(96, 16, 32, 3, conv_bias=False, norms=False),
)
HYBRIDS: dict[str, tuple[MixerConfig, ...]] = {
    "delta": DELTA, "mamba": MAMBA, "kimi": KIMI, "floors": FLOORS, "alone": ALONE,
}  # fmt: skip
# All that run beside others, and from graphs.
RECURRENT = {**HYBRIDS, "convolutions": (ShortConvConfig(64, 3), ATTENTION, ShortConvConfig(32, 4))}


def config_of(mixers: Sequence[MixerConfig], positions: int = 128) -> ModelConfig:
    layers = tuple(LayerConfig(HIDDEN, mixer, 96) for mixer in mixers)
    scaled = RopeConfig(query_beta=0.4, original_max_positions=16, apart=True)
    return ModelConfig("LlamaForCausalLM", HIDDEN, VOCAB, positions, layers, (RopeConfig(), RopeConfig(100.0), scaled))


def streams_config(positions: int = 128) -> ModelConfig:
    """Of three streams, with n-grams before two delta nets."""
    config = config_of((DELTA[0], PICKING[0], DELTA[3]), positions)
    ngram = NgramConfig(3, 64, (101, 103, 107, 109), (3, 5, 7), 1, taps=4, rows=420, parts=1)
    layers = [replace(layer, in_norms=False, streams=StreamsConfig(3, 16)) for layer in config.layers]
    return replace(config, layers=(replace(layers[0], ngram=ngram), layers[1], replace(layers[2], ngram=ngram)))


def dense_logits(model: DecoderModel, ids: Sequence[int]) -> Tensor:
    """[len(ids), vocab] float64, by loops over tokens; nothing of the package but its weights and rotary tables."""
    weights = {name: value.detach().double() for name, value in model.named_parameters()}
    x = weights["embed.table.weight"][list(ids)]
    kept: dict[int, tuple[Tensor, Tensor]] = {}
    for i, layer in enumerate(model.layers):
        assert isinstance(layer, DecoderLayer)
        own = {name.removeprefix(f"layers.{i}."): w for name, w in weights.items() if name.startswith(f"layers.{i}.")}
        normed = _norm(x, own["attn_norm.weight"])
        mixer = model.config.layers[i].mixer
        if isinstance(mixer, AttentionConfig):
            kept[i] = _keys(model, mixer, own, normed) if mixer.kv_from is None else kept[mixer.kv_from]
            x = x + _attention(model, mixer, own, normed, *kept[i])
        elif isinstance(mixer, ConvolutionConfig):
            u, taps = normed @ own["mixer.into.weight"].T, own["mixer.taps"]
            made = [sum(taps[j] * u[t - j] for j in range(min(3, t + 1))) for t in range(len(u))]
            x = x + torch.stack(made) @ own["mixer.out.weight"].T  # type: ignore[arg-type]
        else:
            gate, value = (normed @ own["mixer.into.weight"].T).chunk(2, -1)
            state, states = torch.zeros_like(value[0]), []
            for a, u in zip(gate.sigmoid(), value, strict=True):
                state = a * state + u
                states.append(state)
            x = x + torch.stack(states) @ own["mixer.out.weight"].T
        gate, up = (_norm(x, own["mlp_norm.weight"]) @ own["mlp.gate_up.weight"].T).chunk(2, -1)
        x = x + (gate * gate.sigmoid() * up) @ own["mlp.down.weight"].T
    return _norm(x, weights["norm.weight"]) @ weights["lm_head.weight"].T


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def _normed(x: Tensor, mixer: AttentionConfig, weight: Tensor) -> Tensor:
    """x [T, heads, head_dim], each head by itself or all of a token together"""
    return _norm(x.flatten(1), weight).view_as(x) if mixer.whole_norms else _norm(x, weight)


def _turned(model: DecoderModel, mixer: AttentionConfig, x: Tensor) -> Tensor:
    """x [T, heads, head_dim]"""
    table = rope_table(model.config.ropes[mixer.rope], mixer.head_dim, len(x), torch.float64, "cpu")
    return x * table[:, None, 0] + x.roll(mixer.head_dim // 2, -1) * table[:, None, 1]


def _keys(model: DecoderModel, mixer: AttentionConfig, own: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    rows = own["mixer.qkv.weight"][mixer.heads * mixer.head_dim :]
    k, v = (x @ rows.T).view(len(x), 2, mixer.kv_heads, mixer.head_dim).unbind(1)
    return _turned(model, mixer, _normed(k, mixer, own["mixer.k_norm.weight"]) if mixer.qk_norm else k), v


def _attention(
    model: DecoderModel, mixer: AttentionConfig, own: dict[str, Tensor], x: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    rows = own["mixer.qkv.weight"][: mixer.heads * mixer.head_dim]
    q = (x @ rows.T).view(len(x), mixer.heads, mixer.head_dim)
    q = _turned(model, mixer, _normed(q, mixer, own["mixer.q_norm.weight"]) if mixer.qk_norm else q)
    out = torch.zeros_like(q)
    for t in range(len(x)):
        first = max(0, t + 1 - mixer.window) if mixer.window else 0
        for head in range(mixer.heads):
            theirs = head * mixer.kv_heads // mixer.heads
            scores = k[first : t + 1, theirs] @ q[t, head] / mixer.head_dim**0.5
            out[t, head] = scores.softmax(0) @ v[first : t + 1, theirs]
    return out.flatten(1) @ own["mixer.o.weight"].T


def shapes(model: DecoderModel) -> list[Any]:
    return [layer.mixer.shape for layer in model.layers if isinstance(layer.mixer, Attention)]
