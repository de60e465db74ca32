"""What the page at `/` shows of several models: their states, and the memory that they take."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from draftwing.config.model_list import ServedModel
from draftwing.machine import free_memory
from draftwing.server.router.memory import model_files, taken
from draftwing.server.router.model import Model
from draftwing.server.router.models import Models
from draftwing.version import __version__

_FRESH = 1.0  # seconds for which sizes are not measured again, however many look


class Overview:
    """Belongs to the running event loop."""

    def __init__(self, models: Models, budget: float | None) -> None:
        """budget: bytes that models may take together; None: what is free."""
        self._models, self._budget = models, budget
        self._sizes: dict[str, tuple[int, int]] = {}  # by name: bytes of memory, and of files
        self._measured = -_FRESH

    async def facts(self) -> dict[str, Any]:
        """Returns the answer of /ui/info; docs/page.md has its fields."""
        self._models.look()
        if time.monotonic() - self._measured >= _FRESH:
            self._measured = time.monotonic()
            await self._models.refresh()
            every = [(one.served, one.server.process.pid if one.server else None) for one in self._models.every]
            self._sizes = await asyncio.to_thread(lambda: {served.name: _sizes(served, pid) for served, pid in every})
        listed = [self._fact(model) for model in self._models.every]
        return {"version": __version__, "models": listed, "memory": {"budget": self._budget, "free": free_memory()}}

    def _fact(self, model: Model) -> dict[str, Any]:
        memory, files = self._sizes.get(model.served.name, (0, 0))
        return {
            "name": model.served.name,
            "state": model.state,
            "failure": model.failure,
            "requests": model.in_flight,
            "waiting": len(model.waiting),
            "memory": memory if model.server is not None else 0,
            "at_most": model.size if model.server is not None else 0,
            "files": files,
        }


def _sizes(served: ServedModel, pid: int | None) -> tuple[int, int]:
    """Returns the bytes of memory that its processes take, and those of its files."""
    return taken(pid) if pid else 0, sum(file.stat().st_size for file in model_files(served))
