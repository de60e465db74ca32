"""The noise of the sampler, as ops/noise/spec.py documents it, in numpy's unsigned integers and float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def gumbel64(
    seed: npt.NDArray[np.int64], position: npt.NDArray[np.int64], ids: npt.NDArray[np.integer]
) -> npt.NDArray[np.float64]:
    """seed, position [M], ids [V] -> [M, V]"""
    key = position.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    key += seed.astype(np.uint64) * np.uint64(0xD1342543DE82EF95)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        key = (key ^ key >> np.uint64(shift)) * np.uint64(factor)
    low, high = key.astype(np.uint32)[:, None], (key >> np.uint64(32)).astype(np.uint32)[:, None]
    h = ids.astype(np.uint32) * np.uint32(0x9E3779B1)
    h = ((h ^ h >> np.uint32(16)) ^ low) * np.uint32(0x7FEB352D) + high
    h = (h ^ h >> np.uint32(15)) * np.uint32(0x846CA68B)
    bits = h.view(np.int32) ^ h.view(np.int32) >> 16
    u = bits.astype(np.float32) * np.float32(2.0**-31 * (1.0 - 2.0**-24)) + np.float32(2.0**-32)
    return -np.log(-np.log1p(-u.astype(np.float64)))
