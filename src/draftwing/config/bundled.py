"""Draft heads that come with the package, and the tree that a head's config asks for.

No torch here: who drafts is decided while options are checked.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from draftwing.core import TreeShape
from draftwing.errors import ConfigError

HEADS = Path(__file__).parents[1] / "heads"  # HEADS/model/folder
MODELS = ("smollm2",)  # aliases: a checkpoint of another quantization is another target
FOLDERS = {"EAGLE3": "eagle3", "EAGLE": "eagle", "NEXTN": "mtp"}  # by --speculative-algorithm
DEFAULT_ALGORITHM = "EAGLE3"
TOKEN_MAPS = ("token_map.json", "token_map.txt", "token_map.pt")

DEVICES = ("cpu", "cuda")  # classes of devices that a tree is measured for
_LIMITS = ((1, 256), (1, 64), (2, 512))  # of steps, topk and draft tokens, as the options have them


class ShippedHead(NamedTuple):
    """folder: with config.json and weights.  token_map: file of the tokens that it may draft, for EAGLE and NEXTN."""

    folder: Path
    token_map: Path | None


def shipped_head(model: str, algorithm: str) -> ShippedHead | None:
    """The head for `--model model` and `--speculative-algorithm algorithm` that is part of this package, if any."""
    if model not in MODELS or algorithm not in FOLDERS:
        return None
    folder = HEADS / model / FOLDERS[algorithm]
    return ShippedHead(folder, token_map_in(folder)) if (folder / "config.json").is_file() else None


def token_map_in(folder: Path) -> Path | None:
    """The file of the tokens that the head in a folder may draft, if it lies there."""
    maps = (folder / name for name in TOKEN_MAPS)
    return next((file for file in maps if file.is_file()), None)


# ---- the tree in a config --------------------------------------------------------------------------------------------


def carried_shape(folder: Path, device: str) -> TreeShape | None:
    """The tree that a head's config.json asks for on "cpu" or "cuda": `"draftwing": {"shapes": {"cpu": [3, 1, 4]}}`, in
    steps, topk and draft tokens. None where it says nothing, as most do.

    Raises ConfigError for shapes that no tree has, of any device.
    """
    file = folder / "config.json"
    try:
        own = json.loads(file.read_text(encoding="utf-8")).get("draftwing", {})
    except (OSError, ValueError, AttributeError):
        return None  # what is wrong with the file says who loads the head
    shapes = _object(own, f"{file}: draftwing").get("shapes", {})
    where = f"{file}: draftwing.shapes"
    found = {name: _shape(value, f"{where}.{name}") for name, value in _object(shapes, where).items()}
    unknown = next((name for name in found if name not in DEVICES), None)
    if unknown is not None:
        raise ConfigError(f"{where}: expected shapes for {' or '.join(DEVICES)}, found {unknown!r}")
    return found.get(device)


def save_shape(folder: Path, device: str, shape: TreeShape) -> None:
    """Writes the tree into the head's config.json, which is replaced whole. Raises ConfigError where it cannot be."""
    carried_shape(folder, device)  # refuses what it could not be added to
    _shape(list(shape), "the tree to save")
    file, partial = folder / "config.json", folder / "config.json.partial"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        config.setdefault("draftwing", {}).setdefault("shapes", {})[device] = list(shape)
        with partial.open("w", encoding="utf-8") as written:
            written.write(json.dumps(config, indent=2) + "\n")
            written.flush()
            os.fsync(written.fileno())
        partial.replace(file)
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file} cannot be rewritten: {error}") from None


def most_nodes(steps: int, topk: int) -> int:
    """Nodes that the growth loop offers, the root included: topk at level 1, then topk children of topk nodes."""
    return 1 + topk + (steps - 1) * topk**2


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected an object, found {value!r}")
    return value


def _shape(value: Any, where: str) -> TreeShape:
    is_shape = (
        isinstance(value, list)
        and len(value) == len(_LIMITS)
        and all(type(x) is int and low <= x <= high for x, (low, high) in zip(value, _LIMITS, strict=True))
    )
    if not is_shape:
        raise ConfigError(f"{where}: expected [steps, topk, draft tokens] such as [3, 1, 4], found {value!r}")
    steps, topk, nodes = value
    if not steps < nodes <= most_nodes(steps, topk):
        raise ConfigError(
            f"{where}: expected {steps + 1} to {most_nodes(steps, topk)} draft tokens for {steps} steps and topk "
            f"{topk}, found {nodes}"
        )
    return TreeShape(steps, topk, nodes)
