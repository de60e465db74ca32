"""What operations take and give: trees of drafts, what is committed of them, rows of the row table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from draftwing.config.trees import TreeShape
from draftwing.core import IntArray, StepResult
from draftwing.kv.pool import zeros_as_written
from draftwing.ops.attention.batch import Ragged

# -- quantised weights ------------------------------------------------------------------------------------------------


# -- the row table ----------------------------------------------------------------------------------------------------


class RowTensors:
    """Row-indexed device state of R rows and a dummy, the last one (`engine.row_table.RowTable`). All int64 but
    `floats`, and the two of L entries a row where `dtype` says so. Operations that commit write `page_table`, `tokens`,
    `kv_len` and `last`."""

    def __init__(
        self, rows: int, length: int, ban_ids: int, device: torch.device, dtype: torch.dtype = torch.int64
    ) -> None:
        """rows: R.  length: L.  ban_ids: S.  dtype: of `page_table` and `tokens`."""
        self.rows, self.length = rows, length

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros((rows + 1, *shape), dtype=dtype, device=device)

        # [R + 1, L]: the KV slot of each position, 0 the pool's dummy slot; and the token, up to kv_len
        self.page_table = zeros_as_written((rows + 1, length), dtype, device)
        self.tokens = zeros_as_written((rows + 1, length), dtype, device)
        self.kv_len = zeros()
        self.last = zeros()  # tokens[r, kv_len[r]]: known, but not in the KV yet
        self.heads: Tensor | None = None  # [R + 1]: slots of factors beside the draft head, 0: none
        self.seed = zeros()
        self.salt = zeros()  # 0: none
        self.top_k = zeros()
        self.ban_until = zeros()
        self.ban_ids = zeros(ban_ids)  # [R + 1, S] padded with -1
        self.floats = zeros(3, dtype=torch.float32)  # [R + 1, 3]: temperature, top_p, min_p
        self.dummy_len = self.kv_len[rows:]  # [1] kv_len of the dummy, a view
        # [R + 1]: what is added to positions behind the images of each row for a rotary embedding in three axes
        self.shift: Tensor | None = None
        self.steps = torch.arange(length, device=device)  # [L] 0, 1, ..., to be cut to what is needed

    def slots_at(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Returns the KV slots, int64, at positions of rows: both int64, of one shape or broadcast to it."""
        return self.page_table[rows, positions].long()

    def tokens_at(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Returns the tokens, as `slots_at` does slots."""
        return self.tokens[rows, positions].long()

    def sampling(self, rows: Tensor) -> SamplingRows:
        """Returns what the sampler needs to know of rows [B]."""
        floats = self.floats[rows]  # [B, 3]
        return SamplingRows(
            seed=self.seed[rows],
            temperature=floats[:, 0],
            top_k=self.top_k[rows],
            top_p=floats[:, 1],
            min_p=floats[:, 2],
            ban_until=self.ban_until[rows],
            ban_ids=self.ban_ids[rows],
        )


class SamplingRows(NamedTuple):
    """What the sampler needs to know of each row of a batch."""

    seed: Tensor  # [B] int64
    temperature: Tensor  # [B] float32, 0 = greedy
    top_k: Tensor  # [B] int64, <= 0 = off
    top_p: Tensor  # [B] float32, 1 = off
    min_p: Tensor  # [B] float32, 0 = off
    ban_until: Tensor  # [B] int64: tokens at positions below it may not be in ban_ids
    ban_ids: Tensor  # [B, S] int64, padded with -1


class SamplingGroups(NamedTuple):
    """Which rows of a batch need what of the sampler: distinct batch indices, whose numbers are known to the host."""

    noisy: Tensor  # [Bn] with temperature > 0
    filtered: Tensor  # [Bf] of those, with top-k, top-p or min-p
    banning: Tensor  # [Bb] that may still be below min_new_tokens


class SampleInputs(NamedTuple):
    """The nodes that a step draws a token for, and what it draws from."""

    rows: Tensor  # [B]
    logits: Tensor  # [B, N, V] of any float type, not changed
    hidden: Tensor  # [B, N, H]
    positions: Tensor  # [B, N] int64: what is drawn will stand one further
    depth: Tensor  # [B, N] int64, 0 of node 0
    depth_max: int
    tokens: Tensor  # [B, N] int64: the nodes' own
    path: Tensor  # [B, N, D + 1] int64, as in `Tree`
    path_len: Tensor  # [B, N] int64

    def pick(self, at: Tensor) -> SampleInputs:
        """Returns the batch indices `at` alone."""
        return SampleInputs(*(part[at] if isinstance(part, Tensor) else part for part in self))  # type: ignore[arg-type]


class Edits(NamedTuple):
    """Penalties and biases, row-indexed as `sampling.edits.EditTable` keeps them. What its fields hold when a token is
    drawn, or drafted, counts."""

    prompt_len: Tensor  # [R + 1] int64
    penalties: Tensor  # [R + 1, 3] float32: frequency, presence, repetition
    bias_ids: Tensor  # [R + 1, S] int64
    bias_values: Tensor  # [R + 1, S] float32, 0 where there is no bias
    costs: Tensor  # [R + 1, longest + 1] float32: of repetitions of so many tokens
    at: Tensor | None = None  # [Be] batch indices of the rows that may have some, None: all, which is found by value


class LogitEditor(Protocol):
    """Edits a head's logits as those of the target will be edited, by the text up to each row's newest token; what
    repetitions cost by the path down to each node, too."""

    def follow(self, level: Level) -> None:
        """Goes on to a level of the tree, the first below the root or the one below that of the last call: what is
        applied from then on is of its nodes."""
        ...

    def apply(self, logits: Tensor) -> None:
        """logits [M, V] of any float type, M / B nodes of each row side by side: changed in place, each rounded to its
        type again. Before the first level all are the root's continuations; of a level it may be one for all nodes of
        a row, of which nobody knows what repetitions cost."""
        ...


class Rescoring(NamedTuple):
    """How the logits of a few ids are computed again in float32, where a half type has rounded them."""

    hidden: Tensor  # [B, N, H]
    weight: Tensor | None  # [V, H]: what the logits are the product of, None where `logits` alone has it
    logits: Callable[[Tensor, Tensor], Tensor]  # (hidden [..., H], ids [..., K]) -> [..., K] float32

    def exact(self, ids: Tensor, rows: Tensor | None) -> Tensor:
        """ids [B, N, K] -> their logits [B, N, K] float32; rows: batch indices of those B rows, None for all."""
        return self.logits(self.hidden if rows is None else self.hidden.index_select(0, rows), ids)


class NoiseKey(NamedTuple):
    """What makes the noise of rows: theirs is that of `SamplingOps.gumbel`, times the temperature; and what min-p
    leaves of what they draw."""

    seed: Tensor  # [B] int64
    position: Tensor  # [B] int64
    floats: Tensor  # [3, B] float32: temperature (0: no noise), top-p, min-p


# -- trees ------------------------------------------------------------------------------------------------------------


class Draft(NamedTuple):
    """A tree of draft tokens per row, parents before children, node 0 the root (the row's last token).

    Siblings are distinct. A dead node has a valid token id and a valid parent, is never accepted and never counted
    as proposed; the children of a dead node are dead.

    grade: what the drafter itself thinks of a node, if its parent is right: 16 * source + level. source: an index into
    `config.trees.SOURCES`; level 0 .. 15, see `level_of`. How good a grade really is `Calibration` learns.
    """

    tokens: Tensor  # [B, N] int64
    parent: Tensor  # [B, N] int64, parent[:, 0] = 0, parent[:, i] < i
    alive: Tensor  # [B, N] bool, alive[:, 0] is True
    grade: Tensor | None = None  # [B, N] int64, 0 for the root; None where nothing is known


class Tree(NamedTuple):
    """Geometry of a batch of trees; D is the shape's depth.

    A dead node stands alone: depth 0, itself as its whole path. So its position is a valid one (the root's) and its
    attention reads nothing but committed tokens and itself.
    """

    depth: Tensor  # [B, N] int64, 0 for the root
    path: Tensor  # [B, N, D + 1] int64: the ancestor at depth 0, 1, ...; the node itself from its own depth on
    path_len: Tensor  # [B, N] int64, depth + 1


class Calibration(NamedTuple):
    """How often verified nodes of each grade and depth had an accepted parent, and how often they were accepted
    themselves: device state, which `commit` adds to."""

    seen: Tensor  # [GRADES, DEPTHS] float32
    accepted: Tensor  # [GRADES, DEPTHS] float32


class Ranked(NamedTuple):
    """What is expected of a batch of trees."""

    survival: Tensor  # [B, N] float32: product of the estimates along a node's path; 1 for the root, 0 for dead nodes
    mark: Tensor  # [B, N] int64, see `core.MARK_DEPTH`


class Queries(NamedTuple):
    """R nodes that the target verifies, those of a row side by side; the last ones may be of the dummy row. As in
    `ops.attention.batch.Batch`, with one query for each of R rows."""

    ids: Tensor  # [R] int64
    positions: Tensor  # [R] int64
    write_slots: Tensor  # [R] int64
    rows: Tensor  # [R] int64
    prefix_len: Tensor  # [R] int64
    path: Tensor  # [R, 1, D + 1] int64
    path_len: Tensor  # [R, 1] int64


class Assigned(NamedTuple):
    """Which nodes of a batch of trees are verified."""

    alive: Tensor  # [B, N] bool: those that are
    mark: Tensor  # [B, N] int64
    place: Tensor  # [B, N] int64: which of the queries a node is; of those that are not verified any
    trees: Ragged  # which queries are one tree: first those of the B rows, then those of the dummy row
    queries: Queries


class TargetInputs(NamedTuple):
    """Where the nodes of a tree step stand, as in `ops.attention.batch.Batch`."""

    positions: Tensor  # [B * N] int64
    write_slots: Tensor  # [B * N] int64
    prefix_len: Tensor  # [B] int64, kv_len of the rows


class Chain(NamedTuple):
    """Q known tokens in each row of a batch, as `ops.attention.batch.Batch` has them."""

    ids: Tensor  # [B * Q] int64
    positions: Tensor  # [B * Q] int64
    write_slots: Tensor  # [B * Q] int64
    path: Tensor  # [B, Q, Q] int64
    path_len: Tensor  # [B, Q] int64


class BlockInputs(NamedTuple):
    """The newest token and masks after it, Q rows in each row of a batch, as `Batch` has them; every row
    sees all of its block."""

    ids: Tensor  # [B * Q] int64
    positions: Tensor  # [B * Q] int64
    write_slots: Tensor  # [B * Q] int64
    prefix_len: Tensor  # [B] int64, kv_len of the rows
    path: Tensor  # [B, Q, Q] int64
    path_len: Tensor  # [B, Q] int64


# -- what a step commits ----------------------------------------------------------------------------------------------


class AcceptedPath(NamedTuple):
    """The accepted path of each row, a chain of D + 1 tokens that starts with the root; garbage past `count`."""

    ids: Tensor  # [B * (D + 1)] int64
    positions: Tensor  # [B * (D + 1)] int64
    write_slots: Tensor  # [B * (D + 1)] int64
    nodes: Tensor  # [B * (D + 1)] int64: which of the step's B * N nodes stands there


class Committed(NamedTuple):
    """What `TreeOps.commit` has written to the row table."""

    packed: Tensor  # [B, 2 + (D + 1) + N + N] int64: confidence, count, tokens, order, marks of the nodes; see `unpack`
    tokens: Tensor  # [B, D + 1] int64: the accepted drafts and the target's token after them; 0 past count
    count: Tensor  # type: ignore[assignment]  # [B] int64: tokens committed, 1 .. D + 1; hides tuple.count
    path: AcceptedPath | None


CONFIDENCE, COUNT, HEAD = range(3)  # columns of a packed result; the tokens begin at HEAD, also in ops/cpu/csrc/tree.c


def packed_width(depth_max: int, nodes: int) -> int:
    """Returns columns of a packed result of trees no deeper than `depth_max`."""
    return HEAD + depth_max + 1 + 2 * nodes


def unpack(packed: IntArray, shape: TreeShape, **rest: Any) -> StepResult:
    """packed [B, W] on the host, of a step of this shape -> views of its parts; rest: the result's other fields."""
    commit, nodes = HEAD + shape.max_commit, shape.nodes
    assert packed.shape[1] == commit + 2 * nodes, f"a result of {shape} with {packed.shape[1]} columns"
    return StepResult(
        tokens=packed[:, HEAD:commit],
        count=packed[:, COUNT],
        order=packed[:, commit : commit + nodes],
        mark=packed[:, commit + nodes :],
        confidence=packed[:, CONFIDENCE],
        **rest,
    )


class Unseen(NamedTuple):
    """What a drafter with KV has not seen yet of each row, kept until it catches up (`engine.draft_kv_backlog`)."""

    behind: Tensor  # [R + 1] int64: how many of the newest committed positions
    # [R + 1, MAX_BACKLOG, T] the target's auxiliary hidden states at position p, in place p % MAX_BACKLOG; T = 0: none
    hidden: Tensor


# -- tree expansion ---------------------------------------------------------------------------------------------------


class First(NamedTuple):
    """What expansion starts from, kept with the rows of the row table: the root's best continuations and its
    output."""

    ids: Tensor  # [R + 1, topk] int64
    logp: Tensor  # [R + 1, topk] float32
    feature: Tensor  # [R + 1, width]; width 0 where the head needs none


class Level(NamedTuple):
    """The K nodes of a level that are expanded next."""

    ids: Tensor  # [B, K] int64
    parent: Tensor  # [B, K] int64, the node of the level before; of level 1: 0, the root


class LevelRows(NamedTuple):
    """Where a level's nodes stand, one row of the head for each (`ops.attention.batch.Batch`)."""

    positions: Tensor  # [B, K] int64
    write_slots: Tensor  # [B, K] int64
    path: Tensor  # [B, K, D] int64, page-table entries past kv_len
    path_len: Tensor  # [B, K] int64
    feature: Tensor | None  # [B * K, width]: the parents' outputs


class Continuations(NamedTuple):
    """The best `topk` continuations of M nodes, on their way to `Expansion.add` and `ExpansionOps.keep_first`.

    In torch and C: ids [M, topk] int64 of the target, log probabilities [M, topk] float32, best first. In Triton:
    chunk by chunk of the vocabulary, keys [M, chunks, topk] int64 and sums [M, chunks, 2] float32, which their reader
    merges (`ops.expansion.triton_continuations`).
    """

    ids: Tensor
    logp: Tensor


class Expansion(Protocol):
    """One tree of candidates per row. `level` gives the nodes to expand, `add` takes what follows them: in turns, for
    the levels 1 .. depth - 1. Then `draft`."""

    root_at: Tensor  # [B] int64, kv_len of the rows; known from the first level on

    def level(self) -> Level:
        """Chooses the nodes of the next level."""
        ...

    def level_rows(self) -> LevelRows:
        """Returns the rows of the level that was chosen last; to be asked for once."""
        ...

    def level_feature(self) -> Tensor:
        """Returns the outputs of the parents of the level that was chosen last: [B * K, width]."""
        ...

    def add(self, following: Continuations, hidden: Tensor) -> None:
        """following: the best K of each of the level's B * K nodes; hidden [B, K, width]: what their children are
        fed."""
        ...

    def draft(self) -> Draft:
        """Returns the best nodes of all levels."""
        ...
