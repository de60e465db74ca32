"""Files of cached prefixes: what is read is what was written, whatever happens to the folder."""

from __future__ import annotations

import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from draftwing import files as files_module
from draftwing.errors import NotFound, RequestError
from draftwing.kv.prefix_index import BLOCK, Entry, block_digests, digest_of, owner_of
from draftwing.kv.prefix_store import VERSION, PrefixStore, delete_client

MODEL, OTHER = digest_of(b"a model"), digest_of(b"another")
ALICE, BOB = owner_of("alice"), owner_of("bob")


def chain(name: str, blocks: int, owner: bytes = ALICE) -> list[Entry]:
    """The blocks of a text."""
    digests = [digest_of(name.encode(), bytes([at])) for at in range(blocks)]
    parents = [digest_of(name.encode()), *digests]
    return [
        Entry(digest, parent, owner, BLOCK * (at + 1))
        for at, (digest, parent) in enumerate(zip(digests, parents, strict=False))
    ]


def content(entry: Entry, size: int = 500) -> bytes:
    return random.Random(entry.digest).randbytes(size)


def fill(store: PrefixStore, entries: list[Entry], size: int = 500) -> None:
    for entry in entries:
        assert store.write(entry, content(entry, size))


def there(store: PrefixStore, entries: list[Entry]) -> list[bool]:
    return [entry.digest in store for entry in entries]


def files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def test_the_next_store_reads_what_one_has_written(tmp_path: Path) -> None:
    text = chain("text", 3)
    fill(PrefixStore(tmp_path / "new", MODEL, 10**6), text)
    store = PrefixStore(tmp_path / "new", MODEL, 10**6)
    assert len(store) == 3 and [bytes(store.read(one.digest) or b"") for one in text] == list(map(content, text))
    assert store.size == sum(path.stat().st_size for path in files(tmp_path))
    other = PrefixStore(tmp_path / "new", OTHER, 10**6)
    assert len(other) == 0 and other.read(text[0].digest) is None and other.size == store.size


def test_nobody_else_may_look(tmp_path: Path) -> None:
    fill(PrefixStore(tmp_path / "new", MODEL, 10**6), chain("text", 1))
    for path in (tmp_path / "new").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def test_a_digest_is_of_all_tokens_before() -> None:
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 9, (3 * BLOCK + 5, 2))
    found = list(block_digests(b"space", keys))
    assert len(found) == 3 and list(block_digests(b"space", keys[: 2 * BLOCK])) == found[:2]
    assert not set(found) & set(block_digests(b"other", keys))
    for block in range(3):
        changed = keys.copy()
        changed[block * BLOCK + 7, 1] += 1
        same = [a == b for a, b in zip(found, block_digests(b"space", changed), strict=True)]
        assert same == [at < block for at in range(3)]


def mutations(rng: random.Random, data: bytes) -> bytes:
    """What a crash, a disk or a stranger makes of a file."""
    kind, at = rng.randrange(5), rng.randrange(len(data))
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
    if kind == 2:
        return data[:at] + bytes(len(data) - at) + (b"" if data[at:].strip(b"\0") else b"x")
    if kind == 3:
        return data + rng.randbytes(1 + rng.randrange(99))
    return rng.randbytes(rng.randrange(2 * len(data)))


def test_damaged_files_are_as_if_they_were_not_there(tmp_path: Path) -> None:
    rng, text = random.Random(1), chain("text", 40)
    for turn in range(20):
        fill(PrefixStore(tmp_path, MODEL, 10**6), text)
        by_digest = {path.name[:32]: path for path in files(tmp_path)}
        damaged = rng.sample(text, 20)
        for entry in damaged:
            path = by_digest[entry.digest.hex()]
            path.write_bytes(mutations(rng, path.read_bytes()))
        store = PrefixStore(tmp_path, MODEL, 10**6)
        for entry in text:
            found = store.read(entry.digest)
            assert found is None if entry in damaged else bytes(found or b"") == content(entry), turn
        assert len(store) == 20 and len(list(files(tmp_path))) == 20
        assert store.size == sum(path.stat().st_size for path in files(tmp_path))


def test_files_of_others(tmp_path: Path) -> None:
    mine, theirs = chain("text", 2), chain("other", 2)
    fill(PrefixStore(tmp_path, MODEL, 10**6), mine)
    fill(PrefixStore(tmp_path, OTHER, 10**6), theirs)
    by_digest = {path.name[:32]: path for path in files(tmp_path)}
    # of another text, and of another model, under a name of this one's
    first, second = (by_digest[one.digest.hex()] for one in mine)
    first.write_bytes(second.read_bytes())
    second.write_bytes(by_digest[theirs[1].digest.hex()].read_bytes())
    # names that are nobody's, or of other versions
    (first.parent / "notes.txt").write_text("mine")
    (tmp_path / "prefixes-v1-of-somebody").mkdir()
    older = tmp_path / f"prefixes-v{VERSION + 1}-{MODEL.hex()}"
    older.mkdir()
    (older / first.name).write_bytes(b"of a later version")
    (first.parent / f"1-{'0' * 16}.partial").write_bytes(b"of a process that was killed")
    store = PrefixStore(tmp_path, MODEL, 10**6)
    assert [store.read(one.digest) for one in mine] == [None, None]
    assert sorted(path.name for path in first.parent.iterdir()) == ["notes.txt"]
    assert not older.exists() and (tmp_path / "prefixes-v1-of-somebody").is_dir()
    assert len(PrefixStore(tmp_path, OTHER, 10**6)) == 2


def test_what_is_no_file_is_left_alone(tmp_path: Path) -> None:
    """Pipes, at which a reader waits for ever, folders and links, under names of files; and one that takes more than
    there is memory."""
    text = chain("text", 5)
    fill(PrefixStore(tmp_path, MODEL, 10**15), text)
    pipe, folder, link, huge, _ = (
        next(path for path in files(tmp_path) if path.name.startswith(one.digest.hex())) for one in text
    )
    for path in (pipe, folder, link):
        path.unlink()
    os.mkfifo(pipe)
    os.mkfifo(pipe.with_name(f"1-{'0' * 16}.partial"))
    folder.mkdir()
    link.symlink_to("/dev/zero")
    with huge.open("r+b") as file:
        file.truncate(10**13)
    store = PrefixStore(tmp_path, MODEL, 10**15)
    assert there(store, text) == [False] * 3 + [True] * 2
    assert [store.read(one.digest) is None for one in text] == [True] * 4 + [False]
    assert not huge.exists() and folder.is_dir() and link.is_symlink()


def test_files_may_go_at_any_time(tmp_path: Path) -> None:
    text = chain("text", 3)
    store = PrefixStore(tmp_path, MODEL, 10**6)
    fill(store, text)
    next(path for path in files(tmp_path) if path.name.startswith(text[1].digest.hex())).unlink()
    assert store.read(text[1].digest) is None and there(store, text) == [True, False, True]
    store.use([one.digest for one in text])
    store.refresh()
    assert there(store, text) == [True, False, True]


def test_the_folder_may_go_at_any_time(tmp_path: Path) -> None:
    text, folder = chain("text", 3), tmp_path / "kept"
    store = PrefixStore(folder, MODEL, 10**6)
    fill(store, text)
    shutil.rmtree(folder)
    assert store.read(text[0].digest) is None
    assert store.delete() == store.delete(ALICE) == len(store) == store.size == 0
    fill(store, text)
    assert len(PrefixStore(folder, MODEL, 10**6)) == 3


class Clock:
    """Sets when files were used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def used(self, text: list[Entry], ago: float) -> None:
        for path in files(self.folder):
            if path.name[:32] in {one.digest.hex() for one in text}:
                at = time.time() - ago
                os.utime(path, (at, at))


def test_what_saves_least_goes_first(tmp_path: Path) -> None:
    clock, size = Clock(tmp_path), 10_000
    old, short, long = chain("old", 6), chain("short", 2), chain("long", 6)
    first = PrefixStore(tmp_path, MODEL, 10**6)
    for text, ago in ((old, 50_000.0), (short, 2_000.0), (long, 2_000.0)):
        fill(first, text, size)
        clock.used(text, ago)
    each = first.size // 14
    store = PrefixStore(tmp_path, MODEL, first.size + each // 2)
    new = chain("new", 14)
    keep = {one.digest for one in new}
    left = []
    for entry in new:
        assert store.write(entry, content(entry, size), keep)
        assert store.size <= first.size + each
        left.append((sum(there(store, old)), sum(there(store, short)), sum(there(store, long))))
    assert all(there(store, new)) and left[-1] == (0, 0, 0)
    # the longest unused first, then the short one of two, and of each its end before its beginning
    assert all((b, c) == (2, 6) for a, b, c in left if a)
    assert all(c == 6 for _, b, c in left if b)
    assert not store.write(chain("huge", 1)[0], bytes(20 * size), keep), "nothing may go for it"
    assert all(there(store, new))


def test_the_end_of_a_text_goes_first(tmp_path: Path) -> None:
    text = chain("text", 10)
    fill(PrefixStore(tmp_path, MODEL, 10**6), text, 10_000)
    store = PrefixStore(tmp_path, MODEL, 65_000)
    assert there(store, text) == [True] * 6 + [False] * 4
    assert store.size <= 65_000 and sum(path.stat().st_size for path in files(tmp_path)) == store.size


def test_a_budget_is_of_all_models(tmp_path: Path) -> None:
    theirs = chain("theirs", 5)
    fill(PrefixStore(tmp_path, OTHER, 10**6), theirs, 10_000)
    Clock(tmp_path).used(theirs, 10_000)
    mine, store = chain("mine", 5), PrefixStore(tmp_path, MODEL, 60_000)
    for entry in mine:
        assert store.write(entry, content(entry, 10_000), [one.digest for one in mine])
    assert all(there(store, mine)) and sum(path.stat().st_size for path in files(tmp_path)) <= 60_000


def test_what_is_used_stays(tmp_path: Path) -> None:
    a, b = chain("a", 3), chain("b", 3)
    store = PrefixStore(tmp_path, MODEL, 10**6)
    for text in (a, b):
        fill(store, text, 10_000)
    Clock(tmp_path).used([*a, *b], 100_000)
    store = PrefixStore(tmp_path, MODEL, 10**6)
    store.use([one.digest for one in a])
    store = PrefixStore(tmp_path, MODEL, 35_000)
    assert all(there(store, a)) and not any(there(store, b))


def test_an_owner_is_deleted_of_all_models(tmp_path: Path) -> None:
    for identity in (MODEL, OTHER):
        store = PrefixStore(tmp_path, identity, 10**6)
        fill(store, [*chain("a", 2), *chain("b", 3, BOB)])
    assert store.delete(ALICE) == 4
    assert len(store) == len(PrefixStore(tmp_path, MODEL, 10**6)) == 3
    assert all(BOB.hex() in path.name for path in files(tmp_path))
    assert store.delete() == 3 and len(PrefixStore(tmp_path, MODEL, 10**6)) == 3


def save(store: PrefixStore, name: str, text: list[Entry], owner: bytes = ALICE) -> int:
    return store.save(owner, name, [one.digest for one in text], None)


def test_what_is_saved_by_name_stays(tmp_path: Path) -> None:
    """Also where another engine has saved it since this one looked."""
    named, others = chain("named", 4), [chain(str(at), 10) for at in range(3)]
    first, store = PrefixStore(tmp_path, MODEL, 100_000), PrefixStore(tmp_path, OTHER, 100_000)
    fill(first, named, 10_000)
    Clock(tmp_path).used(named, 10**6)
    store.refresh()
    assert save(first, "a", named) == first.size
    for text in others:
        for entry in text:
            store.write(entry, content(entry, 10_000), [one.digest for one in text])
        assert store.size <= 100_000
    first = PrefixStore(tmp_path, MODEL, 100_000)
    assert all(there(first, named)) and first.saved(ALICE, "a").blocks == tuple(one.digest for one in named)
    # a smaller budget is one for what is saved, too
    small = PrefixStore(tmp_path, MODEL, 25_000)
    assert small.size <= 25_000 and there(small, named) == [True, True, False, False]


def test_a_name_that_is_given_again_counts_once(tmp_path: Path) -> None:
    store, texts = PrefixStore(tmp_path, MODEL, 100_000), [chain(str(at), 4) for at in range(3)]
    for text in texts[:2]:
        fill(store, text, 10_000)
        save(store, "a", text)
    with pytest.raises(RequestError, match="half"):
        save(store, "b", texts[0])
    save(store, "a", texts[0])
    fill(store, texts[2], 10_000)
    assert store.unsave(ALICE, "a").blocks == tuple(one.digest for one in texts[0])
    save(store, "b", texts[2])
    with pytest.raises(RequestError, match="half"):
        save(store, "b", texts[1], BOB)


def test_names_go_with_what_they_list(tmp_path: Path) -> None:
    store, other = PrefixStore(tmp_path, MODEL, 10**6), PrefixStore(tmp_path, OTHER, 10**6)
    for one, owner, of in ((store, ALICE, "alice"), (store, BOB, "bob"), (other, ALICE, "other")):
        fill(one, chain(of, 2, owner))
        save(one, "name", chain(of, 2, owner), owner)
    assert other.saved(ALICE, "name").blocks[0] == chain("other", 2)[0].digest
    assert delete_client(tmp_path, "alice") == 4
    with pytest.raises(NotFound):
        store.saved(ALICE, "name")
    assert store.saved(BOB, "name").blocks
    store.delete()
    with pytest.raises(NotFound):
        store.saved(BOB, "name")
    assert not list(files(tmp_path))


WRITER = """
import random, sys
from itertools import count
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_prefix_store import MODEL, PrefixStore, chain, content
store = PrefixStore(Path(sys.argv[2]), MODEL, 4_000_000)
print("begun", flush=True)
for turn in count(int(sys.argv[3])):
    for entry in chain(str(turn), 20):
        store.write(entry, content(entry, 200_000))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kills", [10, pytest.param(100, marks=pytest.mark.exhaustive)])
def test_processes_that_are_killed_while_they_write(tmp_path: Path, kills: int) -> None:
    rng, numbers = random.Random(2), count(0, 100)
    for _ in range(kills):
        number = next(numbers)
        command = [sys.executable, "-c", WRITER, str(Path(__file__).parent), str(tmp_path), str(number)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None and writer.stdout.readline() == b"begun\n"
            time.sleep(rng.random() * 0.05)
            writer.send_signal(signal.SIGKILL)
        store = PrefixStore(tmp_path, MODEL, 4_000_000)
        assert not list(tmp_path.rglob("*.partial")), "what is half written goes with the next start"
        assert sum(path.stat().st_size for path in files(tmp_path)) == store.size <= 4_000_000
        for entry in chain(str(number), 20):
            found = store.read(entry.digest)
            assert found is None or bytes(found) == content(entry, 200_000)
    assert len(store)


def test_a_file_is_loaded_by_whoever_knows_it(tmp_path: Path) -> None:
    """Whole, or not at all, and nothing is removed for it."""
    text, store = chain("text", 4), PrefixStore(tmp_path, MODEL, 10**6)
    fill(store, text)
    known = [store.find(entry.digest, 500) for entry in text]
    assert store.find(text[0].digest, 499) is None and store.find(digest_of(b"another"), 500) is None
    paths = [next(tmp_path.rglob(f"{entry.digest.hex()}*")) for entry in text]
    data = paths[1].read_bytes()
    paths[1].write_bytes(data[:300] + b"?" + data[301:])
    paths[2].write_bytes(paths[2].read_bytes()[:-1])
    paths[3].unlink()
    for entry, stored, right in zip(text, known, (True, False, False, False), strict=True):
        into = bytearray(500)
        assert stored is not None and store.load(stored, memoryview(into)) is right
        assert not right or bytes(into) == content(entry)
    assert there(store, text) == [True] * 4


@pytest.mark.parametrize("locked", [False, True])
def test_a_file_that_is_taken_for_a_leftover_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locked: bool
) -> None:
    """Another engine looks at the folder when a file is there, and not yet locked."""
    store, text, opened, held = PrefixStore(tmp_path, MODEL, 10**6), chain("text", 2), files_module.open_private, []

    def seen(path: str, flags: int) -> int:
        number = opened(path, flags)
        if not held and path.endswith(".partial"):
            held.append(None)
            if locked:
                held.append(files_module.lock_file(Path(path)))
            else:
                PrefixStore(tmp_path, MODEL, 10**6)
        return number

    monkeypatch.setattr(files_module, "open_private", seen)
    fill(store, text)
    assert held and [bytes(store.read(entry.digest) or b"") for entry in text] == list(map(content, text))
    assert len(list(files(tmp_path))) == 2 + locked


def test_nothing_goes_for_what_has_no_room(tmp_path: Path) -> None:
    text, other, store = chain("text", 2), chain("other", 2), PrefixStore(tmp_path, MODEL, 3_000)
    fill(store, [*text, *other])
    for size in (3_000, 2_000):
        assert not store.write(chain("huge", 1)[0], bytes(size), [one.digest for one in text])
        assert all(there(store, [*text, *other]))
