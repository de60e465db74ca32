"""The stages of `draftwing train`: generate, capture, fit, eval. Each finds in the run's folder what the others left,
and goes on where it was when it was killed."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwing.config.adapters import AdapterPath
from draftwing.config.options import Options
from draftwing.engine.devices import pick_device
from draftwing.engine.startup.models import pick_dtype
from draftwing.errors import ConfigError
from draftwing.files import write_json
from draftwing.models.adapters.files import HEAD
from draftwing.models.config import ModelConfig
from draftwing.models.decoder import DecoderModel
from draftwing.models.generation import sampling_defaults
from draftwing.models.hub import model_tokenizer, resolve_model
from draftwing.models.loader import load_config
from draftwing.text.tokenizer import Tokenizer
from draftwing.train import heads
from draftwing.train.capture import SHARD_BYTES, FeatureModel, bytes_per_token, capture, target_aux_layers
from draftwing.train.checkpoint import save_head
from draftwing.train.data import Prompt, Skipped, held_out, original
from draftwing.train.dataset import Dataset, Response, evaluation_sets, read_dataset, read_responses, responses_files
from draftwing.train.draft_vocabulary import Vocabulary, covered, draft_vocabulary, unused_token
from draftwing.train.evaluate import Trial, evaluate, summary, write_card
from draftwing.train.factors import HeadFactors
from draftwing.train.fit import Fit, FitReport, join_world
from draftwing.train.fit_config import FitConfig, recipe
from draftwing.train.forecast import Text, count_text, forecast, longest_text, product_rate
from draftwing.train.generate import Sampling, cut_last_line, generate, usable
from draftwing.train.heads import checked_mask, fresh_block
from draftwing.train.optimizer import trains_in_half
from draftwing.train.settings import Run
from draftwing.train.store import FeatureStore, OnlineSource, Part, SourceMeta, Tokens

logger = logging.getLogger(__name__)


class Stages:
    """The stages of one run. Data is read once, and before any model."""

    shard_bytes = SHARD_BYTES  # of hidden states, which a kill loses at most

    def __init__(self, run: Run) -> None:
        self.run, self.settings = run, run.settings
        self.engine_options = Options.from_kwargs(**run.engine_options())
        self.used: dict[str, int] = {}  # counts of what `tokens` found
        # Under torchrun, as several processes of one stage.
        self.rank, self.processes = (
            int(os.environ.get(name, other)) for name, other in (("RANK", 0), ("WORLD_SIZE", 1))
        )

    # -- data -------------------------------------------------------------------------------------------------------

    @cached_property
    def path(self) -> Path:
        return resolve_model(self.engine_options.model, self.engine_options.revision)

    @cached_property
    def config(self) -> ModelConfig:
        return load_config(self.path)

    @cached_property
    def init_heads(self) -> list[Path]:
        return [resolve_model(name, option="--init-head") for name in self.settings.init_head]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return model_tokenizer(self.engine_options, self.path)

    @cached_property
    def data(self) -> Dataset:
        """Reads and cleans the data. Raises ConfigError where nothing is left to train on."""
        return read_dataset(self.settings, lambda: self.tokenizer)

    @property
    def _adapter(self) -> AdapterPath | None:
        return self.settings.adapter_path

    @property
    def answers(self) -> Path:
        """Returns the folder of the model's answers."""
        return self.run.data

    def check(self) -> None:
        """Raises what would fail later for certain: no model, no head, no data, hidden states that are not there."""
        checked_mask(self.settings, self.config.vocab_size)
        out = self.run.out
        if not (out / "head").exists():  # with one, heads that it started from may be gone
            _ = self.init_heads, self.aux_layers
        if self.settings.trains:
            _ = self.data
        elif (out / "fit").exists():
            raise ConfigError(f"training was begun in {out}, and --epochs 0 would replace its head: name another --out")

    # -- stages -----------------------------------------------------------------------------------------------------

    def generate(self) -> None:
        """Answers the prompts that have no answer yet."""
        if not self.settings.trains:
            logger.info("nothing is trained, so no answers are needed")
            return
        settings, data = self.settings, self.data
        low, high = (*settings.temperatures, *settings.temperatures)[:2]
        share = settings.default_share
        defaults = sampling_defaults(self.path, self.engine_options.model) if share else {}
        sampling = Sampling(
            settings.max_tokens, settings.max_length, settings.greedy_share, (low, high), settings.seed, share, defaults
        )  # fmt: skip
        name = "responses.jsonl" if self.processes == 1 else f"responses-{self.rank}.jsonl"
        file = self.answers / name
        if self.run.data == self.run.out:
            cut_last_line(file)
        done = {response.key for response in read_responses(responses_files(self.answers), Skipped())}
        todo = [prompt for prompt in data.prompts if prompt.key not in done]
        mine = [one for one in todo if int(original(one.key), 16) % self.processes == self.rank]
        ready = usable(mine, self.tokenizer, sampling, data.skipped)  # of several processes, of this one's
        others = len(todo) - len(mine) + len(done) + len(data.conversations)
        data.skipped.require(len(ready) + others, "prompt or conversation")
        self._report_data()
        if not ready:
            logger.info("all prompts have their answers")
            return
        if self.run.data != self.run.out:
            raise ConfigError(
                f"{len(ready)} prompts have no answer in {self.run.data}: run `draftwing train generate --out "
                f"{self.run.data}` first"
            )
        if done:
            logger.info("%d prompts are answered already, %d are left", len(data.prompts) - len(todo), len(ready))
        self._forecast_answers(ready)
        if settings.gpus > self.processes:
            self._spawn("generate")
            self._report_data()
            return
        from draftwing.engine.engine import Engine

        engine = Engine(self.engine_options)
        try:
            generate(engine, ready, file, sampling, data.skipped, self._adapter and self._adapter.name)
        finally:
            engine.close()
            del engine
            self._trim()
        self._report_data()

    def _report_data(self) -> None:
        if self.rank:
            return
        data = self.data
        counts = {"prompts": len(data.prompts), "conversations": len(data.conversations)}
        write_json(self.run.out / "data.json", counts | data.skipped.report())

    @cached_property
    def tokens(self) -> list[Tokens]:
        """Returns all sequences to train on: answers to this run's prompts, and conversations."""
        found, counts, prompts = list[Tokens](), Counter[str](), set[str]()
        for response in self.responses():
            found.append(response.tokens())
            prompts.add(original(response.key))
            counts["answers"] += len(response.spans)
            counts["greedy"] += len(response.spans) * (response.temperature == 0)
        found += self.data.conversations
        self.used = {
            "prompts": len(prompts), "answers": counts["answers"], "greedy": counts["greedy"],
            "conversations": len(self.data.conversations),
        }  # fmt: skip
        if len(found) < 2:
            raise ConfigError(
                f"{len(found)} conversations to train on in {self.run.data}, 2 are needed at least: run `draftwing "
                "train generate` first, or give more --prompts or --conversations"
            )
        return found

    def responses(self) -> list[Response]:
        """Returns the answers to this run's prompts."""
        broken, asked = Skipped(), {prompt.key for prompt in self.data.prompts}
        found = [one for one in read_responses(responses_files(self.answers), broken) if one.key in asked]
        broken.log()
        return found

    @cached_property
    def aux_layers(self) -> tuple[int, ...]:
        """Returns those that are asked for, else those that --init-head reads."""
        settings, asked = self.settings, self.settings.aux_layers
        if not asked and settings.training.aux_hidden_states and self.init_heads:
            asked = heads.aux_layers_of(self.init_heads[0], self.config, settings.algorithm)
        return target_aux_layers(settings.algorithm, self.config.num_layers, asked)

    @property
    def features(self) -> Path:
        """Returns the folder of the features; heads that read other hidden states have others."""
        return self.run.data / f"features-{self.settings.algorithm.lower()}-{'-'.join(map(str, self.aux_layers))}"

    def _target(self) -> FeatureModel:
        options, settings = self.engine_options, self.settings
        adapter = self._adapter and self._adapter.path
        return FeatureModel.load(self.path, settings.algorithm, options.device, options.dtype, self.aux_layers, adapter)

    def capture(self) -> None:
        """Computes the features that the store does not have yet."""
        if not self.settings.trains:
            logger.info("nothing is trained, so no features are needed")
            return
        settings = self.settings
        if settings.training.block and settings.mask_token is None and not settings.init_head:
            unused_token(self.tokens, self.config.vocab_size)  # refuses texts that leave none, before much is computed
        tokens, known = self.tokens, set[str]()
        if (self.features / "index.json").exists() and not settings.online:
            known = FeatureStore(self.features).keys
        text = count_text(tokens, known)
        self._forecast(text)
        if settings.online:
            return
        if not text.missing:
            logger.info("%s has the features of all %d conversations", self.features, len(tokens))
            return
        target = self._target()
        meta = target.meta(self.engine_options.model, self.settings.algorithm)
        store = FeatureStore.create(self.features, meta)
        needed = text.missing * bytes_per_token(meta)
        free = shutil.disk_usage(self.features).free
        if needed > free:
            raise ConfigError(
                f"the features take {needed / 1e9:.1f} GB, and {self.features} has room for {free / 1e9:.1f}: give "
                "--online to compute them while training, or fewer prompts"
            )
        capture(target, store, tokens, shard_bytes=self.shard_bytes)
        size = f"{store.bytes / 1e9:.2f} GB"
        logger.info("%s: %d conversations, %d tokens, %s", store.folder, len(store), store.tokens, size)
        del target
        self._trim()

    def fit(self) -> None:
        """Trains the head and writes it to the folder `head`."""
        settings, out = self.settings, self.run.out
        if not settings.trains:
            self._mean()
            return
        if settings.gpus > self.processes:
            self._spawn("fit")  # each reads the tokens itself
            return
        tokens = self.tokens
        device = join_world(pick_device(self.engine_options.device).kind)
        target, source = self._source(tokens, device)
        head = self._head(target, tokens)
        target_head = heads.TargetHead(target)
        train, watch = self._split(source, tokens, target_head)
        fit = Fit(head, target_head, train, watch, self._fit_config(), out / "fit", settings.factors)
        report = fit.run()
        if not self.rank:
            self._save(head, report)
            if fit.factors is not None:
                folder = self._write_factors(fit.factors, out / HEAD)
                logger.info("the adapter's own head is in %s: it belongs into the adapter's folder", folder)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()
        del head, target, source, train, watch, fit
        self._trim()

    def evaluate(self) -> list[dict[str, Any]]:
        """Measures acceptance lengths of the head, by the engine; writes eval.json and the head's card."""
        settings, out = self.settings, self.run.out
        folder = out / "head"
        if not (folder / "config.json").exists():
            raise ConfigError(f"there is no head in {folder}: run `draftwing train fit --out {out}` first")
        options = {name: v for name, v in self.run.engine_options().items() if not name.startswith("speculative_")}
        options |= {"speculative_algorithm": settings.drafter.name, "speculative_draft_model_path": str(folder)}
        trial = Trial(
            settings.trees(), settings.eval_temperatures, settings.eval_tokens, settings.eval_concurrency,
            self._adapter and self._adapter.name,
        )  # fmt: skip
        sets = evaluation_sets(settings.eval_prompts)
        if not sets and (settings.prompts or settings.conversations):
            sets = self.data.sets
        sets = {name: texts[: settings.eval_count] for name, texts in sets.items()}
        records = evaluate(options, sets, trial, out / "eval.json")
        write_card(self.run, self.config, records)
        self._trim()
        print(summary(records))
        logger.info("the head and its card are in %s", folder)
        return records

    # -- forecast ---------------------------------------------------------------------------------------------------

    def _forecast_answers(self, ready: Sequence[tuple[Prompt, list[int]]]) -> None:
        """Logs what the run takes at most: with the longest answers to the prompts in `ready`."""
        given = count_text([*(response.tokens() for response in self.responses()), *self.data.conversations])
        self._forecast(longest_text(given, ready, self.settings), at_most=True)

    def _forecast(self, text: Text, at_most: bool = False) -> None:
        if self.processes > 1:  # each has a part of the answers
            return
        settings, options, config = self.settings, self.engine_options, self.config
        device = pick_device(options.device)
        devices = settings.gpus if device.kind == "cuda" else 1  # processes on a CPU share its cores
        dtype = str(pick_dtype(options.dtype, device, config.dtype)).removeprefix("torch.")
        name, algorithm = options.model, settings.algorithm
        meta = SourceMeta(name, algorithm, self.aux_layers, config.hidden_size, config.vocab_size, dtype)
        found = forecast(settings, config, len(self.aux_layers), text, bytes_per_token(meta))
        free = shutil.disk_usage(self.run.data).free
        for line in found.report(settings, self._product_rate, devices, free, at_most):
            logger.info("%s", line)

    @cached_property
    def _product_rate(self) -> float:
        device = pick_device(self.engine_options.device).device
        rate = product_rate(device, torch.bfloat16 if trains_in_half(device) else torch.float32)
        self._trim()
        return rate

    # -- parts of fit -----------------------------------------------------------------------------------------------

    def _spawn(self, stage: str) -> None:
        """Runs a stage by torchrun, a process per GPU; its processes read in the run's folder what to do."""
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        words += [f"--nproc-per-node={self.settings.gpus}", "-m", "draftwing", "train", stage, "--out"]
        code = subprocess.run([*words, str(self.run.out)], check=False).returncode
        if code:
            raise ConfigError(f"{stage} with {self.settings.gpus} processes failed; their messages are above")

    def _source(
        self, tokens: Sequence[Tokens], device: torch.device
    ) -> tuple[DecoderModel, FeatureStore | OnlineSource]:
        """Returns the target, of which only embedding and head are needed with stored features, and the features."""
        if self.settings.online:
            features = self._target()
            meta = features.meta(self.engine_options.model, self.settings.algorithm)
            return features.model, OnlineSource(meta, tokens, features.batch)
        store = FeatureStore(self.features)
        missing = sum(one.key not in store.keys for one in tokens)
        if missing:
            raise ConfigError(f"{self.features} lacks {missing} of {len(tokens)} conversations: run `draftwing train "
                              "capture` first")  # fmt: skip
        return self._target_ends(device), store

    def _target_ends(self, device: torch.device) -> DecoderModel:
        dtype = pick_dtype(self.engine_options.dtype, pick_device(self.engine_options.device), self.config.dtype)
        return heads.load_target_ends(self.path, dtype, device)

    def _split(
        self, source: FeatureStore | OnlineSource, tokens: Sequence[Tokens], target: heads.TargetHead
    ) -> tuple[Part, Part]:
        """Returns what is trained on, and what the loss is measured on."""
        wanted = {one.key for one in tokens}
        return parts(source, wanted, held_out(wanted, self.settings.held_out, self.settings.seed, "watch"))

    def _mean(self) -> None:
        """Writes the mean of --init-head as it is, once; by one process, and without a GPU."""
        if not self.rank and not (self.run.out / "head" / "config.json").exists():
            head = heads.load_mean(self.init_heads, self._target_ends(torch.device("cpu")), self.settings.algorithm)
            self._save(head, FitReport(0, 0.0, 0, {}, {}))

    def _head(self, target: DecoderModel, tokens: Sequence[Tokens]) -> heads.AnyHead:
        settings = self.settings
        if settings.init_head:
            head = heads.load_mean(self.init_heads, target, settings.algorithm, settings.max_length)
            if head.target_ids is not None:
                self._note(covered(tokens, head.target_ids.tolist(), self.config.vocab_size))
            return head
        ids, size, longest = None, settings.ffn_size, settings.max_length
        if settings.training.aux_hidden_states:
            ids = self._target_ids(tokens)
        if settings.training.block:
            block = fresh_block(settings, self.aux_layers, tokens, self.config.vocab_size, self.config.hidden_size)
            layers = settings.draft_layers
            return heads.new_block_head(target, block, ids, layers, size, settings.seed, longest)
        kind = settings.drafter.heads[0]
        return heads.new_head(kind, target, ids, self.aux_layers, size, settings.seed, longest)

    def _target_ids(self, tokens: Sequence[Tokens]) -> Tensor | None:
        vocab = self.config.vocab_size
        size = self.settings.draft_vocab_size or (vocab if self.settings.training.block else min(32000, vocab // 4))
        found = draft_vocabulary(tokens, size, vocab, self.tokenizer.stop_ids)
        self._note(found)
        return torch.tensor(found.ids) if len(found.ids) < vocab else None

    def _note(self, found: Vocabulary) -> None:
        logger.info("draft vocabulary: %d of %d tokens, %.2f%% of the answers", len(found.ids),
                    self.config.vocab_size, 100 * found.coverage)  # fmt: skip
        if not self.rank:
            write_json(self.run.out / "vocabulary.json", found._asdict(), None)

    def _fit_config(self) -> FitConfig:
        settings = self.settings
        asked: dict[str, Any] = {"decay": settings.ttt_decay, "temperature": settings.target_temperature}
        if settings.training.block:
            asked |= {"kind": settings.block_loss, "anchors": settings.anchors}
        else:
            asked |= {"steps": settings.ttt_steps, "text": settings.text_share}
        changes = {name: value for name, value in asked.items() if value is not None}
        loss = dataclasses.replace(recipe(settings.algorithm).loss, **changes)
        same = {name: value for name, value in vars(settings).items() if name in vars(FitConfig())}
        return FitConfig(**{**same, "loss": loss, "tokens": settings.batch_tokens})

    def _save(self, head: heads.AnyHead, report: FitReport) -> None:
        folder = self._write(head, self.run.out / "head")
        write_json(self.run.out / "fit.json", {**dataclasses.asdict(report), "used": self.used})
        logger.info("the head is in %s", folder)

    @property
    def _stored(self) -> torch.dtype:
        """Returns the type that what was trained is written in."""
        return torch.float32 if self.engine_options.dtype == "float32" else torch.bfloat16

    def _write(self, head: heads.AnyHead, folder: Path) -> Path:
        return save_head(head, folder, self._stored, self.settings.max_file_mb * 1_000_000, self._extra())

    def _write_factors(self, factors: HeadFactors, folder: Path) -> Path:
        settings = self.settings
        factors.save(folder, self._stored, settings.init_head[0], {"draftwing": {"algorithm": settings.algorithm}})
        return folder

    def _extra(self) -> dict[str, Any]:
        """Returns keys of the config that say nothing of how a head computes."""
        return {}

    def _trim(self) -> None:
        gc.collect()
        pick_device(self.engine_options.device).trim()


def parts(source: FeatureStore | OnlineSource, wanted: set[str], chosen: set[str]) -> tuple[Part, Part]:
    """Splits the samples `wanted` into those that are trained on and the chosen ones; in the order of their keys,
    however they came into a store."""
    keys = source.order
    numbers = sorted((i for i, key in enumerate(keys) if key in wanted), key=lambda i: keys[i])
    train, watch = ([i for i in numbers if (keys[i] in chosen) == part] for part in (False, True))
    return Part(source, train), Part(source, watch)
