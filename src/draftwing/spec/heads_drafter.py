"""A drafter with two heads, which draft one tree together. With a lookup they are the model of a `PairDrafter`, and the
tree has three sources."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from draftwing.config.trees import MODEL, SECOND_MODEL, TreeShape, max_nodes
from draftwing.models.heads.base import FeatureHead
from draftwing.ops.assign.spec import GRADES, LEVELS, new_calibration
from draftwing.ops.attention.attend import AttnBackend
from draftwing.ops.types import Draft, RowTensors
from draftwing.spec.drafter import Drafter, DraftStep, SeenTokens
from draftwing.spec.model_drafter import HeadDrafter


class HeadsDrafter(Drafter):
    """Of the trees of both the nodes that are expected to be accepted most often are taken, by the calibration that the
    executor keeps: of each head apart, and of what both propose. Each head has its own layers in the pool, and its own
    columns of the auxiliary hidden states."""

    def __init__(self, first: HeadDrafter, first_shape: TreeShape, other: HeadDrafter, other_shape: TreeShape) -> None:
        """first_shape, other_shape: the largest tree of each."""
        assert not first.from_tokens and not other.from_tokens and max(first.lookahead, other.lookahead) <= 1
        self.first, self.other, self.ops, self.head = first, other, first.ops, first.head
        self._shapes = first_shape, other_shape
        self.aux_layers = (*first.aux_layers, *other.aux_layers)
        self.kv_layers = (*first.kv_layers, *other.kv_layers)
        self.lookahead, self.tail = max(first.lookahead, other.lookahead), max(first.tail, other.tail)
        self.reads_images = first.reads_images or other.reads_images
        self.calibration = new_calibration(self.ops.device)
        grades = torch.arange(GRADES, device=self.ops.device)
        second = grades + (SECOND_MODEL - MODEL) * LEVELS
        self._of_second = torch.where(grades // LEVELS == MODEL, second, grades)  # what its grades become

    def menu(self, shape: TreeShape) -> tuple[TreeShape, ...]:
        return self.first.menu(shape)

    def attach(self, attn: AttnBackend, first_layer: int, positions: int) -> None:
        self.first.attach(attn, first_layer, positions)
        self.other.attach(attn, first_layer + len(self.first.kv_layers), positions)

    def span(self, shape: TreeShape) -> int:
        """Returns the most that either writes, or that both write after the step."""
        own = (part.span(own) for part, own in self._parts(shape))
        return max(shape.nodes, shape.max_commit + self.tail, *own)

    def _parts(self, shape: TreeShape) -> Iterator[tuple[HeadDrafter, TreeShape]]:
        """Yields both, with what each grows in a tree."""
        for part, largest in zip((self.first, self.other), self._shapes, strict=True):
            depth, topk = min(shape.depth, largest.depth), min(shape.topk, largest.topk)
            yield part, TreeShape(depth, topk, min(shape.nodes, largest.nodes, max_nodes(depth, topk)))

    def propose(self, step: DraftStep) -> Draft:
        first, other = (part.propose(step._replace(shape=own)) for part, own in self._parts(step.shape))
        assert other.grade is not None
        grade = self.ops.take_rows(self._of_second, other.grade.flatten()).view_as(other.grade)
        return self.ops.merge(first, other._replace(grade=grade), step.shape, self.calibration)

    def constrain(self, table: RowTensors, rows: Tensor, banned: Tensor, noisy: Tensor) -> None:
        self.first.constrain(table, rows, banned, noisy)
        self.other.constrain(table, rows, banned, noisy)

    def unconstrain(self) -> None:
        """Undoes `constrain`, which no `propose` follows."""
        self.first.unconstrain()
        self.other.unconstrain()

    def extend(self, seen: SeenTokens) -> None:
        for part, own in self._seen(seen):
            part.extend(own)

    def catch_up(self, seen: SeenTokens, drafts: bool) -> None:
        for part, own in self._seen(seen):
            part.catch_up(own, drafts)

    def _seen(self, seen: SeenTokens) -> Iterator[tuple[HeadDrafter, SeenTokens]]:
        assert seen.aux_hidden is not None
        cut = seen.aux_hidden.shape[1] // len(self.aux_layers) * len(self.first.aux_layers)
        for part, columns in ((self.first, seen.aux_hidden[:, :cut]), (self.other, seen.aux_hidden[:, cut:])):
            yield part, seen._replace(aux_hidden=self.ops.concat_columns(columns))

    def read_head(self, folder: Path | None) -> FeatureHead:
        """Loads what may take the place of the first head."""
        return self.first.read_head(folder)

    def take_head(self, head: FeatureHead) -> None:
        self.first.take_head(head)

    def flush(self) -> None:
        self.first.flush()
        self.other.flush()
