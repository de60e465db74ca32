"""What a model must offer to draft (`DraftHead`), and the smallest of them: a causal language model of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from draftwing.kv.pool import SlotSpec
from draftwing.models.decoder import DecoderModel
from draftwing.ops.attention import Attend
from draftwing.ops.contracts import HeadTopK


class DraftHead(Protocol):
    """lookahead: 0 where the row at position t is made of token t; 1 where it is made of token t + 1 and of the
    target's feature at t; n where there are n layers, the last of which makes it of token t + n (`MTPDrafter`).
    aux_layers: target layers that the feature is made of.  width: size of a row's feature, 0 where rows have none.
    target_ids [Vd]: the target's id of each of the head's tokens, None where they are the same.
    top_k: `logits` and the best of them in one call, None where there is none.
    forward_name: the method that runs the network, which --enable-torch-compile compiles."""

    lookahead: int
    aux_layers: tuple[int, ...]
    width: int
    vocab: int
    kv_layers: Sequence[SlotSpec]
    target_ids: Tensor | None
    top_k: HeadTopK | None
    forward_name: str

    def set_max_positions(self, positions: int) -> None:
        """Makes the rotary table."""
        ...

    def features(self, aux_hidden: Tensor) -> Tensor:
        """aux_hidden [M, len(aux_layers) * hidden of the target] -> [M, width]: what rows made by the target are
        fed."""
        ...

    def run(self, ids: Tensor, positions: Tensor, features: Tensor | None, level: int, attend: Attend) -> Tensor:
        """ids, positions [M]; features [M, width] -> hidden [M, width or own size], fed back to the rows' children.
        level: 0 for committed text, 1, 2, ... in tree expansion (a head may have one layer per level)."""
        ...

    def write(self, ids: Tensor, positions: Tensor, features: Tensor | None, attend: Attend) -> None:
        """What `run` leaves in the pool of committed text, for rows whose output nobody wants."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden of `run` -> [M, vocab]"""
        ...


class DraftLM:
    """Any `DecoderModel` with the target's token ids."""

    lookahead = 0
    aux_layers: tuple[int, ...] = ()
    width = 0
    target_ids: Tensor | None = None
    top_k: HeadTopK | None = None
    forward_name = "run"

    def __init__(self, model: DecoderModel, vocab: int) -> None:
        """vocab: token ids that both models have; families pad their vocabularies to different sizes."""
        self.model, self.vocab = model, vocab
        self.kv_layers: Sequence[SlotSpec] = model.kv_layers

    def set_max_positions(self, positions: int) -> None:
        self.model.set_max_positions(positions)

    def features(self, aux_hidden: Tensor) -> Tensor:
        raise AssertionError("a language model drafts from tokens alone")

    def run(self, ids: Tensor, positions: Tensor, features: Tensor | None, level: int, attend: Attend) -> Tensor:
        # The target may pad its vocabulary further than this model; what stands for such an id does not matter much.
        return self.model(ids.clamp(max=self.model.config.vocab_size - 1), positions, attend)[0]

    def write(self, ids: Tensor, positions: Tensor, features: Tensor | None, attend: Attend) -> None:
        self.run(ids, positions, features, 0, attend)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)[:, : self.vocab]
