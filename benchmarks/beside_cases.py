"""What `beside.py` measures, in this order: models, how each engine is started, and the load."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import contexts_http
import embeddings
import images_http
import random_models
import waves
from waves import Wave, prompts

Words = tuple[str, ...]
Figures = dict[str, Any]  # rate: tokens per second, or texts
WARM = 16  # tokens of answers that do not count
SMALL, LARGE = (640, 480), (2048, 2048)  # pictures


class Work(NamedTuple):
    """A wave of requests. run: sends it to the server at a URL, other ones in each round (-1: to warm it)."""

    label: str
    run: Callable[[str, int], Figures]


class Waves(NamedTuple):
    """Requests at once with prompts of random tokens; each wave with prompts that no cache knows, and with known ones.

    lengths: tokens of prompts and answers.  adapters: how many the requests have by turns, 0: none.
    """

    sizes: Sequence[Wave] = (Wave(1, 0), Wave(16, 0), Wave(64, 0))
    lengths: Sequence[tuple[int, int]] = ((300, 256), (4000, 128))
    known: Sequence[bool] = (False, True)
    adapters: Sequence[int] = (0,)

    def works(self, vocab: int) -> Iterator[Work]:
        for (length, tokens), size, known, adapters in itertools.product(
            self.lengths, self.sizes, self.known, self.adapters
        ):
            label = f"{size.label} x {length}, {'known' if known else 'new'}"
            yield Work(
                f"{label}, {adapters} adapters" if len(self.adapters) > 1 else label,
                self._wave(label, size, length, tokens, known, [f"a{i}" for i in range(adapters)] or [""], vocab),
            )

    @staticmethod
    def _wave(
        label: str, size: Wave, length: int, tokens: int, known: bool, names: list[str], vocab: int
    ) -> Callable[[str, int], Figures]:
        def run(url: str, number: int) -> Figures:
            every = prompts(size.size, length, vocab, label if known else f"{label} {names} {number}")
            if known:
                waves.asked(url, every, 1, size.temperature, names)
            return waves.asked(url, every, WARM if number < 0 else tokens, size.temperature, names)

        return run


class Contexts(NamedTuple):
    """Answers behind long contexts that the cache knows."""

    lengths: Sequence[int] = (16_000, 32_000, 64_000, 128_000)
    requests: Sequence[int] = (1, 4)
    tokens: int = 256

    def works(self, vocab: int) -> Iterator[Work]:
        for length, count in itertools.product(self.lengths, self.requests):
            yield Work(f"{count} x {length}, known", self._wave(length, count, vocab))

    def _wave(self, length: int, count: int, vocab: int) -> Callable[[str, int], Figures]:
        def run(url: str, number: int) -> Figures:
            contexts = [prompts(1, length, vocab, f"context {i}")[0] for i in range(count)]
            for ids in contexts:
                contexts_http.wave(url, [ids], 2)
            every = contexts_http.continued(contexts, vocab, str(number))
            return contexts_http.wave(url, every, WARM if number < 0 else self.tokens)

        return run


class Pictures(NamedTuple):
    """Chat completions with a picture each: one after the other, and `many` at once."""

    sizes: Sequence[tuple[tuple[int, int], str]] = ((SMALL, "JPEG"), (LARGE, "JPEG"), (LARGE, "PNG"))
    many: int = 32
    tokens: int = 128
    each: int = 3

    def works(self, vocab: int) -> Iterator[Work]:
        made = cache(images_http.picture)  # so that all servers have the same ones
        numbers = itertools.count()

        def alone(size: tuple[int, int] | None, kind: str) -> Callable[[str, int], Figures]:
            first = next(numbers) * 1000

            def run(url: str, number: int) -> Figures:
                seeds = range(first + self.each * number, first + self.each * (number + 1))
                images = [None if size is None else made(*size, seed % 2**32, kind) for seed in seeds]
                return images_http.one_by_one(url, images, WARM if number < 0 else self.tokens)

            return run

        def at_once(url: str, number: int) -> Figures:
            images = [made(*self.sizes[0][0], 2**20 + self.many * (number + 1) + i, "JPEG") for i in range(self.many)]
            return images_http.at_once(url, images, WARM if number < 0 else self.tokens)

        yield Work("text alone", alone(None, ""))
        for size, kind in self.sizes:
            yield Work("{} x {}, {}".format(*size, kind), alone(size, kind))
        yield Work(f"{self.many} at once", at_once)


class Vectors(NamedTuple):
    """`/v1/embeddings`: texts in requests of `batch` one after the other, and one by one in `clients` requests."""

    texts: int = 1000
    batch: int = 64
    clients: int = 32

    def works(self, vocab: int) -> Iterator[Work]:
        texts, threads = embeddings.texts_of(self.texts), ThreadPoolExecutor(self.clients)
        asker = cache(lambda url: embeddings.Asker(url, "float"))
        for name, work in embeddings.works_of(texts, self.batch, threads).items():

            def run(url: str, number: int, work: Callable[[Any], list[bytes]] = work) -> Figures:
                start = time.perf_counter()
                work(asker(url))
                return {"rate": round(self.texts / (time.perf_counter() - start), 1)}

            yield Work(name, run)


Load = Waves | Contexts | Pictures | Vectors


class Drafts(NamedTuple):
    """Chains of so many drafts. ours, peer: how the engines name the algorithm; an empty one: the peer has none.  head:
    whether it has files of its own.  says: whether the peer is told the shape, too; else the head's config says it.
    accepted: tokens of a step, simulated."""

    ours: str
    peer: str
    steps: int = 3
    head: bool = True
    says: bool = True
    accepted: float = 2.5

    def words(self, ours: bool, folder: Path) -> Iterator[str]:
        if not ours and not self.peer:
            return
        yield from ("--speculative-algorithm", self.ours if ours else self.peer)
        if self.head:
            yield from ("--speculative-draft-model-path", str(folder / "draft"))
        if ours or self.says:
            shape = {"num-steps": self.steps, "eagle-topk": 1, "num-draft-tokens": self.steps + 1}
            yield from (word for key, value in shape.items() for word in (f"--speculative-{key}", str(value)))
        if ours:
            yield from ("--simulate-accept-length", str(self.accepted))


EAGLE3, NEXTN = Drafts("EAGLE3", "EAGLE3"), Drafts("NEXTN", "NEXTN", head=False)
EAGLE3_ALONE = Drafts("EAGLE3", "")  # of models for which SGLang takes no head
# Qwen3.8-27B with and without its published head: 117 and 47 tokens/s, steps with drafts some 1.4 times as long.
DFLASH2 = Drafts("DFLASH2", "DFLASH", steps=7, says=False, accepted=3.5)


class Case(NamedTuple):
    """model: of `random_models.MODELS`.  cards: of each server.  adapters: that it has.  length: of a context.  rows:
    requests at once.  alone: whether two servers have no room on the same cards.  peer: options that only it has."""

    name: str
    model: str
    load: Load
    drafts: Drafts | None = None
    cards: int = 1
    adapters: int = 0
    length: int = 16384
    rows: int = 64
    alone: bool = False
    peer: Words = ()

    def common(self, ours: bool, folder: Path) -> Iterator[str]:
        """Yields the options that both engines have by the same name."""
        yield from ("--model-path", str(folder / "target"), "--context-length", str(self.length))
        yield from ("--tp-size", str(self.cards))
        if not random_models.MODELS[self.model].files:
            yield from ("--load-format", "dummy")
        if not isinstance(self.load, Vectors):
            yield from ("--max-running-requests", str(self.rows))
        if self.drafts is not None:
            yield from self.drafts.words(ours, folder)
        if self.adapters:
            yield from ("--lora-paths", *(f"a{i}={folder / f'a{i}'}" for i in range(self.adapters)))
            yield from ("--max-loras-per-batch", str(self.adapters + 1), "--max-lora-rank", str(random_models.RANK))

    def our_words(self, folder: Path, shares: bool) -> list[str]:
        """Returns the words behind `draftwing serve`. shares: whether the peer comes to the same cards."""
        words = list(self.common(True, folder))
        if not isinstance(self.load, Vectors):
            words += ["--cuda-graph-max-bs", str(self.rows)]
        if self.drafts is None:
            words += ["--speculative-algorithm", "none"]
        return words + (["--mem-fraction-static", "0.42"] if shares else [])

    def peer_words(self, folder: Path) -> list[str]:
        """Returns the words behind `sglang.launch_server`, and of what is left of the cards it takes four fifths."""
        words = [*self.common(False, folder), "--dtype", "bfloat16", "--mem-fraction-static", "0.8"]
        if isinstance(self.load, Vectors):
            words += ["--is-embedding"]
        else:
            words += ["--cuda-graph-max-bs-decode", str(self.rows)]
        if self.adapters:
            words += ["--enable-lora"]
        return [*words, *self.peer]

    def peer_environ(self) -> dict[str, str]:
        """Returns variables of the peer's: no NVLink multicast, no network, and how drafts are accepted."""
        found = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "HF_HUB_OFFLINE": "1"}
        # Else a start compiles for 16,384 sizes, for minutes; now the waves that warm it do, for theirs.
        found["SGLANG_JIT_DEEPGEMM_PRECOMPILE"] = "0"
        if self.drafts is not None and self.drafts.peer:
            found |= {
                "SGLANG_SIMULATE_ACC_LEN": str(self.drafts.accepted), "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
                "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
            }  # fmt: skip
        return found


FA3 = ("--attention-backend", "fa3")
# Without NVLink multicast; texts of Qwen3.5 have no fused sums at all unless they are asked for.
ALLREDUCE = ("--flashinfer-allreduce-fusion-backend", "trtllm")
TRITON_EXPERTS = ("--moe-runner-backend", "triton")
# Graphs of its prompts take three minutes to capture.
NO_PROMPT_GRAPHS = ("--disable-prefill-cuda-graph",)
# Else it finds no context of a hybrid in its cache.
STATES_KEPT = ("--mamba-radix-cache-strategy", "extra_buffer")
UNQUANTISED = ("--speculative-draft-model-quantization", "unquant")
OF_ADAPTERS = Waves(lengths=((100, 256),), known=(False,), adapters=(0, 1, 32))
DRAWN = (Wave(1, 0), Wave(16, 0), Wave(64, 0), Wave(64, 1.0))  # so that a mixture's tokens stay different
OF_FAMILIES = Waves(DRAWN, ((100, 256), (4000, 128)), (False,))
LONG = Waves(lengths=((4000, 128),))
OF_CONTEXTS: dict[str, Any] = {"length": 131_072, "rows": 8}
CASES = [
    Case("8b", "llama-8b", Waves(), peer=FA3),
    Case("8b-eagle3", "llama-8b", Waves(), EAGLE3, peer=FA3),
    Case("27b", "qwen3.5-27b-fp8", Waves(), alone=True, peer=FA3),
    Case("27b-nextn", "qwen3.5-27b-fp8", Waves(), NEXTN, alone=True, peer=FA3),
    Case("adapters", "llama-8b", OF_ADAPTERS, adapters=32, peer=FA3),
    Case("adapters-eagle3", "llama-8b", OF_ADAPTERS, EAGLE3, adapters=32, peer=FA3),
    Case("pictures-9b", "qwen3.5-9b-pictures", Pictures(), peer=FA3),
    Case("pictures-9b-nextn", "qwen3.5-9b-pictures", Pictures(), NEXTN, peer=FA3),
    Case("pictures-27b", "qwen3.5-27b-pictures", Pictures(), alone=True, peer=FA3),
    Case("pictures-27b-nextn", "qwen3.5-27b-pictures", Pictures(), NEXTN, alone=True, peer=FA3),
    Case("nemotron-3-nano", "nemotron-3-nano", OF_FAMILIES, alone=True, peer=TRITON_EXPERTS),
    Case("nemotron-3-nano-eagle3", "nemotron-3-nano", OF_FAMILIES, EAGLE3_ALONE, alone=True, peer=TRITON_EXPERTS),
    Case("granite-4-tiny", "granite-4-tiny", OF_FAMILIES),
    Case("granite-4-tiny-eagle3", "granite-4-tiny", OF_FAMILIES, EAGLE3_ALONE),
    Case("kimi-linear-48b", "kimi-linear-48b", OF_FAMILIES, alone=True, peer=("--trust-remote-code",)),
    Case(
        "kimi-linear-48b-eagle3",
        "kimi-linear-48b",
        OF_FAMILIES,
        EAGLE3_ALONE,
        alone=True,
        peer=("--trust-remote-code",),
    ),
    Case("lfm2-8b", "lfm2-8b", OF_FAMILIES),
    Case("lfm2-8b-eagle3", "lfm2-8b", OF_FAMILIES, EAGLE3_ALONE),
    Case("contexts-8b-eagle3", "llama-8b", Contexts(), EAGLE3, alone=True, peer=FA3, **OF_CONTEXTS),
    Case(
        "contexts-27b-nextn", "qwen3.5-27b-fp8", Contexts(), NEXTN, alone=True, peer=(*FA3, *STATES_KEPT), **OF_CONTEXTS
    ),
    Case("27b-dflash2", "qwen3.5-27b-fp8", Waves(), DFLASH2, alone=True, peer=(*FA3, *UNQUANTISED, *NO_PROMPT_GRAPHS)),
    Case("70b-fp8", "llama-70b-fp8", LONG, cards=4, peer=FA3),
    Case("70b-fp8-eagle3", "llama-70b-fp8", LONG, EAGLE3, cards=4, peer=(*FA3, *UNQUANTISED)),
    Case("70b-eagle3", "llama-70b", LONG, EAGLE3, cards=4, alone=True, peer=FA3),
    Case("gpt-oss-120b", "gpt-oss-120b", LONG, cards=4, peer=ALLREDUCE),
    Case("122b", "qwen3.5-122b-fp8", LONG, cards=4, peer=(*FA3, *ALLREDUCE)),
    Case("122b-nextn", "qwen3.5-122b-fp8", LONG, NEXTN, cards=4, peer=(*FA3, *ALLREDUCE)),
    Case("embeddings", "qwen3-embedding", Vectors(), length=8192),
]
