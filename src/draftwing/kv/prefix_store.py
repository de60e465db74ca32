"""A folder of cached prefixes: a file of each block, and of each snapshot of recurrent states (`kv.prefix_index`).

Below the folder each *identity* has a folder of its own: model files, formats, versions, all on which bits of a cache
depend. A file's name has all that the budget needs to know, so a start reads names alone. What a file holds is believed
by its checksum: a torn, foreign or older one is removed, as if it had not been there.

Several engines may have one folder: files appear whole, are never changed, and may go at any time.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import time
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

from draftwing.errors import RequestError
from draftwing.files import PARTIAL, lock_file, make_private
from draftwing.kv.named_prefixes import Named, NamedPrefixes
from draftwing.kv.prefix_index import DIGEST, OWNER, Entry, Key, PrefixIndex, Stored, digest_of, owner_of

VERSION: Final = 1  # of names and files
_MAGIC: Final = b"DWPREFIX"
_HEADER: Final = struct.Struct(f"<8sI{DIGEST}s{DIGEST}s{DIGEST}s{OWNER}sIQI")
_CHECK: Final = 16  # bytes of the header's own checksum
_START: Final = 128  # bytes before the content
_PIECE: Final = 1 << 21  # bytes that are checked while a cache has them; with less, threads wait for turns of Python
_NAME: Final = re.compile(r"([0-9a-f]{32})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{1,8})\.kv")
_FOLDER: Final = re.compile(r"prefixes-v(\d+)-[0-9a-f]{32}")
_NAMED: Final = 0.5  # of the limit: the most that clients may have saved by name, which stays


def delete_client(folder: Path, client: str) -> int:
    """Removes a client's files of all models and versions. Returns how many there were. Raises OSError."""
    owner, found = owner_of(client).hex(), 0
    for path in folder.glob("prefixes-v*/*.kv"):
        if (match := _NAME.fullmatch(path.name)) is not None and match[3] == owner:
            path.unlink(missing_ok=True)
            found += 1
    NamedPrefixes(folder).delete(owner_of(client))
    return found


class PrefixStore(PrefixIndex):
    """One thread at a time may call it. size: bytes of all files, of other identities, too."""

    def __init__(self, folder: Path, identity: bytes, limit: int) -> None:
        """identity: `DIGEST` bytes.  limit: bytes of all files together. Raises OSError where the folder cannot be
        made."""
        super().__init__(limit, _folder(identity))
        self._root, self._identity = folder, identity
        self._folder = folder / self._name
        self._named, self._stay = NamedPrefixes(folder), frozenset[Key]()
        self.refresh()
        self._make_room(0, ())

    def refresh(self) -> None:
        """Looks at what is there: other engines may write and remove files, too, and somebody the folder. Raises
        OSError where it cannot be made."""
        make_private(self._folder)
        self._files, self.size = {}, 0
        for folder in self._folders():
            with suppress(OSError), os.scandir(folder) as found:
                for file in found:
                    with suppress(OSError):
                        self._look(folder, file)
        self._look_at_names()

    def _look_at_names(self) -> None:
        self._stay = _files_of(self._named.every())

    def _folders(self) -> Iterator[Path]:
        """Yields folders of this version; removes those of others."""
        with os.scandir(self._root) as found:
            names = [one.name for one in found if one.is_dir(follow_symlinks=False)]
        for name in names:
            if (match := _FOLDER.fullmatch(name)) is None:
                continue
            if int(match[1]) == VERSION:
                yield self._root / name
            else:
                shutil.rmtree(self._root / name, ignore_errors=True)

    def _look(self, folder: Path, file: os.DirEntry[str]) -> None:
        if not file.is_file(follow_symlinks=False):  # whoever opens a pipe waits for ever
            return
        if file.name.endswith(PARTIAL):
            self._remove_partial(Path(file.path))
        elif (match := _NAME.fullmatch(file.name)) is not None:
            stat = file.stat(follow_symlinks=False)
            digest, parent, owner = (bytes.fromhex(part) for part in match.groups()[:3])
            self._add(Stored(folder.name, Entry(digest, parent, owner, int(match[4], 16)), stat.st_size, stat.st_mtime))

    @staticmethod
    def _remove_partial(path: Path) -> None:
        """Removes what a process left that was killed while it wrote: whoever writes has its lock."""
        with suppress(OSError), lock_file(path):
            path.unlink()

    # -- reading and writing ------------------------------------------------------------------------------------------

    def write(self, entry: Entry, data: bytes | memoryview, keep: Collection[bytes] = ()) -> bool:
        """Writes a file, or leaves it out where there is no room. keep: digests that may not go for it. Raises
        OSError."""
        size = _START + len(data)
        if not self._make_room(size, keep):
            return False
        partial, lock = self._partial()
        try:
            with lock, open(lock.fileno(), "wb", buffering=0, closefd=False) as file:
                for part in (_header(self._identity, entry, len(data), zlib.crc32(data)), memoryview(data).cast("B")):
                    while len(part):
                        part = part[file.write(part) :]
                partial.rename(self._path(entry))
        except OSError:
            with suppress(OSError):
                partial.unlink()
            raise
        self._add(Stored(self._name, entry, size, time.time()))
        return True

    def _partial(self) -> tuple[Path, IO[str]]:
        """Makes an empty file and locks it. Another one where somebody took it for a leftover in between."""
        while True:
            partial = self._folder / f"{os.getpid():x}-{os.urandom(8).hex()}{PARTIAL}"
            with suppress(BlockingIOError):
                lock = lock_file(partial)
                if os.fstat(lock.fileno()).st_nlink:
                    return partial, lock
                lock.close()

    def read(self, digest: bytes) -> memoryview | None:
        """Returns what was written; None, and removes the file, where it is not what it should be."""
        stored = self._files.get((self._name, digest))
        if stored is None:
            return None
        path, at = self._path(stored.entry), 0
        try:
            with path.open("rb", buffering=0) as file:
                start, size = file.read(_START), os.fstat(file.fileno()).st_size - _START
                whole = len(start) == _START and _HEADER.unpack_from(start)[-2] == size  # else it may be of any size
                data = memoryview(bytearray(size if whole else 0))  # nobody else's, so that it can be a tensor
                while (got := file.readinto(data[at:])) and (at := at + got) < len(data):
                    pass
        except OSError:
            self._drop(stored)
            return None
        if start != _header(self._identity, stored.entry, len(data), zlib.crc32(data)):
            self._remove(stored)
            return None
        return data

    def find(self, digest: bytes, size: int) -> Stored | None:
        """Returns a file that is there and has so many bytes of content, for `load`."""
        stored = self._files.get((self._name, digest))
        return stored if stored is not None and stored.size == _START + size else None

    def load(self, stored: Stored, into: memoryview) -> bool:
        """Fills `into` with a file's content; any thread may do so at any time. Returns whether it is what was
        written; what is not is left to `read`."""
        at = check = 0
        try:
            with self._path(stored.entry).open("rb", buffering=0) as file:
                start = file.read(_START)
                while at < len(into) and (got := file.readinto(into[at : at + _PIECE])):
                    check = zlib.crc32(into[at : at + got], check)
                    at += got
        except OSError:
            return False
        return at == len(into) and start == _header(self._identity, stored.entry, at, check)

    def use(self, digests: Sequence[bytes]) -> None:
        """Notes that files are of use now."""
        super().use(digests)
        for digest in digests:
            if (stored := self._files.get((self._name, digest))) is not None:
                with suppress(OSError):
                    os.utime(self._path(stored.entry), (stored.used, stored.used))

    def delete(self, owner: bytes | None = None) -> int:
        """Removes an owner's files of all identities; None: all files of this one. Returns how many there were. Raises
        OSError where one cannot be removed."""
        self.refresh()
        gone = [
            one for one in self._files.values()
            if (one.folder == self._name if owner is None else one.entry.owner == owner)
        ]  # fmt: skip
        if owner is None:
            self._named.delete_of(self._identity)
        else:
            self._named.delete(owner)
        for stored in gone:
            (self._root / stored.folder / _name(stored.entry)).unlink(missing_ok=True)
            self._drop(stored)
        self._look_at_names()
        return len(gone)

    # -- what is saved by name ----------------------------------------------------------------------------------------

    def save(self, owner: bytes, name: str, blocks: Sequence[bytes], state: bytes | None) -> int:
        """Has files stay, for an owner and under a name. blocks, state: digests. Returns their bytes. Raises
        RequestError for a name that cannot be, and where too much stays already, and OSError."""
        named = Named(self._identity, tuple(blocks), state)
        keys = _files_of([named])
        others = _files_of(self._named.every(but=(owner, name)))  # which may have saved meanwhile
        size = sum(stored.size for key, stored in self._files.items() if key in keys or key in others)
        if size > _NAMED * self._limit:
            raise RequestError(
                f"saved slots would take {size / 1e9:.2f} GB; expected at most half of --prefix-cache-size, "
                f"{_NAMED * self._limit / 1e9:.2f} GB: erase some by their filename, or give more",
                "filename",
            )
        self._named.save(owner, name, named)
        self._stay = keys | others
        return sum(stored.size for key, stored in self._files.items() if key in keys)

    def saved(self, owner: bytes, name: str) -> Named:
        """Returns what was saved under a name. Raises NotFound, and RequestError for what another model has saved."""
        named = self._named.read(owner, name)
        if named.identity != self._identity:
            raise RequestError(
                "filename: it was saved with another model, drafter or version, or with other options; its prompt has "
                "to be prefilled once more",
                "filename",
            )
        return named

    def unsave(self, owner: bytes, name: str) -> Named:
        """Removes a name, so that what it lists may go as all else. Returns what it was. Raises as `NamedPrefixes`."""
        named = self._named.read(owner, name)
        self._named.remove(owner, name)
        self._look_at_names()
        return named

    # -- the budget ---------------------------------------------------------------------------------------------------

    def _staying(self) -> frozenset[Key]:
        """Returns what is saved by name."""
        self._look_at_names()  # others may have saved meanwhile
        return self._stay

    def _remove(self, stored: Stored) -> None:
        with suppress(OSError):
            (self._root / stored.folder / _name(stored.entry)).unlink()
        self._drop(stored)

    def _path(self, entry: Entry) -> Path:
        return self._folder / _name(entry)


def _files_of(every: Iterable[Named]) -> frozenset[Key]:
    return frozenset((_folder(one.identity), digest) for one in every for digest in one.digests)


def _folder(identity: bytes) -> str:
    return f"prefixes-v{VERSION}-{identity.hex()}"


def _name(entry: Entry) -> str:
    return f"{entry.digest.hex()}-{entry.parent.hex()}-{entry.owner.hex()}-{entry.end:x}.kv"


def _header(identity: bytes, entry: Entry, size: int, check: int) -> bytes:
    """size, check: of the content, whose CRC-32 that is."""
    fields = _HEADER.pack(_MAGIC, VERSION, identity, entry.digest, entry.parent, entry.owner, entry.end, size, check)
    return (fields + digest_of(fields, size=_CHECK)).ljust(_START, b"\0")
