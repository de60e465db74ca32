"""The default tree of a head, by what its files say before it is loaded."""

from __future__ import annotations

from pathlib import Path

from draftwing.config.trees import TreeShape, block_shape, carried_shape, names_mask
from draftwing.errors import CheckpointError
from draftwing.models.folder import folder_tensors
from draftwing.models.heads.config import MASK, read_config
from draftwing.models.heads.gguf_heads import gguf_block
from draftwing.models.weight_map import canonical


def tree_of(path: Path, device: str, default: TreeShape, is_head: bool, dummy: bool) -> TreeShape | None:
    """Returns `carried_shape` of a folder with a head, or (is_head: False) with a model that has prediction layers; of
    a `.gguf` file what fits into the blocks that its metadata speaks of."""
    if path.suffix == ".gguf":
        return block_shape(gguf_block(path), default)
    return carried_shape(path, device, default, is_head and _drafts_in_parallel(path, dummy))


def _drafts_in_parallel(path: Path, dummy: bool) -> bool:
    """Returns whether an EAGLE-3 head drafts all tokens in one pass: whether its folder has a tensor `MASK`, else, of
    dummy weights, whether its config names a mask. False of files that cannot be read: who loads the head says why."""
    try:
        if dummy:
            return names_mask(read_config(path))
        stored = folder_tensors(path, unread=lambda name: name != canonical(MASK))
        return any(True for _ in stored)
    except CheckpointError:
        return False
