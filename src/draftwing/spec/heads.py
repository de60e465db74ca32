"""The smallest `DraftHead`: a causal language model of its own."""

from __future__ import annotations

from torch import Tensor

from draftwing.models.decoder import DecoderModel
from draftwing.models.heads.base import DraftHead
from draftwing.ops.attention import Attend


class DraftLM(DraftHead):
    """Any `DecoderModel` with the target's token ids."""

    def __init__(self, model: DecoderModel, vocab: int) -> None:
        """vocab: token ids that both models have; families pad their vocabularies to different sizes."""
        self.model, self.vocab, self.kv_layers = model, vocab, model.kv_layers

    def set_max_positions(self, positions: int) -> None:
        self.model.set_max_positions(positions)

    def run(self, ids: Tensor, positions: Tensor, features: Tensor | None, level: int, attend: Attend) -> Tensor:
        # The target may pad its vocabulary further than this model; what stands for such an id does not matter much.
        return self.model(ids.clamp(max=self.model.config.vocab_size - 1), positions, attend)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)[:, : self.vocab]
