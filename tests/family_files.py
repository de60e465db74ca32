"""Small random models of the families with latent attention, experts by sigmoids, Gemma 4's layers and recurrent ones,
in each format in which people have them."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import gemma4_models
import hybrid_gguf
import hybrid_models
import moe_models
import tiny_quantised as tiny
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file
from tiny_checkpoint import write_tokenizer
from torch import Tensor, from_numpy

INDEXED = ["deepseek-v3.2", "glm-5"]
MOE = ["deepseek-v2", "deepseek-v3", "glm4-moe-lite", "glm4-moe", "minimax-m2", *INDEXED]
MAMBA = ["granite4-rope", "nemotron-h-moe", "falcon-h1-behind"]
HYBRIDS = ["qwen3.5", "qwen3.5-moe", "qwen3-next", "lfm2", "kimi-linear", *MAMBA]
FAMILIES = [*MOE, *(f"gemma4-{kind}" for kind in gemma4_models.KINDS), *HYBRIDS]
WITH_EXPERTS = [*MOE, "gemma4-experts", "qwen3.5-moe", "qwen3-next", "kimi-linear", "nemotron-h-moe"]
FORMS = ["plain", "fp8 block", "awq", "gptq", "compressed int4", "Q8_0", "Q4_K"]
PREDICTING = [
    "deepseek-v3", *INDEXED, "glm4-moe-lite", "glm4-moe", "qwen3.5", "qwen3.5-moe", "qwen3-next", "nemotron-h-moe",
]  # fmt: skip
CASES = [*product(FAMILIES, FORMS)]
WIDE = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256}  # of whole blocks of K-quants


def written(folder: Path, family: str, form: str, **sizes: Any) -> tuple[Any, Path]:
    """A model of transformers, and its files, with a prediction layer or an assistant of the same format where it has
    one. Its weights are those of the files, dequantised."""
    theirs, helper = made(family, {**(WIDE if form == "Q4_K" else {}), **sizes})
    extra: dict[str, Tensor] = {}
    more: dict[str, Any] = {}
    if family in PREDICTING and family in HYBRIDS:
        extra, more = hybrid_models.layer_weights(theirs), {hybrid_models.mtp_key(theirs): 1}
    elif family in PREDICTING:
        extra = moe_models.published(theirs, moe_models.predicting(theirs))
    if form in Type.__members__:
        return theirs, in_gguf(folder, theirs, helper, extra, Type[form])
    if family.startswith("nemotron"):
        extra = hybrid_models.expert_by_expert(extra)
    moe_models.with_layer(folder / "model", theirs, extra, **more)
    write_tokenizer(folder / "model")
    if helper is not None:
        helper.save_pretrained(folder / "assistant")
    if form == "plain":
        return theirs, folder / "model"
    moe_models.with_layer(folder / "wide", theirs, extra)
    config, write = tiny.FORMATS[form]
    file, wide = folder / "model/model.safetensors", folder / "wide/model.safetensors"
    parts = moe_models.by_expert(load_file(file))  # as quantisers write experts
    save_file({name: part.clone() for name, part in parts.items()}, file)
    small = ("_proj_a", "_proj_b", "_proj_ba", "conv", "conv1d", ".b_proj")  # what quantisers leave of recurrent layers
    exact = tiny.quantise(folder / "model", config, lambda module: None if module.endswith(small) else write)
    read = load_file(wide)
    experts = [value for name, value in load_file(file).items() if ".experts." in name and name.endswith(".weight")]
    assert all(value.dtype != torch.float32 for value in experts), "all of them are quantised"
    for name, part in moe_models.by_expert(read).items():
        part.copy_(exact[name])
    save_file(read, wide)
    if helper is not None:
        tiny.quantise(folder / "assistant", config, lambda _: write)
    return type(theirs).from_pretrained(folder / "wide").float().eval(), folder / "model"


def made(family: str, sizes: dict[str, Any]) -> tuple[Any, Any]:
    """A model, and an assistant for it or None."""
    if family in HYBRIDS:
        known = {"hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings"}
        known |= {"moe_intermediate_size"} if family in WITH_EXPERTS else set()
        if family == "granite4-rope" and "intermediate_size" in sizes:
            known, sizes = (
                known | {"shared_intermediate_size"},
                {**sizes, "shared_intermediate_size": sizes["intermediate_size"]},
            )
        if family == "nemotron-h-moe" and "moe_intermediate_size" in sizes:
            known, sizes = (
                known | {"moe_shared_expert_intermediate_size"},
                {**sizes, "moe_shared_expert_intermediate_size": sizes["moe_intermediate_size"]},
            )
        return hybrid_models.reference(family, **{name: size for name, size in sizes.items() if name in known}), None
    if family in MOE:
        own = {"rope_parameters": moe_models.YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}}
        if family == "minimax-m2":
            sizes = {name: value for name, value in sizes.items() if name != "moe_intermediate_size"}
        return moe_models.reference(family, **(own if family == "deepseek-v2" else {}), **sizes), None
    kind = family.removeprefix("gemma4-")
    if kind == "per-layer" and "hidden_size" in sizes:
        sizes = {**sizes, "hidden_size_per_layer_input": sizes["hidden_size"], "num_attention_heads": 8}
    theirs = gemma4_models.reference(kind, **sizes)
    return theirs, gemma4_models.assistant_for(theirs)


def in_gguf(folder: Path, theirs: Any, helper: Any, extra: dict[str, Tensor], kind: Type) -> Path:
    """Writes files; what the weights are in them goes into the model."""
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir(parents=True)
    write_tokenizer(tokenizer)
    (tokenizer / "config.json").write_text("{}")
    path = folder / "model.gguf"
    if theirs.config.model_type in hybrid_gguf.ARCHITECTURES:
        tied = theirs.config.tie_word_embeddings
        state = {name: value for name, value in theirs.state_dict().items() if not (tied and name == "lm_head.weight")}
        joined = theirs.config.model_type == "kimi_linear"
        hybrid_gguf.write(path, theirs.config, {**state, **extra}, kind, joined_inputs=joined)
    elif helper is None:
        moe_models.write_gguf(path, theirs.config, {**theirs.state_dict(), **extra}, kind, joined=True)
    else:
        gemma4_models.write_gguf(path, theirs, kind)
        gemma4_models.write_gguf(folder / "assistant.gguf", helper, kind)
    block = GGML_QUANT_SIZES[kind][0]
    kept = [
        "embed_tokens",
        "embeddings",
        "mlp.gate.",
        "mixer.gate.",
        "moe.gate.",
        "router.",
        "expert_gate.",
        "conv1d",
        "conv.conv",
    ]
    kept += ["lm_head"] * theirs.config.tie_word_embeddings
    for name, value in theirs.state_dict().items():
        if value.dim() > 1 and value.shape[-1] % block == 0 and not any(part in name for part in kept):
            value.copy_(from_numpy(dequantize(moe_models.quantised(value.numpy(), kind), kind)))
    return path
