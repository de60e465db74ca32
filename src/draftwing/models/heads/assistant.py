"""Assistants: small models that draft for one and have no keys and values of their own, as Gemma 4 has them. All their
layers read what the target's last layers of each kind have kept of the text, so there is nothing to roll back.

A row joins the target's scaled embedding of a token with a hidden state: the target's last one before that token, or
what the assistant made of the token before. Every row of a tree stands at the newest token's position and reads all of
the text before it; what tells nodes apart are their token and hidden state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from draftwing.errors import CheckpointError
from draftwing.layers.attention import AttentionConfig
from draftwing.layers.decoder_layer import DecoderLayer
from draftwing.layers.linear import Linear, vocab_parallel
from draftwing.layers.linear_ops.base import PackMode, ParamSlice, WeightFormat
from draftwing.layers.linear_ops.dense import DENSE
from draftwing.layers.norm import RMSNorm
from draftwing.layers.rope import Rope
from draftwing.models.config import ModelConfig
from draftwing.models.decoder import DecoderModel, pack_layers
from draftwing.models.heads.base import DraftHead, for_rows
from draftwing.models.weight_map import layer_names, named
from draftwing.ops.attention.attend import Attend
from draftwing.ops.table import PLAIN, LayerOps
from draftwing.parallel.cut import Cut


@dataclass(frozen=True)
class ClusterConfig:
    """Clusters of one size that the vocabulary is divided into, and of how many a hidden state looks at the tokens."""

    count: int
    chosen: int


class Clusters(nn.Module):
    """Which tokens have a logit: those of the clusters whose centroids have the largest products with a hidden state.
    Few rows of the head are read then."""

    def __init__(
        self, config: ClusterConfig, hidden: int, vocab: int, dtype: torch.dtype, weight_format: WeightFormat
    ) -> None:
        super().__init__()
        device = torch.device("meta")
        self.config = config
        self.centroids = Linear(hidden, config.count, False, dtype, device, weight_format)
        self.token_ordering = nn.Parameter(torch.empty(vocab, dtype=torch.int64, device=device), False)

    def check(self) -> None:
        """Raises CheckpointError for tokens that are not in the vocabulary: kernels read the head's rows by them."""
        low, high = (int(end) for end in self.token_ordering.aminmax())
        if low < 0 or high >= len(self.token_ordering):
            raise CheckpointError(
                f"masked_embedding.token_ordering: expected tokens below {len(self.token_ordering)}, "
                f"found {low if low < 0 else high}"
            )

    def logits(self, x: Tensor, head: Linear, ops: LayerOps) -> Tensor:
        """x [M, hidden] -> [M, vocab]: 1 below a row's smallest logit for all tokens that have none."""
        ids = ops.cluster_tokens(self.centroids(x), self.config.chosen, self.token_ordering)
        return ops.spread_logits(head.exact_logits(x, ids), ids, len(self.token_ordering), x.dtype)


class AssistantHead(DraftHead, nn.Module):
    """A `DraftHead` without layers in the pool. What a row hands on is its hidden state for the next one [target's
    hidden], and behind it what logits are made of [own hidden]."""

    lookahead = 1

    def __init__(
        self,
        config: ModelConfig,
        target: DecoderModel,
        dtype: torch.dtype,
        weight_format: WeightFormat = DENSE,
        clusters: ClusterConfig | None = None,
    ) -> None:
        """config: of its layers, as if they had keys and values.  clusters: None: all tokens have logits.

        Layers are spread over the target's ranks, for a rank has its share of the keys alone, and so is a head without
        clusters. Raises CheckpointError for layers that cannot read those of the target, and ConfigError for what
        cannot be spread."""
        super().__init__()
        device, hidden, theirs = torch.device("meta"), config.hidden_size, target.config.hidden_size
        self.config = replace(config, weight_format=weight_format, vocab_format=weight_format)
        self.ranks = target.ranks
        self.aux_layers, self.kv_layers = (target.final_aux_layer,), ()
        self.vocab, self.width, self._theirs = target.config.vocab_size, theirs + hidden, theirs
        self._target = (target,)  # in a tuple, where nn.Module does not look for parameters
        self.pre = Linear(2 * theirs, hidden, False, dtype, device, weight_format)
        self.layers = nn.ModuleList(
            DecoderLayer(
                replace(layer, mixer=replace(_attention(layer.mixer), kv_from=0)),
                _pool_layer(target, _attention(whole.mixer)), dtype, device,
            )
            for layer, whole in zip(self.config.spread(self.ranks), config.layers, strict=True)
        )  # fmt: skip
        self.norm = RMSNorm(hidden, config.norm.eps, config.norm.dtype(dtype), device)
        self.post = Linear(hidden, theirs, False, dtype, device, weight_format)
        # Rows of the head are read as they are stored.
        self._head_format = weight_format if clusters is None else DENSE
        share = self.vocab if clusters is not None else self.ranks.share(self.vocab).size
        self.lm_head = Linear(hidden, share, False, dtype, device, self._head_format)
        if clusters is None:
            vocab_parallel(self.lm_head, self.ranks, self.vocab)
        self.quantized_lm_head: Linear | None = None  # a copy for few rows, where all tokens have logits
        self.clusters = None if clusters is None else Clusters(clusters, hidden, self.vocab, dtype, weight_format)
        rotates = [layer.mixer.rotates for layer in config.layers]
        kinds = list(dict.fromkeys(kind for kind in rotates if kind is not None))
        self.ropes = nn.ModuleList(Rope(config.ropes[rope], size, dtype) for rope, size in kinds)
        self._rope_of = [kinds.index(kind) for kind in rotates if kind is not None]
        self.ops: LayerOps = PLAIN

    def set_max_positions(self, positions: int) -> None:
        for rope in self.ropes:
            made = cast(Rope, rope)
            made.make(positions, made.table.dtype, self.norm.weight.device)

    def features(self, aux_hidden: Tensor) -> Tensor:
        """Returns features as they are, which are narrower than what rows hand on: `run` reads no more of either."""
        return aux_hidden

    def run(self, ids: Tensor, positions: Tensor, features: Tensor | None, level: int, attend: Attend) -> Tensor:
        """positions [M]: of the newest token, one behind the newest key; attend: over the target's layers."""
        assert features is not None
        token = self._target[0].embedded(ids)
        x = self.pre(self.ops.concat_columns(token, features[:, : self._theirs]))
        turns = [cast(Rope, rope)(positions, self.ops) for rope in self.ropes]
        for one, rope in zip(self.layers, self._rope_of, strict=True):
            layer = cast(DecoderLayer, one)
            x = layer(x, *turns[rope], attend)
            x = x if layer.end is None else layer.end(x, None)
        x = self.norm(x)
        return self.ops.concat_columns(self.post(x), x)

    def write(self, ids: Tensor, positions: Tensor, features: Tensor | None, attend: Attend) -> None:
        """Leaves nothing."""

    def logits(self, hidden: Tensor) -> Tensor:
        x = self.ops.concat_columns(hidden[:, self._theirs :])
        if self.clusters is None:
            return for_rows(len(x), self.lm_head, self.quantized_lm_head)(x)
        return self.clusters.logits(x, self.lm_head, self.ops)

    def pack(self, ops: LayerOps) -> None:
        """Lets every layer prepare for inference."""
        self.ops = ops
        if self.clusters is not None:
            self.lm_head.pack(ops, PackMode(rows_only=True))
        pack_layers(self, ops, PackMode(draft_8bit=True))  # the target decides, whatever is drafted

    def names(self) -> dict[str, ParamSlice]:
        """Name in a published checkpoint -> slice."""
        form, hidden, share = self.config.weight_format, self.config.hidden_size, self.ranks.share(self.vocab)
        rows = self.lm_head.out_features
        table = named(self._head_format, "model.embed_tokens", "lm_head", 0, rows, Cut(0, share._replace(size=rows)))
        table |= named(form, "pre_projection", "pre", 0, hidden)
        table |= named(form, "post_projection", "post", 0, self._theirs)
        table["model.norm.weight"] = ParamSlice("norm.weight", 0, hidden)
        if self.clusters is not None:
            table |= named(form, "masked_embedding.centroids", "clusters.centroids", 0, self.clusters.config.count)
            table["masked_embedding.token_ordering"] = ParamSlice("clusters.token_ordering", 0, self.vocab)
        for i in range(self.config.num_layers):
            own = layer_names(self.config, f"model.layers.{i}", f"layers.{i}", ranks=self.ranks, index=i)
            table |= {name: part for name, part in own.items() if not of_keys(name)}
        return table


def _attention(mixer: object) -> AttentionConfig:
    assert isinstance(mixer, AttentionConfig)
    return mixer


def _pool_layer(target: DecoderModel, mixer: AttentionConfig) -> int:
    """Returns the pool layer of the target's last layer that has keys and values of its own and the same reach."""
    layers = target.config.layers
    for at in reversed(range(len(target.pool_owners))):
        theirs = layers[target.pool_owners[at]].mixer
        if not isinstance(theirs, AttentionConfig) or bool(theirs.window) != bool(mixer.window):
            continue
        if (theirs.kv_heads, theirs.head_dim, theirs.window) != (mixer.kv_heads, mixer.head_dim, mixer.window):
            raise CheckpointError(
                f"expected key/value heads, head size and window of the target, ({theirs.kv_heads}, {theirs.head_dim}, "
                f"{theirs.window}), found ({mixer.kv_heads}, {mixer.head_dim}, {mixer.window})"
            )
        return at
    raise CheckpointError("expected a target with layers of the same kinds: with windows, and without")


def of_keys(name: str) -> bool:
    """Returns whether a tensor is of keys or values, which the layers have not."""
    return ".self_attn.k_" in name or ".self_attn.v_" in name
