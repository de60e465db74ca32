"""A model as a folder in each quantised format, packed by the libraries that people use.

    python benchmarks/quantised_files.py OUT [--model smollm2] [--formats bfloat16 awq ...]

Values are rounded to the nearest, in groups of 64 columns, without calibration: this shows what a format and its reader
do, not how good a quantiser is. It needs transformers, and for most formats compressed-tensors, GPTQModel or AutoAWQ.
`quantised_quality.py` measures the folders.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftwing.gguf_file import open_gguf
from draftwing.models.gguf_config import model_config
from draftwing.models.gguf_tensors import tensors
from draftwing.models.hub import resolve_model

GROUP = 64  # columns with one scale; divides all widths of SmolLM2
WEIGHTS = "model.safetensors"
Tensors = dict[str, Tensor]


def write_plain(model: Path, out: Path) -> None:
    """A GGUF file's weights in bfloat16, with config and tokenizer."""
    from transformers import AutoConfig, AutoTokenizer

    file = open_gguf(model)
    for theirs in (AutoTokenizer, AutoConfig):
        theirs.from_pretrained(model.parent, gguf_file=model.name).save_pretrained(out)
    weights = {name: value.bfloat16().contiguous() for name, value in tensors(file, model_config(file))}
    save_file(weights, out / WEIGHTS, metadata={"format": "pt"})


def write_compressed(scheme: dict[str, Any], plain: Path, out: Path) -> None:
    """By compressed-tensors, the model as a whole; its head, tied to the embedding, is left as it is."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **scheme}}
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head"]))
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            set_scales(module)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(out)
    compressor.update_config(str(out))
    copy_tokenizer(plain, out)


def set_scales(module: Any) -> None:
    """Scales and zeros of a module that compressed-tensors is to compress, by the ends of each group."""
    from compressed_tensors.quantization.utils import calculate_qparams

    args, weight = module.quantization_scheme.weights, module.weight.detach().float()
    rows, columns = weight.shape
    tall, wide = {
        "tensor": (rows, columns), "channel": (1, columns), "group": (1, args.group_size),
        "block": tuple(args.block_structure or (1, 1)),
    }[str(getattr(args.strategy, "value", args.strategy))]  # fmt: skip
    whole = torch.nn.functional.pad(weight, (0, -columns % wide, 0, -rows % tall))  # zeros move no end
    cut = whole.unflatten(1, (-1, wide)).unflatten(0, (-1, tall))
    scale, zero = calculate_qparams(cut.amin((1, 3)), cut.amax((1, 3)), args)
    module.weight_scale.data = scale.view(module.weight_scale.shape).to(module.weight_scale.dtype)
    if getattr(module, "weight_zero_point", None) is not None:
        module.weight_zero_point.data = zero.view(module.weight_zero_point.shape)


def write_packed(pack: Callable[[Tensor], Tensors], config: dict[str, Any], plain: Path, out: Path) -> None:
    """Each projection's weight, [rows, columns] float32, as what `pack` makes of it, by suffix."""
    made: Tensors = {}
    for name, weight in load_file(plain / WEIGHTS).items():
        if name.endswith("proj.weight"):
            module = name.removesuffix("weight")
            made |= {module + suffix: value.contiguous() for suffix, value in pack(weight.float()).items()}
        else:
            made[name] = weight
    out.mkdir(exist_ok=True)
    save_file(made, out / WEIGHTS, metadata={"format": "pt"})
    settings = json.loads((plain / "config.json").read_text(encoding="utf8")) | {"quantization_config": config}
    (out / "config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf8")
    copy_tokenizer(plain, out)


def copy_tokenizer(plain: Path, out: Path) -> None:
    for pattern in ("tokenizer*", "chat_template*", "generation_config.json"):
        for file in plain.glob(pattern):
            shutil.copy(file, out)


def fp8_blocks(block: tuple[int, int], plain: Path, out: Path) -> None:
    """By transformers."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    settings = FineGrainedFP8Config(weight_block_size=block)
    quantise = Fp8Quantize(SimpleNamespace(quantization_config=settings))
    config = settings.to_dict() | {"quant_method": "fp8", "weight_block_size": list(block)}
    write_packed(lambda weight: quantise.convert({"weight": weight}), config, plain, out)


def rounded(weight: Tensor, symmetric: bool, group_of: Tensor) -> tuple[torch.nn.Linear, Tensor, Tensor]:
    """(the layer, scales, zeros [rows, groups]) of 4 bits; group_of [columns]: the group of each column.

    A zero is 1 or more: version `gptq` stores it less 1.
    """
    grouped = weight[:, group_of.argsort(stable=True)].unflatten(1, (-1, GROUP))  # [rows, groups, GROUP]
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scale = (torch.maximum(-low, high) * 2 if symmetric else high - low) / 15
    scale = scale.clamp(min=1e-6).half().float()
    zero = torch.full_like(scale, 8) if symmetric else (-low / scale).round().clamp(1, 15)
    layer = torch.nn.Linear(*weight.T.shape, bias=False)
    layer.weight.data = weight
    return layer, scale, zero.int()


def gptq(symmetric: bool, order: bool, version: int, plain: Path, out: Path) -> None:
    """By GPTQModel. order: groups of the columns by their norms, for want of activations to sort them by."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    def pack(weight: Tensor) -> Tensors:
        rows, columns = weight.shape
        group_of = torch.arange(columns, dtype=torch.int32) // GROUP
        if order:
            group_of[weight.norm(dim=0).argsort(descending=True)] = group_of.clone()
        packed = TorchLinear(4, GROUP, symmetric, order, columns, rows)
        packed.pack(*rounded(weight, symmetric, group_of), group_of)
        if version == 1:
            convert_gptq_v2_to_v1_format_module(packed, QuantizeConfig(bits=4, group_size=GROUP))
        return {name: packed.get_buffer(name) for name in ("qweight", "qzeros", "scales", "g_idx")}

    config = {
        "quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": order, "sym": symmetric,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }  # fmt: skip
    write_packed(pack, config, plain, out)


def awq(plain: Path, out: Path) -> None:
    """By AutoAWQ."""
    from awq.modules.linear.gemm import WQLinear_GEMM

    def pack(weight: Tensor) -> Tensors:
        layer, scale, zero = rounded(weight, False, torch.arange(weight.shape[1]) // GROUP)
        packed = WQLinear_GEMM.from_linear(layer, 4, GROUP, scales=scale.T.contiguous(), zeros=zero.T.contiguous())
        return {name: packed.get_buffer(name) for name in ("qweight", "qzeros", "scales")}

    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    write_packed(pack, config, plain, out)


FP8: dict[str, Any] = {"num_bits": 8, "type": "float"}
INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
FORMATS: dict[str, Callable[[Path, Path], None]] = {  # (the folder in bfloat16, the new one)
    "fp8-blocks": partial(fp8_blocks, (64, 64)),
    "ct-fp8-tensor": partial(write_compressed, {**FP8, "strategy": "tensor"}),
    "ct-fp8-channel": partial(write_compressed, {**FP8, "strategy": "channel"}),
    "ct-fp8-block": partial(write_compressed, {**FP8, "strategy": "block", "block_structure": [128, 128]}),
    "ct-w4a16": partial(write_compressed, INT4),
    "ct-w4a16-zeros": partial(write_compressed, {**INT4, "symmetric": False}),
    "gptq": partial(gptq, True, False, 1),
    "gptq-order": partial(gptq, True, True, 1),
    "gptq-v2-zeros": partial(gptq, False, False, 2),
    "gptq-v2-order-zeros": partial(gptq, False, True, 2),
    "awq": awq,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a folder; each format becomes one in it, and bfloat16 is another")
    parser.add_argument("--model", default="smollm2", help="of a GGUF file")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    args = parser.parse_args()
    plain = args.out / "bfloat16"
    if not plain.exists():
        write_plain(resolve_model(args.model), plain)
    for name in args.formats:
        FORMATS[name](plain, args.out / name)
        print(name, "written", flush=True)


if __name__ == "__main__":
    main()
