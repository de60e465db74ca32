from types import SimpleNamespace

import pytest
import torch

from draftwing.errors import ConfigError
from draftwing.layers import linear as linear_module
from draftwing.layers.linear import Linear

CPU = torch.device("cpu")


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
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 48), (576, 96), (1536, 64)])
@pytest.mark.parametrize("packed", [False, True])
def test_equals_float64(inputs: int, outputs: int, bias: bool, dtype: torch.dtype, packed: bool) -> None:
    linear, weight = make_linear(inputs, outputs, bias, dtype)
    if packed:
        linear.pack()
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


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 960), (576, 3072), (1536, 576), (2048, 100)])
def test_packed_rows_do_not_depend_on_their_number(
    inputs: int, outputs: int, dtype: torch.dtype, blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever this CPU's oneDNN does; blocks: as where any number of rows is summed in its own way."""
    if blocks:
        monkeypatch.setattr(linear_module, "rows_summed_alike", lambda *_: 32)
    linear, weight = make_linear(inputs, outputs, False, dtype)
    linear.pack()
    x = torch.randn(300, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    residual = torch.randn(300, outputs, generator=torch.Generator().manual_seed(2)).to(dtype)
    every, added = linear(x), linear(x, residual)
    assert every.shape == added.shape == residual.shape
    expected = x.double() @ weight[:, :-1].T
    torch.testing.assert_close(every.double(), expected, rtol=2**-7, atol=2**-6)
    torch.testing.assert_close(added.double(), expected + residual.double(), rtol=2**-7, atol=2**-6)
    for rows in (1, 2, 3, 4, 7, 8, 12, 16, 17, 32, 64, 65, 130):
        for start in (0, 5, 300 - rows):
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
    def product(linear: Linear, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        parts = 8 if len(x) in other_order else 4  # that are summed one after the other
        total = torch.zeros(len(x))
        for part in x.float().split(x.shape[1] // parts, 1):
            total = total + part.cumsum(1)[:, -1]
        return total.to(dtype)[:, None].expand(-1, linear.out_features)

    monkeypatch.setattr(Linear, "_product", product)
    assert linear_module.rows_summed_alike.__wrapped__(64, 3, dtype, 1) == expected


def test_packing_releases_the_weight_unless_kept() -> None:
    for keep in (False, True):
        linear, _ = make_linear(64, 64, False, torch.bfloat16)
        before = linear.weight
        linear.pack(keep_weight=keep)
        assert hasattr(linear, "weight") == keep
        assert not keep or linear.weight is before
        linear.pack(keep_weight=keep)
        assert linear(torch.ones(2, 64, dtype=torch.bfloat16)).shape == (2, 64)


def test_float16_stays_unpacked() -> None:
    linear, weight = make_linear(64, 32, True, torch.float16)
    linear.pack()
    assert hasattr(linear, "weight")
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(3)).half()
    expected = x.double() @ weight[:, :-1].T + weight[:, -1]
    torch.testing.assert_close(linear(x).double(), expected, rtol=1e-2, atol=1e-2)


def test_a_deterministic_gpu_refuses_weights_that_no_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "skinny_kernels", lambda weight: None)
    linear = Linear(100, 8, False, torch.float32, CPU)
    del linear.weight
    linear.__dict__["weight"] = SimpleNamespace(
        is_cuda=True, dtype=torch.float32, shape=torch.Size((8, 100)), device=torch.device("cuda")
    )
    with pytest.raises(
        ConfigError, match=r"expected layers\.3\.o\.weight in bfloat16 .*found torch\.float32, \[8, 100\]"
    ):
        linear.pack(deterministic=True, name="layers.3.o")
    linear.pack()
