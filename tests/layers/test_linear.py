import pytest
import torch
import torch.nn.functional as F

from draftwing.errors import ConfigError
from draftwing.layers.linear import Linear
from draftwing.layers.linear_ops.base import PackMode
from draftwing.ops import make_ops
from draftwing.ops.gemm import onednn
from draftwing.ops.gemm.gemms import dense_gemms
from draftwing.ops.table import TorchOps

CPU = torch.device("cpu")
OPS = {"torch": TorchOps(CPU), "own": make_ops(CPU)}


def make_linear(inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> tuple[Linear, torch.Tensor]:
    """A filled layer and, in float64, its weight with the bias as a last column."""
    generator = torch.Generator().manual_seed(inputs + outputs)
    linear = Linear(inputs, outputs, bias, dtype, CPU)
    linear.weight.data.copy_(torch.randn(outputs, inputs, generator=generator) * inputs**-0.5)
    offset = torch.zeros(outputs, 1, dtype=torch.float64)
    if linear.bias is not None:
        linear.bias.data.copy_(torch.randn(outputs, generator=generator))
        offset = linear.bias.data.double()[:, None]
    return linear, torch.cat((linear.weight.data.double(), offset), 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("inputs", "outputs", "bias"), [(64, 48, True), (576, 96, False)])
@pytest.mark.parametrize("packed", [None, *OPS])
def test_equals_float64(inputs: int, outputs: int, bias: bool, dtype: torch.dtype, packed: str | None) -> None:
    linear, weight = make_linear(inputs, outputs, bias, dtype)
    if packed:
        linear.pack(OPS[packed])
    tolerance = {"rtol": 2**-7, "atol": 2**-6} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    for rows in (1, 2, 5):
        x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).to(dtype)
        residual = torch.randn(rows, outputs, generator=torch.Generator().manual_seed(7)).to(dtype)
        kept = residual.clone()
        expected = x.double() @ weight[:, :-1].T + weight[:, -1]
        y, z = linear(x), linear(x, residual)
        assert y.dtype == dtype and y.shape == z.shape == (rows, outputs)
        torch.testing.assert_close(y.double(), expected, **tolerance)
        torch.testing.assert_close(z.double(), expected + residual.double(), **tolerance)
        assert torch.equal(residual, kept)


@pytest.mark.slow
@pytest.mark.further(outputs=3072, dtype=torch.bfloat16)
@pytest.mark.further(outputs=3072, blocks=False)
@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 960), (576, 3072), (1536, 576), (2048, 100)])
def test_packed_rows_do_not_depend_on_their_number(
    inputs: int, outputs: int, dtype: torch.dtype, blocks: bool, ops: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever this CPU's oneDNN does; blocks: as where any number of rows is summed in its own way."""
    if blocks:
        monkeypatch.setattr(onednn, "rows_summed_alike", lambda *_: 32)
    linear, weight = make_linear(inputs, outputs, False, dtype)
    linear.pack(OPS[ops])
    x = torch.randn(300, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    residual = torch.randn(300, outputs, generator=torch.Generator().manual_seed(2)).to(dtype)
    every, added = linear(x), linear(x, residual)
    assert every.shape == added.shape == residual.shape
    expected = x.double() @ weight[:, :-1].T
    torch.testing.assert_close(every.double(), expected, rtol=2**-7, atol=2**-6)
    torch.testing.assert_close(added.double(), expected + residual.double(), rtol=2**-7, atol=2**-6)
    for rows in (1, 2, 7, 8, 16, 17, 33, 64, 130):
        for start in (5, 300 - rows):
            here = slice(start, start + rows)
            assert torch.equal(linear(x[here]), every[here]), (rows, start)
            assert torch.equal(linear(x[here], residual[here]), added[here]), (rows, start)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("other_order", "expected"), [((), 1), ((1,), 2), ((2,), 32), ((1, 2, 3), 32), ((33,), 32), ((300,), 32)]
)
def test_numbers_of_rows_that_are_summed_in_another_order_are_found(
    other_order: tuple[int, ...], expected: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gemm(x: torch.Tensor, packed: torch.Tensor, bias: None, residual: torch.Tensor | None) -> torch.Tensor:
        parts = 8 if len(x) in other_order else 4  # that are summed one after the other
        total = torch.zeros(len(x))
        for part in x.float().split(x.shape[1] // parts, 1):
            total = total + part.cumsum(1)[:, -1]
        return total.to(dtype)[:, None].expand(-1, packed.shape[0])

    monkeypatch.setattr(onednn, "gemm", gemm)
    monkeypatch.setattr(onednn, "pack", lambda weight: weight)  # not every CPU packs bfloat16
    assert onednn.rows_summed_alike.__wrapped__(64, 3, dtype, 1) == expected


def test_packing_releases_the_weight_unless_kept() -> None:
    for keep in (False, True):
        linear, weight = make_linear(64, 64, False, torch.float32)
        before = linear.weight
        linear.pack(OPS["own"], PackMode(keep_weight=keep))
        assert hasattr(linear, "weight") == keep
        assert not keep or linear.weight is before
        linear.pack(OPS["own"], PackMode(keep_weight=keep))
        assert linear(torch.ones(2, 64, dtype=torch.float32)).shape == (2, 64)
        ids = torch.tensor([[3, 60], [0, 3]])
        assert torch.equal(linear.dense_weight().double(), weight[:, :-1])
        assert torch.equal(linear.rows(ids).double(), weight[ids, :-1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("packed", [None, *OPS])
def test_a_gated_pair_and_outputs_computed_again(packed: str | None, dtype: torch.dtype) -> None:
    linear, weight = make_linear(64, 128, True, dtype)
    if packed:
        linear.pack(OPS[packed], PackMode(keep_weight=True))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
    y = x.double() @ weight[:, :-1].T + weight[:, -1]
    gate, up = y.chunk(2, -1)
    torch.testing.assert_close(linear.gated(x).double(), gate * gate.sigmoid() * up, rtol=3e-2, atol=3e-2)
    ids = torch.tensor([[0, 127], [5, 5], [64, 63]])
    exact = y.gather(1, ids)
    torch.testing.assert_close(linear.exact_logits(x, ids).double(), exact, rtol=1e-5, atol=1e-5)


def test_a_residual_that_may_be_overwritten() -> None:
    for dtype in (torch.float32, torch.float16):
        linear, weight = make_linear(64, 32, False, dtype)
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
        residual = torch.randn(3, 32, generator=torch.Generator().manual_seed(4)).to(dtype)
        expected = x.double() @ weight[:, :-1].T + residual.double()
        kept = residual.clone()
        torch.testing.assert_close(linear(x, residual, overwrite=True).double(), expected, rtol=1e-2, atol=1e-2)
        assert torch.equal(residual, kept), "a layer that can be trained leaves it alone"
        linear.pack(OPS["torch"])
        torch.testing.assert_close(linear(x, residual, overwrite=True).double(), expected, rtol=1e-2, atol=1e-2)


class Named:
    """A GEMM whose results are all one number."""

    def __init__(self, number: float) -> None:
        self._number = number

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: None, residual: None = None) -> torch.Tensor:
        return x.new_full((len(x), len(weight)), self._number)

    def gated(self, x: torch.Tensor, weight: torch.Tensor, bias: None) -> torch.Tensor:
        return x.new_full((len(x), len(weight) // 2), self._number)


FEW, SOME, TORCH = 1.0, 2.0, 0.0


@pytest.mark.parametrize(
    ("inputs", "outputs", "deterministic", "expected"),  # of 8, 9, 16, 17, 64, 65, 192 and 193 rows
    [
        (4096, 4096, False, [FEW, SOME, SOME, SOME, SOME, TORCH, TORCH, TORCH]),
        (4096, 8192, False, [FEW, SOME, SOME, SOME, SOME, SOME, SOME, TORCH]),
        (512, 1 << 16, False, [FEW, SOME, SOME, SOME, SOME, TORCH, TORCH, TORCH]),
        (1024, 1024, False, [FEW, FEW, FEW, TORCH, TORCH, TORCH, TORCH, TORCH]),
        (64, 1 << 16, False, [FEW, TORCH, TORCH, TORCH, TORCH, TORCH, TORCH, TORCH]),
        (4096, 4096, True, [SOME] * 8),
        (1024, 1024, True, [FEW] * 8),
    ],
)
def test_a_gpu_has_kernels_by_rows(
    inputs: int, outputs: int, deterministic: bool, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    ops, kernels = TorchOps(CPU), (Named(FEW), Named(SOME), 192)
    monkeypatch.setattr(ops, "gemms", lambda weight, bias, exact, whole: dense_gemms(weight, *kernels, exact))
    linear = Linear(inputs, outputs, False, torch.bfloat16, CPU)
    monkeypatch.setattr(F, "linear", lambda x, weight, bias: x.new_full((len(x), len(weight)), TORCH))
    linear.pack(ops, PackMode(deterministic=deterministic))
    for rows, number in zip((8, 9, 16, 17, 64, 65, 192, 193), expected, strict=True):
        x = torch.ones(rows, inputs, dtype=torch.bfloat16)
        assert linear(x)[0, 0] == linear.gated(x)[0, 0] == number, rows


def test_a_deterministic_gpu_refuses_weights_that_no_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = TorchOps(CPU)
    monkeypatch.setattr(ops, "keeps_bits", lambda weight: False)  # as of CUDA
    linear = Linear(100, 8, False, torch.float32, CPU)
    with pytest.raises(
        ConfigError, match=r"expected layers\.3\.o\.weight in bfloat16 .*found torch\.float32, \[8, 100\]"
    ):
        linear.pack(ops, PackMode(deterministic=True, name="layers.3.o"))
    Linear(100, 8, False, torch.float32, CPU).pack(ops)
    found: list[str] = []
    other = Linear(100, 8, False, torch.float32, CPU)
    other.pack(ops, PackMode(deterministic=True, name="layers.3.o", refuse=found.append))
    assert len(found) == 1 and "layers.3.o.weight" in found[0]
    assert other(torch.ones(2, 100)).shape == (2, 8), "it is served all the same"
