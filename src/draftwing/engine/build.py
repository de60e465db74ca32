"""Puts an engine together from options: model, drafter, KV pool, device tables, scheduler."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from tqdm import tqdm

from draftwing.attn.native import pick_attention
from draftwing.config import Options
from draftwing.core import PLAIN
from draftwing.engine.device import Device, pick_device, pick_dtype
from draftwing.engine.executor import Executor
from draftwing.engine.slots import SlotTable
from draftwing.errors import ConfigError
from draftwing.kv.pool import KVPool, LayerSpec
from draftwing.models.decoder import DecoderModel
from draftwing.models.draft_config import AuxLayerIds
from draftwing.models.draft_loader import load_draft_head, load_mtp_head
from draftwing.models.feature_head import FeatureHead
from draftwing.models.hub import resolve_model
from draftwing.models.loader import load_config, load_model
from draftwing.sched.scheduler import Scheduler, SchedulerConfig
from draftwing.sched.shapes import ExpectedGain, FixedShape, ShapePolicy, shape_menu
from draftwing.spec.drafter import Drafter
from draftwing.spec.heads import DraftHead, DraftLM
from draftwing.spec.mtp_drafter import make_model_drafter
from draftwing.spec.ngram import NGramDrafter
from draftwing.spec.token_map import load_token_map

log = logging.getLogger("draftwing")

CPU_POOL_BYTES = 2 << 30
CUDA_RESERVE_BYTES = 1 << 30  # left for activations when the pool is sized from free memory


@dataclass
class Parts:
    """What `Engine` drives."""

    executor: Executor
    sched: Scheduler
    model: DecoderModel
    dtype: torch.dtype
    context_length: int
    pool_tokens: int


def build(options: Options, path: Path) -> Parts:
    device = pick_device(options.device)
    if options.num_threads and not device.is_cuda:
        torch.set_num_threads(options.num_threads)
    config = load_config(path)
    dtype = pick_dtype(options.dtype, device, config.dtype)
    draft_path, token_ids = find_draft(options, config.vocab_size)  # before anything large is loaded
    model = load_with_progress(path, dtype, device)
    drafter, policy = make_drafter(options, draft_path or path, token_ids, model, dtype, device)
    return assemble(options, model, dtype, device, drafter, policy)


def assemble(
    options: Options,
    model: DecoderModel,
    dtype: torch.dtype,
    device: Device,
    drafter: Drafter | None,
    policy: ShapePolicy,
) -> Parts:
    """The engine around a loaded model."""
    config = model.config
    rows = options.max_running_requests
    spans = {shape: shape.nodes if drafter is None else drafter.span(shape) for shape in policy.menu}
    max_span, max_commit = max(spans.values()), max(shape.max_commit for shape in policy.menu)

    layers = [LayerSpec(config.num_kv_heads, config.head_dim)] * config.num_layers
    draft_layers = list(drafter.kv_layers) if drafter is not None else []
    wanted = options.context_length or config.max_positions
    if wanted > config.max_positions:
        raise ConfigError(f"--context-length {wanted} exceeds the {config.max_positions} positions of the model")
    pool_tokens = size_pool(options, [*layers, *draft_layers], dtype, device)
    if not options.max_total_tokens:  # more could only ever cache prefixes
        pool_tokens = min(pool_tokens, 2 * rows * wanted)
    context = min(wanted, pool_tokens - max_span - max_commit)
    if context < wanted:
        log.warning("the KV pool of %d tokens limits the context to %d, not %d", pool_tokens, context, wanted)
    if context < 2:
        raise ConfigError(
            f"the KV pool holds {pool_tokens} tokens, and a step alone needs {max_span + max_commit}: "
            "raise --max-total-tokens or --mem-fraction-static, or lower --speculative-num-draft-tokens "
            "or --speculative-num-steps times --speculative-eagle-topk"
        )
    # A step in flight may have committed max_commit tokens that the host does not know of when the next is planned.
    length = context + max_commit + max_span + 1
    pool = KVPool([*layers, *draft_layers], pool_tokens, dtype, device.device)
    target_gb, draft_gb = (pool_tokens * KVPool.bytes_per_slot(part, dtype) / 1e9 for part in (layers, draft_layers))
    log.info("KV pool: %d tokens, target %.2f GB, draft %.2f GB", pool_tokens, target_gb, draft_gb)
    log.info("max total tokens %d, context length %d, max running requests %d", pool_tokens, context, rows)

    model.set_max_positions(length)
    slots = SlotTable(rows, length, device)
    attn = pick_attention(pool)
    if drafter is not None:
        drafter.attach(attn, len(layers), length)
    executor = Executor(model, drafter, slots, attn, device)
    sched = Scheduler(
        SchedulerConfig(
            slots=pool_tokens,
            max_rows=rows,
            max_span=max_span,
            chunk_tokens=options.chunked_prefill_size if options.chunked_prefill_size > 0 else pool_tokens,
            lookahead=drafter.lookahead if drafter is not None else 0,
            tail=drafter.tail if drafter is not None else 0,
            radix=not options.disable_radix_cache,
            first_hint=drafter.first_hint if drafter is not None else 0,
        ),
        policy,
        spans,
    )
    return Parts(executor, sched, model, dtype, context, pool_tokens)


def make_drafter(
    options: Options, path: Path, token_ids: Tensor | None, target: DecoderModel, dtype: torch.dtype, device: Device
) -> tuple[Drafter | None, ShapePolicy]:
    """The drafter and shape policy that resolved options ask for; path: of the draft model, or of the target where it
    drafts for itself."""
    shape = options.speculative_shape
    if options.speculative_algorithm == "none":
        return None, FixedShape(PLAIN)
    if options.speculative_algorithm != "NGRAM":
        head = load_head(options, path, token_ids, target, dtype, device)
        drafter = make_model_drafter(head, options.max_running_requests + 1, shape.topk, dtype, device.device)
        return drafter, FixedShape(shape)
    assert target.config.vocab_size < 2**22 - 1, "the n-gram memory packs token ids into 22 bits"
    ngram = NGramDrafter(
        min_window=options.speculative_ngram_min_match_window_size,
        max_window=options.speculative_ngram_max_match_window_size,
        min_breadth=options.speculative_ngram_min_bfs_breadth,
        max_breadth=options.speculative_ngram_max_bfs_breadth,
        branch_length=options.speculative_ngram_branch_length,
        capacity=options.speculative_ngram_capacity,
        rows=options.max_running_requests + 1,
        device=device.device,
    )
    return ngram, ExpectedGain(shape_menu(shape))


def find_draft(options: Options, vocab: int) -> tuple[Path | None, Tensor | None]:
    """Where the draft model is, and the tokens that may be drafted [n] int64; None where not given. vocab: the
    target's."""
    path = token_ids = None
    if options.speculative_draft_model_path is not None:
        path = resolve_model(
            options.speculative_draft_model_path, options.speculative_draft_model_revision,
            option="--speculative-draft-model-path",
        )  # fmt: skip
    if options.speculative_token_map is not None:
        if options.speculative_algorithm == "EAGLE3":
            log.warning("speculative_token_map is ignored: an EAGLE-3 head has its own draft vocabulary")
        elif options.speculative_algorithm in ("EAGLE", "NEXTN"):
            token_ids = load_token_map(options.speculative_token_map, vocab)
    return path, token_ids


def load_head(
    options: Options, path: Path, token_ids: Tensor | None, target: DecoderModel, dtype: torch.dtype, device: Device
) -> DraftHead:
    """The model that drafts for `target`."""
    if options.speculative_algorithm == "STANDALONE":
        model = load_with_progress(path, dtype, device)
        known, used = model.config.max_positions, options.context_length or target.config.max_positions
        if known < used:
            log.warning("the draft model knows %d positions and is run up to %d: it may draft worse there", known, used)
        return DraftLM(model, min(model.config.vocab_size, target.config.vocab_size))
    head: FeatureHead
    if options.speculative_draft_model_path is None:
        head = load_mtp_head(path, target, dtype, device.device, token_ids=token_ids)
    else:
        head = load_draft_head(
            path, target, options.speculative_algorithm, dtype, device.device, token_ids=token_ids,
            aux_layer_ids=cast(AuxLayerIds, options.speculative_aux_layer_ids), context_length=options.context_length,
        )  # fmt: skip
    head.pack()
    return head


def size_pool(options: Options, layers: list[LayerSpec], dtype: torch.dtype, device: Device) -> int:
    """Tokens that the KV pool holds."""
    if options.max_total_tokens:
        return options.max_total_tokens
    free = device.free_memory()
    if device.is_cuda:
        fraction = options.mem_fraction_static or 0.88
        # The fraction is of all memory, weights included, as users of such servers know it.
        budget = int(device.total_memory() * fraction) - (device.total_memory() - free) - CUDA_RESERVE_BYTES
    elif options.mem_fraction_static:
        budget = int(free * options.mem_fraction_static)
    else:
        budget = min(CPU_POOL_BYTES, free // 4)
    tokens = budget // KVPool.bytes_per_slot(layers, dtype)
    if tokens < 1:
        raise ConfigError(
            f"no memory is left for the KV pool ({free / 1e9:.2f} GB free): lower the model's size or dtype, "
            "raise --mem-fraction-static, or set --max-total-tokens"
        )
    return tokens


def load_with_progress(path: Path, dtype: torch.dtype, device: Device) -> DecoderModel:
    with tqdm(unit="B", unit_scale=True, desc="loading weights", file=sys.stderr, leave=False) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)
            if done >= total:
                bar.close()  # before anything is logged

        model = load_model(path, dtype, device.device, progress)
    model.pack()
    return model
