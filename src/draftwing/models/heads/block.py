"""Draft heads that write a whole block in one forward: DFlash, and DSpark and Domino, which add a correction of low
rank by the tokens drafted above; DFlash2's parts are in `dflash2`.

Keys and values of the text are projections of the target's hidden states, the same vector for all layers; the head has
no context of its own tokens. The newest token and masks after it are a block, whose rows attend to the text and to each
other. With a correction, or a selector, branches of a tree differ.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.layers.attention import Attention
from draftwing.layers.decoder_layer import DecoderLayer
from draftwing.layers.embedding import Embedding
from draftwing.layers.linear import Linear
from draftwing.layers.linear_ops.base import ParamSlice
from draftwing.layers.linear_ops.dense import blocks_or_dense
from draftwing.layers.norm import RMSNorm
from draftwing.models.config import ModelConfig
from draftwing.models.decoder import DecoderModel
from draftwing.models.heads.base import FeatureHead, linear_of
from draftwing.models.heads.config import BlockConfig
from draftwing.models.heads.dflash2 import CandidateSelector, ConvolvedLayer
from draftwing.models.weight_map import layer_names, named
from draftwing.ops.attention.attend import Attend
from draftwing.ops.table import PLAIN, LayerOps


class MarkovHead(nn.Module):
    """From the token above a node, and with "rnn" from all drafted tokens above it, to what is added to its logits.

    vanilla: W2 w1, where w1 is the embedding of the token above.  gated: W2 (g w1), g = sigmoid(G [y; w1] + b) with y
    the state of the row that predicts the node.  rnn: J [s; w1; y] + b are three parts a, c and o; W2 tanh(o) is added,
    and s' = g s + (1 - g) tanh(c) with g = sigmoid(a) is the node's state, which its children start from; that of the
    newest token is 0.
    """

    def __init__(
        self, config: ModelConfig, block: BlockConfig, vocab: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """vocab: of the logits; the token above may be any of the target's."""
        super().__init__()
        hidden, rank = config.hidden_size, block.rank
        rows, form = config.vocab_format.of_rows, config.vocab_format
        self.rank, self.width = rank, rank if block.markov == "rnn" else 0  # width: of a node's state
        self.above = Embedding(Linear(rank, config.vocab_size, False, dtype, device, rows))
        self.out = Linear(rank, vocab, False, dtype, device, form)
        inner = blocks_or_dense(config.weight_format)
        self.gate = Linear(hidden + rank, rank, True, dtype, device, inner) if block.markov == "gated" else None
        self.joint = Linear(2 * rank + hidden, 3 * rank, True, dtype, device, inner) if block.markov == "rnn" else None
        self.ops: LayerOps = PLAIN  # do what is done between the products

    @property
    def reads_rows(self) -> bool:
        """Returns whether `mix` looks at the states of the rows."""
        return self.gate is not None or self.joint is not None

    def mix(
        self, hidden: Tensor, above: Tensor, state: Tensor | None, newest: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """hidden [M, H] of the rows that predict M nodes, above [M] int64: the tokens above them, state [M, width] of
        these, newest: whether the tokens above are texts' newest ones -> what `out` is fed [M, rank], and the nodes'
        own states [M, width]; None where they have none."""
        x, ops = self.above(above), self.ops  # [M, rank]
        if self.gate is not None:
            return ops.gate(self.gate(ops.concat_columns(hidden, x)), x), None
        if self.joint is None:
            return x, None
        assert state is not None
        state = state.to(x.dtype)
        return ops.recur(self.joint(ops.concat_columns(state, x, hidden.to(x.dtype))), state)

    def forward(
        self, logits: Tensor, hidden: Tensor, above: Tensor, state: Tensor | None, newest: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """logits [M, vocab], the others as for `mix` -> the corrected logits [M, vocab], and the nodes' states."""
        x, state = self.mix(hidden, above, state, newest)
        return self.out(x, logits), state

    __call__ = forward  # Module's own call looks for hooks: see RMSNorm

    def names(self, config: ModelConfig, vocab: int) -> dict[str, ParamSlice]:
        """Name in a checkpoint -> slice of the head's parameter."""
        table = named(config.vocab_format.of_rows, "markov_head.markov_w1", "markov.above.table", 0, config.vocab_size)
        table |= named(config.vocab_format, "markov_head.markov_w2", "markov.out", 0, vocab)
        for name, part, layer in (("gate_proj", "gate", self.gate), ("joint_proj", "joint", self.joint)):
            if layer is not None:
                for kind in ("weight", "bias"):
                    table[f"markov_head.{name}.{kind}"] = ParamSlice(f"markov.{part}.{kind}", 0, layer.out_features)
        return table


class DominoHead(nn.Module):
    """A Domino head (arXiv 2605.29707): s' = GRU(s, e) with e the target's embedding of the token above, 0 the state
    of the newest token's parent; W2 silu(W1 [y; s']) is added, but to what follows the newest token."""

    reads_rows = True

    def __init__(
        self, config: ModelConfig, block: BlockConfig, vocab: int, embed: Embedding, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        """vocab: of the logits; embed: the target's."""
        super().__init__()
        hidden = config.hidden_size
        self.rank, self.width = block.rank, block.memory
        self._above = (embed,)  # in a tuple, where nn.Module does not look for parameters
        inner = blocks_or_dense(config.weight_format)
        self.read = Linear(hidden, 3 * self.width, False, dtype, device, inner)
        self.keep = Linear(self.width, 3 * self.width, False, dtype, device, inner)
        self.joint = Linear(hidden + self.width, self.rank, False, dtype, device, inner)
        self.out = Linear(self.rank, vocab, False, dtype, device, config.vocab_format)
        self.ops: LayerOps = PLAIN  # as of `MarkovHead`

    def mix(
        self, hidden: Tensor, above: Tensor, state: Tensor | None, newest: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Mixes as `MarkovHead.mix` does."""
        state = self._next(hidden, above, state)
        x = self.joint(self.ops.concat_columns(hidden, state))
        return torch.zeros_like(x) if newest else self.ops.gate(x, x), state

    def _next(self, hidden: Tensor, above: Tensor, state: Tensor | None) -> Tensor:
        assert state is not None
        state = state.to(hidden.dtype)
        return self.ops.gru(self.read(self._above[0](above).to(hidden.dtype)), self.keep(state), state)

    def forward(
        self, logits: Tensor, hidden: Tensor, above: Tensor, state: Tensor | None, newest: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Computes what `MarkovHead.forward` does."""
        if newest:
            return logits, self._next(hidden, above, state)
        x, state = self.mix(hidden, above, state)
        return self.out(x, logits), state

    __call__ = forward  # as above

    def names(self, config: ModelConfig, vocab: int) -> dict[str, ParamSlice]:
        """Name in a checkpoint -> slice of the head's parameter."""
        table = named(config.vocab_format, "embed_proj.2", "markov.out", 0, vocab)
        parts = (("prefix_gru.weight_ih_l0", "read"), ("prefix_gru.weight_hh_l0", "keep"),
                 ("embed_proj.0.weight", "joint"))  # fmt: skip
        for name, part in parts:
            table[name] = ParamSlice(f"markov.{part}.weight", 0, getattr(self, part).out_features)
        return table


class ConfidenceHead(nn.Module):
    """How often a node of a row is accepted, were it drawn from the head's own distribution: sum min(p, q)."""

    def __init__(self, config: ModelConfig, block: BlockConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.with_markov = block.confidence == "markov"
        self.proj = Linear(config.hidden_size + self.with_markov * block.rank, 1, True, dtype, device)
        # Once settled: the part of a row's state, and that of each of the target's tokens above, the bias with it.
        self.weight: Tensor | None = None  # [H] float32
        self.token_odds = torch.empty(0)  # [V] float32
        self._vocab = config.vocab_size

    def forward(self, hidden: Tensor, markov: MarkovHead | DominoHead | None, above: Tensor) -> Tensor:
        """hidden [M, H] of the rows that predict M nodes, above [M] int64 as for `MarkovHead` -> log odds [M]"""
        if self.with_markov:
            assert isinstance(markov, MarkovHead)
            x = markov.above(above)
            hidden = torch.cat((hidden.to(x.dtype), x), 1)
        return self.proj(hidden).squeeze(1)

    __call__ = forward  # as above

    @torch.no_grad()
    def precompute(self, markov: MarkovHead | DominoHead | None) -> None:
        """Prepares what `ops.confident` gets; weights no longer change. Before they are packed."""
        weight, bias = self.proj.dense_weight()[0].float(), self.proj.bias
        assert bias is not None
        size, odds = len(weight), weight.new_zeros(self._vocab)
        if self.with_markov:
            assert isinstance(markov, MarkovHead)
            size -= markov.rank
            odds = markov.above.table.dense_weight().float() @ weight[size:]
        self.weight, self.token_odds = weight[:size].contiguous(), odds + bias.float()

    def names(self) -> dict[str, ParamSlice]:
        """Name in a checkpoint -> slice of the head's parameter."""
        return {f"confidence_head.proj.{kind}": ParamSlice(f"confidence.proj.{kind}", 0, 1)
                for kind in ("weight", "bias")}  # fmt: skip


class BlockHead(FeatureHead):
    """fc and a norm over the auxiliary hidden states, decoder layers, a final norm, perhaps a `MarkovHead` or a
    `CandidateSelector`, and a `ConfidenceHead`.

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
        self._own_windows = block.windows
        count, size = len(block.aux_layers), target.config.hidden_size
        self.fc = Linear(count * size, hidden, False, dtype, device, config.weight_format)
        self.hidden_norm = RMSNorm(hidden, eps, dtype, device)
        self.layers = nn.ModuleList(
            ConvolvedLayer(layer, i, config, block, dtype, device)
            if block.taps
            else DecoderLayer(layer, i, dtype, device)
            for i, layer in enumerate(self.layer_configs)
        )
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
        self.selector = CandidateSelector(config, block, dtype, device) if block.candidates else None
        self.confidence = ConfidenceHead(config, block, dtype, device) if block.confidence else None

    def see_at_most(self, positions: int | None) -> None:
        reach = self._own_windows
        if positions is not None:
            reach = tuple(min(window or positions, positions) for window in reach)
        self.config_of_block = replace(self.config_of_block, windows=reach)

    def sees_beyond(self, positions: int) -> bool:
        return any(window == 0 or window > positions for window in self.config_of_block.windows)

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
        x, scale = self.target.embed(ids), self.config_of_block.embed_scale
        if scale != 1:
            x = self.ops.add_scaled(x, None, scale)
        # A head to be trained is in float32, whatever its target is. The meta device knows nothing of autocast.
        if x.is_meta or not torch.is_autocast_enabled(x.device.type):
            x = x.to(self.state_dtype)
        for layer, attend in zip(self.layers, attends, strict=True):
            x = layer(x, cos, sin, attend)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        block = self.config_of_block
        if block.logit_scale != 1:
            hidden = self.ops.add_scaled(hidden, None, block.logit_scale)
        logits = super().logits(hidden)
        return self.ops.soft_cap(logits, block.logit_cap) if block.logit_cap else logits

    def readout(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        state, weight = super().readout(hidden)
        assert not self.config_of_block.logit_cap, "not trained"
        scale = self.config_of_block.logit_scale
        return state if scale == 1 else state * scale, weight

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
        if self.selector is not None:
            table |= self.selector.names(config)
        for i, layer in enumerate(self.layers):
            table |= layer_names(config, f"layers.{i}", f"layers.{i}", ranks=self.ranks, index=i)
            if isinstance(layer, ConvolvedLayer):
                table |= layer.conv_names(f"layers.{i}", config)
        return table
