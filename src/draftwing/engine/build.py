"""Puts an engine together from options: model, drafter, KV pool, device tables, scheduler."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from draftwing.config.fields import flag
from draftwing.config.options import Options
from draftwing.config.trees import LOOKUP_ALONE, PLAIN, TreeShape
from draftwing.engine.devices import pick_device
from draftwing.engine.devices.base import Device
from draftwing.engine.executor import Executor
from draftwing.engine.graphs import Key
from draftwing.engine.prefill_graphs import AT_ONCE
from draftwing.engine.process.ranks import RankProcesses, Setup
from draftwing.engine.rank_broadcast import SINGLE_RANK, RankBroadcast
from draftwing.engine.startup.adapters import with_rank
from draftwing.engine.startup.before_torch import Laps
from draftwing.engine.startup.compiler_process import Compiler, Job, precompile
from draftwing.engine.startup.cost_file import CostFile, cost_file
from draftwing.engine.startup.executor import Made, make_executor
from draftwing.engine.startup.measure_costs import BUSY, delays, experts_at_random, measure_graphs, measure_steps, since
from draftwing.engine.startup.memory import log_forecast, rows_of
from draftwing.engine.startup.models import (
    Precision,
    capability,
    check_draft_files,
    check_draft_tokenizer,
    check_target,
    draft_path_of,
    in_words,
    load_with_progress,
    log_drafter,
    make_drafter,
    pick_precision,
    token_map,
)
from draftwing.engine.startup.warm_up import (
    capture,
    capture_some,
    keeps_bits,
    lengths_to_try,
    try_length,
    try_prompts,
    warm_up,
)
from draftwing.errors import ConfigError
from draftwing.kv.pool import check_int8
from draftwing.models.config import ModelConfig
from draftwing.models.decoder import DecoderModel
from draftwing.models.heads.beside import with_found_drafter
from draftwing.models.heads.trees import tree_of
from draftwing.models.loader import load_config, mapped_bytes
from draftwing.models.weight_files import bytes_of
from draftwing.parallel.group import join
from draftwing.parallel.ranks import Absent, Alone, Ranks
from draftwing.sched.policy.choice import Mixes
from draftwing.sched.policy.cost import StepCost
from draftwing.sched.policy.shape_policy import FixedShape, ShapePolicy, TreePolicy
from draftwing.sched.scheduler import Scheduler, SchedulerConfig
from draftwing.sched.state_slots import StateSizes
from draftwing.spec.drafter import Drafter
from draftwing.text.tokenizer import Tokenizer

log = logging.getLogger("draftwing")

CHAIN_TOKENS = 256  # in the KV of a request of which costs are told
SLOTS_AHEAD = 32  # see `SchedulerConfig.ahead`


@dataclass
class Parts:
    """What `Engine` drives. options: with all that follows from the device and the models."""

    options: Options
    executor: Executor
    sched: Scheduler
    context_length: int
    costs: StepCost | None = None  # of steps, where the engine chooses by them
    cost_file: CostFile | None = None
    capability: Mapping[str, Any] = field(default_factory=dict)  # as of `engine.startup.models`
    lengths: list[int] = field(default_factory=list)  # of prompts that the start has left for `run_later`

    @property
    def later(self) -> int:
        """Returns how many times `run_later` finds something to do."""
        return len(self.lengths) + self.executor.captures.later

    def run_later(self) -> None:
        """Does something that the start has left for when nothing runs."""
        if self.lengths:
            self.executor.run_on_all_ranks(try_length, self.lengths.pop(0))
        else:
            self.executor.captures.capture_next()

    def capture_again(self) -> None:
        """Captures graphs of steps that were dropped. Nothing may run."""
        if self.executor.graphs.sizes:
            capture_some(self.executor, self.sched.choice.policy.menu, self.options.enable_torch_compile)

    def see_at_most(self, positions: int | None) -> None:
        """Keeps the draft head's own attention to so many of a text's last tokens; None: to what it saw at the start.
        Nothing may run: steps are captured or recorded again."""
        self.executor.run_on_all_ranks(Executor.see_at_most, positions)
        self.capture_again()

    def measure_costs(self, batches: Sequence[int], seconds: float) -> None:
        """Measures costs for so long, which is more than a start does, for these batch sizes. Nothing may run."""
        executor, costs, until = self.executor, self.costs, time.monotonic() + seconds
        if costs is None:
            return
        with experts_at_random(executor):
            if costs.table.stepwise:
                sizes = {(shape, batch) for shape, batch, _, _ in costs.table.points()}
                keys = [Key(*size) for size in sizes if executor.graphs.key(*size) == size]
                measure_graphs(executor, costs, keys, until)
            else:
                measure_steps(executor, costs, until, batches)
        executor.run_on_all_ranks(Executor.flush)

    def chain_seconds(self) -> list[float]:
        """Returns about what steps of one request with 1, 2, .. levels of drafts take, a lookup's alone left out;
        nothing where costs are not compared."""
        policy = self.sched.choice.policy
        if not isinstance(policy, TreePolicy):
            return []
        drafts = [shape for shape in policy.menu if shape.depth and shape.proposer != LOOKUP_ALONE]
        known = {shape: policy.cost.seconds(shape, 1, CHAIN_TOKENS) for shape in drafts}
        found = []
        for depth in range(1, self.options.speculative_shape.depth + 1):  # a pair's lookup may draft deeper ones
            able = [known[shape] for shape in drafts if shape.depth >= depth]
            if None in able:
                return []
            found.append(min(seconds for seconds in able if seconds is not None))
        return found

    def keep_costs(self) -> None:
        """Writes them down for the next start."""
        if self.costs is not None and self.cost_file is not None:
            self.cost_file.write(self.costs)


def build(
    options: Options,
    path: Path,
    tokenizer: Tokenizer | None = None,
    rank_failed: Callable[[BaseException], None] | None = None,
    compiler: Compiler | None = None,
) -> Parts:
    """Loads the models of resolved options. path: of the target; tokenizer: its own, to check a draft model's against;
    rank_failed: as `RankProcesses` has it; compiler: as `Precompilation` has it. Raises ConfigError and
    CheckpointError."""
    lap = Laps()
    device, config = pick_device(options.device), load_config(path)
    options, draft_path = _for_engine(options, path, config, device, tokenizer)
    options = with_rank(options)
    log_drafter(options)
    log.info("device: %s; operations: %s", ", ".join(sorted(set(device.names(options.tp_size)))), device.ops.title)
    device.set_threads(options.num_threads, options.processors)
    options = with_numerics(options, device)
    precision = pick_precision(options, device, config.dtype, config.quantization is not None)
    check_int8([spec for layer in config.layers if (spec := layer.keeps()) is not None], precision.kv_dtype)
    options, token_ids = token_map(options, config.vocab_size, device, tokenizer)  # before anything large
    ahead = None
    broadcast: RankBroadcast = SINGLE_RANK
    ranks: Ranks = Alone(options.enable_tp_invariance)
    compute = device.ops.compute_capability
    device.ops.hash_kernels()
    if compute is not None:
        memory = device.total_memory()
        job = Job(options, path, draft_path, token_ids, precision.dtype, precision.kv_dtype, compute, memory)
        ahead = precompile(job, compiler)
    elif compiler is not None:
        compiler.end()
    try:
        if options.tp_size > 1:
            drafted = None if token_ids is None else token_ids.tolist()
            broadcast = others = RankProcesses(Setup(options, path, draft_path, drafted, 0, 0), device, rank_failed)
            ranks = others.ranks
        found = capability(device, ranks)
        if ranks.size > 1:
            log.info("%s", in_words(found))
        files = bytes_of(path) - mapped_bytes(path, config) + (0 if draft_path is None else bytes_of(draft_path))
        log_forecast(options, device, config, precision.kv_dtype, 0 if options.dummy else files)
        lap("device and checks")
        model = load_with_progress(path, precision, device, options, ranks)
        warn_of(model)
        lap("weights")
        broadcast.wait_loaded()
        drafter, policy = make_drafter(options, draft_path or path, token_ids, model, precision, device)
        lap("the drafter")
        file = None
        if drafter is not None and not options.speculative_fixed_shape:
            file = cost_file(options, policy.menu, path, draft_path, precision, device)
        before = (lambda stage: None) if ahead is None else ahead.wait
        parts = assemble(options, model, precision, device, drafter, policy, file, broadcast, before)
        parts.executor.run_on_all_ranks(Executor.shorten_timeouts)
        broadcast.watch()
        return replace(parts, capability=found | ({"sums": ranks.title} if ranks.size > 1 else {}))
    except BaseException as error:
        if ahead is not None:
            ahead.stop()
        blamed = broadcast.blame(error)
        broadcast.close()
        if blamed is error:
            raise
        raise blamed from error


def _for_engine(
    options: Options, path: Path, config: ModelConfig, device: Device, tokenizer: Tokenizer | None
) -> tuple[Options, Path | None]:
    """Returns options `for_engine` and the draft model's path, once the files of both models are checked."""
    check_target(options, path, config)
    options = with_found_drafter(options, path, config)
    spec, draft_path = options.drafter_spec, draft_path_of(options)
    carried = None
    if spec.heads:
        carried = tree_of(draft_path or path, device.kind, spec.tree, draft_path is not None, options.dummy)
    options = options.for_engine(device.defaults, config.architecture, carried)
    if config.encoder is not None:
        options = options.for_encoder(config.max_positions)
    if draft_path is not None:
        check_draft_files(options, draft_path, config)
        if spec.same_tokenizer and tokenizer and not options.dummy:
            check_draft_tokenizer(options, draft_path, tokenizer)
    if options.tp_size > 1:
        device.set_threads(None)
        options = spread(options, config, device)
    return options, draft_path


def with_numerics(options: Options, device: Device) -> Options:
    """Returns options with the numerics that the device has. Raises ConfigError where the text has to be independent of
    the batch and cannot be."""
    if options.enable_tp_invariance:
        options = replace(options, enable_deterministic_inference=True)
    strict, replays = options.enable_deterministic_inference, options.replay_interval > 0
    if not options.deterministic and (strict or replays):
        what = "--enable-deterministic-inference" if strict else "--replay-interval, whose answers are to be the same,"
        why = "--fast-numerics" if options.fast_numerics else "--enable-torch-compile"
        raise ConfigError(f"{what} and {why} exclude each other: sums have an order that depends on the batch. "
                          "Leave one of them out")  # fmt: skip
    if not options.deterministic or device.ops.batch_invariant:
        return options
    how = (
        "our own kernels for the device, of a GPU: install triton (they run from compute capability 8.0 on), and do "
        "not set the environment variable DRAFTWING_NATIVE to 0, or use --device cpu"
    )
    if strict or replays:
        raise ConfigError(f"{flag('enable_deterministic_inference' if strict else 'replay_interval')} needs {how}")
    log.warning("a request's text may depend on the batch and on speculation; that it does not needs %s", how)
    return replace(options, fast_numerics=True)


def warn_of(model: DecoderModel) -> None:
    """Says which weights do not allow the numerics that were asked for."""
    if model.inexact:
        log.warning(
            "a request's text may depend on the batch and on speculation, for %d weights have no kernels that keep "
            "bits; the first: %s", len(model.inexact), model.inexact[0],
        )  # fmt: skip


def build_rank(setup: Setup, loaded: Callable[[], None]) -> Executor:
    """Returns the share of a rank from 1 on, in a process of its own. loaded: is called when the weights are there."""
    options, device = setup.options, pick_device(setup.options.device, setup.rank)
    device.set_threads(options.num_threads or 1)
    device.ops.hash_kernels()
    config = load_config(setup.path)
    precision = pick_precision(options, device, config.dtype, config.quantization is not None)
    where = device.device, device.collectives
    kinds = options.enable_expert_parallel, options.enable_tp_invariance
    ranks = join(setup.port, options.tp_size, setup.rank, *where, *kinds)
    model = load_with_progress(setup.path, precision, device, options, ranks)
    loaded()
    token_ids = None if setup.token_ids is None else torch.tensor(setup.token_ids)
    drafter, policy = make_drafter(options, setup.draft_path or setup.path, token_ids, model, precision, device)
    return make_executor(options, model, precision, device, drafter, policy.menu).executor


def spread(options: Options, config: ModelConfig, device: Device) -> Options:
    """Returns options of an engine with several ranks. Raises ConfigError for what cannot have them."""
    size = options.tp_size
    if options.enable_expert_parallel and config.experts is None:
        raise ConfigError("--enable-expert-parallel: expected a model with experts; this one has none, leave it out")
    config.spread(Absent(size, 0, options.enable_expert_parallel, options.enable_tp_invariance))
    if device.count < size:
        raise ConfigError(f"--tp-size {size}: expected as many GPUs, found {device.count}")
    if options.enable_torch_compile:
        raise ConfigError(f"--tp-size {size} and --enable-torch-compile exclude each other; leave one of them out")
    if options.drafter_spec.own and options.drafter_spec.name.startswith("__main__"):
        raise ConfigError(f"--tp-size {size}: expected a drafter in a module that other processes can import")
    if isinstance(options.device, type) and options.device.__module__ == "__main__":
        raise ConfigError(f"--tp-size {size}: expected a device in a module that other processes can import")
    if not device.has_own_memory and size > device.threads:
        log.warning(
            "--tp-size %d: expected at most one process for each CPU core, found %d cores; more are slower than fewer",
            size, device.threads,
        )  # fmt: skip
    threads = options.num_threads or max(device.threads // size, 1)
    return replace(options, num_threads=threads)


def mixes_of(options: Options, executor: Executor) -> Mixes | None:
    """Returns which steps can have parts of prompts in their forward, if that is asked for; None: none. Logs why."""
    if not options.enable_mixed_chunk:
        return None
    mixes = executor.target.mixes
    if mixes(PLAIN, 1):
        return mixes
    why = "--cuda-graph-max-bs or --chunked-prefill-size is too small for its CUDA graphs"
    if executor.model.needs_chunks:
        why = "layers of this model read what they keep by the host's chunks"
    log.info("parts of prompts and requests that decode take turns: %s", why)
    return None


def assemble(
    options: Options,
    model: DecoderModel,
    precision: Precision,
    device: Device,
    drafter: Drafter | None,
    policy: FixedShape | TreePolicy,
    file: CostFile | None = None,
    broadcast: RankBroadcast = SINGLE_RANK,
    before: Callable[[str], object] = lambda stage: None,
) -> Parts:
    """Returns the engine of options `for_engine` around a loaded model. file: where costs of steps are kept.
    broadcast: tells the other ranks, which have made their executors, too.  before: is called before each of
    `compiler_process.STAGES`."""
    lap = Laps()

    def begin(stage: str) -> None:
        before(stage)
        lap(f"kernels for {stage} that are not compiled yet")

    begin("memory")
    made = make_executor(options, model, precision, device, drafter, policy.menu)
    lap("memory, KV pool and tables")
    executor = made.executor
    options = replace(options, max_running_requests=rows_of(options, made.states))  # what a server says of itself
    executor.broadcast = broadcast
    executor.on_result = None if broadcast.digest is None else broadcast.digest.add
    strict = options.enable_deterministic_inference
    if strict and not device.ops.exact_by_design and not executor.run_on_all_ranks(keeps_bits):
        raise ConfigError(
            "--enable-deterministic-inference: on this CPU what torch makes of a token depends on the batch. Leave the "
            "option out, or install draftwing with a compiler and without DRAFTWING_NATIVE=0: our C extension is exact"
        )
    chooses, mixes = isinstance(policy, TreePolicy), mixes_of(options, executor)
    # How long parts of prompts beside rows are follows from what steps cost, which those that have some do not show.
    costs = Costs.load(policy.menu, bool(executor.graphs.sizes), file) if chooses or mixes is not None else None
    begin("graphs")
    started, waited = time.monotonic(), delays()
    lengths = _first_steps(options, executor, policy.menu, costs, begin, lap)
    if costs is not None:
        policy.cost = costs.compared(
            lambda: sum(since(waited)) < BUSY * (time.monotonic() - started) and device.active_threads == 1
        )
    sched = Scheduler(_scheduler_config(options, made, drafter, policy, mixes), policy, made.spans)
    return Parts(options, executor, sched, made.context, policy.cost if chooses else None, file, lengths=lengths)


class Costs(NamedTuple):
    """What a start knows of the costs of steps. measured: by itself, nothing so far.  stored_costs: by starts before.
    costs_settled: whether these need not be measured again."""

    measured: StepCost
    stored_costs: StepCost | None = None
    costs_settled: bool = False
    file: CostFile | None = None

    @classmethod
    def load(cls, menu: Sequence[TreeShape], stepwise: bool, file: CostFile | None) -> Costs:
        """Returns what is stored. stepwise: as of `StepCost`."""
        measured = StepCost(menu, stepwise)
        if file is None:
            return cls(measured)
        stored_costs = file.read(menu, stepwise)
        return cls(measured, stored_costs, file.settled, file)

    @property
    def to_measure(self) -> StepCost | None:
        """Returns what is to be filled, None where it need not be."""
        return None if self.costs_settled else self.measured

    @property
    def trusted_costs(self) -> StepCost | None:
        """Returns stored costs of which it is enough that a few are measured and agree."""
        trusted = self.file is not None and self.file.quiet
        return self.stored_costs if trusted and self.stored_costs is not None and self.stored_costs.complete else None

    def compared(self, is_quiet: Callable[[], bool]) -> StepCost:
        """Returns what is believed of what was stored and measured, and keeps it. is_quiet: whether the machine had
        nothing else to do meanwhile."""
        cost = self.measured if self.stored_costs is None else self.stored_costs
        if self.file is not None and not self.costs_settled:
            cost = self.file.compared(self.measured, self.stored_costs, is_quiet())
        if not (is_quiet() if self.file is None else self.file.quiet):
            cost.doubt_smallest()
        return cost


def _first_steps(
    options: Options, executor: Executor, menu: Sequence[TreeShape], costs: Costs | None,
    begin: Callable[[str], None], lap: Laps,
) -> list[int]:  # fmt: skip
    """Captures graphs, or runs steps where there are none, and measures them. Returns lengths of prompts that are left
    to be tried when nothing runs. A user's drafter sees requests alone."""
    to_measure = None if costs is None else costs.to_measure
    if not executor.graphs.sizes:
        if not options.drafter_spec.own:
            warm_up(executor, menu, to_measure)
        return []
    capture(executor, menu, to_measure, costs and costs.trusted_costs, options.enable_torch_compile)
    lap("graphs")
    if options.drafter_spec.own:
        return []
    begin("prompts")
    short, lengths = lengths_to_try(executor, _chunk_of(options, executor))
    try_prompts(executor, menu, short)
    lap("first prompts")
    return lengths


def _chunk_of(options: Options, executor: Executor) -> int:
    """Returns the most tokens of a prefill."""
    assert options.chunked_prefill_size, "it has a value on every device"
    return options.chunked_prefill_size if options.chunked_prefill_size > 0 else executor.attn.pool.slots


def _scheduler_config(
    options: Options, made: Made, drafter: Drafter | None, policy: ShapePolicy, mixes: Mixes | None
) -> SchedulerConfig:
    """Returns what the scheduler needs to know of the host's half. options: with the requests that may run."""
    executor, ops, prefills = made.executor, made.executor.device.ops, made.executor.prefills
    assert options.max_running_requests, "it has a value on every device"
    config = SchedulerConfig(
        slots=executor.attn.pool.slots,
        max_rows=options.max_running_requests,
        max_span=max(made.spans.values()),
        vocab=executor.model.config.vocab_size,
        chunk_tokens=_chunk_of(options, executor),
        radix=not options.disable_radix_cache,
        whole_prompts=executor.model.encoder is not None,
        ahead=SLOTS_AHEAD,
        draws_alike=not ops.draws_by_row,
        edits_by_row=ops.edits_by_row,
        deferral=executor.deferral,
        credited=options.drafter_spec.credited,
        states=StateSizes(made.states, lazy=ops.lazy_states) if made.states else None,
        mixes=mixes,
        prefill_sizes=tuple(prefills.sizes),
        mixed_sizes=tuple(prefills.mixed_sizes),
        prefill_seconds=tuple(sorted(prefills.seconds.items())),
        at_once=AT_ONCE if prefills.sizes else 1,
    )
    if drafter is None:
        return config
    return replace(
        config,
        lookahead=drafter.lookahead,
        reads_images=drafter.reads_images,
        tail=drafter.tail,
        initial_confidence=drafter.initial_confidence,
        skips_extend=frozenset(filter(drafter.skips_extend, policy.menu)),
    )
