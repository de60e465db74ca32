"""Trains a head: the loop around its objective, on one device or, started by torchrun, on several.

A run can be killed at any moment and go on: the state it saves is complete or not there, and what comes next is a
function of the seed and the number of the step alone; there is no random state to keep.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import pickle
import re
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from draftwing.errors import ConfigError
from draftwing.files import replace_file
from draftwing.models.decoder import use_between
from draftwing.models.heads.block import BlockHead
from draftwing.train.blocks import BlockObjective
from draftwing.train.factors import HeadFactors
from draftwing.train.fit_config import AnyLoss, FitConfig
from draftwing.train.heads import AnyHead, TargetHead
from draftwing.train.kernels import kernels_take
from draftwing.train.losses import BlockLoss
from draftwing.train.optimizer import HeadOptimizer, trains_in_half
from draftwing.train.progress import Progress, Row, summary
from draftwing.train.store import (
    FeatureSource,
    epoch_batches,
    in_order,
    load_batches,
    stream,
    to_device,
    usable_lengths,
)
from draftwing.train.ttt import Objective

logger = logging.getLogger(__name__)

STATE_FILE = "state.pt"
_VERSION = 4
_BY_CLOCK = 10_000  # steps that a run of so many minutes has, until some have shown how long they take
# What torch raises for a file of which a part is missing or other bytes.
_DAMAGED = (
    OSError, EOFError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, pickle.UnpicklingError
)  # fmt: skip
# Of torch's message where there is no room: the bytes. A damaged file may ask for more than it has.
_NO_ROOM = re.compile(r"tried to allocate (\d+) bytes")
# What a run may change when it goes on; everything else would make it another run.
_FREE = ("log_every", "eval_every", "save_every")


class StateError(ConfigError):
    """A saved state that training cannot go on from: of another run or version of draftwing, or damaged."""


@dataclass(frozen=True)
class FitReport:
    """What a run did. steps: of the optimizer, earlier runs' included; seconds, tokens: of training, likewise. train,
    eval: the last rows of metrics.csv, empty where there is none. accept_<k> is how often the k-th draft of a chain is
    accepted where the text goes on as the target would greedily have it, accept_length one more than their sum."""

    steps: int
    seconds: float
    tokens: int
    train: Row
    eval: Row


def join_world(device: str = "cuda") -> torch.device:
    """Returns the device that this process is to build its head on. Under torchrun it joins the others first: NCCL
    between GPUs, gloo between CPUs."""
    if "RANK" not in os.environ:
        return torch.device(device)
    chosen = torch.device(device, int(os.environ["LOCAL_RANK"])) if device == "cuda" else torch.device(device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    return chosen


def make_objective(
    head: AnyHead, target_head: TargetHead, loss: AnyLoss, max_length: int
) -> Objective | BlockObjective:
    """Returns the objective of a head; makes its rotary table for texts of up to max_length tokens, and lets the
    kernels of training do its norms and activations where they take them."""
    if kernels_take(next(head.parameters())):
        from draftwing.train.kernels.layer_ops import training_ops

        use_between(head, training_ops())
    if isinstance(head, BlockHead):
        assert isinstance(loss, BlockLoss)
        return BlockObjective(head, target_head, loss, max_length)
    assert not isinstance(loss, BlockLoss)
    return Objective(head, target_head, loss, max_length)


class Fit:
    """Trains a head in place, on the device it is on; every process of a torchrun does alike (`join_world`)."""

    def __init__(
        self,
        head: AnyHead,
        target_head_fn: TargetHead,
        source: FeatureSource,
        eval_source: FeatureSource,
        config: FitConfig,
        out: Path,
        begin: Path | None = None,
    ) -> None:
        """target_head_fn: of the target.  out: folder for state.pt, metrics.csv, curves.png and TensorBoard events;
        a run that is found there goes on.  begin: folder of factors that a new one begins with.

        Raises ConfigError for features that do not fit the head and for no samples, StateError for a state of another
        run.
        """
        self.head, self.config, self.out = head, config, out
        self.source, self.eval_source = source, eval_source
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.factors = HeadFactors(head, config.head_rank, config.seed) if config.head_rank else None
        if self.factors is not None and begin is not None:
            self.factors.load(begin)
        self.trained: AnyHead | HeadFactors = head if self.factors is None else self.factors
        self.params = [param for param in self.trained.parameters() if param.requires_grad]
        _check(head, self.params, source, eval_source)
        self.device = self.params[0].device
        half = config.precision == "bfloat16" or (config.precision == "auto" and trains_in_half(self.device))
        self.autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=half)
        self.feature_dtype = None if half else self.params[0].dtype
        self.lengths = usable_lengths(source, config.max_length)
        if not self.lengths:
            raise ConfigError(f"nothing to train on: none of {len(source)} samples has 3 tokens or more")
        self.eval_lengths = usable_lengths(eval_source, config.max_length)
        self.total = _BY_CLOCK if config.minutes else config.steps or self._steps_of_epochs()
        self.objective = make_objective(head, target_head_fn, config.loss, config.max_length)
        self.optimizer = HeadOptimizer(self.trained, config.optimizer)
        self.step, self.seconds, self.tokens = 0, 0.0, 0
        self.window = self._no_stats()  # what was counted since the last row
        self.window_tokens, self.window_seconds = 0, 0.0
        history: list[Row] = []
        out.mkdir(parents=True, exist_ok=True)
        if (out / STATE_FILE).exists():
            history = self._restore(self._load())
        self._first = self.step  # of this process
        self._estimated: tuple[int, float] | None = None  # step and seconds of training of the last estimate
        self.wrapped: Any = self.objective
        if self.world > 1:
            ids = [self.device.index] if self.device.type == "cuda" else None
            self.wrapped = DistributedDataParallel(self.objective, ids, broadcast_buffers=False)
        self.progress = Progress(out, self.total, self.step, history, self.rank == 0)

    def _steps_of_epochs(self) -> int:
        config = self.config
        whole, part = divmod(config.epochs, 1)
        epochs = range(math.ceil(whole + part))
        counts = [len(epoch_batches(self.lengths, config.tokens, config.seed, epoch)) for epoch in epochs]
        batches = sum(counts[: int(whole)]) + part * counts[-1]
        return max(1, round(batches / (config.accumulate * self.world)))

    # -- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> FitReport:
        """Trains to the last step."""
        config = self.config
        try:
            batches = self._batches()
            self._clock = time.perf_counter()
            while self.step < self.total:
                norm = self._train_step(batches)
                self.step += 1
                self._tick()
                logged = self.step % config.log_every == 0
                if logged:
                    self._log(norm)
                if config.minutes and (logged or self._early()):
                    self._estimate()
                done = self.step >= self.total
                if done and not logged:
                    self._log(norm)
                self.progress.advance()
                if self.eval_lengths and (self.step % config.eval_every == 0 or done):
                    self._evaluate()
                if self.step % config.save_every == 0 or done:
                    self._save()
                self._clock = time.perf_counter()  # evaluating and saving is not training
            batches.close()
        finally:
            self.progress.close()
        return self._report()

    def _early(self) -> bool:
        """Returns whether this is step 1, 2, 4, 8, .. of this process, in which a slow machine would soon be out of
        time."""
        since = self.step - self._first
        return since < self.config.log_every and since & (since - 1) == 0

    def _estimate(self) -> None:
        """How many steps there are in all, by the clock, at the pace since the last estimate. The first one has none:
        in the first step of each process kernels are compiled, which says nothing."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self._tick()
        spent = self.seconds + self.window_seconds
        before, self._estimated = self._estimated, (self.step, spent)
        if before is None:
            return
        pace = (spent - before[1]) / (self.step - before[0])
        self.total = self.step + max(0, round((60 * self.config.minutes - spent) / max(pace, 1e-9)))
        if self.world > 1:
            total = torch.tensor([self.total], device=self.device)
            dist.broadcast(total, 0)
            self.total = int(total)
        self.progress.expect(self.total)

    def _tick(self) -> None:
        now = time.perf_counter()
        self.window_seconds += now - self._clock
        self._clock = now

    def _batches(self) -> Generator[tuple[Any, int, bool], None, None]:
        """Gives this process's batches from the current step on: a batch, the tokens of its whole step, whether it ends
        the step."""
        config, each = self.config, self.config.accumulate * self.world

        def steps() -> Iterator[list[list[int]]]:
            numbers = stream(self.lengths, config.tokens, config.seed, self.step * each)
            return (list(islice(numbers, each)) for _ in (count() if config.minutes else range(self.step, self.total)))

        mine = (batch for group in steps() for batch in group[self.rank :: self.world])
        with contextlib.closing(load_batches(self.source, mine, config.max_length)) as loaded:
            for group in steps():
                tokens = sum(self.lengths[i] for batch in group for i in batch)
                for turn in range(config.accumulate):
                    yield next(loaded), tokens, turn == config.accumulate - 1

    def _train_step(self, batches: Iterator[tuple[Any, int, bool]]) -> Tensor:
        """Takes a step; returns the gradient's norm."""
        config = self.config
        for turn in range(config.accumulate):
            batch, tokens, last = next(batches)
            batch = to_device(batch, self.device, self.feature_dtype)
            chance = self._generator(turn) if self.objective.random else None
            sync = contextlib.nullcontext() if last or self.world == 1 else self.wrapped.no_sync()
            with sync:
                with self.autocast:
                    loss, stats = self.wrapped(batch, chance)
                # Processes' gradients are averaged, their losses are to be summed.
                (loss * (self.world / tokens)).backward()
            self.window += stats
        self.window_tokens += tokens
        self.tokens += tokens
        if self.factors is not None:
            self.factors.take_gradients()
        norm = torch.nn.utils.clip_grad_norm_(self.params, config.clip)
        self.optimizer.step(config.learning_rate(self.step, self.total, self.head.width))
        if self.factors is not None:
            self.factors.write()
        return norm

    def _generator(self, turn: int) -> torch.Generator:
        """Returns the generator of a forward pass's draws: the same whether or not the run was interrupted before."""
        number = (self.step * self.config.accumulate + turn) * self.world + self.rank
        return torch.Generator(self.device).manual_seed((self.config.seed << 32) + number)

    @torch.no_grad()
    def _evaluate(self) -> None:
        config, stats = self.config, self._no_stats()
        mine = in_order(self.eval_lengths, config.tokens)[self.rank :: self.world]
        for batch in load_batches(self.eval_source, mine, config.max_length):
            with self.autocast:
                stats += self.objective(to_device(batch, self.device, self.feature_dtype))[1]
        self.progress.add({"step": self.step, "split": "eval", **self._metrics(stats)})

    # -- numbers ----------------------------------------------------------------------------------------------------

    def _no_stats(self) -> Tensor:
        steps, columns = self.objective.steps, self.objective.columns
        return torch.zeros(steps, columns, dtype=torch.float64, device=self.device)

    def _metrics(self, stats: Tensor) -> dict[str, float]:
        """Returns a row of metrics from the counts, summed over all processes."""
        stats = stats.clone()
        if self.world > 1:
            dist.all_reduce(stats)
        return self.objective.metrics(stats)

    def _log(self, norm: Tensor) -> None:
        rate = self.config.learning_rate(self.step - 1, self.total, self.head.width)
        metrics = self._metrics(self.window)  # waits for the device, whose time that is
        self._tick()
        speed = self.window_tokens / max(self.window_seconds, 1e-9)
        if not math.isfinite(metrics["loss"]) or not math.isfinite(float(norm)):
            raise ConfigError(f"the loss is not finite at step {self.step}: try a lower lr than {rate:.2g}")
        more = {"lr": rate, "gradient_norm": float(norm), "tokens_per_second": speed}
        self.progress.add({"step": self.step, "split": "train", **metrics, **more})
        self.seconds += self.window_seconds
        self.window, self.window_tokens, self.window_seconds = self._no_stats(), 0, 0.0

    def _report(self) -> FitReport:
        last = {str(row["split"]): row for row in self.progress.history}
        report = FitReport(self.step, self.seconds, self.tokens, last.get("train", {}), last.get("eval", {}))
        if self.rank == 0 and report.train:
            logger.info("%d steps, %d tokens in %.0f s; %s", self.step, self.tokens, self.seconds,
                        summary(report.eval or report.train))  # fmt: skip
        return report

    # -- state ------------------------------------------------------------------------------------------------------

    def _identity(self) -> dict[str, Any]:
        """Returns what must be the same for a run to go on."""
        config = {f"config.{k}": v for k, v in dataclasses.asdict(self.config).items() if k not in _FREE}
        shapes = {name: list(param.shape) for name, param in self.head.named_parameters()}
        return {
            **config,
            "steps in all": 0 if self.config.minutes else self.total,
            "processes": self.world,
            "samples": len(self.source),
            "their tokens": sum(self.lengths.values()),
            "parameters": shapes,
            "draft vocabulary": None if self.head.target_ids is None else self.head.target_ids.tolist(),
        }

    def _save(self) -> None:
        # The counts differ between processes: their sum is kept, by the first.
        window = self.window.clone()
        if self.world > 1:
            dist.all_reduce(window)
        if self.rank:
            return
        state = {
            "version": _VERSION,
            "identity": self._identity(),
            "step": self.step,
            "total": self.total,
            "head": self.trained.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "history": [dict(row) for row in self.progress.history],
            "window": window.cpu(),
            "counts": [self.window_tokens, self.window_seconds, self.tokens, self.seconds],
        }
        partial = self.out / f"{STATE_FILE}.partial"
        torch.save(state, partial)
        replace_file(partial, self.out / STATE_FILE)

    def _load(self) -> dict[str, Any]:
        """Reads the state. Raises StateError for a file that was cut or is damaged, as a full disk may leave it;
        ConfigError where there is no room for it."""
        file = self.out / STATE_FILE
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
            if isinstance(state, dict):
                return state
            error = f"expected a dict, found {type(state).__name__}"
        except _DAMAGED as found:
            asked = _NO_ROOM.search(str(found))
            if asked is not None and int(asked[1]) <= file.stat().st_size:
                raise ConfigError(f"no room in memory for {file}: {int(asked[1]):,} bytes more are needed") from found
            error = next(iter(str(found).splitlines()), "it is cut")
        raise StateError(f"{file} cannot be read: {error}. To train from the start, remove it")

    def _restore(self, state: dict[str, Any]) -> list[Row]:
        expected, found = self._identity(), state.get("identity", {})
        differ = [key for key in expected if expected[key] != found.get(key)]
        shown = "; ".join(f"{key}: {_short(found.get(key))}, now {_short(expected[key])}" for key in differ)
        if state.get("version") != _VERSION:
            shown = "it is of another version of draftwing"
        if shown:
            raise StateError(
                f"{self.out} holds a run that cannot go on as this one: {shown}. To train from the start, remove its "
                f"{STATE_FILE}"
            )
        self.trained.load_state_dict(state["head"])
        if self.factors is not None:
            self.factors.write()
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.total = state["step"], state["total"]
        if self.rank == 0:
            self.window += state["window"].to(self.device)
        self.window_tokens, self.window_seconds, self.tokens, self.seconds = state["counts"]
        logger.info("%s: going on after step %d of %d", self.out, self.step, self.total)
        return list(state["history"])


def _check(head: AnyHead, params: Sequence[Tensor], *sources: FeatureSource) -> None:
    if not params:
        raise ConfigError("the head has no trainable parameters: it was loaded for serving (see train.heads)")
    if any(param.dtype not in (torch.float32, torch.float64) for param in params):
        raise ConfigError(f"expected a head with float32 parameters, found {params[0].dtype}")
    hidden, vocab = head.target.config.hidden_size, head.target.config.vocab_size
    for meta in (source.meta for source in sources):
        if tuple(meta.aux_layers) != head.aux_layers:
            raise ConfigError(
                f"expected features of the layers {list(head.aux_layers)} of the target, "
                f"found those of {list(meta.aux_layers)}"
            )
        if (meta.hidden, meta.vocab) != (hidden, vocab):
            raise ConfigError(
                f"expected features of the target's size, hidden {hidden} and vocabulary {vocab}; found those of "
                f"another size, {meta.hidden} and {meta.vocab}"
            )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) < 60 else text[:57] + "..."
