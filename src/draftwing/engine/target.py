"""The target's forward of a step: over trees, over prompts, or over both at once, from graphs where there are any: of
tree steps (`engine.graphs`), of prompts and of both (`engine.prefill_graphs`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.config.trees import TreeShape
from draftwing.engine.devices.base import Device
from draftwing.engine.graphs import Beside, GraphCache, Key
from draftwing.engine.prefill_graphs import PrefillGraphs, States, cut
from draftwing.engine.prefill_inputs import ImageShape
from draftwing.engine.row_table import RowTable
from draftwing.engine.step_state import Pending, Verified
from draftwing.models.decoder import DecoderModel, Narrowed
from draftwing.ops.attention.attend import Attend, AttnBackend, MixedAttend, TiledAttention
from draftwing.ops.attention.batch import Batch


class TargetForward:
    def __init__(
        self, model: DecoderModel, aux_layers: Sequence[int], table: RowTable, attn: AttnBackend, device: Device,
        graphs: GraphCache, graph_size: int, chunk: int, mixed: bool,
    ) -> None:  # fmt: skip
        """aux_layers: whose hidden states a drafter wants.  graphs: of tree steps.  graph_size, chunk, mixed: as of
        `Executor`."""
        self._model, self._aux_layers, self._table, self._attn = model, aux_layers, table, attn
        self._ops, self._graphs, self._beside = device.ops, graphs, device.beside
        # Whether the last layers may see some queries of a prefill alone: see `_prompts`.
        self.narrows = model.keepers < model.config.num_layers and not aux_layers
        has_graphs = graph_size > 0 and attn.takes_tiles and not model.needs_chunks
        self.prefills = PrefillGraphs(
            device, table, cast(TiledAttention, attn), model.head_shapes(),
            (chunk or table.length) if has_graphs else 0, self._captured, graph_size if mixed else 0,
            _image_shape(model),
        )  # fmt: skip

    def mixes(self, shape: TreeShape, rows: int) -> int:
        """Returns the queries of so many such trees in one forward with parts of prompts; 0 where they do not run in
        one."""
        if not self.prefills.sizes:
            return 0 if self._model.needs_chunks else rows * shape.queries
        key = self.prefills.mixed_key(shape, rows)
        return 0 if key is None else key.size * shape.queries

    def run(
        self, batch: Batch, trees: Batch | None = None, narrowed: Narrowed | None = None, adapted: Tensor | None = None
    ) -> States:
        """Runs the target over a batch, without graphs. trees: what runs in the same forward, in front of the batch,
        which is of prompts then.  narrowed, adapted: as of `DecoderModel.forward`."""
        attend = self._attn.bind(batch, 0, inputs_ready=True)  # stages before this one made the batch
        ids, positions, images = batch.ids, _turns(batch), batch.images
        if trees is not None:
            first = self._attn.bind(trees, 0, inputs_ready=True)
            attend = MixedAttend(first, attend, trees.ids.shape[0], self._beside)
            before = _turns(trees)
            if positions.dim() > 1:
                before = before.expand(3, -1)
            ids, positions = torch.cat((trees.ids, ids)), torch.cat((before, positions), -1)
            images = None if images is None else images._replace(first=trees.ids.shape[0])
        if images is None and adapted is None:
            return self._model(ids, positions, attend, self._aux_layers, narrowed)
        return self._model(ids, positions, attend, self._aux_layers, narrowed, images, adapted)

    def _captured(self, batch: Batch, trees: Batch | None, adapted: bool) -> States:
        """Does as `run`, for graphs of prompts."""
        slots = None
        if adapted:
            assert self._table.adapters is not None and batch.query_rows is not None
            slots = self._ops.row_numbers(self._table.adapters, batch.query_rows, 1)
            slots = slots if trees is None else torch.cat((self._slots(trees), slots))
        return self.run(batch, trees, adapted=slots)

    def verify_adapted(self, batch: Batch) -> States:
        """Runs the target over trees of which some rows have adapters."""
        return self.run(batch, adapted=self._slots(batch))

    def _slots(self, trees: Batch) -> Tensor:
        """Returns the slots of the adapters of trees' queries, [M] int64."""
        assert self._table.adapters is not None
        each = len(trees.ids) // len(trees.rows)
        return self._ops.row_numbers(self._table.adapters, trees.rows, each)

    def _prompt_slots(self, pending: Pending) -> Tensor | None:
        """Returns those of the queries of a prefill; None where none has an adapter."""
        if not pending.plan.adapted:
            return None
        assert self._table.adapters is not None and pending.upload is not None
        return self._ops.row_numbers(self._table.adapters, pending.upload.token_rows, 1)

    def prefill(self, pending: Pending) -> Verified:
        """Runs the target over a prefill."""
        plan = pending.plan
        return Verified(*self.prefills.run(plan.chunks, pending.batch, plan.adapted) or self._prompts(pending))

    def _prompts(self, pending: Pending) -> States:
        """Runs the target over a prefill. Where its last layers keep nothing they get the queries alone whose results
        somebody wants: the last of each prompt."""
        upload, batch = pending.upload, pending.batch
        assert upload is not None and batch is not None
        adapted = self._prompt_slots(pending)
        if not self.narrows or pending.plan.prompt_parts:
            return self.run(batch, adapted=adapted)
        ends = batch.ends(upload.last)
        narrowed = Narrowed(upload.last, self._attn.bind(ends, 0) if ends.chunks else Attend())
        return self.run(batch, narrowed=narrowed, adapted=adapted)

    def is_left(self, key: Key, prompts: Pending, adapted: bool) -> bool:
        """Returns whether a graph of such prompts beside a step of this key is still to be captured."""
        return (self.prefills.size(prompts.plan.chunks, key, prompts.batch), key, adapted) in self.prefills.later

    def _mixed_slots(self, trees: Batch, prompts: Pending, adapted: bool) -> Tensor | None:
        """Returns the slots of adapters of trees and of a prefill behind them; None where there are none."""
        mine, theirs = self._slots(trees) if adapted else None, self._prompt_slots(prompts)
        if mine is None and theirs is None:
            return None
        assert prompts.batch is not None
        mine = trees.ids.new_zeros(len(trees.ids)) if mine is None else mine
        return torch.cat((mine, prompts.batch.ids.new_zeros(len(prompts.batch.ids)) if theirs is None else theirs))

    def mixed(
        self, key: Key | None, trees: Batch, prompts: Pending, adapted: bool = False
    ) -> tuple[Verified, Verified]:
        """Runs the target over trees and a prefill. key: of the graphs that have drafted `trees`, and will commit:
        these get what they read where they left it.  adapted: whether trees' rows have adapters."""
        assert prompts.batch is not None
        batch, chunks = prompts.batch, prompts.plan.chunks
        if key is None:
            queries = trees.ids.shape[0]
            end = queries + batch.ids.shape[0]
            slots = self._mixed_slots(trees, prompts, adapted)
            if (total := self._ops.round_up_rows(end)) > end:
                batch = batch.padded(total - queries, self._table.rows)
                slots = None if slots is None else F.pad(slots, (0, total - end))
            first, other = cut(self.run(batch, trees, adapted=slots), queries, end)
            return Verified(*first), Verified(*other)
        any_adapted = adapted or prompts.plan.adapted
        found = self.prefills.run_mixed(chunks, key, batch, any_adapted)
        if found is None:
            # Two forwards from graphs take less time than the launches of one over both.
            self.prefills.took_turns(chunks, key, batch, any_adapted)
            if adapted:
                self._graphs.run("verify", Beside(key), self.verify_adapted, trees)
            else:
                self._graphs.run("verify", key, self.run)
            found = self.prefills.run(chunks, batch, prompts.plan.adapted)
            found = found or self.run(batch, adapted=self._prompt_slots(prompts))
        return self._graphs.left("verify", key), Verified(*found)


def _image_shape(model: DecoderModel) -> ImageShape | None:
    """Returns what images have in prompts that run from graphs, None where they do not: where tokens of an image see
    each other, the host says which."""
    if model.tower is None or model.tower.config.mutual:
        return None
    config = model.tower.config
    in_axes = any(rope.sections for rope in model.config.ropes)
    return ImageShape(config.row_size, config.deep, in_axes, model.dtype)


def _turns(batch: Batch) -> Tensor:
    """Returns the positions of a batch for rotary embeddings."""
    return batch.positions if batch.turns is None else batch.turns
