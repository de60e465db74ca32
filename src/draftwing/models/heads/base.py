"""What a model must offer to draft (`DraftHead`), and what the heads that read a target's features have in common: its
embedding, its head, and a rotary table.

Each level of a draft reads the lm_head once, and a product of few rows takes as long as its bytes do, so a GPU has a
copy of it in fewer bits (`quantized_copy`). Errors cost acceptance, never text: the target computes its logits with the
lm_head as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from draftwing.errors import ConfigError
from draftwing.kv.pool import SlotSpec
from draftwing.layers.adapters import AdaptedWeight
from draftwing.layers.attention import Attention
from draftwing.layers.decoder_layer import DecoderLayer
from draftwing.layers.embedding import Embedding
from draftwing.layers.linear import Linear, vocab_parallel
from draftwing.layers.linear_ops.base import LinearOp, PackMode, ParamSlice, WeightFormat
from draftwing.layers.linear_ops.groups import GroupFormat
from draftwing.layers.norm import RMSNorm
from draftwing.layers.rope import Rope
from draftwing.models.config import ModelConfig
from draftwing.models.decoder import DecoderModel, pack_layers
from draftwing.models.weight_map import named, stored_tensors
from draftwing.ops.adapters.spec import AdapterWeights, QueryAdapters
from draftwing.ops.attention.attend import Attend
from draftwing.ops.attention.batch import ImageRows
from draftwing.ops.gemm.contract import HeadTopK
from draftwing.ops.table import PLAIN, LayerOps
from draftwing.parallel.cut import Cut
from draftwing.parallel.ranks import ALONE, Ranks

SPREAD = 256 << 20  # bytes of a head's layers; to read fewer takes a rank less time than two sums a layer


def ranks_for(config: ModelConfig, target: DecoderModel, dtype: torch.dtype) -> Ranks:
    """Returns the ranks over which a head's layers are spread: the target's, where they are large and can be."""
    if target.ranks.size == 1 or config.layer_weights * dtype.itemsize < SPREAD:
        return ALONE
    try:
        config.spread(target.ranks)
    except ConfigError:
        return ALONE
    return target.ranks


class DraftHead:
    """lookahead: 0 where the row at position t is made of token t; 1 where it is made of token t + 1 and of the
    target's feature at t; n where there are n layers, the last of which makes it of token t + n (`MTPDrafter`).
    aux_layers: target layers that the feature is made of.  width: size of a row's feature, 0 where rows have none.
    target_ids [Vd]: the target's id of each of the head's tokens, None where they are the same.
    top_k: `logits` and the best of them in one call, None where there is none.  in_axes: whether its rotary embedding
    takes positions in three axes.  reads_images: whether `showing` changes what rows are made of.
    forward_name: the method that runs the network, which --enable-torch-compile compiles.
    adapted: whether factors of adapters may add to its products."""

    lookahead: int = 0
    aux_layers: tuple[int, ...] = ()
    width: int = 0
    vocab: int
    kv_layers: Sequence[SlotSpec]
    target_ids: Tensor | None = None
    top_k: HeadTopK | None = None
    in_axes: bool = False
    reads_images: bool = False
    forward_name: str = "run"
    adapted: bool = False

    def set_max_positions(self, positions: int) -> None:
        """Makes the rotary table; every position of a later `run` must be below `positions`."""
        raise NotImplementedError

    def beside(self, slots: Tensor | None, plan: Tensor | None = None) -> AbstractContextManager[None]:
        """Has what runs inside be of queries whose adapters have these slots, as `QueryAdapters.of`."""
        assert slots is None, "there are no factors for it"
        return nullcontext()

    def features(self, aux_hidden: Tensor) -> Tensor:
        """aux_hidden [M, len(aux_layers) * hidden of the target] -> [M, width]: what rows made by the target are fed.
        Of a head without auxiliary layers it is not called."""
        raise NotImplementedError

    def run(self, ids: Tensor, positions: Tensor, features: Tensor | None, level: int, attend: Attend) -> Tensor:
        """ids, positions [M]; features [M, width] -> hidden [M, width or own size], fed back to the rows' children.
        level: 0 for committed text, 1, 2, ... in tree expansion (a head may have one layer per level)."""
        raise NotImplementedError

    @contextmanager
    def showing(self, images: ImageRows | None) -> Iterator[None]:
        """Has calls within read rows of features in place of some embeddings."""
        yield

    def write(self, ids: Tensor, positions: Tensor, features: Tensor | None, attend: Attend) -> None:
        """Writes what `run` leaves in the pool of committed text, for rows whose output nobody wants; heads of one
        layer need not run it."""
        self.run(ids, positions, features, 0, attend)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden of `run` -> [M, vocab]"""
        raise NotImplementedError

    def draft_ids(self) -> Tensor | None:
        """Returns which of the head's tokens each of the target's is, [V] int64, -1 for none; None: the same."""
        assert self.target_ids is None
        return None


class FeatureHead(DraftHead, nn.Module):
    """A `DraftHead` whose row at position t is made of the target's feature at t and of token t + 1.

    Trainable as long as it is not packed. What it shares with the target is not among its parameters.
    """

    lookahead = 1
    reads_images = True

    def __init__(
        self, config: ModelConfig, target: DecoderModel, aux_layers: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        """config: of the draft layers; its vocabulary is the target's. Of a target on several ranks large layers are
        spread, too."""
        super().__init__()
        self.config, self.aux_layers = config, aux_layers
        self.ranks = ranks_for(config, target, dtype)
        self.layer_configs = config.spread(self.ranks)
        self.width = config.hidden_size
        self.vocab = target.config.vocab_size
        kept = [layer.keeps() for layer in self.layer_configs]
        self.kv_layers = [spec for spec in kept if spec is not None]
        (rotates,) = {layer.mixer.rotates for layer in self.layer_configs}
        assert rotates is not None and len(self.kv_layers) == len(kept), "layers of heads are alike, and keep something"
        self.rope = Rope(config.ropes[rotates[0]], rotates[1], dtype)
        self.in_axes = bool(self.rope.config.sections)
        self.lm_head: Linear | None = None  # of its own, see `add_lm_head`
        self._target = (target,)  # in a tuple, where nn.Module does not look for parameters
        self.head_rows: Linear | None = None  # of the target's head, which `restrict` took
        self.quantized_lm_head: Linear | None = None  # a copy of what `output_layer` has, for few rows
        self.ops = PLAIN
        self._queries = QueryAdapters()
        self._shown: ImageRows | None = None

    @contextmanager
    def showing(self, images: ImageRows | None) -> Iterator[None]:
        self._shown = images
        try:
            yield
        finally:
            self._shown = None

    @property
    def embedding(self) -> Embedding | Shown:
        """Returns where rows of the target's tokens are read from, and of images, which some calls are shown."""
        return self.target.embed if self._shown is None else Shown(self.target, self._shown)

    def features(self, aux_hidden: Tensor) -> Tensor:
        """Returns features as they are: what heads read that go on from the target's output after its final norm."""
        return aux_hidden

    @property
    def target(self) -> DecoderModel:
        return self._target[0]

    def set_max_positions(self, positions: int) -> None:
        weight = next(part.weight for part in self.modules() if isinstance(part, RMSNorm))  # packing leaves norms
        self.rope.make(positions, self.rope.table.dtype, weight.device)  # norms may be in float32

    def see_at_most(self, positions: int | None) -> None:
        """Lets no layer see further back than so many positions, the row's own among them; None: than its config says.
        Raises ConfigError for layers whose attention has no windows."""
        for layer in self._layers():
            if not isinstance(layer.mixer, Attention) or not layer.mixer.takes_window:
                raise ConfigError(
                    "--speculative-draft-window-size: expected draft layers with plain attention, found "
                    f"{type(layer.mixer).__name__}"
                )
            layer.see_at_most(positions)

    def sees_beyond(self, positions: int) -> bool:
        """Returns whether a layer sees further back than so many positions, and `see_at_most` can keep it from that."""
        mixers = [layer.mixer for layer in self._layers()]
        able = [one for one in mixers if isinstance(one, Attention) and one.takes_window]
        return len(able) == len(mixers) and any(one.kind.window == 0 or one.kind.window > positions for one in able)

    def _layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.modules() if isinstance(layer, DecoderLayer)]

    def take_adapters(self, weights: Mapping[str, AdapterWeights]) -> None:
        """Lets factors add to products from now on, inside `beside`. weights: of `Linear`s by name. After `pack`."""
        self.adapted = True
        for name, own in weights.items():
            linear = self.get_submodule(name)
            assert isinstance(linear, Linear)
            linear.adapted = AdaptedWeight(self._queries, own, self.ops, linear.op.sums_over)
        for part in self.modules():
            if isinstance(part, DecoderLayer):
                part.take_adapters(self._queries)

    def beside(self, slots: Tensor | None, plan: Tensor | None = None) -> AbstractContextManager[None]:
        return self._queries.of(slots, plan)

    def restrict(self, ids: Tensor) -> None:
        """Drafts only the tokens `ids` [n] int64 from now on (FR-Spec, Zhao et al. 2025, arXiv 2502.14856).

        Gathers their rows of the target's head once, so the head's share of a draft step falls with n.
        """
        ids = ids.to(self.target.norm.weight.device)
        rows = self.target.lm_head.rows(ids).detach()  # [n, hidden]
        self.head_rows = linear_of(rows, None, self.config.vocab_format)
        self.target_ids, self.vocab = ids, ids.shape[0]

    def draft_only(self, ids: Tensor | None) -> None:
        """Says which of the target's tokens are drafted, [vocab] int64, None: all."""
        self.target_ids = None if ids is None else ids.to(self.target.norm.weight.device)

    def add_lm_head(self, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        """Gives it a head of its own, over so many tokens."""
        lm_head = Linear(self.width, self.ranks.share(rows).size, False, dtype, device, self.config.vocab_format)
        self.lm_head, self.vocab = vocab_parallel(lm_head, self.ranks, rows), rows

    def draft_ids(self) -> Tensor | None:
        ids = self.target_ids
        if ids is None:
            return None
        numbers = torch.full((self.target.config.vocab_size,), -1, dtype=torch.int64, device=ids.device)
        return numbers.index_copy_(0, ids, torch.arange(len(ids), device=ids.device))

    def packed_tensors(self) -> list[Tensor]:
        """Returns what is made of a head besides parameters and packed layers: which tokens it drafts."""
        return [] if self.target_ids is None else [self.target_ids]

    def output_layer(self) -> tuple[RMSNorm | None, Linear]:
        """Returns what `logits` is made of: perhaps a norm, and its own head, the target's, or rows that were chosen of
        it."""
        heads = self.lm_head, self.head_rows, self.target.lm_head
        return None, next(head for head in heads if head is not None)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [M, hidden] of `run` -> [M, vocab]"""
        norm, lm_head = self.output_layer()
        return for_rows(len(hidden), lm_head, self.quantized_lm_head)(hidden if norm is None else norm(hidden))

    def readout(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [M, hidden] of `run` -> (state [M, hidden], weight [vocab, hidden]), whose product is `logits`. For
        training, which need not keep the logits. What a packed target shares comes as a copy."""
        norm, lm_head = self.output_layer()
        return hidden if norm is None else norm(hidden), lm_head.dense_weight()

    def names(self) -> dict[str, ParamSlice]:
        """Name in a published checkpoint -> slice, complete for this head; of this class those of `lm_head`."""
        if self.lm_head is None:
            return {}
        share = self.ranks.share(self.vocab)
        return named(self.config.vocab_format, "lm_head", "lm_head", 0, share.size, Cut(0, share))

    def stored_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, tensor) as a published checkpoint stores them, with maps between the vocabularies where they
        differ; parameters come as views."""
        yield from stored_tensors(self, self.names())
        yield from vocabulary_maps(self.target_ids, self.config.vocab_size)

    def pack(self, ops: LayerOps) -> None:
        """Lets every layer prepare for inference, weights and kernels; the head is not trainable afterwards.

        ops: of the device that the parameters are on.
        """
        self.ops = ops
        pack_layers(self, ops, PackMode(draft_8bit=True))  # the target decides, whatever is drafted
        norm, lm_head = self.output_layer()
        if lm_head.out_features == self.vocab and ops.head_top_k is not None:
            weight = None if norm is None else (norm.weight, norm.eps)
            self.top_k = ops.head_top_k(lm_head.op.first_gemm, lm_head.bias, weight, self.target_ids)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [M] -> cos, sin [M, 1, head_dim]"""
        return self.rope(positions, self.ops)


def linear_of(weight: Tensor, bias: Tensor | None, form: WeightFormat) -> Linear:
    """Returns a new layer with copies of a weight [rows, columns] and a bias [rows]."""
    made = Linear(weight.shape[1], len(weight), bias is not None, weight.dtype, weight.device, form)
    if not made.op.keep(ParamSlice("weight", 0, len(weight)), weight):
        made.weight.data.copy_(weight)
    if bias is not None and made.bias is not None:
        made.bias.data.copy_(bias)
    return made


def vocabulary_maps(target_ids: Tensor | None, vocab: int) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) of the maps between the vocabularies, as published heads store them: `d2t` the offset of
    each draft token's id, and `t2d` whether a target's token is one of them. None of a head that drafts all of them."""
    if target_ids is None:
        return
    yield "d2t", target_ids - torch.arange(target_ids.shape[0], device=target_ids.device)
    kept = torch.zeros(vocab, dtype=torch.bool, device=target_ids.device)
    yield "t2d", kept.index_fill(0, target_ids, True)


class Shown:
    """A target's `Embedding` with rows of images in place of some of its own."""

    def __init__(self, target: DecoderModel, images: ImageRows) -> None:
        self._target, self._images = target, images

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [M] -> [M, hidden]"""
        x = self._target.embed(ids)
        self._images.put(x, 1 / self._target.embed_scale)
        return x

    def source(self, ids: Tensor) -> tuple[None, Tensor]:
        """Does as `Embedding.source`."""
        return None, self(ids)


class DraftLM(DraftHead):
    """Any `DecoderModel` with the target's token ids."""

    def __init__(self, model: DecoderModel, vocab: int) -> None:
        """vocab: token ids that both models have; families pad their vocabularies to different sizes."""
        self.model, self.vocab, self.kv_layers = model, vocab, model.kv_layers

    def set_max_positions(self, positions: int) -> None:
        self.model.set_max_positions(positions)

    def run(self, ids: Tensor, positions: Tensor, features: Tensor | None, level: int, attend: Attend) -> Tensor:
        # The target may pad its vocabulary further than this model; what stands for such an id does not matter much.
        return self.model(ids.clamp(max=self.model.config.vocab_size - 1), positions, attend)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)[:, : self.vocab]


# ---- the lm_head in fewer bits ---------------------------------------------------------------------------------------

# Most rows that are multiplied with the copy, as far as it was measured: with 64 int8 takes 0.60 to 0.66 of bfloat16's
# time on an H100, 4 bits 0.54 to 0.60 (docs/dev/quantised_kernels.md).
MOST_ROWS = 64
# Logits of a row that are computed again with the lm_head as it is, where 4 bits have found them: those with 8 bits are
# right as they are. Acceptance with so many: docs/dev/quantised_kernels.md; other numbers were not tried.
RESCORED = {"w4a16": 16}
_LARGE = 1 << 26  # values of an lm_head of which there is a copy by default: in 16 bits they are read in 30 to 50 us
_STEP = 1 << 14  # rows that are quantised and packed at a time: what lies between takes some times their bytes


def is_large(rows: int, columns: int) -> bool:
    """Returns whether an lm_head of this shape takes so long to read that a copy is worth its memory."""
    return rows * columns >= _LARGE


def for_rows(rows: int, lm_head: Linear, quantized: Linear | None) -> Linear:
    """Returns which of the two so many rows are multiplied with."""
    return lm_head if quantized is None or rows > MOST_ROWS else quantized


class Rescored(LinearOp):
    """A packed lm_head in fewer bits, whose largest logits are those of the lm_head as it is."""

    def __init__(self, few: Linear, whole: Linear, count: int, ops: LayerOps) -> None:
        """few: the copy; whole: the lm_head, without a bias; count: of logits."""
        super().__init__(few)
        self._few, self._whole, self._count, self._ops = few.op, whole, count, ops

    @property
    def sizes(self) -> Counter[str]:
        return self._few.sizes

    def dense_weight(self) -> Tensor:
        return self._few.dense_weight()

    def copy_from(self, other: LinearOp) -> None:
        assert isinstance(other, Rescored)
        self._few.copy_from(other._few)

    @property
    def can_copy(self) -> bool:
        return self._few.can_copy

    def __call__(
        self, x: Tensor, bias: Tensor | None, residual: Tensor | None = None, overwrite: bool = False
    ) -> Tensor:
        logits = self._few(x, bias, residual, overwrite)  # [M, vocab]
        ids = self._ops.largest(logits, self._count)  # [M, count]
        return logits.scatter_(1, ids, self._whole.exact_logits(x, ids).to(logits.dtype))


@torch.no_grad()
def quantized_copy(lm_head: Linear, scheme: str, ops: LayerOps) -> Linear | None:
    """Returns a packed layer with the outputs of another, which stays as it is, in a scheme of `ops.gemm.groups`;
    over ranks as that one is. Where the scheme is in `RESCORED`, the largest are those of the other. None where the
    kernels do not take its weight, or it is in fewer bits already."""
    if lm_head.op.sizes:
        return None
    weight, form = lm_head.dense_weight().detach(), GroupFormat(scheme, ops)
    made = Linear(lm_head.in_features, lm_head.out_features, False, weight.dtype, torch.device("meta"), form)
    for start in range(0, len(weight), _STEP):
        part = weight[start : start + _STEP]
        if not made.op.keep(ParamSlice("weight", start, len(part)), part):
            return None
    made.bias, made.wrap_packed = lm_head.bias, lm_head.wrap_packed
    made.pack(ops)
    if scheme in RESCORED and lm_head.bias is None:
        made.op = Rescored(made, lm_head, min(RESCORED[scheme], len(weight)), ops)
    return made
