"""Conversations go on after a restart: the same text, and no prefill of what the disk has."""

from __future__ import annotations

import json
import random
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_models import PAD, encoded, picture, write_model
from reference.block_heads import dflash_head
from reference.checkpoints import eagle3_head
from reference.learnable import write_target
from restarted import OF, TOKENS, Reply, ask, once, opened, run, tokens, write_hybrid
from tiny_adapters import write_adapter
from tiny_checkpoint import VOCAB

from draftwing import LLM, SamplingParams
from draftwing.errors import ConfigError, GenerationError
from draftwing.images.reader import Picture, Prompt, placed, read
from draftwing.kv.prefix_store import PrefixStore
from draftwing.kv.slot_bytes import SlotBytes
from draftwing.requests.request import GenerationRequest


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("models") / "llama", plain=OF)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda kind: write_hybrid(tmp_path_factory.mktemp("hybrid") / kind, kind))


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.exhaustive), 0.8])
def test_an_answer_goes_on_after_a_restart(model: Path, tmp_path: Path, temperature: float) -> None:
    fields, prompt = {"temperature": temperature}, tokens(500)
    first = once(model, None, prompt, fields)
    assert len(set(first.tokens)) > 8
    assert once(model, tmp_path, prompt, fields) == first
    again = once(model, tmp_path, prompt, fields)
    assert again.tokens == first.tokens and again.cached == 448
    turn = [*prompt, *first.tokens, *tokens(30, 1)]
    plain, found = once(model, None, turn, fields), once(model, tmp_path, turn, fields)
    assert found.tokens == plain.tokens and found.cached == 512 > plain.cached
    # the turn itself was written behind what was there
    assert once(model, tmp_path, [*turn, *plain.tokens, 1], fields).cached == 576


def test_what_is_in_memory_is_not_read(model: Path, tmp_path: Path) -> None:
    """A prompt of which memory has a beginning that is no whole number of blocks."""
    prompt = tokens(500)
    expected = once(model, tmp_path, prompt)
    engine = opened(model, tmp_path)
    assert ask(engine, [*prompt[:100], *tokens(30, 1)]).cached == 64
    found = ask(engine, prompt)
    assert found.tokens == expected.tokens and found.cached == 448
    assert engine.stats()["prefix_cache_restored_tokens"] == 64 + 348
    assert ask(engine, prompt).cached == 499 and engine.stats()["prefix_cache_restored_tokens"] == 64 + 348
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["qwen3.5", pytest.param("qwen3-next", marks=pytest.mark.exhaustive), "lfm2", "mamba2"]
)
def test_hybrids_begin_with_a_snapshot(hybrid: Callable[[str], Path], tmp_path: Path, kind: str) -> None:
    model, prompt = hybrid(kind), tokens(300)
    first = once(model, None, prompt)
    assert len(set(first.tokens)) > 8
    assert once(model, tmp_path, prompt) == first
    again = once(model, tmp_path, prompt)
    assert again.tokens == first.tokens and again.cached == 256
    turn = [*prompt[:270], *tokens(200, 1)]
    assert once(model, tmp_path, turn)[:2] == (once(model, None, turn).tokens, 256)


@pytest.mark.parametrize(
    "algorithm",
    ["EAGLE3", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("NGRAM", "DFLASH", "STANDALONE"))],
)
def test_drafts_change_no_text(model: Path, tmp_path: Path, algorithm: str) -> None:
    more: dict[str, Any] = {"speculative_algorithm": algorithm, "speculative_fixed_shape": True}
    if algorithm == "STANDALONE":
        more |= {"speculative_draft_model_path": str(model)}
    elif algorithm != "NGRAM":
        head = eagle3_head(OF, vocab_size=VOCAB) if algorithm == "EAGLE3" else dflash_head(OF)
        more |= {"speculative_draft_model_path": str(head.write(tmp_path / "head"))}
    prompt = tokens(500)
    first = once(model, None, prompt)
    turn = [*prompt, *first.tokens, *tokens(30, 1)]
    plain = once(model, None, turn)
    assert once(model, tmp_path / "kept", prompt, **more).tokens == first.tokens
    found = once(model, tmp_path / "kept", turn, **more)
    assert found.tokens == plain.tokens and found.cached >= 448
    # without drafts the cache has another form, and is not read
    assert once(model, tmp_path / "kept", turn) == plain
    assert once(model, tmp_path / "kept", turn).cached >= 448


@pytest.mark.parametrize("algorithm", ["STANDALONE", pytest.param("EAGLE3", marks=pytest.mark.exhaustive)])
def test_drafters_go_on_with_their_keys(model: Path, tmp_path: Path, algorithm: str) -> None:
    """As many drafts are accepted as where the prefix is in memory; of the target's own, all."""
    head = model if algorithm == "STANDALONE" else eagle3_head(OF, vocab_size=VOCAB).write(tmp_path / "head")
    more: dict[str, Any] = {
        "speculative_algorithm": algorithm, "speculative_fixed_shape": True, "speculative_num_steps": 3,
        "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4, "speculative_draft_model_path": str(head),
    }  # fmt: skip
    prompt = tokens(450)
    engine = opened(model, tmp_path / "kept", **more)
    ask(engine, prompt, 0.0)
    expected = ask(engine, prompt, 0.0)
    engine.close()
    found = once(model, tmp_path / "kept", prompt, {"temperature": 0.0}, **more)
    assert found.cached == 448 and found.tokens == expected.tokens and found.steps == expected.steps
    if algorithm == "STANDALONE":
        assert found.steps <= TOKENS / 4 + 2


def test_a_prediction_layer_s_keys_come_back(hybrid: Callable[[str], Path], tmp_path: Path) -> None:
    more: dict[str, Any] = {"speculative_algorithm": "NEXTN", "speculative_fixed_shape": True}
    model, prompt = hybrid("qwen3.5"), tokens(300)
    first = once(model, None, prompt)
    for cached in (0, 256):
        assert once(model, tmp_path, prompt, **more)[:2] == (first.tokens, cached)


@pytest.mark.slow
def test_other_models_and_formats_read_nothing(model: Path, tmp_path: Path) -> None:
    prompt = tokens(200)
    once(model, tmp_path / "kept", prompt)
    other = write_target(tmp_path / "other", 0.3, plain=OF)
    assert once(other, tmp_path / "kept", prompt) == once(other, None, prompt)
    others: list[dict[str, Any]] = [{"kv_cache_dtype": "bfloat16"}, {"context_length": 512}]
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():  # else it is computed in float32, as the one before
        others.append({"dtype": "bfloat16", "kv_cache_dtype": "auto"})
    for more in others:
        assert once(model, tmp_path / "kept", prompt, **more) == once(model, None, prompt, **more)
    moved = shutil.copytree(model, tmp_path / "moved")
    assert once(moved, tmp_path / "kept", prompt).cached == 192, "it is the same model"


def with_image(model: Path, before: int, seed: int = 0) -> Callable[..., Reply]:
    """Returns `once` of a prompt with an image from this position on."""
    engine = opened(model)
    processor = engine.info.images
    engine.close()
    assert processor is not None
    pieces = read(Picture(encoded(picture(40, 30, seed)), "x"), processor)
    ids, images = placed([*tokens(before), PAD, *tokens(150, 1)], Prompt("", [pieces]), processor)
    assert images[0].start == before

    def ask_once(folder: Path | None, of: Path = model) -> Reply:
        return once(of, folder, ids, {"images": images})

    return ask_once


@pytest.mark.parametrize("kind", ["gemma3", pytest.param("qwen3-vl", marks=pytest.mark.exhaustive)])
def test_images_come_back(tmp_path: Path, kind: str) -> None:
    """Also where a block ends within one, whose tokens see each other."""
    model, folder = write_model(tmp_path / kind, kind), tmp_path / "kept"
    shown = with_image(model, 58)
    first = shown(None)
    assert shown(folder) == first and shown(folder) == (first.tokens, 192, TOKENS - 1)
    for path in folder.rglob("*.kv"):
        if not path.stem.endswith("-40"):
            path.unlink()
    assert shown(folder) == (first.tokens, 64, TOKENS - 1)
    other = with_image(model, 58, 1)
    assert other(folder) == other(None) != first
    # the same files of weights, but pictures that are prepared otherwise
    moved = shutil.copytree(model, tmp_path / "moved")
    prepared = json.loads((moved / "preprocessor_config.json").read_text())
    (moved / "preprocessor_config.json").write_text(json.dumps({**prepared, "image_mean": [0.1, 0.9, 0.2]}))
    assert shown(folder, moved) == shown(None, moved) != first


def test_adapters_keep_their_own(model: Path, tmp_path: Path) -> None:
    names = [f"{name}={write_adapter(tmp_path / name, model, seed)}" for seed, name in enumerate(("tuned", "other"))]
    more: dict[str, Any] = {"lora_modules": tuple(names)}
    asked: list[dict[str, Any]] = [{}, {"adapters": (("tuned", 1.0),)}, {"adapters": (("tuned", 0.5),)}]
    asked.append({"adapters": (("other", 1.0),)})
    first = [once(model, None, tokens(200), fields, **more) for fields in asked]
    assert len({tuple(reply.tokens) for reply in first}) == 4
    for cached in (0, 192):
        for fields, reply in zip(asked, first, strict=True):
            assert once(model, tmp_path / "kept", tokens(200), fields, **more)[:2] == (reply.tokens, cached)


@pytest.mark.slow
def test_clients_and_salts_stay_apart(model: Path, tmp_path: Path) -> None:
    prompt = tokens(200)
    names: list[dict[str, Any]] = [
        {}, {"client": "alice"}, {"client": "bob"}, {"cache_salt": "alice"}, {"client": "alice", "cache_salt": "x"},
        {"client": "alice", "cache_salt": ""},
    ]  # fmt: skip
    for fields in names:
        assert once(model, tmp_path, prompt, fields).cached == 0
    for fields in names:
        assert once(model, tmp_path, prompt, fields).cached == 192
    assert not any(b"alice" in path.read_bytes() or "alice" in path.name for path in tmp_path.rglob("*.kv"))


def test_what_must_not_be_kept_is_in_no_file(model: Path, tmp_path: Path) -> None:
    kept = tokens(100)
    engine = opened(model, tmp_path)
    ask(engine, kept)
    ask(engine, [*kept, *tokens(300, 1)], learn=False)
    assert ask(engine, [*kept, *tokens(300, 1)], learn=False).cached > 300, "while it runs it is cached as any other"
    engine.close()
    assert len(list(tmp_path.rglob("*.kv"))) == (100 + TOKENS - 1) // 64
    assert once(model, tmp_path, [*kept, *tokens(300, 1)]).cached == 64


@pytest.mark.slow
def test_a_client_is_forgotten(model: Path, tmp_path: Path) -> None:
    prompt = tokens(200)
    for client in ("alice", "bob"):
        once(model, tmp_path, prompt, {"client": client})
    engine = opened(model, tmp_path)
    ask(engine, tokens(200, 1), client="alice")  # waits to be written
    engine.forget_client("alice")
    engine.close()
    assert [once(model, tmp_path, prompt, {"client": one}).cached for one in ("alice", "bob")] == [0, 192]
    assert once(model, tmp_path, tokens(200, 1), {"client": "alice"}).cached == 0


def test_a_flush_empties_it(model: Path, tmp_path: Path) -> None:
    once(model, tmp_path, tokens(200))
    engine = opened(model, tmp_path)
    assert engine.flush_cache()
    engine.close()
    assert not list(tmp_path.rglob("*.kv"))


@pytest.mark.slow
def test_damaged_files_change_no_text(model: Path, hybrid: Callable[[str], Path], tmp_path: Path) -> None:
    rng = random.Random(0)
    for one in (model, hybrid("lfm2")):
        prompt, folder = tokens(500), tmp_path / one.name
        expected = once(one, folder, prompt).tokens
        for _ in range(3):
            files = sorted(folder.rglob("*.kv"))
            for path in rng.sample(files, 2):
                data, at = path.read_bytes(), rng.randrange(path.stat().st_size)
                path.write_bytes(data[:at] if rng.random() < 0.5 else data[:at] + b"?" + data[at + 1 :])
            assert once(one, folder, prompt).tokens == expected
        # what was damaged is written again when it has been read: one file a start
        assert any(once(one, folder, prompt)[:2] == (expected, 448) for _ in range(12))


@pytest.mark.slow
def test_a_small_pool_is_not_overfilled(model: Path, tmp_path: Path) -> None:
    """Prompts come back while others run, in a pool that has no room for all of them."""
    prompts = [tokens(300, seed) for seed in range(6)]
    expected = [once(model, tmp_path, prompt).tokens for prompt in prompts]
    engine = opened(model, tmp_path, max_total_tokens=800)
    assert [*run(engine, dict(enumerate(prompts))).values()] == expected
    assert engine.stats()["prefix_cache_restored_tokens"] >= 256
    engine.close()


def test_what_may_spoil_logits_is_removed(model: Path, tmp_path: Path) -> None:
    prompt = tokens(300)
    once(model, tmp_path, prompt)
    engine = opened(model, tmp_path)
    engine.parts.executor.model.norm.weight.data.fill_(torch.nan)
    engine.submit(GenerationRequest("one", prompt[:40], SamplingParams(max_new_tokens=4)))
    while not engine.idle():
        engine.step()
    engine.close()
    assert not list(tmp_path.rglob("*.kv"))
    assert once(model, tmp_path, prompt) == once(model, None, prompt)


def test_it_is_written_while_nothing_runs(model: Path, tmp_path: Path) -> None:
    engine, blocks = opened(model, tmp_path), (300 + TOKENS - 1) // 64
    engine.measure_read_rate()  # else that is done first
    ask(engine, tokens(300))
    assert not list(tmp_path.rglob("*.kv")), "no step waits for the disk"
    waits = threading.Thread(target=engine.step, args=(True,))
    waits.start()
    until = time.monotonic() + 60
    while len(list(tmp_path.rglob("*.kv"))) < blocks and time.monotonic() < until:
        time.sleep(0.01)
    engine.wake()
    waits.join()
    assert len(list(tmp_path.rglob("*.kv"))) == blocks
    assert once(model, tmp_path, tokens(300)).cached == 256, "while the first one runs"
    engine.close()


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Has the system end writes of this process beyond so many bytes, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.further(size=[0, 5000])
@pytest.mark.parametrize("size", [0, 100, 5000])
def test_a_full_disk_is_said_and_nothing_fails(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, size: int
) -> None:
    engine = opened(model, tmp_path)
    first = ask(engine, tokens(300))
    with files_of_at_most(size):
        engine.close()
    assert "File too large" in caplog.text and not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert once(model, tmp_path, tokens(300)) == first


def fails(with_error: BaseException) -> Callable[..., Any]:
    def fail(*args: Any) -> Any:
        raise with_error

    return fail


OF_TORCH = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9000000000000000 bytes."


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("no room"), RuntimeError(OF_TORCH)])
def test_without_memory_nothing_is_kept_and_nothing_fails(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    prompt = tokens(300)
    engine = opened(model, tmp_path)
    first = ask(engine, prompt)
    with monkeypatch.context() as patch:
        patch.setattr(SlotBytes, "read", fails(error))
        engine.close()
    assert not list(tmp_path.rglob("*.kv"))
    once(model, tmp_path, prompt)
    engine = opened(model, tmp_path)
    for method in (SlotBytes.write, PrefixStore.read):
        with monkeypatch.context() as patch:
            patch.setattr(SlotBytes if method is SlotBytes.write else PrefixStore, method.__name__, fails(error))
            assert ask(engine, prompt).tokens == first.tokens
        engine.parts.sched.flush_cache()
    assert ask(engine, prompt) == (first.tokens, 256, TOKENS - 1)
    engine.close()


def test_what_cannot_be_removed_is_said(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened(model, tmp_path)
    monkeypatch.setattr(PrefixStore, "delete", fails(PermissionError(13, "Permission denied")))
    for ask_for, what in ((engine.flush_cache, "on the disk"), (lambda: engine.forget_client("alice"), "for lookups")):
        with pytest.raises(GenerationError, match=f"what is kept {what} could not be removed: .*Permission denied"):
            ask_for()
    engine.close()


def test_an_engine_that_cannot_write_lets_go_of_the_model(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = opened(model, tmp_path)
    ask(engine, tokens(300))
    closed, executor = list[int](), engine.parts.executor
    monkeypatch.setattr(executor.graphs, "clear", lambda: closed.append(1))
    monkeypatch.setattr(SlotBytes, "read", fails(RuntimeError("the device is gone")))
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.close()
    assert closed


def test_the_folder_may_become_anything_while_it_serves(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, prompt = tmp_path / "kept", tokens(300)
    expected = once(model, folder, prompt).tokens
    engine = opened(model, folder)
    shutil.rmtree(folder)
    folder.write_text("a file")
    assert ask(engine, prompt).tokens == expected
    engine.close()
    assert "is not written" in caplog.text and folder.read_text() == "a file"
    folder.unlink()
    engine = opened(model, folder)
    shutil.rmtree(folder)
    assert ask(engine, prompt).tokens == expected
    engine.close()
    assert once(model, folder, prompt).cached == 256


def test_two_engines_have_one_folder(model: Path, tmp_path: Path) -> None:
    """Both read, write and remove, in a budget that has no room for all."""
    prompts = [tokens(750, seed) for seed in range(4)]
    expected = [once(model, None, prompt).tokens for prompt in prompts]
    rng, found = random.Random(4), 0
    engines = [opened(model, tmp_path, prefix_cache_size=0.001) for _ in range(2)]
    for _ in range(14):
        engine, at = rng.choice(engines), rng.randrange(4)
        engine.parts.sched.flush_cache()  # of what is in memory alone
        reply = ask(engine, prompts[at])
        found += reply.cached
        assert reply.tokens == expected[at]
        saved = engine._saved
        assert saved is not None
        saved.write_all()
        size = sum(path.stat().st_size for path in tmp_path.rglob("*.kv"))
        assert 300_000 < size < 1_500_000, "an engine looks at what others do now and then"
    for engine in engines:
        engine.close()
    assert 1000 < found < 12 * 704


@pytest.mark.parametrize("kind", ["llama", pytest.param("lfm2", marks=pytest.mark.exhaustive)])
def test_others_go_on_while_a_conversation_is_read(
    model: Path, hybrid: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A slow disk: an answer that runs gets a token for each file or two."""
    of = model if kind == "llama" else hybrid(kind)
    prompt, other, reads, seen = tokens(600), tokens(20, 1), [0], list[tuple[str, int]]()
    expected = once(of, tmp_path, prompt, {"temperature": 0.0}).tokens

    def wants(uid: str, ids: list[int], count: int) -> GenerationRequest:
        return GenerationRequest(uid, ids, SamplingParams(max_new_tokens=count, temperature=0.0, ignore_eos=True))

    def run(engine: Any, asked: list[GenerationRequest]) -> dict[str, list[int]]:
        texts = dict[str, list[int]]()
        while not engine.idle() or asked:
            for output in engine.step():
                texts.setdefault(output.uid, []).extend(output.token_ids)
                seen.append((output.uid, reads[0]))
            if asked and len(texts.get("other", ())) > 20:
                engine.submit(asked.pop())
            engine.parts.sched.kv.check_integrity()
        return texts

    engine = opened(of, chunked_prefill_size=64)
    engine.submit(wants("other", other, 200))
    alone = run(engine, [])["other"]
    engine.close()

    real = PrefixStore.read

    def slow(store: PrefixStore, digest: bytes) -> Any:
        reads[0] += 1
        time.sleep(0.1)
        return real(store, digest)

    monkeypatch.setattr(PrefixStore, "read", slow)
    engine = opened(of, tmp_path)
    engine.submit(wants("other", other, 200))
    seen.clear()
    texts = run(
        engine,
        [wants("one", prompt, TOKENS)],
    )
    assert texts["other"] == alone and texts["one"] == expected
    gaps = np.diff([at for uid, at in seen if uid == "other"])
    assert reads[0] >= 9 and max(gaps) <= 2 + (kind != "llama"), "with the state's own file"
    first = next(at for at, (uid, _) in enumerate(seen) if uid == "one")
    assert seen[first][1] == reads[0], "it begins when all is there"
    engine.close()


def test_a_request_that_ends_while_it_is_read(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = tokens(600)
    expected = once(model, tmp_path, prompt)
    engine, real = opened(model, tmp_path), PrefixStore.read

    def ends(store: PrefixStore, digest: bytes) -> Any:
        time.sleep(0.1)
        engine.abort("gone")
        return real(store, digest)

    with monkeypatch.context() as patch:
        patch.setattr(PrefixStore, "read", ends)
        engine.submit(GenerationRequest("gone", prompt, SamplingParams(max_new_tokens=TOKENS)))
        reasons = []
        while not engine.idle():
            reasons += [output.finish_reason for output in engine.step()]
    assert [reason and reason["type"] for reason in reasons] == ["abort"]
    assert 0 < engine.parts.sched.kv.radix.size < 576, "what was read is cached"
    found = ask(engine, prompt)
    assert found.tokens == expected.tokens and found.cached == 576
    engine.close()


def test_it_is_refused_where_it_cannot_work(model: Path, tmp_path: Path) -> None:
    for more in ({"disable_radix_cache": True}, {"tp_size": 2}):
        with pytest.raises(ConfigError, match="prefix_cache_dir"):
            opened(model, tmp_path, **more)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"prefix_cache_dir.*cannot be written"):
        opened(model, tmp_path / "file")


def test_llm_has_it(model: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_threads": 1, "max_total_tokens": 1024}
    params = {"temperature": 0.0, "max_new_tokens": 20}
    for cached in (0, 192):
        with LLM(str(model), **options, prefix_cache_dir=str(tmp_path), prefix_cache_size=0.01) as llm:
            (answer,) = llm.generate([tokens(250)], params)
            assert answer.meta_info["cached_tokens"] == cached
