"""What DFlash2 heads add to DFlash: convolutions along the rows of a block, and a selector of candidates by pairs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from draftwing.layers.config import LayerConfig
from draftwing.layers.decoder_layer import DecoderLayer
from draftwing.layers.linear import Linear
from draftwing.layers.linear_ops.base import ParamSlice
from draftwing.layers.linear_ops.dense import blocks_or_dense
from draftwing.models.config import ModelConfig
from draftwing.models.heads.config import BlockConfig
from draftwing.models.weight_map import named
from draftwing.ops.attention.attend import Attend
from draftwing.ops.fp8.spec import Fp8Rows
from draftwing.ops.table import PLAIN, LayerOps
from draftwing.ops.whole_layers.contract import LayerWeights


class GroupedConv(nn.Module):
    """A convolution on both sides of a sublayer. The factor of a channel and a tap is one of its own and one that all
    channels of a group share, which is made of the sublayer's input."""

    def __init__(self, config: ModelConfig, block: BlockConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, taps = config.hidden_size, block.taps
        self.rows = block.rows
        self.base = nn.Parameter(torch.empty(2, taps, hidden, dtype=dtype, device=device))
        self.factors = Linear(hidden, 2 * taps * (hidden // block.group), False, dtype, device, config.weight_format)
        self.ops: LayerOps = PLAIN

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [M, hidden], what the sublayer would read, M a multiple of a block's rows -> what it reads, and the factors
        [M, 2 * taps * groups] that `after` needs."""
        factors = self.factors(x)
        return self.ops.block_conv(x, factors, self.base, 0, self.rows), factors

    def after(self, made: Tensor, factors: Tensor, x: Tensor) -> Tensor:
        """made [M, hidden] of the sublayer, x [M, hidden] the residual stream -> that stream behind it"""
        return self.ops.block_conv(made, factors, self.base, 1, self.rows, x)

    def names(self, checkpoint: str, model: str, config: ModelConfig) -> dict[str, ParamSlice]:
        """Name in a checkpoint -> slice of the parameter, with both prefixes."""
        table = named(
            config.weight_format, f"{checkpoint}.kernel_projection", f"{model}.factors", 0, self.factors.out_features
        )
        return table | {f"{checkpoint}.base_kernel": ParamSlice(f"{model}.base", 0, 2)}


class ConvolvedLayer(DecoderLayer):
    """A decoder layer of a block with a convolution around its attention and one around its MLP."""

    def __init__(
        self, layer: LayerConfig, index: int, config: ModelConfig, block: BlockConfig, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__(layer, index, dtype, device)
        self.attn_conv, self.mlp_conv = (GroupedConv(config, block, dtype, device) for _ in range(2))

    def use(self, ops: LayerOps) -> None:
        super().use(ops)
        self.attn_conv.ops = self.mlp_conv.ops = ops

    def weights(self) -> LayerWeights | None:
        """Returns None: no device does such a layer in one call."""
        return None

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, under: Tensor | Fp8Rows | None = None
    ) -> Tensor:
        """As `DecoderLayer.forward`, of a head, no sum of which is made under a norm."""
        assert under is None
        assert self.attn_norm is not None and self.mlp_norm is not None and self.mlp is not None
        read, factors = self.attn_conv.before(self.attn_norm(x))
        x = self.attn_conv.after(self.mixer(read, cos, sin, attend), factors, x)
        read, factors = self.mlp_conv.before(self.mlp_norm(x))
        return self.mlp_conv.after(self.mlp(read), factors, x)

    __call__ = forward  # Module's own call looks for hooks: see RMSNorm

    def conv_names(self, name: str, config: ModelConfig) -> dict[str, ParamSlice]:
        """Name in a checkpoint -> slice of the parameter. name: of the layer in both."""
        return self.attn_conv.names(f"{name}.attention_conv", f"{name}.attn_conv", config) | self.mlp_conv.names(
            f"{name}.mlp_conv", f"{name}.mlp_conv", config
        )


class CandidateSelector(nn.Module):
    """Chooses among a row's most likely tokens: the score of c after token a is the logit of c and what a, c and the
    row's state y say together, sum over r of before[a] * (P y) * after[c]. (`ops.pair_continuations`.)"""

    def __init__(self, config: ModelConfig, block: BlockConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        shape = config.vocab_size, block.rank
        self.before, self.after = (nn.Parameter(torch.empty(shape, dtype=dtype, device=device)) for _ in range(2))
        self.project = Linear(
            config.hidden_size, block.rank, False, dtype, device, blocks_or_dense(config.weight_format)
        )
        self.count = block.candidates

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [M, H] of rows -> P y of each, [M, rank]"""
        return self.project(hidden)

    __call__ = forward  # as above

    def names(self, config: ModelConfig) -> dict[str, ParamSlice]:
        """Name in a checkpoint -> slice of the head's parameter."""
        stored, vocab = "candidate_selector", config.vocab_size
        form = blocks_or_dense(config.weight_format)
        return named(form, f"{stored}.hidden_projection", "selector.project", 0, self.project.out_features) | {
            f"{stored}.predecessor_codebook": ParamSlice("selector.before", 0, vocab),
            f"{stored}.successor_codebook": ParamSlice("selector.after", 0, vocab),
        }
