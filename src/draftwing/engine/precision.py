"""Decides in which types an engine computes and stores: target, drafts and KV pool."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import NamedTuple

import torch

from draftwing.config.options import Options
from draftwing.engine.devices.base import Device
from draftwing.errors import ConfigError
from draftwing.layers.linear_ops.base import WeightFormat
from draftwing.layers.linear_ops.blocks import SAFE_KIND, BlockFormat
from draftwing.layers.linear_ops.formats import DENSE
from draftwing.layers.linear_ops.groups import GroupFormat
from draftwing.ops.groups import SCHEMES

logger = logging.getLogger(__name__)
_AS_BLOCKS = {"fp8": "Q8_0", "w4a16": "Q4_0"}  # on a CPU, by the name that they have on a GPU
_OF_HEADS = "int8"  # the scheme of draft heads with a quantised target
OF_LM_HEADS = "w4a16"  # and of a copy of a large lm_head for drafts, by default
# Types of activations that a GPU has kernels for.
_TAKEN = {"fp8": (torch.bfloat16,), "w4a16": (torch.bfloat16, torch.float16), "int8": (torch.bfloat16,)}


class Precision(NamedTuple):
    """Types of one engine."""

    dtype: torch.dtype  # of activations, and of weights that are not quantised
    kv_dtype: torch.dtype  # of the KV pool
    weights: WeightFormat = DENSE  # of language models, the target and one that drafts
    head_weights: WeightFormat = DENSE  # of draft heads, whose errors cost acceptance, never text
    draft_lm_head: str | None = None  # the scheme of a copy of the lm_head for drafts of few rows


def pick_precision(
    options: Options, device: Device, checkpoint: torch.dtype | None, quantised: bool = False
) -> Precision:
    """Returns what `--dtype`, `--quantization` and `--kv-cache-dtype` come to on this device. checkpoint: what the
    weights were saved in, None where it does not say; quantised: as the config says. Raises ConfigError for what the
    device cannot do."""
    kind = _block_kind(options, device)
    if kind is None:
        asked = pick_dtype(options.dtype, device, checkpoint)
        dtype = device.ops.exact_dtype(asked)
        if dtype != asked:
            logger.info(
                "--dtype %s: computed in float32, for in that type a text would depend on the batch", options.dtype
            )
        weights = _unblocked(options, device, dtype)
        heads: WeightFormat = DENSE
        few_bits = quantised or options.quantization in SCHEMES
        if isinstance(weights, GroupFormat) and few_bits and dtype in _TAKEN[_OF_HEADS]:
            # A step of the target is shorter, and drafts must be as well.
            heads = replace(weights, scheme=_OF_HEADS)
        kv_dtype = _kv_dtype(options, device, dtype, dtype)
        return Precision(dtype, kv_dtype, weights, heads, _draft_lm_head(options, device, dtype))
    # Activations are rounded to 8 bits in blocks before each product; what lies between products stays in float32.
    kv_dtype = _kv_dtype(options, device, torch.float32, torch.bfloat16)
    scheme = _draft_lm_head(options, device, torch.float32)
    return Precision(torch.float32, kv_dtype, BlockFormat(kind, device.ops), BlockFormat(SAFE_KIND, device.ops), scheme)


def pick_dtype(name: str, device: Device, checkpoint: torch.dtype | None) -> torch.dtype:
    """Returns the type that `--dtype` names. checkpoint: what the weights were saved in."""
    if name == "auto":
        return device.default_dtype(checkpoint)
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def _block_kind(options: Options, device: Device) -> str | None:
    """Returns the kind of blocks that weights are quantised to, None where they stay as they are."""
    asked, known = options.quantization, device.ops.block_kinds
    if asked == "none" or (asked == "auto" and (options.dtype != "auto" or not known)):
        return None
    if asked == "auto":
        return SAFE_KIND
    if asked in _AS_BLOCKS and device.ops.keeps_groups:
        return None
    kind, option = _AS_BLOCKS.get(asked, asked.upper()), f"--quantization {asked}"
    if kind not in known:
        other = "fp8, w4a16, " if device.ops.keeps_groups else ""
        raise ConfigError(
            f"{option}: weights are multiplied in blocks on a CPU (--device cpu), by our C extension, which is built "
            f"where draftwing is installed with a compiler, unless DRAFTWING_NATIVE=0. Use {other}none or auto"
        )
    if options.dtype not in ("auto", "float32"):
        raise ConfigError(f"{option} computes in float32 between products: leave out --dtype {options.dtype}")
    return kind


def _unblocked(options: Options, device: Device, dtype: torch.dtype) -> WeightFormat:
    """Returns the format of weights that do not become blocks."""
    if options.quantization == "none" or not device.ops.keeps_groups:
        return DENSE
    scheme = options.quantization if options.quantization in SCHEMES else None
    if scheme is not None and dtype not in _TAKEN[scheme]:
        raise ConfigError(
            f"--quantization {scheme} with --dtype {str(dtype).removeprefix('torch.')}: expected "
            f"{' or '.join(str(taken).removeprefix('torch.') for taken in _TAKEN[scheme])}"
        )
    return GroupFormat(scheme, device.ops, device.ops.fp8_from if options.fp8_activations == "auto" else None)


def _draft_lm_head(options: Options, device: Device, dtype: torch.dtype) -> str | None:
    """Returns the scheme of the lm_head of drafts; None: as the model or the head has it."""
    asked = options.speculative_lm_head_quantization
    if asked == "none":
        return None
    scheme = OF_LM_HEADS if asked == "auto" else asked
    if device.ops.keeps_groups and dtype in _TAKEN[scheme]:
        return scheme
    if asked == "auto":
        return None
    raise ConfigError(
        f"--speculative-lm-head-quantization {asked}: expected a GPU with our own kernels and a model in "
        f"{' or '.join(str(taken).removeprefix('torch.') for taken in _TAKEN[scheme])}, found one in "
        f"{str(dtype).removeprefix('torch.')} on {device.kind}: use auto, with which a CPU has what is in bfloat16 in "
        "8 bits already"
    )


def _kv_dtype(options: Options, device: Device, dtype: torch.dtype, default: torch.dtype) -> torch.dtype:
    if options.kv_cache_dtype == "auto":
        return default
    if options.kv_cache_dtype == "fp8_e4m3":
        if dtype.itemsize != 2 or not device.ops.reads_fp8_pool:
            raise ConfigError(
                "--kv-cache-dtype fp8_e4m3: expected a model in bfloat16 or float16 on CUDA (compute capability 8.9 "
                f"or later), found one in {str(dtype).removeprefix('torch.')} on {device.kind}: leave it out"
            )
        return torch.float8_e4m3fn
    if options.kv_cache_dtype == "int8":
        if not device.ops.reads_int8_pool:
            raise ConfigError(
                "--kv-cache-dtype int8: expected a CPU (--device cpu) with our C extension, which is built where "
                "draftwing is installed with a compiler, unless DRAFTWING_NATIVE=0; found the operations of "
                f"{device.ops.title} on {device.kind}: leave it out"
            )
        return torch.int8
    asked: torch.dtype = getattr(torch, options.kv_cache_dtype)
    if asked == dtype or (device.ops.reads_half_pool_in_fp32 and dtype == torch.float32):
        return asked
    found = str(dtype).removeprefix("torch.")
    raise ConfigError(
        f"--kv-cache-dtype {options.kv_cache_dtype} with a model in {found}: expected auto"
        + (f" or {found}" if dtype != torch.float16 else "")
    )
