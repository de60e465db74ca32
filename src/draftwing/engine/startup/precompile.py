"""Compiles the GPU's kernels in a process of its own, while the engine's loads weights.

Triton and NVRTC keep what they compiled in folders of the user's; this process fills them. Which kernels an engine
needs is not written down anywhere: the process builds the engine of the same options on tensors without data, runs the
steps that measure memory and captures all graphs, and takes note of what would have been launched. Further processes
compile each kernel as soon as it is known.

It uses no GPU. Where it fails, or misses a kernel, that is compiled when it is first launched.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from importlib import resources
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from draftwing import __version__
from draftwing.config.drafters import LM_HEAD
from draftwing.config.options import SERVER, Options
from draftwing.engine.devices.base import Download
from draftwing.engine.devices.cpu import CpuDevice
from draftwing.engine.precision import Precision
from draftwing.engine.startup import memory as sizing
from draftwing.engine.startup.executor import graph_size_of
from draftwing.layers.config import LayerConfig
from draftwing.layers.experts import ExpertLinear, ExpertMLP
from draftwing.layers.latent import HeadsOp
from draftwing.layers.linear import Linear
from draftwing.layers.linear_ops.base import LinearOp
from draftwing.layers.linear_ops.groups import alike, joined
from draftwing.machine import processors
from draftwing.models.config import ModelConfig
from draftwing.models.decoder import DecoderModel
from draftwing.models.heads.quantized_lm_head import is_large
from draftwing.models.loader import load_config
from draftwing.models.quantised.config import Quantization, Scheme
from draftwing.ops.cuda.gemm_groups import Width
from draftwing.ops.groups import WHOLE, PackedGroups, groups_of_row, shift_of
from draftwing.ops.types import MX_BLOCK, MXRows
from draftwing.parallel.ranks import ALONE, Absent, Ranks

if TYPE_CHECKING:
    from draftwing.engine.build import Parts
    from draftwing.ops.cuda.gemm_experts import Layout

log = logging.getLogger("draftwing")

PATIENCE = 60.0  # seconds that an engine which has loaded waits
_MAX_PROCESSES = 16  # that compile; each has Triton's compiler in memory
_ANY_EXPERT = "model.layers.0.mlp.experts.0.gate_proj"
_SHARED_EXPERT = "model.layers.0.mlp.shared_expert.gate_proj"
# By what options call them.
MADE = {"fp8": Width(8, False, WHOLE, True), "w4a16": Width(4, False, 1), "int8": Width(8, False, WHOLE)}


class Job(NamedTuple):
    options: Options  # resolved, for the device
    path: Path  # of the target
    draft_path: Path | None
    token_ids: Tensor | None
    dtype: torch.dtype
    kv_dtype: torch.dtype
    capability: tuple[int, int]  # of the device


class Launch(NamedTuple):
    """A kernel as Triton compiles it."""

    module: str
    name: str
    specialization: str  # JSON


class Needed(NamedTuple):
    launches: list[Launch]  # each kernel once for each way it is compiled
    experts: set[Layout]  # of the weights of experts that `ops.cuda.gemm_experts` takes
    heads: set[int]  # chunks of a row of the weights that `ops.cuda.gemm_heads` takes


class Precompilation:
    """The process that compiles, seen from the engine's."""

    def __init__(self, job: Job) -> None:
        """Starts it, unless it has run to its end for such a job before."""
        from triton import knobs

        job = job._replace(options=_engine_options(job.options))
        packed = pickle.dumps(job)
        self._done = Path(knobs.cache.dir) / f"draftwing-{_digest(packed)}"
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (read when the process has ended)
        if self._done.exists():
            return
        hidden = {"CUDA_VISIBLE_DEVICES": ""}
        env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | hidden
        # -P: nothing is imported from the current folder.  nice: loading comes first
        run = "import os; os.nice(5); from draftwing.engine.startup.precompile import main; main()"
        command = [sys.executable, "-P", "-c", run]
        with tempfile.TemporaryFile() as source:  # a pipe would have to be read before there is room for all of it
            source.write(packed)
            source.seek(0)
            self._process = subprocess.Popen(
                command, stdin=source, stdout=subprocess.DEVNULL, stderr=self._errors, env=env, start_new_session=True
            )

    def wait(self) -> None:
        """Waits until it has ended; never raises because of it."""
        if self._process is None:
            return
        started = time.monotonic()
        try:
            code = self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.stop()
            log.warning("kernels that were not compiled within %.0f s make the start slower", PATIENCE)
            return
        if code == 0:
            with suppress(OSError):  # then it is done again the next time
                self._done.parent.mkdir(parents=True, exist_ok=True)
                self._done.touch()
            log.info("waited %.1f s for kernels to be compiled", time.monotonic() - started)
            log.debug("start: %s", self._last_words())
        else:
            last = self._last_words() or f"exit code {code}"
            log.warning("kernels were not compiled ahead, which makes the start slower: %s", last)

    def _last_words(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip().rpartition("\n")[2]

    def stop(self) -> None:
        """Ends it, with the processes that it started."""
        if self._process is not None and self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _engine_options(options: Options) -> Options:
    """Returns the options that kernels may depend on, and all others at their defaults: a port makes no other job."""
    found: dict[str, Any] = {"random_seed": 0}
    found |= {spec.name: spec.default for spec in dataclasses.fields(options) if spec.metadata["group"] == SERVER}
    return dataclasses.replace(options, **found)


def precompile(job: Job) -> Precompilation | None:
    """Starts to compile for the job; None where it cannot."""
    try:
        return Precompilation(job)
    except (OSError, ImportError, AttributeError, pickle.PicklingError) as error:
        log.warning("kernels are not compiled ahead, which makes the start slower: %s", error)
        return None


def _digest(job: bytes) -> str:
    import triton

    found = hashlib.sha256(f"{__version__} {triton.__version__} ".encode() + job)
    for package in ("draftwing.ops.triton", "draftwing.ops.cuda"):
        for file in sorted(resources.files(package).iterdir(), key=lambda file: file.name):
            if file.name.endswith((".py", ".cu")):
                found.update(file.read_bytes())
    return found.hexdigest()[:32]


# -- in the process ---------------------------------------------------------------------------------------------------


def main() -> None:
    import draftwing.ops.triton.ops  # noqa: F401 (the processes that compile get a copy of what is imported)
    from draftwing.engine import build  # noqa: F401

    job = pickle.load(sys.stdin.buffer)
    assert isinstance(job, Job)
    started = time.monotonic()
    torch.set_num_threads(1)  # the process forks
    leave_gpu(job.capability)
    with ProcessPoolExecutor(max(1, min(processors().threads - 1, _MAX_PROCESSES)), get_context("fork")) as pool:
        running = [pool.submit(_compile_products, job)]  # makes all processes, before anything has run here
        needed = collect(job, lambda launch: running.append(pool.submit(compile_launch, launch)))
        running += [pool.submit(_compile_experts, job, layout) for layout in needed.experts]
        running += [pool.submit(_compile_heads, job, chunks) for chunks in needed.heads]
        traced = time.monotonic() - started
        for one in running:
            one.result()
    count, took = len(needed.launches), time.monotonic() - started
    print(f"{count} kernels were found in {traced:.1f} s and compiled in {took:.1f}, imports aside", file=sys.stderr)


def leave_gpu(capability: tuple[int, int]) -> None:
    """Has Triton compile for such a device from now on, in a process that uses none."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    driver.set_active(_Driver(GPUTarget("cuda", capability[0] * 10 + capability[1], 32)))


def collect(job: Job, found: Callable[[Launch], object] = lambda launch: None) -> Needed:
    """Returns what an engine launches. Leaves this process without a GPU. found: is called with each launch at once."""
    from triton import knobs

    launches: list[Launch] = []

    def note(*, fn: Any, key: str, compile: dict[str, Any], **rest: Any) -> bool:
        launches.append(Launch(fn.module, fn.name, compile["specialization_data"]))
        fn.jit_function.device_caches[_Driver.DEVICE][0][key] = _Nothing()
        found(launches[-1])
        return True  # there is no need to compile it

    leave_gpu(job.capability)
    knobs.runtime.jit_cache_hook = note
    try:
        parts = _run_without_data(job)
    finally:
        knobs.runtime.jit_cache_hook = None
    return Needed(launches, _layouts(parts.model, job.dtype), _chunks_of_heads(parts.model))


def compile_launch(launch: Launch) -> None:
    function = getattr(importlib.import_module(launch.module), launch.name)
    function.preload(launch.specialization)


def _layouts(model: DecoderModel, dtype: torch.dtype) -> set[Layout]:
    from draftwing.ops.cuda import gemm_experts

    weights = [part.device_weight for part in model.modules() if isinstance(part, ExpertLinear)]
    return {gemm_experts.layout_of(w) for w in weights if w is not None and gemm_experts.takes(w, dtype)}


def _chunks_of_heads(model: DecoderModel) -> set[int]:
    from draftwing.ops.cuda.gemm_heads import HeadGemm

    ops = [part.op for part in model.modules() if isinstance(part, Linear)]
    products = [op.products for op in ops if isinstance(op, HeadsOp)]
    return {made.chunks for made in products if isinstance(made, HeadGemm)}


def _compile_products(job: Job) -> None:
    from draftwing.ops.cuda import gemm, gemm_groups, gemm_tall

    gemm.compile_ahead(job.dtype, job.capability)
    config = load_config(job.path)
    widths = _widths(job.options.quantization, config.quantization)
    for width in widths | _width_of_lm_head(job, config):
        gemm_groups.compile_ahead(job.dtype, width, job.capability)
    for width in widths:
        gemm_tall.compile_ahead(job.dtype, width, job.capability)


def _compile_experts(job: Job, layout: Layout) -> None:
    from draftwing.ops.cuda import gemm_experts

    gemm_experts.compile_ahead(job.dtype, layout, job.capability)


def _compile_heads(job: Job, chunks: int) -> None:
    from draftwing.ops.cuda import gemm_heads

    gemm_heads.compile_ahead(job.dtype, chunks, job.capability)


def _widths(asked: str, stored: Quantization | None) -> set[Width]:
    """Returns widths of weights that stay quantised, as far as the config says. asked: `--quantization`."""
    if asked == "none":
        return set()
    schemes = [rule.scheme for rule in stored.rules if rule.scheme is not None] if stored is not None else []
    found = {MADE[asked]} if asked in MADE else set()
    found |= {width_of(scheme) for scheme in schemes if scheme.bits <= 4 or scheme.symmetric or scheme.real}
    return found | ({MADE["int8"]} if found else set())  # of draft heads


def _width_of_lm_head(job: Job, config: ModelConfig) -> set[Width]:
    """Returns the width of a copy of the lm_head for drafts, where there may be one."""
    asked, spec = job.options.speculative_lm_head_quantization, job.options.drafter_spec
    by_default = job.dtype == torch.bfloat16 and is_large(config.vocab_size, config.hidden_size)
    if asked == "none" or LM_HEAD not in spec.options or (asked == "auto" and not by_default):
        return set()
    return {MADE["int8" if asked == "auto" else asked]}


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


def _run_without_data(job: Job) -> Parts:
    from draftwing.engine.build import assemble  # which imports this module
    from draftwing.engine.startup.drafter import make_drafter

    device = NoDevice()
    config = load_config(job.path)
    tokens = 2 * config.max_positions + 4096  # any pool that the context fits into
    options = dataclasses.replace(
        job.options, max_total_tokens=tokens, mem_fraction_static=None, enable_torch_compile=False
    )
    ranks: Ranks = ALONE
    if options.tp_size > 1:
        ranks = Absent(options.tp_size, expert_parallel=options.enable_expert_parallel)
    model = DecoderModel(config, job.dtype, "meta", ranks).requires_grad_(False)
    hold_experts(model, job.dtype, options.quantization, config.quantization)
    model.pack(device.ops, options.deterministic)
    leave_out(model)
    precision = Precision(job.dtype, job.kv_dtype)
    draft_path = job.draft_path or job.path
    drafter, policy = make_drafter(options, draft_path, job.token_ids, model, precision, device)
    rig = sizing.Rig(model, drafter, policy.menu, precision.kv_dtype, device)
    sizing.trial(options, rig, graph_size_of(options))
    parts = assemble(options, model, precision, device, drafter, policy)
    while parts.executor.graphs.later:
        parts.executor.capture_next()
    return parts


def leave_out(model: DecoderModel) -> None:
    """Lets layers do nothing that are as others are: they launch the same kernels. Two of each kind stay, and the last:
    a layer may do some of the work of the next."""
    kinds: list[LayerConfig] = []
    for i, config in enumerate(model.config.spread(model.ranks)[:-1]):
        if kinds.count(config) == 2:
            model.layers[i] = _NoLayer()
        else:
            kinds.append(config)


class _NoLayer(nn.Module):
    """Stands in place of a `DecoderLayer`."""

    end = None

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return x

    def under(self, norm: nn.Module, normed: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return x, normed


class NoDevice(CpuDevice):
    """Takes everything and does nothing."""

    kind = "meta"
    has_own_memory = True

    def upload(self, host: Any) -> Tensor:
        return torch.empty(len(host), dtype=torch.int64, device=self.device)

    def upload_into(self, out: Tensor, host: Any) -> None:
        pass

    def download(self, tensor: Tensor) -> Download:
        shape = tuple(tensor.shape)
        return Download(lambda: np.zeros(shape, np.int64), 0.0)

    def record(self, fn: Any, pool: str = "") -> Any:
        return (lambda: None), fn()

    def peak(self, fn: Any) -> int:
        fn()
        return 0


# -- weights of experts that stay quantised, without data: their form decides which kernels are launched ---------------


def width_of(scheme: Scheme) -> Width:
    zeros = not scheme.symmetric and not scheme.real
    return Width(8 if scheme.real or scheme.bits > 4 else 4, zeros, shift_of(scheme.wide), scheme.real)


def hold_experts(model: DecoderModel, dtype: torch.dtype, asked: str, stored: Quantization | None) -> None:
    """Puts stand-ins for the experts of a model on the meta device that is to be packed. asked: `--quantization`."""
    if asked == "none":
        return
    held: list[tuple[str, Linear]] = []
    for part in model.modules():
        if isinstance(part, ExpertLinear):
            held.append((_ANY_EXPERT, part))
        elif isinstance(part, ExpertMLP) and part.shared is not None and (stored is None or stored.method != "mxfp4"):
            held += [(_SHARED_EXPERT, part.shared.gate_up), (_SHARED_EXPERT, part.shared.down)]
    for name, linear in held:
        weight = _held(name, linear.out_features, linear.in_features, dtype, asked, stored)
        if weight is not None:
            linear.op = _Held(linear, weight, dtype)


class _Held(LinearOp):
    def __init__(self, layer: Linear, weight: PackedGroups | MXRows, dtype: torch.dtype) -> None:
        super().__init__(layer)
        self._weight, self._dtype = weight, dtype

    def groups(self) -> PackedGroups | MXRows | None:
        return self._weight

    def can_append(self, other: LinearOp) -> bool:
        return isinstance(other, _Held) and alike([self._weight, other._weight])

    def append(self, other: LinearOp) -> None:
        assert isinstance(other, _Held)
        whole = joined([self._weight, other._weight])
        assert whole is not None
        self._weight = whole

    def dense_weight(self) -> Tensor:
        return torch.empty(self.layer.out_features, self.layer.in_features, dtype=self._dtype, device="meta")


def _held(
    name: str, rows: int, columns: int, dtype: torch.dtype, asked: str, stored: Quantization | None
) -> PackedGroups | MXRows | None:
    if stored is not None and stored.method == "mxfp4":
        return MXRows(_bytes(rows, columns // 2), _bytes(rows, columns // MX_BLOCK))
    scheme = None if stored is None else stored.scheme_of(name)
    width = MADE.get(asked) if scheme is None else width_of(scheme)
    if width is None or rows % 16 or columns % 64:
        return None
    scales = torch.empty(rows // 16, groups_of_row(columns, width.shift), 8, 2, dtype=dtype, device="meta")
    zeros = torch.empty_like(scales) if width.zeros else None
    codes = _bytes(rows // 16, columns * 2 * width.bits)
    return PackedGroups(codes, scales, zeros, width.bits, width.shift, None, width.fp8)


def _bytes(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8, device="meta")
