"""What drafters with a head have in common: another head may take its place."""

from __future__ import annotations

from pathlib import Path

from draftwing.models.heads.base import DraftHead, FeatureHead
from draftwing.models.heads.swap import HeadSwap
from draftwing.spec.drafter import Drafter


class HeadDrafter(Drafter):
    """A `Drafter` around a `DraftHead`."""

    swap: HeadSwap | None = None  # of heads that are read from a folder

    def __init__(self, head: DraftHead) -> None:
        self.head = head
        self._draft_ids = head.draft_ids()

    def read_head(self, folder: Path | None) -> FeatureHead:
        return super().read_head(folder) if self.swap is None else self.swap.read(folder)

    def take_head(self, head: FeatureHead) -> None:
        assert self.swap is not None
        self.swap.take(head)
        draft_ids = self.head.draft_ids()
        if self._draft_ids is not None and draft_ids is not None:
            self._draft_ids.copy_(draft_ids)  # recorded calls know where it is
