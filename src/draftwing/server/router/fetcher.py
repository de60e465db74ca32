"""What `library` starts: a process that fetches a model into the caches, or deletes one there."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from draftwing.config.aliases import ALIASES
from draftwing.engine.process.spawn import Failed, joined
from draftwing.log import configure_logging

PULL, REMOVE, DONE = "pull", "remove", "done"
EVERY_SECONDS = 0.2  # that it tells how far a file is
Piece = tuple[str, int, int]  # of a file: its SHA-256, its bytes, and how many of them are there


def main() -> int:
    (connection,) = joined(sys.argv)
    command, name = connection.recv()
    configure_logging("warning", "text")
    lock, told = threading.Lock(), dict[str, float]()

    def tell(digest: str, total: int, completed: int) -> None:
        with lock:
            now = time.monotonic()
            if completed >= total or now - told.get(digest, 0) >= EVERY_SECONDS:
                told[digest] = now
                connection.send((digest, total, completed))

    try:
        if command == PULL:
            pull(name, tell)
        else:
            from draftwing.models.library import remove

            remove(name)
    except Exception as error:
        connection.send(Failed.of(error))
        return 2
    connection.send(DONE)
    return 0


def pull(name: str, tell: Callable[[str, int, int], None]) -> None:
    """Fetches an alias, with the head that drafts for it, or a hub id; a file or folder of this name is none. Raises
    CheckpointError."""
    from draftwing.models.hub import fetch_default_model, hub_id
    from draftwing.models.hub_files import fetch

    alias = ALIASES.get(name)
    if alias is None:
        found = hub_id(name)
        assert found is not None, "the front has looked"
        fetch(found.repo, None, gguf=found.gguf, tell=tell)
        return
    if alias.hub is None:
        fetch_default_model()
    for one in (alias.hub, next(iter(alias.heads.values()), None)):
        if one is not None:
            fetch(one.repo, one.commit, tell=tell)


if __name__ == "__main__":
    sys.exit(main())
