"""Computes the target's features of token sequences, by the serving model's own forward over whole sequences.

Attention is the only thing that is injected, so what a head is trained on is what the engine will feed it, up to the
rounding of another order of summation.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.config.drafters import training
from draftwing.engine.devices import pick_device
from draftwing.engine.devices.base import Device
from draftwing.engine.startup.models import pick_dtype
from draftwing.log import progress_bar
from draftwing.models.decoder import DecoderModel, use_between
from draftwing.models.loader import load_config, load_model
from draftwing.ops import make_ops
from draftwing.ops.attention.batch import FULL, AttentionKind, HeadNorms, first_seen
from draftwing.ops.attention.dense import DenseAttend
from draftwing.train.adapters import merge_adapter
from draftwing.train.checkpoint import aux_layer_ids, checked_aux_layers
from draftwing.train.kernels import kernels_take
from draftwing.train.progress import Remaining
from draftwing.train.store import FeatureStore, Sample, SourceMeta, Tokens

logger = logging.getLogger(__name__)

SHARD_BYTES = 256 << 20  # of hidden states in one file
BATCH_TOKENS = 16384  # of one forward, padding included
_WINDOW = 64  # batches whose sequences are sorted by length together


def eagle3_aux_layers(layers: int) -> tuple[int, ...]:
    """Returns the residual streams that EAGLE-3 reads by default (Li et al. 2025): early, middle, late. Targets of
    fewer than six layers, which have no such three, give what lies evenly between their ends."""
    if layers >= 6:
        return 2, layers // 2, layers - 3
    return layers // 4, layers // 2, layers - layers // 4


def block_aux_layers(layers: int) -> tuple[int, ...]:
    """Returns the residual streams that a head which drafts blocks reads by default: five, evenly between the outputs
    of the second layer and of the last but two, as published heads do."""
    return tuple(sorted({round(1 + i * max(layers - 4, 0) / 4) + 1 for i in range(5)}))


def target_aux_layers(algorithm: str, layers: int, aux_layers: Sequence[int] | None = None) -> tuple[int, ...]:
    """Returns what `DecoderModel.forward` is asked for. aux_layers: other residual streams for heads that read several,
    0 the embedding, `layers` what comes before the final norm. Raises ConfigError for streams that the target does not
    have."""
    how = training(algorithm)
    if not how.aux_hidden_states:
        return (layers + 1,)  # `DecoderModel.final_aux_layer`
    if how.block:
        return checked_aux_layers(tuple(aux_layers or block_aux_layers(layers)), layers)
    aux_layers = tuple(aux_layers or eagle3_aux_layers(layers))
    aux_layer_ids(aux_layers, layers)  # refuses what a config could not name, before anything is computed
    return aux_layers


class FeatureModel:
    """A frozen target that gives features of whole sequences."""

    def __init__(self, model: DecoderModel, aux_layers: tuple[int, ...], device: Device) -> None:
        """model: not packed. A GPU's kernels do what lies between its GEMMs, as in serving."""
        self.model, self.aux_layers, self.device = model.requires_grad_(False), aux_layers, device
        shapes = model.head_shapes()
        self._kv_heads = shapes[0].kv_heads if len(shapes) == 1 else 0
        if kernels_take(model.norm.weight) and model.config.experts is None:
            use_between(model, make_ops(device.device))

    @classmethod
    def load(
        cls,
        path: Path,
        algorithm: str,
        device: str | type[Any] = "auto",
        dtype: str = "auto",
        aux: Sequence[int] | None = None,
        adapter: Path | None = None,
    ) -> FeatureModel:
        """path: of the target, as for the engine; device, dtype: as the engine's options; adapter: of one that its
        weights are with. Raises CheckpointError and ConfigError."""
        config = load_config(path)
        where = pick_device(device)
        aux_layers = target_aux_layers(algorithm, config.num_layers, aux)
        model = load_model(path, pick_dtype(dtype, where, config.dtype), where.device)
        if adapter is not None:
            merge_adapter(model, adapter)
        return cls(model, aux_layers, where)

    def meta(self, name: str, algorithm: str) -> SourceMeta:
        config, dtype = self.model.config, str(self.model.dtype).removeprefix("torch.")
        return SourceMeta(name, algorithm, self.aux_layers, config.hidden_size, config.vocab_size, dtype)

    @torch.no_grad()
    def batch(self, sequences: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """ids [T] -> aux_hidden [T, len(aux_layers) * hidden], final [T, hidden], of several sequences in one forward,
        each padded at its end to the longest; causal attention keeps the padding out of sight."""
        count, longest = len(sequences), max(len(ids) for ids in sequences)
        padded = torch.zeros(count, longest, dtype=torch.int64, pin_memory=self.device.has_own_memory)
        for row, ids in zip(padded, sequences, strict=True):
            row[: len(ids)] = ids
        positions = torch.arange(longest, device=self.device.device).repeat(count)
        final, aux_hidden = self.model(
            padded.flatten().to(self.device.device, non_blocking=True), positions,
            Causal(count, longest, self._kv_heads), self.aux_layers
        )  # fmt: skip
        assert aux_hidden is not None
        final, aux_hidden = final.view(count, longest, -1), aux_hidden.view(count, longest, -1)
        return [(aux_hidden[i, : len(ids)], final[i, : len(ids)]) for i, ids in enumerate(sequences)]


class Causal(DenseAttend):
    """Attention of `count` sequences of `length` tokens each, one after the other, every token to those before it.
    kv_heads: of keys in all layers, for kernels that turn queries and keys; 0: torch turns them."""

    norms_heads = True

    def __init__(self, count: int, length: int, kv_heads: int = 0) -> None:
        super().__init__(count)
        self._shape, self._kv_heads = (count, length), kv_heads

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind) -> Tensor:
        length = self._shape[1]
        q, k, v = (x.unflatten(0, self._shape).transpose(1, 2) for x in (q, k, v))  # [count, heads, length, head_dim]
        mask = None if kind.is_full else _mask(kind, length, q)
        if kind.sinks is not None:  # the last key has no value, and its score is that of the mask
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        scale, grouped = kind.scale(q.shape[3]), q.shape[1] != k.shape[1]
        if kind.cap and mask is not None:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            scores = (q @ k.mT).float() * (scale / kind.cap)
            out = (kind.cap * scores.tanh() + mask).softmax(-1).to(v.dtype) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped)
        return out.transpose(1, 2).reshape(math.prod(self._shape), -1)

    def fused(
        self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None, kind: AttentionKind = FULL
    ) -> Tensor | None:
        if (
            kind.reads
            or not self._kv_heads
            or not kernels_take(qkv)
            or (norms is not None and (norms.values or norms.after))
        ):
            return None
        from draftwing.train.kernels.layer_ops import turn

        kv_heads = self._kv_heads
        queries = qkv.shape[1] - 2 * kv_heads
        q, k, v = turn(qkv, cos, sin, queries + kv_heads, queries, norms).split([queries, kv_heads, kv_heads], 1)
        return self(layer, q, k, v, kind)


def _mask(kind: AttentionKind, length: int, q: Tensor) -> Tensor:
    """Returns what is added to scores, [1 or heads, length, length], with sinks one column more."""
    seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    if kind.reach:
        place = torch.arange(length, device=q.device)
        seen &= place >= first_seen(place, kind.reach)[:, None]
    mask = torch.where(seen, 0.0, -torch.inf).to(q.dtype)[None]
    if kind.sinks is None:
        return mask
    sinks = kind.sinks.to(q.dtype)[:, None, None].expand(-1, length, 1)  # [heads, length, 1]
    return torch.cat((mask.expand(len(sinks), -1, -1), sinks), 2)


def capture(
    target: FeatureModel,
    store: FeatureStore,
    tokens: Sequence[Tokens],
    batch_tokens: int = BATCH_TOKENS,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Appends the features of all `tokens` that the store does not have, in shards of about `shard_bytes`.

    Returns how many were computed. Killed at any moment, it loses at most the shard it was at. Shards end where batches
    do and batches follow from all of `tokens`, so an interrupted capture gives the same bits as any other.
    """
    missing = [one for one in tokens if one.key not in store.keys]
    token_bytes = bytes_per_token(store.meta)
    pending: list[Sample] = []
    held = 0
    total, done = sum(len(one.ids) for one in missing), 0
    remaining = Remaining("capturing", total)
    with progress_bar(total=total, desc="capturing", unit=" tokens", unit_scale=True) as bar:
        for batch in batches(sorted(tokens, key=lambda one: one.key), batch_tokens):
            batch = [one for one in batch if one.key not in store.keys]
            if not batch:
                continue
            ids = [torch.from_numpy(one.ids) for one in batch]
            for one, row, (aux_hidden, final) in zip(batch, ids, target.batch(ids), strict=True):
                pending.append(Sample(row, torch.from_numpy(one.loss_mask), aux_hidden.cpu(), final.cpu(), one.key))
                held += len(row) * token_bytes
                bar.update(len(row))
                done += len(row)
            remaining.update(done)
            if held >= shard_bytes:
                store.append(pending)
                pending, held = [], 0
        store.append(pending)
    return len(missing)


def bytes_per_token(meta: SourceMeta) -> int:
    """Returns what a token takes in a store on the disk."""
    streams = 1 + len(meta.aux_layers) if training(meta.algorithm).aux_hidden_states else 1
    return streams * meta.hidden * meta.torch_dtype.itemsize + 5


def batches(tokens: Sequence[Tokens], batch_tokens: int) -> Iterator[list[Tokens]]:
    """Gives all of `tokens`, those of similar length together, at most `batch_tokens` with padding unless one alone has
    more.

    Sorted within windows only, so that a store's beginning is not all of its short sequences.
    """
    start = 0
    while start < len(tokens):
        end, total = start, 0
        while end < len(tokens) and total < _WINDOW * batch_tokens:
            total += len(tokens[end].ids)
            end += 1
        batch: list[Tokens] = []
        for one in sorted(tokens[start:end], key=lambda one: len(one.ids)):
            if batch and len(one.ids) * (len(batch) + 1) > batch_tokens:
                yield batch
                batch = []
            batch.append(one)
        yield batch
        start = end
