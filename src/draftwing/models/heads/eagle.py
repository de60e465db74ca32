"""The draft head of EAGLE and EAGLE-2 (Li et al. 2024, arXiv 2401.15077 and 2406.16858).

It continues the sequence of the target's hidden states after the final norm, so the target's own head reads tokens
from what it gives. The embedding of the next token says which continuation was taken.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from draftwing.layers.decoder_layer import DecoderLayer
from draftwing.layers.linear import Linear
from draftwing.layers.linear_ops.base import ParamSlice
from draftwing.models.config import ModelConfig
from draftwing.models.decoder import DecoderModel
from draftwing.models.heads.base import FeatureHead
from draftwing.models.weight_map import layer_names, named
from draftwing.ops.attention import Attend


class EagleHead(FeatureHead):
    """fc [hidden, 2 * hidden] over (embedding, feature), then decoder layers, the first of which has no norm before
    its attention. No final norm."""

    def __init__(
        self, config: ModelConfig, target: DecoderModel, fc_bias: bool, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__(config, target, (target.final_aux_layer,), dtype)
        device, hidden = torch.device(device), config.hidden_size
        self.fc = Linear(2 * hidden, hidden, fc_bias, dtype, device, config.weight_format)
        self.layers = nn.ModuleList(
            DecoderLayer(layer, i, dtype, device, norms_input=i > 0) for i, layer in enumerate(self.layer_configs)
        )

    def run(self, ids: Tensor, positions: Tensor, features: Tensor | None, level: int, attend: Attend) -> Tensor:
        """ids, positions [M], features [M, hidden] -> [M, hidden], an estimate of the next position's feature, which
        is a normed state and is not normed again."""
        cos, sin = self._rotation(positions)
        x = self._join(ids, features)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return x

    def write(self, ids: Tensor, positions: Tensor, features: Tensor | None, attend: Attend) -> None:
        if len(self.layers) > 1:
            return super().write(ids, positions, features, attend)
        layer = self.layers[0]
        assert isinstance(layer, DecoderLayer)
        layer.write(self._join(ids, features), *self._rotation(positions), attend)

    def _join(self, ids: Tensor, features: Tensor | None) -> Tensor:
        """ids [M], features [M, hidden] -> [M, hidden]"""
        assert features is not None
        return self.fc(self.ops.fuse_inputs(*self.target.embed.source(ids), features))

    def names(self) -> dict[str, ParamSlice]:
        table = named(self.config.weight_format, "fc", "fc", 0, self.config.hidden_size)
        if self.fc.bias is not None:
            table["fc.bias"] = ParamSlice("fc.bias", 0, self.config.hidden_size)
        for i in range(self.config.num_layers):
            norm = "input_layernorm" if i else None
            table |= layer_names(self.config, f"layers.{i}", f"layers.{i}", norm, self.ranks, i)
        return table
