"""Apertus: Llama with norms of heads, and MLPs without a gate, whose activation is learned; the text of Apertus 1.5,
whose embedding has tokens of images and sound besides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwing.gguf_file import GGUFFile
from draftwing.layers.mlp import XIELU
from draftwing.models.family import Family, InGGUF, Whole
from draftwing.models.fields import Fields

_THETA = 12e6
_ROPE = {  # of a config that has none, whatever it says of `rope_theta`
    "rope_type": "llama3", "rope_theta": _THETA, "factor": 8.0, "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip


def _keys(fields: Fields) -> dict[str, Any]:
    said = any(fields.get(key) is not None for key in ("rope_parameters", "rope_scaling"))
    return {} if said else {"rope_parameters": _ROPE}


def _activations(file: GGUFFile, layers: int) -> Iterator[tuple[str, Tensor]]:
    """Yields what the metadata say of the activations of all layers, or of each."""
    fields = Fields(file.metadata, str(file.path), "xielu.")
    for name, size in XIELU.items():
        values = np.atleast_1d(np.asarray(fields.get(name)))
        if values.dtype.kind != "f" or values.shape not in ((1,), (layers,)):
            raise fields.unlike(name, f"a number for each of {layers} layers")
        for i, value in enumerate(np.broadcast_to(values, layers).tolist()):
            yield f"model.layers.{i}.mlp.act_fn.{name}", torch.tensor([value] if size else value)


_APERTUS: dict[str, Any] = {
    "qk_norm": True, "eps": 1e-5, "theta": _THETA, "activation": "xielu", "keys": _keys,
    "neutral": {"qk_norm": (True,), "post_norm": (False,), "mlp_bias": (False,)},
    "layer_names": {"input_layernorm": "attention_layernorm", "post_attention_layernorm": "feedforward_layernorm"},
}  # fmt: skip
FAMILIES = {
    "ApertusForCausalLM": Family("apertus", **_APERTUS, gguf=InGGUF("apertus", more=_activations)),
    "Apertus1p5TextForCausalLM": Family(
        "apertus1p5_text", **_APERTUS, wholes={"Apertus1p5ForConditionalGeneration": Whole("apertus1p5", {})}
    ),
}
