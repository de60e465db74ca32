"""Prefixes that clients have saved under a name: small files that list blocks of a `PrefixStore`.

Each client has a folder of its own below `slots-v1`, called by a digest of its name. What a file lists stays in the
store until the file goes, or somebody removes all that is kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from draftwing.errors import NotFound, RequestError
from draftwing.files import PARTIAL, load_json, make_private, write_json
from draftwing.requests.refusals import show

MOST_FILES: Final = 256  # of one client
MOST_NAME: Final = 128  # characters
_FOLDER: Final = "slots-v1"
_NAME: Final = re.compile(rf"[\w-][\w .-]{{0,{MOST_NAME - 1}}}", re.ASCII)
_DIGEST: Final = re.compile(r"[0-9a-f]{32}")


class Named(NamedTuple):
    """What a file says. identity: of the store's folder.  blocks: digests, in the order of the text.  state: digest of
    the recurrent layers' state at its end; None: there is none."""

    identity: bytes
    blocks: tuple[bytes, ...]
    state: bytes | None

    @property
    def digests(self) -> tuple[bytes, ...]:
        """Returns all files that it needs."""
        return self.blocks if self.state is None else (*self.blocks, self.state)


class NamedPrefixes:
    """folder: the store's own, for all models."""

    def __init__(self, folder: Path) -> None:
        self._root = folder / _FOLDER

    def every(self, but: tuple[bytes, str] | None = None) -> Iterator[Named]:
        """Yields what all files say, those of other models, too. but: an owner and a name that are left out. Raises
        RequestError as `save`, for that name."""
        left_out = None if but is None else self._path(*but)
        for path in self._root.glob("*/*"):
            with suppress(OSError, ValueError):
                if path != left_out:
                    yield _read(path)

    def save(self, owner: bytes, name: str, named: Named) -> None:
        """Writes a file, in place of one of this name. Raises RequestError where there are too many, and OSError."""
        path = self._path(owner, name)
        make_private(path.parent)
        if not path.exists() and sum(1 for _ in path.parent.iterdir()) >= MOST_FILES:
            raise RequestError(f"filename: {MOST_FILES} slots, the most there may be, are saved; erase one", "filename")
        content = {
            "identity": named.identity.hex(), "blocks": [one.hex() for one in named.blocks],
            "state": None if named.state is None else named.state.hex(),
        }  # fmt: skip
        write_json(path, content, None, private=True)

    def read(self, owner: bytes, name: str) -> Named:
        """Returns what a file says. Raises NotFound, and RequestError for one that is damaged."""
        try:
            return _read(self._path(owner, name))
        except OSError:
            raise NotFound(f"filename: nothing is saved as {show(name)}", "filename") from None
        except ValueError:
            raise RequestError(f"filename: {show(name)} is damaged; save the slot again", "filename") from None

    def remove(self, owner: bytes, name: str) -> None:
        """Removes a file. Raises NotFound, and OSError."""
        try:
            self._path(owner, name).unlink()
        except FileNotFoundError:
            raise NotFound(f"filename: nothing is saved as {show(name)}", "filename") from None

    def delete(self, owner: bytes) -> None:
        """Removes an owner's files. Raises OSError."""
        for path in (self._root / owner.hex()).glob("*"):
            path.unlink(missing_ok=True)

    def delete_of(self, identity: bytes) -> None:
        """Removes all files of an identity, and damaged ones. Raises OSError."""
        for path in self._root.glob("*/*"):
            try:
                gone = _read(path).identity == identity
            except FileNotFoundError:
                continue
            except ValueError:
                gone = True
            if gone:
                path.unlink(missing_ok=True)

    def _path(self, owner: bytes, name: str) -> Path:
        """Raises RequestError as `check_filename`."""
        check_filename(name)
        return self._root / owner.hex() / name


def check_filename(name: str) -> None:
    """Raises RequestError for what may be no name of a file here."""
    if not _NAME.fullmatch(name) or name.endswith(PARTIAL):
        raise RequestError(
            f"filename: expected a name of at most {MOST_NAME} letters, digits, '.', '_', '-' and blanks, which is "
            f"no path and begins with no dot; found {show(name)}",
            "filename",
        )


def _read(path: Path) -> Named:
    """Raises OSError, and ValueError for what is no such file."""
    found: Any = load_json(path)
    if not isinstance(found, dict) or not isinstance(found.get("blocks"), list):
        raise ValueError("it lists no blocks")
    state = found.get("state")
    digests = [_digest(one) for one in (found.get("identity"), *found["blocks"])]
    return Named(digests[0], tuple(digests[1:]), None if state is None else _digest(state))


def _digest(text: Any) -> bytes:
    if not isinstance(text, str) or not _DIGEST.fullmatch(text):
        raise ValueError("a digest has 32 hexadecimal digits")
    return bytes.fromhex(text)
