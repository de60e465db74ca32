from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from draftwing.errors import ConfigError, DraftwingError
from draftwing.files import lock_file
from draftwing.learn import history as history_module
from draftwing.learn.history import HeadHistory


@pytest.fixture
def head(tmp_path: Path) -> Path:
    folder = tmp_path / "trained"
    (folder / "state").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_a_head_is_copied_with_what_is_known_of_it(tmp_path: Path, head: Path) -> None:
    history = HeadHistory(tmp_path / "heads")
    assert history.list() == [] and history.current() is None
    first = history.add(head, {"algorithm": "eagle3", "data": {"clients": {"alice": 3}}})
    (head / "model.safetensors").write_bytes(b"better")
    second = history.add(head, {"algorithm": "eagle3", "parent": first, "figures": {"accept_length": 2.5}})
    assert (first, second) == (1, 2)
    one, two = HeadHistory(tmp_path / "heads").list()
    assert (one.number, one.parent, one.data, one.figures) == (1, None, {"clients": {"alice": 3}}, {})
    assert (two.number, two.parent, two.algorithm, two.figures) == (2, 1, "eagle3", {"accept_length": 2.5})
    assert 0 < one.made <= two.made and one.sha256 != two.sha256
    assert (one.folder / "model.safetensors").read_bytes() == b"weights"
    assert sorted(path.name for path in two.folder.iterdir()) == ["config.json", "head.json", "model.safetensors"]


def test_one_is_served_until_another_is(tmp_path: Path, head: Path) -> None:
    history = HeadHistory(tmp_path / "heads")
    for _ in range(2):
        history.add(head, {})
    history.use(1)
    assert HeadHistory(tmp_path / "heads").current() == 1
    with pytest.raises(ConfigError, match="served"):
        history.remove(1)
    with pytest.raises(ConfigError, match="no head 3"):
        history.use(3)
    history.use(2)
    history.remove(1)
    assert [one.number for one in history.list()] == [2] and history.current() == 2
    history.use(None)
    assert history.current() is None
    history.remove(2)
    assert history.add(head, {}) == 3  # numbers are not given twice, for parents name them


def test_what_is_damaged_is_not_served(tmp_path: Path, head: Path) -> None:
    history = HeadHistory(tmp_path / "heads")
    history.add(head, {})
    history.use(1)
    (tmp_path / "heads" / "1" / "model.safetensors").write_bytes(b"w")
    with pytest.raises(ConfigError, match="damaged"):
        history.use(1)
    (tmp_path / "heads" / "1" / "head.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        history.list()
    assert history.mark_deleted("alice") == []
    history.use(None)
    history.remove(1)
    assert history.list() == []


def test_a_copy_that_was_stopped_is_no_head(tmp_path: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = HeadHistory(tmp_path / "heads")
    monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        history.add(head, {})
    monkeypatch.undo()
    assert history.list() == []
    number = history.add(head, {})
    assert [one.number for one in history.list()] == [number]
    assert sorted(path.name for path in (tmp_path / "heads").iterdir()) == sorted([str(number), "last", "lock"])


def test_processes_that_add_heads_at_once_take_turns(
    tmp_path: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied, go_on, copy = threading.Event(), threading.Event(), shutil.copyfile

    def slow(*args: Any) -> Any:
        copy(*args)
        copied.set()
        go_on.wait(30)

    monkeypatch.setattr(shutil, "copyfile", slow)
    with ThreadPoolExecutor() as pool:  # a lock is of one who opens the file, in whatever process
        first = pool.submit(HeadHistory(tmp_path / "heads").add, head, {"algorithm": "first"})
        assert copied.wait(30)
        second = pool.submit(HeadHistory(tmp_path / "heads").add, head, {"algorithm": "second"})
        wait([second], 0.2)
        go_on.set()
        assert (first.result(30), second.result(30)) == (1, 2)
    found = HeadHistory(tmp_path / "heads").list()
    assert [(one.number, one.algorithm) for one in found] == [(1, "first"), (2, "second")]
    HeadHistory(tmp_path / "heads").use(2)  # both are whole


def test_a_process_that_stands_still_in_a_change_holds_nobody_up(
    tmp_path: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "LOCK_SECONDS", 0.05)
    history = HeadHistory(tmp_path / "heads")
    history.add(head, {})
    with lock_file(history.folder / "lock"), pytest.raises(DraftwingError, match="another process is changing"):
        history.use(1)
    history.use(1)
    assert history.current() == 1


def test_a_head_takes_the_place_of_the_one_that_it_was_compared_with_alone(tmp_path: Path, head: Path) -> None:
    history = HeadHistory(tmp_path / "heads")
    for _ in range(3):
        history.add(head, {})
    assert history.use_instead(1, None) and not history.use_instead(2, None)
    assert history.current() == 1
    assert history.use_instead(3, 1) and history.current() == 3


def test_the_oldest_go_but_for_the_one_that_is_served_and_its_parent(tmp_path: Path, head: Path) -> None:
    history = HeadHistory(tmp_path / "heads")
    for parent in (None, 1, None, None, None):
        history.add(head, {"parent": parent})
    history.use(2)
    history.keep(3)
    assert [one.number for one in history.list()] == [1, 2, 5]
    history.keep(1)
    assert [one.number for one in history.list()] == [1, 2]


def test_heads_of_deleted_clients_are_marked(tmp_path: Path, head: Path) -> None:
    history = HeadHistory(tmp_path / "heads")
    for clients in ({"alice": 1}, {"alice": 1, "bob": 2}, {"bob": 1}):
        history.add(head, {"data": {"clients": clients}})
    assert history.mark_deleted("alice") == [1, 2]
    assert history.mark_deleted("bob") == [2, 3]
    assert [one.deleted for one in history.list()] == [("alice",), ("alice", "bob"), ("bob",)]
    history.use(2)  # its files are as they were


def test_each_adapter_has_a_head_of_its_own_that_serves(tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    (made / "adapter_config.json").write_text("{}")
    history = HeadHistory(tmp_path / "heads")
    whose = ["", "d1", "d2", "d1", "d1", ""]
    numbers = [history.add(made, {"adapter": one} if one else {}) for one in whose]
    assert numbers == [1, 2, 3, 4, 5, 6] and [one.adapter for one in history.list()] == whose
    assert [one.number for one in history.list("d1")] == [2, 4, 5]
    history.use(2, "d1")
    history.use(6)
    assert (history.current(), history.current("d1"), history.current("d2")) == (6, 2, None)
    assert [number for number in numbers if history.served(number)] == [2, 6]
    for number, adapter in ((3, "d1"), (1, "d1"), (2, "")):
        with pytest.raises(ConfigError, match=f"head {number} is of"):
            history.use(number, adapter)
    assert not history.use_instead(5, 4, "d1") and history.use_instead(5, 2, "d1")
    assert (history.current(), history.current("d1")) == (6, 5)
    with pytest.raises(ConfigError, match="is served"):
        history.remove(5)
    history.keep(1, "d1")
    assert [one.number for one in history.list()] == [1, 3, 5, 6], "of that adapter alone"
    history.use(None, "d1")
    assert (history.current(), history.current("d1")) == (6, None)
    for wrong in ("d4", "d", "../heads/current"):
        with pytest.raises(ConfigError, match="no head of an adapter"):
            history.use(None, wrong)
