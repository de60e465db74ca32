"""What reads images in Qwen3-VL and in Qwen3.5 and later: one tower; only in the former do layers of the language model
add features of some of its layers."""

from __future__ import annotations

from draftwing.models.fields import WIDEST, Fields
from draftwing.models.towers.base import TowerConfig
from draftwing.models.towers.patch_merger import PatchMergerConfig


def tower(outer: Fields, vision: Fields, token: int, taps: bool) -> TowerConfig:
    """Returns the tower of a config. outer: the model's, vision: within.  token: of images, where it does not say.
    taps: whether some layers may give features of their own. Raises CheckpointError."""
    rope = vision.inner("rope_parameters")
    rope.check("rope_type", ("axial", "default"))
    vision.check("hidden_act", ("gelu_pytorch_tanh",))
    vision.check("in_channels", (3,))
    vision.check("temporal_patch_size", (2,))
    side = round(vision.whole("num_position_embeddings", high=1 << 16, default=2304) ** 0.5)
    if side**2 != vision.whole("num_position_embeddings", high=1 << 16, default=2304):
        raise vision.unlike("num_position_embeddings", "a square number")
    depth = vision.whole("depth", high=1000, default=27)
    found = vision.get("deepstack_visual_indexes")
    listed = (8, 16, 24) if found is None and taps else tuple(found or ())
    if not all(type(one) is int and 0 <= one < depth for one in listed) or (listed and not taps):
        raise vision.unlike("deepstack_visual_indexes", "numbers of layers" if taps else "none")
    return PatchMergerConfig(
        outer.whole("image_token_id", default=token),
        vision.whole("out_hidden_size", high=WIDEST, default=3584),
        len(listed),
        hidden=vision.whole("hidden_size", high=WIDEST, default=1152),
        ffn=vision.whole("intermediate_size", high=WIDEST, default=4304),
        heads=vision.whole("num_heads", high=WIDEST, default=16),
        depth=depth,
        patch=vision.whole("patch_size", high=256, default=16),
        merge=vision.whole("spatial_merge_size", high=16, default=2),
        side=side,
        taps=listed,
        theta=rope.number("rope_theta", 1, 1e15, 10000.0),
    )
