"""A client's slot is saved under a name and restored: the same text, at once, whatever else the folder has to keep."""

from __future__ import annotations

import threading
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hybrid_models import reference, saved
from reference.learnable import write_target
from restarted import OF, TOKENS, Reply, ask, opened, tokens
from tiny_checkpoint import VOCAB, write_tokenizer

from draftwing import SamplingParams
from draftwing.errors import NotFound, RequestError
from draftwing.requests.request import GenerationRequest


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("models") / "llama", plain=OF)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid") / "lfm2"
    saved(folder, reference("lfm2", vocab_size=VOCAB, max_position_embeddings=1024))
    write_tokenizer(folder)
    return folder


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.kv"))


@pytest.mark.parametrize("kind", ["model", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_a_slot_comes_back_after_a_restart(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    path, prompts = request.getfixturevalue(kind), [tokens(300, seed) for seed in range(3)]
    engine = opened(path, tmp_path)
    first = [ask(engine, prompt, slot=slot) for slot, prompt in enumerate(prompts)]
    counts = [engine.act_on_slot("save", "", slot, f"talk {slot}.bin") for slot in (2, 0)]
    assert all(count % 64 == 0 and count >= 256 for count, _ in counts)
    assert sum(size for _, size in counts) == size_of(tmp_path), "and nothing of the other slot"
    engine.parts.executor.close()  # without what `close` writes

    engine = opened(path, tmp_path)
    assert engine.act_on_slot("restore", "", 7, "talk 2.bin")[0] == counts[0][0]
    again = ask(engine, prompts[2], slot=7)
    assert again.tokens == first[2].tokens and again.cached >= 256
    assert ask(engine, prompts[0]).cached >= 256, "what is saved is found without being restored, too"
    assert ask(engine, prompts[1]) == first[1]
    engine.close()


def test_what_is_saved_stays_where_others_go(model: Path, tmp_path: Path) -> None:
    engine = opened(model, tmp_path, prefix_cache_size=0.001)
    ask(engine, tokens(320))
    engine.act_on_slot("save", "", 0, "kept")
    for seed in range(1, 5):
        ask(engine, tokens(800, seed))
        engine.parts.sched.check_integrity()
    engine.close()
    assert 500_000 < size_of(tmp_path) <= 1_000_000, "the other texts do not fit"
    engine = opened(model, tmp_path)
    assert ask(engine, tokens(320)).cached >= 256
    assert engine.act_on_slot("erase", "", 0, "kept")[0] >= 256
    with pytest.raises(NotFound, match="kept"):
        engine.act_on_slot("restore", "", 0, "kept")
    engine.close()


def test_names_have_at_most_half_of_the_budget(model: Path, tmp_path: Path) -> None:
    one = opened(model, tmp_path / "sized")
    ask(one, tokens(480))
    one.close()
    each = size_of(tmp_path / "sized")
    engine = opened(model, tmp_path / "kept", prefix_cache_size=4.5 * each / 1e9)
    for seed in range(2):
        ask(engine, tokens(480, seed))
        engine.act_on_slot("save", "", 0, f"number {seed}")
    ask(engine, tokens(480, 2))
    with pytest.raises(RequestError, match="prefix-cache-size"):
        engine.act_on_slot("save", "", 0, "one more")
    engine.act_on_slot("erase", "", 0, "number 1")
    engine.act_on_slot("save", "", 0, "one more")
    engine.close()


def test_a_slot_is_the_last_text_that_may_be_kept(model: Path, tmp_path: Path) -> None:
    engine = opened(model, tmp_path)
    with pytest.raises(RequestError, match="empty"):
        engine.act_on_slot("save", "", 0, "none")
    ask(engine, tokens(300))
    ask(engine, tokens(200, 1))
    assert engine.act_on_slot("save", "", 0, "last") == (192, size_of(tmp_path))
    ask(engine, tokens(300, 2), learn=False)
    with pytest.raises(RequestError, match="empty"):
        engine.act_on_slot("save", "", 0, "secret")
    ask(engine, tokens(200, 3))
    assert engine.act_on_slot("erase", "", 0, "")[0] >= 200
    with pytest.raises(RequestError, match="empty"):
        engine.act_on_slot("save", "", 0, "erased")
    assert engine.act_on_slot("restore", "", 0, "last")[0] == 192
    assert engine.act_on_slot("save", "", 0, "copy")[0] == 192
    engine.close()


def test_clients_have_their_own_names_and_slots(model: Path, tmp_path: Path) -> None:
    engine = opened(model, tmp_path)
    for seed, client in enumerate(("alice", "bob")):
        ask(engine, tokens(200 + 100 * seed, seed), client=client)
        engine.act_on_slot("save", client, 0, "talk")
    found = [engine.act_on_slot("restore", client, 0, "talk")[0] for client in ("alice", "bob")]
    assert found == [192, 320 if (300 + TOKENS - 1) >= 320 else 256]
    with pytest.raises(NotFound):
        engine.act_on_slot("restore", "", 0, "talk")
    engine.forget_client("alice")
    with pytest.raises(NotFound):
        engine.act_on_slot("restore", "alice", 0, "talk")
    assert engine.act_on_slot("restore", "bob", 0, "talk")[0] == found[1]
    assert not any("alice" in str(path) for path in tmp_path.rglob("*"))
    assert engine.flush_cache()
    with pytest.raises(NotFound):
        engine.act_on_slot("restore", "bob", 0, "talk")
    engine.close()


NO_PATHS = ["", ".", "..", "../x", "/etc/passwd", "a/b", ".hidden", "a\0b", "x.partial", "x" * 129, "ä", "a\nb"]


def test_names_are_no_paths(model: Path, tmp_path: Path) -> None:
    engine = opened(model, tmp_path / "kept")
    ask(engine, tokens(100))
    for name, action in product(NO_PATHS, ("save", "restore")):
        with pytest.raises(RequestError, match="filename"):
            engine.act_on_slot(action, "", 0, name)
        assert not size_of(tmp_path), "a name is looked at before a text is written"
    engine.close()
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_files_that_are_damaged_or_of_other_models(model: Path, tmp_path: Path) -> None:
    engine = opened(model, tmp_path)
    ask(engine, tokens(200))
    for name in ("a", "b"):
        engine.act_on_slot("save", "", 0, name)
    (named,) = tmp_path.glob("slots-v1/*/a")
    for content in ("", "{", "[]", '{"blocks": [1]}', '{"identity": "00", "blocks": ["zz"], "state": null}'):
        named.write_text(content)
        with pytest.raises(RequestError, match="damaged"):
            engine.act_on_slot("restore", "", 0, "a")
    engine.close()
    other = opened(model, tmp_path, kv_cache_dtype="bfloat16")
    with pytest.raises(RequestError, match="another model"):
        other.act_on_slot("restore", "", 0, "b")
    other.close()
    for path in tmp_path.rglob("*.kv"):
        path.unlink()
    engine = opened(model, tmp_path)
    with pytest.raises(RequestError, match="nothing of it is left"):
        engine.act_on_slot("restore", "", 0, "b")
    engine.close()


def test_it_is_saved_while_others_run(model: Path, tmp_path: Path) -> None:
    engine = opened(model, tmp_path)
    alone = ask(engine, tokens(100, 1))
    ask(engine, tokens(500), slot=1)
    params = SamplingParams(max_new_tokens=TOKENS, temperature=0.8, sampling_seed=5, ignore_eos=True)
    engine.submit(GenerationRequest("one", tokens(100, 1), params))
    found: list[Any] = []
    saves = threading.Thread(target=lambda: found.append(engine.act_on_slot("save", "", 1, "talk")))
    text = [token for output in engine.step() for token in output.token_ids]
    saves.start()
    while not engine.idle():
        text += [token for output in engine.step() for token in output.token_ids]
    saves.join()
    assert text == alone.tokens and found[0][0] >= 448
    engine.close()


def test_without_a_folder_it_says_what_to_set(model: Path) -> None:
    engine = opened(model)
    assert isinstance(ask(engine, tokens(100)), Reply)
    for action in ("save", "restore", "erase"):
        with pytest.raises(RequestError, match="--prefix-cache-dir"):
            engine.act_on_slot(action, "", 0, "talk")
    engine.close()
