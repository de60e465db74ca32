"""What reads images in Gemma 3 and in Gemma 4."""

from __future__ import annotations

from draftwing.errors import CheckpointError
from draftwing.models.fields import WIDEST, Fields
from draftwing.models.towers.base import TowerConfig
from draftwing.models.towers.pooled import PooledConfig
from draftwing.models.towers.tiles import MeanConfig


def tower(outer: Fields, vision: Fields) -> TowerConfig:
    """Returns the tower of a config. outer: the model's, vision: within. Raises CheckpointError."""
    text = outer.inner("text_config")
    vision.check("hidden_activation", ("gelu_pytorch_tanh",))
    vision.check("attention_bias", (False,))
    heads = vision.whole("num_attention_heads", high=WIDEST, default=12)
    vision.check("num_key_value_heads", (heads,))
    rope = vision.inner("rope_parameters")
    rope.check("rope_type", ("axial", "default"))
    return PooledConfig(
        outer.whole("image_token_id", default=258880),
        text.whole("hidden_size", high=WIDEST, default=2304),
        blank=text.whole("pad_token_id", 0, default=0),
        mutual="windows" if text.get("use_bidirectional_attention") == "vision" else "",
        hidden=vision.whole("hidden_size", high=WIDEST, default=768),
        ffn=vision.whole("intermediate_size", high=WIDEST, default=3072),
        heads=heads,
        head_dim=vision.whole("head_dim", high=WIDEST, default=64),
        depth=vision.whole("num_hidden_layers", high=1000, default=16),
        eps=vision.number("rms_norm_eps", 0, 1, 1e-6),
        patch=vision.whole("patch_size", high=256, default=16),
        pool=vision.whole("pooling_kernel_size", high=16, default=3),
        positions=vision.whole("position_embedding_size", high=1 << 20, default=10240),
        theta=rope.number("rope_theta", 1, 1e15, 100.0),
        clipped=vision.flag("use_clipped_linears"),
        standardised=vision.flag("standardize"),
        around=(outer.whole("boi_token_id", default=255999), outer.whole("eoi_token_id", default=258882)),
    )


def mean_tower(outer: Fields, vision: Fields) -> TowerConfig:
    """Returns the tower of Gemma 3, as `tower`."""
    vision.check("hidden_act", ("gelu_pytorch_tanh",))
    vision.check("num_channels", (3,))
    patch = vision.whole("patch_size", high=256, default=16)
    side = vision.whole("image_size", high=4096, default=224) // patch
    tokens = round(outer.whole("mm_tokens_per_image", high=1 << 16, default=256) ** 0.5)
    if not tokens or side % tokens:
        raise CheckpointError(f"mm_tokens_per_image: expected the square of a divisor of {side}, found {tokens**2}")
    return MeanConfig(
        outer.whole("image_token_index", default=outer.whole("image_token_id", default=262144)),
        outer.inner("text_config").whole("hidden_size", high=WIDEST, default=2304),
        mutual="all",
        hidden=vision.whole("hidden_size", high=WIDEST, default=768),
        ffn=vision.whole("intermediate_size", high=WIDEST, default=3072),
        heads=vision.whole("num_attention_heads", high=WIDEST, default=12),
        depth=vision.whole("num_hidden_layers", high=1000, default=12),
        eps=vision.number("layer_norm_eps", 0, 1, 1e-6),
        patch=patch,
        factor=side // tokens,
        side=side,
        around=(outer.whole("boi_token_index", default=255999), outer.whole("eoi_token_index", default=256000)),
    )
