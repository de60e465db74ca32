"""What a tower of 9B's shape, with few layers, takes of a GPU: memory of the largest picture and of graphs, which sizes
have graphs, and page-locked buffers of pixels."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from draftwing.engine.devices.cuda import CudaDevice
from draftwing.engine.startup.memory import tower_bytes
from draftwing.engine.tower_graphs import MOST_PATCHES, WANTED, TowerGraphs, kept_bytes
from draftwing.layers.linear_ops.dense import DENSE
from draftwing.models.towers.base import Tower
from draftwing.models.towers.loading import load_tower
from draftwing.models.towers.patch_merger import PatchMergerConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CONFIG = PatchMergerConfig(token=1, width=4096, deep=3, depth=4, taps=(0, 1, 2))
Pixels = np.ndarray[Any, np.dtype[np.uint8]]


@pytest.fixture(scope="module")
def device() -> CudaDevice:
    return CudaDevice()


@pytest.fixture(scope="module")
def tower(device: CudaDevice) -> Iterator[Tower]:
    yield load_tower(CONFIG, (), torch.bfloat16, device.device, DENSE, device.ops, dummy=True)
    torch.cuda.empty_cache()


def pixels_of(height: int, width: int, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def tokens_of(height: int, width: int) -> int:
    return height * width // CONFIG.token_side**2


@torch.inference_mode()
def test_memory_of_the_largest_picture(tower: Tower, device: CudaDevice) -> None:
    """All layers take no more than a start leaves, and between layers no more than steps have room for."""
    side = CONFIG.largest_side(10**6)
    rig: Any = SimpleNamespace(model=SimpleNamespace(tower=tower, dtype=torch.bfloat16), device=device)
    left, tokens = tower_bytes(rig, 10**6), tokens_of(side, side)
    pixels = torch.randint(256, (side, side, 3), dtype=torch.uint8, device=device.device)
    peak = device.peak(lambda: tower.features(pixels, tokens)) + pixels.nbytes
    before, kept = torch.cuda.memory_allocated() - pixels.nbytes, list[int]()
    for made in tower.parts(pixels, tokens):
        if isinstance(made, int):
            kept.append(torch.cuda.memory_allocated() - before)
    begun = CONFIG.begun_bytes(side, 2)
    of = [f"{one / 1e9:.3f}" for one in (peak, left, max(kept), begun)]
    print(f"{side} pixels: {of[0]} of {of[1]} GB, between layers {of[2]} of {of[3]}")
    assert peak <= left <= 1.6 * peak and max(kept) <= begun


@torch.inference_mode()
def test_limit_of_graphs(tower: Tower, device: CudaDevice) -> None:
    """The largest picture that has one has the same bits from it; a larger one has none."""
    graphs, shown = TowerGraphs(tower, device), [pixels_of(512, 1024, seed) for seed in range(WANTED + 2)]
    tokens = tokens_of(512, 1024)
    assert 512 * 1024 // CONFIG.patch**2 == MOST_PATCHES
    assert all(graphs.run(pixels, tokens) is None for pixels in shown[:WANTED]) and graphs.wanted == 1
    graphs.capture_next()
    for pixels in shown[WANTED:]:
        rows = graphs.run(pixels, tokens)
        expected = tower.features(device.upload_array(pixels), tokens)
        assert rows is not None and torch.equal(rows, expected)
    larger = pixels_of(544, 1024)
    assert graphs.run(larger, tokens_of(544, 1024)) is None and not graphs.wanted and graphs.replays == 2


@torch.inference_mode()
@pytest.mark.parametrize("rows", [(32, 48, 56, 64), (64, 56, 48, 32), (32, 33, 34, 35, 36, 37, 38)])
def test_memory_of_graphs(tower: Tower, rows: tuple[int, ...], device: CudaDevice) -> None:
    """Of pictures that grow, whose pieces of memory fit only in part, too, no more than a start leaves."""
    graphs, found = TowerGraphs(tower, device), list[int]()
    tower.features(device.upload_array(pixels_of(16 * max(rows), 512)), tokens_of(16 * max(rows), 512))
    device.trim()
    before = torch.cuda.memory_reserved()
    for count in rows:
        size = 16 * count, 512
        for seed in range(2):
            graphs.run(pixels_of(*size, seed), tokens_of(*size))
        graphs.capture_next()
        device.trim()
        found.append(torch.cuda.memory_reserved() - before)
    kept = kept_bytes(CONFIG, torch.bfloat16)
    print(f"graphs of {rows} x 32 patches: {[one >> 20 for one in found]} MiB, {kept >> 20} are left")
    assert found[-1] <= kept
    graphs.clear()
    device.trim()


def test_pixels_go_by_one_page_locked_buffer() -> None:
    device = CudaDevice()
    for seed in range(3):
        pixels = pixels_of(480, 640, seed)
        found = device.upload_array(pixels)
        assert np.array_equal(found.cpu().numpy(), pixels)
        device.synchronize()
    buffers = [buffer for _, buffer in device._up._busy] + device._up._free
    assert len(buffers) == 1 and buffers[0].is_pinned()
