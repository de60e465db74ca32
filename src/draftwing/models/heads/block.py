"""Draft heads that write a whole block in one forward: DFlash, and DSpark and Domino, which add a correction of low
rank by the tokens drafted above.

Keys and values of the text are projections of the target's hidden states, the same vector for all layers; the head has
no context of its own tokens. The newest token and masks after it are a block, whose rows attend to the text and to each
other. With a correction branches of a tree differ.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.layers.attention import Attention
from draftwing.layers.decoder_layer import DecoderLayer
from draftwing.layers.linear import Linear
from draftwing.layers.linear_ops.base import ParamSlice
from draftwing.layers.norm import RMSNorm
from draftwing.models.config import ModelConfig
from draftwing.models.decoder import DecoderModel
from draftwing.models.heads.base import FeatureHead, linear_of
from draftwing.models.heads.block_config import BlockConfig
from draftwing.models.heads.markov import ConfidenceHead, DominoHead, MarkovHead
from draftwing.models.weight_map import layer_names, named
from draftwing.ops.attention import Attend
from draftwing.ops.torch.layer_ops import LayerOps


class BlockHead(FeatureHead):
    """fc and a norm over the auxiliary hidden states, decoder layers, a final norm, perhaps a `MarkovHead` and a
    `ConfidenceHead`.

    kv of position t depends on the target's hidden states at t alone.
    """

    lookahead = 0
    forward_name = "block"

    def __init__(
        self,
        config: ModelConfig,
        block: BlockConfig,
        target: DecoderModel,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__(config, target, block.aux_layers, dtype)
        device, hidden, eps = torch.device(device), config.hidden_size, config.norm.eps
        self.config_of_block, self.state_dtype = block, dtype
        count, size = len(block.aux_layers), target.config.hidden_size
        self.fc = Linear(count * size, hidden, False, dtype, device, config.weight_format)
        self.hidden_norm = RMSNorm(hidden, eps, dtype, device)
        self.layers = nn.ModuleList(DecoderLayer(layer, i, dtype, device) for i, layer in enumerate(self.layer_configs))
        self.norm = RMSNorm(hidden, eps, dtype, device)
        self.text_kv: Linear | None = None  # once packed: `_kv_rows`
        self.vocab = block.draft_vocab or self.vocab  # rows of a tied lm_head come with `draft_only`
        if block.draft_vocab and not block.tied:
            self.add_lm_head(block.draft_vocab, dtype, device)
        self.markov: MarkovHead | DominoHead | None = None
        if block.markov == "domino":
            self.markov = DominoHead(config, block, self.vocab, target.embed, dtype, device)
        elif block.markov:
            self.markov = MarkovHead(config, block, self.vocab, dtype, device)
        self.confidence = ConfidenceHead(config, block, dtype, device) if block.confidence else None

    def draft_only(self, ids: Tensor | None) -> None:
        """Prepares as all heads do. Takes their rows of the target's lm_head where the head has none of its own."""
        if ids is not None and self.config_of_block.tied:
            self.restrict(ids)
        super().draft_only(ids)

    def features(self, aux_hidden: Tensor) -> Tensor:
        """aux_hidden [M, len(aux_layers) * hidden of the target] -> [M, hidden]: what keys and values are made of"""
        return self.hidden_norm(self.fc(aux_hidden))

    def write_text(self, features: Tensor, positions: Tensor, attend: Attend) -> None:
        """Leaves keys and values of text in the pool: features [M, hidden] of the target's rows at positions [M]."""
        cos, sin = self._rotation(positions)
        layers = self.attentions()
        if self.text_kv is None:
            weight, bias = self._kv_rows()
            made = F.linear(features, weight, bias)
        else:
            made = self.text_kv(features)
        parts = made.view(len(features), len(layers), -1, layers[0].head_dim)
        for attention, part in zip(layers, parts.unbind(1), strict=True):
            attention.write_heads(part, cos, sin, attend)

    def attentions(self) -> list[Attention]:
        """Returns those of its layers."""
        return [layer.mixer for layer in self.layers]  # type: ignore[misc]

    def _kv_rows(self) -> tuple[Tensor, Tensor | None]:
        """Returns the rows of all layers that make keys and values, which are the same GEMM's of one vector: weight
        [layers * 2 * kv_heads * head_dim, hidden], bias."""
        layers = self.attentions()
        weight = torch.cat([one.qkv.dense_weight()[one.heads * one.head_dim :] for one in layers])
        biases = [one.qkv.bias[one.heads * one.head_dim :] for one in layers if one.qkv.bias is not None]
        return weight, torch.cat(biases) if biases else None

    def packed_tensors(self) -> list[Tensor]:
        sure = self.confidence
        own = [] if sure is None or sure.weight is None else [sure.weight, sure.token_odds]
        return super().packed_tensors() + own

    @torch.no_grad()
    def pack(self, ops: LayerOps) -> None:
        self.text_kv = linear_of(*self._kv_rows(), self.config.weight_format)
        if self.confidence is not None:
            self.confidence.precompute(self.markov)
        if self.markov is not None:
            self.markov.ops = ops
        super().pack(ops)

    def block(self, ids: Tensor, positions: Tensor, *attends: Attend) -> Tensor:
        """ids, positions [B * rows] of blocks, attends: of each layer -> [B * rows, hidden] after the final norm"""
        cos, sin = self._rotation(positions)
        x = self.target.embed(ids)
        # A head to be trained is in float32, whatever its target is. The meta device knows nothing of autocast.
        if x.is_meta or not torch.is_autocast_enabled(x.device.type):
            x = x.to(self.state_dtype)
        for layer, attend in zip(self.layers, attends, strict=True):
            x = layer(x, cos, sin, attend)
        return self.norm(x)

    def given(
        self, logits: Tensor, hidden: Tensor, above: Tensor, state: Tensor | None, newest: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the logits [M, vocab] of nodes, hidden [M, H] of the rows that predict them, given the tokens above
        [M], newest: whether these are texts' newest ones, and their states [M, state_width]; and the nodes' own states,
        None where they have none."""
        return (logits, None) if self.markov is None else self.markov(logits, hidden, above, state, newest)

    @property
    def state_width(self) -> int:
        """Returns the size of what a node hands down to its children, 0: nothing."""
        return 0 if self.markov is None else self.markov.width

    def names(self) -> dict[str, ParamSlice]:
        config, hidden = self.config, self.config.hidden_size
        table = super().names() | named(config.weight_format, "fc", "fc", 0, hidden)
        for norm in ("hidden_norm.weight", "norm.weight"):
            table[norm] = ParamSlice(norm, 0, hidden)
        if self.markov is not None:
            table |= self.markov.names(config, self.vocab)
        if self.confidence is not None:
            table |= self.confidence.names()
        for i in range(config.num_layers):
            table |= layer_names(config, f"layers.{i}", f"layers.{i}", ranks=self.ranks, index=i)
        return table
