"""A file that keeps costs of steps for the next start: one for each model, drafter, device and build."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from draftwing.config.options import Options
from draftwing.config.trees import TreeShape
from draftwing.engine.devices.base import Device
from draftwing.engine.startup.models import Precision
from draftwing.files import cache_folder, load_json, write_json
from draftwing.models.weight_files import bytes_of
from draftwing.sched.policy.cost import StepCost
from draftwing.version import __version__

log = logging.getLogger("draftwing")

MAX_FILES = 100  # of as many kinds of engine; the oldest go
MAX_STARTS = 8  # that measure: a machine that is busy for so long, or has a quota of its processors, stays so
# Options that change what a step costs, besides those of speculation.
_PRICED = (
    "quantization", "fp8_activations", "fast_numerics", "enable_overlap", "max_running_requests",
    "cuda_graph_max_bs", "disable_cuda_graph", "enable_torch_compile", "torch_compile_max_bs", "tp_size",
    "enable_expert_parallel", "enable_tp_invariance",
    "context_length", "max_total_tokens",  # how many parts a captured step reads a context in
)  # fmt: skip
_NOT_PRICED = (
    "speculative_algorithm", "speculative_draft_model_path", "speculative_fixed_shape", "speculative_explain",
)  # fmt: skip
_CODE = ("ops", "parallel", "kv", "layers", "models", "sampling", "spec", "engine")  # folders of what a step runs


class CostFile:
    """Keeps step costs of one kind of engine. What cannot be read or written is logged and costs a measurement.

    settled: whether two starts, the later one on a quiet machine, have measured the same, or `MAX_STARTS` have
    measured. Until then each start measures, and what a busy machine has added goes.  quiet: whether costs were
    measured on a quiet machine. Those replace others, and no others change them: waiting may have been taken off that
    no step had to wait for."""

    def __init__(self, key: Mapping[str, Any]) -> None:
        """key: all that costs depend on, as JSON has it."""
        self.key = json.loads(json.dumps(key, sort_keys=True))
        digest = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()
        self.name = f"{digest[:32]}.json"
        self.settled = self.quiet = False
        self._starts = 0  # that have measured

    @property
    def path(self) -> Path:
        """Raises RuntimeError where the user has no home."""
        return cache_folder() / "prices" / self.name

    def read(self, menu: Sequence[TreeShape], stepwise: bool) -> StepCost | None:
        """Returns what an earlier engine left; None if there is nothing, or nothing that can be used."""
        try:
            content = load_json(self.path)
            if content["key"] != self.key:
                raise ValueError("it is of another engine")
            cost = StepCost.from_json(content["prices"], menu, stepwise)
            self._starts = count if type(count := content.get("starts")) is int else 0
            self.settled = cost.complete and content.get("settled") is True
            self.quiet = content.get("quiet") is True
            return cost
        except FileNotFoundError:
            return None
        except (OSError, RuntimeError, ValueError, TypeError, KeyError) as error:
            log.debug("costs of steps are measured anew: %s cannot be used: %s", self.name, error)
            return None

    def compared(self, measured: StepCost, kept: StepCost | None, quiet: bool) -> StepCost:
        """Returns what is to be believed of costs that were measured now and of those that `read` gave, and keeps it.
        quiet: whether the machine had nothing else to do."""
        cost = measured if kept is None else kept
        if kept is not None and quiet >= self.quiet:
            self.settled = kept.look_again(measured, instead=quiet > self.quiet) and quiet
        self._starts += 1
        self.settled |= self._starts >= MAX_STARTS
        self.quiet |= quiet
        self.write(cost)
        return cost

    def write(self, cost: StepCost) -> None:
        """Keeps them. Of many files the oldest go."""
        try:
            known = {"settled": self.settled, "quiet": self.quiet, "starts": self._starts}
            write_json(self.path, {"key": self.key, **known, "prices": cost.to_json()})
            files = sorted(self.path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
            for file in files[:-MAX_FILES]:
                file.unlink()
        except (OSError, RuntimeError) as error:
            log.info("costs of steps are not kept for the next start: %s", error)


def cost_file(
    options: Options, menu: Sequence[TreeShape], path: Path, draft: Path | None, precision: Precision, device: Device
) -> CostFile:
    """Returns the file for an engine of options `for_engine`. path, draft: of the two models."""
    names = [name for name in vars(options) if name.startswith("speculative_") and name not in _NOT_PRICED]
    return CostFile(
        {
            "build": [__version__, _build(), torch.__version__],
            "device": [device.name, device.ops.title, torch.get_num_threads()],
            "model": [str(path.absolute()), bytes_of(path)],
            "draft": draft and [str(draft.absolute()), bytes_of(draft)],
            "types": [str(precision.dtype), str(precision.kv_dtype)],
            "drafter": options.drafter,
            "menu": [list(shape) for shape in menu],
            "options": {name: getattr(options, name) for name in (*_PRICED, *names)},
        }
    )


@functools.cache  # 30 ms; a process keeps its code
def _build() -> str:
    """Returns a hash of which code this is: another version of a kernel has other costs."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    files = (file for folder in _CODE for file in (root / folder).rglob("*") if file.suffix in (".py", ".so", ".cu"))
    for file in sorted(files):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(root)} {len(content)} ".encode() + content)
    return digest.hexdigest()[:16]
