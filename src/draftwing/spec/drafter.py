"""The protocol of a drafter: `propose` a tree, `observe` what the target ran, give an `outlook` for the next draft.

A drafter works on device state alone. It never sees requests, the scheduler, the sampler or other drafters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from draftwing.core import TreeShape
from draftwing.kv.pool import LayerSpec
from draftwing.ops.attention import AttnBackend, Batch

if TYPE_CHECKING:
    from draftwing.engine.row_table import SlotTable


class Draft(NamedTuple):
    """A tree of draft tokens per row, parents before children, node 0 the root (the row's last token).

    Siblings are distinct. A dead node has a valid token id and a valid parent, is never accepted and never counted
    as proposed; the children of a dead node are dead.
    """

    tokens: Tensor  # [B, N] int64
    parent: Tensor  # [B, N] int64, parent[:, 0] = 0, parent[:, i] < i
    alive: Tensor  # [B, N] bool, alive[:, 0] is True


class Drafter(Protocol):
    """Proposes a draft tree for each row of a batch, and follows what the target commits.

    taps: target layers whose hidden states `observe` reads.
    lookahead: how many tokens past position t the drafter's KV at t depends on.
    kv_layers: its layers in the KV pool; they come after the target's.
    tail: page-table entries past the end of a prompt that observing its last chunk may write.
    first_hint: the outlook of a row before a result has told it.
    fixed_hint: whether the outlook always is `first_hint`, so that `outlook` need not be called.

    `noisy`, in the methods: batch indices of rows with temperature > 0; the host knows their number. Drafters that
    couple with the target add the target's own noise before they choose.
    """

    taps: tuple[int, ...]
    lookahead: int
    kv_layers: Sequence[LayerSpec]
    tail: int
    first_hint: int
    fixed_hint: bool

    def attach(self, attn: AttnBackend, first_layer: int, positions: int) -> None:
        """Once, when the pool is made: how to reach the drafter's own layers in it, and how many positions its
        rotary table must cover."""
        ...

    def span(self, shape: TreeShape) -> int:
        """Page-table entries past kv_len that a step of this shape may write."""
        ...

    def propose(self, slots: SlotTable, rows: Tensor, shape: TreeShape, max_bound: int, noisy: Tensor) -> Draft:
        """A draft tree for each row; `max_bound` bounds kv_len of the rows on the host."""
        ...

    def observe(
        self,
        slots: SlotTable,
        batch: Batch,
        taps: Tensor | None,
        next_ids: Tensor,
        count: Tensor | None,
        noisy: Tensor,
    ) -> None:
        """Sees what the target ran: a prefill chunk (`batch.chunks`) or the accepted path of each row. The table has
        advanced already; `batch.prefix_len` is kv_len before the step.

        next_ids [M]: the token that follows each query.  count [B]: valid queries of each row's path, None for
        prefill. Queries past the count are garbage: what they write past kv_len is never read.
        noisy: among the batch's rows; for prefill among those whose chunk is final.
        """
        ...

    def outlook(self, slots: SlotTable, rows: Tensor, max_bound: int, out: Tensor | None = None) -> Tensor:
        """[B] int64 in [0, MAX_HINT]: how promising the next draft is; 0 means that nothing can be proposed. Written
        into `out` where that is given, a column of a packed result.

        Runs last in every step, so that a drafter may look its next draft up here and keep it as row state.
        """
        ...

    def constrain(self, slots: SlotTable, rows: Tensor, banned: Tensor, noisy: Tensor) -> None:
        """Right before `propose`, of drafters with KV layers: what may not follow the newest token of these rows [b],
        banned [b, V] bool; noisy: among them."""
        ...

    def flush(self) -> None:
        """Forgets what was learnt from past requests (the prefix cache is being flushed)."""
        ...
