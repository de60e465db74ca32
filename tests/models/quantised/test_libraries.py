"""What the library that writes such checkpoints packs is what we read; skipped where it is not installed."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_quantised as tiny
import torch

pytest.importorskip("compressed_tensors")
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32  # type: ignore[import-not-found]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_packed_by_compressed_tensors(bits: int, symmetric: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    codes, zeros = (
        torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), shape, generator=generator).to(torch.int8)
        for shape in ((24, 96), (24, 3))
    )
    scales = torch.rand(24, 3, generator=generator).bfloat16()
    tensors = {
        "weight_packed": pack_to_int32(codes, bits), "weight_scale": scales, "weight_shape": torch.tensor([24, 96]),
    }  # fmt: skip
    if symmetric:
        zeros.zero_()
    else:
        tensors["weight_zero_point"] = pack_to_int32(zeros, bits, packed_dim=0)
    config = tiny.compressed({**tiny.INT4, "num_bits": bits, "symmetric": symmetric}, "pack-quantized")
    found = tiny.read(config, tensors).dense(torch.float32).numpy()
    wide = [part.double().numpy().repeat(32, 1) for part in (zeros, scales)]
    np.testing.assert_allclose(found, (codes.double().numpy() - wide[0]) * wide[1], rtol=1e-7)
