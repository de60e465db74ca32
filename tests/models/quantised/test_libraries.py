"""What the libraries that write such checkpoints write is what we read; each is skipped where it is not installed."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_quantised as tiny
import torch
from reference.learnable import write_target
from safetensors.torch import load_file, save_file
from tiny_gguf import causal
from torch import Tensor

from draftwing.models.decoder import DecoderModel
from draftwing.models.loader import load_model
from draftwing.ops.attention import FunctionAttend

GROUPS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
SCHEMES = {
    "W4A16": GROUPS,
    "W4A16, zeros": {**GROUPS, "symmetric": False},
    "W4A16, rows": {**GROUPS, "strategy": "channel", "group_size": None},
    "W8A16": {**GROUPS, "num_bits": 8},
    "fp8, rows": {**FLOAT8, "strategy": "channel"},
    "fp8, matrices": {**FLOAT8, "strategy": "tensor"},
    "fp8, blocks": {**FLOAT8, "strategy": "block", "block_structure": [16, 16]},
}


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_packed_by_compressed_tensors(bits: int, symmetric: bool) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32  # type: ignore[import-not-found]

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


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_model_saved_by_compressed_tensors(tmp_path: Path, scheme: str) -> None:
    """Compressed, saved and loaded here, vs what the library makes of it again; in float32."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor  # type: ignore[import-not-found]
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config  # type: ignore
    from transformers import AutoModelForCausalLM

    plain, written, wide = (tmp_path / name for name in ("plain", "written", "wide"))
    model = AutoModelForCausalLM.from_pretrained(write_target(plain), dtype=torch.float32)
    group = {"targets": ["Linear"], "weights": SCHEMES[scheme]}
    config = QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            calibrate(module)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(written)
    compressor.update_config(str(written))
    compressor.decompress_model(model)
    save_plain(model, plain, wide)

    models = [load_model(path, torch.float32, "cpu") for path in (written, wide)]
    found, expected = (logits(each) for each in models)
    assert any(name.endswith("weight_scale") for name in load_file(written / "model.safetensors"))
    assert (found - expected).norm() <= 1e-3 * expected.norm()


def calibrate(module: torch.nn.Module) -> None:
    """Sets scales and zeros of a module that compressed-tensors is to compress, by the ends of each group."""
    from compressed_tensors.quantization.utils import calculate_qparams  # type: ignore[import-not-found]

    args: Any = module.quantization_scheme.weights  # type: ignore[union-attr]
    weight: Tensor = module.weight.detach()  # type: ignore[operator,union-attr]
    rows, columns = weight.shape
    tall, wide = {
        "tensor": (rows, columns), "channel": (1, columns), "group": (1, args.group_size),
        "block": tuple(args.block_structure or (1, 1)),
    }[str(getattr(args.strategy, "value", args.strategy))]  # fmt: skip
    cut = weight.unflatten(1, (-1, wide)).unflatten(0, (-1, tall))
    scale, zero = calculate_qparams(cut.amin((1, 3)), cut.amax((1, 3)), args)
    module.weight_scale.data = scale.view(module.weight_scale.shape)  # type: ignore[operator,union-attr]
    if getattr(module, "weight_zero_point", None) is not None:
        module.weight_zero_point.data = zero.view(module.weight_zero_point.shape)  # type: ignore[operator,union-attr]


def save_plain(model: torch.nn.Module, config: Path, folder: Path) -> None:
    """The model's weights, and the config of a checkpoint that is not quantised."""
    folder.mkdir()
    for file in config.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    state = {name: value.float().contiguous() for name, value in model.state_dict().items() if "scale" not in name}
    save_file({name: value for name, value in state.items() if "zero_point" not in name}, folder / "model.safetensors")


@torch.inference_mode()
def logits(model: DecoderModel) -> Tensor:
    ids = torch.tensor([3, 1, 7, 7, 30, 2, 39, 0, 12])
    return model.logits(model(ids, torch.arange(9), FunctionAttend(causal))[0])


def with_scales(bits: int, wide: int, rows: int = 32, columns: int = 64) -> tuple[torch.nn.Linear, Tensor, Tensor]:
    """A layer whose weights are whole steps, its scales and its zeros, [rows, groups]."""
    made = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (rows, columns), generator=made)
    scales = (torch.rand(rows, columns // wide, generator=made) / 16 + 0.01).half().float()
    zeros = torch.randint(1, 2**bits - 1, scales.shape, generator=made)
    layer = torch.nn.Linear(columns, rows, bias=False)
    layer.weight.data = (codes - zeros.repeat_interleave(wide, 1)) * scales.repeat_interleave(wide, 1)
    return layer, scales, zeros


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "order"), [(4, False), (4, True), (8, False), (2, False), (3, False)])
def test_packed_by_gptqmodel(bits: int, order: bool) -> None:
    with contextlib.suppress(ImportError), quiet():
        from gptqmodel.nn_modules.qlinear.torch import TorchLinear  # type: ignore[import-not-found]
    if "TorchLinear" not in locals():
        pytest.skip("could not import gptqmodel")
    layer, scales, zeros = with_scales(bits, 32)
    group_of = torch.arange(64, dtype=torch.int32) // 32
    if order:
        shuffle = torch.randperm(64, generator=torch.Generator().manual_seed(1))
        group_of, layer.weight.data = group_of[shuffle], layer.weight.data[:, shuffle]
    expected = layer.weight.detach().clone()
    packed = TorchLinear(bits, 32, False, order, 64, 32)
    packed.pack(layer, scales, zeros, group_of)
    tensors = {name: packed.get_buffer(name) for name in ("qweight", "qzeros", "scales", "g_idx")}
    config = {
        "quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": order, "sym": False,
        "checkpoint_format": "gptq_v2",
    }  # fmt: skip
    found = tiny.read(config, tensors).dense(torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@contextlib.contextmanager
def quiet() -> Any:
    """Without what a library says when it is imported."""
    logging.disable()
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.slow
def test_packed_by_autoawq() -> None:
    gemm = pytest.importorskip("awq.modules.linear.gemm", exc_type=ImportError)
    layer, scales, zeros = with_scales(4, 32)
    packed = gemm.WQLinear_GEMM.from_linear(layer, 4, 32, scales=scales.t().contiguous(), zeros=zeros.t().contiguous())
    tensors = {name: packed.get_buffer(name) for name in ("qweight", "qzeros", "scales")}
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    found = tiny.read(config, tensors).dense(torch.float32)
    torch.testing.assert_close(found, layer.weight.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("powers", [False, True])
def test_fp8_blocks_by_transformers(powers: bool) -> None:
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    settings = FineGrainedFP8Config(weight_block_size=(16, 32), scale_fmt="ue8m0" if powers else "float")
    weight = torch.from_numpy(tiny.matrix(48, 96)).float()
    written = Fp8Quantize(SimpleNamespace(quantization_config=settings)).convert({"weight": weight})
    config = settings.to_dict() | {"quant_method": "fp8", "weight_block_size": [16, 32]}
    found = tiny.read(config, written).dense(torch.float32)
    scales = written["weight_scale_inv"].float().repeat_interleave(16, 0).repeat_interleave(32, 1)
    assert torch.equal(found, written["weight"].float() * scales)
    torch.testing.assert_close(found, weight, rtol=0.07, atol=2e-3)
