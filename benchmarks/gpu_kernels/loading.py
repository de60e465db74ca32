"""Seconds to load a checkpoint of several safetensors shards to the GPU, its files in the page cache.

    python benchmarks/gpu_kernels/loading.py [gigabytes] [folder]           # by threads and chunks
    python benchmarks/gpu_kernels/loading.py formats [gigabytes] [folder]   # bfloat16, fp8 and 4 bits

Writes random weights of Llama layers first, since any values will do; gigabytes: what they take in bfloat16.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from draftwing.engine.devices import pick_device
from draftwing.layers.linear_ops.groups import GroupFormat
from draftwing.models.loader import load_model
from draftwing.models.weight_map import checkpoint_names, stored_tensors
from draftwing.ops import upload

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LINEAR = {"strategy": "channel", "symmetric": True, "dynamic": False}
FORMATS: dict[str, dict[str, Any] | None] = {  # of compressed-tensors: its format, and what it says of weights
    "bfloat16": None,
    "fp8": {"format": "float-quantized", "weights": {**LINEAR, "num_bits": 8, "type": "float"}},
    "int4": {
        "format": "pack-quantized",
        "weights": {**LINEAR, "num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
    },
}
SHARD_BYTES = 5_000_000_000
LAYER_BYTES, REST_BYTES = 436e6, 2.1e9


def stored(name: str, tensor: torch.Tensor, form: str) -> dict[str, torch.Tensor]:
    """What a checkpoint of this format has in place of the tensor."""
    if form == "bfloat16" or tensor.dim() < 2 or ".layers." not in name:
        return {name: tensor.cpu().clone()}
    module, (rows, columns) = name.removesuffix(".weight"), tensor.shape
    if form == "fp8":
        codes = torch.randint(0, 0x7F, (rows, columns), dtype=torch.uint8).view(torch.float8_e4m3fn)
        return {name: codes, f"{module}.weight_scale": torch.full((rows, 1), 1e-4, dtype=torch.bfloat16)}
    return {
        f"{module}.weight_packed": torch.randint(-(1 << 31), 1 << 31, (rows, columns // 8)).int(),
        f"{module}.weight_scale": torch.full((rows, columns // 128), 1e-3, dtype=torch.bfloat16),
        f"{module}.weight_shape": torch.tensor([rows, columns]),
    }


def write(folder: Path, gigabytes: float, form: str = "bfloat16") -> None:
    layers = max(1, round((gigabytes * 1e9 - REST_BYTES) / LAYER_BYTES))
    config = {**CONFIG, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    model = load_model(folder, torch.bfloat16, "cuda", dummy=True)
    shard: dict[str, torch.Tensor] = {}
    weight_map: dict[str, str] = {}
    count = 0

    def flush() -> None:
        nonlocal count
        name = f"model-{count}.safetensors"
        save_file(shard, folder / name)
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()
        count += 1

    for name, tensor in stored_tensors(model, checkpoint_names(model.config)):
        shard.update(stored(name, tensor, form))
        if sum(part.nbytes for part in shard.values()) > SHARD_BYTES:
            flush()
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    quantised = FORMATS[form]
    if quantised is not None:
        group = {"targets": ["Linear"], "weights": quantised["weights"]}
        said = {"quant_method": "compressed-tensors", "format": quantised["format"], "ignore": ["lm_head"]}
        config["quantization_config"] = {**said, "config_groups": {"group_0": group}}
        (folder / "config.json").write_text(json.dumps(config))


def bench(gigabytes: float = 16.0, parent: str | None = None) -> list[tuple[str, float]]:
    """(label, microseconds), as the other benchmarks give it."""
    found = []
    with tempfile.TemporaryDirectory(dir=parent) as name:
        folder = Path(name)
        write(folder, gigabytes)
        torch.cuda.empty_cache()
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        for threads, chunk in ((8, 16), (8, 16), (4, 16), (12, 16), (8, 4), (8, 64)):
            upload.THREADS, upload.CHUNK_BYTES = threads, chunk << 20
            begin = time.perf_counter()
            load_model(folder, torch.bfloat16, "cuda")
            torch.cuda.synchronize()
            seconds = time.perf_counter() - begin
            torch.cuda.empty_cache()
            found.append((f"{threads} threads, chunks of {chunk} MiB, {size / seconds / 1e9:.1f} GB/s", seconds * 1e6))
    return found


def formats(gigabytes: float = 16.0, parent: str | None = None) -> list[tuple[str, float]]:
    """(label, microseconds): the better of two loads of each format."""
    found = []
    for form in FORMATS:
        with tempfile.TemporaryDirectory(dir=parent) as name:
            folder, times = Path(name), []
            write(folder, gigabytes, form)
            size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
            for _ in range(2):
                torch.cuda.empty_cache()
                begin = time.perf_counter()
                load_model(folder, torch.bfloat16, "cuda", weight_format=GroupFormat(None, pick_device("cuda").ops))
                torch.cuda.synchronize()
                times.append(time.perf_counter() - begin)
            label = f"{form}: {size / 1e9:.1f} GB, {size / min(times) / 1e9:.1f} GB/s (first {times[0]:.1f} s)"
            found.append((label, min(times) * 1e6))
    return found


if __name__ == "__main__":
    given = sys.argv[1:]
    bench = formats if given[:1] == ["formats"] else bench
    given = given[given[:1] == ["formats"] :]
    for label, micros in bench(float(given[0]) if given else 16.0, given[1] if len(given) > 1 else None):
        print(f"{label:50} {micros / 1e6:8.2f} s")
