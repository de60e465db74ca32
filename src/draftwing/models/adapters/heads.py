"""A draft head of an adapter's own: factors of low rank beside the matrices of the head that drafts for the model.

They lie in a folder `draft_head` of the adapter's, or beside a GGUF file in one of its name, in PEFT's format; their
matrices have the names that a published head has them by. Norms, embedding and lm_head are those of the model's head.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Final

from draftwing.errors import CheckpointError
from draftwing.layers.attention import AttentionConfig
from draftwing.layers.linear import Linear
from draftwing.layers.linear_ops.dense import DENSE
from draftwing.models.adapters.adapter import Adapter, Slots, Targets
from draftwing.models.adapters.peft import read_folder
from draftwing.models.heads.base import FeatureHead
from draftwing.models.heads.eagle import Eagle3Head, EagleHead
from draftwing.models.heads.mtp import MTPHead
from draftwing.models.weight_map import canonical

_SHARED: Final = ("lm_head", "embed.table")  # their own rows are those of the model's head


def takes_factors(head: object) -> bool:
    """Returns whether a head may have factors beside it: one that drafts token by token, of plain layers."""
    if not isinstance(head, EagleHead | Eagle3Head | MTPHead) or head.lookahead != 1 or head.config.streams is not None:
        return False
    masks = isinstance(head, Eagle3Head) and head.eagle.mask is not None
    plain = all(isinstance(one.mixer, AttentionConfig) and one.experts is None for one in head.config.layers)
    return plain and not masks


class HeadTargets(Targets):
    """The matrices of a draft head that factors may be added to."""

    what = "draft head"

    def __init__(self, head: FeatureHead) -> None:
        """head: that `takes_factors`."""
        super().__init__()
        dense = copy(head)  # by the names that it has before it is quantised
        dense.config = replace(head.config, weight_format=DENSE, vocab_format=DENSE, quantization=None)
        self.linears = {name: one for name, one in head.named_modules() if isinstance(one, Linear)}
        for name, part in sorted(dense.names().items(), key=lambda one: one[1].start):
            own = part.param.removesuffix(".weight")
            if name.endswith(".weight") and own in self.linears and own not in _SHARED:
                matrix = canonical(name.removesuffix(".weight"))
                self._add(matrix, part._replace(param=own), self.linears[own].in_features)


class HeadSlots(Slots):
    """Adapters' own heads by slot, each in the slot that its adapter has."""

    targets: HeadTargets

    def __init__(self, head: FeatureHead, count: int, rank: int) -> None:
        """head: packed; from now on its products are with factors.  rank: the most of any."""
        targets = HeadTargets(head)
        super().__init__(targets, targets.linears, count, rank, head.target, head.ops)
        self.rank = rank
        head.take_adapters(self.weights)

    def read(self, folder: Path) -> Adapter:
        """Returns what a folder holds. Raises CheckpointError for factors of another head, or of a higher rank."""
        found = read_folder(folder, self.targets.most_bytes(self.rank))
        if found.rank > self.rank:
            raise CheckpointError(
                f"{folder}: the rank is {found.rank}; slots have room for {self.rank}: start with "
                f"--max-lora-head-rank {found.rank}"
            )
        try:
            self.targets.check(found)
        except CheckpointError as error:
            raise CheckpointError(f"{folder}: {error}") from None
        own = {name: one._replace(down=one.down.clone(), up=one.up.clone()) for name, one in found.factors.items()}
        return replace(found, factors=own)  # each in memory of its own, which other ranks are sent
