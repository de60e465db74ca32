"""Makes the drafters of `config.drafters`, each from a `DraftContext`."""

from __future__ import annotations

import logging
import secrets
from dataclasses import replace
from pathlib import Path
from typing import cast

from draftwing.errors import ConfigError
from draftwing.models.heads.assistant_loader import load_assistant
from draftwing.models.heads.base import DraftHead, DraftLM, FeatureHead
from draftwing.models.heads.block import BlockHead
from draftwing.models.heads.config import AuxLayerIds
from draftwing.models.heads.loader import load_draft_head, load_mtp_head
from draftwing.models.heads.swap import HeadSwap
from draftwing.spec.assistant_drafter import AssistantDrafter
from draftwing.spec.block_drafter import BlockDrafter
from draftwing.spec.drafter import DraftContext
from draftwing.spec.lookup_drafter import NGramDrafter, SuffixDrafter
from draftwing.spec.model_drafter import ModelDrafter
from draftwing.spec.mtp_drafter import make_model_drafter
from draftwing.spec.pair_drafter import PairDrafter
from draftwing.spec.token_map import check_topk

log = logging.getLogger("draftwing")


def ngram(context: DraftContext) -> NGramDrafter:
    """Makes a drafter that copies from what was seen."""
    options = context.options
    _check_vocabulary(context, 2**22 - 2)
    return NGramDrafter(
        min_window=options.speculative_ngram_min_match_window_size,
        max_window=options.speculative_ngram_max_match_window_size,
        min_breadth=options.speculative_ngram_min_bfs_breadth,
        max_breadth=options.speculative_ngram_max_bfs_breadth,
        branch_length=options.speculative_ngram_branch_length,
        capacity=options.speculative_ngram_capacity,
        rows=context.rows,
        ops=context.ops,
    )


def suffix(context: DraftContext) -> SuffixDrafter:
    """Makes a drafter of what most often followed."""
    options = context.options
    _check_vocabulary(context, 2**22)
    return SuffixDrafter(
        rows=context.rows,
        ops=context.ops,
        shape=context.shape,
        max_context=options.speculative_suffix_max_depth,
        min_prob=options.speculative_suffix_min_prob,
        capacity=options.speculative_suffix_capacity,
        secret=context.target.ranks.first(secrets.randbits(63)),
    )


def language_model(context: DraftContext) -> ModelDrafter | BlockDrafter:
    """Makes the drafter of a small language model."""
    model, target = context.load_model(context.draft_path), context.target.config
    known, used = model.config.max_positions, context.options.context_length or target.max_positions
    if known < used:
        log.warning("the draft model knows %d positions and is run up to %d: it may draft worse there", known, used)
    return _drafter(context, DraftLM(model, min(model.config.vocab_size, target.vocab_size)))


def draft_head(context: DraftContext) -> ModelDrafter | BlockDrafter:
    """Makes the drafter of a head: the one that is given, or the target's own prediction layers."""
    head = _packed_head(context, None)
    drafter = _drafter(context, head)
    if isinstance(drafter, ModelDrafter):
        drafter.swap = HeadSwap(head, lambda folder: _packed_head(context, folder))
    return drafter


def _packed_head(context: DraftContext, folder: Path | None) -> FeatureHead:
    """folder: None for the head that the options name, or the target's own."""
    options = context.options
    head: FeatureHead
    if folder is None and options.speculative_draft_model_path is None:
        head = load_mtp_head(
            context.draft_path, context.target, context.dtype, context.device, token_ids=context.token_ids,
            dummy=options.dummy, weight_format=context.head_weights,
        )  # fmt: skip
    else:
        head = load_draft_head(
            folder or context.draft_path, context.target, options.drafter, context.dtype, context.device,
            token_ids=context.token_ids, aux_layer_ids=cast(AuxLayerIds, options.speculative_aux_layer_ids),
            context_length=options.context_length, dummy=options.dummy, weight_format=context.head_weights,
        )  # fmt: skip
    head.pack(context.ops)
    return head


def assistant(context: DraftContext) -> AssistantDrafter:
    """Makes a drafter whose model reads the target's keys and values."""
    head = load_assistant(
        context.draft_path, context.target, context.dtype, context.device, context.options.dummy, context.head_weights
    )
    head.pack(context.ops)
    check_topk(context.shape.topk, head.vocab, str(context.draft_path))
    return AssistantDrafter(head, context.rows, context.shape.topk, context.dtype, context.ops)


def pair(context: DraftContext) -> PairDrafter:
    """Makes a drafter with a model and a lookup, one tree."""
    model, lookup = context.options.drafter_spec.parts
    return PairDrafter(
        model.make(context), lookup.make(replace(context, shape=lookup.tree)), grown=context.shape, copied=lookup.tree
    )


def _check_vocabulary(context: DraftContext, size: int) -> None:
    """Raises ConfigError for a target with more tokens than a lookup packs into 22 bits each."""
    found = context.target.config.vocab_size
    if found > size:
        drafter = context.options.drafter
        raise ConfigError(f"{drafter} is for vocabularies of at most {size} tokens; the target has {found}")


def _drafter(context: DraftContext, head: DraftHead | BlockHead) -> ModelDrafter | BlockDrafter:
    steps = head.config_of_block.steps if isinstance(head, BlockHead) else context.shape.depth
    if context.shape.depth > steps:
        raise ConfigError(
            f"--speculative-num-steps: expected at most {steps}, which is what a block of {context.draft_path} "
            f"predicts; found {context.shape.depth}"
        )
    check_topk(context.shape.topk, head.vocab, str(context.draft_path))
    return make_model_drafter(head, context.rows, context.shape.topk, context.dtype, context.ops)
