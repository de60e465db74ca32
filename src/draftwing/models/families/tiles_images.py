"""What reads images in SmolVLM and in LFM2-VL."""

from __future__ import annotations

from typing import Any

from draftwing.models.fields import WIDEST, Fields
from draftwing.models.towers.base import TowerConfig
from draftwing.models.towers.tiles import GridConfig, SplitConfig


def split_tower(outer: Fields, vision: Fields) -> TowerConfig:
    """Returns the tower of SmolVLM. outer: the model's config, vision: within. Raises CheckpointError."""
    patch = vision.whole("patch_size", high=256, default=32)
    return SplitConfig(
        outer.whole("image_token_id", default=128257),
        outer.inner("text_config").whole("hidden_size", high=WIDEST, default=4096),
        **_layers(vision, 1152, 16),
        patch=patch,
        factor=outer.whole("scale_factor", high=16, default=2),
        side=vision.whole("image_size", high=4096, default=224) // patch,
    )


def grid_tower(outer: Fields, vision: Fields) -> TowerConfig:
    """Returns the tower of LFM2-VL, as `split_tower`."""
    outer.check("projector_hidden_act", ("gelu",))
    outer.check("projector_bias", (True,))
    outer.check("vision_feature_layer", (-1,))
    side = round(vision.whole("num_patches", high=1 << 16, default=256) ** 0.5)
    return GridConfig(
        outer.whole("image_token_id", default=396),
        outer.inner("text_config").whole("hidden_size", high=WIDEST, default=2560),
        **_layers(vision, 768, 12),
        patch=vision.whole("patch_size", high=256, default=16),
        factor=outer.whole("downsample_factor", high=16, default=2),
        side=side,
        projector=outer.whole("projector_hidden_size", high=WIDEST, default=2560),
        joined_norm=outer.flag("projector_use_layernorm", True),
    )


def _layers(vision: Fields, hidden: int, heads: int) -> dict[str, Any]:
    vision.check("hidden_act", ("gelu_pytorch_tanh",))
    vision.check("num_channels", (3,))
    return {
        "hidden": vision.whole("hidden_size", high=WIDEST, default=hidden),
        "ffn": vision.whole("intermediate_size", high=WIDEST, default=3072),
        "heads": vision.whole("num_attention_heads", high=WIDEST, default=heads),
        "depth": vision.whole("num_hidden_layers", high=1000, default=12),
        "eps": vision.number("layer_norm_eps", 0, 1, 1e-6),
    }
