"""Embeddings of n-grams: rows of a large table by hashes of a token and those before it, which a layer adds to its
residual streams.

**Path of the data.** A token's rows, of some heads for each length of n-grams, are joined and multiplied into one value
and a key for each stream. A stream that is like its key takes more of the value. Behind that is a convolution along the
text, over every so many tokens. So a token needs the ids of those before it on its own path, and their gated values:
ids, value and gates lie in its slot of the pool, and trees, chunks and cached prefixes need no more. Ids are there as
digits, which every type of the pool holds exactly.

The table is a `Linear` in a `MappedFormat`: rows are read from the file, or from a device's memory that has it all.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from draftwing.layers.config import LayerConfig, StoredMatrix, StoredVector
from draftwing.layers.embedding import Embedding
from draftwing.layers.linear import Linear
from draftwing.layers.linear_ops.mapped import MappedFormat
from draftwing.layers.part_configs import NgramConfig
from draftwing.layers.stream_norm import StreamNorm
from draftwing.ops.attention.attend import Attend
from draftwing.parallel.cut import Cut
from draftwing.parallel.ranks import Share

_BASE = 256  # integers below which bfloat16 has exactly
_LEAST = 1e-6  # of a product of a key with a stream, by its size


class NgramLayer(nn.Module):
    """What a layer adds to its streams before its mixer. On all ranks alike."""

    def __init__(self, config: LayerConfig, pool_layer: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        assert config.ngram is not None and config.streams is not None
        self.config, self.pool_layer, self._hidden = config.ngram, pool_layer, config.hidden
        self._count, size, form = config.streams.count, config.ngram.size, config.weight_format
        wide = self._count * config.hidden
        row, rows = size // len(config.ngram.tables), config.ngram.rows
        mapped = MappedFormat(config.ranks.size, config.ngram.layers)
        self.embed = Embedding(Linear(row, rows, False, dtype, device, mapped))
        self.key = Linear(size, wide, False, dtype, device, form)
        self.value = Linear(size, config.hidden, False, dtype, device, form)
        norm = config.hidden, self._count, config.norm, dtype, device
        self.key_norm, self.stream_norm, self.conv_norm = StreamNorm(*norm), StreamNorm(*norm), StreamNorm(*norm)
        taps = torch.zeros(wide, 1, config.ngram.taps, dtype=self.key_norm.weight.dtype, device=device)
        self.conv = nn.Parameter(taps, False)

    def forward(self, x: Tensor, ids: Tensor, attend: Attend) -> Tensor:
        """x [M, count * hidden], ids [M] int64 -> x with what it adds"""
        count, hidden, config, ops = self._count, self._hidden, self.config, self.key_norm.ops
        digits = self._digits(ids).to(x.dtype)
        own = torch.cat((x.new_zeros(len(x), hidden + count), digits), 1)
        earlier = attend.earlier(self.pool_layer, own, config.order - 1)[..., hidden + count :]
        rows = self.embed(self._rows(self._tokens(ids, earlier)).flatten()).view(len(x), -1)
        value, keys = self.value(rows), self.key_norm(self.key(rows))
        # In float64, of which the last bits, which may depend on the batch, are rounded away.
        like = (keys.double() * self.stream_norm(x).double()).unflatten(1, (count, hidden)).sum(-1) / math.sqrt(hidden)
        gates = (like.abs().clamp_min(_LEAST).sqrt() * like.sign()).sigmoid().to(x.dtype)  # [M, count]
        before = attend.earlier(
            self.pool_layer, torch.cat((value, gates, digits), 1), config.taps - 1, config.order
        )  # [M, taps - 1, ..]
        gated = _gated(value, gates)
        total = self.conv_norm(gated) * self.conv[:, 0, -1]
        for back, one in enumerate(before.unbind(1), 2):
            normed = self.conv_norm(_gated(one[:, :hidden], one[:, hidden : hidden + count]))
            total = total + normed * self.conv[:, 0, -back]
        total = total.to(x.dtype)
        return x + (gated + ops.gate(total, total))

    __call__ = forward  # Module's own call looks for hooks: see RMSNorm

    def _digits(self, ids: Tensor) -> Tensor:
        """ids [M] -> [M, DIGITS]: of one more than each, so that 0 is no token."""
        rest, digits = ids + 1, []
        for _ in range(self.config.DIGITS):
            digits.append(rest % _BASE)
            rest = rest // _BASE
        return torch.stack(digits, 1)

    def _tokens(self, ids: Tensor, earlier: Tensor) -> list[Tensor]:
        """ids [M], earlier [M, order - 1, DIGITS] -> the token and those before it, the nearest first, each [M] int64.
        Those before a text, and before an end within it, are ends."""
        tokens, ended = [ids], torch.zeros_like(ids, dtype=torch.bool)
        for digits in earlier.long().unbind(1):
            token = sum(digits[:, at] * _BASE**at for at in range(self.config.DIGITS)) - 1
            ended = ended | (token < 0)
            tokens.append(torch.where(ended, self.config.end, token))
            ended = ended | (token == self.config.end)
        return tokens

    def _rows(self, tokens: list[Tensor]) -> Tensor:
        """tokens: as of `_tokens` -> [M, heads of all lengths] int64: rows of the table."""
        config, rows, first = self.config, [], 0
        mixed = tokens[0] * config.multipliers[0]
        each = len(config.tables) // (config.order - 1)
        for length, (token, multiplier) in enumerate(zip(tokens[1:], config.multipliers[1:], strict=True)):
            mixed = mixed ^ (token * multiplier)
            for table in config.tables[length * each : (length + 1) * each]:
                rows.append(mixed % table + first)
                first += table
        return torch.stack(rows, 1)


def _gated(value: Tensor, gates: Tensor) -> Tensor:
    """value [M, hidden], gates [M, count] -> [M, count * hidden]"""
    return (gates.unsqueeze(2) * value.unsqueeze(1)).flatten(1)


def stored_ngram(config: NgramConfig, hidden: int, count: int) -> list[StoredMatrix | StoredVector]:
    """Returns which tensors fill it, but for the table; count: of streams."""
    wide = count * hidden

    def matrix(name: str, own: str, rows: int) -> StoredMatrix:
        return StoredMatrix(f"ple.{name}", f"ngram.{own}", 0, rows, False, Cut(0, Share(0, rows, rows)))

    norms = (("norm_key", "key_norm"), ("norm_query", "stream_norm"), ("norm_conv", "conv_norm"))
    return [
        matrix("key_proj", "key", wide),
        matrix("value_proj", "value", hidden),
        *(StoredVector(f"ple.{name}.weight", f"ngram.{own}.weight", wide, is_norm=True) for name, own in norms),
        StoredVector("ple.conv1d.weight", "ngram.conv", wide),
    ]
