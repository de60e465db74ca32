"""What files say of how they hold a model, by their headers alone: without torch, for who only lists models."""

from __future__ import annotations

import contextlib
import json
import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType

from draftwing.errors import CheckpointError
from draftwing.gguf_file import GGUFFile, open_gguf
from draftwing.models.weight_files import read_config_json, weight_files

_WRONG = CheckpointError, OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError  # in files
_INNER = "text_config", "llm_config"  # of models for texts and images
_MAX_DIMS = 16  # of a tensor
_MAX_HEADER = 100_000_000  # bytes, as the format of safetensors has it
_BITS = "bits", "w_bit", "num_bits"  # of a value, where several are packed
_OF_OTHERS = "input_activations", "output_activations", "kv_cache_scheme"  # keys of what is no weight
_WORDS = {"I32": 32, "U8": 8}  # bits of what they are packed in
# What stands beside the codes of a quantised matrix.
_BESIDE = re.compile(
    r"(scales?|scale_inv|scale_2|zeros|zero_point|g_idx|shape|absmax|quant_map|bitsandbytes__\w+|\.SCB|weight_format)$"
)


def stored_as(path: Path) -> dict[str, Any]:
    """Returns how a model is stored, a `.gguf` file with its parts or a folder: format, architecture of the language
    model as `ModelConfig` has it, number of values, the type of most of them (of a folder what its config.json calls
    so), and bytes of the weights. What is not said, or not for certain, is 0 or empty."""
    is_file = path.suffix == ".gguf"
    form = "gguf" if is_file else "safetensors"
    found = {"format": form, "architecture": "", "values": 0, "type": "", "bytes": 0}
    with contextlib.suppress(*_WRONG):
        places = [path] if is_file else [path, *filter(Path.exists, path.iterdir())]
        found |= _read(path, max(place.stat().st_mtime_ns for place in places))
    return found


@lru_cache(256)  # lists of models are asked for again and again
def _read(path: Path, changed: int) -> Mapping[str, Any]:
    if path.suffix == ".gguf":
        file = open_gguf(path)
        values = sum(math.prod(tensor.shape) for tensor in file.tensors.values())
        own = {"architecture": _in_gguf(file.metadata)}
        return {**own, "values": _possible(values, file.size), "type": main_type(file), "bytes": file.size}
    config = read_config_json(path)
    found: dict[str, Any] = {"architecture": _in_config(config), "type": stored_type(config)}
    with contextlib.suppress(*_WRONG):  # or they are no safetensors
        files = weight_files(path)
        found |= {"bytes": sum(file.stat().st_size for file in files)}
        found |= {
            "values": _possible(sum(values for file in files for values in _values(file, config)), found["bytes"])
        }
    return found


def family_of(architecture: str) -> str:
    """Returns the family of an architecture, as Ollama's clients are told it."""
    return architecture.removesuffix("ForCausalLM").lower()


def _in_gguf(metadata: Mapping[str, Any]) -> str:
    kind, tables = metadata.get("general.architecture"), _table("inside")
    key, other = tables["gguf_above_0"].get(kind, ("", ""))
    return str(other if key and metadata.get(f"{kind}.{key}", 0) > 0 else tables["gguf"].get(kind, ""))


def _in_config(config: Mapping[str, Any]) -> str:
    names, tables = config.get("architectures"), _table("inside")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        return ""
    name = names[0]
    if name in tables["inside"]:
        own = tables["inside"][name]
        kind = next((config[key].get("model_type") for key in _INNER if config.get(key) is not None), None)
        other = "" if kind in tables["model_types"] else own.get("", "")
        return str(next(iter(own.values())) if kind is None else own.get(kind, other))
    headless = name.endswith("Model") and name not in tables["models"]
    return f"{name.removesuffix('Model')}ForCausalLM" if headless else name


def _possible(values: int, size: int) -> int:
    """Returns a number of values; 0: files of so many bytes cannot hold them."""
    return values if values <= 8 * size else 0


def main_type(file: GGUFFile) -> str:
    """Returns the type that most of the values are stored as."""
    values: Counter[int] = Counter()
    for tensor in file.tensors.values():
        values[tensor.type_id] += math.prod(tensor.shape)
    return GGMLQuantizationType(values.most_common(1)[0][0]).name if values else "without tensors"


def stored_type(config: Mapping[str, Any]) -> str:
    """Returns how a parsed config.json says that weights are stored: the method by which they are quantised, or their
    type; empty where it does not."""
    kinds = (one.get(name) for one in _parts(config) for name in ("dtype", "torch_dtype"))
    return str(_quantization(config).get("quant_method") or next(filter(None, kinds), ""))


def reads_images(config: Mapping[str, Any]) -> bool:
    """Returns whether a parsed config.json is of a model whose images are read."""
    return bool(config.get("vision_config")) and bool(
        {*_table("seeing")["architectures"]} & {*(config.get("architectures") or ())}
    )


@cache
def _table(name: str) -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "families" / f"{name}.toml").read_text(encoding="utf8"))


def _parts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [config, *(config[name] for name in _INNER if isinstance(config.get(name), dict))]


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    given = (one.get("quantization_config") for one in _parts(config))
    return next((one for one in given if isinstance(one, dict)), {})


def _values(file: Path, config: Mapping[str, Any]) -> Iterator[int]:
    """Yields how many values the tensors of a file have. Raises ValueError for one that is not of safetensors."""
    with file.open("rb") as content:
        size = int.from_bytes(content.read(8), "little")
        if size > _MAX_HEADER:
            raise ValueError
        tensors = json.loads(content.read(size))
    quantization = _quantization(config)
    bits = {*_bits(quantization)} or {4}
    for name, tensor in tensors.items():
        if name == "__metadata__" or (quantization and _BESIDE.search(name)):
            continue
        shape, word = tensor["shape"], _WORDS.get(tensor["dtype"]) if quantization else None
        if len(shape) > _MAX_DIMS or not all(type(count) is int and count >= 0 for count in shape):
            raise ValueError
        if word is None:
            yield math.prod(shape)
        else:
            (stated,) = bits  # with several the header alone does not say whose is which
            yield math.prod(shape) * word // stated


def _bits(quantization: Mapping[str, Any]) -> Iterator[int]:
    """Yields the bits of a weight, wherever a quantisation states them."""
    for key, value in quantization.items():
        if isinstance(value, dict) and key not in _OF_OTHERS:
            yield from _bits(value)
        elif key in _BITS and type(value) is int and value > 0:
            yield value
