"""How many tokens the KV pool holds: from free memory, and on CUDA from what steps of this engine really take."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from draftwing.config.options import Options
from draftwing.config.trees import PLAIN, TreeShape
from draftwing.core import MAX_BACKLOG, Admission, Chunk, DraftDeferral, DraftExtend, Plan
from draftwing.engine import image_features, tower_graphs
from draftwing.engine.devices.base import Device
from draftwing.engine.draft_kv_backlog import ROOM as LAG_ROOM
from draftwing.engine.draft_kv_backlog import DraftKVBacklog
from draftwing.engine.executor import Executor
from draftwing.engine.graphs import MAX_NODES, batch_sizes, graph_keys
from draftwing.engine.prefill_graphs import Sizes, kept_bytes, prefill_sizes
from draftwing.engine.row_table import RowTable
from draftwing.errors import ConfigError
from draftwing.kv.pool import KVPool, RowStates, SlotSpec, delta_specs, record_bytes, state_bytes
from draftwing.machine import resident_memory
from draftwing.models.config import ModelConfig
from draftwing.models.decoder import DecoderModel
from draftwing.requests.request import MAX_PREDICTED, GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.sampling.edits import EditTable
from draftwing.sched.state_slots import GRAIN, LEAST_SLOTS, ROW_SLOTS
from draftwing.spec.drafter import Drafter
from draftwing.spec.prediction import PredictedOutput

log = logging.getLogger("draftwing")

CPU_POOL_BYTES = 2 << 30  # of the pool and states on a CPU by default; a quarter of what is free at most
# Of the driver, for what is captured: a layer of the target's forward, and a stage without it. With driver 580 on an
# H100 a layer took 30 KB, beside prompts 48, and a stage 0.06 to 0.23 MB (docs/dev/start.md); others may take more.
LAYER_BYTES = 64 << 10
STAGE_BYTES = 512 << 10
FLYING = 128  # the part of CUDA memory that copies to host memory may take at once, and those from there (`host_level`)
SLACK = 0.02  # share of CUDA memory that is left alone: fragments, other processes' ups and downs
NOTED_BYTES = 64  # about what lists of a pool's tokens take of each, where no layer keeps anything of it
TRIAL_TOKENS = 8192  # prompt tokens of a trial step where the user sets no limit


class Rig(NamedTuple):
    """What steps are made of, before there is a pool."""

    model: DecoderModel
    drafter: Drafter | None
    menu: tuple[TreeShape, ...]
    kv_dtype: torch.dtype
    device: Device

    @property
    def draft_layers(self) -> list[SlotSpec]:
        return [] if self.drafter is None else list(self.drafter.kv_layers)

    @property
    def layers(self) -> list[SlotSpec]:
        """Returns what the pool holds: the target's layers, and the drafter's."""
        return [*self.model.kv_layers, *self.draft_layers]

    @property
    def nodes(self) -> int:
        """Returns the number of nodes of the largest tree."""
        return max(shape.nodes for shape in self.menu)

    def states(self, slots: int, rows: int) -> RowStates | None:
        """Returns the states of recurrent layers, None where there are none."""
        dtype, device, lazy = self.model.dtype, self.device.device, self.device.ops.lazy_states
        return RowStates.of(self.layers, slots, rows, self.nodes, dtype, device, lazy)

    @property
    def first_draft_layer(self) -> int:
        """Returns the pool layer of the drafter's first layer."""
        return len(self.model.kv_layers)


def row_length(entries: int) -> int:
    """Returns the length of a row table's rows that have room for so many entries. Always a multiple of 16: Triton
    compiles a kernel once more for strides that are none."""
    return -(-entries // 16) * 16


class PoolSize(NamedTuple):
    """tokens: that the KV pool holds.  states: slots for states of recurrent layers, 0 without such layers."""

    tokens: int
    states: int


def size_pool(options: Options, rig: Rig, length: int, graph_size: int) -> PoolSize:
    """Decides how large the pool is. length: of a row of the row table. Raises ConfigError where there is no room."""
    kept = KVPool.bytes_per_slot(rig.layers, rig.kv_dtype) + hidden_bytes(options, rig)
    slot_bytes = kept or NOTED_BYTES
    fraction = options.state_memory_fraction if delta_specs(rig.layers) else 0.0
    if options.max_total_tokens and kept:
        tokens = options.max_total_tokens
        budget = int(tokens * slot_bytes * fraction / (1 - fraction))
        return PoolSize(tokens, state_slots(options, rig, budget, tokens))
    budget = pool_budget(options, rig, length, graph_size, slot_bytes)
    dtype = rig.model.dtype
    # CUDA has room for those of all rows already. On a CPU memory is taken as rows are first used.
    records = 0 if rig.device.has_own_memory else record_bytes(rig.layers, 0, rig.nodes, dtype)
    if not kept:  # states have what the lists of tokens leave
        assert options.max_running_requests
        tokens = options.max_total_tokens or min(2 * options.max_running_requests * length, budget // 16 // slot_bytes)
        if tokens * slot_bytes >= budget:
            raise ConfigError(
                f"--max-total-tokens {tokens}: lists of so many take {tokens * slot_bytes / 1e9:.2f} GB of "
                f"{budget / 1e9:.2f} for these and for states: lower it, or raise --mem-fraction-static"
            )
        return PoolSize(tokens, state_slots(options, rig, budget - tokens * slot_bytes, tokens, records))
    states = state_slots(options, rig, int(budget * fraction), budget // slot_bytes, records)
    taken = states * state_bytes(rig.layers, dtype) + (rows_of(options, states) + 1) * records
    return PoolSize((budget - taken) // slot_bytes, states)


def state_slots(options: Options, rig: Rig, budget: int, tokens: int, records: int = 0) -> int:
    """Returns how many states have room in so many bytes, beside a KV pool of so many tokens: no more than could be
    used. records: bytes of those of one row, where they are of the budget. Raises ConfigError where one request alone
    has not got what it needs."""
    each, rows = state_bytes(rig.layers, rig.model.dtype), options.max_running_requests
    if not each:
        return 0
    assert rows
    budget -= records  # of the dummy row
    running = min(max(budget, 0) // (ROW_SLOTS * each + records), rows)
    slots = min(max(budget - running * records, 0) // each, ROW_SLOTS * rows + tokens // GRAIN)
    if running < rows:
        slots = min(slots, ROW_SLOTS * running + 1)
    if slots < LEAST_SLOTS:
        raise ConfigError(
            f"{budget / 1e9:.2f} GB for states of recurrent layers have room for {slots} of {each / 1e6:.1f} MB, "
            f"expected {LEAST_SLOTS} at least: raise --state-memory-fraction, --mem-fraction-static or "
            "--max-total-tokens"
        )
    return slots


def rows_of(options: Options, states: int) -> int:
    """Returns how many requests can run at once; states: slots for states, 0 of a model without recurrent layers."""
    rows = options.max_running_requests
    assert rows
    return min(rows, states // ROW_SLOTS) if states else rows


def pool_budget(options: Options, rig: Rig, length: int, graph_size: int, slot_bytes: int) -> int:
    """Returns bytes of the KV pool and of states."""
    if rig.device.has_own_memory:
        budget = cuda_budget(options, rig, length, graph_size)
    else:
        free = rig.device.free_memory()
        budget = host_pool_bytes(options, free) // rig.model.ranks.size  # who share the memory
        if budget < slot_bytes:
            raise ConfigError(
                f"no memory is left for the KV pool ({free / 1e9:.2f} GB free): lower the model's size or dtype, "
                "raise --mem-fraction-static, or set --max-total-tokens"
            )
    return budget


def host_pool_bytes(options: Options, free: int) -> int:
    """Returns bytes of the KV pool and of states of all ranks, where the host computes and so much is free."""
    fraction = options.mem_fraction_static
    return int(free * fraction) if fraction else min(CPU_POOL_BYTES, free // 4)


def log_forecast(options: Options, device: Device, config: ModelConfig, kv_dtype: torch.dtype, files: int) -> None:
    """Logs what a start will take of the host's memory, where the host computes. files: bytes of the weights' files,
    a draft model's included."""
    if device.has_own_memory:
        return
    free = device.free_memory()
    kept = [spec for layer in config.layers if (spec := layer.keeps()) is not None]
    pool = host_pool_bytes(options, max(free - files, 0))
    if options.max_total_tokens:
        pool = options.max_total_tokens * KVPool.bytes_per_slot(kept, kv_dtype)
    log.info(
        "memory: files of weights %.2f GB, KV pool %.2f GB as it is used, this process so far (PyTorch) %.2f GB; "
        "%.2f GB free",
        files / 1e9, pool / 1e9, resident_memory() / 1e9, free / 1e9,
    )  # fmt: skip
    if files > free:
        log.warning("memory: the weights may not fit into what is free: end other programs or take a smaller model")


def cuda_budget(options: Options, rig: Rig, length: int, graph_size: int) -> int:
    """Returns bytes for the pool: what is free beside the weights, minus what steps and graphs take."""
    step, graphs = trial(options, rig, graph_size)
    rig.device.trim()
    free, total = rig.device.free_memory(), rig.device.total_memory()
    assert options.max_running_requests
    rows = options.max_running_requests + 1
    tables = 2 * rig.device.ops.table_dtype.itemsize * rows * length
    tables += request_bytes(rows, rig.model.config.vocab_size, length)
    tables += unseen_bytes(rows, rig, deferral_of(options, rig))
    tables += record_bytes(rig.layers, rows - 1, rig.nodes, rig.model.dtype)
    copies = 2 * total // FLYING if options.hicache_size or options.prefix_cache_dir is not None else 0
    needed = step + graphs + tables + copies
    sizes = (
        f"a step takes {step / 1e9:.2f} GB, CUDA graphs {graphs / 1e9:.2f} GB, tables of rows {tables / 1e9:.2f} GB"
        f"{f', copies of cached prefixes {copies / 1e9:.2f} GB' if copies else ''}: "
        "lower --chunked-prefill-size, --max-running-requests, --cuda-graph-max-bs or --context-length"
    )
    log.info("memory: %.2f GB of %.2f free after the weights; %s", free / 1e9, total / 1e9, sizes.split(":")[0])
    if options.mem_fraction_static is None:
        budget = free - needed - int(SLACK * total)
        if budget <= 0:
            raise ConfigError(
                f"no memory is left for the KV pool, {free / 1e9:.2f} GB are free beside the weights. {sizes}"
            )
        return budget
    # The fraction is of all memory, weights included, as users of such servers know it.
    budget = int(total * options.mem_fraction_static) - (total - free)
    if budget <= 0:
        raise ConfigError(
            f"--mem-fraction-static {options.mem_fraction_static} of {total / 1e9:.2f} GB leaves nothing for the KV "
            f"pool: {(total - free) / 1e9:.2f} GB are taken. Raise it, or lower the model's size or dtype"
        )
    if free - budget < needed:
        most = (total - needed) / total
        raise ConfigError(
            f"--mem-fraction-static {options.mem_fraction_static} leaves {(free - budget) / 1e9:.2f} GB; lower it to "
            f"{max(most, 0):.2f} or less. {sizes}"
        )
    return budget


def request_bytes(rows: int, vocab: int, length: int) -> int:
    """Returns bytes of what `RequestFeatures` keeps, once each kind of request was there."""
    meta = torch.device("meta")
    edits = EditTable(rows, vocab, meta)
    edits.write(0, SamplingParams(allowed_token_ids=(0,)), 1, ())
    predicted = PredictedOutput(rows, min(length, MAX_PREDICTED), meta)
    predicted.write(0, [0] * predicted.limit, 1)
    # The longest prediction is copied when a longer one comes.
    kept = [*vars(edits).values(), *vars(predicted).values(), predicted.tokens]
    return sum(value.nbytes for value in kept if isinstance(value, torch.Tensor))


def deferral_of(options: Options, rig: Rig) -> DraftDeferral:
    """Returns how much of prompts a drafter sees later, at most as many positions at once as a prefill has."""
    return DraftKVBacklog.deferral(rig.drafter, rig.device, prefill_tokens(options))


def prefill_tokens(options: Options) -> int:
    """Returns the most tokens of a prefill that memory is kept for."""
    assert options.chunked_prefill_size
    return options.chunked_prefill_size if options.chunked_prefill_size > 0 else TRIAL_TOKENS


def hidden_bytes(options: Options, rig: Rig) -> int:
    """Returns bytes of the hidden states that are kept for a drafter beside each slot of the pool."""
    if rig.drafter is None or not deferral_of(options, rig).by_slot:
        return 0
    return len(rig.drafter.aux_layers) * rig.model.config.hidden_size * rig.model.dtype.itemsize


def unseen_bytes(rows: int, rig: Rig, deferral: DraftDeferral) -> int:
    """Returns bytes of what is kept for a drafter until it catches up."""
    if rig.drafter is None or not rig.drafter.kv_layers:
        return 0
    config, dtype = rig.model.config, rig.model.dtype
    return DraftKVBacklog.bytes_of(rows, len(rig.drafter.aux_layers) * config.hidden_size, dtype, deferral.places)


def trial(options: Options, rig: Rig, graph_size: int) -> tuple[int, int]:
    """Returns bytes that the largest steps take beside weights and pool, and that the graphs will.

    Runs them with a pool of a few tokens: a prefill as large as the scheduler makes any, of as few prompts as have so
    many tokens, a tree step of all rows, one of a batch as large as the largest graph. Draws with noise and filters,
    which take more than greedy choices do.
    """
    assert options.max_running_requests
    rows, tokens = options.max_running_requests, prefill_tokens(options)
    longest = min(tokens, rig.model.config.max_positions - 1, options.context_length or tokens)
    tokens = min(tokens, longest * rows)
    shape = max(rig.menu, key=lambda s: s.nodes)
    span = max(shape.nodes, rig.drafter.span(shape) if rig.drafter is not None else 0)
    length = row_length(longest + 2 * shape.max_commit + span + LAG_ROOM)  # two steps
    pool = KVPool(rig.layers, length, rig.kv_dtype, rig.device.device)
    pool.states = rig.states(LEAST_SLOTS, rows)
    table = RowTable(rows, length, rig.device)
    attn = rig.device.ops.attention(pool, options.deterministic)
    rig.model.set_max_positions(length)
    if rig.drafter is not None:
        rig.drafter.attach(attn, rig.first_draft_layer, length)
    executor = Executor(rig.model, rig.drafter, table, attn, rig.device)
    executor.target.narrows = False  # graphs do not, nor prompts with log probabilities
    step = graphs = 0
    try:
        step = peak(executor, first_step(tokens, longest, length))
        if rig.drafter is not None and 0 < tokens - 1 < rig.device.ops.round_up_rows(tokens - 1):
            step = max(step, peak(executor, first_step(tokens - 1, longest, length)))  # a copy is rounded up for it
        step = max(step, peak(executor, tree_step(rows, shape, longest)))
        if rig.drafter is not None and rig.drafter.kv_layers:
            step = max(step, peak(executor, tree_step(rows, shape, longest, MAX_BACKLOG)))
        step += rig.device.ops.attention_bytes
        if rig.model.tower is not None:  # no part of its work on an image goes on while the step runs
            config, context = rig.model.tower.config, options.context_length or rig.model.config.max_positions
            step += config.begun_bytes(config.largest_side(context), rig.model.dtype.itemsize)
            step = max(step, tower_bytes(rig, context)) + image_features.BUDGET
        if graph_size:
            graphs = graph_bytes(executor, options, rig.menu, graph_size, tokens, longest, length)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"a step of {tokens} prompt tokens, or of {rows} requests with {shape.nodes} nodes, does not fit beside "
            "the weights: lower --chunked-prefill-size, --max-running-requests or --speculative-num-draft-tokens"
        ) from error
    if rig.drafter is not None:
        rig.drafter.flush()
        smallest = KVPool(rig.layers, 1, rig.kv_dtype, rig.device.device)  # so that it holds the other one no longer
        rig.drafter.attach(rig.device.ops.attention(smallest, options.deterministic), rig.first_draft_layer, length)
    return step, graphs


@torch.inference_mode()
def tower_bytes(rig: Rig, tokens: int) -> int:
    """Returns bytes that the tower takes at most for the largest image of so many tokens: up to the end of its first
    layer, as what comes behind all of them takes less, and for rows of features, which some layers make. Where there is
    no room the log says so."""
    assert rig.model.tower is not None
    tower, device = rig.model.tower, rig.device
    side = tower.config.largest_side(tokens)
    try:
        pixels = torch.zeros(side, side, 3, dtype=torch.uint8, device=device.device)
        rows = tower.config.rows_bytes(side, rig.model.dtype.itemsize)
        return pixels.nbytes + rows + device.peak(lambda: next(tower.parts(pixels, tokens)))
    except device.out_of_memory:
        log.warning(
            "memory: images of %d x %d pixels do not fit beside the weights: raise what is free, or make max_pixels of "
            "the model's preprocessor_config.json smaller", side, side,
        )  # fmt: skip
        return 0


def graph_bytes(
    executor: Executor, options: Options, menu: Sequence[TreeShape], graph_size: int, tokens: int, longest: int,
    length: int,
) -> int:  # fmt: skip
    """Returns bytes that the graphs of an engine will take: of the stages that need most, which share their memory, of
    what graphs of prompts leave, and of the driver. tokens, longest, length: of a prefill, of its prompts and of a row,
    as in `trial`."""
    rows = executor.table.rows
    shape = max(menu, key=lambda s: s.nodes)
    widest = max(min(graph_size, MAX_NODES // s.nodes) * s.nodes for s in menu)
    found = peak(executor, tree_step(min(-(-widest // shape.nodes), rows), shape, longest + shape.max_commit))
    mixed = options.enable_mixed_chunk
    if not executor.model.needs_chunks:  # prompts have graphs, too
        prompts = peak(executor, first_step(min(prefill_sizes(tokens)[-1], longest * rows), longest, length))
        found = found + prompts if mixed else max(found, prompts)  # graphs of both have memory of their own
        hidden, dtype = executor.model.config.hidden_size, executor.model.dtype
        found += kept_bytes(tokens, hidden, executor.aux_layers, dtype, mixed)
        if executor.model.tower is not None:
            found += prefill_sizes(tokens)[-1] * executor.model.tower.config.row_size * dtype.itemsize
    if executor.model.tower is not None:
        found += tower_graphs.kept_bytes(executor.model.tower.config, executor.model.dtype)
    drafter = executor.drafter
    if drafter is not None and drafter.from_tokens:  # a draft model, whose layers run for each level but the first
        levels = sum(max(key.shape.depth - 1, 0) for key in graph_keys(menu, batch_sizes(graph_size)))
        found += levels * len(drafter.kv_layers) * LAYER_BYTES
    forwards, others = graph_counts(executor, menu, graph_size, tokens, length, mixed, options.serves_adapters)
    return found + forwards * executor.model.config.num_layers * LAYER_BYTES + others * STAGE_BYTES


def graph_counts(
    executor: Executor, menu: Sequence[TreeShape], graph_size: int, tokens: int, length: int, mixed: bool,
    adapted: bool = False,
) -> tuple[int, int]:  # fmt: skip
    """Returns how many graphs there will be with a forward of the target, and of other stages. tokens: most of a
    prefill; length: of a row; mixed: whether prompts run beside steps; adapted: whether adapters are served."""
    keys = graph_keys(executor.common_shapes(menu), batch_sizes(graph_size))
    sizes = Sizes.of(tokens, length, graph_size if mixed else 0)
    prompts = 0 if executor.model.needs_chunks else sizes.planned(keys)
    others = 3 if executor.ops.draws_by_row else 2  # of `commit` there is one that filters
    return (len(keys) + prompts) * (1 + adapted), others * len(keys) * (1 + (executor.head_slots is not None))


def peak(executor: Executor, plan: Plan) -> int:
    """Returns bytes allocated at most by a step beyond what was allocated before."""
    return executor.device.peak(lambda: executor.commit(executor.launch(plan)).wait())


def first_step(tokens: int, longest: int, length: int) -> Plan:
    """Returns prompts of `longest` tokens, the last one perhaps of fewer, so many together, in the first rows. All have
    the same slots, as many as a page table has room for."""
    params, nothing = SamplingParams(), np.empty(0, np.int64)
    sizes = [min(longest, tokens - begin) for begin in range(0, tokens, longest)]
    rows = np.arange(len(sizes))
    requests = [GenerationRequest("", [1] * size, params) for size in sizes]
    admits = tuple(Admission(row, one.prompt_ids, nothing, one, seed=0) for row, one in enumerate(requests))
    slots = tuple((row, 0, np.arange(1, length + 1)) for row in range(len(sizes)))
    chunks = tuple(Chunk(row, 0, size, True) for row, size in enumerate(sizes))
    return Plan(0, "prefill", rows, rows, PLAIN, longest, admits, slots, chunks, noisy=rows, filtered=rows)


def tree_step(rows: int, shape: TreeShape, bound: int, behind: int = 0) -> Plan:
    """Plans a step of many rows, all but the first one empty: they write to the pool's dummy slot. behind: positions
    that a drafter has not seen, as far as the host knows."""
    every = np.arange(rows)
    catch_up = DraftExtend(every, behind, bound) if behind else None
    return Plan(1, "tree", every, every, shape, bound, catch_up=catch_up, noisy=every, filtered=every[:1])
