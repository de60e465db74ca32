"""Several residual streams in place of one, with gates before and weights behind each part of a layer
(hyper-connections, Zhu et al. 2024, arXiv 2409.19606).

The streams of a token lie beside each other, x [M, count * hidden]. A part of the layer reads their mean under norms
and gates, and what it gives is added to each stream by a weight. Gates and weights are made of all streams.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from draftwing.layers.config import LayerConfig, StoredMatrix, StoredVector
from draftwing.layers.decoder_layer import DecoderLayer
from draftwing.layers.linear import Linear
from draftwing.layers.linear_ops.base import WeightFormat
from draftwing.layers.ngram import NgramLayer
from draftwing.layers.part_configs import NormConfig, StreamsConfig
from draftwing.layers.stream_norm import StreamNorm
from draftwing.ops.attention.attend import Attend
from draftwing.ops.fp8.spec import Fp8Rows
from draftwing.ops.whole_layers.contract import LayerWeights
from draftwing.parallel.cut import Cut
from draftwing.parallel.ranks import Share


class Streams(nn.Module):
    """Makes what one part reads of the streams, and with `adds` the weights by which its result is added to each."""

    def __init__(
        self, config: StreamsConfig, hidden: int, norm: NormConfig, dtype: torch.dtype, device: torch.device,
        form: WeightFormat, adds: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self._count, wide = config.count, config.count * hidden
        self.norm = StreamNorm(hidden, config.count, norm, dtype, device)
        self.down = Linear(wide, config.rank, False, dtype, device, form)
        self.up = Linear(config.rank, wide, False, dtype, device, form)
        self.adds = Linear(wide, config.count, False, dtype, device) if adds else None

    @property
    def weight(self) -> Tensor:
        """Returns that of its norm, which stands where others have a last norm."""
        return self.norm.weight

    def read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [M, count * hidden] -> what the part reads, [M, hidden], and the normed streams."""
        ops, count = self.norm.ops, self._count
        normed = self.norm(x)
        low = ops.add_scaled(self.down(normed), None, 1 / count)
        gated = ops.gate(self.up(ops.gate(low, low)), normed)  # [M, count * hidden]
        total, *others = gated.chunk(count, 1)
        for other in others:
            total = total + other
        return ops.add_scaled(total, None, 1 / count), normed

    def added(self, x: Tensor, normed: Tensor, made: Tensor) -> Tensor:
        """x, normed [M, count * hidden], made [M, hidden]: what the part gives -> x with it."""
        assert self.adds is not None
        ops = self.norm.ops
        weights = ops.add_scaled(self.adds(normed), None, 1 / self._count)
        weights = ops.gate(weights, torch.full_like(weights, 2))
        return x + (made.unsqueeze(1) * weights.unsqueeze(2)).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        """x [M, count * hidden] -> [M, hidden]"""
        return self.read(x)[0]

    __call__ = forward  # Module's own call looks for hooks: see RMSNorm


class StreamedLayer(DecoderLayer):
    """A decoder layer over several streams, perhaps with embeddings of n-grams in front."""

    def __init__(self, config: LayerConfig, pool_layer: int | None, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, pool_layer, dtype, device)
        assert config.streams is not None and not (config.in_norms or config.out_norms or config.parallel)
        parts = config.streams, config.hidden, config.norm, dtype, device, config.weight_format
        self.before_mixer, self.before_mlp = Streams(*parts), Streams(*parts)
        self.ngram: NgramLayer | None = None
        if config.ngram is not None:
            assert pool_layer is not None
            self.ngram = NgramLayer(config, pool_layer, dtype, device)

    def weights(self) -> LayerWeights | None:
        return None

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, under: Tensor | Fp8Rows | None = None
    ) -> Tensor:
        """x [M, count * hidden] -> the same, without what `ngram` adds before."""
        assert self.mlp is not None and under is None
        read, normed = self.before_mixer.read(x)
        x = self.before_mixer.added(x, normed, self.mixer(read, cos, sin, attend))
        read, normed = self.before_mlp.read(x)
        return self.before_mlp.added(x, normed, self.mlp(read))

    __call__ = forward  # Module's own call looks for hooks: see RMSNorm

    def write(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> None:
        self.mixer.write(self.before_mixer(x), cos, sin, attend)


def stored_streams(
    config: StreamsConfig, hidden: int, checkpoint: str, param: str, adds: bool = True
) -> list[StoredMatrix | StoredVector]:
    """Returns which tensors fill one `Streams`, all of them on every rank."""
    wide = config.count * hidden

    def matrix(name: str, own: str, rows: int) -> StoredMatrix:
        whole = Cut(0, Share(0, rows, rows))
        return StoredMatrix(f"{checkpoint}.{name}", f"{param}.{own}", 0, rows, False, whole)

    parts: list[StoredMatrix | StoredVector] = [
        StoredVector(f"{checkpoint}.hc_norm.weight", f"{param}.norm.weight", wide, is_norm=True),
        matrix("input_mix_weight_down", "down", config.rank),
        matrix("input_mix_weight_up", "up", wide),
    ]
    if adds:  # dense in every format
        parts.append(StoredVector(f"{checkpoint}.block_inject_weight.weight", f"{param}.adds.weight", config.count))
    return parts
