"""benchmarks/made_contexts.py: what llama.cpp's slots are given as the state of a long prompt."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from scripts import script

ROOT = Path(__file__).parents[1]
LAYERS, WIDTH, CELLS, WANTED = 2, 3, 4, 10
MAGIC, VERSION, F16 = 0x67677371, 2, 1


def state(tokens: list[int], keys: np.ndarray, values: np.ndarray, turned: bool, axes: bool) -> bytes:
    """As llama.cpp writes it: keys and values [layers, cells, WIDTH] float16; turned: values by elements, not cells.
    axes: of Qwen3.5, whose cells have further positions and their token, and whose recurrent state comes last."""
    count = len(tokens)
    parts = [struct.pack(f"3I{count}i2I", MAGIC, VERSION, count, *tokens, 1, count)]
    for position, token in enumerate(tokens):
        parts.append(struct.pack("iI", position, 1))
        parts.append(struct.pack("4i", position, position, token, 0) if axes else struct.pack("i", 0))
    parts.append(struct.pack("2I", turned, LAYERS))
    parts += [struct.pack("=iQ", F16, 2 * WIDTH) + layer.tobytes() for layer in keys]
    for layer in values:
        head = struct.pack("=iII", F16, 2, WIDTH) if turned else struct.pack("=iQ", F16, 2 * WIDTH)
        parts.append(head + (layer.T if turned else layer).tobytes())
    if axes:
        parts.append(struct.pack("IiI", 1, count - 1, 0) + b"a state")
    return b"".join(parts)


@pytest.mark.parametrize(("turned", "axes"), [(False, False), (True, False), (False, True)])
def test_a_long_state_has_that_of_a_short_prompt_again_and_again(tmp_path: Path, turned: bool, axes: bool) -> None:
    rng = np.random.default_rng(0)
    keys, values = rng.standard_normal((2, LAYERS, CELLS, WIDTH)).astype(np.float16)
    (tmp_path / "small").write_bytes(state(list(range(CELLS)), keys, values, turned, axes))
    text = rng.integers(0, 100, WANTED).tolist()
    script(ROOT / "benchmarks" / "made_contexts.py").grow(tmp_path / "small", tmp_path / "large", text, axes)
    again = np.arange(WANTED) % CELLS
    assert (tmp_path / "large").read_bytes() == state(text, keys[:, again], values[:, again], turned, axes)
