"""Whether the engine gets on, which a watchdog asks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Heartbeat:
    """Counts what the engine has done. One thread turns the engine, any thread may ask."""

    def __init__(self) -> None:
        self._done = 0  # steps, and compilations within them
        self._stepping = self._compiling = False

    @property
    def now(self) -> int | None:
        """Returns a number that changes while the engine gets on. None: nothing has to happen, or a compiler runs,
        which may take any time."""
        return self._done if self._stepping and not self._compiling else None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Notes when a step begins and ends, around which it is entered."""
        self._compiling = False  # whatever became of a compiler that failed
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False
            self._done += 1

    def watch_compilers(self) -> None:
        """Sees from now on when Triton or torch.compile begins and ends, where either was imported."""
        triton, dynamo = sys.modules.get("triton"), sys.modules.get("torch._dynamo.callback")
        if triton is not None and hasattr(triton, "knobs"):
            triton.knobs.runtime.jit_cache_hook = self._begin
            triton.knobs.runtime.jit_post_compile_hook = self._end
        if dynamo is not None:
            dynamo.callback_handler.register_start_callback(self._begin)
            dynamo.callback_handler.register_end_callback(self._end)

    def _begin(self, *args: Any, **more: Any) -> None:
        self._compiling = True

    def _end(self, *args: Any, **more: Any) -> None:
        self._compiling = False
        self._done += 1
