"""The families of models that are served, each a module of its own, and what `unserved` knows of others."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from draftwing.errors import CheckpointError
from draftwing.models.families import (
    afmoe,
    apertus,
    arcee,
    bailing,
    bailing_hybrid,
    bamba,
    bert,
    chatglm,
    cohere,
    deci,
    deepseek,
    dots,
    ernie,
    exaone,
    falcon,
    falcon_h1,
    gemma3,
    gemma3n,
    gemma4,
    glm,
    gpt2,
    gpt_oss,
    granite,
    granite_hybrid,
    hunyuan,
    internlm,
    jamba,
    kimi_linear,
    laguna,
    lfm2,
    lfm3,
    llama,
    llama4,
    mamba,
    mimo,
    minicpm,
    minimax,
    nanochat,
    nemotron,
    nemotron_h,
    neox,
    olmo,
    phi,
    qwen,
    qwen4,
    qwen_hybrid,
    seed_oss,
    smollm3,
    solar,
    stablelm,
    starcoder,
    step3,
)
from draftwing.models.family import Family, Whole
from draftwing.models.fields import Fields
from draftwing.models.towers.base import TowerConfig
from draftwing.requests.refusals import show

logger = logging.getLogger(__name__)
_MODULES = (
    llama, llama4, qwen, qwen_hybrid, qwen4, mimo, gpt_oss, gemma3, gemma3n, gemma4, glm, deepseek, minimax, lfm2,
    smollm3, phi, olmo, exaone, ernie, seed_oss, granite, granite_hybrid, nemotron_h, falcon_h1, dots, cohere, hunyuan,
    apertus, arcee, bailing, stablelm, starcoder, neox, nemotron, solar, minicpm, kimi_linear, internlm, bamba, deci,
    bailing_hybrid, lfm3, afmoe, jamba, bert, laguna, chatglm, nanochat, falcon, gpt2,
    step3, mamba,
)  # fmt: skip
# By architecture, as `architectures` of a config.json has it. Installed packages add theirs.
FAMILIES: dict[str, Family] = {name: family for module in _MODULES for name, family in module.FAMILIES.items()}
PLAIN_FAMILY = "LlamaForCausalLM"  # whose layers draft heads have
_INNER = "text_config", "llm_config"
_OF_BOTH = ("dtype", "eos_token_id", "quantization_config", "tie_word_embeddings", "torch_dtype")


def language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the config of the language model in a parsed config.json, which mostly is all of it; else the model is
    one for texts and images. Raises CheckpointError."""
    fields, found = Fields(config, "config"), _wholes(config)
    if not found:
        return config
    key = next((key for key in _INNER if fields.has(key)), None)
    inner = fields if key is None else fields.inner(key)  # older ones have no other
    text = inner.get("model_type") if inner is not fields else None  # None: it is the first of several
    others = [family.model_type for family in FAMILIES.values()]  # `text` may be anything
    for architecture, _, whole in found:
        own = whole.text or FAMILIES[architecture].model_type
        if text in (None, own) or not (whole.text or text in others):
            for name, values in whole.only.items():
                inner.check(name, values)
            outer = {key: config[key] for key in _OF_BOTH if config.get(key) is not None}
            return {**whole.defaults, **dict(inner.items()), **outer, "architectures": [architecture]}
    served = ", ".join(whole.text or FAMILIES[architecture].model_type for architecture, _, whole in found)
    raise CheckpointError(f"{found[0][1]}: {key}.model_type: expected one of {served}; found {show(text)}")


def sight(config: Mapping[str, Any]) -> tuple[TowerConfig | None, tuple[int, ...]]:
    """Returns what reads images in a parsed config.json, None where nothing does that is served, and the `sections` of
    the model's rotary embedding then. What is wrong with it is logged: the model is served without."""
    fields = Fields(config, "config")
    whole = next((whole for _, _, whole in _wholes(config) if whole.tower is not None), None)
    if whole is None or whole.tower is None or not fields.get("vision_config"):
        return None, ()
    try:
        return whole.tower(fields, fields.inner("vision_config")), whole.sections
    except CheckpointError as error:
        logger.warning("images are not read: %s", error)
        return None, ()


def _wholes(config: Mapping[str, Any]) -> list[tuple[str, str, Whole]]:
    """Returns the models for texts and images that a config may be of: the architectures of the language model and of
    all."""
    fields = Fields(config, "config")
    names, kind = fields.texts("architectures"), fields.get("model_type")
    every = [(name, one, whole) for name, family in FAMILIES.items() for one, whole in family.wholes.items()]
    return [row for row in every if row[1] in names or (not names and kind == row[2].model_type)]


def in_gguf() -> dict[str, str]:
    """Returns the architecture of each `general.architecture` of GGUF files, of files with experts perhaps another one
    (`InGGUF.when`)."""
    stored = ((name, family.gguf) for name, family in FAMILIES.items())
    own = ((name, one) for name, one in stored if one is not None and one.when is None)
    return {kind: name for name, one in own for kind in (one.architecture, *one.others)}
