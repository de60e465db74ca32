"""`--speculative-memory FILE`: answers that lookups draft from, for the engine after this one.

What a lookup has of answers is a table of hashes, of which no part is one client's. So the answers are kept instead,
with a few tokens that came before them, by client and salt; the next engine has its lookup learn them again.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from draftwing.core import IntArray
from draftwing.errors import ConfigError
from draftwing.files import lock_file, make_private, replace_file

log = logging.getLogger("draftwing")
TOKENS = 1_000_000  # of all answers, as many as SUFFIX remembers by default: 4 MB, learnt again in half a second
BEFORE = 32  # tokens before an answer: the longest context that a lookup looks at
WRITE_SECONDS = 180.0  # between two times that it is written
_VERSION = "1"


class PastAnswer(NamedTuple):
    """tokens: int32, the end of a prompt and its answer.  first: the index of the answer's first token."""

    client: str
    salt: str | None
    tokens: IntArray
    first: int


class LookupMemory:
    """The answers of a file, and those that come. Any thread may call it.

    before: what a policy had learnt of their drafts (`ShapePolicy.learnt`).  learnt: gives it when the file is written.

    Where they are more than `TOKENS` tokens, the oldest of the client that has most go. Written every few minutes where
    anything is new, and at the end; what is found is whole, whenever the process is killed.
    """

    def __init__(self, path: str | Path, vocabulary: str, limit: int = TOKENS) -> None:
        """Reads the file where there is one. vocabulary: a hash of the tokenizer; empty: whichever the file is of.
        Raises ConfigError for a file of another one or of another kind, and where another process has it."""
        self._path, self._vocabulary, self._limit = Path(path).expanduser(), vocabulary, limit
        self._clients: dict[str, deque[PastAnswer]] = {}
        self._sizes: dict[str, int] = {}
        self._changing, self._writing = threading.Lock(), threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._new = False
        self.before: dict[str, Any] = {}
        self.learnt: Callable[[], dict[str, Any]] = lambda: self.before
        try:
            make_private(self._path.parent)
            self._lock = lock_file(self._path.with_name(f"{self._path.name}.lock"))
        except BlockingIOError:
            raise ConfigError(f"speculative_memory: another process has {self._path}; name another file") from None
        except OSError as error:
            raise ConfigError(f"speculative_memory: {self._path} cannot be written: {error.strerror}") from None
        try:
            for answer in self._read():
                self._add(answer)
        except BaseException:
            self._lock.close()
            raise

    def start(self) -> None:
        """Begins to write every few minutes."""
        self._thread = threading.Thread(target=self._write_often, name="draftwing-memory", daemon=True)
        self._thread.start()

    def answers(self) -> list[PastAnswer]:
        """Returns all answers, the oldest of each client first."""
        with self._changing:
            return [answer for past in self._clients.values() for answer in past]

    def add(self, client: str, salt: str | None, tokens: list[int], prompt: int) -> None:
        """Adds an answer. tokens: the prompt, so many, and the answer."""
        begin = max(prompt - BEFORE, 0)
        if len(tokens) - prompt < 2 or len(tokens) - begin > self._limit:  # one token follows nothing of an answer
            return
        with self._changing:
            self._add(PastAnswer(client, salt, np.asarray(tokens[begin:], np.int32), prompt - begin))
            self._new = True

    def delete(self, client: str) -> int:
        """Removes a client's answers, here and in the file, which goes where it cannot be written. Returns how many
        there were. Raises OSError where it cannot be removed either."""
        with self._changing:
            gone = len(self._clients.pop(client, ()))
            self._sizes.pop(client, None)
        try:
            self.write()
        except OSError:
            self._new = True
            for path in (self._partial, self._path):
                path.unlink(missing_ok=True)
        return gone

    def clear(self) -> None:
        """Removes all answers; the file follows as it does after new ones."""
        with self._changing:
            self._clients.clear()
            self._sizes.clear()
            self._new = True

    def write(self) -> None:
        """Writes the file. Raises OSError."""
        with self._writing:  # who adds meanwhile does not wait for the disk
            self._new, answers, partial = False, self.answers(), self._partial
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(self._packed(answers))
            replace_file(partial, self._path)

    def close(self) -> None:
        """Writes what is new, and lets another engine have the file."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self._write_new()
        self._lock.close()

    @property
    def _partial(self) -> Path:
        return self._path.with_name(f"{self._path.name}.partial")

    def _add(self, answer: PastAnswer) -> None:
        self._clients.setdefault(answer.client, deque()).append(answer)
        self._sizes[answer.client] = self._sizes.get(answer.client, 0) + len(answer.tokens)
        while sum(self._sizes.values()) > self._limit:
            most = max(self._sizes, key=lambda client: self._sizes[client])
            self._sizes[most] -= len(self._clients[most].popleft().tokens)

    def _write_often(self) -> None:
        while not self._ended.wait(WRITE_SECONDS):
            self._write_new()

    def _write_new(self) -> None:
        try:
            if self._new:
                self.write()
        except OSError as error:
            self._new = True
            log.warning("--speculative-memory: %s is not written: %s", self._path, error)

    def _packed(self, answers: list[PastAnswer]) -> bytes:
        every = dict.fromkeys((answer.client, answer.salt) for answer in answers)
        owners = {owner: number for number, owner in enumerate(every)}
        tensors = {
            "tokens": np.concatenate([np.empty(0, np.int32), *(answer.tokens for answer in answers)]),
            "lengths": np.asarray([len(answer.tokens) for answer in answers], np.int64),
            "firsts": np.asarray([answer.first for answer in answers], np.int64),
            "owners": np.asarray([owners[answer.client, answer.salt] for answer in answers], np.int64),
        }
        words = {"owners": json.dumps([*owners]), "learnt": json.dumps(self.learnt())}
        return save(tensors, {"version": _VERSION, "vocabulary": self._vocabulary, **words})

    def _read(self) -> list[PastAnswer]:
        self._partial.unlink(missing_ok=True)  # of a process that was killed
        if not self._path.exists():
            return []
        try:
            with safe_open(self._path, "np") as file:
                about = {"version": "none", **(file.metadata() or {})}
                if about["version"] != _VERSION:
                    raise ValueError(f"expected version {_VERSION}, found {about['version']}")
                tokens, lengths, firsts, numbers = map(file.get_tensor, ("tokens", "lengths", "firsts", "owners"))
            vocabulary, self.before = about["vocabulary"], dict(json.loads(about["learnt"]))
            owners = [
                (_text(client), None if salt is None else _text(salt)) for client, salt in json.loads(about["owners"])
            ]
            if {part.ndim for part in (tokens, lengths, firsts, numbers)} != {1} or tokens.dtype != np.int32:
                raise ValueError("its parts are of other shapes")
            if lengths.sum() != len(tokens) or (firsts < 0).any() or (lengths < firsts + 2).any() or (tokens < 0).any():
                raise ValueError("its parts do not fit together")
            parts = np.split(tokens, np.cumsum(lengths)[:-1]) if len(lengths) else []
            by_owner = [owners[number] for number in numbers]
            answers = [
                PastAnswer(client, salt, part, int(first))
                for (client, salt), part, first in zip(by_owner, parts, firsts, strict=True)
            ]
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, IndexError) as error:
            raise ConfigError(f"speculative_memory: {self._path} cannot be read ({error}): name another file, "
                              "or remove it if it is a damaged one of this option") from None  # fmt: skip
        self._vocabulary = self._vocabulary or vocabulary
        if vocabulary != self._vocabulary:
            raise ConfigError(f"speculative_memory: {self._path} is of another tokenizer; name another file")
        return answers


def _text(value: Any) -> str:
    """Raises TypeError for anything but a text."""
    if not isinstance(value, str):
        raise TypeError(f"expected a text, found {value!r}")
    return value


def delete_client(path: str | Path, client: str) -> int:
    """Removes a client's answers from a file that no engine has. client: the name of a key; empty: of requests without
    one. Returns how many there were. Raises ConfigError."""
    if not Path(path).expanduser().is_file():
        raise ConfigError(f"speculative_memory: {path} is no file")
    memory = LookupMemory(path, "")
    try:
        return memory.delete(client)
    finally:
        memory.close()
