"""Puts the values of one draft head into another that is in use: graphs and recorded calls go on with the memory that
they know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from draftwing.errors import ConfigError
from draftwing.layers.attention import AttentionConfig
from draftwing.layers.linear import Linear
from draftwing.models.heads.base import FeatureHead
from draftwing.models.heads.block import BlockHead
from draftwing.models.heads.eagle import Eagle3Head


class HeadSwap:
    """The head that is in use, and how another is loaded as it was."""

    def __init__(self, head: FeatureHead, load: Callable[[Path | None], FeatureHead]) -> None:
        """load: a packed head from a folder, None for what `head` was loaded from."""
        self._head, self._load = head, load

    def read(self, folder: Path | None) -> FeatureHead:
        """Loads a head that can take its place. Raises CheckpointError and ConfigError."""
        found = self._load(folder)
        check_alike(self._head, found)
        return found

    def take(self, head: FeatureHead) -> None:
        copy_head(head, self._head)


def check_alike(first: FeatureHead, other: FeatureHead) -> None:
    """Raises ConfigError unless the values of one of two packed heads can be put into the other: of layers with plain
    attention and an MLP, whose memory is all known here."""
    fixed = {type(part.op).__name__ for part in first.modules() if isinstance(part, Linear) and not part.op.can_copy}
    strange = [layer for layer in first.config.layers if layer.experts or not isinstance(layer.mixer, AttentionConfig)]
    if fixed or strange:
        what = f"weights of {', '.join(sorted(fixed))}" if fixed else type(first).__name__
        raise ConfigError(f"a head with layers or weights of this kind ({what}) cannot be replaced: restart with it")
    found = differences(first, other)
    if found:
        raise ConfigError(f"the head cannot take the place of the one that is served, from which it differs in "
                          f"{'; '.join(found)}: restart with it")  # fmt: skip


@torch.no_grad()
def copy_head(source: FeatureHead, into: FeatureHead) -> None:
    """Copies parameters, packed weights and what else is made of a head. Both are packed, and alike (`check_alike`)."""
    for param, own in zip(source.parameters(), into.parameters(), strict=True):
        own.copy_(param)
    for part, mine in zip(source.modules(), into.modules(), strict=True):
        if isinstance(mine, Linear):
            assert isinstance(part, Linear)
            mine.op.copy_from(part.op)
    for made, kept in zip(source.packed_tensors(), into.packed_tensors(), strict=True):
        kept.copy_(made)


def differences(first: FeatureHead, other: FeatureHead) -> list[str]:
    """Returns what two heads do not have in common, as `name: of the first, of the other`; empty for heads that differ
    in weights, and perhaps in which tokens they draft, alone."""
    mine, theirs = _traits(first), _traits(other)
    return [
        f"{name}: {mine.get(name)}, {theirs.get(name)}"
        for name in mine | theirs
        if mine.get(name) != theirs.get(name)
    ]  # fmt: skip


def _traits(head: FeatureHead) -> dict[str, Any]:
    """Returns how a head computes, apart from its weights and draft tokens."""
    # Of its config not what it was published as, for which length, and names in its file.
    unlike = {"architecture", "dtype", "stop_ids", "max_positions", "later_norm", "ranks"}
    config, layer = _fields(head.config), _fields(head.config.layers[0])  # those of heads are alike
    traits = {"kind": type(head).__name__, "num_layers": head.config.num_layers, **config}
    for part in (_fields(layer["norm"]), _fields(layer["mixer"]), layer):
        traits |= part
    for name in ("layers", "norm", "mixer"):
        del traits[name]
    if isinstance(head, Eagle3Head):
        traits |= _fields(head.eagle)
    if isinstance(head, BlockHead):
        traits |= _fields(head.config_of_block)
    traits = {name: value for name, value in traits.items() if name not in unlike}
    shapes = {f"shape of {name}": list(parameter.shape) for name, parameter in head.named_parameters()}
    sizes = {f"weight of {name}": part.op.sizes for name, part in head.named_modules() if isinstance(part, Linear)}
    tokens = {"draft tokens": None if head.target_ids is None else len(head.target_ids)}
    return traits | {"aux_layers": head.aux_layers} | shapes | sizes | tokens


def _fields(config: Any) -> dict[str, Any]:
    """Returns a dataclass's fields as they are: formats hold the device's operations, which nobody can copy."""
    return {field.name: getattr(config, field.name) for field in fields(config)}
