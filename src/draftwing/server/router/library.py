"""Fetches models into the caches and deletes what is stored, for Ollama's /api/pull and /api/delete.

What fetches or looks through a cache is a process of its own (`fetcher`): it imports what a front does without, and
ends when nobody waits for it any more. What was downloaded until then is kept, and the next pull goes on with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from draftwing.config.aliases import ALIASES
from draftwing.engine.process.link import EngineDead
from draftwing.engine.process.spawn import Failed, how_it_ended, start_module
from draftwing.errors import RequestError
from draftwing.server.router.fetcher import DONE, PULL, REMOVE, Piece
from draftwing.server.router.memory import model_files
from draftwing.server.router.model import Model
from draftwing.server.router.models import Models

FETCHER = "draftwing.server.router.fetcher"


class Library:
    """Belongs to the running event loop."""

    def __init__(self, models: Models, folder: Path | None, cache: bool) -> None:
        """folder, cache: of the models that may be deleted; only into caches that are served something is fetched."""
        self._models, self._folder, self._cache = models, folder, cache
        self._turn = asyncio.Lock()  # of one download
        self._pulling: str | None = None  # the repository that it is of

    def check(self, name: str) -> str:
        """Returns the alias or hub id that a name means. Raises RequestError for what cannot be fetched."""
        from draftwing.models.hub import hub_id

        if not self._cache:
            raise RequestError(
                "models are fetched into the caches, which this server does not serve: start it with --models-cache",
                "model",
            )
        meant = name.removesuffix(":latest")
        found = hub_id(meant)
        if meant not in ALIASES and (found is None or ".." in meant):
            raise RequestError(
                f"model must be an alias, or a hub id such as org/name or org/name:Q4_K_M; found {name[:200]!r}",
                "model",
            )
        return meant

    async def pull(self, name: str) -> AsyncIterator[dict[str, Any]]:
        """Fetches what `check` has returned; yields Ollama's statuses. Closed early it stops the download. Raises
        DraftwingError."""
        yield {"status": "pulling manifest"}
        async with self._turn:
            self._pulling = _repository(name)
            try:
                async with aclosing(_messages(PULL, name)) as messages:
                    async for piece in messages:
                        yield _status(piece)
            finally:
                self._pulling = None
        self._models.look()
        yield {"status": "success"}

    async def delete(self, model: Model) -> None:
        """Deletes the files of a model that nobody has listed, after it has answered what it was asked. Raises
        RequestError for one whose files are not the server's to delete, and DraftwingError where it does not work."""
        name = model.served.name
        if self._models.is_listed(model):
            raise RequestError(
                f"the model {name!r} is in the server's list, not in its folder or caches: delete it yourself", "model"
            )
        place = Path(model.served.model)
        if self._folder is not None and self._folder in place.parents:
            await self._models.remove(
                model, asyncio.to_thread(delete_files, self._folder, place, model_files(model.served))
            )
            return
        if self._pulling is not None and self._pulling == _repository(name):
            raise RequestError(f"the model {name!r} is being fetched: end that before", "model")
        await self._models.remove(model, _whole(REMOVE, name))


def delete_files(folder: Path, place: Path, files: list[Path]) -> None:
    """Deletes a model of a folder: `place`, a folder or a `.gguf` file with its parts, `files`. Of links these alone.
    Raises RequestError for what is elsewhere in truth."""
    if place.parent != folder and (place.parent.parent != folder or place.parent.is_symlink()):
        raise RequestError(f"{place} is in truth outside of {folder}: delete it yourself", "model")
    try:
        if place.is_symlink() or not place.is_dir():
            for file in files if place.suffix == ".gguf" and not place.is_symlink() else [place]:
                file.unlink()
            if place.parent != folder:
                with contextlib.suppress(OSError):  # there is more in it
                    place.parent.rmdir()
            return
        gone = folder / f".deleted-{secrets.token_hex(8)}"  # a name that is no model's: it is there whole or not at all
        os.rename(place, gone)
        shutil.rmtree(gone)
    except OSError as error:
        raise RequestError(f"{place} cannot be deleted: {error.strerror}", "model") from None


def _repository(name: str) -> str:
    from draftwing.models.hub import hub_id

    alias, found = ALIASES.get(name), hub_id(name)
    if alias is not None:
        return name if alias.hub is None else alias.hub.repo
    return name if found is None else found.repo


def _status(piece: Piece) -> dict[str, Any]:
    digest, total, completed = piece
    return {
        "status": f"pulling {digest[:12]}", "digest": f"sha256:{digest}", "total": total, "completed": completed,
    }  # fmt: skip


async def _whole(command: str, name: str) -> None:
    async with aclosing(_messages(command, name)) as messages:
        async for _ in messages:
            pass


async def _messages(command: str, name: str) -> AsyncGenerator[Piece, None]:
    """Yields how far a process is that does this; closed early it ends. Raises DraftwingError."""
    process, (connection,) = start_module(FETCHER, 1, new_session=True)
    loop = asyncio.get_running_loop()
    heard: asyncio.Queue[Any] = asyncio.Queue()

    def read() -> None:
        try:
            heard.put_nowait(connection.recv())
        except (EOFError, OSError):
            loop.remove_reader(connection.fileno())
            heard.put_nowait(None)

    try:
        with contextlib.suppress(OSError):  # it is gone already, which is noticed in a moment
            connection.send((command, name))
        loop.add_reader(connection.fileno(), read)
        while (message := await heard.get()) != DONE:
            if message is None:
                raise EngineDead(f"the process that does it ended: {await asyncio.to_thread(how_it_ended, process)}")
            if isinstance(message, Failed):
                raise message.error(EngineDead)
            yield message
    finally:
        loop.remove_reader(connection.fileno())
        connection.close()
        process.kill()
        process.wait()
