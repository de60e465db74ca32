"""What the KV pool evicts comes back from host memory: the same text, and no prefill of it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from distant_device import DistantCpu, LaterRanks, LostCpu
from reference.checkpoints import eagle3_head
from reference.learnable import write_target
from restarted import OF, Reply, ask, once, opened, run, tokens, write_hybrid
from tiny_adapters import write_adapter
from tiny_checkpoint import VOCAB

from draftwing import SamplingParams
from draftwing.engine import host_level
from draftwing.engine.engine import Engine
from draftwing.errors import ConfigError
from draftwing.kv.host_prefixes import HostPrefixes
from draftwing.kv.prefix_store import PrefixStore
from draftwing.kv.slot_bytes import SlotBytes
from draftwing.requests.request import GenerationRequest

HOST: dict[str, Any] = {"device": DistantCpu, "hicache_size": 0.01}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("models") / "llama", plain=OF)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda kind: write_hybrid(tmp_path_factory.mktemp("hybrid") / kind, kind))


@contextmanager
def engine_of(model: Path, **more: Any) -> Iterator[Engine]:
    engine = opened(model, **{**HOST, **more})
    try:
        yield engine
        saved = engine._saved
        assert saved is not None and saved._host is not None
        saved._host.store.check_integrity()
    finally:
        engine.close()


def evict(engine: Engine) -> None:
    """Empties the pool, behind another request, in whose steps copies arrive."""
    ask(engine, tokens(10, 99))
    assert engine.parts.sched.flush_cache()


def came_back(engine: Engine) -> int:
    """Tokens."""
    found: int = engine.stats()["host_cache_tokens"]
    return found


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.exhaustive), 0.8])
def test_an_evicted_conversation_goes_on(model: Path, temperature: float) -> None:
    prompt = tokens(500)
    first = once(model, None, prompt, {"temperature": temperature})
    assert len(set(first.tokens)) > 8
    with engine_of(model) as engine:
        assert ask(engine, prompt, temperature) == first
        evict(engine)
        again = ask(engine, prompt, temperature)
        assert again.tokens == first.tokens and again.cached == came_back(engine) == 448
        evict(engine)
        turn = [*prompt, *first.tokens, *tokens(30, 1)]
        found = ask(engine, turn, temperature)
        assert found.tokens == once(model, None, turn, {"temperature": temperature}).tokens and found.cached == 512


def test_only_what_is_not_in_the_pool_is_copied(model: Path) -> None:
    """A prompt of which the pool has a beginning that is no whole number of blocks."""
    prompt = tokens(500)
    with engine_of(model) as engine:
        expected = ask(engine, prompt)
        evict(engine)
        assert ask(engine, [*prompt[:100], *tokens(30, 1)]).cached == 64
        found = ask(engine, prompt)
        assert found.tokens == expected.tokens and found.cached == 448
        assert came_back(engine) == 64 + 348
        assert ask(engine, prompt).cached == 499 and came_back(engine) == 64 + 348


def test_groups_of_a_text_are_looked_up_together(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked, groups = list[int](), list[int]()
    look, copy = host_level.cached_parts, HostPrefixes.write
    monkeypatch.setattr(host_level, "cached_parts", lambda *args: looked.append(1) or look(*args))
    monkeypatch.setattr(HostPrefixes, "write", lambda *args: groups.append(1) or copy(*args))
    with engine_of(model) as engine:
        saved = engine._saved
        assert saved is not None and saved._host is not None
        saved._host._most = 8 * saved._host._each
        expected = ask(engine, tokens(500)).tokens
        evict(engine)
        assert len(groups) == 4 and len(looked) <= 2, "once, and to see that nothing is left"
        assert ask(engine, tokens(500))[:2] == (expected, 448)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["qwen3.5", pytest.param("qwen3-next", marks=pytest.mark.exhaustive), "lfm2", "mamba2"]
)
def test_hybrids_begin_with_a_snapshot(hybrid: Callable[[str], Path], kind: str) -> None:
    prompt = tokens(300)
    first = once(hybrid(kind), None, prompt)
    with engine_of(hybrid(kind)) as engine:
        assert ask(engine, prompt) == first
        evict(engine)
        again = ask(engine, prompt)
        assert again.tokens == first.tokens and again.cached == 256
        evict(engine)
        turn = [*prompt[:270], *tokens(200, 1)]
        assert ask(engine, turn)[:2] == (once(hybrid(kind), None, turn).tokens, 256)


@pytest.mark.parametrize("algorithm", ["EAGLE3", pytest.param("STANDALONE", marks=pytest.mark.exhaustive)])
def test_drafters_go_on_with_their_keys(model: Path, tmp_path: Path, algorithm: str) -> None:
    """As many drafts are accepted as where the prefix is in the pool."""
    head = model if algorithm == "STANDALONE" else eagle3_head(OF, vocab_size=VOCAB).write(tmp_path / "head")
    more: dict[str, Any] = {
        "speculative_algorithm": algorithm, "speculative_fixed_shape": True, "speculative_num_steps": 3,
        "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4, "speculative_draft_model_path": str(head),
    }  # fmt: skip
    prompt = tokens(450)
    plain = once(model, None, prompt, {"temperature": 0.0})
    with engine_of(model, **more) as engine:
        ask(engine, prompt, 0.0)
        expected = ask(engine, prompt, 0.0)
        evict(engine)
        found = ask(engine, prompt, 0.0)
    assert found.cached == 448 and found.tokens == expected.tokens == plain.tokens and found.steps == expected.steps


@pytest.mark.exhaustive  # as in tests/engine/test_saved_prefixes.py
@pytest.mark.slow
def test_a_prediction_layer_s_keys_come_back(hybrid: Callable[[str], Path]) -> None:
    model, prompt = hybrid("qwen3.5"), tokens(300)
    first = once(model, None, prompt)
    with engine_of(model, speculative_algorithm="NEXTN", speculative_fixed_shape=True) as engine:
        for cached in (0, 256, 256):
            assert ask(engine, prompt)[:2] == (first.tokens, cached)
            evict(engine)


@pytest.mark.exhaustive  # what it meets has tests of its own here
@pytest.mark.slow
@pytest.mark.further(drafts={})
@pytest.mark.further(kind="llama")  # every fourth layer of the other is one of its
@pytest.mark.parametrize("kind", ["llama", "qwen3.5"])
@pytest.mark.parametrize("drafts", [{}, {"speculative_algorithm": "NGRAM", "speculative_fixed_shape": True}])
def test_conversations_by_turns_in_a_small_pool(
    model: Path, hybrid: Callable[[str], Path], kind: str, drafts: dict[str, Any]
) -> None:
    """The pool has room for two of six, the host for four: each turn has the text that it has alone."""
    of = model if kind == "llama" else hybrid(kind)
    talks = [tokens(120 + 40 * at, at) for at in range(6)]
    rng, cached = random.Random(1), 0
    with engine_of(of, max_total_tokens=1000, hicache_size=0.0013, **drafts) as engine, engine_of(of) as alone:
        for turn in range(18):
            at = rng.randrange(6)
            if len(talks[at]) > 700:
                continue
            alone.flush_cache()
            expected, found = ask(alone, talks[at]), ask(engine, talks[at])
            assert found.tokens == expected.tokens
            cached += found.cached
            talks[at] += [*found.tokens, *tokens(20, 100 + turn)]
            assert engine.stats()["host_cache_bytes"] <= 1.3e6
        assert cached > 1000 and came_back(engine) > 256


@pytest.mark.slow
@pytest.mark.further(kind="llama")
@pytest.mark.parametrize("kind", ["llama", "qwen3.5"])
def test_many_at_once_are_preempted(model: Path, hybrid: Callable[[str], Path], kind: str) -> None:
    """Prompts come back while others run, in a pool that has no room for all of them."""
    of = model if kind == "llama" else hybrid(kind)
    prompts = [tokens(200, seed) for seed in range(6)]
    expected = [once(of, None, prompt).tokens for prompt in prompts]
    with engine_of(of, max_total_tokens=700) as engine:
        for _ in range(3):
            assert [*run(engine, dict(enumerate(prompts))).values()] == expected
        assert came_back(engine) >= 256


@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3.5", marks=pytest.mark.exhaustive)])
def test_a_preempted_request_goes_on_from_the_host(model: Path, hybrid: Callable[[str], Path], kind: str) -> None:
    """Two that grow beyond the pool: the one that has to wait is not prefilled from its first token."""
    of, asked = model if kind == "llama" else hybrid(kind), {str(at): tokens(140, at) for at in range(2)}
    with engine_of(of) as engine:
        alone = {uid: run(engine, {uid: prompt}, 250)[uid] for uid, prompt in asked.items()}
    with engine_of(of, max_total_tokens=420) as engine:
        assert run(engine, asked, 250) == alone
        assert engine.parts.sched.retractions and came_back(engine) >= 64


def test_what_is_evicted_while_a_request_waits_comes_back(model: Path) -> None:
    """It is cached when the request comes, and no longer when it has its turn."""
    prompt = tokens(200)
    with engine_of(model) as engine:
        alone = {uid: run(engine, {uid: ids}, 90)[uid] for uid, ids in (("long", tokens(250, 1)), ("next", prompt))}
    with engine_of(model, max_total_tokens=370, max_running_requests=1) as engine:
        ask(engine, prompt)
        assert run(engine, {"long": tokens(250, 1), "next": prompt}, 90, 10) == alone
        assert came_back(engine) >= 64


def test_adapters_keep_their_own(model: Path, tmp_path: Path) -> None:
    names = [f"{name}={write_adapter(tmp_path / name, model, seed)}" for seed, name in enumerate(("tuned", "other"))]
    asked: list[dict[str, Any]] = [{}, {"adapters": (("tuned", 1.0),)}, {"adapters": (("other", 1.0),)}]
    with engine_of(model, lora_modules=tuple(names)) as engine:
        first = [ask(engine, tokens(200), **fields) for fields in asked]
        assert len({tuple(reply.tokens) for reply in first}) == 3
        evict(engine)
        for fields, reply in zip(asked, first, strict=True):
            assert ask(engine, tokens(200), **fields)[:2] == (reply.tokens, 192)


def test_clients_and_salts_stay_apart(model: Path) -> None:
    prompt = tokens(200)
    names: list[dict[str, Any]] = [
        {}, {"client": "alice"}, {"client": "bob"}, {"cache_salt": "alice"}, {"client": "alice", "cache_salt": "x"},
    ]  # fmt: skip
    with engine_of(model) as engine:
        for cached in (0, 192):
            assert [ask(engine, prompt, **fields).cached for fields in names] == [cached] * len(names)
            evict(engine)
        engine.forget_client("alice")
        assert [ask(engine, prompt, client=one).cached for one in ("alice", "bob")] == [0, 192]


def test_what_must_not_be_kept_is_not(model: Path) -> None:
    with engine_of(model) as engine:
        ask(engine, tokens(300), learn=False)
        evict(engine)
        assert ask(engine, tokens(300)).cached == 0
        evict(engine)
        assert ask(engine, tokens(300)).cached == 256
        assert engine.flush_cache() and engine.stats()["host_cache_bytes"] == 0
        assert ask(engine, tokens(300)).cached == 0


def test_what_may_spoil_logits_is_removed(model: Path) -> None:
    with engine_of(model) as engine:
        ask(engine, tokens(300))
        evict(engine)
        norm = engine.parts.executor.model.norm.weight.data
        before = norm.clone()
        norm.fill_(torch.nan)
        engine.submit(GenerationRequest("one", tokens(40, 1), SamplingParams(max_new_tokens=4)))
        while not engine.idle():
            engine.step()
        norm.copy_(before)
        assert engine.stats()["host_cache_bytes"] == 0 and ask(engine, tokens(300)).cached == 0


def test_nobody_waits_for_copies(model: Path) -> None:
    """Of copies that never arrive there is nothing, and all goes on."""
    expected = once(model, None, tokens(300))
    with engine_of(model, device=LostCpu) as engine:
        for _ in range(3):
            assert ask(engine, tokens(300)) == expected
            evict(engine)


def test_without_memory_nothing_fails(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    expected = once(model, None, tokens(300))
    with engine_of(model) as engine:
        for name in ("gather", "scatter"):
            with monkeypatch.context() as patch:
                patch.setattr(SlotBytes, name, fail)
                assert ask(engine, tokens(300)) == expected
                evict(engine)
            assert ask(engine, tokens(300)).tokens == expected.tokens
            evict(engine)
        assert ask(engine, tokens(300)) == Reply(expected.tokens, 256, expected.steps)


def test_both_levels_have_one_text(model: Path, tmp_path: Path) -> None:
    """A host that has room for the beginning alone: the rest comes from the disk; after a restart all does."""
    prompt = tokens(500)
    first = once(model, None, prompt)
    with engine_of(model, prefix_cache_dir=str(tmp_path), hicache_size=0.0002) as engine:
        assert ask(engine, prompt) == first
        saved = engine._saved
        assert saved is not None
        saved.write_all()
        evict(engine)
        assert ask(engine, prompt)[:2] == (first.tokens, 448)
        stats = engine.stats()
        assert 0 < stats["host_cache_tokens"] < stats["prefix_cache_restored_tokens"] == 448
    with engine_of(model, prefix_cache_dir=str(tmp_path)) as engine:
        for from_host in (0, 448):
            assert ask(engine, prompt)[:2] == (first.tokens, 448) and came_back(engine) == from_host
            evict(engine)


@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3.5", marks=pytest.mark.exhaustive), "mamba2"])
def test_files_are_read_ahead(
    model: Path, hybrid: Callable[[str], Path], tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device with memory of its own, each by a thread; those that are damaged change no text."""
    of, prompt = model if kind == "llama" else hybrid(kind), tokens(500)
    expected = once(of, None, prompt).tokens
    cached, waited, read = list[tuple[list[int], int]](), list[bytes](), PrefixStore.read

    def noted(store: PrefixStore, digest: bytes) -> memoryview | None:
        waited.append(digest)
        return read(store, digest)

    monkeypatch.setattr(PrefixStore, "read", noted)
    for at in range(4):
        cached.append(once(of, tmp_path, prompt, device=DistantCpu)[:2])
        assert at == 3 or not waited, "the engine has read a file itself"
        if at == 2:
            path = next(path for path in tmp_path.rglob("*.kv") if path.stem.endswith("-100"))
            path.write_bytes(path.read_bytes()[:-1] + b"?")
    partly = 192 if kind == "llama" else 0
    assert cached == [(expected, 0), (expected, 448), (expected, 448), (expected, partly)]


@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3.5", marks=pytest.mark.exhaustive)])
def test_the_disk_gets_what_the_host_has(model: Path, hybrid: Callable[[str], Path], tmp_path: Path, kind: str) -> None:
    """When the pool has evicted it, before the engine had nothing to do."""
    of, prompt = model if kind == "llama" else hybrid(kind), tokens(500)
    first = once(of, None, prompt)
    with engine_of(of, prefix_cache_dir=str(tmp_path)) as engine:
        assert ask(engine, prompt) == first
        evict(engine)
    assert once(of, tmp_path, prompt, device=DistantCpu)[:2] == (first.tokens, 448)


@pytest.mark.slow
def test_ranks_keep_their_own_parts(model: Path) -> None:
    """Copies of the other rank arrive later than rank 0's, which waits for its own alone."""
    prompt = tokens(300)
    first = once(model, None, prompt)
    with engine_of(model, tp_size=2, device=LaterRanks, max_total_tokens=480) as engine:
        assert ask(engine, prompt).tokens == first.tokens
        evict(engine)
        ask(engine, tokens(420, 1))  # which all slots are written by
        evict(engine)
        again = ask(engine, prompt)
        assert again.tokens == first.tokens and again.cached == came_back(engine) == 256


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["llama", "qwen3.5"])
def test_conversations_by_turns_on_ranks(model: Path, hybrid: Callable[[str], Path], kind: str, size: int) -> None:
    """Of conversations by turns in a pool that has room for one of them or two."""
    if kind == "qwen3.5" and size == 4:
        pytest.skip("it has two key heads")
    of = model if kind == "llama" else hybrid(kind)
    talks, rng, cached = [tokens(120 + 40 * at, at) for at in range(5)], random.Random(1), 0
    ranks: dict[str, Any] = {"tp_size": size, "max_total_tokens": 700, "hicache_size": 0.003, "device": LaterRanks}
    with engine_of(of, dtype="float32", **ranks) as engine, engine_of(of, dtype="float32") as alone:
        for turn in range(12):
            at = rng.randrange(5)
            expected, found = ask(alone, talks[at]), ask(engine, talks[at])
            assert found.tokens == expected.tokens
            cached += found.cached
            talks[at] += [*found.tokens, *tokens(20, 100 + turn)]
        assert cached > 600 and came_back(engine) >= 128


def test_pages_of_ranks_without_memory(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank has none: so it is said at the start."""
    monkeypatch.setattr(host_level, "open_share", lambda executor, *sizes: False)
    with pytest.raises(ConfigError, match=r"hicache_size: 0\.01 GB of host memory cannot be had by all 1 ranks"):
        opened(model, **HOST)


def test_it_is_copied_while_nothing_runs(model: Path) -> None:
    with engine_of(model) as engine:
        engine.measure_read_rate()  # else that is done first
        expected = ask(engine, tokens(300)).tokens
        waits = threading.Thread(target=engine.step, args=(True,))
        waits.start()
        saved, until = engine._saved, time.monotonic() + 60
        assert saved is not None
        while saved.pending and time.monotonic() < until:
            time.sleep(0.01)
        engine.wake()
        waits.join()
        engine.parts.sched.flush_cache()
        assert ask(engine, tokens(300))[:2] == (expected, 256)


def test_it_is_refused_where_it_cannot_work(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="hicache_size"):
        opened(model, hicache_size=1.0, disable_radix_cache=True)

    def fail(*args: Any) -> Any:
        raise RuntimeError("CUDA error: out of memory\nand a long text")

    with pytest.raises(ConfigError, match=r"hicache_size: expected at most \d+\.\d GB, which are free; found 1e\+06"):
        opened(model, **{**HOST, "hicache_size": 1e6})
    monkeypatch.setattr(DistantCpu, "host_memory", fail)
    with pytest.raises(ConfigError, match=r"hicache_size: 0\.01 GB of host memory cannot be had: CUDA .* memory$"):
        opened(model, **HOST)
