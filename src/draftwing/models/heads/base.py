"""What the heads that read a target's features have in common: its embedding, its head, and a rotary table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from draftwing.errors import ConfigError
from draftwing.kv.pool import SlotSpec
from draftwing.layers.linear import Linear
from draftwing.layers.linear_ops.base import PackMode, ParamSlice
from draftwing.layers.norm import RMSNorm
from draftwing.layers.rope import Rope
from draftwing.models.config import ModelConfig
from draftwing.models.decoder import DecoderModel, pack_layers
from draftwing.models.weight_map import stored_tensors
from draftwing.ops.attention import Attend
from draftwing.ops.contracts import HeadTopK
from draftwing.ops.torch.layer_ops import PLAIN, LayerOps
from draftwing.parallel.ranks import ALONE, Ranks

SPREAD = 256 << 20  # bytes of a head's layers; to read fewer takes a rank less time than two sums a layer


def ranks_for(config: ModelConfig, target: DecoderModel, dtype: torch.dtype) -> Ranks:
    """Over which a head's layers are spread: the target's, where they are large and can be."""
    if target.ranks.size == 1 or config.layer_weights * dtype.itemsize < SPREAD:
        return ALONE
    try:
        config.spread(target.ranks)
    except ConfigError:
        return ALONE
    return target.ranks


class FeatureHead(nn.Module):
    """A `DraftHead` whose row at position t is made of the target's feature at t and of token t + 1.

    Trainable as long as it is not packed. What it shares with the target is not among its parameters.
    """

    lookahead = 1
    forward_name = "run"  # see `DraftHead`

    def __init__(
        self, config: ModelConfig, target: DecoderModel, aux_layers: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        """config: of the draft layers; its vocabulary is the target's. Of a target on several ranks large layers are
        spread, too."""
        super().__init__()
        self.config, self.aux_layers = config, aux_layers
        self.ranks = ranks_for(config, target, dtype)
        self.layer_configs = config.spread(self.ranks)
        self.width = config.hidden_size
        self.vocab = target.config.vocab_size
        kept = [layer.mixer.keeps() for layer in self.layer_configs]
        self.kv_layers: Sequence[SlotSpec] = [spec for spec in kept if spec is not None]
        (rotates,) = {layer.mixer.rotates for layer in self.layer_configs}
        assert rotates is not None and len(self.kv_layers) == len(kept), "layers of heads are alike, and keep something"
        self.rope = Rope(config.ropes[rotates[0]], rotates[1], dtype)
        self.target_ids: Tensor | None = None  # [vocab] int64
        self._target = (target,)  # in a tuple, where nn.Module does not look for parameters
        self._head_rows: Linear | None = None
        self.top_k: HeadTopK | None = None  # once packed
        self.ops = PLAIN

    def run(self, ids: Tensor, positions: Tensor, features: Tensor | None, level: int, attend: Attend) -> Tensor:
        """As in `DraftHead`."""
        raise NotImplementedError

    def write(self, ids: Tensor, positions: Tensor, features: Tensor | None, attend: Attend) -> None:
        """As in `DraftHead`; heads of one layer need not run it."""
        self.run(ids, positions, features, 0, attend)

    @property
    def target(self) -> DecoderModel:
        return self._target[0]

    def set_max_positions(self, positions: int) -> None:
        """Makes the rotary table; every position of a later `run` must be below `positions`."""
        weight = next(part.weight for part in self.modules() if isinstance(part, RMSNorm))  # packing leaves norms
        self.rope.make(positions, self.rope.table.dtype, weight.device)  # norms may be in float32

    def restrict(self, ids: Tensor) -> None:
        """Drafts only the tokens `ids` [n] int64 from now on (FR-Spec, Zhao et al. 2025, arXiv 2502.14856).

        Gathers their rows of the target's head once, so the head's share of a draft step falls with n.
        """
        ids = ids.to(self.target.norm.weight.device)
        rows = self.target.lm_head.rows(ids).detach()  # [n, hidden]
        head = Linear(rows.shape[1], rows.shape[0], False, rows.dtype, rows.device, self.config.vocab_format)
        if not head.op.keep(ParamSlice("weight", 0, rows.shape[0]), rows):
            head.weight.data.copy_(rows)
        self._head_rows, self.target_ids, self.vocab = head, ids, ids.shape[0]

    @property
    def head_rows(self) -> Linear | None:
        """The rows of the target's head that `restrict` took, a copy."""
        return self._head_rows

    def output_layer(self) -> tuple[RMSNorm | None, Linear]:
        """What `logits` is made of: perhaps a norm, and the target's head or the rows that were chosen of it."""
        return None, self.target.lm_head if self._head_rows is None else self._head_rows

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [M, hidden] of `run` -> [M, vocab]"""
        norm, lm_head = self.output_layer()
        return lm_head(hidden if norm is None else norm(hidden))

    def shared_readout(self) -> Tensor:
        """[vocab, hidden]: the weight of the GEMM that is shared with the target; of a packed target a copy."""
        return (self.target.lm_head if self._head_rows is None else self._head_rows).dense_weight()

    def readout(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [M, hidden] of `run` -> (state [M, hidden], weight [vocab, hidden]), whose product is `logits`. For
        training, which need not keep the logits."""
        return hidden, self.shared_readout()

    def names(self) -> dict[str, ParamSlice]:
        """Name in a published checkpoint -> slice, complete for this head."""
        raise NotImplementedError

    def stored_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) as a published checkpoint stores them; parameters come as views."""
        yield from stored_tensors(self, self.names())

    def pack(self, ops: LayerOps) -> None:
        """Lets every layer prepare for inference, weights and kernels; the head is not trainable afterwards.

        ops: of the device that the parameters are on.
        """
        self.ops = ops
        pack_layers(self, ops, PackMode(draft_8bit=True))  # the target decides, whatever is drafted
        norm, lm_head = self.output_layer()
        if lm_head.out_features == self.vocab:
            weight = None if norm is None else (norm.weight, norm.eps)
            self.top_k = ops.head_top_k(lm_head.op.few_rows, lm_head.bias, weight, self.target_ids)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [M] -> cos, sin [M, 1, head_dim]"""
        return self.rope(positions, self.ops)


def vocabulary_maps(target_ids: Tensor | None, vocab: int) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the maps between the vocabularies, as published heads store them: `d2t` the offset of each
    draft token's id, and `t2d` whether a target's token is one of them. None of a head that drafts all of them."""
    if target_ids is None:
        return
    yield "d2t", target_ids - torch.arange(target_ids.shape[0], device=target_ids.device)
    kept = torch.zeros(vocab, dtype=torch.bool, device=target_ids.device)
    yield "t2d", kept.index_fill(0, target_ids, True)
