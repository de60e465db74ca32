"""A drafter with a model, or two heads, and a lookup, which draft one tree together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from draftwing.config.trees import LOOKUP_ALONE, MODEL_ALONE, PLAIN, TreeShape, max_nodes
from draftwing.core import MAX_BACKLOG
from draftwing.models.heads.base import DraftHead, FeatureHead
from draftwing.ops.assign.spec import new_calibration
from draftwing.ops.attention.attend import AttnBackend
from draftwing.ops.types import Draft, RowTensors
from draftwing.spec.drafter import Drafter, DraftStep, PastText, SeenTokens
from draftwing.spec.heads_drafter import HeadsDrafter
from draftwing.spec.model_drafter import HeadDrafter


class PairDrafter(Drafter):
    """Both see the text. `TreeShape.proposer` says who proposes; of two trees the nodes that are expected to be
    accepted most often are taken, by the calibration that the executor keeps."""

    fixed_confidence = False
    initial_confidence = 1

    def __init__(self, model: HeadDrafter | HeadsDrafter, lookup: Drafter, grown: TreeShape, copied: TreeShape) -> None:
        """lookup: a drafter without KV layers, with a confidence of its own; grown, copied: the largest tree of the
        model and of the lookup."""
        assert not lookup.kv_layers and not lookup.aux_layers and not lookup.fixed_confidence
        self.model, self.lookup, self.grown, self.copied = model, lookup, grown, copied
        self.aux_layers, self.lookahead = model.aux_layers, model.lookahead
        self.kv_layers, self.tail, self.reads_images = model.kv_layers, model.tail, model.reads_images
        self.calibration = new_calibration(model.ops.device)

    @property
    def head(self) -> DraftHead:
        """Returns the model's."""
        return self.model.head

    def menu(self, shape: TreeShape) -> tuple[TreeShape, ...]:
        """Returns trees of both, which may be as deep as the lookup's, and trees of the lookup alone."""
        grown, copied = self.model.menu(shape), self.lookup.menu(self.copied)
        deep = TreeShape(max(shape.depth, self.copied.depth), shape.topk, max(shape.nodes, self.copied.nodes))
        alone = (one._replace(proposer=LOOKUP_ALONE) for one in copied[:-1])
        return (*dict.fromkeys((deep, *grown[:-1], *alone)), PLAIN)

    def attach(self, attn: AttnBackend, first_layer: int, positions: int) -> None:
        self.model.attach(attn, first_layer, positions)

    def span(self, shape: TreeShape) -> int:
        """Returns the most that either writes, or that the model writes after the step."""
        grown = 0 if shape.proposer == LOOKUP_ALONE else self.model.span(self._grown(shape))
        return max(grown, self.lookup.span(shape), shape.max_commit + self.tail)

    def skips_extend(self, shape: TreeShape) -> bool:
        # A pass over a row sees a position that the host knows, besides what a step in flight commits.
        alone = shape.proposer == LOOKUP_ALONE and shape.max_commit < MAX_BACKLOG
        return bool(self.kv_layers) and (shape == PLAIN or alone)

    def propose(self, step: DraftStep) -> Draft:
        """Returns a draft of both, where the lookup may propose deeper trees than the model grows."""
        shape, self.model.calibration = step.shape, self.calibration
        if shape.proposer == MODEL_ALONE:
            return self.model.propose(step)
        if shape.proposer == LOOKUP_ALONE:
            self.model.unconstrain()
            return self.lookup.propose(step)
        found = self.lookup.propose(step._replace(shape=self._copied(shape)))
        grown = self.model.propose(step._replace(shape=self._grown(shape)))
        return self.model.ops.merge(grown, found, shape, self.calibration)

    def begin(self, step: DraftStep) -> bool:
        if step.shape.proposer == LOOKUP_ALONE:
            self.model.unconstrain()
            return True
        return self.model.begin(step._replace(shape=self._grown(step.shape)))

    def _grown(self, shape: TreeShape) -> TreeShape:
        """Returns the model's part in a tree."""
        depth, topk = min(shape.depth, self.grown.depth), min(shape.topk, self.grown.topk)
        return TreeShape(depth, topk, min(shape.nodes, max_nodes(depth, topk)))

    def _copied(self, shape: TreeShape) -> TreeShape:
        """Returns the lookup's."""
        return TreeShape(*(min(one, largest) for one, largest in zip(shape.tree, self.copied.tree, strict=True)))

    def constrain(self, table: RowTensors, rows: Tensor, banned: Tensor, noisy: Tensor) -> None:
        self.model.constrain(table, rows, banned, noisy)

    def extend(self, seen: SeenTokens) -> None:
        self.watch(seen)
        self.model.extend(seen)

    def watch(self, seen: SeenTokens) -> None:
        """Shows the lookup every step and every prompt."""
        self.lookup.extend(seen._replace(aux_hidden=None))

    def catch_up(self, seen: SeenTokens, drafts: bool) -> None:
        """Lets the model catch up, for only it ever has a backlog."""
        self.model.catch_up(seen, drafts)

    def confidence(self, table: RowTensors, rows: Tensor, max_kv_len: int, out: Tensor | None = None) -> Tensor:
        """Returns one more than the lookup's, for the model can always propose."""
        return self.model.ops.raise_confidence(self.lookup.confidence(table, rows, max_kv_len, out))

    def read_head(self, folder: Path | None) -> FeatureHead:
        return self.model.read_head(folder)

    def take_head(self, head: FeatureHead) -> None:
        self.model.take_head(head)

    def beside_adapters(self, on: bool) -> None:
        self.model.beside_adapters(on)

    @property
    def adaptable(self) -> FeatureHead | None:
        return self.model.adaptable

    def remember(self, table: RowTensors, texts: Sequence[PastText]) -> None:
        self.lookup.remember(table, texts)

    def flush(self) -> None:
        self.model.flush()
        self.lookup.flush()
