"""Puts an engine together from options: model, drafter, KV pool, device tables, scheduler."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from draftwing.config.options import Options
from draftwing.config.trees import carried_shape
from draftwing.core import PLAIN, PREDICTED, TreeShape
from draftwing.engine.compile import compile_forwards
from draftwing.engine.device import Device, pick_device
from draftwing.engine.executor import Executor
from draftwing.engine.graphs.cuda import Key
from draftwing.engine.lag import ROOM as LAG_ROOM
from draftwing.engine.precision import Precision, pick_precision
from draftwing.engine.row_table import RowTable
from draftwing.engine.startup.memory import Rig, row_length, size_pool
from draftwing.engine.startup.precompile import Job, precompile
from draftwing.engine.startup.price_file import PriceFile, price_file
from draftwing.engine.startup.prices import GRAPH_SECONDS, measure_graphs, measure_steps
from draftwing.engine.startup.warm_up import try_prompt, warm_up
from draftwing.errors import ConfigError
from draftwing.kv.pool import FP8, KVPool, LayerSpec
from draftwing.models.decoder import DecoderModel
from draftwing.models.hub import resolve_model
from draftwing.models.loader import load_config, load_model
from draftwing.sched.policy import FixedShape, MostTokens, ShapePolicy
from draftwing.sched.prices import Prices
from draftwing.sched.scheduler import Scheduler, SchedulerConfig
from draftwing.spec.drafter import Draft, DraftContext, Drafter
from draftwing.spec.simulate import Simulation
from draftwing.spec.token_map import load_token_map
from draftwing.text.tokenizer import Tokenizer, load_tokenizer, vocabulary_difference

log = logging.getLogger("draftwing")

SLOTS_AHEAD = 32  # see `SchedulerConfig.ahead`


@dataclass
class Parts:
    """What `Engine` drives. options: with all that follows from the device and the models."""

    options: Options
    executor: Executor
    sched: Scheduler
    model: DecoderModel
    dtype: torch.dtype
    context_length: int
    pool_tokens: int
    pool: KVPool
    prices: Prices | None = None  # of steps, where the engine chooses by them
    price_file: PriceFile | None = None

    def measure_prices(self, batches: Sequence[int], seconds: float) -> None:
        """Measures prices for so long, which is more than a start does, for these batch sizes. Nothing may run."""
        executor, prices, until = self.executor, self.prices, time.monotonic() + seconds
        if prices is None:
            return
        if prices.stepwise:
            sizes = {(shape, batch) for shape, batch, _, _ in prices.points()}
            keys = [Key(*size) for size in sizes if executor.graphs.key(*size) == size]
            measure_graphs(executor, self.pool, prices, keys, until)
        else:
            measure_steps(executor, self.pool, prices, until, batches)
        if executor.drafter is not None:
            executor.drafter.flush()

    def keep_prices(self) -> None:
        """Writes them down for the next start."""
        if self.prices is not None and self.price_file is not None:
            self.price_file.write(self.prices)


def build(options: Options, path: Path, tokenizer: Tokenizer | None = None) -> Parts:
    """Loads the models of resolved options. path: of the target; tokenizer: its own, to check a draft model's against.
    Raises ConfigError and CheckpointError."""
    device, config, drafter_spec = pick_device(options.device), load_config(path), options.drafter_spec
    draft_path = _draft_path(options)
    if drafter_spec.same_tokenizer and draft_path and tokenizer and not options.dummy:
        check_draft_tokenizer(options, draft_path, tokenizer)
    kind = device.device.type
    carried = carried_shape(draft_path or path, kind) if drafter_spec.heads else None
    options = options.for_engine(kind, device.total_memory(), config.architecture, carried)
    log_drafter(options)
    log.info("operations: %s", device.ops.title)
    if options.num_threads:
        device.set_threads(options.num_threads)
    if options.deterministic and not device.ops.batch_invariant:
        raise ConfigError(
            "--enable-deterministic-inference needs our own kernels for the GPU: install triton (they run from compute "
            "capability 8.0 on), and do not set the environment variable DRAFTWING_NATIVE to 0, or use --device cpu"
        )
    if options.deterministic and options.enable_torch_compile:
        raise ConfigError(
            "--enable-deterministic-inference and --enable-torch-compile exclude each other: compiled code sums in an "
            "order that depends on the batch. Leave one of them out"
        )
    precision = pick_precision(options, device, config.dtype)
    tokens = options.speculative_token_map
    token_ids = None if tokens is None else load_token_map(tokens, config.vocab_size)  # before anything large
    ahead = None
    capability = device.ops.compute_capability
    if capability is not None:
        ahead = precompile(Job(options, path, draft_path, token_ids, precision.dtype, precision.kv_dtype, capability))
    try:
        model = load_with_progress(path, precision, device, options.dummy, options.deterministic)
        drafter, policy = make_drafter(options, draft_path or path, token_ids, model, precision, device)
        if ahead is not None:
            ahead.wait()
    except BaseException:
        if ahead is not None:
            ahead.stop()
        raise
    file = None
    if drafter is not None and not options.speculative_fixed_shape:
        file = price_file(options, policy.menu, path, draft_path, precision, device)
    return assemble(options, model, precision, device, drafter, policy, file)


def assemble(
    options: Options,
    model: DecoderModel,
    precision: Precision,
    device: Device,
    drafter: Drafter | None,
    policy: ShapePolicy,
    file: PriceFile | None = None,
) -> Parts:
    """The engine of options `for_engine` around a loaded model. file: where prices of steps are kept."""
    config, rows, chunk = model.config, options.max_running_requests, options.chunked_prefill_size
    assert rows and chunk, "they have a value on every device"
    graph_size = graph_size_of(options)
    spans = {shape: shape.nodes if drafter is None else drafter.span(shape) for shape in policy.menu}
    max_span, max_commit = max(spans.values()), max(shape.max_commit for shape in policy.menu)

    layers = [LayerSpec(config.num_kv_heads, config.head_dim)] * config.num_layers
    draft_layers = list(drafter.kv_layers) if drafter is not None else []
    wanted = options.context_length or config.max_positions
    if wanted > config.max_positions:
        raise ConfigError(f"--context-length {wanted} exceeds the {config.max_positions} positions of the model")
    # A step in flight may have committed max_commit tokens that the host does not know of when the next is planned.
    room = max_commit + max_span + 1 + (LAG_ROOM if draft_layers else 0)  # past the context, in a row of the row table
    rig = Rig(model, drafter, [*layers, *draft_layers], policy.menu, precision.kv_dtype, device)
    pool_tokens = size_pool(options, rig, row_length(wanted + room), graph_size)
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
    length = row_length(context + room)
    kv_dtype = precision.kv_dtype
    scales = model.kv_scales.of(len(layers)) if kv_dtype == FP8 else ()
    pool = KVPool([*layers, *draft_layers], pool_tokens, kv_dtype, device.device, scales)
    if model.kv_scales and kv_dtype != FP8 and device.ops.narrows_pool:
        log.info("the checkpoint has scales for a KV pool in fp8: --kv-cache-dtype fp8_e4m3 holds twice the tokens")
    target_gb, draft_gb = (pool_tokens * KVPool.bytes_per_slot(part, kv_dtype) / 1e9 for part in (layers, draft_layers))
    log.info("KV pool: %d tokens, target %.2f GB, draft %.2f GB", pool_tokens, target_gb, draft_gb)
    log.info("max total tokens %d, context length %d, max running requests %d", pool_tokens, context, rows)

    model.set_max_positions(length)
    table = RowTable(rows, length, device)
    attn = device.ops.attention(pool, options.deterministic)
    if drafter is not None:
        drafter.attach(attn, len(layers), length)
    if not attn.capturable:
        graph_size = 0
    simulation = None
    if options.simulate_accept_length is not None:
        simulation = Simulation(options.simulate_accept_length, config.vocab_size)
    executor = Executor(model, drafter, table, attn, device, graph_size, simulation, max(chunk, 0))
    if options.enable_torch_compile:
        nodes = max(shape.nodes for shape in policy.menu)
        compile_forwards(model, getattr(drafter, "head", None), options.torch_compile_max_bs * nodes, device.ops)
    prices = Prices(policy.menu, graph_size > 0) if isinstance(policy, MostTokens) else None
    if prices is not None:
        prices = (file and file.read(policy.menu, prices.stepwise)) or prices
    known = prices is None or prices.complete
    if graph_size:
        capture(executor, pool, policy.menu, None if known else prices)
        if not options.drafter_spec.own:
            try_prompt(executor)
    elif not options.drafter_spec.own:  # a user's drafter sees requests alone
        warm_up(executor, pool, policy.menu, None if known else prices)
    if prices is not None and isinstance(policy, MostTokens):
        policy.prices = prices
        if not known and file is not None:
            file.write(prices)
    sched = Scheduler(
        SchedulerConfig(
            slots=pool_tokens,
            max_rows=rows,
            max_span=max_span,
            vocab=config.vocab_size,
            chunk_tokens=chunk if chunk > 0 else pool_tokens,
            lookahead=drafter.lookahead if drafter is not None else 0,
            tail=drafter.tail if drafter is not None else 0,
            radix=not options.disable_radix_cache,
            initial_confidence=drafter.initial_confidence if drafter is not None else 0,
            ahead=SLOTS_AHEAD,
            draws_alike=not device.ops.draws_by_row,
            lagging=frozenset(filter(drafter.lags, policy.menu)) if drafter is not None else frozenset(),
            credited=options.drafter_spec.credited,
        ),
        policy,
        spans,
    )
    return Parts(options, executor, sched, model, precision.dtype, context, pool_tokens, pool, prices, file)


def graph_size_of(options: Options) -> int:
    """The largest batch that graphs are captured of; of options for a device."""
    return 0 if options.disable_cuda_graph else options.cuda_graph_max_bs or 0


def capture(executor: Executor, pool: KVPool, menu: Sequence[TreeShape], prices: Prices | None) -> None:
    """Captures all graphs. prices: to measure, None where they are known."""
    start, free = time.monotonic(), executor.device.free_memory()
    menu = menu if executor.drafter is not None else (PLAIN,)  # what no drafter makes is special
    captured = executor.capture(menu)
    took, bytes_taken = time.monotonic() - start, free - executor.device.free_memory()
    log.info("captured %d CUDA graphs in %.1f s, %.2f GB", executor.captured, took, bytes_taken / 1e9)
    if prices is not None:
        for key, seconds in captured.items():
            prices.measured(key.shape, key.size, 0, seconds)
        measure_graphs(executor, pool, prices, captured, time.monotonic() + GRAPH_SECONDS)
        if executor.drafter is not None:
            executor.drafter.flush()


def make_drafter(
    options: Options, path: Path, token_ids: Tensor | None, target: DecoderModel, precision: Precision, device: Device
) -> tuple[Drafter | None, ShapePolicy]:
    """The drafter and shape policy that options `for_engine` ask for; path: of the draft model, or of the target where
    it drafts for itself."""
    if not options.drafts:
        return None, FixedShape(PREDICTED)  # without a predicted output every step is plain
    shape, rows = options.speculative_shape, options.max_running_requests
    assert rows is not None, "for_engine gives it a value"

    def load(path: Path) -> DecoderModel:
        return load_with_progress(path, precision, device, options.dummy)

    drafter: Drafter = options.drafter_spec.make(
        DraftContext(
            options, target, shape, rows + 1, precision.dtype, device.device, device.ops, path, token_ids, load,
            precision.head_weights,
        )
    )  # fmt: skip
    if options.drafter_spec.own and not drafter.kv_layers:
        check_draft(drafter, options.drafter, shape, device)
    if options.speculative_fixed_shape:
        return drafter, FixedShape(shape)
    menu = drafter.menu(shape)
    return drafter, MostTokens(menu, Prices(menu, False), not drafter.fixed_confidence, drafter.initial_confidence)


@torch.inference_mode()
def check_draft(drafter: Drafter, name: str, shape: TreeShape, device: Device) -> None:
    """Raises ConfigError where a user's drafter, which needs no pool, proposes another tree than it is asked for.
    Kernels would not notice."""
    table = RowTable(1, row_length(shape.nodes + 1), device)
    rows = torch.zeros(1, dtype=torch.int64, device=device.device)
    draft = drafter.propose(table, rows, shape, 1, rows[:0])
    if not isinstance(draft, Draft):
        raise ConfigError(f"{name}: propose must return a Draft; found {type(draft).__name__}")
    for part, tensor, dtype in zip(draft._fields[:3], draft[:3], (torch.int64, torch.int64, torch.bool), strict=True):
        if tensor.shape != (1, shape.nodes) or tensor.dtype != dtype:
            raise ConfigError(
                f"{name}: the drafts of {shape} for one row must have {part} of shape [1, {shape.nodes}] and type "
                f"{dtype}; found {list(tensor.shape)} and {tensor.dtype}"
            )


def _draft_path(options: Options) -> Path | None:
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
        return
    draft = options.speculative_draft_model_path
    log.info(
        "%s drafts%s, at most %d steps, topk %d, %d draft tokens; --speculative-algorithm none turns it off",
        options.drafter, f" with {draft}" if draft else "", *options.speculative_shape.tree,
    )  # fmt: skip


def load_with_progress(
    path: Path, precision: Precision, device: Device, dummy: bool = False, deterministic: bool = False
) -> DecoderModel:
    with tqdm(unit="B", unit_scale=True, desc="loading weights", file=sys.stderr, leave=False) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)
            if done >= total:
                bar.close()  # before anything is logged

        most = device.installed_memory()
        model = load_model(path, precision.dtype, device.device, progress, dummy, precision.weights, most)
    model.pack(device.ops, deterministic)
    return model
