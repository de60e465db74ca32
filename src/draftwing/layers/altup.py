"""Several residual streams of which a layer computes the first and predicts the others (AltUp, Baykal et al. 2023,
arXiv 2301.13310), with a product of low rank beside attention (LAuREL, Menghani et al. 2024, arXiv 2411.07501).

The streams of a token lie beside each other, x [M, count * hidden]. They are joined by torch's sums and products, in
one order and in float32: a row has the same bits in any batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.layers.config import LayerConfig, StoredMatrix, StoredVector
from draftwing.layers.decoder_layer import DecoderLayer
from draftwing.layers.embedding import LayerEnd
from draftwing.layers.linear import Linear
from draftwing.layers.linear_ops.base import WeightFormat
from draftwing.layers.norm import ByOps, norm_of, row_sizes
from draftwing.layers.part_configs import AltUpConfig, NormConfig
from draftwing.ops.attention.attend import Attend
from draftwing.ops.fp8.spec import Fp8Rows
from draftwing.ops.whole_layers.contract import LayerWeights
from draftwing.parallel.cut import Cut
from draftwing.parallel.ranks import Share

_LEAST = 1e-5  # of a mean square that is divided by
_LANES = 32  # columns with which torch's functions have the same bits in any batch


class AltUp(ByOps):
    """Predicts streams of each other, and corrects them by what the layer made of the first."""

    def __init__(self, config: LayerConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        assert config.streams is not None
        self._count, self._wide = config.streams.count, torch.promote_types(dtype, torch.float32)
        self.norm = norm_of(config.norm, config.hidden, dtype, device)
        self.router = Linear(config.hidden, self._count, False, dtype, device)
        self.predicts, self.corrects = (
            nn.Parameter(torch.zeros(rows, self._count, dtype=self._wide, device=device), False)
            for rows in (self._count**2, self._count)
        )

    def _shares(self, x: Tensor, table: Tensor) -> Tensor:
        """x [M, hidden], table [n, count] -> [M, n]: its products with what a row is told to be of each stream."""
        routed = self.router(self.ops.add_scaled(self.norm(x), None, 1 / x.shape[1])).to(self._wide)
        told = self.ops.soft_cap(F.pad(routed, (0, _LANES - self._count)), 1.0)  # tanh
        total = told[:, :1] * table[:, 0]
        for i in range(1, self._count):
            total = total + told[:, i : i + 1] * table[:, i]
        return total

    def predicted(self, x: Tensor) -> Tensor:
        """x [M, count * hidden] -> [M, count, hidden]"""
        streams = x.unflatten(1, (self._count, -1)).to(self._wide)
        shares = self._shares(x[:, : streams.shape[2]].contiguous(), self.predicts).unflatten(1, (self._count, -1))
        total = streams
        for i in range(self._count):
            total = total + shares[:, :, i, None] * streams[:, i, None]
        return total.to(x.dtype)

    def corrected(self, streams: Tensor, made: Tensor) -> Tensor:
        """streams [M, count, hidden]: as predicted; made [M, hidden] of the first -> [M, count * hidden]"""
        shares = self._shares(made, self.corrects) + 1
        wrong = made.to(self._wide) - streams[:, 0]
        return (streams + shares[:, :, None] * wrong[:, None]).to(made.dtype).flatten(1)


class Laurel(nn.Module):
    """x + norm(right(left(x))), of low rank."""

    def __init__(self, config: LayerConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        assert config.streams is not None
        hidden, rank, form = config.hidden, config.streams.rank, config.weight_format
        self.left = Linear(hidden, rank, False, dtype, device, form)
        self.right = Linear(rank, hidden, False, dtype, device, form)
        self.norm = norm_of(config.norm, hidden, dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        """x [M, hidden] -> [M, hidden]"""
        return x + self.norm(self.right(self.left(x)))

    __call__ = forward  # Module's own call looks for hooks: see RMSNorm


class AltUpEnd(LayerEnd):
    """What an embedding of the layer's own adds: to all streams but the first, of which it is made."""

    def __init__(self, config: LayerConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype, device)
        self.scale = nn.Parameter(torch.ones(config.hidden, dtype=dtype, device=device), False)

    def forward(self, x: Tensor, embedding: Tensor | None) -> Tensor:
        """x [M, count * hidden]; embedding [M, per_layer] -> [M, count * hidden]"""
        first, others = x.tensor_split((len(self.scale),), 1)
        made = self.made(first * self.scale, embedding)
        return torch.cat((first, (others.unflatten(1, (-1, len(self.scale))) + made[:, None]).flatten(1)), 1)

    __call__ = forward  # Module's own call looks for hooks: see RMSNorm


class AltUpLayer(DecoderLayer):
    """A decoder layer over such streams, with norms before and behind each part."""

    def __init__(self, config: LayerConfig, pool_layer: int | None, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, pool_layer, dtype, device)
        assert config.in_norms and config.out_norms and config.per_layer and not config.scaled
        self.altup, self.laurel = AltUp(config, dtype, device), Laurel(config, dtype, device)
        self.end = AltUpEnd(config, dtype, device)

    def weights(self) -> LayerWeights | None:
        return None

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, under: Tensor | Fp8Rows | None = None
    ) -> Tensor:
        """x [M, count * hidden] -> the same, without what `end` does."""
        assert self.attn_norm and self.attn_out_norm and self.mlp_norm and self.mlp_out_norm and self.mlp
        assert under is None
        streams = self.altup.predicted(x)
        first = streams[:, 0].contiguous()
        normed = self.attn_norm(first)
        x = self._ops.add_scaled(first, self.attn_out_norm(self.mixer(normed, cos, sin, attend)))
        x = self._ops.add_scaled(x, self.laurel(normed), 2**-0.5)
        x = self._ops.add_scaled(x, self.mlp_out_norm(self.mlp(self.mlp_norm(x))))
        return self.altup.corrected(streams, x)

    __call__ = forward  # Module's own call looks for hooks: see RMSNorm

    def write(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> None:
        assert self.attn_norm is not None
        self.mixer.write(self.attn_norm(self.altup.predicted(x)[:, 0].contiguous()), cos, sin, attend)


class AltUpStart(ByOps):
    """Makes the streams of embeddings: products of these, as large as they are."""

    def __init__(
        self, count: int, hidden: int, dtype: torch.dtype, device: torch.device, form: WeightFormat
    ) -> None:  # fmt: skip
        super().__init__()
        self.project = Linear(hidden, (count - 1) * hidden, False, dtype, device, form)

    def forward(self, x: Tensor) -> Tensor:
        """x [M, hidden] -> [M, count * hidden]"""
        made = self.project(x).view(-1, x.shape[1])  # [M * (count - 1), hidden]
        sizes = row_sizes(self.ops, made, _LEAST).view(len(x), -1, 1)
        others = made.view(len(x), -1, x.shape[1]) * row_sizes(self.ops, x).unsqueeze(2) / sizes
        return torch.cat((x, others.to(x.dtype).flatten(1)), 1)

    __call__ = forward  # Module's own call looks for hooks: see RMSNorm


class AltUpLast(ByOps):
    """Makes one state of the streams, under the last norm: the mean of the first and of products of the others, as
    large as it is."""

    def __init__(
        self, count: int, hidden: int, norm: NormConfig, dtype: torch.dtype, device: torch.device, form: WeightFormat
    ) -> None:
        super().__init__()
        self.back = nn.ModuleList(Linear(hidden, hidden, False, dtype, device, form) for _ in range(count - 1))
        self.norm = norm_of(norm, hidden, dtype, device)

    @property
    def weight(self) -> Tensor:
        """Returns that of the last norm."""
        return self.norm.weight

    def forward(self, x: Tensor) -> Tensor:
        """x [M, count * hidden] -> [M, hidden]"""
        first, *others = (part.contiguous() for part in x.chunk(len(self.back) + 1, 1))
        total, size = first, row_sizes(self.ops, first)
        for linear, stream in zip(self.back, others, strict=True):
            made = linear(stream)
            total = total + made * size / row_sizes(self.ops, made, _LEAST)
        return self.norm(self.ops.add_scaled(total.to(x.dtype), None, 1 / (len(others) + 1)))

    __call__ = forward  # Module's own call looks for hooks: see RMSNorm


def stored_altup(config: AltUpConfig, hidden: int) -> list[StoredMatrix | StoredVector]:
    """Returns which tensors fill what a layer has besides others, all of them on every rank."""
    return [
        StoredVector("altup.router_norm.weight", "altup.norm.weight", hidden, is_norm=True),
        StoredVector("altup.modality_router.weight", "altup.router.weight", config.count),
        StoredVector("altup.prediction_coefs.weight", "altup.predicts", config.count**2),
        StoredVector("altup.correction_coefs.weight", "altup.corrects", config.count),
        StoredVector("altup.correct_output_scale", "end.scale", hidden),
        StoredVector("laurel.post_laurel_norm.weight", "laurel.norm.weight", hidden, is_norm=True),
        _whole("laurel.linear_left", "laurel.left", 0, config.rank),
        _whole("laurel.linear_right", "laurel.right", 0, hidden),
    ]


def stored_around(config: AltUpConfig, hidden: int, last_norm: str) -> list[StoredMatrix | StoredVector]:
    """Returns which tensors fill what is before and behind the layers. last_norm: a checkpoint's name of it."""
    parts: list[StoredMatrix | StoredVector] = []
    for i in range(config.count - 1):
        parts.append(_whole(f"model.altup_projections.{i}", "start.project", i * hidden, hidden))
        parts.append(_whole(f"model.altup_unembed_projections.{i}", f"norm.back.{i}", 0, hidden))
    return [*parts, StoredVector(f"{last_norm}.weight", "norm.norm.weight", hidden, is_norm=True)]


def _whole(checkpoint: str, param: str, first: int, rows: int) -> StoredMatrix:
    return StoredMatrix(checkpoint, param, first, rows, False, Cut(0, Share(0, rows, rows)))
