"""The target's forward of a step: over trees, over prompts, or over both at once, from graphs where there are any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from draftwing.core import Chunk, TreeShape
from draftwing.engine.devices.base import Device
from draftwing.engine.graphs.cuda import GraphCache, Key
from draftwing.engine.graphs.prefill import PrefillGraphs, States, cut
from draftwing.engine.row_table import RowTable
from draftwing.engine.step_state import Pending, Verified
from draftwing.models.decoder import DecoderModel, Narrowed
from draftwing.ops.attention import Attend, AttnBackend, Batch, MixedAttend, TiledAttention


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
            (chunk or table.length) if has_graphs else 0, self.run, graph_size if mixed else 0,
        )  # fmt: skip

    def mixes(self, shape: TreeShape, rows: int) -> int:
        """Returns the queries of so many such trees in one forward with parts of prompts; 0 where they do not run in
        one."""
        if not self.prefills.sizes:
            return 0 if self._model.needs_chunks else rows * shape.queries
        key = self.prefills.mixed_key(shape, rows)
        return 0 if key is None else key.size * shape.queries

    def run(self, batch: Batch, trees: Batch | None = None, narrowed: Narrowed | None = None) -> States:
        """Runs the target over a batch, without graphs. trees: what runs in the same forward, in front of the batch,
        which is of prompts then.  narrowed: as of `DecoderModel.forward`."""
        attend = self._attn.bind(batch, 0, inputs_ready=True)  # stages before this one made the batch
        ids, positions = batch.ids, batch.positions
        if trees is not None:
            first = self._attn.bind(trees, 0, inputs_ready=True)
            attend = MixedAttend(first, attend, trees.ids.shape[0], self._beside)
            ids, positions = torch.cat((trees.ids, ids)), torch.cat((trees.positions, positions))
        return self._model(ids, positions, attend, self._aux_layers, narrowed)

    def prefill(self, pending: Pending) -> Verified:
        """Runs the target over a prefill."""
        return Verified(*self.prefills.run(pending.plan.chunks) or self._prompts(pending))

    def _prompts(self, pending: Pending) -> States:
        """Runs the target over a prefill. Where its last layers keep nothing they get the queries alone whose results
        somebody wants: the last of each prompt."""
        upload, batch = pending.upload, pending.batch
        assert upload is not None and batch is not None
        if not self.narrows or pending.plan.prompt_parts:
            return self.run(batch)
        ends = batch.ends(upload.last)
        return self.run(batch, narrowed=Narrowed(upload.last, self._attn.bind(ends, 0) if ends.chunks else Attend()))

    def is_left(self, key: Key, chunks: Sequence[Chunk]) -> bool:
        """Returns whether a graph of such prompts beside a step of this key is still to be captured."""
        return (self.prefills.size(chunks, key), key) in self.prefills.later

    def mixed(self, key: Key | None, trees: Batch, prompts: Pending) -> tuple[Verified, Verified]:
        """Runs the target over trees and a prefill. key: of the graphs that have drafted `trees`, and will commit:
        these get what they read where they left it."""
        assert prompts.batch is not None
        batch, chunks = prompts.batch, prompts.plan.chunks
        if key is None:
            queries = trees.ids.shape[0]
            end = queries + batch.ids.shape[0]
            if (total := self._ops.round_up_rows(end)) > end:
                batch = batch.padded(total - queries, self._table.rows)
            first, other = cut(self.run(batch, trees), queries, end)
            return Verified(*first), Verified(*other)
        found = self.prefills.run_mixed(chunks, key)
        if found is not None:
            return self._graphs.left("verify", key), Verified(*found)
        # Two forwards from graphs take less time than the launches of one over both.
        self.prefills.took_turns(chunks, key)
        self._graphs.run("verify", key, self.run)
        return self._graphs.left("verify", key), Verified(*(self.prefills.run(chunks) or self.run(batch)))
