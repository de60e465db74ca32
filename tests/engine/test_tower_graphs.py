"""Graphs of towers: which sizes of pictures get one, and that they give what the tower gives."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_rig import record_by_calling
from image_models import KINDS, loaded, write_model
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from draftwing.engine import tower_graphs
from draftwing.engine.devices.cpu import CpuDevice
from draftwing.engine.tower_graphs import WANTED, TowerGraphs
from draftwing.layers.linear_ops.dense import DENSE
from draftwing.models.towers.base import Tower
from draftwing.models.towers.patch_merger import PatchMergerConfig


class Recorder(CpuDevice):
    """pools: of each graph that was captured."""

    def __init__(self) -> None:
        super().__init__()
        self.pools: list[str] = []

    def record(self, fn: Any, pool: str = "steps") -> Any:
        self.pools.append(pool)
        return record_by_calling(fn)


@pytest.fixture(scope="module", params=["qwen3.5", "gemma4", "smolvlm"])
def tower(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tower:
    found = loaded(write_model(tmp_path_factory.mktemp("towers") / "model", request.param))[0].tower
    assert found is not None
    return found


def pictures(tower: Tower, count: int, times: int = 1) -> list[np.ndarray[Any, Any]]:
    """times: of the smallest side, for the width."""
    side, rng = tower.config.least_side, np.random.default_rng(times)
    return [rng.integers(0, 256, (side, side * times, 3), np.uint8) for _ in range(count)]


def tokens_of(tower: Tower, pixels: np.ndarray[Any, Any]) -> int:
    return len(tower.module(torch.from_numpy(pixels).float() / 255))


@torch.inference_mode()
def test_rows_are_those_of_the_tower(tower: Tower) -> None:
    """Of pictures that come one after the other, each of which leaves the rows of those before it as they were."""
    device = Recorder()
    graphs, shown = TowerGraphs(tower, device), pictures(tower, WANTED + 3)
    tokens = tokens_of(tower, shown[0])
    for i, pixels in enumerate(shown[:WANTED]):
        assert graphs.wanted == i / WANTED and graphs.later == (i > 1)
        assert graphs.run(pixels, tokens) is None
    assert graphs.wanted == 1
    graphs.capture_next()
    assert (graphs.wanted, graphs.later, len(graphs), device.pools) == (0, 0, 1, ["towers"])
    found = [graphs.run(pixels, tokens) for pixels in shown[WANTED:]]
    for pixels, rows in zip(shown[WANTED:], found, strict=True):
        assert rows is not None and torch.equal(rows, tower.features(torch.from_numpy(pixels), tokens))
    assert graphs.replays == 3 and not torch.equal(*found[:2])


@torch.inference_mode()
def test_as_many_sizes_as_there_is_room_for(tower: Tower, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs that were used least recently make room, and a size that comes again is counted anew."""
    if not isinstance(tower.config, PatchMergerConfig):
        pytest.skip("all pictures have one size, or this one does for all")
    graphs, shown = TowerGraphs(tower, Recorder()), [pictures(tower, 1, times)[0] for times in (1, 2, 3)]
    monkeypatch.setattr(tower_graphs, "ALL_PATCHES", 4 * tower.config.merge**2)  # one of 1 and of 3, or of 1 and of 2

    def run(which: int) -> bool:
        pixels, tokens = shown[which], which + 1
        rows = graphs.run(pixels, tokens)
        assert rows is None or torch.equal(rows, tower.features(torch.from_numpy(pixels), tokens))
        return rows is not None

    for which in (0, 1):
        assert not run(which) and not run(which)
        graphs.capture_next()
    assert run(1) and run(0) and not run(2) and not run(2)
    graphs.capture_next()
    assert len(graphs) == 2 and run(0) and run(2) and not run(1)
    assert (graphs.later, graphs.wanted) == (0, 1 / WANTED)
    graphs.clear()
    assert not len(graphs) and not graphs.wanted and not run(0)


@torch.inference_mode()
def test_sizes_without_a_graph(tower: Tower, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large pictures, those of an engine without graphs, and all when there is no room."""
    (pixels,) = pictures(tower, 1)
    tokens = tokens_of(tower, pixels)
    without = TowerGraphs(None, Recorder())
    assert without.run(pixels, tokens) is None and not without.wanted
    graphs = TowerGraphs(tower, Recorder())
    monkeypatch.setattr(tower_graphs, "MOST_PATCHES", pixels.shape[0] * pixels.shape[1] // tower.config.patch**2 - 1)
    assert graphs.run(pixels, tokens) is None and not graphs.wanted
    monkeypatch.undo()
    assert graphs.run(pixels, tokens) is None and graphs.wanted
    graphs.stop()
    assert not graphs.wanted and graphs.run(pixels, tokens) is None and not graphs.wanted


def test_sizes_that_are_counted_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    tower: Any = SimpleNamespace(config=SimpleNamespace(patch=1))
    monkeypatch.setattr(tower_graphs, "MOST_SIZES", 2)
    graphs = TowerGraphs(tower, Recorder())
    for width in (1, 2, 3, 1, 3):
        graphs.run(np.zeros((1, width, 3), np.uint8), 1)
    assert graphs.later == 1 and graphs.wanted == 2 / WANTED, "the first one was forgotten"


@torch.inference_mode()
def test_graphs_of_tiny_pictures_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever room there is for patches, the driver keeps as much of a small graph as of a large one."""
    config = SimpleNamespace(patch=1)
    tower: Any = SimpleNamespace(config=config, features=lambda pixels, tokens: pixels.float())
    monkeypatch.setattr(tower_graphs, "MOST_SIZES", 2)
    graphs = TowerGraphs(tower, Recorder())
    for width in (1, 2, 3):
        graphs.run(np.zeros((1, width, 3), np.uint8), 1)
        graphs.capture_next()
    assert len(graphs) == 2
    assert [graphs.run(np.zeros((1, width, 3), np.uint8), 1) is not None for width in (1, 2, 3)] == [False, True, True]


def test_bytes_that_are_left_for_graphs() -> None:
    """For layers of the largest one, and for pixels and rows of features of all."""
    plain, deep = (PatchMergerConfig(token=1, width=4096, deep=count) for count in (0, 3))
    layers, pixels, rows = 2048 * (4 * 4304 + 16 * 1152) * 2, 8192 * 16 * 16 * 3, 2048 * 4096 * 2
    for config in (plain, deep):
        expected = layers + pixels + rows * (1 + config.deep)
        assert 0.97 * expected < tower_graphs.kept_bytes(config, torch.bfloat16) <= expected


class Uploads(TorchFunctionMode):
    """Fails where something is copied from the host: its own tensors, lists of indices, or what they are made of."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [one for one in tree_leaves((args, kwargs, out)) if isinstance(one, torch.Tensor)]
        there = any(one.is_meta for one in tensors)
        assert not there or not any(one.dim() and not one.is_meta for one in tensors), f"{func}: copies a tensor"
        assert not there or func not in (torch.tensor, torch.as_tensor), f"{func}: copies numbers"
        if there and func is torch.Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else args[1:]
            assert not any(isinstance(one, list) for one in index), "a list of indices is copied"
        return out


@pytest.mark.parametrize("kind", KINDS)
def test_no_tower_reads_or_writes_the_host(kind: str, tmp_path: Path) -> None:
    """On tensors without data: whoever asks for any raises."""
    tower, meta = loaded(write_model(tmp_path / kind, kind))[0].tower, torch.device("meta")
    assert tower is not None
    (pixels,) = pictures(tower, 1)
    tokens, module = tokens_of(tower, pixels), tower.config.build(torch.float32, meta, DENSE)
    module.settle(meta)
    shown, empty = torch.from_numpy(pixels).to(meta), Tower(tower.config, module, torch.float32)
    with Uploads():
        rows = empty.features(shown, tokens)
    assert rows.shape == (tokens, tower.config.row_size)
