"""The drafter of an engine: where it comes from, which tokens it may draft, and its shape policy."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from draftwing.config.drafters import TOKEN_MAP, shipped_head
from draftwing.config.options import Options
from draftwing.core import PREDICTED, TreeShape
from draftwing.engine.devices.base import Device
from draftwing.engine.precision import Precision
from draftwing.engine.row_table import RowTable
from draftwing.engine.startup.checks import check_token_map
from draftwing.engine.startup.memory import row_length
from draftwing.engine.startup.weights import load_with_progress
from draftwing.errors import ConfigError
from draftwing.models.decoder import DecoderModel
from draftwing.models.hub import resolve_model
from draftwing.sched.policy.cost import StepCost
from draftwing.sched.policy.shape_policy import FixedShape, ShapePolicy
from draftwing.sched.policy.tree_policy import TreePolicy
from draftwing.spec.drafter import Draft, DraftContext, Drafter, DraftStep
from draftwing.spec.token_map import FIRST, LARGE, load_token_map
from draftwing.text.tokenizer import Tokenizer, load_tokenizer, vocabulary_difference

log = logging.getLogger("draftwing")


def make_drafter(
    options: Options, path: Path, token_ids: Tensor | None, target: DecoderModel, precision: Precision, device: Device
) -> tuple[Drafter | None, ShapePolicy]:
    """Returns the drafter and shape policy that options `for_engine` ask for; path: of the draft model, or of the
    target where it drafts for itself."""
    if not options.drafts:
        return None, FixedShape(PREDICTED)  # without a predicted output every step is plain
    shape, rows = options.speculative_shape, options.max_running_requests
    assert rows is not None, "for_engine gives it a value"

    def load(path: Path) -> DecoderModel:
        return load_with_progress(path, precision, device, options, target=False)

    def free_memory() -> int:
        device.trim()
        share = options.mem_fraction_static
        others = 0 if share is None else int(device.total_memory() * (1 - share))  # what this engine leaves alone
        return device.free_memory() - others

    drafter: Drafter = options.drafter_spec.make(
        DraftContext(
            options, target, shape, rows + 1, precision.dtype, device.device, device.ops, path, token_ids, load,
            precision.head_weights, precision.draft_lm_head, free_memory,
        )
    )  # fmt: skip
    if options.drafter_spec.own and not drafter.kv_layers:
        check_draft(drafter, options.drafter, shape, device)
    if options.speculative_fixed_shape:
        return drafter, FixedShape(shape)
    menu = drafter.menu(shape)
    return drafter, TreePolicy(menu, StepCost(menu, False), not drafter.fixed_confidence, drafter.initial_confidence)


@torch.inference_mode()
def check_draft(drafter: Drafter, name: str, shape: TreeShape, device: Device) -> None:
    """Raises ConfigError where a user's drafter, which needs no pool, proposes another tree than it is asked for.
    Kernels would not notice."""
    table = RowTable(1, row_length(shape.nodes + 1), device)
    rows = torch.zeros(1, dtype=torch.int64, device=device.device)
    draft = drafter.propose(DraftStep(table, rows, shape, 1, rows[:0]))
    if not isinstance(draft, Draft):
        raise ConfigError(f"{name}: propose must return a Draft; found {type(draft).__name__}")
    for part, tensor, dtype in zip(draft._fields[:3], draft[:3], (torch.int64, torch.int64, torch.bool), strict=True):
        if tensor.shape != (1, shape.nodes) or tensor.dtype != dtype:
            raise ConfigError(
                f"{name}: the drafts of {shape} for one row must have {part} of shape [1, {shape.nodes}] and type "
                f"{dtype}; found {list(tensor.shape)} and {tensor.dtype}"
            )


def token_map(
    options: Options, vocab: int, device: Device, tokenizer: Tokenizer | None
) -> tuple[Options, Tensor | None]:
    """Returns the tokens that may be drafted, None: all; and options that name them. On a CPU few of a large
    vocabulary."""
    spec, name = options.drafter_spec, options.speculative_token_map
    if name is None and vocab > LARGE and tokenizer is not None and not device.has_own_memory:
        name = str(FIRST) if spec.heads and TOKEN_MAP in spec.options else None
    if name is None:
        return options, None
    token_ids = load_token_map(name, vocab, () if tokenizer is None else tokenizer.added_ids)
    if token_ids is not None:
        check_token_map(options, token_ids)
    return replace(options, speculative_token_map=name), token_ids


def draft_path_of(options: Options) -> Path | None:
    if options.speculative_draft_model_path is None:
        return None
    return resolve_model(
        options.speculative_draft_model_path, options.speculative_draft_model_revision,
        option="--speculative-draft-model-path", weights=not options.dummy,
    )  # fmt: skip


def check_draft_tokenizer(options: Options, draft_path: Path, target: Tokenizer) -> None:
    """Raises ConfigError unless a small draft model has the target's token ids."""
    difference = vocabulary_difference(target, load_tokenizer(draft_path, None))
    if difference:
        raise ConfigError(
            f"{options.speculative_draft_model_path} cannot draft for {options.model}: their tokenizers give different "
            f"ids to the same tokens. {difference}"
        )


def log_drafter(options: Options) -> None:
    """Logs the drafter, its largest tree, and how to turn it off: it may be there by default."""
    if not options.drafts:
        log.info("speculative decoding: off; --speculative-algorithm turns it on")
        return
    draft = options.speculative_draft_model_path
    bundled = shipped_head(options.model, options.drafter_spec)
    own = " (prediction layers of the checkpoint)" if options.drafter_spec.heads else ""
    source = f" ({'bundled head' if draft == str(bundled) else draft})" if draft else own
    log.info(
        "speculative decoding: %s%s, at most %d steps, topk %d, %d draft tokens; --speculative-algorithm none turns it "
        "off",
        options.drafter.replace("EAGLE3", "EAGLE-3"), source, *options.speculative_shape.tree,
    )  # fmt: skip
