"""The stages of `draftwing train --from DIR`: those of any run, but for where the data comes from and for the end, in
which the head is judged by later traffic and becomes one of `DIR/heads`. An adapter's own head is judged as a whole one
is: its factors are added to the model's head, which stays as it is."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from draftwing.config.trees import carried_shape
from draftwing.engine.devices import pick_device
from draftwing.errors import ConfigError
from draftwing.files import load_json, write_json
from draftwing.learn.history import HeadHistory
from draftwing.learn.idle import COSTS
from draftwing.learn.traffic import RUN, TrafficStore
from draftwing.models.adapters.files import HEAD
from draftwing.train import heads
from draftwing.train.data import Skipped, read_prompts
from draftwing.train.dataset import Dataset
from draftwing.train.draft_vocabulary import covered, renewed
from draftwing.train.factors import HeadFactors
from draftwing.train.fit import STATE_FILE, StateError
from draftwing.train.fit_config import FitConfig
from draftwing.train.judge import Comparison, Judgement, Temperatures, draft_along, judge, most_drafts
from draftwing.train.merge import Moments, input_moments, merge, moments_bytes
from draftwing.train.settings import TRAFFIC_FILE, Run
from draftwing.train.stages import Stages, parts
from draftwing.train.store import FeatureStore, OnlineSource, Part, Tokens
from draftwing.train.traffic import LEAST_LIKELY, Traffic, choose_traffic, general_prompts, log_probabilities

logger = logging.getLogger(__name__)

LEAST = 32  # exchanges to learn from: fewer say little of what comes, and nothing of how well it is drafted
PROMPTS = 64  # that the model is asked to write at a time
WRITINGS = 32  # times at most, for all runs of a folder
ANSWER = 0.8  # share of --max-tokens that an answer to those has: 128 of 160, the mean of 132 of SmolLM2
# Highest learning rate times the hidden size. With 0.3 traffic gained two thirds as much; what the higher rate spoils
# of general text `train.merge` brings back (docs/dev/learning.md).
RATE = 0.9
# Weights of traffic in merging what was trained with the parent, tried in turn until general text keeps so much of its
# tokens per second, and no client loses more than it may.
WEIGHTS, KEEPS = (4.0, 1.0, 0.25), 0.98
# Of an adapter, whose text the parent mostly knows little of, first all that was trained.
OF_FACTORS = (math.inf, *WEIGHTS)
TEXTS = 100  # about as many of traffic and of general text show what inputs are like
KEPT = 16  # heads of a folder: those of large models take a gigabyte each


class TrafficStages(Stages):
    """The stages of a run whose settings have `traffic`. General text lies in `DIR/general`, for later runs, too;
    answers of an adapter by its digest."""

    shard_bytes = 16 << 20  # a machine that learns in idle time may be slow, and is interrupted

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        assert run.settings.traffic is not None
        self.folder = Path(run.settings.traffic).expanduser().resolve()
        self.history, self.adapter = HeadHistory(self.folder / "heads"), run.adapter_digest or ""

    @cached_property
    def _begin(self) -> dict[str, Any]:
        """When the run began, `until`, and which head was to be `served` then."""
        file = self.run.data / TRAFFIC_FILE
        if not file.exists():
            return {"until": time.time(), "served": self.history.current(self.adapter)}
        return {"served": self._parent, **load_json(file)}

    @property
    def _until(self) -> float:
        """What comes later is not the run's matter, or it could not go on where it was."""
        return float(self._begin["until"])

    @property
    def prompts(self) -> Path:
        """Returns the folder of the general prompts."""
        return self.folder / "general"

    @property
    def answers(self) -> Path:
        return self.prompts / self.adapter

    @cached_property
    def traffic(self) -> Traffic:
        """Reads it. Raises ConfigError where it is too little."""
        kept = TrafficStore(self.folder).read(until=self._until, adapter=self.adapter)
        found = choose_traffic(kept, self.settings.max_length)
        for reason, count in found.skipped.most_common():
            logger.info("left out: %d exchanges: %s", count, reason)
        if len(found.learnt) < LEAST:
            whose = " of this adapter, as its files are now," if self.adapter else ""
            raise ConfigError(f"{self.folder} has {len(found.learnt)} exchanges{whose} to learn from: expected {LEAST}")
        file = self.run.data / TRAFFIC_FILE
        if not file.exists():  # not before it is enough, or a later try would see no more of it
            write_json(file, self._begin)
        logger.info(
            "%d exchanges to learn from, %d later ones to judge by, %d clients", len(found.learnt), len(found.later),
            len(found.tokens),
        )  # fmt: skip
        return found

    @cached_property
    def data(self) -> Dataset:
        """The prompts of the general text: those to judge by, and those to train on, as far as they are written. Of
        one writing they are taken in order, so that the answers of earlier runs count."""
        _ = self.traffic
        skipped = Skipped()
        files = sorted(self.prompts.glob("prompts-*.jsonl"))
        judged = general_prompts() if self._wanted else []
        known = {prompt.key for prompt in judged}
        own = [prompt for prompt in read_prompts(files, skipped) if prompt.key not in known] if files else []
        return Dataset([*judged, *own[: self._wanted]], [], {}, skipped)

    @property
    def _wanted(self) -> int:
        """How many general texts are to be trained on."""
        share, learnt = self.settings.general_share, sum(self.traffic.tokens.values())
        return round(share / (1 - share) * learnt / (ANSWER * self.settings.max_tokens))

    @property
    def _missing(self) -> int:
        """How many prompts for these are still to be written."""
        return self._wanted + len(general_prompts()) - len(self.data.prompts)

    def generate(self) -> None:
        """Has the model write prompts, as many as are missing, and answer them."""
        if not self._wanted:
            return
        if self.tokenizer.chat_template is None:
            logger.warning("without a chat template there is no general text: what is forgotten is not seen")
            return
        self.answers.mkdir(parents=True, exist_ok=True)
        for number in range(len(list(self.prompts.glob("prompts-*.jsonl"))), WRITINGS):
            if self._missing <= 0:
                break
            try:
                self._write_prompts(number)
            except ConfigError as error:
                logger.warning("less general text than --general-share asks for: %s", error)
                break
            del self.data
        if self.data.prompts:
            super().generate()

    def _write_prompts(self, number: int) -> None:
        from draftwing.engine.engine import Engine
        from draftwing.train.generate import write_prompts

        file = self.prompts / f"prompts-{number:03d}.jsonl"
        with closing(Engine(self.engine_options)) as engine:
            write_prompts(engine, max(PROMPTS, self._missing), file, number)
        self._trim()

    def fit(self) -> None:
        """Trains as any run does. In `DIR/training`, where nobody would see that it is refused, a run that an older
        version has begun begins anew."""
        try:
            super().fit()
            return
        except StateError as error:
            if self.run.out.resolve() != self.folder / RUN:
                raise
            logger.warning("%s. That is done: training begins anew", error)
        (self.run.out / "fit" / STATE_FILE).unlink()
        super().fit()  # not above, where the error holds the model and the head of the first time

    @cached_property
    def tokens(self) -> list[Tokens]:
        general, judged = self.general(), self._judged()
        trained = sum(one.key not in judged for one in general)
        self.used = {"exchanges": len(self.traffic.learnt), "general": trained}
        return [*general, *self.traffic.learnt, *self.traffic.later]

    def general(self) -> list[Tokens]:
        """Returns answers to this run's general prompts."""
        return [response.tokens() for response in self.responses()]

    def _split(
        self, source: FeatureStore | OnlineSource, tokens: Sequence[Tokens], target: heads.TargetHead
    ) -> tuple[Part, Part]:
        wanted = {one.key for one in tokens}
        train, watch = parts(source, wanted, self._judged())
        odd = self._unlikely(train, target)
        if odd:
            logger.info("left out: %d exchanges: unlikely for this model", len(odd))
            train, _ = parts(source, wanted - self._judged() - odd, set())
        return train, watch

    def _unlikely(self, train: Part, target: heads.TargetHead) -> set[str]:
        """Keys of what the target would hardly have said. Found once: it takes a pass over all answers."""
        file = self.run.data / "likelihood.json"
        if not file.exists():
            write_json(file, dict(log_probabilities(train, target)), None)
        found = load_json(file)
        return {key for key, mean in found.items() if mean < LEAST_LIKELY}

    def _judged(self) -> set[str]:
        """Keys of what is not trained on."""
        return {one.key for one in self.traffic.later} | {prompt.key for prompt in general_prompts()}

    def _head(self, target: Any, tokens: Sequence[Tokens]) -> heads.AnyHead:
        if self.settings.head_rank:
            return super()._head(target, tokens)
        head = heads.load_mean(self.init_heads, target, self.settings.algorithm, self.settings.max_length)
        if heads.renewable(head):
            assert head.target_ids is not None
            judged = self._judged()
            learnt = [one for one in self.tokens if one.key not in judged]
            ids = renewed(head.target_ids.tolist(), learnt, self.config.vocab_size, self.tokenizer.stop_ids)
            new = len(set(ids) - set(head.target_ids.tolist()))
            logger.info("draft vocabulary: %d new tokens", new)
            heads.renew_vocabulary(head, ids)
            self._note(covered(learnt, ids, self.config.vocab_size))
        else:
            logger.info(
                "draft vocabulary: that of %s, which does not change",
                "the target" if head.target_ids is None else "a token map",
            )
        return head

    def _fit_config(self) -> FitConfig:
        found = super()._fit_config()
        if found.lr or found.head_rank:
            return found
        return dataclasses.replace(found, lr=RATE / self.config.hidden_size)

    def _extra(self) -> dict[str, Any]:
        """The parent's trees; prediction layers in a `.gguf` file have none."""
        file = self.init_heads[0] / "config.json"
        config = load_json(file) if file.exists() else {}
        return {"draftwing": config["draftwing"]} if "draftwing" in config else {}

    def evaluate(self) -> list[dict[str, Any]]:
        """Judges the head by later traffic, and adds it to `DIR/heads`: as the one to be served, if it is better than
        the one that it was trained from, and no other was named meanwhile."""
        out = self.run.out
        if not (out / "head" / "config.json").exists():
            raise ConfigError(f"there is no head in {out}/head: run `draftwing train fit --out {out}` first")
        found, folder = self.judge()
        write_json(out / "judge.json", found.report())
        number = self.history.add(folder, self._facts(found))
        logger.info("%s", in_words(number, found))
        # Not its parent: a server goes on with another head than the one that is named where it does not fit.
        if found.taken and not self.history.use_instead(number, self._begin["served"], self.adapter):
            logger.warning("head %d is not served yet, for another one was named since the run began: "
                           "`draftwing heads use %d` serves it", number, number)  # fmt: skip
        self.history.keep(KEPT, self.adapter)
        return []

    def judge(self) -> tuple[Judgement, Path]:
        """Compares the head with the one that it started from, merged with that: in the first of `WEIGHTS` with which
        neither general text nor a client loses too much, or the last one that still is better. Returns the folder of
        the merged one, too."""
        device = torch.device(pick_device(self.engine_options.device).kind)
        target, source = self._source(self.tokens, device)
        target_head = heads.TargetHead(target)
        train, part = self._split(source, self.tokens, target_head)
        drawn = {one.key: one.temperature for one in self.responses()} | self.traffic.temperatures
        temperatures = Temperatures(drawn, target_head)

        def load(folder: Path | None) -> tuple[Any, HeadFactors | None]:
            return self._load(folder, target)

        trained, parent = self.run.out / (HEAD if self.settings.head_rank else "head"), self._parent_folder
        head, _ = load(parent)
        seconds, max_length = self._seconds[: most_drafts(head)], self.settings.max_length
        depth = len(seconds)
        before, found = draft_along(head, part, depth, max_length, temperatures), None
        moments: tuple[Moments, Moments] | None = None
        for weight in OF_FACTORS if self.settings.head_rank else WEIGHTS:
            head, factors = load(trained)
            if weight < math.inf:
                moments = moments or self._moments(load(trained)[0], train, depth)
                merge(head, load(parent)[0], *moments, weight)
                if factors is not None:
                    factors.fit()
            after = draft_along(head, part, depth, max_length, temperatures)
            merged = judge(before, after, self.traffic.clients, seconds, self.traffic.domains, self._kept_before)
            if found is not None and not merged.traffic.better:
                break
            # Beside what was trained, which is judged again where a run is stopped before the history has it.
            into = self.run.out / "merged"
            found = merged
            folder = self._write(head, into) if factors is None else self._write_factors(factors, into)
            forgets = found.forgets(KEEPS)
            if not (forgets or found.harmed) or not found.traffic.better:
                break
            who = [*found.harmed, *(["general text"] if forgets else [])]
            logger.info("with a weight of %g it takes too much from %s. %s", weight, ", ".join(who), _figures(found))
        assert found is not None
        return found, folder

    def _load(self, folder: Path | None, target: Any) -> tuple[Any, HeadFactors | None]:
        """Returns a whole head, and its factors where it is that of an adapter. folder: of the head or the factors,
        None: new ones, which add nothing."""
        rank, algorithm = self.settings.head_rank, self.settings.algorithm
        if not rank:
            assert folder is not None
            return heads.load_head(folder, target, algorithm), None
        head = heads.load_head(self.init_heads[0], target, algorithm)
        factors = HeadFactors(head, rank, self.settings.seed)
        if folder is not None:
            factors.load(folder)
        return head, factors

    def _moments(self, head: Any, train: Part, depth: int) -> tuple[Moments, Moments]:
        """Of traffic that was learnt and of general text; where there is none, of traffic in its place: then all that
        was trained goes the same share of the way."""
        keys = train.source.order
        groups: list[list[int]] = [[], []]
        for number in train.numbers:
            groups[keys[number] not in self.traffic.clients].append(number)
        chosen = [numbers[:: -(-len(numbers) // TEXTS)] for numbers in groups if numbers]
        logger.info("merging: %.2f GB of moments of inputs", len(chosen) * moments_bytes(head) / 1e9)
        found = [input_moments(head, Part(train.source, numbers), depth, self.settings.max_length)
                 for numbers in chosen]  # fmt: skip
        return found[0], found[-1]

    @cached_property
    def _seconds(self) -> list[float]:
        """Of steps by depth; where nobody has measured them, all the same."""
        with suppress(OSError, ValueError, TypeError):
            found = [float(one) for one in load_json(self.folder / COSTS)]
            if found:
                return found
        kind, tree = pick_device(self.engine_options.device).kind, self.settings.drafter.tree
        return [1.0] * (carried_shape(self.init_heads[0], kind, tree) or tree).depth

    @property
    def _parent_folder(self) -> Path | None:
        """Of the head that the run began with; None: of an adapter that had none of its own."""
        return self.settings.factors if self.settings.head_rank else self.init_heads[0]

    @property
    def _parent(self) -> int | None:
        """The number of the head that the run began with, None for one from elsewhere."""
        parent = self._parent_folder
        inside = parent is not None and parent.resolve().parent == self.history.folder
        return int(parent.name) if parent is not None and inside else None

    @property
    def _kept_before(self) -> float:
        """How much of general text the parent has kept of the first head's."""
        parent = self._parent
        figures = {} if parent is None else self.history.get(parent).figures
        return float(figures.get("kept", 1.0))

    def _facts(self, found: Judgement) -> dict[str, Any]:
        """What `HeadHistory.add` is told of the head."""
        learnt = Counter(self.traffic.clients[one.key] for one in self.traffic.learnt)
        name = {} if self._adapter is None else {"adapter": self._adapter.name}
        return {
            "parent": self._parent,
            "algorithm": self.settings.algorithm,
            "data": {"clients": dict(learnt), "until": self._until, **name, **self.used},
            "figures": found.report(),
            **({"adapter": self.adapter} if self.adapter else {}),
        }


def in_words(number: int, found: Judgement) -> str:
    """Returns a line for the log."""
    verdict = "is to be served" if found.taken else f"is not served: {found.reason}"
    return f"head {number} {verdict}. {_figures(found)}"


def _figures(found: Judgement) -> str:
    general = "" if found.general is None else f"; general text: {_in_words(found.general)}"
    return f"Later traffic: {_in_words(found.traffic)}{general}"


def _in_words(found: Comparison) -> str:
    lengths = f"acceptance length {found.length_before:.2f} to {found.length_after:.2f}"
    return f"{lengths}, tokens per second x{found.gain:.3f} ± {found.error:.3f} ({found.texts} texts)"
