"""The draft heads of EAGLE and EAGLE-2 (Li et al. 2024, arXiv 2401.15077 and 2406.16858), of EAGLE-3 (Li et al. 2025,
arXiv 2503.01840), and of P-EAGLE, which is EAGLE-3 that drafts several tokens in one pass.

The first continues the sequence of the target's hidden states after the final norm, so the target's own head reads
tokens from what it gives. The embedding of the next token says which continuation was taken. The feature of EAGLE-3 is
fused from residual streams of several depths of the target. It is trained on its own outputs rather than to imitate the
target's states, so it has a final norm and mostly a head of its own, over the more frequent tokens. P-EAGLE's rows
after the newest token are masks: a token and hidden states, trained with the head, for what is not known yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.layers.config import LayerConfig
from draftwing.layers.decoder_layer import DecoderLayer
from draftwing.layers.embedding import Embedding
from draftwing.layers.linear import Linear
from draftwing.layers.linear_ops.base import ParamSlice
from draftwing.layers.norm import RMSNorm
from draftwing.models.config import ModelConfig
from draftwing.models.decoder import DecoderModel
from draftwing.models.heads.base import FeatureHead, Shown
from draftwing.models.weight_map import layer_names, named
from draftwing.ops.attention.attend import Attend
from draftwing.ops.table import LayerOps


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
        return self.fc(self.ops.fuse_inputs(*self.embedding.source(ids), features))

    def names(self) -> dict[str, ParamSlice]:
        table = named(self.config.weight_format, "fc", "fc", 0, self.config.hidden_size)
        if self.fc.bias is not None:
            table["fc.bias"] = ParamSlice("fc.bias", 0, self.config.hidden_size)
        for i in range(self.config.num_layers):
            norm = "input_layernorm" if i else None
            table |= layer_names(self.config, f"layers.{i}", f"layers.{i}", norm, self.ranks, i)
        return table


@dataclass(frozen=True)
class Eagle3Config:
    """What EAGLE-3 heads differ in besides the sizes of their layers.

    aux_layers: what the target is asked for (`DecoderModel.forward`).  aux_size: hidden size of the target.  fused:
    whether fc makes the feature of them; else it is the one that there is.
    draft_vocab: rows of the head's own lm_head, 0 where it shares the target's.  own_embedding: needed where
    aux_size is not the head's hidden size.  norm_before_residual: the residual stream starts from the normed feature.
    norm_before_fc: one norm over all auxiliary hidden states.  fc_norm: one norm per auxiliary layer.  norm_output:
    what is fed back is normed.
    later_norm: name that layers after the first have for the norm before attention.
    mask: token of rows that draft further ahead in the same pass, None for a head without them.
    """

    aux_layers: tuple[int, ...]
    aux_size: int
    draft_vocab: int
    fused: bool = True
    fc_bias: bool = False
    own_embedding: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    later_norm: str = "input_layernorm"
    mask: int | None = None


class ChunkNorm(nn.Module):
    """An RMS norm for each of several equal chunks of the last axis, each with weights of its own."""

    def __init__(self, chunks: int, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(chunks * size, dtype=dtype, device=device))
        self.size, self.eps = size, eps

    def forward(self, x: Tensor) -> Tensor:
        """x [M, chunks * size] -> [M, chunks * size]"""
        return F.rms_norm(x.unflatten(-1, (-1, self.size)), (self.size,), None, self.eps).flatten(-2) * self.weight


class FusionLayer(DecoderLayer):
    """A decoder layer that attends with (embedding, feature), each under its own norm; its residual stream starts
    from the feature alone."""

    def __init__(self, config: LayerConfig, from_normed: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, 0, dtype, device, in_size=2 * config.hidden)
        self.hidden_norm = RMSNorm(config.hidden, config.norm.eps, dtype, device)
        self.from_normed = from_normed

    def join(self, ids: Tensor, embed: Embedding | Shown, feature: Tensor) -> Tensor:
        """ids [M], feature [M, hidden] -> [M, 2 * hidden], what it attends with"""
        assert self.attn_norm is not None
        norms = self.attn_norm.weight, self.hidden_norm.weight
        return self._ops.fuse_inputs(*embed.source(ids), feature, norms, self.hidden_norm.eps)

    def fuse(
        self, ids: Tensor, embed: Embedding | Shown, feature: Tensor, cos: Tensor, sin: Tensor, attend: Attend
    ) -> Tensor:
        """ids [M], feature [M, hidden] -> [M, hidden]"""
        fused = self.join(ids, embed, feature)
        return self.mix(fused, fused[:, feature.shape[1] :] if self.from_normed else feature, cos, sin, attend)


class Eagle3Head(FeatureHead):
    """fc over the auxiliary hidden states, a `FusionLayer`, perhaps ordinary layers, a final norm and a head."""

    def __init__(
        self,
        config: ModelConfig,
        eagle: Eagle3Config,
        target: DecoderModel,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__(config, target, eagle.aux_layers, dtype)
        device, hidden, eps = torch.device(device), config.hidden_size, config.norm.eps
        self.eagle = eagle
        count, size = len(eagle.aux_layers), eagle.aux_size
        self.input_norm = RMSNorm(count * size, eps, dtype, device) if eagle.norm_before_fc else None
        self.fc_norm = ChunkNorm(count, size, eps, dtype, device) if eagle.fc_norm else None
        self.fc: Linear | None = None
        if eagle.fused:
            self.fc = Linear(count * size, hidden, eagle.fc_bias, dtype, device, config.weight_format)
        first, *later = self.layer_configs
        self.fusion = FusionLayer(first, eagle.norm_before_residual, dtype, device)
        self.later = nn.ModuleList(DecoderLayer(layer, i, dtype, device) for i, layer in enumerate(later, 1))
        self.norm = RMSNorm(hidden, eps, dtype, device)
        self.embed: Embedding | None = None
        if eagle.draft_vocab:
            self.add_lm_head(eagle.draft_vocab, dtype, device)
        if eagle.own_embedding:
            rows = config.vocab_format.of_rows
            self.embed = Embedding(Linear(hidden, config.vocab_size, False, dtype, device, rows))
        if eagle.mask is not None:
            self.mask_hidden = nn.Parameter(torch.empty(count * size, dtype=dtype, device=device))
        self._mask_feature: Tensor | None = None  # once packed

    @torch.no_grad()
    def pack(self, ops: LayerOps) -> None:
        super().pack(ops)
        if self.eagle.mask is not None:
            self._mask_feature = self.mask_feature()

    def packed_tensors(self) -> list[Tensor]:
        return super().packed_tensors() + ([] if self._mask_feature is None else [self._mask_feature])

    def mask_feature(self) -> Tensor:
        """Returns the feature of a row of a mask, [1, hidden]."""
        made = self._mask_feature
        return self.features(self.mask_hidden.unsqueeze(0)) if made is None else made

    def features(self, aux_hidden: Tensor) -> Tensor:
        """aux_hidden [M, len(aux_layers) * hidden of the target] -> [M, hidden]"""
        if self.input_norm is not None:
            aux_hidden = self.input_norm(aux_hidden)
        if self.fc_norm is not None:
            aux_hidden = self.fc_norm(aux_hidden)
        return aux_hidden if self.fc is None else self.fc(aux_hidden)

    def run(self, ids: Tensor, positions: Tensor, features: Tensor | None, level: int, attend: Attend) -> Tensor:
        """ids, positions [M], features [M, hidden] -> [M, hidden] before the final norm, unless the head was trained
        to be fed what comes after it."""
        assert features is not None
        cos, sin = self._rotation(positions)
        x = self.fusion.fuse(ids, self.embedding, features, cos, sin, attend)
        for layer in self.later:
            x = layer(x, cos, sin, attend)
        return self.norm(x) if self.eagle.norm_output else x

    def write(self, ids: Tensor, positions: Tensor, features: Tensor | None, attend: Attend) -> None:
        if len(self.later):
            return super().write(ids, positions, features, attend)
        assert features is not None
        joined = self.fusion.join(ids, self.embedding, features)
        self.fusion.mixer.write(joined, *self._rotation(positions), attend)

    @property
    def embedding(self) -> Embedding | Shown:
        return super().embedding if self.embed is None else self.embed

    def output_layer(self) -> tuple[RMSNorm | None, Linear]:
        return None if self.eagle.norm_output else self.norm, super().output_layer()[1]

    def names(self) -> dict[str, ParamSlice]:
        config, eagle, hidden = self.config, self.eagle, self.config.hidden_size
        table = super().names()
        if eagle.fused:
            table |= named(config.weight_format, "fc", "fc", 0, hidden)
        table["norm.weight"] = ParamSlice("norm.weight", 0, hidden)
        if eagle.fc_bias:
            table["fc.bias"] = ParamSlice("fc.bias", 0, hidden)
        if eagle.norm_before_fc:
            table["input_norm.weight"] = ParamSlice("input_norm.weight", 0, len(eagle.aux_layers) * eagle.aux_size)
        if eagle.fc_norm:
            for i in range(len(eagle.aux_layers)):
                table[f"fc_norm.{i}.weight"] = ParamSlice("fc_norm.weight", i * eagle.aux_size, eagle.aux_size)
        if eagle.own_embedding:
            table |= named(config.vocab_format.of_rows, "embed_tokens", "embed.table", 0, config.vocab_size)
        if eagle.mask is not None:
            table["mask_hidden"] = ParamSlice("mask_hidden", 0, len(eagle.aux_layers) * eagle.aux_size)
        first = first_layer_name(config.num_layers)
        table |= layer_names(config, first, "fusion", ranks=self.ranks)
        table[f"{first}.hidden_norm.weight"] = ParamSlice("fusion.hidden_norm.weight", 0, hidden)
        for i in range(1, config.num_layers):
            table |= layer_names(config, f"layers.{i}", f"later.{i - 1}", eagle.later_norm, self.ranks, i)
        return table


def first_layer_name(layers: int) -> str:
    """Returns what checkpoints of this many layers call the first."""
    return "midlayer" if layers == 1 else "layers.0"
