"""SmolLM3: Llama, of which every fourth layer turns nothing (NoPE)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from draftwing.models.family import Family, InGGUF
from draftwing.models.fields import Fields
from draftwing.models.positions import SLIDING

_INTERVAL = 4


def nope_layers(fields: Fields, windows: Sequence[int]) -> Collection[int]:
    """Returns the layers with a 0 in `no_rope_layers`."""
    layers, every = len(windows), fields.whole("no_rope_layer_interval", default=_INTERVAL)
    turned = fields.get("no_rope_layers") or [int((i + 1) % every > 0) for i in range(layers)]
    if not isinstance(turned, list) or len(turned) < layers or not all(one in (0, 1) for one in turned):
        raise fields.unlike("no_rope_layers", f"a 0 or 1 for each of {layers} layers")
    return {i for i in range(layers) if not turned[i]}


def _keys(fields: Fields) -> dict[str, Any]:
    """Without `layer_types` transformers has windows where nothing is turned, and with some it has these whatever
    `use_sliding_window` says; no published model has any."""
    kinds = fields.texts("layer_types")
    if not kinds:
        fields.check("use_sliding_window", (False,))
    elif SLIDING in kinds and not fields.flag("use_sliding_window"):
        raise fields.unsupported("layer_types", SLIDING)
    return {}


FAMILIES = {
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        sliding_window=0,
        window_switch="all",
        theta=2e6,
        tied=True,
        keys=_keys,
        nope=nope_layers,
        neutral={"layer_types": None},
        gguf=InGGUF("smollm3", permuted=True),
    ),
}
