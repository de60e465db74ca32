"""Every format gives the matrix that was written, and what does not fit together is said by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_quantised as tiny
import torch
from reference.learnable import write_target
from safetensors.torch import load_file, save_file
from tiny_quantised import MODULE, matrix, read, settings
from torch import Tensor

from draftwing.errors import CheckpointError
from draftwing.models.loader import load_model
from draftwing.models.quantised.read import KVScales, assembled


@pytest.mark.parametrize("name", tiny.FORMATS)
def test_it_is_the_matrix_that_was_written(name: str) -> None:
    config, write = tiny.FORMATS[name]
    written = write(matrix(48, 96))
    found = read(config, written.tensors)
    assert found.codes.shape == (48, 96) and found.codes.device.type == "cpu"
    # Scales times codes have at most 11 + 8 bits: float32 holds them exactly, but for float32 scales.
    np.testing.assert_allclose(found.dense(torch.float32).numpy(), written.exact, rtol=2e-7, atol=0)
    assert torch.equal(found.dense(torch.bfloat16), found.dense(torch.float32).bfloat16())
    assert np.abs(written.exact - matrix(48, 96)).max() < 0.2  # and not of anything else
    backwards = read(config, dict(reversed(written.tensors.items())))
    assert torch.equal(backwards.codes.float(), found.codes.float())


def test_three_bits_run_over_the_ends_of_words() -> None:
    config = {**tiny.GPTQ, "bits": 3, "sym": False, "checkpoint_format": "gptq_v2"}
    written = tiny.gptq(bits=3, symmetric=False, version=2)(matrix(32, 96))
    np.testing.assert_array_equal(read(config, written.tensors).dense(torch.float32).numpy(), written.exact)


@pytest.mark.parametrize("shape", [(40, 80), (33, 64), (9, 40)])
@pytest.mark.parametrize(
    "name", ["fp8 block", "compressed fp8 block", "compressed int4 zeros", "compressed fp8 channel"]
)
def test_the_last_groups_may_be_smaller(name: str, shape: tuple[int, int]) -> None:
    config, write = tiny.FORMATS[name]
    written = write(matrix(*shape))
    found = read(config, written.tensors).dense(torch.float32).numpy()
    np.testing.assert_allclose(found, written.exact, rtol=2e-7, atol=0)


def test_scales_in_powers_of_two() -> None:
    config, _ = tiny.FORMATS["fp8 block"]
    written = tiny.float8(16, 32, "weight_scale_inv", torch.float8_e8m0fnu)(matrix(32, 64))
    found = read({**config, "scale_fmt": "ue8m0"}, written.tensors)
    np.testing.assert_array_equal(found.dense(torch.float32).numpy(), written.exact)


def test_many_rows_are_dequantised_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    config, write = tiny.FORMATS["fp8 block"]
    found = read(config, write(matrix(50, 64)).tensors)
    whole = found.dense(torch.float32)
    monkeypatch.setattr("draftwing.ops.gemm.stored._SLICE", 64 * 7)
    assert torch.equal(found.dense(torch.float32), whole)


@pytest.mark.parametrize("powers", [False, True])
def test_fp8_blocks_that_transformers_writes(powers: bool) -> None:
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    settings = FineGrainedFP8Config(weight_block_size=(16, 32), scale_fmt="ue8m0" if powers else "float")
    weight = torch.from_numpy(matrix(48, 96)).float()
    written = Fp8Quantize(SimpleNamespace(quantization_config=settings)).convert({"weight": weight})
    config = settings.to_dict() | {"quant_method": "fp8", "weight_block_size": [16, 32]}
    found = read(config, written).dense(torch.float32)
    scales = written["weight_scale_inv"].float().repeat_interleave(16, 0).repeat_interleave(32, 1)
    assert torch.equal(found, written["weight"].float() * scales)
    torch.testing.assert_close(found, weight, rtol=0.07, atol=2e-3)


@pytest.mark.parametrize(("shape", "nested"), [((48, 96), True), ((33, 65), True), ((48, 96), False)])
def test_blocks_of_bitsandbytes_are_dequantised(shape: tuple[int, int], nested: bool) -> None:
    """Also where they go over the ends of rows, and the last is shorter."""
    config = {**tiny.BNB, "bnb_4bit_use_double_quant": nested}
    written = tiny.bnb(nested=nested)(matrix(*shape))
    named = [(f"{MODULE}.{suffix}", tensor) for suffix, tensor in written.tensors.items()]
    ((name, found),) = assembled(settings(config), named)
    assert name == f"{MODULE}.weight" and isinstance(found, Tensor)
    np.testing.assert_allclose(found.numpy(), written.exact, rtol=1e-6, atol=1e-9)
    assert np.abs(written.exact - matrix(*shape)).max() < 0.1
    for missing, _ in named:
        rest = [(name, tensor) for name, tensor in named if name != missing]
        with pytest.raises(CheckpointError, match=f"missing from the checkpoint: expected {missing}"):
            list(assembled(settings(config), rest))
    refused = 0
    for damaged_name, tensor in named:
        for other in damaged(tensor):
            try:
                list(assembled(settings(config), [(name, other if name == damaged_name else t) for name, t in named]))
            except CheckpointError as error:
                refused += 1
                assert MODULE in str(error) and "expected" in str(error)
    assert refused > 20


# ---- what is damaged -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny.FORMATS)
def test_what_is_missing_is_named(name: str) -> None:
    config, write = tiny.FORMATS[name]
    tensors = write(matrix(16, 64)).tensors
    for suffix in tensors:
        if suffix == "g_idx" and not config.get("desc_act"):
            continue
        rest = {other: tensor for other, tensor in tensors.items() if other != suffix}
        with pytest.raises(CheckpointError, match=rf"missing from the checkpoint: expected {MODULE}\.{suffix}\b"):
            list(assembled(settings(config), ((f"{MODULE}.{other}", tensor) for other, tensor in rest.items())))


def damaged(tensor: Tensor) -> Iterator[Tensor]:
    yield tensor.flatten()[:0]
    yield tensor.flatten().repeat(3)
    yield torch.cat([tensor, tensor]) if tensor.dim() else tensor.repeat(2)
    yield tensor[:-1] if tensor.dim() else tensor.repeat(2)
    if tensor.dim() == 2:
        yield tensor[:, :-1]
        yield tensor[None]
        if tensor.shape[0] != tensor.shape[1] and 1 not in tensor.shape:
            yield tensor.t()
    yield tensor.to(torch.int16)
    yield torch.full_like(tensor, -1) if not tensor.is_floating_point() else torch.full_like(tensor.float(), torch.nan)
    yield torch.full_like(tensor.float(), torch.inf)


@pytest.mark.parametrize("name", tiny.FORMATS)
def test_what_is_damaged_is_named_or_another_matrix(name: str) -> None:
    """Never another error. What comes out whole has the shape of its codes."""
    config, write = tiny.FORMATS[name]
    tensors = {suffix: tensor.contiguous() for suffix, tensor in write(matrix(16, 64)).tensors.items()}
    refused = 0
    for suffix, tensor in tensors.items():
        for other in damaged(tensor):
            try:
                found = read(config, tensors | {suffix: other.contiguous()})
                assert found.dense(torch.float32).shape == found.codes.shape
            except CheckpointError as error:
                refused += 1
                assert f"{MODULE}." in str(error) and "expected" in str(error), error
    assert refused > 4 * len(tensors)


@pytest.mark.parametrize(
    ("name", "suffix", "change", "message"),
    [
        ("awq", "scales", lambda t: t[:-1], r"scales: expected shape \[2, 16\] in floating point, found"),
        ("awq", "qzeros", lambda t: t.long(), r"qzeros: expected shape \[2, 2\] in int32, found \[2, 2\] in int64"),
        ("gptq", "qzeros", lambda t: t + 1, r"qzeros: expected 7 or 8 everywhere, for quantization_config.sym is true"),
        ("gptq", "g_idx", lambda t: t.flip(0), r"g_idx: expected groups of 32 columns in order"),
        ("gptq order", "g_idx", lambda t: t + 1, r"g_idx: expected groups from 0 to 3, found 1 to 4"),
        ("compressed int4", "weight_shape", lambda t: t * 2, r"weight_shape: expected the rows and columns of"),
        ("fp8 block", "weight_scale_inv", lambda t: t / 0, r"weight_scale_inv: expected finite values"),
        ("fp8 block", "weight", lambda t: t.to(torch.float8_e5m2), r"weight: expected a matrix in float8_e4m3fn"),
    ],
)  # fmt: skip
def test_messages(name: str, suffix: str, change: Any, message: str) -> None:
    config, write = tiny.FORMATS[name]
    tensors = write(matrix(16, 64)).tensors
    with pytest.raises(CheckpointError, match=message):
        read(config, tensors | {suffix: change(tensors[suffix])})


def test_what_the_config_does_not_ask_for_is_refused() -> None:
    _, write = tiny.FORMATS["fp8 block"]
    written = write(matrix(16, 64)).tensors
    with pytest.raises(CheckpointError, match=r"weight_scale: expected shape .* found \[1, 2\]"):
        read(tiny.FORMATS["fp8 tensor"][0], written)
    with pytest.raises(CheckpointError, match=r"weight_scale_2: expected only weight, weight_scale there"):
        read(tiny.FORMATS["fp8 tensor"][0], {"weight_scale_2": torch.ones(1), **written})
    with pytest.raises(
        CheckpointError, match=r"expected a matrix that is not quantised, as quantization_config has it"
    ):
        read({**tiny.FORMATS["fp8 block"][0], "modules_to_not_convert": ["down_proj"]}, written)
    with pytest.raises(CheckpointError, match="twice"):
        list(assembled(settings(tiny.FORMATS["fp8 block"][0]), [(f"{MODULE}.weight", written["weight"])] * 2))


@pytest.mark.parametrize("given", ["weight_scale", "weight_scale_inv"])
def test_scales_of_whole_matrices_have_two_names(given: str) -> None:
    """As Ministral 3 in fp8 has them, by transformers, and as others write them."""
    config = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    tensors, exact = tiny.float8(0, 0, given)(matrix(16, 64))
    found = read(config, {**tensors, given: tensors[given].reshape(()), "activation_scale": torch.tensor(0.5)})
    torch.testing.assert_close(found.dense(torch.float32), torch.from_numpy(exact).float())


def test_what_is_not_quantised_passes_and_scales_of_activations_are_left_out() -> None:
    config, write = tiny.FORMATS["fp8 block"]
    dense = torch.ones(3, 3)
    others = {"lm_head.weight": dense, "model.norm.weight": dense[0], f"{MODULE}.bias": dense[0]}
    left_out = {f"{MODULE}.input_scale": dense[0], "model.layers.0.self_attn.k_scale": dense[0]}
    matrices = {f"{MODULE}.{name}": tensor for name, tensor in write(matrix(16, 64)).tensors.items()}
    found = dict(assembled(settings(config), (others | left_out | matrices).items()))
    assert set(found) == {*others, f"{MODULE}.weight"}
    assert list(assembled(None, left_out.items())) == list(left_out.items())


def test_values_of_8_bits_without_a_config_are_refused(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "m")
    file = folder / "model.safetensors"
    save_file(load_file(file) | {f"{MODULE}.weight": torch.zeros(32, 48).to(torch.float8_e4m3fn)}, file)
    with pytest.raises(CheckpointError, match=rf"{MODULE}.weight: expected floating point values of 16 bits or more"):
        load_model(folder, torch.float32, "cpu")


def scale(value: float) -> torch.Tensor:
    return torch.tensor([value])


def test_names_of_writers() -> None:
    scales, at = KVScales(), "model.layers.{}.self_attn."
    tensors = {
        at.format(0) + "k_scale": scale(0.5), at.format(0) + "v_scale": torch.tensor(0.25, dtype=torch.bfloat16),
        at.format(1) + "kv_scale": scale(2.0), at.format(2) + "k_proj.k_scale": scale(3.0),
        at.format(2) + "v_proj.v_scale": scale(4.0), at.format(3) + "k_proj.output_scale": scale(5.0),
        at.format(3) + "v_proj.output_scale": scale(6.0), at.format(5) + "attn.v_scale": scale(7.0),
        "model.layers.6.mixer.k_proj.k_scale": scale(8.0), at.format(6) + "qkv_proj.v_scale": scale(9.0),
    }  # fmt: skip
    others = {
        at.format(0) + "q_proj.output_scale": scale(9.0), at.format(0) + "k_proj.weight": scale(9.0),
        at.format(0) + "k_proj.v_scale": scale(9.0), "model.norm.weight": scale(9.0),
    }  # fmt: skip
    assert not scales
    assert dict(scales.taken({**tensors, **others}.items())) == others
    assert scales
    found = [(0.5, 0.25), (2.0, 2.0), (3.0, 4.0), (5.0, 6.0), (1.0, 1.0), (1.0, 7.0), (8.0, 9.0)]
    assert scales.of(range(7)) == found
    assert KVScales().of(range(2)) == [(1.0, 1.0)] * 2


@pytest.mark.parametrize(
    ("value", "found"), [(scale(0.0), "found 0"), (scale(-1.0), "-1"), (torch.ones(8), r"shape \[8\]"),
                         (scale(torch.inf), "inf"), (scale(torch.nan), "nan")]
)  # fmt: skip
def test_what_is_no_scale(value: torch.Tensor, found: str) -> None:
    """It is an error only for whoever wants it."""
    scales = KVScales()
    assert not list(scales.taken([("model.layers.0.self_attn.k_scale", value)]))
    with pytest.raises(CheckpointError, match=rf"layers.0.self_attn.k_scale: expected one positive number.*{found}"):
        scales.of(range(1))
