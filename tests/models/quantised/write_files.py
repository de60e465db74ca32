"""A tiny model in the formats of the libraries that people use, written by these libraries, and the logits of what each
library makes of its own file again: tests/models/quantised/files, which `test_files.py` reads.

    PYTHONPATH=src:tests:benchmarks python tests/models/quantised/write_files.py [OUT]

It needs transformers, compressed-tensors, GPTQModel and AutoAWQ.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import quantised_files as q
import torch
from reference.checkpoints import llama_target
from safetensors.torch import load_file, save_file
from torch import Tensor

HERE = Path(__file__).parent / "files"
IDS = [3, 1, 7, 7, 30, 2, 39, 0, 12]
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 1,
                         "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 64}  # fmt: skip
FORMATS = {
    **q.FORMATS,
    "ct-fp8-block": partial(q.write_compressed, {**q.FP8, "strategy": "block", "block_structure": [64, 64]}),
    "ct-w8a16": partial(q.write_compressed, {**q.INT4, "num_bits": 8}),
    "ct-w4a16-order": partial(q.write_compressed, {**q.INT4, "actorder": "weight"}),  # "group" is no more in 0.20
}


def write_plain(folder: Path) -> None:
    target = llama_target(5, **SIZES)
    half = target._replace(tensors={name: value.bfloat16() for name, value in target.tensors.items()})
    half._replace(config=target.config | {"torch_dtype": "bfloat16"}).write(folder)


def by_compressed_tensors(stored: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    """With its scales in float32: they are stored in bfloat16, and so it would round weights."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    args = QuantizationArgs(**config["config_groups"]["group_0"]["weights"])
    codes, scale, zeros = stored.get("weight"), stored["weight_scale"].float(), stored.get("weight_zero_point")
    if codes is None:
        codes = unpack_from_int32(stored["weight_packed"], args.num_bits, torch.Size(stored["weight_shape"]))
        if zeros is not None:
            zeros = unpack_from_int32(zeros, args.num_bits, scale.shape, packed_dim=0)
    return dequantize(codes, scale, zeros, args, dtype=torch.float32)


def by_gptqmodel(stored: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    rows, columns = stored["qweight"].shape[1], len(stored["g_idx"])
    layer = TorchLinear(config["bits"], config["group_size"], config["sym"], config["desc_act"], columns, rows)
    for name, value in stored.items():
        layer.get_buffer(name).copy_(value)
    if config["checkpoint_format"] == "gptq":
        convert_gptq_v1_to_v2_format_module(layer, config["bits"], torch.int32)
    layer.post_init()
    return layer.dequantize_weight().T


def by_autoawq(stored: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    from awq.utils.packing_utils import dequantize_gemm

    wide = stored["scales"].float()
    return dequantize_gemm(stored["qweight"], stored["qzeros"], wide, config["bits"], config["group_size"]).T


def by_transformers(stored: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    quantizer = SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=config["weight_block_size"]))
    return Fp8Dequantize(quantizer)._dequantize_one(stored["weight"], stored["weight_scale_inv"], torch.float32)


LIBRARIES = {  # by `quant_method`: their names, and how they dequantise
    "gptq": ("gptqmodel", by_gptqmodel), "awq": ("autoawq", by_autoawq), "fp8": ("transformers", by_transformers),
    "compressed-tensors": ("compressed-tensors", by_compressed_tensors),
}  # fmt: skip


def read_back(folder: Path) -> dict[str, Tensor]:
    """A file's weights as its library has them, by name."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    parts: dict[str, dict[str, Tensor]] = {}
    for name, value in load_file(folder / q.WEIGHTS).items():
        module, _, suffix = name.rpartition(".")
        parts.setdefault(module, {})[suffix] = value
    quantised = [module for module in parts if module.endswith("proj")]
    read = LIBRARIES[config["quant_method"]][1]
    found = {f"{module}.weight": read(parts[module], config) for module in quantised}
    rest = {f"{m}.weight": part["weight"] for m, part in parts.items() if m not in quantised}
    return found | rest


@torch.inference_mode()
def logits(model: torch.nn.Module, weights: dict[str, Tensor]) -> Tensor:
    """[len(IDS), vocabulary] float32, by transformers."""
    model = copy.deepcopy(model)
    missing, unknown = model.load_state_dict({n: w.float() for n, w in weights.items()}, strict=False)
    assert not unknown and set(missing) <= {"lm_head.weight"}, (missing, unknown)
    return model(torch.tensor([IDS])).logits[0]


def main(out: Path) -> None:
    from transformers import AutoModelForCausalLM

    out.mkdir(parents=True, exist_ok=True)
    expected: dict[str, Tensor] = {}
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "plain"
        write_plain(plain)
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
        base = logits(model, load_file(plain / q.WEIGHTS))
        for name, write in FORMATS.items():
            write(plain, out / name)
            config = json.loads((out / name / "config.json").read_text())["quantization_config"]
            library, _ = LIBRARIES[config["quant_method"]]
            expected[name] = logits(model, read_back(out / name)).contiguous()
            error = float((expected[name] - base).norm() / base.norm())
            size = (out / name / q.WEIGHTS).stat().st_size
            print(f"{name}: {library} {version(library)}, {size} bytes, {error:.3f} from bfloat16", flush=True)
            for file in (out / name).glob("generation_config*"):
                file.unlink()
    save_file(expected, out / "logits.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
