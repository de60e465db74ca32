"""Numbers of vectors as JSON has them."""

import json

import numpy as np
from pydantic_core import to_json

from draftwing.text.pooler import decimals


def test_numbers_in_json_are_short_and_the_same_in_float32() -> None:
    draw = np.random.default_rng(0)
    bits = draw.integers(0, 1 << 32, 20_000, np.uint32).view(np.float32)
    bits = bits[np.isfinite(bits)]
    below_one = np.nextafter(np.float32(1), np.float32(0))
    edges = np.asarray([0.0, -0.0, 1.0, -0.5, 0.1, 1e-45, 1e-14, 1e22, 3.4e38, below_one], np.float32)
    unit = draw.standard_normal(4096).astype(np.float32) / np.float32(64)
    for vector in (bits, edges, unit):
        read = np.asarray(json.loads(to_json(decimals(vector))), np.float32)
        assert np.array_equal(read.view(np.uint32), vector.view(np.uint32))
    digits = [repr(abs(one)).split("e")[0].replace(".", "").strip("0") for one in decimals(unit)]
    assert max(map(len, digits)) == 9 and len(to_json(decimals(unit))) < 0.7 * len(to_json(unit.tolist()))
