from __future__ import annotations

import itertools
import os
import random
import signal
import stat
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from draftwing.errors import ConfigError
from draftwing.learn import segments
from draftwing.learn.history import HeadHistory
from draftwing.learn.traffic import MAX_COPIES, Exchange, TrafficLimits, TrafficStore, client_folder


def exchange(at: float, client: str = "alice", seed: int | None = None, length: int = 20, salt: str | None = None):
    draw = random.Random(at if seed is None else seed)
    prompt, answer = ([draw.randrange(50000) for _ in range(length)] for _ in range(2))
    return Exchange(at, client, salt, prompt, answer, 0.5)


def opened(folder: Path, limits: TrafficLimits | None = None, vocabulary: str = "") -> TrafficStore:
    return TrafficStore(folder, limits, vocabulary, clock=lambda: 300.0)


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_exchanges_are_read_in_order_of_time_by_whoever_opens_the_folder(tmp_path: Path) -> None:
    store = opened(tmp_path)
    given = [exchange(100.25 * i, client, salt=salt) for i, (client, salt) in enumerate(
        [("alice", None), ("bob", "x"), ("", None), ("alice", 'é"\n'), ("bob", None), ("../up", None), ("..", "y")]
    )]  # fmt: skip
    assert all(map(store.add, given))
    expected = [Exchange(**{**vars(one), "client": one.client or "anonymous"}) for one in given]
    assert list(opened(tmp_path).read()) == expected
    assert list(store.read(100.25, 300.75)) == expected[1:3]
    assert all(path.is_relative_to(tmp_path) for path in files(tmp_path))


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("mask", [0o022, 0o000, 0o077])
def test_no_other_user_can_read_a_file_or_look_into_a_folder(tmp_path: Path, there: bool, mask: int) -> None:
    """Whatever the process lets others do, and in a folder that was there before."""
    folder, head = tmp_path / "a" / "b", tmp_path / "head"
    before = os.umask(mask)
    try:
        head.mkdir()
        (head / "config.json").write_text("{}")
        if there:
            folder.mkdir(parents=True)
        store = opened(folder, vocabulary="v")
        assert store.add(exchange(1.0, "alice")) and store.add(exchange(2.0, ""))
        history = HeadHistory(folder / "heads")
        history.use(history.add(head, {"algorithm": "eagle3"}))
    finally:
        os.umask(before)
    made = [path for path in folder.rglob("*") if path.is_dir()]
    made += [] if there else [folder, folder.parent]
    assert {path.name for path in files(folder)} > {"lock", "traffic.json", "last", "current", "head.json"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files(folder)} == {0o600}


def test_each_client_has_a_folder_of_its_own() -> None:
    names = [
        "a",
        "A",
        "a/b",
        "a%2Fb",
        ".",
        "..",
        "a.partial",
        "é" * 300,
        "é" * 301,
        "x" * 300,
        "anonymous",
        "a b",
        "\0",
    ]
    folders = [client_folder(name) for name in names]
    assert len(set(folders)) == len(names)
    assert all("/" not in one and "\0" not in one and not one.startswith(".") and len(one) < 200 for one in folders)


def test_duplicates_short_answers_and_spam_are_left_out(tmp_path: Path) -> None:
    store = opened(tmp_path)
    one = exchange(1.0)
    assert store.add(one) and not store.add(Exchange(**{**vars(one), "at": 2.0, "temperature": 0.0}))
    assert store.add(Exchange(**{**vars(one), "salt": "x"})) and store.add(Exchange(**{**vars(one), "client": "bob"}))
    assert not store.add(Exchange(3.0, "alice", None, [1, 2], [3, 4, 5], 0.0))
    answer = [7, 7, 7, 7, 7]
    kept = [store.add(Exchange(4.0 + i, "spammer", None, [i], answer, 0.0)) for i in range(50)]
    assert sum(kept) == MAX_COPIES
    store.close()
    again = opened(tmp_path)  # knows them after a restart
    assert not again.add(one) and not again.add(Exchange(99.0, "spammer", None, [99], answer, 0.0))
    assert len(list(again.read())) == 3 + MAX_COPIES


def test_who_holds_most_makes_room(tmp_path: Path) -> None:
    limit = 64 * 1024
    store = opened(tmp_path, TrafficLimits(bytes=limit))
    alice = [exchange(float(i), "alice", length=200) for i in range(5)]
    assert all(map(store.add, alice))
    spam = [exchange(10.0 + i, "spammer", seed=1000 + i, length=200) for i in range(100)]
    for one in spam:
        store.add(one)
        assert sum(path.stat().st_size for path in tmp_path.rglob("*.jsonl")) <= limit
    found = list(store.read())
    assert [one for one in found if one.client == "alice"] == alice
    kept = [one for one in found if one.client == "spammer"]
    assert len(kept) > 10 and kept == spam[-len(kept) :]  # the oldest went
    assert not store.add(exchange(200.0, "bob", length=4000))  # more than a third of the folder: bob's share
    assert [one for one in store.read() if one.client == "alice"] == alice
    assert store.add(exchange(201.0, "spammer", seed=1000, length=200))  # is forgotten, so no duplicate


def test_shares_of_two_clients_become_equal(tmp_path: Path) -> None:
    store = opened(tmp_path, TrafficLimits(bytes=128 * 1024))
    for i in range(300):
        store.add(exchange(float(i), "first" if i < 200 else "second", length=100))
    held = Counter(one.client for one in store.read())
    assert 0.8 < held["first"] / held["second"] < 1.25


def test_old_exchanges_go(tmp_path: Path) -> None:
    now = [1000.0]
    store = TrafficStore(tmp_path, TrafficLimits(seconds=100.0), clock=lambda: now[0])
    given = [exchange(1000.0 + 10 * i, client) for i in range(10) for client in ("alice", "bob")]
    assert all(map(store.add, given))
    now[0] = 1145.0
    store.sweep()
    assert list(store.read()) == [one for one in given if one.at >= 1045.0]
    now[0] = 2000.0
    store.close()
    TrafficStore(tmp_path, TrafficLimits(seconds=100.0), clock=lambda: now[0]).sweep()
    assert not list(tmp_path.rglob("*.jsonl"))


def test_a_clock_that_was_wrong_keeps_nothing_for_longer(tmp_path: Path) -> None:
    now = [1e6]
    store = TrafficStore(tmp_path, TrafficLimits(seconds=1e5), clock=lambda: now[0])
    given = [exchange(at) for at in (1e6, 9e6, 1e6 + 10, 1e6 + 5, 1e6 + 20)]  # set ahead, and back
    for one in given[:2]:
        assert store.add(one)
    now[0] = 1e6 + 30
    for one in given[2:]:
        assert store.add(one)
    now[0] = 1e6 + 1e5 + 15
    store.sweep()
    assert [one.at for one in store.read()] == [1e6 + 20]


def test_nothing_of_a_client_is_left_after_its_deletion(tmp_path: Path) -> None:
    limits = TrafficLimits(bytes=200 * 1024)
    store = opened(tmp_path, limits)
    mine = [exchange(float(i), "alice", length=30, salt="salt-of-alice") for i in range(40)]
    others = [exchange(float(i) + 0.5, "bob", length=30) for i in range(40)]
    for pair in zip(mine, others, strict=True):
        assert all(map(store.add, pair))
    folder = tmp_path / "clients" / "alice"
    (folder / "7.jsonl.partial").write_bytes((folder / "0.jsonl").read_bytes())  # of a rewrite that was killed
    texts = [str(one.prompt)[1:-1].replace(" ", "") for one in mine] + ["salt-of-alice"]
    assert any(texts[0].encode() in path.read_bytes() for path in files(tmp_path))
    assert store.delete("alice") == 40
    assert list(store.read()) == others
    for path in files(tmp_path):
        content = path.read_bytes()
        assert not any(text.encode() in content for text in texts)
        assert b"alice" not in content and "alice" not in str(path)
    assert store.delete("alice") == 0
    assert store.add(mine[0])  # may begin anew


def test_only_one_process_writes_and_one_vocabulary_is_kept(tmp_path: Path) -> None:
    store = opened(tmp_path, vocabulary="one")
    store.add(exchange(1.0))
    with pytest.raises(ConfigError, match="another process"):
        opened(tmp_path, vocabulary="one").add(exchange(2.0))
    with pytest.raises(ConfigError, match="tokenizer"):
        opened(tmp_path, vocabulary="two")
    store.close()
    assert opened(tmp_path, vocabulary="one").add(exchange(2.0))
    assert opened(tmp_path).vocabulary == "one"


def test_what_is_torn_is_left_out_and_mended(tmp_path: Path) -> None:
    store = opened(tmp_path)
    given = [exchange(float(i)) for i in range(3)]
    assert all(map(store.add, given))
    store.close()
    path = tmp_path / "clients" / "alice" / "0.jsonl"
    whole = path.read_bytes()
    damages = [
        (whole[:-1], 2.0),
        (whole[:-20], 2.0),
        (whole.replace(b'"at":1', b"\0" * 6), 1.0),
        (whole + b"\0" * 9, None),
    ]
    for torn, lost in damages:
        path.write_bytes(torn)
        found = list(opened(tmp_path).read())
        assert found == [one for one in given if one.at != lost]
        again = opened(tmp_path)
        assert again.add(exchange(9.0))
        again.close()
        assert list(opened(tmp_path).read()) == [*found, exchange(9.0)]
        assert path.read_bytes().count(b"\n") == len(found) + 1 and b"\0" not in path.read_bytes()


WRITER = """
import sys
from pathlib import Path
from draftwing.learn.traffic import Exchange, TrafficLimits, TrafficStore
store = TrafficStore(Path(sys.argv[1]), TrafficLimits(bytes=40_000))
for i in range(10**9):
    store.add(Exchange(float(i), "ab"[i % 2], None, [i] * 20, [i] * 100, 0.0))
    print(i, flush=True)
"""


@pytest.mark.slow
def test_a_kill_loses_the_newest_exchange_at_most(tmp_path: Path) -> None:
    """The writer is killed while it writes, and makes room, all the time."""
    draw = random.Random(0)
    for turn in range(4):
        folder = tmp_path / str(turn)
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for _ in range(draw.randrange(50, 150)):
            process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
        printed = process.stdout.read().split()
        process.wait()
        found = list(opened(folder).read())
        assert all(one.answer == [int(one.at)] * 100 and one.prompt == [int(one.at)] * 20 for one in found)
        times = [int(one.at) for one in found]
        for i in range(2):
            of_one = [at for at in times if at % 2 == i]
            assert of_one == list(range(of_one[0], of_one[-1] + 2, 2))  # a stretch, without holes
        if len(printed) > 1:
            assert times[-1] >= int(printed[-2])
        assert opened(folder).add(exchange(1e9))


@pytest.mark.parametrize("name", ["training/mine", "clients/mine", "film.partial"])
def test_things_of_others_are_never_removed(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    with pytest.raises(ConfigError, match="empty folder"):
        opened(tmp_path).delete("alice")
    assert path.exists()


def test_a_full_disk_changes_nothing_of_what_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    store = TrafficStore(tmp_path, TrafficLimits(seconds=10.0), clock=lambda: now[0])
    given = [exchange(float(at)) for at in (0, 1, 8)]
    assert all(map(store.add, given))

    def full(partial: Path, path: Path) -> None:
        raise OSError("no room")

    now[0] = 15.0
    with monkeypatch.context() as patch:
        patch.setattr(segments, "replace_file", full)
        with pytest.raises(OSError, match="no room"):
            store.sweep()
    assert not store.add(given[0]), "is still there"
    store.sweep()
    assert list(store.read()) == given[2:] and store.add(exchange(15.0, seed=0))


def test_new_exchanges_are_counted(tmp_path: Path) -> None:
    store = opened(tmp_path, TrafficLimits(bytes=256 * 1024))
    for i in range(60):
        store.add(exchange(float(i), "ab"[i % 3 == 0], length=200))
    assert len(list(tmp_path.rglob("*.jsonl"))) > 4
    for since in (0.0, 0.5, 17.0, 59.0, 60.0):
        assert store.count(since) == len(list(store.read(since)))


def test_answers_of_adapters_are_apart_and_go_with_their_client(tmp_path: Path) -> None:
    """They are found by their adapter alone, in the same limits, and are duplicates of nobody else's."""
    store, given = opened(tmp_path), []
    for at, (client, adapter) in enumerate(itertools.product(("alice", "bob"), ("", "d1", "d2")), 1):
        given.append(replace(exchange(float(at), client, seed=1), adapter=adapter))
    assert all(map(store.add, given)) and not any(map(store.add, given))
    for reader in (store, opened(tmp_path)):
        for adapter in ("", "d1", "d2", "d3"):
            expected = [one for one in given if one.adapter == adapter]
            assert list(reader.read(adapter=adapter)) == expected
            assert reader.count(3.0, adapter) == sum(one.at >= 3.0 for one in expected)
    found = [(one.client, one.adapter, one.exchanges) for one in store.clients()]
    assert found == [(one.client, one.adapter, 1) for one in given]
    store.close()
    again = opened(tmp_path)
    assert again.delete("alice") == 3
    assert {path.parent.name for path in files(tmp_path / "clients")} == {"bob", "d1", "d2"}
    assert [one for adapter in ("", "d1", "d2") for one in again.read(adapter=adapter)] == given[3:]
    again.sweep()
    again.close()
    later = TrafficStore(tmp_path, TrafficLimits(seconds=50.0), clock=lambda: 400.0)
    later.sweep()
    assert not files(tmp_path / "clients")


def test_neither_an_adapter_nor_a_client_with_many_drives_out_others(tmp_path: Path) -> None:
    draw, size = random.Random(0), 60
    store = TrafficStore(tmp_path, TrafficLimits(bytes=size * 1024), clock=lambda: 9e9)
    assert store.add(replace(exchange(1.0, "alice"), adapter="small"))
    for at in range(10):
        assert store.add(exchange(float(2 + at), "bob"))
    for at in range(400):  # of alice's adapters, the first of them most
        adapter = "much" if draw.random() < 0.8 else f"d{draw.randrange(3)}"
        assert store.add(replace(exchange(float(20 + at), "alice"), adapter=adapter))
    held = Counter({(one.client, one.adapter): one.exchanges for one in store.clients()})
    assert held["bob", ""] == 10 and held["alice", "small"] == 1 and sum(held.values()) <= size
    assert held["alice", "much"] <= 1.5 * max(held["alice", f"d{i}"] for i in range(3))
