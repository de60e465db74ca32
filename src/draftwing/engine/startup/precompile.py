"""Compiles the GPU's kernels in a process of its own, see `compiler_process`, while the engine's loads weights.

Which kernels an engine needs is not written down anywhere: this process builds the engine of the same options on
tensors without data, runs the steps that measure memory and captures all graphs, and takes note of what would have been
launched. Further processes compile each kernel as soon as it is known. It uses no GPU.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from draftwing.config.drafters import LM_HEAD
from draftwing.config.options import Options
from draftwing.engine.startup import memory as sizing
from draftwing.engine.startup.adapters import adapted_kinds
from draftwing.engine.startup.compiler_process import FAILED, STAGES, Job
from draftwing.engine.startup.executor import graph_size_of
from draftwing.engine.startup.models import OF_LM_HEADS, Precision
from draftwing.engine.startup.without_data import (
    MADE,
    NoDevice,
    hold_experts,
    hold_fp8,
    leave_out,
    multiplies_fp8,
    width_of,
)
from draftwing.layers.experts import ExpertLinear
from draftwing.layers.latent import HeadsOp
from draftwing.layers.linear import Linear
from draftwing.machine import processors
from draftwing.models.config import ModelConfig
from draftwing.models.decoder import SHARED, DecoderModel
from draftwing.models.heads.base import is_large
from draftwing.models.loader import load_config
from draftwing.models.quantised.config import Quantization
from draftwing.ops.gemm import cuda_fp8, cuda_wgmma
from draftwing.ops.gemm.cuda_groups import Width
from draftwing.parallel.ranks import Absent, Alone, Ranks

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

    from draftwing.engine.build import Parts
    from draftwing.ops.experts.cuda import Layout

_MAX_PROCESSES = 16  # that compile; each has Triton's compiler in memory


class Launch(NamedTuple):
    """A kernel as Triton compiles it."""

    module: str
    name: str
    specialization: str  # JSON
    # Of its code. Triton's hash depends on which of the functions that a kernel calls were hashed before; where it was
    # found that is as in the engine, which launches in the same order.
    cache_key: str


class Needed(NamedTuple):
    launches: list[Launch]  # each kernel once for each way it is compiled
    experts: set[Layout]  # of the weights of experts that `ops.experts.cuda` takes
    heads: set[int]  # chunks of a row of the weights that `ops.gemm.cuda_heads` takes
    fp8: bool  # whether `ops.gemm.cuda_fp8` takes weights


def main(connection: int) -> None:
    """Does one job. connection: its file, by which the `Job` comes and the stages go that are compiled."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
    os.nice(5)  # loading comes first
    with Connection(connection) as engine:
        try:
            _do_job(engine)
        except BaseException as error:
            _say(engine, FAILED, f"{type(error).__name__}: {error}")
            raise


def _do_job(engine: Connection) -> None:
    import draftwing.ops.triton.ops  # noqa: F401 (the processes that compile get a copy of what is imported)
    from draftwing.engine import build  # noqa: F401
    from draftwing.ops.triton.hashes import hash_all

    hash_all()  # as the engine's process does
    torch.set_num_threads(1)  # the process forks
    try:
        packed = engine.recv_bytes()
    except EOFError:  # there is nothing to do
        return
    job, done = pickle.loads(packed), engine.recv()
    _compile(job, partial(_say, engine))
    with suppress(OSError):  # then it is done again the next time
        done.parent.mkdir(parents=True, exist_ok=True)
        done.touch()


def _say(engine: Connection, *words: str) -> None:
    with suppress(OSError):  # the engine has ended; the next one finds what is compiled
        engine.send(words)


def _compile(job: Job, say: Callable[[str, str], None]) -> None:
    """say: is told the stages all of whose kernels are compiled, in their order, and what that took."""
    started, running, told = time.monotonic(), list[Future[Any]](), set[str]()
    leave_gpu(job.capability, job.memory)
    count = max(1, min(processors().threads - 1, _MAX_PROCESSES))
    with ThreadPoolExecutor(1) as teller, ProcessPoolExecutor(count, get_context("fork")) as pool:

        def submit(function: Callable[..., object], *args: object) -> None:
            running.append(pool.submit(function, *args))

        def tell(stage: str, found: str, needed: Sequence[Future[Any]]) -> None:
            for one in needed:
                one.result()
            say(stage, f"{found} and compiled in {time.monotonic() - started:.1f}, imports aside")

        def before(stage: str) -> None:
            for ended in STAGES[: STAGES.index(stage)] if stage else STAGES:
                if ended not in told:
                    told.add(ended)
                    found = f"{len(running)} were found in {time.monotonic() - started:.1f} s"
                    teller.submit(tell, ended, found, tuple(running))

        submit(_compile_driver)  # makes all processes, before anything has run here
        for product in _products(job):
            submit(*product)
        collect(job, partial(submit, compile_with_launcher), submit, before)
        for one in running:
            one.result()


def leave_gpu(capability: tuple[int, int], memory: int) -> None:
    """Has Triton compile for a device with so much memory from now on, in a process that uses none."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from draftwing.ops.triton.common import leave_memory

    driver.set_active(_Driver(GPUTarget("cuda", capability[0] * 10 + capability[1], 32)))
    leave_memory(memory)


def collect(
    job: Job,
    found: Callable[[Launch], object] = lambda launch: None,
    held: Callable[..., object] = lambda compiles, *args: None,
    before: Callable[[str], object] = lambda stage: None,
) -> Needed:
    """Returns what an engine launches. Leaves this process without a GPU. found: is called with each launch at once;
    held: with what compiles for weights of a form, and its arguments.  before: as `assemble` has it, and called with ""
    after the last stage."""
    from triton import knobs

    launches: list[Launch] = []

    def note(*, fn: Any, key: str, compile: dict[str, Any], **rest: Any) -> bool:
        code = fn.jit_function.cache_key
        launches.append(Launch(fn.module, fn.name, compile["specialization_data"], code))
        fn.jit_function.device_caches[_Driver.DEVICE][0][key] = _Nothing()
        found(launches[-1])
        return True  # there is no need to compile it

    leave_gpu(job.capability, job.memory)
    knobs.runtime.jit_cache_hook = note
    try:
        models = [model_without_data(job, rank) for rank in _unlike_ranks(job)]
        layouts: set[Layout] = set().union(*(_layouts(one, job.dtype) for one in models))
        chunks: set[int] = set().union(*map(_chunks_of_heads, models))
        model = models[0]
        needed = Needed(launches, layouts, chunks, multiplies_fp8(model))
        for product in _held_products(job, needed):
            held(*product)
        _run_without_data(job, model, before)
    finally:
        knobs.runtime.jit_cache_hook = None
    return needed


def compile_launch(launch: Launch) -> CompiledKernel:
    function = getattr(importlib.import_module(launch.module), launch.name)
    function.hash = launch.cache_key
    return function.preload(launch.specialization)


def compile_with_launcher(launch: Launch) -> None:
    """Compiles a kernel and the C code by which Python launches it. Triton makes that for each signature when a kernel
    first runs, and a C compiler takes 0.2 s."""
    from triton.backends.nvidia.driver import CudaLauncher

    kernel = compile_launch(launch)
    CudaLauncher(kernel.src, kernel.metadata)


def _compile_driver() -> None:
    """Compiles the C code by which Triton loads kernels."""
    from triton.backends.nvidia.driver import CudaUtils

    CudaUtils()


def _layouts(model: DecoderModel, dtype: torch.dtype) -> set[Layout]:
    from draftwing.ops.experts import cuda as gemm_experts

    weights = [part.device_weight for part in model.modules() if isinstance(part, ExpertLinear)]
    return {gemm_experts.layout_of(w) for w in weights if w is not None and gemm_experts.takes(w, dtype)}


def _chunks_of_heads(model: DecoderModel) -> set[int]:
    from draftwing.ops.gemm.cuda_heads import HeadGemm

    ops = [part.op for part in model.modules() if isinstance(part, Linear)]
    products = [op.products for op in ops if isinstance(op, HeadsOp)]
    return {made.chunks for made in products if isinstance(made, HeadGemm)}


def _products(job: Job) -> Iterator[tuple[Any, ...]]:
    """Yields functions that compile kernels of dense products, with their arguments."""
    from draftwing.ops.gemm import cuda as gemm
    from draftwing.ops.gemm import cuda_dense, cuda_groups, cuda_many

    config = load_config(job.path)
    for shapes in gemm.programs(gemm.shapes_for(job.capability, job.dtype)):
        yield gemm.compile_ahead, job.dtype, job.capability, shapes
    if cuda_wgmma.runs_on(job.capability) and job.dtype == torch.bfloat16:
        for groups in cuda_dense.GROUPS:
            yield cuda_dense.compile_ahead, groups, job.capability
    if cuda_wgmma.runs_on(job.capability) and job.options.deterministic:
        for program in cuda_many.PROGRAMS:
            if job.dtype == torch.bfloat16 or program[0] == cuda_many.SHARES:
                yield cuda_many.compile_ahead, program, job.dtype, job.capability
    for width in _widths(job.options.quantization, config.quantization) | _width_of_lm_head(job, config):
        for some in gemm.programs(cuda_groups.shapes_for(width.bits, job.capability, job.dtype)):
            yield cuda_groups.compile_ahead, job.dtype, width, job.capability, some


def _held_products(job: Job, needed: Needed) -> Iterator[tuple[Any, ...]]:
    """Yields the same of products with weights of these forms."""
    from draftwing.ops.experts import cuda as gemm_experts
    from draftwing.ops.experts import cuda_many as experts_many
    from draftwing.ops.gemm import cuda_heads

    if needed.fp8:
        yield from ((cuda_fp8.compile_ahead, job.capability, many) for many in (False, True))
    yield from ((gemm_experts.compile_ahead, job.dtype, layout, job.capability) for layout in needed.experts)
    if cuda_wgmma.runs_on(job.capability) and any(layout.kind == gemm_experts.DENSE for layout in needed.experts):
        yield experts_many.compile_ahead, job.dtype, job.capability
    yield from ((cuda_heads.compile_ahead, job.dtype, chunks, job.capability) for chunks in needed.heads)


def _widths(asked: str, stored: Quantization | None) -> set[Width]:
    """Returns widths of weights that stay quantised, as far as the config says. asked: `--quantization`."""
    if asked == "none":
        return set()
    schemes = [rule.scheme for rule in stored.rules if rule.scheme is not None] if stored is not None else []
    found = {MADE[asked]} if asked in MADE else set()
    kept = (width_of(scheme) for scheme in schemes if scheme.bits <= 4 or scheme.symmetric or scheme.real)
    found |= {width for width in kept if width is not None}
    return found | ({MADE["int8"]} if found else set())  # of draft heads


def _may_multiply_fp8(job: Job, stored: Quantization | None) -> bool:
    """Returns whether weights are for activations in fp8, or are made so, as far as the config says."""
    asked = job.options.fp8_activations == "auto" and job.options.quantization != "none"
    made = job.options.quantization == "fp8"
    stores = stored is not None and any(rule.scheme is not None and rule.scheme.dynamic for rule in stored.rules)
    return asked and job.dtype == torch.bfloat16 and (made or stores)


def _width_of_lm_head(job: Job, config: ModelConfig) -> set[Width]:
    """Returns the width of a copy of the lm_head for drafts, where there may be one."""
    asked, spec = job.options.speculative_lm_head_quantization, job.options.drafter_spec
    by_default = job.dtype.itemsize == 2 and is_large(config.vocab_size, config.hidden_size)
    if asked == "none" or LM_HEAD not in spec.options or (asked == "auto" and not by_default):
        return set()
    return {MADE[OF_LM_HEADS if asked == "auto" else asked]}


class _Driver:
    """What Triton asks of a device before it launches."""

    DEVICE = 0

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return self.DEVICE

    def get_current_stream(self, device: int) -> int:
        return 0


class _Nothing:
    """Stands in place of a compiled kernel."""

    function = packed_metadata = None

    def launch_metadata(self, *args: Any) -> None:
        pass

    def run(self, *args: Any) -> None:
        pass


def _rank_alone(options: Options, rank: int) -> Ranks:
    if options.tp_size == 1:
        return Alone(options.enable_tp_invariance)
    return Absent(options.tp_size, rank, options.enable_expert_parallel, options.enable_tp_invariance)


def _unlike_ranks(job: Job) -> tuple[int, ...]:
    """Returns rank 0, which has most of everything, and the last one, which has least, where that is not the same."""
    config, last = load_config(job.path), job.options.tp_size - 1
    shares = [config.spread(_rank_alone(job.options, rank)) for rank in (0, last)]
    return (0, last) if shares[0] != shares[1] else (0,)


def model_without_data(job: Job, rank: int = 0) -> DecoderModel:
    """Returns a rank's share of the target on the meta device, packed."""
    options, config = job.options, load_config(job.path)
    ranks = _rank_alone(options, rank)
    model = DecoderModel(config, job.dtype, "meta", ranks).requires_grad_(False)
    hold_experts(model, job.dtype, options.quantization, config.quantization)
    if cuda_wgmma.runs_on(job.capability) and _may_multiply_fp8(job, config.quantization):
        hold_fp8(model, options.quantization)
    model.pack(NoDevice().ops, options.deterministic, False, SHARED in adapted_kinds(options))
    leave_out(model)
    return model


def _run_without_data(job: Job, model: DecoderModel, before: Callable[[str], object]) -> Parts:
    from draftwing.engine.build import assemble  # which imports this module
    from draftwing.engine.startup.models import make_drafter

    device = NoDevice()
    tokens = 2 * model.config.max_positions + 4096  # any pool that the context fits into
    options = dataclasses.replace(
        job.options, max_total_tokens=tokens, mem_fraction_static=None, enable_torch_compile=False
    )
    precision = Precision(job.dtype, job.kv_dtype)
    draft_path = job.draft_path or job.path
    drafter, policy = make_drafter(options, draft_path, job.token_ids, model, precision, device)
    rig = sizing.Rig(model, drafter, policy.menu, precision.kv_dtype, device)
    sizing.trial(options, rig, graph_size_of(options))
    parts = assemble(options, model, precision, device, drafter, policy, before=before)
    before("")
    while parts.later:
        parts.run_later()
    return parts
