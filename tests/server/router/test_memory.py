"""What a model is going to take of the host's memory."""

from __future__ import annotations

import json
from pathlib import Path
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


SLOT = 2 * 3 * 64 * 4
SIZES = {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 64}


@pytest.mark.parametrize(
    ("config", "slot"),
    [
        (json.dumps(SIZES), SLOT), ("\ufeff" + json.dumps(SIZES), SLOT),
        (json.dumps({**SIZES, "text_config": None}), SLOT), (json.dumps({"text_config": SIZES}), SLOT),
        (json.dumps({**SIZES, "num_attention_heads": 0}), 0), (json.dumps({**SIZES, "num_hidden_layers": 1e999}), 0),
        ("[" * 200_000, 0), ("[]", 0),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_the_cache_is_as_large_as_the_config_says(tmp_path: Path, config: str, slot: int) -> None:
    (tmp_path / "config.json").write_text(config, encoding="utf-8")
    said = {"model": str(tmp_path), "device": "cpu", "max_total_tokens": 100}
    found = forecast(ServedModel(("m",), 1e9, said), free=4 << 30)
    assert found.pool == (100 * slot or 1 << 30)


def test_a_broken_gguf_file_is_forecast_as_a_folder_without_a_config(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    said = {"model": str(tmp_path / "m.gguf"), "device": "cpu", "max_total_tokens": 100}
    assert forecast(ServedModel(("m",), 1e9, said), free=4 << 30).pool == (4 << 30) // 4 - 1
