"""What lookups draft from, from one engine to the next."""

from __future__ import annotations

import os
import random
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save
from tiny_checkpoint import write_checkpoint

from draftwing.config.options import Options
from draftwing.engine import lookup_memory
from draftwing.engine.engine import Engine
from draftwing.engine.lookup_memory import BEFORE, LookupMemory
from draftwing.errors import ConfigError
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams


@pytest.fixture(autouse=True)
def same_salts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine has others, the same in each run: which places in NGRAM's table texts share depends on them."""
    monkeypatch.setattr("draftwing.engine.namespaces.secrets.token_bytes", random.Random(0).randbytes)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("models") / "tiny"))


def opened(model: str, file: Path, algorithm: str) -> Engine:
    return Engine(
        Options(
            model=model, device="cpu", num_threads=1, random_seed=3, max_total_tokens=4096,
            max_running_requests=4, speculative_algorithm=algorithm, speculative_fixed_shape=True,
            speculative_memory=str(file),
        )
    )  # fmt: skip


def ask(engine: Engine, seed: int = 1, **fields: Any) -> float:
    """Asks for a text that does not repeat itself: only a memory of it can draft it. Returns the acceptance length."""
    params = SamplingParams(
        max_new_tokens=100, temperature=1.5, sampling_seed=seed, ignore_eos=True, frequency_penalty=2.0
    )
    engine.submit(GenerationRequest("one", engine.tokenizer.encode("who asks?"), params, **fields))
    meta: dict[str, Any] = {}
    while not engine.idle():
        for output in engine.step():
            meta = output.meta or meta
    return float(1 + meta["spec_num_correct_drafts"] / meta["spec_verify_ct"])


@pytest.mark.slow
@pytest.mark.further(algorithm="NGRAM")
@pytest.mark.parametrize(("algorithm", "error"), [("SUFFIX", 0.0), ("NGRAM", 0.15)])
def test_a_restart_drafts_as_before(algorithm: str, error: float, model: str, tmp_path: Path) -> None:
    """Which of many places NGRAM's table keeps depends on where in the log they are."""
    file = tmp_path / "kept" / "memory"
    asked: list[dict[str, Any]] = [{}, {"client": "alice"}, {"client": "alice", "cache_salt": "x"}]
    secret = {"client": "bob", "learn": False}
    engine = opened(model, file, algorithm)
    fresh = [ask(engine, seed, **fields) for seed, fields in enumerate(asked)]
    ask(engine, 7, **secret)
    engine.close()

    engine = opened(model, file, algorithm)
    restarted = [ask(engine, seed, **fields) for seed, fields in enumerate(asked)]
    private = ask(engine, 7, **secret)
    engine.close()

    engine = opened(model, tmp_path / "never restarted", algorithm)
    for seed, fields in enumerate(asked):
        assert ask(engine, seed, **fields) == fresh[seed]
    assert ask(engine, 7, **secret) == private
    again = [ask(engine, seed, **fields) for seed, fields in enumerate(asked)]
    assert restarted == pytest.approx(again, rel=error) and min(again) > 2 + max(fresh)
    assert ask(engine, 1, client="eve") == fresh[1]
    engine.close()


@pytest.mark.slow
def test_a_client_is_forgotten(model: str, tmp_path: Path) -> None:
    file = tmp_path / "memory"
    engine = opened(model, file, "SUFFIX")
    first = ask(engine, client="alice")
    other = ask(engine, 2, client="bob")
    assert ask(engine, client="alice") > first + 2
    assert engine.forget_client("alice") == 2
    assert b"alice" not in file.read_bytes() and b"bob" in file.read_bytes()
    assert ask(engine, client="alice") == first  # the running engine has forgotten it, too
    assert engine.forget_client("alice") == 1
    engine.close()
    engine = opened(model, file, "SUFFIX")
    assert ask(engine, client="alice") == first
    assert ask(engine, 2, client="bob") > other + 2
    assert engine.flush_cache()
    engine.close()
    engine = opened(model, file, "SUFFIX")
    assert ask(engine, 2, client="bob") == other
    engine.close()


def answers(memory: LookupMemory) -> list[tuple[str, str | None, list[int], int]]:
    return [(one.client, one.salt, one.tokens.tolist(), one.first) for one in memory.answers()]


def test_what_comes_before_an_answer_is_cut(tmp_path: Path) -> None:
    memory = LookupMemory(tmp_path / "memory", "v")
    memory.add("alice", None, [*range(100), 7, 8, 9], 100)
    memory.add("", "é", [1, 2, 3], 1)
    memory.add("bob", None, [1, 2], 1)  # nothing follows a token of the answer
    memory.learnt = lambda: {"menu": [[3, 1]]}
    memory.close()
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}  # its lock, too
    again = LookupMemory(tmp_path / "memory", "v")
    assert again.before == {"menu": [[3, 1]]}
    assert answers(again) == [("alice", None, [*range(100 - BEFORE, 100), 7, 8, 9], BEFORE), ("", "é", [1, 2, 3], 1)]
    again.close()


def test_the_oldest_of_who_has_most_go(tmp_path: Path) -> None:
    memory = LookupMemory(tmp_path / "memory", "v", limit=1000)
    mine = [[i] * 50 for i in range(4)]
    for tokens in mine:
        memory.add("alice", None, tokens, 10)
    for i in range(100):
        memory.add("spammer", None, [1000 + i] * 50, 10)
    memory.add("alice", None, [9] * 1001, 990)  # fits by what is kept of its prompt
    found = answers(memory)
    assert [tokens for client, _, tokens, _ in found if client == "alice"] == [*mine, [9] * (11 + BEFORE)]
    kept = [tokens[0] for client, _, tokens, _ in found if client == "spammer"]
    assert kept == list(range(1100 - len(kept), 1100)) and len(kept) == (1000 - 4 * 50 - 11 - BEFORE) // 50
    memory.close()


def numbers(lengths: list[int], firsts: list[int]) -> dict[str, Any]:
    return {"lengths": np.asarray(lengths), "firsts": np.asarray(firsts)}


def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    memory = LookupMemory(path, "one")
    memory.add("alice", None, [1, 2, 3], 1)
    with pytest.raises(ConfigError, match="another process"):
        LookupMemory(path, "one")
    memory.close()
    with pytest.raises(ConfigError, match="tokenizer"):
        LookupMemory(path, "two")
    with pytest.raises(ConfigError, match="cannot be written"):
        LookupMemory(path / "below", "one")
    whole = path.read_bytes()
    for damaged in (b"", b"{}", whole[: len(whole) // 2], whole[:-4]):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match="cannot be read"):
            LookupMemory(path, "one")
    about = {"version": "1", "vocabulary": "one", "owners": '[["alice", null]]', "learnt": "{}"}
    parts: dict[str, Any] = {"owners": np.asarray([0])}
    for tokens, lengths, firsts in (
        ([1, 2, 3], [3], [2]),
        ([1, 2, 3], [2], [0]),
        ([1, -2, 3], [3], [1]),
        ([], [0], [0]),
    ):
        path.write_bytes(save(parts | {"tokens": np.asarray(tokens, np.int32), **numbers(lengths, firsts)}, about))
        with pytest.raises(ConfigError, match="do not fit"):
            LookupMemory(path, "one")
    parts |= {"tokens": np.asarray([1, 2, 3], np.int32), **numbers([3], [1])}
    strange: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({"tokens": np.asarray([1, 2, 3])}, {}),
        ({"tokens": np.ones((3, 2), np.int32)}, {}),
        ({}, {"owners": '[["alice", [1]]]'}),
        ({}, {"owners": '[[["alice"], null]]'}),
        ({}, {"version": "2"}),
    ]
    for other, said in strange:
        path.write_bytes(save(parts | other, about | said))
        with pytest.raises(ConfigError, match="cannot be read"):
            LookupMemory(path, "one")
    for name in about:
        path.write_bytes(save(parts, {word: text for word, text in about.items() if word != name}))
        with pytest.raises(ConfigError, match="cannot be read"):
            LookupMemory(path, "one")
    path.write_bytes(save(parts, about))
    LookupMemory(path, "one").close()
    path.write_bytes(whole)
    LookupMemory(path, "one").close()


def test_a_client_is_deleted_even_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = LookupMemory(tmp_path / "memory", "v")
    for client in ("alice", "bob"):
        memory.add(client, None, [1, 2, 3], 1)
    memory.write()

    def full(partial: Path, path: Path) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(lookup_memory, "replace_file", full)
        assert memory.delete("alice") == 1
    assert os.listdir(tmp_path) == ["memory.lock"]
    memory.close()
    assert [one.client for one in LookupMemory(tmp_path / "memory", "v").answers()] == ["bob"]


WRITER = """
import sys
from draftwing.engine.lookup_memory import LookupMemory
memory = LookupMemory(sys.argv[1], "v", limit=20_000)
for i in range(10**9):
    memory.add("alice", None, [i] * 100, 10)
    memory.write()
    print(i, flush=True)
"""


def test_a_kill_leaves_a_whole_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(40):
        process.stdout.readline()
    process.kill()
    process.wait()
    (tmp_path / "memory.partial").write_bytes(b"half of it")
    memory = LookupMemory(path, "v")
    assert [int(np.unique(one.tokens).item()) for one in memory.answers()][:40] == list(range(40))
    memory.delete("alice")
    memory.close()
    assert sorted(os.listdir(tmp_path)) == ["memory", "memory.lock"]
    assert len(path.read_bytes()) < 500
