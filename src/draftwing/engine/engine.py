"""The engine as its users see it: submit requests, turn the loop, take outputs.

Everything but `step` may be called from any thread; `step` belongs to one thread."""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from draftwing.config.adapters import AdapterCard, check_name
from draftwing.config.drafters import MEMORY_FILE
from draftwing.config.options import Options
from draftwing.core import Output, Plan, StepResult
from draftwing.engine.adapters import NOT_SERVED, EngineAdapters
from draftwing.engine.admission import EngineInfo
from draftwing.engine.answer_checks import AnswerChecks
from draftwing.engine.build import build
from draftwing.engine.cached_texts import SavedText
from draftwing.engine.client_data import ClientData
from draftwing.engine.draft_window import watch_window
from draftwing.engine.executor import Executor
from draftwing.engine.graphs import CAPTURE_SHARE
from draftwing.engine.head_fit import watch_head
from draftwing.engine.heartbeat import Heartbeat
from draftwing.engine.input_queue import InputQueue
from draftwing.engine.lookup_memory import LookupMemory
from draftwing.engine.loop import Loop, PageTableCheck
from draftwing.engine.provenance import StoredFile, model_files, provenance_of
from draftwing.engine.saved_prefixes import SavedPrefixes
from draftwing.engine.sleep import Sleep
from draftwing.engine.startup.adapters import NO_HEADS, AdapterFiles
from draftwing.engine.startup.compiler_process import Compiler
from draftwing.engine.startup.info import info_of
from draftwing.engine.startup.models import draft_path_of
from draftwing.engine.stats import Reporter
from draftwing.errors import CheckpointError, ConfigError, RequestError
from draftwing.grammar.compiler import GrammarCompiler
from draftwing.kv.pool import state_bytes
from draftwing.machine import process_memory
from draftwing.models.hub import model_tokenizer, resolve_model
from draftwing.requests.logits_processors import apply, load_processors
from draftwing.requests.request import GenerationRequest
from draftwing.requests.stop_regex import Searches
from draftwing.sched.explain import Explainer
from draftwing.sched.req import Req, ReqState
from draftwing.sched.scheduler import TIMED_OUT
from draftwing.text.detok import StopStringScanner
from draftwing.text.tokenizer import bad_word_ids

log = logging.getLogger("draftwing")
RECEIVED = 32  # new requests for each step, beyond what could run at once
ENDED = 128  # requests that end for each step
# Without a request, after which one thing is done that the start has left, for which a request has to wait: graphs of a
# batch size and tree some 0.07 s, a long prompt up to 0.2, once how fast memory is read up to 0.5 (docs/dev/start.md).
# Longer than programs take between an answer and the next question, shorter than people do. Swept for graphs by
# benchmarks/sim/captures.py.
IDLE_SECONDS = 0.2
SLOT_PART = 0.05  # seconds between two steps in which a slot is written while requests run


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
        tokenizer = self.tokenizer = model_tokenizer(options, path)
        with ExitStack() as made:
            memory = None
            if options.speculative_memory is not None and MEMORY_FILE in options.drafter_spec.options:
                memory = LookupMemory(options.speculative_memory, tokenizer.vocabulary_hash)
                made.callback(memory.close)
            self.parts = parts = build(options, path, tokenizer, rank_failed, compiler)
            made.callback(parts.executor.close)
            self.options = parts.options
            provenance = provenance_of(self.options, files, parts.executor, tokenizer.chat_source)
            self._processors = load_processors(self.options.logit_processors)
            self.info = info_of(parts, path, tokenizer, self._processors, provenance)
            self.grammars = GrammarCompiler.of(self.options, tokenizer, self.info.vocab_size, self.info.stop_ids)
            self._start()
            for name, folder in self.options.adapters:
                self.load_adapter(name, folder)
            self.info = replace(self.info, adapters=tuple(self.adapters))
            folder = draft_path_of(self.options) or path
            self._head_fit = watch_head(
                self.options, parts.executor, folder, self.reporter.drafters.get,
                lambda: [req.tokens for req in parts.sched.running],
            )  # fmt: skip
            self._draft_window = watch_window(
                self.options, parts.executor, folder, lambda: self.reporter.by_context, self._see_at_most
            )
            self._saved = SavedPrefixes.opened(self.options, parts, provenance)
            self._sleep = Sleep(parts, self._input, self._loading, self._drained, self._saved)
            self._clients = ClientData(parts, self._checks, memory, self._saved)
            self._ending = made.pop_all()

    def _start(self) -> None:
        """Makes what turns the loop, around what was loaded."""
        options, parts, executor = self.options, self.parts, self.parts.executor
        simulated = ", ".join(options.label.get("simulated", ()))
        if simulated:
            log.warning("SIMULATED: %s. Step times are real, texts and acceptance lengths are not", simulated)
        times = executor.device.step_times()
        self.reporter = Reporter(
            parts.sched, simulated=simulated, credited=options.drafter_spec.credited, times=times,
            log_seconds=options.log_interval,
        )  # fmt: skip
        self.explainer = Explainer(parts.sched, options.speculative_explain) if options.drafts else None
        executor.run_stage = times.timed(executor.run_stage)
        self._loop = Loop(parts.sched, executor, options.enable_overlap, self._watch)
        # What is made up need not be the same when it is replayed.
        every = 0 if self.info.provenance is None else options.replay_interval
        self._checks = AnswerChecks(every, lambda: self.info)
        self._page_table_check = PageTableCheck(parts.sched, executor.table)
        self._input = InputQueue()
        self._next_head: deque[tuple[int, Path | None]] = deque(maxlen=1)  # for the next step, loaded by every rank
        self._heads = 0  # that were asked for so far
        self._loading = threading.Lock()  # held while one is loaded, and while graphs are captured
        self._turning = threading.Lock()  # held while a step runs
        self._next_capture = 0.0  # when a graph may be captured while requests run, monotonic
        self._knows_rate = False  # at which memory is read
        self._heartbeat = Heartbeat()
        self._heartbeat.watch_compilers()
        self._seeds = random.Random(options.random_seed)
        self._searches = Searches()
        slots, heads = executor.adapters, executor.head_slots
        self._files = None if slots is None else AdapterFiles(slots, heads, options, executor.device)
        self._adapters = EngineAdapters(
            0 if slots is None else options.max_loras, options.max_lora_rank or 0,
            partial(executor.run_on_all_ranks, Executor.put_adapter),
            partial(executor.run_on_all_ranks, Executor.put_head),
            lambda request: self._clients.namespaces.of(request), time.monotonic,
            self._files, options.max_cpu_loras, self.wake,
        )  # fmt: skip

    def _watch(self, plan: Plan, result: StepResult) -> None:
        """Counts a step, but for those of replays, which nobody has asked for."""
        if self._checks.running is None:
            self.reporter.watch(plan, result)
            if self._head_fit is not None:
                self._head_fit.look()

    def forget_client(self, client: str) -> int:
        """Forgets what a client's requests left for drafts and as cached prefixes, those that run included. Returns how
        many answers `--speculative-memory` had of it."""
        return self._clients.forget(client)

    def act_on_slot(self, action: str, client: str, slot: int, filename: str) -> tuple[int, int]:
        """Saves a client's slot, restores one or erases it; from any thread, and what runs goes on. Returns tokens and
        bytes. Raises RequestError and OSError. filename: what is saved is called; "" for what has none."""
        slots = None if self._saved is None else self._saved.slots
        if slots is None:
            raise RequestError("slots are not saved: start with --prefix-cache-dir DIR, a folder that keeps them")
        return slots.act(action, client, slot, filename, self._write_slot)

    def _write_slot(self, text: SavedText) -> bool:
        """Writes some of a slot's text between two steps. Returns whether all of it is written."""
        with self._turning:
            if "parts" not in self.__dict__ or self._saved is None:
                raise RequestError("the engine is closed")
            return self._saved.write_slot(text, SLOT_PART)

    def measure_read_rate(self) -> None:
        """Fills `info.read_rate`. Not to be called while steps run. `step` does it, too, where it waits for long."""
        self._knows_rate = True
        self.info = replace(self.info, read_rate=self.parts.executor.device.read_rate())

    def together(self) -> AbstractContextManager[None]:
        """Has a `step` that waits for requests wait for all that are submitted meanwhile, so that they can be in it."""
        return self._input.together()

    def submit(self, request: GenerationRequest) -> None:
        """Queues a request. Raises RequestError if it can never run, or has the uid of a live one: one whose last
        output `step` has not returned. One with `terms` was found fit before."""
        if not request.adapters:
            self._input.put(self._admissible(request))
            return
        digest = self._adapters.hold(request.adapters, request.uid)
        try:
            self._input.put(self._admissible(request._replace(adapter_digest=digest)))
        except BaseException:
            self._adapters.ended({request.uid: {}})
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
            self._clients.clear()
            return True

    def swap_draft(self, folder: Path | None, adapter: str = "") -> None:
        """Loads another draft head, which drafts from the next step on. Texts do not change; what runs goes on.

        folder: of a head that differs from the one in use in its weights, and perhaps in which tokens it drafts, alone;
        None for the one that it began with.  adapter: digest of the one whose own head it is, which drafts for requests
        to come; None for the one that came with it. Raises CheckpointError and ConfigError, of any rank, before
        anything changes."""
        if adapter:
            if self._files is None or self.parts.executor.head_slots is None:
                raise ConfigError(NO_HEADS)
            self._adapters.learn(adapter, folder, None if folder is None else self._files.head(folder))
            log.info("drafts for the adapter %s come from %s", adapter, folder or "what came with it")
            return
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
        if self._files is None:
            raise ConfigError(NOT_SERVED)
        check_name(name, self.options.model_names)
        card, adapter = self._files.read(name, path)
        head = adapter.head
        if adapter.image:
            self._files.ask_ahead()
        self._adapters.add(card, adapter, replace)
        of_head = "" if head is None else f", a draft head of its own: rank {head.rank}, {head.nbytes / 1e6:.1f} MB"
        log.info("the adapter %r is loaded: rank %d, %.1f MB%s", name, adapter.rank, adapter.nbytes / 1e6, of_head)
        return card

    def unload_adapter(self, name: str) -> None:
        """Lets no further request have an adapter; those that have it go on. Raises NotFound."""
        self._adapters.remove(name)
        log.info("the adapter %r is unloaded", name)

    @property
    def adapters(self) -> list[AdapterCard]:
        """Returns the adapters that requests may have."""
        return self._adapters.cards

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
        sched, captures = self.parts.sched, self.parts.executor.captures
        waiting = sum(len(req.tokens) for req in list(sched.waiting))
        running = [req for req in list(sched.running) if not req.private]
        begun = sum(len(req.tokens) - req.sent for req in running if req.state is ReqState.PREFILL)
        return {
            "progress": self._heartbeat.now,
            "sleeping": self.is_sleeping,
            "running": len(running),
            "waiting": len(sched.waiting) + len(self._input) + len(self._adapters),
            "waiting_tokens": waiting,
            "uncomputed_tokens": waiting + begun,  # of prompts; what is cached of those that wait is not yet known
            "free_tokens": sched.kv.pool.available,
            "cached_tokens": sched.kv.radix.evictable,
            "accept_length": self.reporter.accept_length,
            "verified_rows": self.reporter.total_rows,
            "committed_tokens": self.reporter.total_tokens,
            "chain_seconds": self.parts.chain_seconds(),
            "read_rate": self.info.read_rate,
            "graph_replays": captures.replays,
            # Of this process, and in it of what takes most; on a GPU these are beside it.
            "memory": {**process_memory(), "pool": self.info.pool_bytes, "recordings": captures.recorded_bytes},
            "explain": self.explainer and self.explainer.now,
            **self._state_stats(),
            **self._checks.stats(),
            **self._adapters.stats,
            **({} if self._saved is None else self._saved.stats()),
            **self.reporter.stats(),
        }

    def _state_stats(self) -> dict[str, Any]:
        """Of a model with recurrent layers."""
        slots = self.parts.sched.kv.states
        if slots is None:
            return {}
        each = state_bytes(self.parts.executor.attn.pool.layers, self.parts.executor.model.dtype)
        return {**slots.stats(), "snapshot_bytes": slots.kept * each}

    def idle(self) -> bool:
        return self._loop.idle and self._input.empty and not self._adapters and not self._sleep.asked

    def step(self, block: bool = False) -> list[Output]:
        """Runs one turn of the loop. block: with nothing to do, wait for a request first."""
        if self._loop.idle and self._adapters:
            self._input.wait(IDLE_SECONDS)  # for what is read again: whoever reads wakes it up
        elif block and self._loop.idle and not self._sleep.asked:
            self._wait()
        with self._turning, self._heartbeat.step():
            if not self._sleep.look():
                self._receive_ended()  # and nothing new: who has come since `look` is for the next one
                return self._outputs()
            if (slack := self._loop.slack) > 0:
                self._input.wait(slack)  # who comes meanwhile can be in the next step
            self._receive_ended()
            self._refuse_adapted()
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
                if self._draft_window is not None and not block and not self.is_sleeping:  # else in `_wait`
                    self._draft_window.rest()
                self.parts.sched.kv.check_idle()
                self.reporter.pause()
            outputs = self._outputs()
            self._receive_adapted()
            return outputs

    def _outputs(self) -> list[Output]:
        outputs = self._checks.take(self.parts.sched.take_outputs())
        ended = {output.uid: output.meta for output in outputs if output.finish_reason is not None}
        self._adapters.ended(ended)
        self._input.forget(ended)
        return outputs

    def _drained(self) -> bool:
        """Returns whether all that was received has ended. A replay of an answer is no reason to wait."""
        self._stop_check()
        return self._loop.idle and self._input.empty and not self._adapters

    def _wait(self) -> None:
        """Waits for something to do, and does what the start has left for now meanwhile."""
        parts, trial = self.parts, None if self.is_sleeping else self._draft_window
        while not self._input.wait(IDLE_SECONDS if self._has_later or trial is not None else None):
            with self._turning:
                if self._saved is not None and self._saved.pending:
                    self._saved.write_some(lambda: not self._input.empty)
                elif trial is not None:  # which may capture graphs for seconds
                    trial.rest()
                    trial = None
                elif parts.later:
                    self._unless_loading(parts.run_later)
                elif not self._knows_rate:
                    self.measure_read_rate()
                elif (req := self._checks.begin(self.grammars.knows, self._admissible)) is not None:
                    parts.sched.submit(req)
                    return

    @property
    def _has_later(self) -> bool:
        """Returns whether there is something to do for when nothing runs, and the engine is awake."""
        if self.is_sleeping:
            return False
        saves = self._saved is not None and self._saved.pending
        return saves or bool(self.parts.later) or not self._knows_rate or self._checks.pending

    def _stop_check(self) -> bool:
        """Ends a replay, if there is one: somebody has come."""
        uid = self._checks.stop()
        if uid is not None:
            self.parts.sched.abort(uid)
        return uid is not None

    def _capture_wanted(self) -> None:
        """Captures a graph while requests run, if it is wanted and others have taken little time lately."""
        began, captures = time.monotonic(), self.parts.executor.captures
        if began >= self._next_capture and captures.wanted and self._unless_loading(captures.capture_next):
            now = time.monotonic()
            self._next_capture = now + (now - began) / CAPTURE_SHARE

    def _see_at_most(self, positions: int | None) -> bool:
        return self._unless_loading(partial(self.parts.see_at_most, positions))

    def _unless_loading(self, capture: Callable[[], None]) -> bool:
        """Does what may capture graphs, unless a head is being loaded: that waits for the whole device, which ends a
        capture on it by an error. Returns whether it was done."""
        if not self._loading.acquire(blocking=False):
            return False
        try:
            capture()
        finally:
            self._loading.release()
        return True

    def close(self) -> None:
        """Lets go of the model and the pool; nothing can be asked of the engine afterwards."""
        self.wake()
        with self._turning:
            parts = self.__dict__.pop("parts", None)
            if parts is not None:
                parts.keep_costs()
                parts.lengths.clear()
                self._knows_rate = True  # nobody asks any more
                with self._ending:
                    if self._saved is not None:
                        self._saved.write_all()
            for name in ("_loop", "_page_table_check", "reporter", "explainer"):
                self.__dict__.pop(name, None)

    def _swap(self) -> None:
        """Takes the head that `swap_draft` has loaded."""
        if not self._next_head:
            return
        number, folder = self._next_head.pop()
        self.parts.executor.run_on_all_ranks(Executor.take_head, number)
        self.parts.sched.choice.policy.forget()
        self._adapters.judge_anew()
        if self._draft_window is not None:
            self._draft_window.judge_anew()
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
        for one in self._input.take_ended(ENDED):
            req = self._adapters.drop(one) if isinstance(one, str) else one
            if req is not None:
                self.parts.sched.refuse(req)
            elif isinstance(one, str):
                self.parts.sched.abort(one)

    def _receive_new(self) -> None:
        """What could run at once is taken at once, of all else a part."""
        sched = self.parts.sched
        new = self._input.take_new(max(sched.config.max_rows - len(sched.waiting), RECEIVED))
        if new:
            self._stop_check()
        for req in new:
            if not req.request.adapters or self._adapters.enter(req):
                self._schedule(req)

    def _refuse_adapted(self) -> None:
        """Ends requests whose adapter had no slot in time, or cannot be read again."""
        for req in self._adapters.expired(time.monotonic()):
            self.parts.sched.refuse(req, TIMED_OUT)
        for req, why in self._adapters.unreadable():
            self.parts.sched.refuse(req, why, 500)

    def _receive_adapted(self) -> None:
        """Takes requests that waited for a slot for their adapter."""
        while (found := self._adapters.next()) is not None:
            self._schedule(found)

    def _admissible(self, request: GenerationRequest) -> Req:
        request = self.info.admit(request)
        request = request._replace(bad_word_ids=bad_word_ids(self.tokenizer, request))
        terms, params, asked = request.terms, request.params, request.params.logits_processor
        assert terms is not None
        return Req(
            request,
            seed=params.sampling_seed if params.sampling_seed is not None else self._seeds.getrandbits(62),
            max_total=len(request.prompt_ids) + terms.new_tokens,
            stop_ids=terms.stop_ids,
            salt=self._clients.namespaces.of(request),
            draft_salt=self._clients.namespaces.of_drafts(request, self.options.ui_show_texts),
            scanner=StopStringScanner.of(self.tokenizer, params, request.together, self._searches),
            deadline=self.info.deadline(request.arrived),
            grammar=self.grammars.compile(params.grammar) if params.grammar is not None else None,
            processor=None if asked is None else partial(apply, self._processors[asked.name], json.loads(asked.params)),
        )
