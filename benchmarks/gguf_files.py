"""GGUF files for llama.cpp: a model of ours in float32, a bundled EAGLE-3 head, and models with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, TokenType
from gguf.quants import quantize
from safetensors import safe_open

from draftwing.gguf_file import open_gguf

NAMES = {  # of an EAGLE-3 head in the official layout, and in llama.cpp
    "fc.weight": "fc.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "midlayer.input_layernorm.weight": "blk.0.attn_norm.weight",
    "midlayer.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    "midlayer.self_attn.q_proj.weight": "blk.0.attn_q.weight",
    "midlayer.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    "midlayer.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    "midlayer.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "midlayer.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "midlayer.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "midlayer.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "midlayer.mlp.down_proj.weight": "blk.0.ffn_down.weight",
}

IMAGE_TOKENS = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
# As llama.cpp's mixtures have them: of matrices, and of the embedding, which is the head as well.
MIXTURES = {"Q8_0": ("Q8_0", "Q8_0"), "Q4_K": ("Q4_K", "Q6_K")}
# Bytes of a block before which its float16 factors are, and the factors that make the variance of random values 1:
# 8 bits; 6 bits and a scale of 8; 4 bits times a scale of 6 less a minimum of 6.
FACTORS = {
    "Q8_0": (0, (1 / 73.9,)), "Q6_K": (208, (1 / 1365,)), "Q4_K": (0, (1 / 258, 7.5 / 258)),
}  # fmt: skip


def write_float32(model: Path, out: Path) -> None:
    """The same model with every tensor dequantised: what quantised arithmetic is measured against."""
    file = open_gguf(model)
    writer = GGUFWriter(out, file.metadata["general.architecture"])
    copy_metadata(GGUFReader(model), writer, skip="general.file_type")
    for name in file.tensors:
        writer.add_tensor(name, file.dequantized(name))
    finish(writer)


def write_eagle3(head: Path, target: Path, out: Path) -> None:
    """An EAGLE-3 head of the folder `head` for the Llama model `target`, its matrices in Q8_0.

    draftwing runs the matrices of heads in 8 bits, too, so that both read as many bytes for a draft.
    """
    reader = GGUFReader(target)
    config = json.loads((head / "config.json").read_text(encoding="utf8"))
    layers = int(reader.fields["llama.block_count"].contents())
    writer = GGUFWriter(out, "eagle3")
    copy_metadata(reader, writer, only="tokenizer.")
    for key, value in {
        "block_count": 1,
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "rope.dimension_count": config["head_dim"],
        "vocab_size": config["vocab_size"],
        "target_hidden_size": config["target_hidden_size"],
    }.items():
        writer.add_uint32(f"eagle3.{key}", value)
    writer.add_float32("eagle3.rope.freq_base", config["rope_theta"])
    writer.add_float32("eagle3.attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    writer.add_array("eagle3.target_layers", [2, layers // 2, layers - 3])
    tensors = _head_tensors(head)
    for name, theirs in NAMES.items():
        value = tensors[name]
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            value = interleaved(value, config["head_dim"])
        if value.ndim == 1:
            writer.add_tensor(theirs, value)
        else:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(theirs, quantize(value, kind), raw_dtype=kind)
    ids = tensors["d2t"].astype(np.int64)
    writer.add_tensor("d2t", ids + np.arange(len(ids)))  # stored as differences, and wanted as ids
    finish(writer)


def interleaved(weight: npt.NDArray[np.float32], head_dim: int) -> npt.NDArray[np.float32]:
    """weight [heads * head_dim, n] with the two halves of each head's rows taking turns, as llama.cpp rotates pairs."""
    halves = weight.reshape(-1, 2, head_dim // 2, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def _head_tensors(head: Path) -> dict[str, npt.NDArray[Any]]:
    found = {}
    for file in sorted(head.glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118 (it is no mapping)
                tensor = stored.get_tensor(name)
                found[name] = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    return found


def copy_metadata(reader: GGUFReader, writer: GGUFWriter, only: str = "", skip: str = "-") -> None:
    for name, field in reader.fields.items():
        if name.startswith(only) and not name.startswith(("GGUF.", "general.architecture", skip)):
            kind = field.types[0]
            item = field.types[-1] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, sub_type=item)


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_random(writer: GGUFWriter, name: str, size: tuple[int, int], kind: str, rng: np.random.Generator) -> None:
    """Adds a matrix of so many rows and columns, as `random_blocks` makes it."""
    writer.add_tensor(f"{name}.weight", random_blocks(kind, *size, rng), raw_dtype=GGMLQuantizationType[kind])


def random_blocks(kind: str, rows: int, columns: int, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """A matrix [rows, bytes of a row] whose values have a variance of 1 / columns."""
    values, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (rows * columns // values, size), np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = 127 + int(np.log2(columns**-0.5 / 3))  # a power of two: about so much
    else:
        at, factors = FACTORS[kind]
        factor = (np.array(factors) / columns**0.5).astype(np.float16).view(np.uint8)
        blocks[:, at : at + len(factor)] = factor
    return blocks.reshape(rows, -1)


def add_sizes(writer: GGUFWriter, size: Any, blocks: int, longest: int, head_dim: int, rope: float) -> None:
    """Adds what a decoder's config says. size: has `hidden`, `ffn`, `heads` and `kv_heads`."""
    writer.add_block_count(blocks)
    writer.add_context_length(longest)
    writer.add_embedding_length(size.hidden)
    writer.add_feed_forward_length(size.ffn)
    writer.add_head_count(size.heads)
    writer.add_head_count_kv(size.kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(rope)


def add_tokens(writer: GGUFWriter, pre: str, vocab: int) -> None:
    """Adds a vocabulary of so many tokens without meaning; the last ones stand around images, and for them."""
    plain = vocab - len(IMAGE_TOKENS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(["a", "b", "ab", *(f"t{i}" for i in range(plain - 3)), *IMAGE_TOKENS])
    writer.add_token_types([TokenType.NORMAL] * plain + [TokenType.CONTROL] * len(IMAGE_TOKENS))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(1)
