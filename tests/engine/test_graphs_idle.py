"""Graphs that a start leaves for later: captured while the engine has nothing to do, and while it is busy."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from engine_rig import record_by_calling
from reference.learnable import write_target

from draftwing.config.devices import Defaults
from draftwing.config.options import Options
from draftwing.config.trees import PLAIN
from draftwing.engine.devices.cpu import CpuDevice
from draftwing.engine.engine import Engine
from draftwing.engine.startup import executor as startup
from draftwing.errors import ConfigError
from draftwing.ops.attention.cpu import NativeAttention
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams

pytestmark = pytest.mark.slow


class Graphs(CpuDevice):
    """A CPU whose steps are replayed: of up to 12 rows, and 12 is left for later."""

    @property
    def defaults(self) -> Defaults:
        return Defaults(12, 64, overlap=True, graph_size=20)

    def record(self, fn: Any, pool: str = "steps") -> Any:
        return record_by_calling(fn)


def asked(i: int) -> GenerationRequest:
    params = SamplingParams(max_new_tokens=40 + i, ignore_eos=True, temperature=0.0)
    return GenerationRequest(f"{i}", [1 + i, 2, 3 + i], params)


def texts(engine: Engine, count: int) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for i in range(count):
        engine.submit(asked(i))
    while not engine.idle():
        for output in engine.step():
            found.setdefault(output.uid, []).extend(output.token_ids)
    return found


def engine_of(model: str, device: Any, **options: Any) -> Engine:
    more = options if device == "cpu" else {"cuda_graph_max_bs": 20, **options}
    return Engine(
        Options(
            model=model, device=device, speculative_algorithm="NGRAM", speculative_fixed_shape=True, num_threads=1,
            max_total_tokens=4096, max_running_requests=20, dtype="float32", **more,
        )
    )  # fmt: skip


def test_graphs_are_captured_when_there_is_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = str(write_target(tmp_path / "model"))
    engine = engine_of(model, "cpu")
    expected = texts(engine, 11)
    engine.close()
    monkeypatch.setattr(NativeAttention, "capturable", True)
    monkeypatch.setattr("draftwing.engine.graphs.WANTED", 12)
    monkeypatch.setattr("draftwing.engine.engine.CAPTURE_SHARE", 1e-9)  # one capture under load, on a slow machine, too
    engine = engine_of(model, Graphs)
    try:
        graphs, broadcast = engine.parts.executor.graphs, engine.parts.executor.broadcast
        before = {*graphs.later}
        assert {key.size for key in before} == {12}

        def load(*_: Any) -> None:
            assert texts(engine, 11) == expected
            raise ConfigError("no head")

        with monkeypatch.context() as patched, pytest.raises(ConfigError, match="no head"):
            patched.setattr(broadcast, "load_head", load)
            engine.swap_draft(None)
        assert {*graphs.later} == before, "it waits for the whole device, which a capture does not survive"
        assert texts(engine, 11) == expected
        assert 0 < len(graphs.later) < len(before), "many steps drafted for as many rows, and few did not"

        def ask() -> None:
            while graphs.later:
                time.sleep(0.01)
            engine.submit(asked(0))

        threading.Thread(target=ask, daemon=True).start()
        assert engine.step(block=True) == [] and not graphs.later
        while not engine.idle():
            engine.step()
        assert texts(engine, 11) == expected and engine.parts.executor.captures.replays
    finally:
        engine.close()


def test_no_compiled_forward_is_captured_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be compiled anew for another size, for which requests would wait."""
    monkeypatch.setattr(NativeAttention, "capturable", True)
    monkeypatch.setattr(startup, "compile_forwards", lambda *parts: None)
    engine = engine_of(str(write_target(tmp_path / "model")), Graphs, enable_torch_compile=True)
    try:
        graphs = engine.parts.executor.graphs
        assert not graphs.later and graphs.key(PLAIN, 9) == (PLAIN, 12)
    finally:
        engine.close()
