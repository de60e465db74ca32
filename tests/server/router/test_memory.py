"""What a model is going to take of the host's memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from draftwing.config.model_list import ServedModel
from draftwing.server.router.child import host_pool
from draftwing.server.router.memory import Forecast, forecast


@pytest.mark.parametrize(("device", "pool"), [("cuda", 0), ("cpu", 100)])
def test_host_memory_beneath_the_cache_counts(device: str, pool: int) -> None:
    arguments = {"model": "none", "device": device}
    for more, size in (({}, 0), ({"hicache_size": None}, 0), ({"hicache_size": 64.0}, 64 * 10**9)):
        assert forecast(ServedModel(("a",), 1e9, arguments | more), free=400) == Forecast(0, pool + size)
    for size in (0.0, 64.0):  # a GPU's is taken when the model has started
        options = SimpleNamespace(tp_size=1, hicache_size=size)
        info = SimpleNamespace(stored={"on_device": device == "cuda"}, pool_bytes=pool, options=options)
        assert host_pool(info) == (0 if device == "cuda" else 100 + size * 1e9)  # type: ignore[arg-type]
