"""A stand-in for the engine that answers with an echo of the prompt, so that every response can be foretold.

`python -m fake_engine FD` is a worker around it, for tests with a process of its own. The environment's
FAKE_ENGINE_PAUSE is its `pause`.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import queue
import sys
import threading
import time
from array import array
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tiny_tokenizers import byte_level

from draftwing.config.options import Options
from draftwing.core import Output, TokenLogprobs, TracedNode, TracedStep
from draftwing.engine.admission import EngineInfo
from draftwing.engine.process.link import Close, EngineLink, Listener, Reply
from draftwing.engine.process.worker import Worker
from draftwing.engine.provenance import Provenance
from draftwing.grammar.compiler import GrammarCompiler
from draftwing.requests.request import GenerationRequest, LogprobParams
from draftwing.server.engine_client import AsyncEngine
from draftwing.text.detok import StopStringScanner
from draftwing.text.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m['content'] == 'bad' %}{{ raise_exception('no bad words') }}{% endif %}"
    "{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}{% if shout is defined %}{{ shout }}{% endif %}"
)
PROCESSORS = ("even", "odd")
PROVENANCE = Provenance("cpu", (("dtype", "float32"),), (), None)
CONTEXT = 2000
EOS = 256


def byte_tokenizer() -> Tokenizer:
    """One token per byte, and <eos> with id 256, which nothing else in the vocabulary contains."""
    tokenizer = Tokenizer(byte_level("<eos>"), {"eos_token": "<eos>"}, TEMPLATE)
    assert tokenizer.eos_id == EOS
    return tokenizer


def drafting_options(steps: int, topk: int, tokens: int) -> Options:
    """Of an engine that drafts trees of this shape."""
    return Options(
        random_seed=7, speculative_algorithm="EAGLE", speculative_num_steps=steps, speculative_eagle_topk=topk,
        speculative_num_draft_tokens=tokens,
    )  # fmt: skip


class FakeEngine:
    """Repeats the prompt, then says <eos>; with ignore_eos it repeats for ever. `burst` tokens per step,
    which takes `pause` seconds."""

    def __init__(
        self,
        options: Options | None = None,
        rank_failed: object = None,
        compiler: object = None,
        *,
        burst: int = 3,
        pause: float = 0.0005,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        options = options or Options(random_seed=7)
        algorithm = options.speculative_algorithm or "none"  # whatever comes with the default model
        self.options = dataclasses.replace(options, speculative_algorithm=algorithm).resolve()
        self.tokenizer = byte_tokenizer()
        self.info = EngineInfo(
            options=dataclasses.replace(self.options, served_model_name=self.options.served_model_name or ("echo",)),
            architecture="LlamaForCausalLM",
            context_length=CONTEXT, vocab_size=EOS + 1, hidden_size=4, stop_ids=frozenset({EOS}),
            max_total_tokens=4 * CONTEXT, max_banned=16, dtype="float32", device="cpu", weight_bytes={"Q8_0": 34},
            processors=PROCESSORS, defaults=defaults or {}, provenance=PROVENANCE,
        )  # fmt: skip
        self.grammars = GrammarCompiler.of(options, self.tokenizer, self.info.vocab_size, self.info.stop_ids)
        self._speed = burst, pause
        self.requests: list[GenerationRequest] = []  # all that were ever submitted
        self.aborted: list[str] = []
        self.cached: set[tuple[str | None, tuple[int, ...]]] = set()  # salts and prompts that were prefilled
        self.cached_tokens: dict[str, int] = {}  # by uid
        self.running: dict[str, tuple[GenerationRequest, list[int], StopStringScanner | None]] = {}
        self.stepping = False
        self.traced: list[TracedStep] = []  # all steps that were reported, those of prompts left out
        self.forget()
        self._inbox: queue.SimpleQueue[GenerationRequest | str | None] = queue.SimpleQueue()

    def forget(self) -> None:
        """Is as it was made, but for what runs."""
        self.burst, self.pause = self._speed
        self.flushed = self.steps = 0
        self.forgotten = list[str]()  # clients
        self.crash: Exception | None = None
        self.closed = self.sleeping = False
        for memory in (self.requests, self.aborted, self.cached, self.traced):
            memory.clear()  # type: ignore[attr-defined]

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def submit(self, request: GenerationRequest) -> None:
        request = self.info.admit(request)
        self.sleeping = False
        self.requests.append(request)
        self._inbox.put(request)

    def abort(self, uid: str) -> None:
        self._inbox.put(uid)

    def wake(self) -> None:
        self._inbox.put(None)

    def flush_cache(self) -> bool:
        self.flushed += 1
        return not self.running

    def forget_client(self, client: str) -> int:
        self.forgotten.append(client)
        return 2

    def sleep(self) -> Future[None]:
        return self._rest(True)

    def wake_up(self) -> Future[None]:
        return self._rest(False)

    def _rest(self, asleep: bool) -> Future[None]:
        """At once, whatever runs."""
        self.sleeping = asleep
        done = Future[None]()
        done.set_result(None)
        return done

    def swap_draft(self, folder: Path | None, adapter: str = "") -> None:
        """Goes on as before: it has no head."""

    def stats(self) -> dict[str, Any]:
        return {
            "explain": {"requests": len(self.running), "summary": "nothing is drafted", "options": []},
            "sleeping": self.sleeping,
            "progress": self.steps if self.stepping else None,
            "running": len(self.running),
            "waiting": 0,
            "waiting_tokens": 0,
            "uncomputed_tokens": 0,
            "free_tokens": 4 * CONTEXT,
            "cached_tokens": 0,
            "accept_length": 1.5,
            "plain_step": 0.008,
            "read_rate": 17e3,
            "memory": {"resident": 2**20, "pool": 2**10, "recordings": 0},
            "verified_rows": 2,
            "committed_tokens": 3,
        }

    def idle(self) -> bool:
        return not self.running and self._inbox.empty()

    def close(self) -> None:
        self.closed = True

    def step(self, block: bool = False) -> list[Output]:
        news: list[Output] = []
        items = [self._inbox.get()] if block and not self.running else []
        while not self._inbox.empty():
            items.append(self._inbox.get())
        if self.crash is not None:
            raise self.crash
        self.stepping = True
        for item in items:
            if isinstance(item, GenerationRequest):
                self.running[item.uid] = (item, [], StopStringScanner.of(self.tokenizer, item.params))
                key = (item.client, item.cache_salt, tuple(item.prompt_ids))
                self.cached_tokens[item.uid] = len(item.prompt_ids) - 1 if key in self.cached else 0
                self.cached.add(key)
            elif item in self.running:
                self.aborted.append(item)
                news.append(self._end(item, [], {"type": "abort", "message": "aborted"}))
        news += [self._advance(uid) for uid in list(self.running)]
        if self.running:
            time.sleep(self.pause)  # a forward
        self.steps, self.stepping = self.steps + 1, False
        return news

    def _advance(self, uid: str) -> Output:
        request, done, scanner = self.running[uid]
        params, new = request.params, list[int]()
        limit = params.max_new_tokens or self.info.context_length - len(request.prompt_ids)
        for _ in range(self.burst):
            cycle = [*request.prompt_ids, EOS]
            token = cycle[len(done) % len(cycle)]
            done.append(token)
            new.append(token)
            found = scanner.push(token) if scanner is not None else None
            if scanner is not None and scanner.failed:
                return self._end(uid, new, {"type": "abort", "message": scanner.failed})
            if token in params.stop_token_ids or (token == EOS and not params.ignore_eos):
                return self._end(uid, new, {"type": "stop", "matched": token})
            if found is not None:
                return self._end(uid, new, {"type": "stop", "matched": found})
            if len(done) >= limit:
                return self._end(uid, new, {"type": "length", "length": len(done)})
        return self._with_meta(Output(uid, new), request, len(done) == len(new))

    def _with_meta(self, output: Output, request: GenerationRequest, first: bool) -> Output:
        wanted = request.logprobs
        if request.traced and output.token_ids:
            drafts = self._drafted(request)
            output.trace = [traced(output.token_ids, 0 if first else len(self.traced) + 1, drafts)]
            self.traced += [] if first else output.trace
        if wanted is not None:
            output.logprobs = [logprob(token, wanted) for token in output.token_ids]
            if first and output.token_ids and wanted.start >= 0:
                reported = [None, *(logprob(token, wanted) for token in request.prompt_ids[1:])]
                output.prompt_logprobs = reported[wanted.start :]
        return output

    def _drafted(self, request: GenerationRequest) -> bool:
        return self.info.speculates and request.limits != (0, 1, 1)

    def _end(self, uid: str, new: list[int], reason: dict[str, object]) -> Output:
        request, done, _ = self.running.pop(uid)
        drafted = self._drafted(request)
        meta = {
            "prompt_tokens": len(request.prompt_ids), "completion_tokens": len(done),
            "cached_tokens": self.cached_tokens.pop(uid), "num_retractions": 0, "e2e_latency": 0.1,
            "spec_verify_ct": 1, "spec_num_proposed_drafts": 7 * drafted, "spec_num_correct_drafts": 3 * drafted,
            "spec_accept_length": 1.0, "spec_accept_rate": 0.0, "spec_correct_drafts_histogram": [1],
        }  # fmt: skip
        return self._with_meta(Output(uid, new, reason, meta), request, len(done) == len(new))


def traced(tokens: list[int], number: int, drafts: bool) -> TracedStep:
    """Made up: of each token but the last there is a draft, with a wrong one of another drafter beside it."""
    nodes: list[TracedNode] = []
    for depth, token in enumerate(tokens[:-1] if drafts and number else []):
        parent = 2 * depth - 2 if depth else None
        nodes += [
            TracedNode(parent, token, 1, 0.75**depth, True, True),
            TracedNode(parent, token ^ 1, 2, 0.3**depth / 2, depth < 2, False),
        ]
    return TracedStep(number, 0.01, 1, nodes, list(tokens))


def logprob(token: int, wanted: LogprobParams) -> TokenLogprobs:
    """Made up: the token's own is -token / 100, the best are the ids that follow it."""
    best = [(-0.5 * (rank + 1), (token + rank + 1) % (EOS + 1)) for rank in range(wanted.top)]
    found = TokenLogprobs.of(-token / 100, best, [-float(other) for other in wanted.token_ids])
    return found._replace(hidden=array("f", [token] * wanted.hidden)) if wanted.hidden else found


class LocalWorker(Worker):
    """Says to a listener what it would send."""

    listener: Listener

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]

    def post(self, message: object) -> None:
        if isinstance(message, Reply):
            self.listener.reply(message)
        else:
            assert isinstance(message, list)
            self.listener.outputs(message)


class LocalLink:
    """What `EngineLink` is, around a FakeEngine in a thread of this process, so that a test can look inside."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine, self._worker = engine, LocalWorker()
        self.process = SimpleNamespace(kill=lambda: None)
        self._stopping = False
        self._thread: threading.Thread | None = None

    def wait_ready(self) -> EngineInfo:
        return self.engine.info

    def listen(self, listener: Listener) -> None:
        self._worker.listener = listener
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, message: Any) -> None:
        if not isinstance(message, Close):
            self._worker.obey(self.engine, message)  # type: ignore[arg-type]

    def close(self, grace: float = 5.0) -> None:
        self._stopping = True
        self.engine.wake()
        if self._thread is not None:
            self._thread.join(30)

    def _run(self) -> None:
        try:
            while not self._stopping:
                outputs = self.engine.step(block=True)
                if outputs:
                    self._worker.post(outputs)
        except Exception as error:
            self._worker.listener.died(f"{type(error).__name__}: {error}")


def local(engine: FakeEngine, *successors: FakeEngine) -> AsyncEngine:
    """The bridge around an engine in this process; `successors` take over when it dies."""
    rest = iter(successors)

    def spawn() -> EngineLink:
        return LocalLink(next(rest))  # type: ignore[return-value]

    return AsyncEngine(engine.info, LocalLink(engine), spawn)  # type: ignore[arg-type]


def process(options: Options) -> EngineLink:
    """A process with a FakeEngine in it."""
    return EngineLink(options, "fake_engine")


def stands_in(engine: object) -> None:
    """In a worker, for modules that import torch, which takes longer than all that a test wants of such a process."""
    compiler = SimpleNamespace(ready_for=lambda options: None)
    sys.modules["draftwing.engine.engine"] = SimpleNamespace(Engine=engine)  # type: ignore[assignment]
    sys.modules["draftwing.engine.startup.compiler_process"] = SimpleNamespace(Compiler=compiler)  # type: ignore[assignment]


if __name__ == "__main__":
    from draftwing.engine.process import worker

    paused = functools.partial(FakeEngine, pause=float(os.environ.get("FAKE_ENGINE_PAUSE", "0.0005")))
    stands_in(paused)
    sys.exit(worker.main(sys.argv))
