"""What encoders have in place of a decoder's parts: attention to the whole text, and what stands before and behind the
layers. An encoder reads texts whole and writes none, so nothing is kept of a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.errors import CheckpointError
from draftwing.kv.pool import StateSpec
from draftwing.layers.config import Mixer, MixerConfig, Placement, StoredMatrix, StoredVector
from draftwing.layers.linear import Linear
from draftwing.ops.attention.attend import Attend
from draftwing.ops.attention.batch import ChunkSpan
from draftwing.parallel.cut import Cut
from draftwing.parallel.ranks import Ranks, Share
from draftwing.requests.pooling import Pooling


@dataclass(frozen=True)
class EncoderConfig:
    """What an encoder has beside its layers.

    rows: of the table of positions.  first: row of a text's first token; behind that of the padding token, by its id,
    unless 0.  tokens: that a text has at most.  types: of tokens, of which the second text of a pair has the second.
    pooling: how a text's vector is made, or a pair's score.
    """

    rows: int
    first: int
    tokens: int
    types: int
    pooling: Pooling

    @property
    def context(self) -> int:
        """Returns the context length: an engine wants room for a token, which nobody draws."""
        return self.tokens + 1


@dataclass(frozen=True)
class EncoderAttentionConfig(MixerConfig):
    """Attention of each token to all tokens of its text."""

    heads: int
    head_dim: int

    def keeps(self) -> StateSpec:
        return StateSpec((0,), None)  # nothing, but it asks for the batch

    def weights(self, hidden: int) -> int:
        return 4 * hidden * self.heads * self.head_dim

    def check(self) -> None:
        if self.heads < 1 or self.head_dim < 1:
            raise CheckpointError(f"expected heads of 1 element or more, found {self.heads} of {self.head_dim}")

    def stored(self, hidden: int, ranks: Ranks) -> Sequence[StoredMatrix | StoredVector]:
        size = self.heads * self.head_dim
        rows, columns = (Cut(axis, Share(0, size, size)) for axis in (0, 1))
        parts = [
            StoredMatrix(f"self_attn.{name}_proj", "qkv", i * size, size, True, rows) for i, name in enumerate("qkv")
        ]
        return [*parts, StoredMatrix("self_attn.o_proj", "o", 0, hidden, True, columns)]

    def build(self, place: Placement) -> Mixer:
        return EncoderAttention(self, place)


class EncoderAttention(Mixer):
    """Attention to the whole text, one text after the other: so a text has the same bits alone and among others."""

    def __init__(self, config: EncoderAttentionConfig, place: Placement) -> None:
        super().__init__()
        self.pool_layer, self._heads, size = place.pool_layer, config.heads, config.heads * config.head_dim
        self.qkv = place.linear(3 * size, bias=True)
        self.o = place.out("o", size, bias=True)

    def linears(self) -> list[Linear]:
        return [self.qkv, self.o]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, residual: Tensor | None = None) -> Tensor:
        made = self.qkv(x).unflatten(1, (3, self._heads, -1))  # [M, 3, heads, head_dim]
        out = made[:, 2]  # of a step without prompts, which nobody asks for, a token sees itself alone
        texts = [made[span.offset : span.offset + span.length] for span in _chunks(attend, self.pool_layer)]
        if texts:
            out = torch.cat([self._attended(text) for text in texts])
        return self.o(out.flatten(1), residual)

    __call__ = forward  # Module's own call looks for hooks: see RMSNorm

    @staticmethod
    def _attended(made: Tensor) -> Tensor:
        """made [T, 3, heads, head_dim] -> [T, heads, head_dim]"""
        q, k, v = made.permute(1, 2, 0, 3).contiguous()  # where rows begin must not depend on texts before
        return F.scaled_dot_product_attention(q[None], k[None], v[None])[0].transpose(0, 1)


class Encoder(nn.Module):
    """Adds positions and types to embeddings, and makes one vector of a text's hidden states, or one score of a
    pair's."""

    def __init__(self, config: EncoderConfig, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.positions = nn.Parameter(torch.empty(config.rows, hidden, dtype=dtype, device=device))
        self.types = nn.Parameter(torch.empty(config.types, hidden, dtype=dtype, device=device))
        scores = bool(config.pooling.scores)
        self.dense = Linear(hidden, hidden, True, dtype, device) if scores else None
        self.out = Linear(hidden, 1, True, dtype, device) if scores else None

    def embedded(self, x: Tensor, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """x [M, hidden], embeddings; ids, positions [M] int64 -> [M, hidden]"""
        types = self.types[0]
        if self.config.types > 1 and (pairs := [span for span in _chunks(attend, 0) if span.second]):
            kinds = torch.zeros_like(ids)
            for span in pairs:
                kinds[span.offset + span.second : span.offset + span.length] = 1
            types = self.types[kinds]
        return x + types + self.positions[self._rows(ids, positions)]

    def _rows(self, ids: Tensor, positions: Tensor) -> Tensor:
        """ids, positions [M] -> [M]: rows of the table of positions. Where they begin behind that of the padding token,
        one that is written in a text is not counted and has its own."""
        first = self.config.first
        if first:
            padding = ids == first - 1
            seen = F.pad(padding.cumsum(0), (1, 0))  # [M + 1], before each token of the step
            begins = (torch.arange(len(ids), device=ids.device) - positions).clamp(min=0)
            positions = (positions + first - seen[1:] + seen[begins]).masked_fill(padding, first - 1)
        return positions.clamp(max=self.config.rows - 1)  # a step without prompts may be anywhere

    def pooled(self, x: Tensor, attend: Attend) -> Tensor:
        """x [M, hidden], behind the last norm -> the same, overwritten; in the place of each text's last token lies its
        vector, or the score in the first element."""
        for span in _chunks(attend, 0):
            text = x[span.offset : span.offset + span.length]
            kind = self.config.pooling.kind
            vector = text.mean(0, keepdim=True) if kind == "mean" else text[:1] if kind == "cls" else text[-1:]
            if self.dense is None or self.out is None:
                text[-1:] = vector
            else:
                text[-1:, :1] = self.out(torch.tanh(self.dense(vector)))
        return x


def _chunks(attend: Attend, layer: int) -> Sequence[ChunkSpan]:
    batch, _ = attend.state(layer)
    return batch.chunks
