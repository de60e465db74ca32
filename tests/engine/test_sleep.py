"""Sleep and wake: memory is given back, and no text changes."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import image_models
import numpy as np
import pytest
import torch
from engine_rig import Rig
from moving_device import MovingCpu, zeros
from reference.checkpoints import eagle3_head
from reference.learnable import write_target
from restarted import OF, TOKENS, ask, opened, tokens, write_hybrid
from tiny_adapters import write_adapter
from tiny_checkpoint import VOCAB
from tiny_embedder import MEAN
from tiny_encoder import BERT, write_encoder

from draftwing import LLM, SamplingParams
from draftwing.engine import sleep
from draftwing.engine.captures import Captures
from draftwing.engine.devices.put_away import put_storages_away, storages_of
from draftwing.engine.engine import Engine
from draftwing.engine.sleep import tensors_of
from draftwing.errors import ConfigError, GenerationError, RequestError
from draftwing.images.processing import Tile
from draftwing.images.reader import Picture, Prompt, placed, read
from draftwing.kv import pool
from draftwing.ops.attention.spec import TorchAttention
from draftwing.ops.table import TorchOps
from draftwing.requests.request import GenerationRequest

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", MovingCpu, pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]
SECONDS = 60.0  # after which a test gives up


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("models") / "llama", plain=OF)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hybrid(tmp_path_factory.mktemp("hybrid") / "qwen3.5", "qwen3.5")


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return eagle3_head(OF, vocab_size=VOCAB).write(tmp_path_factory.mktemp("heads") / "head")


@pytest.fixture(autouse=True)
def movable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool of a `MovingCpu` is torch's own memory, and there are graphs."""
    zeros_as_written = pool.zeros_as_written
    monkeypatch.setattr(
        pool, "zeros_as_written", lambda *args: (zeros if TorchAttention.capturable else zeros_as_written)(*args)
    )


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(TorchAttention, "capturable", request.param is MovingCpu)
    return request.param


@contextmanager
def engine_of(model: Path, device: Any, folder: Path | None = None, **more: Any) -> Iterator[Engine]:
    # torch alone computes in bfloat16 where the processor does, and reads keys in the same alone
    own = {"dtype": "bfloat16"} if device == "cuda" else {"kv_cache_dtype": "auto"} if device is MovingCpu else {}
    engine = opened(model, folder, device=device, **own, **more)
    try:
        yield engine
    finally:
        engine.close()


def until(engine: Engine, ask: Callable[[], Any]) -> None:
    """Turns the engine, which has nothing else to do, until it is as asked."""
    done = ask()
    while not done.done():
        assert engine.step() == []
    done.result()


def nap(engine: Engine) -> None:
    until(engine, engine.sleep)
    assert engine.is_sleeping and engine.stats()["sleeping"] and engine.idle()
    engine.parts.sched.check_integrity()


def held(engine: Engine) -> int:
    """Bytes that may be given back; on a GPU buffers of the host are there besides."""
    executor = engine.parts.executor
    kind = executor.device.device.type
    away, executor.away = executor.away, None  # which has the host's copies
    try:
        found = [tensor for tensor in tensors_of(executor) if tensor.device.type == kind]
        return sum(one.nbytes() for one in storages_of(found).values())
    finally:
        executor.away = away


DRAFTS: dict[str, dict[str, Any]] = {
    "none": {},
    "NGRAM": {"speculative_algorithm": "NGRAM", "speculative_fixed_shape": True},
    "EAGLE3": {"speculative_algorithm": "EAGLE3", "speculative_fixed_shape": True},
    "NEXTN": {"speculative_algorithm": "NEXTN", "speculative_fixed_shape": True},
}


@pytest.mark.parametrize(
    ("drafts", "temperature"),
    [
        pytest.param("none", 0.0, marks=pytest.mark.exhaustive),
        ("NGRAM", 0.8),
        pytest.param("EAGLE3", 0.8, marks=pytest.mark.exhaustive),
        pytest.param("NEXTN", 0.0, marks=pytest.mark.exhaustive),
    ],
)
def test_no_text_changes(model: Path, hybrid: Path, head: Path, device: Any, drafts: str, temperature: float) -> None:
    """Prefixes are cached again, as many drafts are right, and there are as many graphs, at other addresses."""
    own = {"speculative_draft_model_path": str(head)} if drafts == "EAGLE3" else {}
    with engine_of(hybrid if drafts == "NEXTN" else model, device, **own, **DRAFTS[drafts]) as engine:
        prompt, other = tokens(300), tokens(200, 1)
        first, again = ask(engine, prompt, temperature), ask(engine, prompt, temperature)
        assert first.cached == 0 and again.cached >= 256 and len(set(first.tokens)) > 8
        expected = ask(engine, other, temperature)
        before, captured = held(engine), len(engine.parts.executor.captures)
        assert device == "cpu" or captured > 0
        for _ in range(2):
            nap(engine)
            assert len(engine.parts.executor.captures) == 0
            if device != "cpu":
                assert held(engine) < before / 100
            woken = ask(engine, prompt, temperature)
            assert not engine.is_sleeping and (woken.tokens, woken.cached) == (first.tokens, 0)
            hit = ask(engine, prompt, temperature)
            assert (hit.tokens, hit.cached) == (first.tokens, again.cached)
            assert drafts == "NGRAM" or hit.steps == again.steps
            assert ask(engine, other, temperature).tokens == expected.tokens
            if device != "cpu":
                assert held(engine) == before and len(engine.parts.executor.captures) == captured
        engine.flush_cache()
        assert ask(engine, prompt, temperature).tokens == first.tokens


def test_pages_of_the_pool_go_back_to_the_system(model: Path) -> None:
    with engine_of(model, "cpu", max_total_tokens=40_000) as engine:
        prompt = tokens(300)
        first = ask(engine, prompt)
        tensors = engine.parts.executor.attn.pool.tensors
        for tensor in tensors:
            tensor.fill_(1)
        engine.flush_cache()
        nap(engine)
        away = engine.parts.executor.away
        assert away is not None and away.freed > 0.8 * engine.info.pool_bytes > 8e6
        assert all(int((tensor[64:-64] != 0).sum()) == 0 for tensor in tensors)
        assert ask(engine, prompt) == first


def test_recorded_steps_are_recorded_again(model: Path) -> None:
    with engine_of(model, "cpu", dtype="bfloat16", kv_cache_dtype="auto") as engine:
        executor, prompt = engine.parts.executor, tokens(100)
        first, before = ask(engine, prompt, 0.0), executor.captures.replays
        if not before:
            pytest.skip("no steps are recorded without the C extension")
        assert executor.captures.recorded_bytes > 0
        nap(engine)
        assert executor.captures.recorded_bytes == 0 == len(executor.graphs)
        assert ask(engine, prompt, 0.0).tokens == first.tokens
        assert executor.captures.replays > before + TOKENS / 2 and executor.captures.recorded_bytes > 0


def request(uid: str, prompt: list[int], count: int = TOKENS, **fields: Any) -> GenerationRequest:
    params = SamplingParams(max_new_tokens=count, temperature=0.8, sampling_seed=5, ignore_eos=True)
    return GenerationRequest(uid, prompt, params, **fields)


@pytest.mark.further(device="cpu")
def test_what_runs_ends_first_and_who_comes_then_wakes_it(model: Path, device: Any) -> None:
    """Five in flight, of which one waits for a row; then the engine is asked to sleep, and two more come."""
    prompts = [tokens(50 + 20 * at, at) for at in range(7)]
    with engine_of(model, device) as engine:
        expected = [ask(engine, prompt).tokens for prompt in prompts]
        found: dict[str, list[int]] = {str(at): [] for at in range(7)}
        for at in range(5):
            engine.submit(request(str(at), prompts[at]))
        for output in engine.step():
            found[output.uid] += output.token_ids
        log: list[str] = []
        done = engine.sleep()
        done.add_done_callback(lambda _: log.append(f"asleep={engine.is_sleeping}"))
        for at in (5, 6):
            engine.submit(request(str(at), prompts[at]))
        engine.submit(request("gone", prompts[0]))
        engine.abort("gone")
        while not engine.idle():
            for output in engine.step():
                if output.uid == "gone":
                    assert output.finish_reason and output.finish_reason["type"] == "abort"
                    continue
                found[output.uid] += output.token_ids
                if output.finish_reason:
                    log.append(output.uid)
            assert engine.stats()["waiting"] >= (2 if not done.done() else 0)
        assert log.index("asleep=True") == 5 and sorted(log[:5]) == list("01234") and sorted(log[6:]) == list("56")
        assert [found[str(at)] for at in range(7)] == expected and not engine.is_sleeping


def test_one_that_only_wants_an_end_wakes_nobody(model: Path, device: Any) -> None:
    with engine_of(model, device) as engine:
        nap(engine)
        engine.abort("unknown")
        assert engine.step(block=True) == [] and engine.is_sleeping and engine.idle()
        engine.wake()
        assert engine.step(block=True) == [] and engine.is_sleeping
        until(engine, engine.sleep)  # once more
        assert engine.is_sleeping
        until(engine, engine.wake_up)
        assert not engine.is_sleeping
        until(engine, engine.wake_up)
        assert len(ask(engine, tokens(20)).tokens) == TOKENS


def test_one_that_comes_behind_the_look(model: Path, device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look for new requests and the end of a step of an engine that sleeps: the next step wakes it up."""
    with engine_of(model, device) as engine:
        first = ask(engine, tokens(50))
        nap(engine)
        look = engine._sleep.look

        def late() -> bool:
            awake = look()
            if not awake:
                engine.submit(request("late", tokens(50), len(first.tokens)))
            return awake

        with monkeypatch.context() as patch:
            patch.setattr(engine._sleep, "look", late)
            assert engine.step() == []
        assert engine.is_sleeping and not engine.idle()
        found = list[int]()
        for _ in range(3 * TOKENS):
            found += [token for output in engine.step(block=True) for token in output.token_ids]
            if engine.idle():
                break
        assert found == first.tokens and not engine.is_sleeping


@pytest.mark.slow
@pytest.mark.further(device="cpu")
def test_what_needs_the_device_wakes_it_or_is_refused(model: Path, head: Path, device: Any) -> None:
    drafts = {**DRAFTS["EAGLE3"], "speculative_draft_model_path": str(head)}
    with engine_of(model, device, **drafts) as engine:
        first = ask(engine, tokens(100))
        nap(engine)
        with pytest.raises(ConfigError, match="wake it up"):
            engine.swap_draft(head)
        assert engine.is_sleeping and engine.flush_cache() and not engine.is_sleeping
        engine.swap_draft(head)  # taken by the next step, before which it falls asleep
        nap(engine)
        assert ask(engine, tokens(100)).tokens == first.tokens


def test_no_room(model: Path, device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that cannot sleep is awake, one that cannot wake up goes on to sleep, and says so to who asks."""
    if device != MovingCpu:
        pytest.skip("a CPU needs no room")
    with engine_of(model, device) as engine:
        first = ask(engine, tokens(100))
        for tried in (lambda: 10**6, lambda: None):
            monkeypatch.setattr(sleep, "free_memory", tried)
            if tried() is None:
                monkeypatch.setattr(MovingCpu, "host_memory", _none_left)
            with pytest.raises(GenerationError, match="no room to sleep"):
                until(engine, engine.sleep)
            assert not engine.is_sleeping and ask(engine, tokens(100)).tokens == first.tokens
        monkeypatch.undo()
    monkeypatch.setattr(pool, "zeros_as_written", zeros)
    monkeypatch.setattr(TorchAttention, "capturable", True)
    with engine_of(model, device) as engine:
        ask(engine, tokens(100))
        nap(engine)
        monkeypatch.setattr(MovingCpu, "room", False)
        with pytest.raises(GenerationError, match="others have taken its memory: no room"):
            until(engine, engine.wake_up)
        engine.submit(request("a", tokens(100)))
        (refused,) = engine.step()
        assert refused.uid == "a" and refused.finish_reason is not None and engine.is_sleeping and engine.idle()
        message = "the engine cannot wake up: others have taken its memory: no room"
        assert refused.finish_reason == {"type": "abort", "message": message, "status_code": 500}, "an error of HTTP"
        monkeypatch.setattr(MovingCpu, "room", True)
        assert ask(engine, tokens(100)).tokens == first.tokens


def test_no_room_for_graphs(model: Path, device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose weights have room, and whose graphs have none, goes on to sleep, too."""
    if device != MovingCpu:
        pytest.skip("a CPU captures no graphs")
    with engine_of(model, device) as engine:
        first, capture = ask(engine, tokens(100)), Captures._capture
        assert len(engine.parts.executor.captures) > 0
        nap(engine)
        count = held(engine)

        def full(captures: Captures, key: Any) -> None:
            capture(captures, key)
            raise MovingCpu.out_of_memory("no room for graphs")

        with monkeypatch.context() as patch:
            patch.setattr(Captures, "_capture", full)
            with pytest.raises(GenerationError, match="others have taken its memory: no room for graphs"):
                until(engine, engine.wake_up)
            engine.submit(request("a", tokens(100)))
            (refused,) = engine.step()
            assert refused.finish_reason is not None and "no room for graphs" in refused.finish_reason["message"]
        assert engine.is_sleeping and held(engine) == count and not len(engine.parts.executor.captures)
        assert ask(engine, tokens(100)).tokens == first.tokens and len(engine.parts.executor.captures) > 0


def test_what_was_had_again_is_given_back_where_the_rest_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """To others, too: torch keeps none of it."""
    device, resize, log = MovingCpu(), torch.UntypedStorage.resize_, list[int]()
    monkeypatch.setattr(MovingCpu, "trim", lambda device: log.append(-1))
    one, two = torch.arange(10), torch.arange(20)
    away = put_storages_away(device, [one], [two])

    def full(storage: torch.UntypedStorage, size: int) -> Any:
        log.append(size)
        if size == two.nbytes:
            raise MovingCpu.out_of_memory("no room")
        return resize(storage, size)

    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", full)
        with pytest.raises(RuntimeError, match="no room"):
            away.back()
    assert log == [-1, one.nbytes, two.nbytes, 0, 0, -1]
    away.back()
    assert torch.equal(one, torch.arange(10)) and not two.any()


def _none_left(device: Any, size: int) -> Any:
    raise RuntimeError("out of page-locked memory\nand so on")


@pytest.mark.slow
def test_prefixes_wait_on_the_disk(model: Path, device: Any, tmp_path: Path) -> None:
    with engine_of(model, device, tmp_path / "kept") as engine:
        prompt = tokens(300)
        first = ask(engine, prompt)
        for _ in range(2):
            nap(engine)
            found = ask(engine, prompt)
            assert found.tokens == first.tokens and found.cached >= 256
        assert engine.stats()["prefix_cache_restored_tokens"] >= 512


@pytest.mark.slow
def test_prefixes_wait_in_host_memory(hybrid: Path, device: Any) -> None:
    if device == "cpu":
        pytest.skip("its memory is the host's")
    with engine_of(hybrid, device, hicache_size=0.01) as engine:
        prompt = tokens(300)
        first = ask(engine, prompt)
        nap(engine)
        found = ask(engine, prompt)
        assert found.tokens == first.tokens and found.cached == 256
        assert engine.stats()["host_cache_tokens"] == 256


@pytest.mark.slow
def test_adapters_stay(model: Path, device: Any, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "one", model, 1, rank=4)
    with engine_of(model, device, lora_modules=(f"one={folder}",)) as engine:
        prompt, fields = tokens(100), {"adapters": (("one", 1.0),)}
        plain, first = ask(engine, prompt), ask(engine, prompt, **fields)
        assert plain.tokens != first.tokens
        nap(engine)
        assert ask(engine, prompt, **fields).tokens == first.tokens
        assert ask(engine, prompt).tokens == plain.tokens
        assert engine.stats()["adapter_loads"] == 1, "its slot was filled once"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3.5", "gemma3"])
def test_features_of_images_stay(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the tower, for pictures to come."""
    monkeypatch.setattr(image_models, "make_ops", TorchOps)
    monkeypatch.setattr(TorchAttention, "capturable", True)
    monkeypatch.setattr(MovingCpu, "has_own_memory", False)  # else the rig asks CUDA about host reads
    folder = image_models.write_model(tmp_path / kind, kind)
    model, processor = image_models.loaded.__wrapped__(folder)

    def prompt(seed: int) -> Any:
        pieces = [read(Picture(image_models.encoded(image_models.picture(40, 30, seed)), "x"), processor)]
        tiles = sum(isinstance(piece, Tile) for piece in pieces[0])
        places = [one for _ in range(tiles) for one in (90, image_models.PAD, 91)]
        return placed([60, 61, *places, 33], Prompt("", pieces), processor)

    def text(rig: Rig, seed: int) -> list[int]:
        ids, images = prompt(seed)
        rig.submit("0", ids, SamplingParams(max_new_tokens=20, temperature=0.0, ignore_eos=True), images=images)
        return rig.run().tokens["0"]

    rig = Rig(model, fake_device=MovingCpu())
    first, other = text(rig, 0), text(rig, 1)
    images = rig.executor._images
    assert images is not None and images.runs == 2 and first != other
    rig.sched.flush_cache()
    sleep.put_away(rig.executor)
    assert all(not one.untyped_storage().nbytes() for one in images._known.values())
    sleep.put_back(rig.executor)
    assert text(rig, 0) == first and images.runs == 2 and text(rig, 2) not in (first, other) and images.runs == 3


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.further(device="cpu")
@pytest.mark.parametrize("drafts", ["NGRAM", pytest.param("NEXTN", marks=pytest.mark.exhaustive)])
def test_a_storm(model: Path, hybrid: Path, device: Any, drafts: str) -> None:
    """20 sleeps while clients ask one request after another: each has the text that it has alone."""
    of, more = (hybrid if drafts == "NEXTN" else model), DRAFTS[drafts]
    prompts = [tokens(60 + 30 * at, at) for at in range(6)]
    prompts += [prompt + tokens(20, 9) for prompt in prompts]
    with engine_of(of, device) as alone:
        expected = [ask(alone, prompt).tokens for prompt in prompts]
    with engine_of(of, device, disable_cuda_graph=device is MovingCpu, **more) as engine:
        found: dict[str, list[int]] = {}
        ended, stop, failed = threading.Condition(), threading.Event(), []

        def turn() -> None:
            try:
                while not stop.is_set():
                    for output in engine.step(block=True):
                        with ended:
                            found.setdefault(output.uid, []).extend(output.token_ids)
                            if output.finish_reason is not None:
                                assert output.finish_reason["type"] == "length"
                                found[output.uid].append(-1)
                            ended.notify_all()
            except BaseException as error:
                failed.append(error)
                with ended:
                    ended.notify_all()

        def has_ended(uid: str) -> bool:
            return bool(failed) or found.get(uid, [0])[-1] == -1

        def client(number: int) -> None:
            rng = random.Random(number)
            for count in range(8):
                at, uid = rng.randrange(len(prompts)), f"{number}-{count}"
                engine.submit(request(uid, prompts[at]))
                with ended:
                    assert ended.wait_for(partial(has_ended, uid), SECONDS)
                if failed or found[uid][:-1] != expected[at]:
                    failed.append(AssertionError(f"another text of {at}"))
                    return

        engine_thread = threading.Thread(target=turn, daemon=True)
        clients = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(5)]
        for thread in (engine_thread, *clients):
            thread.start()
        for _ in range(20):
            engine.sleep().result(SECONDS)
        for thread in clients:
            thread.join(SECONDS)
        stop.set()
        engine.wake()
        engine_thread.join(SECONDS)
        assert not failed, failed
        assert len(found) == 40 and not engine_thread.is_alive()
        engine.parts.sched.check_integrity()


def test_llm(model: Path) -> None:
    with LLM(str(model), device="cpu", speculative_algorithm="none", max_total_tokens=1024) as llm:
        params = {"max_new_tokens": 8, "temperature": 0.0}
        first = llm.generate([1, 2, 3], params)[0].token_ids
        llm.sleep()
        assert llm.is_sleeping
        assert llm.generate([1, 2, 3], params)[0].token_ids == first and not llm.is_sleeping
        llm.sleep(level=1)
        llm.wake_up()
        assert not llm.is_sleeping
        with pytest.raises(RequestError, match="level must be 1"):
            llm.sleep(level=2)
        pieces = llm.stream([1, 2, 3], {"max_new_tokens": 64, "ignore_eos": True})
        next(pieces)
        with pytest.raises(RuntimeError, match="another answer"):
            llm.sleep()
        pieces.close()
        llm.sleep()
    assert not llm.is_sleeping


@pytest.mark.slow
def test_vectors_of_an_encoder(device: Any, tmp_path: Path) -> None:
    folder, texts = (
        write_encoder(tmp_path / "model", BERT, pooling=MEAN),
        ["gravity pulls", "a", "the capital of china"],
    )
    with LLM(str(folder), device=device, dtype="float32") as llm:
        first = llm.embed(texts)
        for _ in range(2):
            llm.sleep()
            assert llm.is_sleeping and np.array_equal(llm.embed(texts), first)


@pytest.mark.slow
def test_ranks_sleep_together(model: Path) -> None:
    prompt = tokens(100)
    with engine_of(model, "cpu", tp_size=2) as engine:
        first = ask(engine, prompt)
        nap(engine)
        assert ask(engine, prompt) == first
