"""Seconds to load a checkpoint of several safetensors shards to the GPU, its files in the page cache.

    python benchmarks/gpu_kernels/loading.py [gigabytes] [folder]

Writes random weights of Llama layers first, since any values will do.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from draftwing.models.loader import load_model
from draftwing.models.weight_map import checkpoint_tensors
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
SHARD_BYTES = 5_000_000_000
LAYER_BYTES, REST_BYTES = 436e6, 2.1e9


def write(folder: Path, gigabytes: float) -> None:
    layers = max(1, round((gigabytes * 1e9 - REST_BYTES) / LAYER_BYTES))
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
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

    for name, tensor in checkpoint_tensors(model, model.config):
        shard[name] = tensor.cpu().clone()
        if sum(part.nbytes for part in shard.values()) > SHARD_BYTES:
            flush()
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


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


if __name__ == "__main__":
    given = sys.argv[1:]
    for label, micros in bench(float(given[0]) if given else 16.0, given[1] if len(given) > 1 else None):
        print(f"{label:50} {micros / 1e6:8.2f} s")
