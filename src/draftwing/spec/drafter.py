"""What a drafter is, and menus of trees for it. It works on device state and never sees requests, the scheduler, the
sampler or others. A menu is what a policy may choose from, the largest first and plain decoding last."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.config.options import Options
from draftwing.config.trees import MAX_CONFIDENCE, PLAIN, TreeShape
from draftwing.core import IntArray
from draftwing.errors import ConfigError
from draftwing.kv.pool import SlotSpec
from draftwing.layers.linear_ops.base import WeightFormat
from draftwing.layers.linear_ops.dense import DENSE
from draftwing.ops.attention.attend import AttnBackend
from draftwing.ops.attention.batch import Batch
from draftwing.ops.table import TorchOps
from draftwing.ops.types import Calibration, Draft, Edits, RowTensors

if TYPE_CHECKING:
    from draftwing.models.decoder import DecoderModel
    from draftwing.models.heads.base import FeatureHead

__all__ = ["Draft", "DraftContext", "DraftStep", "Drafter", "PastText", "SeenTokens"]


@dataclass(frozen=True)
class DraftContext:
    """What there is to know when a drafter is made.

    options: resolved.  target: loaded and packed.  shape: the largest tree that will be asked for.
    rows: of the row table, its last one a dummy.  dtype: of activations, and of weights that are not quantised.
    ops: of the device.
    draft_path: of the model that drafts, the target's own where none is given.
    token_ids [n] int64: tokens of the target that may be drafted, None for all.
    load_model: loads a language model from a folder or file, on the device.  head_weights: the format of a head's
    matrices.  draft_lm_head: the scheme of a copy of the lm_head, None: there is none.  free_memory: bytes of the
    device, before there is a pool.
    """

    options: Options
    target: DecoderModel
    shape: TreeShape
    rows: int
    dtype: torch.dtype
    device: torch.device
    ops: TorchOps
    draft_path: Path
    token_ids: Tensor | None
    load_model: Callable[[Path], DecoderModel]
    head_weights: WeightFormat = DENSE
    draft_lm_head: str | None = None
    free_memory: Callable[[], int] = lambda: 0


class DraftStep(NamedTuple):
    """What `Drafter.propose` is given. All tensors are on the device.

    table: device state indexed by row. `table.tokens` [R, L], int64 or, on a GPU, int32, is the text of each row, valid
    at 0 .. kv_len; `table.kv_len` [R] the index of its newest token, which is `table.last` [R].
    rows [B] int64: the rows of this step.
    shape: of the trees that are wanted.
    max_kv_len: upper bound of the rows' kv_len, known on the host.
    noisy: indices of the rows with temperature > 0, for drafters that couple with the target by adding the same noise
    before they choose; their number is known on the host.
    edits: penalties and biases, for drafters that score tokens (`ops.logit_editor`); None where no row has any.
    """

    table: RowTensors
    rows: Tensor
    shape: TreeShape
    max_kv_len: int
    noisy: Tensor
    edits: Edits | None = None


class SeenTokens(NamedTuple):
    """What `Drafter.extend` is given: what the target ran. All tensors are on the device.

    table: as in `DraftStep`; it has advanced already.
    batch: a prefill chunk (`batch.chunks`) or the accepted path of each row; `batch.prefix_len` is kv_len before the
    step. Drafters without auxiliary hidden states and without KV layers get only rows and prefix_len of a path.
    aux_hidden [M, ...]: the target's hidden states of `Drafter.aux_layers`; None without such layers.
    next_ids [M]: the token that follows each query.
    count [B]: valid queries of each row's path, None for prefill. Queries past the count are garbage: what they write
    past kv_len is never read.
    noisy: indices of rows with temperature > 0 among the batch's rows; for prefill among those whose chunk is final.
    """

    table: RowTensors
    batch: Batch
    aux_hidden: Tensor | None
    next_ids: Tensor
    count: Tensor | None  # type: ignore[assignment]  # hides tuple.count
    noisy: Tensor

    @property
    def width(self) -> int:
        """Queries of each row's path, garbage included; not for prefill."""
        return self.next_ids.shape[0] // self.batch.rows.shape[0]


class PastText(NamedTuple):
    """What a request was answered before this engine. salt: that such a request has now.  tokens [n] int32: the end of
    its prompt and the answer.  first: the index of the answer's first token."""

    salt: int
    tokens: IntArray
    first: int


class Drafter(ABC):
    """Proposes tokens, which the target checks: bad ones cost time and never change the text.

    `propose` is all that one has to write. The other methods are for drafters that learn from the text, keep KV in the
    pool, or know how good their next draft will be. All tensors are on the device. Nothing may read their values on the
    host, and no shape may depend on them: on a GPU the methods are captured as CUDA graphs.
    """

    # Facts that options are checked with: the tree where the user asks for none, all that fits where num_draft_tokens
    # (the root included) is None; and further options of speculation that the class reads of its context. A drafter of
    # `config.drafters.DRAFTERS` is not asked for them, nor its `build` called: its row says all that.
    num_steps: int = 3
    topk: int = 1
    num_draft_tokens: int | None = None
    reads_options: tuple[str, ...] = ()

    aux_layers: tuple[int, ...] = ()  # layers of the target whose hidden states `extend` wants
    lookahead: int = 0  # how many tokens past position t the drafter's KV at t depends on
    reads_images: bool = False  # whether it reads features of images, which the token behind a query has in `following`
    kv_layers: Sequence[SlotSpec] = ()  # its layers in the pool, after the target's
    from_tokens: bool = False  # whether its KV is made of tokens alone, and nobody else learns from `extend`
    tail: int = 0  # page-table entries past the end of a prompt that `extend` may write for its last chunk
    in_parts: bool = True  # whether parts of its trees are verified for any row, see `StepContext.full_trees_only`
    initial_confidence: int = MAX_CONFIDENCE  # the confidence to assume for a row until a result has it
    calibration: Calibration  # of all drafts by grade and depth, kept by the executor, which sets it
    fixed_confidence: bool = True  # whether that is what it always is, so that `confidence` need not be called

    @classmethod
    def build(cls, context: DraftContext) -> Self:
        """Returns a new drafter; for those that want to know sizes, device or options."""
        return cls()

    @abstractmethod
    def propose(self, step: DraftStep) -> Draft:
        """Returns a draft tree for each row, of step.shape.nodes nodes and at most step.shape.depth levels."""

    def chain(self, step: DraftStep, tokens: Tensor, known: Tensor | None = None) -> Draft:
        """Returns chains of drafts, for `propose`. tokens [B, D] int64: valid ids that may follow the newest token, in
        their order; known [B, D] bool: whether there is such a token, None: always. What follows an unknown one is not
        drafted."""
        rows, depth, nodes = step.rows, min(tokens.shape[1], step.shape.depth), step.shape.nodes
        known = torch.ones_like(tokens, dtype=torch.bool) if known is None else known
        missing = nodes - 1 - depth
        alive = (~known[:, :depth]).cumsum(1) == 0
        root = step.table.last.index_select(0, rows).unsqueeze(1)  # [B, 1]
        parent = torch.arange(-1, nodes - 1, device=rows.device).clamp_(min=0)
        return Draft(
            torch.cat((root, tokens[:, :depth], root.expand(-1, missing)), 1),
            parent.expand(rows.shape[0], nodes),
            torch.cat((torch.ones_like(root, dtype=torch.bool), alive, alive.new_zeros(root.shape[0], missing)), 1),
        )

    def menu(self, shape: TreeShape) -> tuple[TreeShape, ...]:
        """Returns what a step may draft, the largest first, which is `shape`, and nothing last."""
        return match_menu(shape) if self.in_parts else half_menu(shape)

    def attach(self, attn: AttnBackend, first_layer: int, positions: int) -> None:  # noqa: B027
        """Called once, when the pool is made: how to reach the drafter's own layers in it, and how many positions its
        rotary table must cover."""

    def span(self, shape: TreeShape) -> int:
        """Returns the number of page-table entries past kv_len that a step of this shape may write."""
        return shape.nodes

    def skips_extend(self, shape: TreeShape) -> bool:
        """Returns whether a step of this shape does without the drafter's KV, which may then lack what the step
        commits: `watch` is called in place of `extend`, and `catch_up` before the KV is needed. Never so without KV
        layers."""
        return bool(self.kv_layers) and shape == PLAIN

    def extend(self, seen: SeenTokens) -> None:  # noqa: B027
        """Sees what the target ran."""

    @staticmethod
    def evened(ops: TorchOps, seen: SeenTokens, more: int = 0) -> SeenTokens:
        """Returns chunks with as many queries as such a device has been tried with (`ops.round_up_rows`): others are
        added in the dummy row. more: queries that the caller adds."""
        count, aux_hidden = seen.next_ids.shape[0], seen.aux_hidden
        assert count == seen.batch.ids.shape[0]
        size = ops.round_up_rows(count + more) - more
        if size == count:
            return seen
        return seen._replace(
            batch=seen.batch.padded(size, seen.table.rows),
            aux_hidden=None if aux_hidden is None else F.pad(aux_hidden, (0, 0, 0, size - count)),
            next_ids=F.pad(seen.next_ids, (0, size - count)),
        )

    def watch(self, seen: SeenTokens) -> None:  # noqa: B027
        """Called in place of `extend`, as of drafters without KV layers: after a step of a shape that
        `skips_extend`, and after a prefill, without a count, of which it sees the hidden states when it catches up."""

    def catch_up(self, seen: SeenTokens, drafts: bool) -> None:
        """Sees what it has not seen of some rows, as `extend` sees the accepted path of one step. drafts: whether it
        proposes for them next; if not, nobody asks what it makes of the newest token before it catches up again.
        Without a count it sees several chunks of a prompt as one, of which none is the last."""
        self.extend(seen)

    def confidence(self, table: RowTensors, rows: Tensor, max_kv_len: int, out: Tensor | None = None) -> Tensor:
        """Returns [B] int64 in [0, MAX_CONFIDENCE]: how promising the next draft is; 0 means that nothing can be
        proposed. Written into `out` where that is given, a column of a packed result. Not called with
        `fixed_confidence`.

        Runs last in every step, so that a drafter may look its next draft up here and keep it as row state.
        """
        return (torch.empty_like(rows) if out is None else out).fill_(self.initial_confidence)

    def constrain(self, table: RowTensors, rows: Tensor, banned: Tensor, noisy: Tensor) -> None:  # noqa: B027
        """Called right before `propose`, of drafters with KV layers: what may not follow the newest token of these rows
        [b], banned [b, V] bool; noisy: among them."""

    def begin(self, step: DraftStep) -> bool:
        """Writes what the drafts of a step begin with where that is row state: by what `constrain` said, and by the
        step's edits. Returns whether a captured `propose` may follow, which knows of neither; else nothing changed."""
        return False

    def read_head(self, folder: Path | None) -> FeatureHead:
        """Loads a head that `take_head` can put in the place of the drafter's own. folder: None for the one that it
        began with. Raises CheckpointError, and ConfigError for one that differs in more than weights. Changes nothing,
        and may be called by another thread."""
        raise ConfigError(f"{type(self).__name__} has no head that another could replace")

    def take_head(self, head: FeatureHead) -> None:
        """Drafts as `head` of `read_head` does from now on. What it kept of a text so far stays."""
        raise NotImplementedError

    def beside_adapters(self, on: bool) -> None:  # noqa: B027
        """Called before what runs the head: whether rows may have adapters with factors beside it."""

    @property
    def adaptable(self) -> FeatureHead | None:
        """Returns the head beside which adapters may have factors of their own; None: there is none."""
        return None

    def remember(self, table: RowTensors, texts: Sequence[PastText]) -> None:  # noqa: B027
        """Learns from requests before this engine, of each salt the oldest first. No row runs, and all may be used."""

    def flush(self) -> None:  # noqa: B027
        """Forgets what was learnt from past requests (the prefix cache is being flushed)."""


def part_of(shape: TreeShape, verified: int) -> TreeShape:
    """Returns the shape with so many nodes of a row verified on average."""
    return shape._replace(verified=0 if verified >= shape.nodes else verified)


def tree_menu(shape: TreeShape) -> tuple[TreeShape, ...]:
    """Returns options for a drafter that pays for every level it drafts, on a device that drafts a wide level as fast
    as a narrow one: the whole tree, parts of it, a tree of half the depth, one level, nothing."""
    depth, topk, nodes = shape.tree
    menu = [part_of(shape, n) for n in (nodes, nodes // 2, nodes // 4) if n > 1]
    if depth > 3:
        half = TreeShape(depth // 2, topk, max(nodes // 2, depth // 2 + 1))
        menu.append(part_of(half, max(nodes // 4, 2)))
    if depth > 1:
        menu.append(part_of(TreeShape(1, topk, topk + 1), 2))
    return (*dict.fromkeys(menu), PLAIN)


def chain_menu(shape: TreeShape) -> tuple[TreeShape, ...]:
    """Returns options where every row of a level costs: the whole tree, the chain as deep, half of it, one level,
    nothing."""
    chains = []
    depth = shape.depth
    while depth:
        chains.append(TreeShape(depth, 1, depth + 1))
        depth //= 2
    longest = part_of(chains[0], (chains[0].nodes + 1) // 2)
    return (*dict.fromkeys((shape, chains[0], *((longest,) if shape.depth > 2 else ()), *chains[1:])), PLAIN)


def match_menu(shape: TreeShape) -> tuple[TreeShape, ...]:
    """Returns options for a drafter that pays for nothing but what is verified: parts of the largest tree."""
    parts, nodes = [shape], shape.nodes // 2
    while nodes > 1:
        parts.append(part_of(shape, nodes))
        nodes //= 2
    return (*parts, PLAIN)


def half_menu(shape: TreeShape) -> tuple[TreeShape, ...]:
    """Returns options where a step may have to verify whole trees: halves of the largest one."""
    menu = [shape]
    while menu[-1].nodes > 3:
        nodes = menu[-1].nodes // 2
        menu.append(TreeShape(min(shape.depth, nodes - 1), min(shape.topk, nodes - 1), nodes))
    return (*menu, PLAIN)
