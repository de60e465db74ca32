"""The draft head of EAGLE and EAGLE-2 (Li et al. 2024, arXiv 2401.15077 and 2406.16858).

It continues the sequence of the target's hidden states after the final norm, so the target's own head reads tokens
from what it gives. The embedding of the next token tells which continuation was taken.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from draftwing.layers.linear import Linear
from draftwing.models.config import ModelConfig
from draftwing.models.decoder import DecoderLayer, DecoderModel
from draftwing.models.heads.base import FeatureHead
from draftwing.models.weight_map import Slot, layer_names
from draftwing.ops.attention import Attend
from draftwing.ops.pick import FuseInputs, fuse_kernel


class EagleHead(FeatureHead):
    """fc [hidden, 2 * hidden] over (embedding, feature), then decoder layers, the first of which has no norm before
    its attention. No final norm."""

    def __init__(
        self, config: ModelConfig, target: DecoderModel, fc_bias: bool, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__(config, target, (target.final_tap,))
        device, hidden = torch.device(device), config.hidden_size
        self.fc = Linear(2 * hidden, hidden, fc_bias, dtype, device)
        self.layers = nn.ModuleList(DecoderLayer(config, i, dtype, device) for i in range(config.num_layers))
        self.layers[0].attn_norm = nn.Identity()
        self._fuse: FuseInputs | None = None

    def pack(self) -> None:
        super().pack()
        self._fuse = fuse_kernel(self._norm_weight())

    def features(self, taps: Tensor) -> Tensor:
        """taps [M, hidden]: the target's output after its final norm, as it is."""
        return taps

    def run(self, ids: Tensor, positions: Tensor, features: Tensor | None, level: int, attend: Attend) -> Tensor:
        """ids, positions [M], features [M, hidden] -> [M, hidden], an estimate of the next position's feature, which
        is a normed state and is not normed again."""
        assert features is not None
        cos, sin = self._rotation(positions)
        embed = self.target.embed
        fused = torch.cat((embed(ids), features), -1) if self._fuse is None else self._fuse(ids, embed.weight, features)
        x = self.fc(fused)  # [M, hidden]
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return x

    def names(self) -> dict[str, Slot]:
        table = {"fc.weight": Slot("fc.weight", 0, self.config.hidden_size)}
        if self.fc.bias is not None:
            table["fc.bias"] = Slot("fc.bias", 0, self.config.hidden_size)
        for i in range(self.config.num_layers):
            table |= layer_names(self.config, f"layers.{i}", f"layers.{i}", "input_layernorm" if i else None)
        return table

    def _norm_weight(self) -> Tensor:
        layer = self.layers[0]
        assert isinstance(layer, DecoderLayer)
        return layer.mlp_norm.weight
