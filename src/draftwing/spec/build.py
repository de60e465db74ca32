"""Makes the drafters of `config.drafters`, each from a `DraftContext`."""

from __future__ import annotations

import logging
import math
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from draftwing.config.drafters import SECOND, DrafterSpec
from draftwing.config.trees import TreeShape, carried_window, max_nodes
from draftwing.errors import ConfigError
from draftwing.layers.linear import Linear
from draftwing.models.heads.assistant_loader import load_assistant
from draftwing.models.heads.base import MOST_ROWS, DraftHead, DraftLM, FeatureHead, is_large, quantized_copy
from draftwing.models.heads.block import BlockHead
from draftwing.models.heads.config import AuxLayerIds
from draftwing.models.heads.eagle import Eagle3Head
from draftwing.models.heads.loader import load_draft_head, load_mtp_head
from draftwing.models.heads.mtp import MTPHead
from draftwing.models.heads.swap import HeadSwap
from draftwing.models.heads.trees import tree_of
from draftwing.models.hub import resolve_model
from draftwing.ops.table import TorchOps
from draftwing.spec.assistant_drafter import AssistantDrafter
from draftwing.spec.block_drafter import BlockDrafter
from draftwing.spec.drafter import DraftContext, Drafter
from draftwing.spec.heads_drafter import HeadsDrafter
from draftwing.spec.lookup_drafter import NGramDrafter, SuffixDrafter
from draftwing.spec.model_drafter import HeadDrafter, ModelDrafter
from draftwing.spec.mtp_drafter import MTPDrafter
from draftwing.spec.pair_drafter import PairDrafter
from draftwing.spec.parallel_drafter import ParallelDrafter
from draftwing.spec.token_map import check_topk

log = logging.getLogger("draftwing")

COPY_ROOM = 5  # times an lm_head's bytes that must be free for a copy, of which 4 bits take a twentieth


def ngram(context: DraftContext) -> NGramDrafter:
    """Makes a drafter that copies from what was seen."""
    options = context.options
    _check_vocabulary(context, 2**22 - 2)
    return NGramDrafter(
        context.rows,
        context.ops,
        min_window=options.speculative_ngram_min_match_window_size,
        max_window=options.speculative_ngram_max_match_window_size,
        min_breadth=options.speculative_ngram_min_bfs_breadth,
        max_breadth=options.speculative_ngram_max_bfs_breadth,
        branch_length=options.speculative_ngram_branch_length,
        capacity=options.speculative_ngram_capacity,
        image_token=context.target.config.image_token,
    )


def suffix(context: DraftContext) -> SuffixDrafter:
    """Makes a drafter of what most often followed."""
    options = context.options
    _check_vocabulary(context, 2**22)
    return SuffixDrafter(
        context.rows,
        context.ops,
        context.shape,
        max_context=options.speculative_suffix_max_depth,
        min_prob=options.speculative_suffix_min_prob,
        capacity=options.speculative_suffix_capacity,
        secret=context.target.ranks.first(secrets.randbits(63)),
        image_token=context.target.config.image_token,
    )


def language_model(context: DraftContext) -> HeadDrafter:
    """Makes the drafter of a small language model."""
    model, target = context.load_model(context.draft_path), context.target.config
    known, used = model.config.max_positions, context.options.context_length or target.max_positions
    if known < used:
        log.warning("the draft model knows %d positions and is run up to %d: it may draft worse there", known, used)
    return _drafter(context, DraftLM(model, min(model.config.vocab_size, target.vocab_size)))


def draft_head(context: DraftContext) -> HeadDrafter:
    """Makes the drafter of a head: the one that is given, or the target's own prediction layers."""
    head = _packed_head(context, None)
    head.quantized_lm_head = copy_for_drafts(context, head.output_layer()[1])
    drafter = _drafter(context, head)
    drafter.swap = HeadSwap(head, lambda folder: _like(head, _packed_head(context, folder), context))
    return drafter


def _like(first: FeatureHead, other: FeatureHead, context: DraftContext) -> FeatureHead:
    """Returns the other packed head, with its lm_head in fewer bits, too, where the first has it so. What both share is
    there once."""
    if first.quantized_lm_head is not None and context.draft_lm_head is not None:
        own = other.output_layer()[1]
        shared = own is first.output_layer()[1]
        other.quantized_lm_head = first.quantized_lm_head if shared else _copied(context, own, context.draft_lm_head)
    return other


def copy_for_drafts(context: DraftContext, lm_head: Linear) -> Linear | None:
    """Returns a copy of a packed lm_head for drafts of few rows, where that is asked for, or by default it is large and
    there is room; on all ranks or on none, for they draft together. Says so."""
    scheme, shape = context.draft_lm_head, (lm_head.out_features, lm_head.in_features)
    if scheme is None:
        return None
    ranks, by_default = context.target.ranks, context.options.speculative_lm_head_quantization == "auto"
    has_room = is_large(*shape) and COPY_ROOM * 2 * math.prod(shape) <= context.free_memory()
    if by_default and not ranks.least(int(has_room)):
        return None
    try:
        copy = _copied(context, lm_head, scheme)
    except ConfigError as error:
        if not by_default:
            raise
        log.info("drafts multiply with the lm_head as it is: %s", error.__cause__)  # other ranks wait for this one
        copy = None
    if not ranks.least(int(copy is not None)):
        copy = None
    if copy is not None:
        log.info(
            "drafts of up to %d rows multiply with a copy of the lm_head in %s, %.2f GB; "
            "--speculative-lm-head-quantization none leaves it out",
            MOST_ROWS, scheme, copy.op.sizes.total() / 1e9,
        )  # fmt: skip
    elif not by_default:
        log.warning("--speculative-lm-head-quantization %s has no effect on an lm_head of this kind", scheme)
    return copy


def _copied(context: DraftContext, lm_head: Linear, scheme: str) -> Linear | None:
    """Returns what `quantized_copy` does. Raises ConfigError where the device has no room for it."""
    try:
        return quantized_copy(lm_head, scheme, context.ops)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"--speculative-lm-head-quantization: a copy in {scheme} of the lm_head, {lm_head.out_features:,} x "
            f"{lm_head.in_features:,}, does not fit beside the weights: choose none"
        ) from error


def _packed_head(context: DraftContext, folder: Path | None) -> FeatureHead:
    """folder: None for the head that the options name, or the target's own."""
    options = context.options
    swaps = options.learn is not None  # prediction layers as the model's files have them could not be replaced
    head: FeatureHead
    if folder is None and options.speculative_draft_model_path is None:
        head = load_mtp_head(
            context.draft_path, context.target, context.dtype, context.device, token_ids=context.token_ids,
            dummy=options.dummy, weight_format=context.head_weights, as_stored=not swaps,
        )  # fmt: skip
    else:
        head = load_draft_head(
            folder or context.draft_path, context.target, options.drafter, context.dtype, context.device,
            token_ids=context.token_ids, aux_layer_ids=cast(AuxLayerIds, options.speculative_aux_layer_ids),
            context_length=options.context_length, dummy=options.dummy, weight_format=context.head_weights,
            as_stored=not swaps,
        )  # fmt: skip
    # Of the first head, also for what takes its place.
    asked = options.speculative_draft_window_size
    window = carried_window(context.draft_path) if asked is None else asked
    if window:
        head.see_at_most(window)
        log.info("the draft's own attention sees the last %d tokens", window)
    head.pack(context.ops)
    return head


def assistant(context: DraftContext) -> AssistantDrafter:
    """Makes a drafter whose model reads the target's keys and values."""
    head = load_assistant(
        context.draft_path, context.target, context.dtype, context.device, context.options.dummy, context.head_weights
    )
    head.pack(context.ops)
    if head.clusters is None:
        head.quantized_lm_head = copy_for_drafts(context, head.lm_head)
    check_topk(context.shape.topk, head.vocab, str(context.draft_path))
    return AssistantDrafter(head, context.rows, context.shape.topk, context.dtype, context.ops)


def together(context: DraftContext) -> Drafter:
    """Makes drafters that draft one tree: one or two with a model, perhaps a lookup."""
    spec = context.options.drafter_spec
    models, lookup = [part for part in spec.parts if part.draft_model], spec.lookup
    model: Any = models[0].make(context)
    if len(models) == 2:
        second = _of_second(context, models[1])
        model = HeadsDrafter(model, _shape_of(model, context.shape), models[1].make(second), second.shape)
    if lookup is None:
        return cast(Drafter, model)
    return PairDrafter(model, lookup.make(replace(context, shape=lookup.tree)), context.shape, lookup.tree)


def _of_second(context: DraftContext, part: DrafterSpec) -> DraftContext:
    """Returns what there is to know when the second head is made: of the target's own layers where it has no folder."""
    options = context.options
    name = options.speculative_second_draft_model_path
    if name is None and part.draft_model == "required":
        raise ConfigError(f"speculative_algorithm {options.drafter} needs {SECOND}, the folder of the {part.name} head")
    path = resolve_model(options.model, options.revision) if name is None else resolve_model(name, None)
    own = None if name is None else str(path)
    options = replace(options, speculative_algorithm=part.name, speculative_draft_model_path=own)
    shape = None
    if part.heads:
        shape = tree_of(path, context.device.type, context.shape, name is not None, options.dummy)
    return replace(context, options=options, draft_path=path, shape=shape or context.shape)


def _shape_of(drafter: HeadDrafter, shape: TreeShape) -> TreeShape:
    """Returns the largest tree of a drafter: none deeper than its block."""
    head = drafter.head
    depth = min(shape.depth, head.config_of_block.steps) if isinstance(head, BlockHead) else shape.depth
    return TreeShape(depth, shape.topk, min(shape.nodes, max_nodes(depth, shape.topk)))


def _check_vocabulary(context: DraftContext, size: int) -> None:
    """Raises ConfigError for a target with more tokens than a lookup packs into 22 bits each."""
    found = context.target.config.vocab_size
    if found > size:
        drafter = context.options.drafter
        raise ConfigError(f"{drafter} is for vocabularies of at most {size} tokens; the target has {found}")


def _drafter(context: DraftContext, head: DraftHead) -> HeadDrafter:
    steps = head.config_of_block.steps if isinstance(head, BlockHead) else context.shape.depth
    if context.shape.depth > steps:
        raise ConfigError(
            f"--speculative-num-steps: expected at most {steps}, which is what a block of {context.draft_path} "
            f"predicts; found {context.shape.depth}"
        )
    check_topk(context.shape.topk, head.vocab, str(context.draft_path))
    return make_model_drafter(head, context.rows, context.shape.topk, context.dtype, context.ops)


def make_model_drafter(head: DraftHead, rows: int, topk: int, dtype: torch.dtype, ops: TorchOps) -> HeadDrafter:
    """Returns the drafter for any head; arguments as for `ModelDrafter`."""
    if isinstance(head, BlockHead):
        return BlockDrafter(head, rows, topk, ops)
    if isinstance(head, Eagle3Head) and head.eagle.mask is not None:
        return ParallelDrafter(head, rows, topk, dtype, ops)
    if head.lookahead <= ModelDrafter.max_lookahead:
        return ModelDrafter(head, rows, topk, dtype, ops)
    assert isinstance(head, MTPHead), "only several MTP layers look further ahead than one token"
    return MTPDrafter(head, rows, topk, dtype, ops)
