"""Matrices as the quantisers of checkpoints store them, bit by bit, and what they are exactly."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftwing.models.fields import Fields
from draftwing.models.quantised.config import METHODS, Quantization
from draftwing.models.quantised.read import assembled
from draftwing.ops.gemm.stored import QuantizedRows

Array = npt.NDArray[Any]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column in each nibble of a word, from the lowest


MODULE = "model.layers.0.mlp.down_proj"


class Written(NamedTuple):
    tensors: dict[str, Tensor]  # by suffix
    exact: Array  # [rows, columns] float64


Writer = Callable[[Array], Written]


class Coded(NamedTuple):
    codes: Array  # [rows, columns], from 0
    scales: Array  # [rows, groups] float64, of the stored dtype
    zeros: Array  # [rows, groups], from 0
    exact: Array


def coded(weight: Array, bits: int, wide: int, symmetric: bool, half: bool = True, order: Array | None = None) -> Coded:
    """order [columns]: the group of each column.  half: scales in float16, else in bfloat16."""
    rows, columns = weight.shape
    group_of = np.arange(columns) // wide if order is None else order
    groups, top = -(-columns // wide), 2**bits - 1
    out = Coded(
        np.zeros((rows, columns), int), np.zeros((rows, groups)), np.zeros((rows, groups), int), np.zeros(weight.shape)
    )
    for group in range(groups):
        mine = group_of == group
        values = weight[:, mine].astype(np.float64)  # [rows, wide]
        low, high = np.minimum(values.min(1), 0), np.maximum(values.max(1), 0)
        scale = np.maximum(abs(low), high) * 2 / top if symmetric else (high - low) / top
        scale = torch.from_numpy(scale).float().to(torch.float16 if half else torch.bfloat16).double().numpy()
        scale = np.where(scale == 0, 1.0, scale)
        zero = np.full(rows, 2 ** (bits - 1)) if symmetric else np.clip(np.round(-low / scale), 0, top).astype(int)
        codes = np.clip(np.round(values / scale[:, None]) + zero[:, None], 0, top).astype(int)
        out.codes[:, mine], out.scales[:, group], out.zeros[:, group] = codes, scale, zero
        out.exact[:, mine] = (codes - zero[:, None]) * scale[:, None]
    return out


def words(codes: Array, bits: int) -> Tensor:
    """codes [n, count] from 0 -> [n, ceil(count * bits / 32)] int32, the first code lowest."""
    packed = []
    for row in codes.tolist():
        number = sum(code << bits * i for i, code in enumerate(row))
        packed.append([number >> 32 * i & 0xFFFFFFFF for i in range(-(-len(row) * bits // 32))])
    return torch.from_numpy(np.array(packed, np.uint32).view(np.int32))


def awq_words(codes: Array) -> Tensor:
    """codes [n, rows], n along the columns -> [n, rows / 8] int32"""
    order = [8 * word + place for word in range(codes.shape[1] // 8) for place in AWQ_ORDER]
    return words(codes[:, order], 4)


def awq(wide: int = 32) -> Writer:
    def write(weight: Array) -> Written:
        found = coded(weight, 4, wide, symmetric=False)
        tensors = {
            "qweight": awq_words(found.codes.T), "qzeros": awq_words(found.zeros.T),
            "scales": torch.from_numpy(found.scales.T.copy()).half(),
        }  # fmt: skip
        return Written(tensors, found.exact)

    return write


def gptq(
    bits: int = 4, wide: int = 32, symmetric: bool = True, version: int = 1, shuffled: bool = False, g_idx: bool = True
) -> Writer:
    def write(weight: Array) -> Written:
        columns = weight.shape[1]
        own_wide = columns if wide == -1 else wide
        order = np.arange(columns) // own_wide
        if shuffled:
            order = order[np.random.default_rng(5).permutation(columns)]
        found = coded(weight, bits, own_wide, symmetric, order=order)
        tensors = {
            "qweight": words_down(found.codes, bits),
            "qzeros": words(found.zeros.T - (1 if version == 1 else 0), bits),
            "scales": torch.from_numpy(found.scales.T.copy()).half(),
        }
        if g_idx:
            tensors["g_idx"] = torch.from_numpy(order.astype(np.int32))
        return Written(tensors, found.exact)

    return write


def words_down(codes: Array, bits: int) -> Tensor:
    """codes [rows, columns] -> [columns * bits / 32, rows] int32: words run along the columns"""
    return words(codes, bits).t().contiguous()


def packed(bits: int = 4, wide: int = 32, symmetric: bool = True, shuffled: bool = False) -> Writer:
    """compressed-tensors, pack-quantized; wide -1: by channel."""

    def write(weight: Array) -> Written:
        rows, columns = weight.shape
        own_wide = columns if wide == -1 else wide
        order = np.arange(columns) // own_wide
        if shuffled:
            order = order[np.random.default_rng(5).permutation(columns)]
        found = coded(weight, bits, own_wide, symmetric, half=False, order=order)
        tensors = {
            "weight_packed": words(found.codes, bits), "weight_shape": torch.tensor([rows, columns]),
            "weight_scale": torch.from_numpy(found.scales).to(torch.bfloat16),
        }  # fmt: skip
        if not symmetric:
            tensors["weight_zero_point"] = words_down(found.zeros.T, bits)
        if shuffled:
            tensors["weight_g_idx"] = torch.from_numpy(order.astype(np.int32))
        return Written(tensors, found.exact)

    return write


def float8(tall: int, wide: int, scale: str = "weight_scale", scale_dtype: torch.dtype = torch.float32) -> Writer:
    """tall, wide: of a block, 0 for all of it."""

    def write(weight: Array) -> Written:
        rows, columns = weight.shape
        high, broad = tall or rows, wide or columns
        scales, codes = np.zeros((-(-rows // high), -(-columns // broad))), np.zeros(weight.shape)
        exact = np.zeros(weight.shape)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                place = np.s_[i * high : (i + 1) * high, j * broad : (j + 1) * broad]
                scales[i, j] = float(torch.tensor(np.abs(weight[place]).max() / 448).to(scale_dtype)) or 1.0
                codes[place] = torch.tensor(weight[place] / scales[i, j]).to(torch.float8_e4m3fn).double().numpy()
                exact[place] = codes[place] * scales[i, j]
        stored = torch.from_numpy(scales).to(scale_dtype)
        return Written(
            {"weight": torch.from_numpy(codes).to(torch.float8_e4m3fn), scale: stored[0] if not tall else stored}, exact
        )

    return write


def int8(wide: int = -1) -> Writer:
    def write(weight: Array) -> Written:
        found = coded(weight, 8, weight.shape[1] if wide == -1 else wide, symmetric=True, half=False)
        codes = torch.from_numpy(found.codes - 128).to(torch.int8)
        return Written(
            {"weight": codes, "weight_scale": torch.from_numpy(found.scales).to(torch.bfloat16)}, found.exact
        )

    return write


def nvfp4(divided: bool = False) -> Writer:
    """ModelOpt's, or compressed-tensors', whose scales are divided by theirs."""

    def write(weight: Array) -> Written:
        rows, columns = weight.shape
        values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        groups = weight.reshape(rows, -1, 16)
        largest = np.abs(groups).max(2)  # [rows, groups]
        whole = np.float32(448 * 6 / largest.max() if divided else largest.max() / 6 / 448)
        wanted = largest / 6 * whole if divided else largest / 6 / whole
        stored = torch.from_numpy(wanted).float().to(torch.float8_e4m3fn)
        scales = stored.double().numpy() / whole if divided else stored.double().numpy() * whole
        scales = np.where(scales == 0, 1e-9, scales)
        codes = np.abs(np.abs(groups / scales[..., None])[..., None] - values).argmin(-1)
        exact = (values[codes] * np.sign(groups) * scales[..., None]).reshape(rows, columns)
        nibbles = (codes + 8 * (groups < 0)).reshape(rows, columns).astype(np.uint8)
        packed = torch.from_numpy(nibbles[:, ::2] | nibbles[:, 1::2] << 4)
        if divided:
            names = "weight_packed", "weight_scale", "weight_global_scale"
        else:
            names = "weight", "weight_scale", "weight_scale_2"
        return Written(dict(zip(names, (packed, stored, torch.tensor([whole])), strict=True)), exact)

    return write


def bnb(kind: str = "nf4", nested: bool = True, block: int = 64) -> Writer:
    """bitsandbytes: values of a map, blocks of which have a scale, and 256 of these one of their own."""

    def write(weight: Array) -> Written:
        values = np.sort(np.random.default_rng(3).uniform(-1, 1, 16)).astype(np.float32)
        values[[0, 7, 15]] = -1, 0, 1
        flat = weight.flatten()
        blocks = np.pad(flat, (0, -len(flat) % block)).reshape(-1, block)
        scales = np.abs(blocks).max(1).astype(np.float32)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "float32", "shape": weight.shape}
        tensors = {"weight.quant_map": torch.from_numpy(values), "weight.absmax": torch.from_numpy(scales)}
        if nested:
            offset, mapped = float(scales.mean()), np.linspace(-1, 1, 256).astype(np.float32)
            many = np.pad(scales - offset, (0, -len(scales) % 256)).reshape(-1, 256)
            wide = np.maximum(np.abs(many).max(1), 1e-9).astype(np.float32)
            codes = np.abs((many / wide[:, None])[..., None] - mapped).argmin(-1)
            scales = ((mapped[codes] * wide[:, None]).flatten() + np.float32(offset))[: len(scales)]
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            tensors["weight.absmax"] = torch.from_numpy(codes.flatten()[: len(scales)].astype(np.uint8))
            tensors |= {"weight.nested_quant_map": torch.from_numpy(mapped)}
            tensors |= {"weight.nested_absmax": torch.from_numpy(wide)}
        chosen = np.abs((blocks / np.where(scales == 0, 1, scales)[:, None])[..., None] - values).argmin(-1)
        exact = (values[chosen] * scales[:, None]).flatten()[: len(flat)].reshape(weight.shape)
        codes = np.pad(chosen.flatten()[: len(flat)], (0, len(flat) % 2)).astype(np.uint8)
        packed = torch.from_numpy(codes[::2] << 4 | codes[1::2])[:, None]
        said = torch.from_numpy(np.frombuffer(json.dumps(state).encode(), np.uint8).copy())
        named = {"weight": packed, **tensors, f"weight.quant_state.bitsandbytes__{kind}": said}
        return Written(named, exact.astype(np.float64))

    return write


BNB = {
    "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True, "bnb_4bit_quant_storage": "uint8", "llm_int8_skip_modules": None,
}  # fmt: skip


def compressed(weights: dict[str, Any], form: str, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "quantization_status": "compressed", **more,
    }  # fmt: skip


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
FP4 = {**FP8, "num_bits": 4, "strategy": "tensor_group", "group_size": 16}
MODELOPT = {"quant_method": "modelopt", "producer": {"name": "modelopt"}, "ignore": ["lm_head"]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}

# name -> (quantization_config, how a matrix is written)
FORMATS: dict[str, tuple[dict[str, Any], Writer]] = {
    "fp8 block": (
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 32]},
        float8(16, 32, "weight_scale_inv"),
    ),
    "fp8 tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, float8(0, 0)),
    "compressed fp8 tensor": (compressed({**FP8, "strategy": "tensor"}, "float-quantized"), float8(0, 0)),
    "compressed fp8 channel": (
        compressed({**FP8, "strategy": "channel"}, "float-quantized"),
        float8(1, 0, scale_dtype=torch.bfloat16),
    ),
    "compressed fp8 block": (
        compressed({**FP8, "strategy": "block", "block_structure": [16, 32]}, "float-quantized"),
        float8(16, 32),
    ),
    "compressed int4": (compressed(INT4, "pack-quantized"), packed()),
    "compressed int4 zeros": (compressed({**INT4, "symmetric": False}, "pack-quantized"), packed(symmetric=False)),
    "compressed int4 channel": (
        compressed({**INT4, "strategy": "channel", "group_size": None}, "pack-quantized"),
        packed(wide=-1),
    ),
    "compressed int4 weight order": (compressed({**INT4, "actorder": "weight"}, "pack-quantized"), packed()),
    "compressed int4 group order": (
        compressed({**INT4, "group_size": 16, "actorder": "group"}, "pack-quantized"),
        packed(wide=16, shuffled=True),
    ),
    "compressed int8 packed": (
        compressed({**INT4, "num_bits": 8}, "pack-quantized"),
        packed(bits=8),
    ),
    "compressed int8 plain": (
        compressed({**INT4, "num_bits": 8, "strategy": "channel", "group_size": None}, "int-quantized"),
        int8(),
    ),
    "compressed nvfp4": (compressed(FP4, "nvfp4-pack-quantized"), nvfp4(divided=True)),
    "modelopt nvfp4": ({**MODELOPT, "quant_algo": "NVFP4", "group_size": 16}, nvfp4()),
    "modelopt fp8": ({**MODELOPT, "quant_algo": "FP8"}, float8(0, 0)),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, float8(1, 0)),
    "quark": (
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel"}}},
        float8(1, 0),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, awq()),
    "awq old keys": ({"quant_method": "awq", "w_bit": 4, "q_group_size": 16, "version": "GEMM"}, awq(16)),
    "gptq": (GPTQ, gptq()),
    "gptq v2": ({**GPTQ, "checkpoint_format": "gptq_v2"}, gptq(version=2)),
    "gptq zeros": ({**GPTQ, "sym": False}, gptq(symmetric=False)),
    "gptq zeros v2": (
        {**GPTQ, "sym": False, "checkpoint_format": "gptq_v2"},
        gptq(symmetric=False, version=2, g_idx=False),
    ),
    "gptq order": ({**GPTQ, "group_size": 16, "desc_act": True}, gptq(wide=16, shuffled=True)),
    "gptq row": ({**GPTQ, "group_size": -1}, gptq(wide=-1)),
    "gptq 8": ({**GPTQ, "bits": 8}, gptq(bits=8)),
    # A zero of 0, which few bits have at times, cannot be stored less 1.
    "gptq 2": (
        {**GPTQ, "bits": 2, "sym": False, "checkpoint_format": "gptq_v2"},
        gptq(bits=2, symmetric=False, version=2),
    ),
}


OTHERS = "w1", "w2", "w3", "query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"  # matrices without `_proj`


def quantise(folder: Path, config: dict[str, Any] | None, writer: Callable[[str], Writer | None]) -> dict[str, Tensor]:
    """Rewrites the matrices of a checkpoint's layers; returns all its tensors with these dequantised, float32.

    config: what is said of it, None: that is there.  writer: of a module; None: it stays as it is.
    """
    file = folder / "model.safetensors"
    stored: dict[str, Tensor] = {}
    exact: dict[str, Tensor] = {}
    for name, value in load_file(file).items():
        module, _, suffix = name.rpartition(".")
        part = module.rpartition(".")[2]  # of experts in Mixtral's names, too
        is_matrix = ("_proj" in part or part in OTHERS) and suffix == "weight" and value.dim() == 2
        write = writer(module) if is_matrix else None
        if write is None:
            stored[name] = exact[name] = value
            continue
        written = write(value.double().numpy())
        stored |= {f"{module}.{suffix}": tensor.contiguous() for suffix, tensor in written.tensors.items()}
        exact[name] = torch.from_numpy(written.exact).float()
    save_file(stored, file)
    if config is not None:
        configure(folder, config)
    return exact


def configure(folder: Path, config: dict[str, Any]) -> None:
    whole = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(whole | {"quantization_config": config}))


def settings(config: dict[str, Any]) -> Quantization:
    fields = Fields({"quantization_config": config}, "config of X").inner("quantization_config")
    return METHODS[config["quant_method"]](fields)


def matrix(rows: int, columns: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((rows, columns)) * 0.05


def read(config: dict[str, Any], tensors: dict[str, Tensor]) -> QuantizedRows:
    """The matrix of `MODULE`, by our reader."""
    named = [(f"{MODULE}.{suffix}", tensor) for suffix, tensor in tensors.items()]
    ((name, value),) = assembled(settings(config), named)
    assert name == f"{MODULE}.weight" and isinstance(value, QuantizedRows)
    return value
