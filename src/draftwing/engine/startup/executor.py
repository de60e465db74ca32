"""The device's half of an engine: the KV pool, the row table and the executor. Every rank makes one."""

from __future__ import annotations

import logging
from typing import NamedTuple

from draftwing.config.options import Options
from draftwing.core import TreeShape
from draftwing.engine.compile import compile_forwards
from draftwing.engine.devices.base import Device
from draftwing.engine.draft_kv_backlog import ROOM as LAG_ROOM
from draftwing.engine.executor import Executor
from draftwing.engine.precision import Precision
from draftwing.engine.row_table import RowTable
from draftwing.engine.startup.memory import Rig, deferral_of, hidden_bytes, row_length, rows_of, size_pool
from draftwing.errors import ConfigError
from draftwing.kv.pool import FP8, KVPool
from draftwing.kv.row_states import delta_specs, record_bytes, state_bytes
from draftwing.models.decoder import DecoderModel
from draftwing.sched.state_slots import ROW_SLOTS
from draftwing.spec.drafter import Drafter
from draftwing.spec.simulate import Simulation

log = logging.getLogger("draftwing")


def graph_size_of(options: Options) -> int:
    """Returns the largest batch that graphs are captured of; of options for a device."""
    return 0 if options.disable_cuda_graph else options.cuda_graph_max_bs or 0


class Made(NamedTuple):
    """What the host's half is built on."""

    executor: Executor
    pool: KVPool
    context: int  # tokens of prompt and answer
    pool_tokens: int
    spans: dict[TreeShape, int]
    graph_size: int  # largest batch with graphs
    states: int  # slots for states of recurrent layers, 0 without such layers


def make_executor(
    options: Options,
    model: DecoderModel,
    precision: Precision,
    device: Device,
    drafter: Drafter | None,
    menu: tuple[TreeShape, ...],
) -> Made:
    """Makes the executor of options `for_engine` around a loaded model. menu: what steps may draft.  Of several ranks
    all make theirs at the same time. Raises ConfigError where there is no room."""
    config, rows, chunk = model.config, options.max_running_requests, options.chunked_prefill_size
    assert rows and chunk, "they have a value on every device"
    graph_size, kv_dtype = graph_size_of(options), precision.kv_dtype
    spans = {shape: shape.nodes if drafter is None else drafter.span(shape) for shape in menu}
    max_span, max_commit = max(spans.values()), max(shape.max_commit for shape in menu)

    rig = Rig(model, drafter, menu, kv_dtype, device)
    wanted = options.context_length or config.max_positions
    assert wanted <= config.max_positions, "what is more was refused"
    # A step in flight may have committed max_commit tokens that the host does not know of when the next is planned.
    room = max_commit + max_span + 1 + (LAG_ROOM if rig.draft_layers else 0)  # past the context, in a row
    if delta_specs(rig.draft_layers):
        raise ConfigError("a draft model cannot have recurrent layers: expected attention alone")
    sizes = size_pool(options, rig, row_length(wanted + room), graph_size)
    pool_tokens, states = model.ranks.least(sizes.tokens), model.ranks.least(sizes.states)
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
    scales = model.kv_scales.of(model.pool_owners) if kv_dtype == FP8 else ()
    pool = KVPool(rig.layers, pool_tokens, kv_dtype, device.device, scales)
    pool.states = rig.states(states, rows)
    if model.kv_scales and kv_dtype != FP8 and device.ops.reads_fp8_pool:
        log.info("the checkpoint has scales for a KV pool in fp8: --kv-cache-dtype fp8_e4m3 holds twice the tokens")
    _log_memory(options, rig, pool_tokens, states, context)

    model.set_max_positions(length)
    table = RowTable(rows, length, device)
    attn = device.ops.attention(pool, options.deterministic)
    if drafter is not None:
        drafter.attach(attn, rig.first_draft_layer, length)
    if not attn.capturable:
        graph_size = 0
    simulation = None
    if options.simulate_accept_length is not None:
        depth, topk = max(shape.depth for shape in menu), max(shape.topk for shape in menu)
        simulation = Simulation(options.simulate_accept_length, depth, config.vocab_size, topk)
    executor = Executor(
        model, drafter, table, attn, device, graph_size, simulation, max(chunk, 0), deferral_of(options, rig),
        options.enable_mixed_chunk,
    )  # fmt: skip
    if options.enable_torch_compile:
        nodes = max(shape.nodes for shape in menu)
        compile_forwards(model, getattr(drafter, "head", None), options.torch_compile_max_bs * nodes, device.ops)
    return Made(executor, pool, context, pool_tokens, spans, graph_size, states)


def _log_memory(options: Options, rig: Rig, pool_tokens: int, states: int, context: int) -> None:
    """Logs what the pool and states take, and how many tokens and requests that is room for."""
    dtype, rows, running = rig.model.dtype, options.max_running_requests, rows_of(options, states)
    parts = rig.model.kv_layers, rig.draft_layers
    target_gb, draft_gb = (pool_tokens * KVPool.bytes_per_slot(part, rig.kv_dtype) / 1e9 for part in parts)
    hidden_gb = pool_tokens * hidden_bytes(options, rig) / 1e9
    kept = f", hidden states for it {hidden_gb:.2f} GB" if hidden_gb else ""
    log.info("KV pool: %d tokens, target %.2f GB, draft %.2f GB%s", pool_tokens, target_gb, draft_gb, kept)
    if states:
        each = state_bytes(rig.layers, dtype) / 1e6
        records = record_bytes(rig.layers, running, rig.nodes, dtype) / 1e9
        log.info(
            "states of recurrent layers: %d of %.1f MB, %.2f GB; %d for each running request, the others for cached "
            "prefixes; records of drafts up to %.2f GB",
            states, each, states * each / 1e3, ROW_SLOTS, records,
        )  # fmt: skip
    log.info("max total tokens %d, context length %d, max running requests %d", pool_tokens, context, running)
    if running != rows:
        log.warning(
            "states of recurrent layers have room for %d running requests, not %s: raise --state-memory-fraction, "
            "--mem-fraction-static or --max-total-tokens", running, rows,
        )  # fmt: skip
