"""The engine as its users see it: submit requests, turn the loop, take outputs.

Everything but `step` may be called from any thread; `step` belongs to one thread."""

from __future__ import annotations

import json
import logging
import random
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from draftwing.config.adapters import AdapterCard, check_name
from draftwing.config.drafters import MEMORY_FILE
from draftwing.config.options import Options
from draftwing.core import Output, Plan, StepResult
from draftwing.engine.adapters import EngineAdapters
from draftwing.engine.admission import EngineInfo
from draftwing.engine.answer_checks import AnswerChecks
from draftwing.engine.build import Parts, build
from draftwing.engine.cached_texts import SavedText
from draftwing.engine.executor import Executor
from draftwing.engine.graphs import CAPTURE_SHARE
from draftwing.engine.head_fit import HeadFit, watch_head
from draftwing.engine.input_queue import InputQueue
from draftwing.engine.lookup_memory import LookupMemory
from draftwing.engine.loop import Loop, PageTableCheck
from draftwing.engine.provenance import Provenance, StoredFile, model_files, provenance_of
from draftwing.engine.row_table import BAN_IDS
from draftwing.engine.saved_prefixes import SavedPrefixes
from draftwing.engine.sleep import Sleep
from draftwing.engine.startup.adapters import checked_adapter
from draftwing.engine.startup.compiler_process import Compiler
from draftwing.engine.startup.models import draft_path_of
from draftwing.engine.stats import Reporter
from draftwing.errors import CheckpointError, ConfigError, NotFound, RequestError
from draftwing.grammar.compiler import GrammarCompiler
from draftwing.kv.named_prefixes import check_filename
from draftwing.kv.pool import state_bytes
from draftwing.machine import process_memory
from draftwing.models.generation import sampling_defaults, stop_ids
from draftwing.models.hub import model_tokenizer, resolve_model
from draftwing.models.library import stored_as
from draftwing.models.pooling import pooling_of
from draftwing.requests.logits_processors import apply, find_processor, load_processors
from draftwing.requests.pooling import Pooling
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.requests.stop_regex import Searches
from draftwing.sched.explain import Explainer
from draftwing.sched.guidance import BoundProcessor
from draftwing.sched.req import Req, ReqState
from draftwing.sched.scheduler import TIMED_OUT
from draftwing.spec.drafter import PastText
from draftwing.text.detok import StopStringScanner
from draftwing.text.tokenizer import Tokenizer, bad_word_ids

log = logging.getLogger("draftwing")
RECEIVED = 32  # new requests for each step, beyond what could run at once
ENDED = 128  # requests that end for each step
# Without a request, after which one thing is done that the start has left, for which a request has to wait: graphs of a
# batch size and tree some 0.07 s, a long prompt up to 0.2, once how fast memory is read up to 0.5 (docs/dev/start.md).
# Longer than programs take between an answer and the next question, shorter than people do. Swept for graphs by
# benchmarks/sim/captures.py.
IDLE_SECONDS = 0.2
SLOT_PART = 0.05  # seconds between two steps in which a slot is written while requests run
_PROCESSOR = "custom_logit_processor"  # the field that names one


class Heartbeat:
    """Counts what the engine has done. One thread turns the engine, any thread may ask."""

    def __init__(self) -> None:
        self._done = 0  # steps, and compilations within them
        self._stepping = self._compiling = False

    @property
    def now(self) -> int | None:
        """Returns a number that changes while the engine gets on. None: nothing has to happen, or a compiler runs,
        which may take any time."""
        return self._done if self._stepping and not self._compiling else None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Notes when a step begins and ends, around which it is entered."""
        self._compiling = False  # whatever became of a compiler that failed
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False
            self._done += 1

    def watch_compilers(self) -> None:
        """Sees from now on when Triton or torch.compile begins and ends, where either was imported."""
        triton, dynamo = sys.modules.get("triton"), sys.modules.get("torch._dynamo.callback")
        if triton is not None and hasattr(triton, "knobs"):
            triton.knobs.runtime.jit_cache_hook = self._begin
            triton.knobs.runtime.jit_post_compile_hook = self._end
        if dynamo is not None:
            dynamo.callback_handler.register_start_callback(self._begin)
            dynamo.callback_handler.register_end_callback(self._end)

    def _begin(self, *args: Any, **more: Any) -> None:
        self._compiling = True

    def _end(self, *args: Any, **more: Any) -> None:
        self._compiling = False
        self._done += 1


class CacheNamespaces:
    """Requests share what has the same salt: those of one client with the same `cache_salt` and the same adapter.

    Salts are hashes under a key that nobody outside knows, so no client can choose a `cache_salt` whose hash meets
    another's, and drafters may take them for secrets.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._forgotten: dict[str, int] = {}  # how often each client was that has ever asked

    def of(self, request: GenerationRequest) -> int:
        """Returns 63 bits; 0 where there is neither a client's name, nor a `cache_salt`, nor an adapter."""
        return self.named(request.client, request.cache_salt, request.adapter_digest)

    def named(self, client: str, cache_salt: str | None, adapter: str = "") -> int:
        """Returns `of` a request of this client with this `cache_salt`. adapter: its digest."""
        forgotten = self._forgotten.setdefault(client, 0)
        if not client and cache_salt is None and not forgotten and not adapter:
            return 0
        return self._hash([client, cache_salt, forgotten, *([adapter] if adapter else [])])

    def forget(self, client: str) -> None:
        """Lets the client's requests share nothing with those before from now on."""
        if client in self._forgotten:
            self._forgotten[client] += 1

    def of_drafts(self, request: GenerationRequest, show_texts: bool) -> int:
        """Returns a namespace of drafters' memories. A request that gets drafts would see whatever they come from, so
        its own is a salt that no other request has, unless texts may be shown."""
        if request.traced and not show_texts:
            return self._hash(secrets.token_hex(16))
        return self.of(request)

    def _hash(self, value: object) -> int:
        data = json.dumps(value).encode()
        return (int.from_bytes(blake2b(data, digest_size=8, key=self._key).digest(), "big") >> 1) or 1


class Engine:
    info: EngineInfo

    def __init__(
        self,
        options: Options,
        rank_failed: Callable[[BaseException], None] | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        """Loads everything; raises ConfigError or CheckpointError. rank_failed: is told, by a thread, of another rank
        that ended or hangs; `step` raises it, too, where it does not wait for that rank for ever.  compiler: a process
        that may compile kernels; None starts one where there is something to compile."""
        options = options.resolve()
        path = resolve_model(options.model, options.revision, weights=not options.dummy)
        files: tuple[StoredFile, ...] = ()
        if not options.label:
            with suppress(CheckpointError):  # `build` says so, behind what the config lacks
                files = model_files(options, path)  # before they are read
        tokenizer = model_tokenizer(options, path)
        with ExitStack() as made:
            memory = None
            if options.speculative_memory is not None and MEMORY_FILE in options.drafter_spec.options:
                memory = LookupMemory(options.speculative_memory, tokenizer.vocabulary_hash)
                made.callback(memory.close)
            parts = build(options, path, tokenizer, rank_failed, compiler)
            made.callback(parts.executor.close)
            self.options = parts.options
            defaults = sampling_defaults(path, options.model) if options.sampling_defaults == "model" else {}
            stop = stop_ids(path, parts.executor.model.config, tokenizer.stop_ids)
            provenance = provenance_of(parts.options, files, parts.executor, tokenizer.chat_source)
            stored = stored_as(path, parts.executor.model.config)
            model = parts.executor.model.config
            pooling = pooling_of(path)
            if model.encoder is not None:  # which leaves the vector in the place of the last token
                pooling = model.encoder.pooling._replace(kind="last")
            elif model.headless:
                pooling = pooling._replace(stated=True)
            self._start(tokenizer, parts, stop, defaults, stored, provenance, pooling)
            for name, folder in options.adapters:
                self.load_adapter(name, folder)
            self.info = replace(self.info, adapters=tuple(self.adapters))
            self._watch_head(draft_path_of(self.options) or path)
            if memory is not None:
                self._remember(memory)
            if options.prefix_cache_dir is not None or options.hicache_size:
                self._save_prefixes(SavedPrefixes.opened(self.options, parts, provenance))
            made.pop_all()

    def _start(
        self,
        tokenizer: Tokenizer,
        parts: Parts,
        stop: Iterable[int],
        defaults: Mapping[str, Any] | None = None,
        stored: Mapping[str, Any] | None = None,
        provenance: Provenance | None = None,
        pooling: Pooling | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.parts, model = parts, parts.executor.model
        self._processors = load_processors(self.options.logit_processors)
        self.grammars = GrammarCompiler.of(self.options, tokenizer, model.config.vocab_size, stop)
        self.info = EngineInfo(
            options=self.options,
            architecture=model.config.architecture,
            context_length=parts.context_length,
            vocab_size=model.config.vocab_size,
            hidden_size=model.config.hidden_size,
            stop_ids=frozenset(stop),
            max_total_tokens=parts.sched.config.slots,
            max_banned=BAN_IDS,
            dtype=str(model.dtype).removeprefix("torch."),
            device=parts.executor.device.kind,
            weight_bytes=model.weight_bytes(),
            pool_bytes=_pool_bytes(parts),
            processors=tuple(self._processors),
            defaults=dict(defaults or {}),
            capability=parts.capability,
            stored={**(stored or {}), "on_device": parts.executor.device.has_own_memory},
            images=None if model.tower is None else model.tower.config.processor(tokenizer),
            provenance=provenance,
            pooling=pooling or Pooling(),
            writes=model.encoder is None and not model.config.headless,
        )
        simulated = ", ".join(self.options.label.get("simulated", ()))
        if simulated:
            log.warning("SIMULATED: %s. Step times are real, texts and acceptance lengths are not", simulated)
        times = parts.executor.device.step_times()
        credited = self.options.drafter_spec.credited
        self.reporter = Reporter(
            parts.sched,
            simulated=simulated,
            credited=credited,
            times=times,
            log_seconds=self.options.log_interval,
        )
        self._head_fit: HeadFit | None = None  # until it is asked for
        self.explainer = Explainer(parts.sched, self.options.speculative_explain) if self.options.drafts else None
        parts.executor.run_stage = times.timed(parts.executor.run_stage)
        self._loop = Loop(parts.sched, parts.executor, self.options.enable_overlap, self._watch)
        every = 0 if provenance is None else self.options.replay_interval  # what is made up need not be the same
        self._checks = AnswerChecks(every, lambda: self.info)
        parts.sched.answered = self._answered
        self._page_table_check = PageTableCheck(parts.sched, parts.executor.table)
        self._input = InputQueue()
        self._next_head: deque[tuple[int, Path | None]] = deque(maxlen=1)  # for the next step, loaded by every rank
        self._heads = 0  # that were asked for so far
        self._loading = threading.Lock()  # held while one is loaded, and while graphs are captured
        self._turning = threading.Lock()  # held while a step runs
        self._sleep = Sleep(parts, self._input, self._loading, self._drained, self._keep_cached)
        self._next_capture = 0.0  # when a graph may be captured while requests run, monotonic
        self._knows_rate = False  # at which memory is read
        self._heartbeat = Heartbeat()
        self._heartbeat.watch_compilers()
        self._seeds = random.Random(self.options.random_seed)
        self._namespaces, self._searches = CacheNamespaces(), Searches()
        self._adapters: EngineAdapters | None = None
        if parts.executor.adapters is not None:
            put = partial(parts.executor.run_on_all_ranks, Executor.put_adapter)
            self._adapters = EngineAdapters(
                self.options.max_loras, self.options.max_lora_rank or 0, put, time.monotonic
            )
        self._memory: LookupMemory | None = None
        self._saved: SavedPrefixes | None = None
        self._forgetting = threading.Lock()  # held while it is decided whether an answer is kept

    def _watch_head(self, folder: Path) -> None:
        """Has the log say it if the head in a folder does not fit the model."""
        counts, sched = self.reporter.drafters.get, self.parts.sched
        texts = lambda: [req.tokens for req in sched.running]  # noqa: E731
        self._head_fit = watch_head(self.options, self.parts.executor, folder, counts, texts)

    def _remember(self, memory: LookupMemory) -> None:
        """Has the drafter learn the answers of a memory, which gets those to come."""
        texts = [
            PastText(self._namespaces.named(past.client, past.salt), past.tokens, past.first)
            for past in memory.answers()
            if past.tokens.max() < self.info.vocab_size
        ]
        self.parts.executor.run_on_all_ranks(Executor.remember, texts)
        log.info("--speculative-memory: %d answers of before are remembered", len(texts))
        policy = self.parts.sched.choice.policy
        policy.recall(memory.before)
        memory.learnt = policy.learnt
        self._memory = memory
        memory.start()

    def _save_prefixes(self, saved: SavedPrefixes | None) -> None:
        """Has prefixes kept for the next engine, and takes those of the one before."""
        if saved is not None:
            self._saved = saved
            self.parts.sched.cached, self.parts.sched.retracted = self._cached, self._retracted
            self.parts.sched.brings_back = saved.bring_back
            self.parts.sched.kv.spoilt = saved.spoilt

    def _cached(self, req: Req) -> None:
        """Has kept what is cached of a request, unless its client was forgotten meanwhile."""
        with self._forgetting:
            if self._saved is not None and req.salt == self._namespaces.of(req.request):
                self._saved.cached(req)

    def _retracted(self, req: Req) -> None:
        """Does so for a request that waits again."""
        with self._forgetting:
            if self._saved is not None and req.salt == self._namespaces.of(req.request):
                self._saved.retracted(req)

    def _answered(self, req: Req, reason: dict[str, Any]) -> None:
        if req.adapter:
            return  # what is kept and replayed is the model's own
        self._keep(req)
        with self._forgetting:
            if req.salt == self._namespaces.of(req.request):  # else its client was forgotten meanwhile
                self._checks.answered(req, reason)

    def _watch(self, plan: Plan, result: StepResult) -> None:
        """Counts a step, but for those of replays, which nobody has asked for."""
        if self._checks.running is None:
            self.reporter.watch(plan, result)
            if self._head_fit is not None:
                self._head_fit.look()

    def _keep(self, req: Req) -> None:
        """Keeps what a request was answered, unless it opts out, shares its memory with nobody, or is of a client that
        was forgotten meanwhile."""
        request = req.request
        with self._forgetting:
            if self._memory is not None and request.learnable and req.draft_salt == self._namespaces.of(request):
                self._memory.add(request.client, request.cache_salt, req.tokens, req.prompt_len)

    def forget_client(self, client: str) -> int:
        """Forgets what a client's requests left for drafts and as cached prefixes, those that run included. Returns how
        many answers `--speculative-memory` had of it."""
        with self._forgetting:
            self._namespaces.forget(client)
            self._checks.forget(client)
        try:
            return 0 if self._memory is None else self._memory.delete(client)
        finally:
            if self._saved is not None:
                self._saved.forget(client)

    def act_on_slot(self, action: str, client: str, slot: int, filename: str) -> tuple[int, int]:
        """Saves a client's slot, restores one or erases it; from any thread, and what runs goes on. Returns tokens and
        bytes. Raises RequestError and OSError. filename: what is saved is called; "" for what has none."""
        saved = self._saved
        slots = None if saved is None else saved.slots
        if saved is None or slots is None:
            raise RequestError("slots are not saved: start with --prefix-cache-dir DIR, a folder that keeps them")
        if action == "erase":
            return slots.erase(client, slot, filename), 0
        if action == "restore":
            found = slots.restore(client, slot, filename)
            return found.tokens, found.size
        check_filename(filename)  # before anything is written
        what = slots.held(client, slot)
        while isinstance(what, SavedText):
            with self._turning:
                if "parts" not in self.__dict__:
                    raise RequestError("the engine is closed")
                if saved.write_slot(what, SLOT_PART):
                    break
            time.sleep(0.001)  # else this thread could have the lock again before the one that turns the engine
        found = slots.save(client, what, filename)
        return found.tokens, found.size

    def measure_read_rate(self) -> None:
        """Fills `info.read_rate`. Not to be called while steps run. `step` does it, too, where it waits for long."""
        self._knows_rate = True
        self.info = replace(self.info, read_rate=self.parts.executor.device.read_rate())

    def submit(self, request: GenerationRequest) -> None:
        """Queues a request. Raises RequestError if it can never run, or has the uid of a live one: one whose last
        output `step` has not returned. One with `terms` was found fit before."""
        if not request.adapters:
            self._input.put(self._admissible(request))
            return
        if self._adapters is None:
            raise NotFound("adapters are not served: start with --lora-modules or --lora-dir", "model")
        digest = self._adapters.hold(request.adapters, request.uid)
        try:
            self._input.put(self._admissible(request._replace(adapter_digest=digest)))
        except BaseException:
            self._adapters.ended([request.uid])
            raise

    def abort(self, uid: str) -> None:
        """Ends a request; an unknown uid is ignored."""
        self._input.end(uid)

    def wake(self) -> None:
        """Makes a blocked `step` return."""
        self._input.wake()

    def flush_cache(self) -> bool:
        """Forgets cached prefixes and n-grams; False when requests are running. Wakes the engine up."""
        with self._turning:
            self._sleep.wake_up()
            if self._stop_check():
                while not self._loop.idle:
                    self._turn()
            if not self._loop.idle or not self.parts.sched.flush_cache():
                return False
            self.parts.executor.run_on_all_ranks(Executor.flush)
            if self._memory is not None:
                self._memory.clear()
            if self._saved is not None:
                self._saved.clear()
            return True

    def swap_draft(self, folder: Path | None) -> None:
        """Loads another draft head, which drafts from the next step on. Texts do not change; what runs goes on.

        folder: of a head that differs from the one in use in its weights, and perhaps in which tokens it drafts, alone;
        None for the one that it began with. Raises CheckpointError and ConfigError, of any rank, before anything
        changes."""
        with self._loading:
            if self.is_sleeping:
                raise ConfigError("the engine sleeps: wake it up before its head is replaced")
            self._heads += 1
            executor = self.parts.executor
            executor.broadcast.load_head(executor.heads, self._heads, folder)
            self._next_head.append((self._heads, folder))
        self.wake()

    def load_adapter(self, name: str, path: Path, replace: bool = False) -> AdapterCard:
        """Reads an adapter, which requests have by this name from now on. From any thread; what runs goes on. replace:
        whether one of this name may be there that is another. Raises CheckpointError and ConfigError."""
        slots = self.parts.executor.adapters
        if slots is None or self._adapters is None:
            raise ConfigError("adapters are not served: start with --lora-modules or --lora-dir")
        check_name(name, self.options.model_names)
        card, adapter = checked_adapter(name, path, slots, self.options)
        self._adapters.add(card, adapter, replace)
        log.info("the adapter %r is loaded: rank %d, %.1f MB", name, adapter.rank, adapter.nbytes / 1e6)
        return card

    def unload_adapter(self, name: str) -> None:
        """Lets no further request have an adapter; those that have it go on. Raises NotFound."""
        if self._adapters is None:
            raise NotFound("adapters are not served: start with --lora-modules or --lora-dir", "lora_name")
        self._adapters.remove(name)
        log.info("the adapter %r is unloaded", name)

    @property
    def adapters(self) -> list[AdapterCard]:
        """Returns the adapters that requests may have."""
        return [] if self._adapters is None else self._adapters.cards

    def sleep(self) -> Future[None]:
        """Asks for memory to be given back (`engine.sleep`), from any thread: `step` does so when what was submitted
        so far has ended, and the future is done then. A request that comes later waits until it is, and wakes the
        engine up. The future has a GenerationError where the host has no room: then the engine is awake."""
        return self._sleep.ask(True)

    def wake_up(self) -> Future[None]:
        """Asks for the engine to be awake, which a request does, too. The future has a GenerationError where others
        have taken the memory: then it still sleeps."""
        return self._sleep.ask(False)

    @property
    def is_sleeping(self) -> bool:
        return self._sleep.asleep

    def measure_costs(self, batches: Sequence[int], seconds: float) -> None:
        """Measures for so many seconds what steps of these batch sizes cost. Nothing may run."""
        with self._turning:
            assert self._loop.idle
            self.parts.sched.flush_cache()  # steps are measured on slots of the pool
            self.parts.measure_costs(batches, seconds)

    def stats(self) -> dict[str, Any]:
        """Counts of the scheduler, the executor and the reporter; during a step they may be of different moments."""
        sched = self.parts.sched
        waiting = sum(len(req.tokens) for req in list(sched.waiting))
        running = [req for req in list(sched.running) if not req.private]
        begun = sum(len(req.tokens) - req.sent for req in running if req.state is ReqState.PREFILL)
        return {
            "progress": self._heartbeat.now,
            "sleeping": self.is_sleeping,
            "running": len(running),
            "waiting": len(sched.waiting) + len(self._input) + (0 if self._adapters is None else len(self._adapters)),
            "waiting_tokens": waiting,
            "uncomputed_tokens": waiting + begun,  # of prompts; what is cached of those that wait is not yet known
            "free_tokens": sched.kv.pool.available,
            "cached_tokens": sched.kv.radix.evictable,
            "accept_length": self.reporter.accept_length,
            "verified_rows": self.reporter.total_rows,
            "committed_tokens": self.reporter.total_tokens,
            "chain_seconds": self.parts.chain_seconds(),
            "read_rate": self.info.read_rate,
            "graph_replays": self.parts.executor.replays,
            "memory": self._memory_stats(),
            "explain": self.explainer and self.explainer.now,
            **self._state_stats(),
            **self._checks.stats(),
            **({} if self._adapters is None else self._adapters.stats),
            **({} if self._saved is None else self._saved.stats()),
            **self.reporter.stats(),
        }

    def _memory_stats(self) -> dict[str, int]:
        """Of this process, and in it of what takes most; on a GPU these are beside it."""
        return {**process_memory(), "pool": self.info.pool_bytes, "recordings": self.parts.executor.recorded_bytes}

    def _state_stats(self) -> dict[str, Any]:
        """Of a model with recurrent layers."""
        slots = self.parts.sched.kv.states
        if slots is None:
            return {}
        each = state_bytes(self.parts.executor.attn.pool.layers, self.parts.executor.model.dtype)
        return {**slots.stats(), "snapshot_bytes": slots.kept * each}

    def idle(self) -> bool:
        return self._loop.idle and self._input.empty and not self._sleep.asked

    def step(self, block: bool = False) -> list[Output]:
        """Runs one turn of the loop. block: with nothing to do, wait for a request first."""
        if block and self._loop.idle and not self._sleep.asked:
            self._wait()
        with self._turning, self._heartbeat.step():
            if not self._sleep.look():
                self._receive_ended()  # and nothing new: who has come since `look` is for the next one
                return self._outputs()
            if (slack := self._loop.slack) > 0:
                self._input.wait(slack)  # who comes meanwhile can be in the next step
            self._receive_ended()
            self._receive_new()
            self._swap()
            if self._saved is not None:
                self._saved.bring_some()
            if not self._loop.idle:
                self._turn()
                if self.explainer is not None:
                    self.explainer.look()
                self._capture_wanted()
                if self._saved is not None:
                    self._saved.keep_some()
            if self._loop.idle:
                if self.explainer is not None:
                    self.explainer.rest()
                if self._head_fit is not None:
                    self._head_fit.rest()
                self.parts.sched.kv.check_idle()
                self.reporter.pause()
            outputs = self._outputs()
            if self._adapters is not None:
                self._receive_adapted(self._adapters)
            return outputs

    def _outputs(self) -> list[Output]:
        outputs = self._checks.take(self.parts.sched.take_outputs())
        ended = [output.uid for output in outputs if output.finish_reason is not None]
        if self._adapters is not None:
            self._adapters.ended(ended)
        self._input.forget(ended)
        return outputs

    def _drained(self) -> bool:
        """Returns whether all that was received has ended. A replay of an answer is no reason to wait."""
        self._stop_check()
        return self._loop.idle and self._input.empty and not self._adapters

    def _keep_cached(self) -> None:
        if self._saved is not None:
            self._saved.keep_all()

    def _wait(self) -> None:
        """Waits for something to do, and does what the start has left for now meanwhile."""
        parts = self.parts
        while not self._input.wait(IDLE_SECONDS if self._has_later else None):
            with self._turning:
                if self._saved is not None and self._saved.pending:
                    self._saved.write_some(lambda: not self._input.empty)
                elif parts.later:
                    self._unless_loading(parts.run_later)
                elif not self._knows_rate:
                    self.measure_read_rate()
                elif self._begin_check():
                    return

    @property
    def _has_later(self) -> bool:
        """Returns whether there is something to do for when nothing runs, and the engine is awake."""
        if self.is_sleeping:
            return False
        saves = self._saved is not None and self._saved.pending
        return saves or bool(self.parts.later) or not self._knows_rate or self._checks.pending

    def _begin_check(self) -> bool:
        """Has the next answer replayed that waits for it, alone; False where none does."""
        while (request := self._checks.begin(self.grammars.knows)) is not None:
            try:
                req = self._admissible(request)
            except RequestError as error:  # such as for a grammar that is no longer compiled
                log.warning("an answer is not replayed: %s", error)
                self._checks.leave_out()
                continue
            req.private, req.deadline = True, None
            self.parts.sched.submit(req)
            return True
        return False

    def _stop_check(self) -> bool:
        """Ends a replay, if there is one: somebody has come."""
        uid = self._checks.stop()
        if uid is not None:
            self.parts.sched.abort(uid)
        return uid is not None

    def _capture_wanted(self) -> None:
        """Captures a graph while requests run, if it is wanted and others have taken little time lately."""
        began = time.monotonic()
        if began >= self._next_capture and self.parts.executor.wants_capture:
            self._unless_loading(self.parts.executor.capture_next)
            now = time.monotonic()
            self._next_capture = now + (now - began) / CAPTURE_SHARE

    def _unless_loading(self, capture: Callable[[], None]) -> None:
        """Does what may capture graphs, unless a head is being loaded: that waits for the whole device, which ends a
        capture on it by an error."""
        if self._loading.acquire(blocking=False):
            try:
                capture()
            finally:
                self._loading.release()

    def close(self) -> None:
        """Lets go of the model and the pool; nothing can be asked of the engine afterwards."""
        self.wake()
        with self._turning:
            parts = self.__dict__.pop("parts", None)
            if parts is not None:
                parts.keep_costs()
                parts.lengths.clear()
                self._knows_rate = True  # nobody asks any more
                try:
                    if self._saved is not None:
                        self._saved.write_all()
                finally:
                    parts.executor.close()
                    if self._memory is not None:
                        self._memory.close()
            for name in ("_loop", "_page_table_check", "reporter", "explainer"):
                self.__dict__.pop(name, None)

    def _swap(self) -> None:
        """Takes the head that `swap_draft` has loaded."""
        if not self._next_head:
            return
        number, folder = self._next_head.pop()
        self.parts.executor.run_on_all_ranks(Executor.take_head, number)
        self.parts.sched.choice.policy.forget()
        log.info("drafts come from %s now", "the first head" if folder is None else f"the head in {folder}")

    def _turn(self) -> None:
        try:
            with torch.inference_mode():  # once, for all that the executor does in it
                self._loop.turn()
            self._page_table_check.look()
            if self._loop.idle:
                self.parts.executor.broadcast.compare()
        except (RuntimeError, OSError, EOFError) as error:
            blamed = self.parts.executor.broadcast.blame(error)
            if blamed is error:
                raise
            raise blamed from error

    def _schedule(self, req: Req) -> None:
        """Gives the scheduler a request, for which what the disk has of its prompt will be read first."""
        if self._saved is not None:
            self._saved.bring_back(req)
        self.parts.sched.submit(req)

    def _receive_ended(self) -> None:
        sched, adapters = self.parts.sched, self._adapters
        for one in self._input.take_ended(ENDED):
            if not isinstance(one, Req) and adapters is not None:
                one = adapters.drop(one) or one
            if isinstance(one, Req):
                sched.refuse(one)
            else:
                sched.abort(one)

    def _receive_new(self) -> None:
        """What could run at once is taken at once, of all else a part."""
        sched, adapters = self.parts.sched, self._adapters
        new = self._input.take_new(max(sched.config.max_rows - len(sched.waiting), RECEIVED))
        if new:
            self._stop_check()
        for req in new:
            if not req.request.adapters:
                self._schedule(req)
                continue
            assert adapters is not None
            if adapters.enter(req):
                self._schedule(req)

    def _receive_adapted(self, adapters: EngineAdapters) -> None:
        """Takes requests that waited for a slot for their adapter."""
        for req in adapters.expired(time.monotonic()):
            self.parts.sched.refuse(req, TIMED_OUT)
        while (found := adapters.next()) is not None:
            self._schedule(found)

    def _admissible(self, request: GenerationRequest) -> Req:
        request = self.info.admit(request)
        request = request._replace(bad_word_ids=bad_word_ids(self.tokenizer, request))
        terms, params = request.terms, request.params
        assert terms is not None
        return Req(
            request,
            seed=params.sampling_seed if params.sampling_seed is not None else self._seeds.getrandbits(62),
            max_total=len(request.prompt_ids) + terms.new_tokens,
            stop_ids=terms.stop_ids,
            salt=self._namespaces.of(request),
            draft_salt=self._namespaces.of_drafts(request, self.options.ui_show_texts),
            scanner=StopStringScanner.of(self.tokenizer, params, request.together, self._searches),
            deadline=self.info.deadline(request.arrived),
            grammar=self.grammars.compile(params.grammar) if params.grammar is not None else None,
            processor=self._processor(params),
        )

    def _processor(self, params: SamplingParams) -> BoundProcessor | None:
        asked = params.logits_processor
        if asked is None:
            return None
        function, values = find_processor(self._processors, asked.name, _PROCESSOR), json.loads(asked.params)
        return lambda tokens, logits: apply(function, tokens, logits, values, _PROCESSOR)


def _pool_bytes(parts: Parts) -> int:
    return sum(kept.nbytes for kept in parts.executor.attn.pool.tensors)
