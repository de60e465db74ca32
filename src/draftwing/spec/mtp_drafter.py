"""The drafter for several MTP layers, each of which predicts one token further than the one before.

The text is x_0 .. x_T, the target's features f_0 .. f_{T-1} are known (kv_len = T), n layers j = 0 .. n - 1.

- Row i of layer j is (f_i, x_{i+1+j}), stands at position i, lies in the slot of position i, and predicts x_{i+2+j}.
  The text has tokens for the rows [0, T - j) of layer j; that is why lookahead is n.
- A step that takes the text from T to T + count has the tokens x_{T+1} .. x_{T+count} for the rows T - j .. of layer
  j: the same tokens for every layer, j rows further back, with features of which the first j come from steps before.
  The last n - 1 features are therefore kept with the row table's row.
- A prompt's chunk gives every layer the chunk's own rows, for the tokens to come are mostly known; the last chunk goes
  back to row T - 1 - j, whose token was sampled only now. Matches leave n tokens to compute, so that row belongs to
  this request and its feature was kept. (Going back at every chunk would need features before the match.)
- The token after a path of s < n tokens is predicted by layer s at row T - 1. Its rows T - s .. T - 1 are made of
  the path's tokens and of kept features: s rows for each node, in scratch entries [k s, (k + 1) s) past kv_len for
  node k. Levels do not collide, for each writes its own layer.
- Past that the last layer goes on by itself: the row of level s >= n is (the parent's output, the node's token) at
  position T + s - n, in entry (s - 1) K + k, after all rows of its path in that layer.
- In a text of fewer than n tokens some of these rows would stand before the first position. They are run all the
  same, for shapes must not depend on lengths; nobody reads them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftwing.models.heads.mtp import MTPHead
from draftwing.ops.attention.batch import Batch, ChunkSpan
from draftwing.ops.expansion.spec import of_parent
from draftwing.ops.table import TorchOps
from draftwing.ops.types import Draft, RowTensors
from draftwing.spec.drafter import DraftStep, SeenTokens
from draftwing.spec.model_drafter import ModelDrafter


class MTPDrafter(ModelDrafter):
    """A `Drafter` around an `MTPHead` of two layers or more."""

    max_lookahead = 1 << 10
    head: MTPHead

    def __init__(self, head: MTPHead, rows: int, topk: int, dtype: torch.dtype, ops: TorchOps) -> None:
        super().__init__(head, rows, topk, dtype, ops)
        self.layers, self.reads_images = head.lookahead, False
        assert self.layers >= 2
        # Features of the positions kv_len - (n - 1) .. kv_len - 1: written by `extend`, read by both.
        self._kept = torch.zeros(rows, self.layers - 1, head.width, dtype=dtype, device=ops.device)

    # -- tree expansion ---------------------------------------------------------------------------------------------

    def propose(self, step: DraftStep) -> Draft:
        table, rows, shape, max_kv_len, noisy, _ = step
        size, topk, turns = rows.shape[0], shape.topk, self.layers - 1
        editor = self._editor(step)
        self._read_first(table, rows, noisy, editor)
        expansion = self._expand(table, rows, shape)
        root_at = expansion.root_at  # [B]
        scratch = topk * max(shape.depth - 1, 0)
        column = rows.unsqueeze(1)
        lane = torch.arange(topk, device=rows.device)
        kept = self._kept[rows]  # [B, n - 1, H]
        spoken = torch.zeros(size, topk, 0, dtype=torch.int64, device=rows.device)  # tokens of each node's path
        path = spoken  # of the last layer: scratch entries of each node's rows
        for level in range(1, shape.depth):
            ids, parent = self._next_level(expansion, editor)
            if level <= turns:
                spoken = torch.cat((of_parent(spoken, parent), ids.unsqueeze(2)), 2)  # [B, K, s]
                own = lane.unsqueeze(1) * level + torch.arange(level, device=rows.device)  # [K, s]
                path = own.expand(size, -1, -1)
                back, position, feature = level, root_at - level, _repeat(kept[:, turns - level :], topk).flatten(0, 2)
                batch_ids = spoken
            else:
                own = ((level - 1) * topk + lane).unsqueeze(1)  # [K, 1]
                path = torch.cat((of_parent(path, parent), own.expand(size, -1, -1)), 2)  # [B, K, s]
                back, position, feature = turns, root_at + (level - self.layers), expansion.level_feature()
                batch_ids = ids
            width = own.shape[1]  # rows of each node
            ahead = torch.arange(width, device=rows.device)
            first = path.shape[2] - width  # rows of the path before the node's own
            batch = Batch(
                rows=rows,
                ids=batch_ids.flatten(),
                positions=_repeat((position.unsqueeze(1) + ahead).clamp(min=0), topk).flatten(),
                write_slots=table.slots_at(column, root_at.unsqueeze(1) + own.flatten()).flatten(),
                table=table.page_table,
                prefix_len=root_at,
                path=path.repeat_interleave(width, 1),  # [B, K * width, s]
                path_len=(first + 1 + ahead).repeat(topk).expand(size, -1),
                window=scratch,
                bound=max_kv_len + scratch,
            )
            out = self._run(_reaching_back(batch, back), feature, back)
            hidden = out.view(size, topk, width, -1)[:, :, -1]
            expansion.add(self._continuations(table, rows, hidden, level + 1, topk, noisy, editor), hidden)
        return expansion.draft()

    # -- committed text ---------------------------------------------------------------------------------------------

    def extend(self, seen: SeenTokens) -> None:
        table, batch, aux_hidden, next_ids, count, noisy = seen
        assert aux_hidden is not None
        feature = self.head.features(aux_hidden)
        if count is None:
            self._extend_prompts(table, batch, feature, noisy)
            return
        rows, start, turns = batch.rows, batch.prefix_len, self.layers - 1
        size, width = rows.shape[0], seen.width
        step = torch.arange(width, device=rows.device)
        features = torch.cat((self._kept[rows], feature.view(size, width, -1)), 1)  # [B, n - 1 + Q, H]
        for layer in range(self.layers):
            at = (start - layer).unsqueeze(1) + step  # [B, Q]
            # Rows before the first position go to entries past the layer's last row, where nothing is known yet.
            entries = at if layer < 2 else torch.where(at < 0, at + width, at).clamp(min=0)
            shifted = batch._replace(
                ids=next_ids,
                positions=at.clamp(min=0).flatten(),
                write_slots=table.slots_at(rows.unsqueeze(1), entries).flatten(),
                path=(step - layer).expand(size, width, width),
            )
            fed = features[:, turns - layer : turns - layer + width].flatten(0, 1)
            hidden = self._run(_reaching_back(shifted, layer), fed, layer)
            if layer == 0:
                self._keep_first(table, rows, self._newest(hidden, rows, count, 1), noisy)
        last = count.unsqueeze(1) + torch.arange(turns, device=rows.device)  # [B, n - 1]
        self._kept.index_copy_(0, rows, features.gather(1, _at(last, features.shape[2])))

    def _extend_prompts(self, table: RowTensors, batch: Batch, feature: Tensor, noisy: Tensor) -> None:
        turns, kept = self.layers - 1, self._kept[batch.rows]
        known = [  # of each chunk: features of the positions start - (n - 1) .. start + length - 1
            torch.cat((kept[span.row], feature[span.offset : span.offset + span.length])) for span in batch.chunks
        ]
        for layer in range(self.layers):
            parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []  # ids, positions, write slots, features
            spans: list[ChunkSpan] = []
            offset = 0
            for span, features in zip(batch.chunks, known, strict=True):
                start, end = _rows_of_layer(span, layer, table.length)
                if start >= end:
                    continue
                row = batch.rows[span.row : span.row + 1]
                ids = table.tokens[row, start + 1 + layer : end + 1 + layer].squeeze(0).long()
                positions = torch.arange(start, end, device=ids.device)
                fed = features.narrow(0, start - (span.start - turns), end - start)
                parts.append((ids, positions, batch.table[row, start:end].squeeze(0).long(), fed))
                spans.append(span._replace(offset=offset, start=start, length=end - start))
                offset += end - start
            if not parts:
                continue
            ids, positions, write_slots, fed = (torch.cat(column) for column in zip(*parts, strict=True))
            own = batch._replace(ids=ids, positions=positions, write_slots=write_slots, chunks=tuple(spans))
            chunks = self.evened(self.ops, SeenTokens(table, own, fed, ids, None, noisy))
            hidden = self._run(chunks.batch, chunks.aux_hidden, layer)
            if layer == 0:
                self._keep_first_of_prompts(table, chunks.batch, hidden, noisy)
        self._kept.index_copy_(0, batch.rows, torch.stack([features[-turns:] for features in known]))

    def _run(self, batch: Batch, feature: Tensor | None, layer: int) -> Tensor:
        assert feature is not None
        return self.head.run_layer(batch.ids, batch.positions, feature, layer, self._bind(batch))


def _rows_of_layer(span: ChunkSpan, layer: int, length: int) -> tuple[int, int]:
    """First row of the layer that a chunk gives, and the first that it does not; length: of the token history."""
    end = span.start + span.length
    if not span.final:
        return span.start, min(end, length - 1 - layer)  # past the history there is nothing to be made of
    end -= layer
    return max(min(span.start, end - 1), 0), end


def _reaching_back(batch: Batch, back: int) -> Batch:
    """Returns the batch with `back` positions fewer in its prefix, which its paths start with in their own entries.

    Where the prefix is shorter than that, the paths' first entries stand before the text and are dropped; a path that
    has no others is that of a row which nobody reads.
    """
    assert batch.path is not None and batch.path_len is not None
    prefix, path, path_len = batch.prefix_len - back, batch.path, batch.path_len
    if back:  # a dummy row has no prefix at all
        missing = (-prefix).clamp(min=0).view(-1, 1)  # [B, 1]
        step = (torch.arange(path.shape[2], device=path.device) + missing).clamp(max=path.shape[2] - 1)
        path = path.gather(2, step.unsqueeze(1).expand_as(path))
        path_len = (path_len - missing).clamp(min=1)
        prefix = prefix.clamp(min=0)
    path = (path + (batch.prefix_len - prefix).view(-1, 1, 1)).clamp(min=0)
    return batch._replace(prefix_len=prefix, path=path, path_len=path_len, window=batch.window + back)


def _repeat(x: Tensor, topk: int) -> Tensor:
    """x [B, s, ...] -> [B, K, s, ...]"""
    return x.unsqueeze(1).expand(-1, topk, *x.shape[1:])


def _at(rows: Tensor, width: int) -> Tensor:
    """Index for gather: rows [B] or [B, R] -> [B, R, width]"""
    return rows.view(rows.shape[0], -1, 1).expand(-1, -1, width)
