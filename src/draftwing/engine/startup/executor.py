"""The device's half of an engine: the KV pool, the row table and the executor. Every rank makes one.

With --enable-torch-compile torch.compile makes the forward passes of target and draft, attention left out. Large
forward passes are not worth the compiler's time: products and attention are all of their cost."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from draftwing.config.options import Options
from draftwing.config.trees import TreeShape
from draftwing.engine.commit import Simulation
from draftwing.engine.devices.base import Device
from draftwing.engine.draft_kv_backlog import ROOM as LAG_ROOM
from draftwing.engine.executor import Executor
from draftwing.engine.row_table import RowTable
from draftwing.engine.startup.adapters import adapter_slots, head_slots
from draftwing.engine.startup.memory import PoolSize, Rig, deferral_of, hidden_bytes, row_length, rows_of, size_pool
from draftwing.engine.startup.models import Precision
from draftwing.errors import ConfigError
from draftwing.kv.pool import FP8, KVPool, delta_specs, record_bytes, state_bytes
from draftwing.models.decoder import DecoderModel
from draftwing.models.heads.base import DraftHead
from draftwing.ops.attention.attend import Attend
from draftwing.ops.table import TorchOps
from draftwing.sched.state_slots import ROW_SLOTS
from draftwing.spec.drafter import Drafter

PARTS = tuple(name for name in vars(Attend) if callable(getattr(Attend, name)) and not name.startswith("_"))
log = logging.getLogger("draftwing")


class Opaque(Attend):
    """Attention, and what else layers keep, that the compiler does not look into."""

    def __init__(self, attend: Attend) -> None:
        # Not as a decorator: it imports the whole compiler, which takes a second.
        self._attend = torch.compiler.disable(attend)
        self.norms_heads = attend.norms_heads
        for part in PARTS:
            setattr(self, part, torch.compiler.disable(getattr(attend, part)))

    def __call__(self, *args: Any) -> Tensor:
        return self._attend(*args)


def compile_forwards(
    model: DecoderModel, head: DraftHead | None, max_tokens: int, ops: TorchOps, backend: str = "inductor"
) -> None:
    """Compiles forward passes of up to `max_tokens` tokens. Every layer is the same code to the compiler, and sizes
    are variables of it, so it works for a few times only, when graphs are captured."""
    for module in (model, head):
        for parameter in module.parameters() if isinstance(module, nn.Module) else ():
            torch._dynamo.mark_static(parameter)  # a kernel's tiles follow from the sizes of weights
    ops.probe_device()
    setattr(model, "forward", _limited(model.forward, max_tokens, backend))  # noqa: B010
    if head is not None:
        setattr(head, head.forward_name, _limited(getattr(head, head.forward_name), max_tokens, backend))


def _limited(forward: Callable[..., Any], max_tokens: int, backend: str) -> Callable[..., Any]:
    compiled = torch.compile(forward, dynamic=True, backend=backend)

    def run(ids: Tensor, *args: Any) -> Any:
        if ids.shape[0] > max_tokens:
            return forward(ids, *args)
        with torch._dynamo.config.patch(suppress_errors=True):  # what it cannot compile runs as it is, with a warning
            return compiled(ids, *(Opaque(arg) if isinstance(arg, Attend) else arg for arg in args))

    return run


def graph_size_of(options: Options) -> int:
    """Returns the largest batch that graphs are captured of; of options for a device."""
    return 0 if options.disable_cuda_graph else options.cuda_graph_max_bs or 0


class Made(NamedTuple):
    """What the host's half is built on."""

    executor: Executor
    context: int  # tokens of prompt and answer
    spans: dict[TreeShape, int]
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
    rows, chunk = options.max_running_requests, options.chunked_prefill_size
    assert rows and chunk, "they have a value on every device"
    adapters, heads = adapter_slots(options, model), head_slots(options, drafter)  # before memory is counted
    rig = Rig(model, drafter, menu, precision.kv_dtype, device)
    if delta_specs(rig.draft_layers):
        raise ConfigError("a draft model cannot have recurrent layers: expected attention alone")
    spans = {shape: shape.nodes if drafter is None else drafter.span(shape) for shape in menu}
    # A step in flight may have committed tokens that the host does not know of when the next is planned.
    step = max(spans.values()) + max(shape.max_commit for shape in menu)
    room = step + 1 + (LAG_ROOM if rig.draft_layers else 0)  # past the context, in a row
    graph_size = graph_size_of(options)
    sizes, context = _sizes(options, rig, step, room, graph_size)
    length = row_length(context + room)
    pool = _make_pool(options, rig, sizes)
    _log_memory(options, rig, sizes, context)

    # What was asked for, not what the pool lets requests have: that differs between drafters, and a text must not.
    model.set_max_positions(length, options.context_length or model.config.max_positions)
    table = RowTable(rows, length, device)
    attn = device.ops.attention(pool, options.deterministic)
    if drafter is not None:
        drafter.attach(attn, rig.first_draft_layer, length)
    executor = Executor(
        model, drafter, table, attn, device, graph_size if attn.capturable else 0, _simulation(options, rig),
        max(chunk, 0), deferral_of(options, rig), options.enable_mixed_chunk,
    )  # fmt: skip
    if adapters is not None:
        executor.take_adapters(adapters, heads)
    if options.enable_torch_compile:
        most = options.torch_compile_max_bs * rig.nodes
        compile_forwards(model, getattr(drafter, "head", None), most, device.ops)
    return Made(executor, context, spans, sizes.states)


def _sizes(options: Options, rig: Rig, step: int, room: int, graph_size: int) -> tuple[PoolSize, int]:
    """Returns how large the pool is, which all ranks have room for, and the context that it lets requests have. step:
    tokens that one may need past those of a request.  room: page-table entries."""
    most = rig.model.config.max_positions
    wanted = options.context_length or most
    assert wanted <= most, "what is more was refused"
    tokens, states = map(rig.model.ranks.least, size_pool(options, rig, row_length(wanted + room), graph_size))
    if not options.max_total_tokens:  # more could only ever cache prefixes
        assert options.max_running_requests
        tokens = min(tokens, 2 * options.max_running_requests * wanted)
    context = min(wanted, tokens - step)
    if context < wanted:
        log.warning("the KV pool of %d tokens limits the context to %d, not %d", tokens, context, wanted)
    if context < 2:
        raise ConfigError(
            f"the KV pool holds {tokens} tokens, and a step alone needs {step}: "
            "raise --max-total-tokens or --mem-fraction-static, or lower --speculative-num-draft-tokens "
            "or --speculative-num-steps times --speculative-eagle-topk"
        )
    return PoolSize(tokens, states), context


def _make_pool(options: Options, rig: Rig, sizes: PoolSize) -> KVPool:
    model, fp8 = rig.model, rig.kv_dtype == FP8
    scales = model.kv_scales.of(model.pool_owners) if fp8 else ()
    pool = KVPool(rig.layers, sizes.tokens, rig.kv_dtype, rig.device.device, scales)
    assert options.max_running_requests
    pool.states = rig.states(sizes.states, options.max_running_requests)
    if model.kv_scales and not fp8 and rig.device.ops.reads_fp8_pool:
        log.info("the checkpoint has scales for a KV pool in fp8: --kv-cache-dtype fp8_e4m3 holds twice the tokens")
    return pool


def _simulation(options: Options, rig: Rig) -> Simulation | None:
    if options.simulate_accept_length is None:
        return None
    depth, topk = max(shape.depth for shape in rig.menu), max(shape.topk for shape in rig.menu)
    return Simulation(options.simulate_accept_length, depth, rig.model.config.vocab_size, topk)


def _log_memory(options: Options, rig: Rig, sizes: PoolSize, context: int) -> None:
    """Logs what the pool and states take, and how many tokens and requests that is room for."""
    (tokens, states), dtype, rows = sizes, rig.model.dtype, options.max_running_requests
    running = rows_of(options, states)
    parts = rig.model.kv_layers, rig.draft_layers
    target_gb, draft_gb = (tokens * KVPool.bytes_per_slot(part, rig.kv_dtype) / 1e9 for part in parts)
    hidden_gb = tokens * hidden_bytes(options, rig) / 1e9
    kept = f", hidden states for it {hidden_gb:.2f} GB" if hidden_gb else ""
    log.info("KV pool: %d tokens, target %.2f GB, draft %.2f GB%s", tokens, target_gb, draft_gb, kept)
    if states:
        each = state_bytes(rig.layers, dtype) / 1e6
        records = record_bytes(rig.layers, running, rig.nodes, dtype) / 1e9
        log.info(
            "states of recurrent layers: %d of %.1f MB, %.2f GB; %d for each running request, the others for cached "
            "prefixes; records of drafts up to %.2f GB",
            states, each, states * each / 1e3, ROW_SLOTS, records,
        )  # fmt: skip
    log.info("max total tokens %d, context length %d, max running requests %d", tokens, context, running)
    if running != rows:
        log.warning(
            "states of recurrent layers have room for %d running requests, not %s: raise --state-memory-fraction, "
            "--mem-fraction-static or --max-total-tokens", running, rows,
        )  # fmt: skip
