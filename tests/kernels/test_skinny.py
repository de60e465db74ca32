"""Skinny products on a GPU: against float64, a row's bits in any batch, and what overlaps with the kernels before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a GPU: CUDA C++")]
DTYPES = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
ROWS = (1, 2, 7, 8, 9, 16, 17, 32, 33, 70, 300)
MOST = ROWS[-1]


def random(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(shape, device="cuda", generator=generator) * scale).to(dtype)


def products(dtype: torch.dtype):
    from draftwing.kernels.skinny import skinny_products

    return skinny_products(torch.device("cuda", torch.cuda.current_device()), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width, depth", [(16, 64), (37, 576), (4096, 4096), (1000, 14336)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_against_float64(dtype: torch.dtype, width: int, depth: int, with_bias: bool) -> None:
    ours = products(dtype)
    x, w = random(MOST, depth, dtype=dtype), random(width, depth, dtype=dtype, seed=1, scale=depth**-0.5)
    bias = random(width, dtype=dtype, seed=2) if with_bias else None
    extra = random(MOST, width, dtype=dtype, seed=3)
    exact = x.double() @ w.double().T + (bias.double() if bias is not None else 0)
    for rows in ROWS:
        for residual in (None, extra[:rows]):
            got = ours.linear(x[:rows], w, bias, residual)
            expected = exact[:rows] + (residual.double() if residual is not None else 0)
            torch.testing.assert_close(got.double(), expected, atol=DTYPES[dtype], rtol=DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ffn, depth", [(8, 64), (21, 576), (14336, 4096)])
def test_gated_against_float64(dtype: torch.dtype, ffn: int, depth: int) -> None:
    x, w = random(MOST, depth, dtype=dtype), random(2 * ffn, depth, dtype=dtype, seed=1, scale=depth**-0.5)
    gate, up = (x.double() @ w.double().T).chunk(2, 1)
    for rows in (1, 8, 11, 32, 33, MOST):
        got = products(dtype).gated(x[:rows], w, None)
        expected = (torch.nn.functional.silu(gate) * up)[:rows]
        torch.testing.assert_close(got.double(), expected, atol=DTYPES[dtype], rtol=DTYPES[dtype])


@pytest.mark.parametrize("processors", [1, 10_000])  # blocks of 128 rows, and of 64
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_batch(dtype: torch.dtype, processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, depth = products(dtype), 4096
    monkeypatch.setattr(ours, "_processors", processors)
    x, extra = random(MOST, depth, dtype=dtype), random(MOST, 300, dtype=dtype, seed=3)
    w = random(300, depth, dtype=dtype, seed=1, scale=depth**-0.5)
    plain, added, gated = ours.linear(x, w, None), ours.linear(x, w, None, extra), ours.gated(x, w, None)
    for rows in ROWS:
        for first in (0, MOST - rows):
            part = slice(first, first + rows)
            assert torch.equal(ours.linear(x[part], w, None), plain[part])
            assert torch.equal(ours.linear(x[part], w, None, extra[part]), added[part])
            assert torch.equal(ours.gated(x[part], w, None), gated[part])


@pytest.mark.parametrize("rows", [1, 8, 16])
def test_a_chain_that_overlaps(rows: int) -> None:
    """In a graph a kernel comes up while those before it run, and tensors lie where others did a moment ago: the same
    bits as with a wait after each kernel."""
    pytest.importorskip("triton")
    from draftwing.kernels.layers import add_rms_norm, rms_norm, silu_mul

    dtype, hidden, ffn = torch.bfloat16, 4096, 14336
    ours = products(dtype)
    scale = hidden**-0.5
    layers = [
        [random(n, k, dtype=dtype, seed=4 * i + j, scale=scale)
         for j, (n, k) in enumerate([(hidden, hidden), (2 * ffn, hidden), (hidden, ffn)])]
        for i in range(4)
    ]  # fmt: skip
    norm = torch.ones(hidden, dtype=dtype, device="cuda")
    start = random(rows, hidden, dtype=dtype, seed=99)

    def forward(sync: bool) -> Tensor:
        def done(*tensors: Tensor) -> tuple[Tensor, ...]:
            if sync:
                torch.cuda.synchronize()
            return tensors

        x = start
        for i in range(24):
            o, up, down = layers[i % 4]
            (normed,) = done(rms_norm(x, norm, 1e-5))
            if i % 3 == 0:  # a kernel of torch's between ours
                (normed,) = done(normed.mul(1.0))
            (attended,) = done(ours.linear(normed, o, None))
            x, normed = done(*add_rms_norm(x, attended, norm, 1e-5))
            if i % 2:
                (mixed,) = done(ours.gated(normed, up, None))
            else:
                (mixed,) = done(silu_mul(*done(ours.linear(normed, up, None))))
            (x,) = done(ours.linear(mixed, down, None, x))
        return x

    expected = forward(True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        got = forward(False)
    for _ in range(50):
        got.fill_(torch.nan)
        graph.replay()
        assert torch.equal(got, expected)
