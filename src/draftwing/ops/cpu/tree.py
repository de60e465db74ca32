"""The C kernels of ops/cpu/csrc/tree.c: a tree step between its products, on the CPU.

Here are the functions that take tensors: real ones (no FakeTensors) on the CPU. They give what the torch code that they
stand in for gives, integers and scores bit for bit; rows of padding aside, which stay as they are.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from draftwing.core import TreeShape
from draftwing.ops.cpu.extension import load_extension
from draftwing.ops.torch.growth import First, Level, LevelRows, capacity
from draftwing.ops.torch.tree import Tree
from draftwing.spec.drafter import Draft

if TYPE_CHECKING:
    from draftwing.engine.row_table import SlotTable

HEAD = 2  # columns of a packed result before the committed tokens: hint, count


class TreeKernels:
    """`raw` is the extension module; its functions are described in the C file."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    # -- the target's tree ------------------------------------------------------------------------------------------

    def target_inputs(
        self, draft: Draft, rows: Tensor, slots: SlotTable, depth_max: int
    ) -> tuple[Tree, tuple[Tensor, Tensor, Tensor]]:
        """`ops.torch.tree.derive`, and what `Executor.verify` computes: positions [B * N], write slots [B * N] and
        kv_len of the rows [B]."""
        batch, nodes = draft.parent.shape
        parent, alive, rows = draft.parent.contiguous(), draft.alive.contiguous(), rows.contiguous()
        tree = Tree(_ints(batch, nodes), _ints(batch, nodes, depth_max + 1), _ints(batch, nodes))
        found = _ints(batch * nodes), _ints(batch * nodes), _ints(batch)
        self.raw.target_inputs(
            parent.data_ptr(), alive.data_ptr(), batch, nodes, depth_max, *_addresses(tree), rows.data_ptr(),
            slots.table.data_ptr(), slots.kv_len.data_ptr(), slots.length, *_addresses(found),
        )  # fmt: skip
        return tree, found

    def plain_inputs(self, rows: Tensor, slots: SlotTable) -> tuple[Tensor, Tensor, Tensor]:
        """Plain decoding: ids, positions and write slots of the rows' last tokens, [B] each."""
        rows, batch = rows.contiguous(), rows.shape[0]
        found = _ints(batch), _ints(batch), _ints(batch)
        self.raw.plain_inputs(
            rows.data_ptr(), batch, slots.table.data_ptr(), slots.kv_len.data_ptr(), slots.last.data_ptr(),
            slots.length, *_addresses(found),
        )  # fmt: skip
        return found

    def settle(
        self, slots: SlotTable, rows: Tensor, draft: Draft, tree: Tree, target: Tensor, hint: int, observed: bool
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...] | None]:
        """`engine.commit.commit`: the fields of `Committed` and of `Path`. The dummy row stays as it is."""
        batch, nodes = draft.tokens.shape
        width = tree.path.shape[2]
        read = *draft, tree.depth, target, rows
        held = [part.contiguous() for part in read]
        done = _ints(batch, HEAD + width + 2 * nodes), _ints(batch, width), _ints(batch)
        path = tuple(_ints(batch * width) for _ in range(4)) if observed else None
        self.raw.settle(
            *_addresses(held), batch, nodes, width - 1, slots.table.data_ptr(), slots.tokens.data_ptr(),
            slots.kv_len.data_ptr(), slots.last.data_ptr(), slots.length, slots.rows, hint, *_addresses(done),
            *(_addresses(path) if path is not None else (0, 0, 0, 0)),
        )  # fmt: skip
        return *done, path

    # -- committed text ---------------------------------------------------------------------------------------------

    def newest_rows(self, hidden: Tensor, count: Tensor, lookahead: int, rows: Tensor, kept: Tensor | None) -> Tensor:
        """hidden [B * Q, H], Q rows of each batch row -> its row count[b] - lookahead, [B, H]; also written into
        kept [R + 1, H], at rows [B]."""
        batch, width = rows.shape[0], hidden.shape[1]
        newest, rows, count = hidden.new_empty(batch, width), rows.contiguous(), count.contiguous()
        hidden, size = _with_rows(hidden), hidden.element_size()
        assert kept is None or (kept.shape[1] == width and kept.is_contiguous() and kept.dtype == hidden.dtype)
        self.raw.newest(
            newest.data_ptr(), hidden.data_ptr(), hidden.stride(0) * size, width * size, count.data_ptr(), lookahead,
            hidden.shape[0] // batch, rows.data_ptr(), batch, 0 if kept is None else kept.data_ptr(),
        )  # fmt: skip
        return newest

    def keep_first(self, ids: Tensor, logp: Tensor, rows: Tensor, first: First) -> None:
        """ids [B, 1, topk] int64 and logp float32, into the fields of `first` at rows [B]."""
        batch, topk = rows.shape[0], ids.shape[2]
        ids, logp, rows = ids.contiguous(), logp.contiguous(), rows.contiguous()
        assert first.ids.shape[1] == topk and first.ids.is_contiguous() and first.logp.is_contiguous()
        self.raw.keep_first(
            ids.data_ptr(), logp.data_ptr(), batch, topk, rows.data_ptr(), first.ids.data_ptr(), first.logp.data_ptr()
        )

    def chain(self, slots: SlotTable, rows: Tensor, prefix: Tensor, width: int) -> tuple[Tensor, ...]:
        """Tokens at the positions prefix[b] .. prefix[b] + width - 1 of rows [B], from the token history: ids,
        positions, write slots [B * width], path lengths [B, width] and paths [B, width, width]."""
        batch, rows, prefix = rows.shape[0], rows.contiguous(), prefix.contiguous()
        flat = _ints(batch * width), _ints(batch * width), _ints(batch * width)
        found = *flat, _ints(batch, width), _ints(batch, width, width)
        self.raw.chain(
            slots.tokens.data_ptr(), slots.table.data_ptr(), slots.table.shape[1], rows.data_ptr(), prefix.data_ptr(),
            batch, width, *_addresses(found),
        )  # fmt: skip
        return found

    def rename(self, ids: Tensor, names: Tensor) -> Tensor:
        """`names[ids]`, in place of ids, which are contiguous."""
        assert ids.is_contiguous() and names.is_contiguous()
        self.raw.rename(ids.data_ptr(), ids.numel(), names.data_ptr())
        return ids


class RowGrowth:
    """What `ops.torch.growth.RowGrowth` does: three calls a level, and one for the draft."""

    def __init__(
        self,
        kernels: TreeKernels,
        slots: SlotTable,
        rows: Tensor,
        shape: TreeShape,
        first: First,
        tail: int,
        lookahead: int,
    ) -> None:
        """kernels: where they run; the others as there."""
        size, topk = rows.shape[0], shape.topk
        candidates = capacity(shape.depth, topk)
        assert shape.nodes - 1 <= candidates, "more nodes than growth has candidates"
        assert topk <= first.ids.shape[1], "fewer continuations of the root than a level has nodes"
        assert rows.dtype == first.ids.dtype == torch.int64
        assert first.ids.stride() == first.logp.stride() and first.ids.stride(1) == 1
        self._raw, self._slots, self._rows, self._shape, self._first = (
            kernels.raw, slots, rows.contiguous(), shape, first
        )  # fmt: skip
        self._tail, self._lookahead = tail, lookahead
        self._number = 0  # of the level that was chosen last
        self.root_at = _ints(size)  # written with the first level
        # Of all candidates: ids, which one each follows. Of the level's nodes: candidate numbers. Then the scores.
        self._ints = _ints(2 * candidates + topk, size)
        self._floats = torch.empty(candidates + topk, size, dtype=torch.float32)
        ints, floats, known = self._ints.data_ptr(), self._floats.data_ptr(), candidates * size
        self._state = (
            candidates, topk, ints, ints + 8 * known, floats, ints + 16 * known, floats + 4 * known
        )  # fmt: skip
        self._parent = self._path = rows  # of that level; nothing yet
        self._hidden: Tensor | None = None  # what the nodes of that level are fed to their children

    def level(self) -> Level:
        size, topk = self._rows.shape[0], self._shape.topk
        self._number += 1
        found = Level(_ints(size, topk), _ints(size, topk))
        if self._number == 1:
            first = self._first
            self._raw.first_level(
                *self._state, first.ids.data_ptr(), first.logp.data_ptr(), first.ids.stride(0), self._rows.data_ptr(),
                size, *_addresses(found), self._slots.kv_len.data_ptr(), self.root_at.data_ptr(),
            )  # fmt: skip
        else:
            self._raw.next_level(*self._state, self._number, size, *_addresses(found))
        self._parent = found.parent
        return found

    def level_rows(self) -> LevelRows:
        """Of the level that was chosen last; to be asked for once."""
        (size,), topk, slots = self._rows.shape, self._shape.topk, self._slots
        found = _ints(size, topk), _ints(size, topk), _ints(size, topk), _ints(size, topk, self._tail + self._number)
        self._raw.level_rows(
            self._number, size, topk, self._tail, self._lookahead, self._rows.data_ptr(), self.root_at.data_ptr(),
            slots.table.data_ptr(), slots.table.stride(0), self._parent.data_ptr(), self._path.data_ptr(),
            *_addresses(found),
        )  # fmt: skip
        positions, write_slots, path_len, self._path = found
        feature = self.level_feature() if self._first.feature.shape[1] else None
        return LevelRows(positions, write_slots, self._path, path_len, feature)

    def level_feature(self) -> Tensor:
        """The outputs of the parents of the level that was chosen last: [B * K, width]."""
        size, topk = self._parent.shape
        source = self._first.feature if self._hidden is None else self._hidden
        source, width = _with_rows(source), source.shape[1]
        out, item = source.new_empty(size * topk, width), source.element_size()
        self._raw.features(
            out.data_ptr(), source.data_ptr(), source.stride(0) * item, width * item,
            self._rows.data_ptr() if self._hidden is None else 0, self._parent.data_ptr(), size, topk,
        )  # fmt: skip
        return out

    def add(self, following: tuple[Tensor, Tensor], hidden: Tensor) -> None:
        """following: ids and log probabilities [B, K, K]; hidden [B, K, width]: what the nodes' children are fed."""
        ids, logp = (part.contiguous() for part in following)
        self._raw.add(*self._state, self._number, ids.data_ptr(), logp.data_ptr(), ids.shape[0])
        self._hidden = hidden.flatten(0, 1)

    def draft(self) -> Draft:
        (size,), shape = self._rows.shape, self._shape
        if not self._number:
            self.level()  # for its candidates
        draft = Draft(
            _ints(size, shape.nodes), _ints(size, shape.nodes), torch.empty(size, shape.nodes, dtype=torch.bool)
        )
        self._raw.draft(
            *self._state, size, shape.nodes, self._rows.data_ptr(), self._slots.last.data_ptr(),
            *_addresses(draft),
        )  # fmt: skip
        return draft


def _ints(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.int64)


def _addresses(tensors: Any) -> tuple[int, ...]:
    """Of contiguous tensors, which must be held for as long as these are used."""
    return tuple(part.data_ptr() for part in tensors)


def _with_rows(x: Tensor) -> Tensor:
    """x [M, size] with adjacent columns; rows may be apart."""
    return x if x.stride(1) == 1 else x.contiguous()


@functools.cache
def load() -> TreeKernels | None:
    """None where the extension was not built or is not wanted."""
    raw = load_extension()
    return None if raw is None else TreeKernels(raw)


def tree_kernels_for(tensor: Tensor) -> TreeKernels | None:
    """The kernels, where there are any and `tensor` is a real one on the CPU."""
    return load() if tensor.device.type == "cpu" and type(tensor) is Tensor else None
