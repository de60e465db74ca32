"""Shapes of draft trees: which there are, who proposes what is in them, which a head's config asks for, and what a
user's numbers leave open.

No torch: see `config.drafters`. Options name shapes: nothing imported here takes time.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from draftwing.errors import ConfigError
from draftwing.files import load_json, write_text
from draftwing.requests.refusals import show


class TreeShape(NamedTuple):
    """Shape of one draft tree. Plain decoding is `(0, 1, 1)`, a chain of k drafts is `(k, 1, k + 1)`.

    depth: levels below the root, so at most `depth + 1` tokens are committed by one step.
    topk:  children of each node that tree expansion expands, and nodes that it expands at each level.
    nodes: nodes that are drafted for each row, the root included.
    verified: nodes that the target verifies for each row of a batch on average, chosen over the batch as a whole
        (`ops.assign`); 0: all.
    proposer: which of a pair of drafters: `BOTH`, or one `ALONE`.
    """

    depth: int
    topk: int
    nodes: int
    verified: int = 0
    proposer: int = 0

    @property
    def tree(self) -> tuple[int, int, int]:
        """Returns what a user asks for: steps, topk, draft tokens."""
        return self[:3]

    @property
    def max_commit(self) -> int:
        return self.depth + 1

    @property
    def queries(self) -> int:
        """Returns nodes that the target verifies for each row on average."""
        return self.verified or self.nodes


PLAIN = TreeShape(0, 1, 1)
BOTH, MODEL_ALONE, LOOKUP_ALONE = range(3)  # of a pair of drafters
PREDICTED = TreeShape(8, 1, 9)  # of drafts copied from a predicted output, where there is no other drafter
# Who proposed a node, bits of a number, and what a reader is told: a model, a lookup of earlier text, or both.
OTHER, MODEL, LOOKUP, SECOND_MODEL = 0, 1, 2, 4
SOURCES = ("other", "model", "lookup", "both", "model", "model", "both", "both")
MAX_CONFIDENCE = 31  # a drafter's confidence for a row's next draft lies in [0, MAX_CONFIDENCE]


logger = logging.getLogger(__name__)

TREE = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")  # fields of a `TreeShape`
# Of heads that draft a block, which most of them have room for. Branches are worth their rows where what follows a
# token depends on it.
BLOCK, BRANCHED_BLOCK = TreeShape(7, 1, 8), TreeShape(7, 4, 16)
# What trainers of heads for parallel drafting call the token that stands for those that are not known yet.
MASK_IDS = ("pard_token", "ptd_token_id", "mask_token_id")
DEVICES = ("cpu", "cuda")  # classes of devices that a tree is measured for
STEPS, TOPK, NODES = (1, 256), (1, 64), (2, 512)  # least and most steps, topk and draft tokens
Given = tuple[int | None, int | None, int | None]  # steps, topk and draft tokens, None where not given


def max_nodes(steps: int, topk: int) -> int:
    """Returns how many nodes tree expansion offers, the root included: topk at level 1, then topk children of topk
    nodes."""
    return 1 + topk + (steps - 1) * topk**2


def grown_shape(given: Given, default: TreeShape) -> TreeShape:
    """Returns the tree of tree expansion: level 1 has topk nodes, every further level topk children of topk nodes.
    Raises ConfigError for numbers that no such tree has."""
    if given == (None, None, None):
        return default
    asked = given[2]
    steps, topk = given[0] or default.depth, given[1] or default.topk
    if topk == 1:
        return _chain(steps, asked or steps + 1)
    if given[0] is None and asked is not None:
        steps = max(min(steps, asked - 1), 1)
    largest = max_nodes(steps, topk)
    nodes = asked or min(max(default.nodes, steps + 1), largest)
    if not steps < nodes <= largest:
        raise ConfigError(
            "speculative_num_draft_tokens must be from speculative_num_steps + 1 to 1 + topk + (steps - 1) * "
            f"topk^2, which is {steps + 1} to {largest} for {steps} steps and topk {topk}; found {nodes}"
        )
    return TreeShape(steps, topk, nodes)


def matched_shape(given: Given, default: TreeShape) -> TreeShape:
    """Returns the tree of matches: any of so many nodes. Raises ConfigError for more steps than nodes below the
    root."""
    steps, topk, nodes = given
    topk = topk or default.topk
    if nodes is None:
        nodes = default.nodes if topk > 1 or steps is None else steps + 1
    if steps is None:
        steps = nodes - 1
    if steps > nodes - 1:
        raise ConfigError(
            "speculative_num_steps must be at most speculative_num_draft_tokens - 1 (the root is one of the draft "
            f"tokens); found {steps} and {nodes}"
        )
    return _chain(steps, nodes) if topk == 1 else TreeShape(steps, topk, nodes)


def _chain(steps: int, nodes: int) -> TreeShape:
    """nodes: as asked for"""
    if nodes != steps + 1:
        logger.warning("--speculative-eagle-topk 1 is a chain: --speculative-num-draft-tokens is set to %d", steps + 1)
    return TreeShape(steps, 1, steps + 1)


# ---- the tree in a config --------------------------------------------------------------------------------------------


def carried_shape(folder: Path, device: str, default: TreeShape = BLOCK, in_parallel: bool = False) -> TreeShape | None:
    """Returns the tree that a head's config.json asks for on "cpu" or "cuda": `"draftwing": {"shapes": {"cpu": [3, 1,
    4]}}`, in steps, topk and draft tokens; else the default one of drafters of blocks, cut, where its block has fewer
    tokens, and a chain without a correction by the tokens above. None where it says nothing, as most do.
    in_parallel: whether its weights draft all tokens in one pass (P-EAGLE), so that depth costs little:
    else a tree as deep as those of blocks.

    Raises ConfigError for shapes that no tree has, of any device.
    """
    file = folder / "config.json"
    config, own = _carried(file)
    if config is None:
        return None
    shapes, where = own.get("shapes", {}), f"{file}: draftwing.shapes"
    found = {name: checked_shape(value, f"{where}.{name}") for name, value in _object(shapes, where).items()}
    unknown = next((name for name in found if name not in DEVICES), None)
    if unknown is not None:
        raise ConfigError(f"{where}: expected shapes for {' or '.join(DEVICES)}, found {show(unknown)}")
    return found.get(device) or (BRANCHED_BLOCK if in_parallel else block_shape(config, default))


def carried_window(folder: Path) -> int | None:
    """Returns how many tokens the head's own attention is to see by its config.json: `"draftwing": {"window": 1024}`;
    None where it says nothing. Raises ConfigError for what is no such number."""
    file = folder / "config.json"
    found = _carried(file)[1].get("window")
    if found is not None and (type(found) is not int or found < 2):
        raise ConfigError(f"{file}: draftwing.window: expected tokens, 2 or more, found {show(found)}")
    return found


def _carried(file: Path) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Returns a head's config, and what it says to this package alone. None for a file that cannot be read: what is
    wrong with it says who loads the head."""
    try:
        config = load_json(file)
        own = config.get("draftwing", {})
    except (OSError, ValueError, AttributeError):
        return None, {}
    return config, _object(own, f"{file}: draftwing")


def block_shape(config: dict[str, Any], tree: TreeShape) -> TreeShape | None:
    """Returns what of a tree fits into the blocks of a config; None where that is all of it, or none are named."""
    inner = (config.get(name) for name in ("dflash_config", "dspark_config"))
    flat = {key: value for part in (*inner, config) if isinstance(part, dict) for key, value in part.items()}
    rows = flat.get("block_size")
    if type(rows) is not int or rows < 2:
        return None  # what is wrong with it says who loads the head
    steps = min(tree.depth, rows if from_anchor(flat) else rows - 1)
    branches = flat.get("markov_rank") or flat.get("projector_type") == "domino" or flat.get("selector_top_k")
    topk = tree.topk if branches else 1  # else what follows does not depend on the branch
    fits = TreeShape(steps, topk, min(tree.nodes, max_nodes(steps, topk)))
    return None if fits == tree else fits


def from_anchor(config: Mapping[str, Any]) -> bool:
    """Returns whether the first row of a block, the newest token's, predicts the token after it, from flat keys. A
    missing key means yes to DeepSpec, whose heads have a Markov head, and no to the others."""
    said = [config[key] for key in ("sample_from_anchor", "shift_label") if config.get(key) is not None]
    return bool(said[0]) if said else bool(config.get("markov_rank")) and "speculators_model_type" not in config


def names_mask(config: Mapping[str, Any]) -> bool:
    """Returns whether flat keys name the mask of a head for parallel drafting; those of a block name one as well."""
    return "block_size" not in config and any(config.get(key) is not None for key in MASK_IDS)


def save_shape(folder: Path, device: str, shape: TreeShape) -> None:
    """Writes the tree into the head's config.json, which is replaced whole. Raises ConfigError where it cannot be."""
    if device not in DEVICES:
        raise ConfigError(f"a head's config keeps trees for {' and '.join(DEVICES)}, none for {device}")
    carried_shape(folder, device)  # refuses what it could not be added to
    checked_shape(list(shape.tree), "the tree to save")
    file = folder / "config.json"
    try:
        config = load_json(file)
        config.setdefault("draftwing", {}).setdefault("shapes", {})[device] = list(shape.tree)
        write_text(file, json.dumps(config, indent=2) + "\n")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file} cannot be rewritten: {error}") from None


def checked_shape(value: Any, where: str) -> TreeShape:
    """Returns the tree of a list of steps, topk and draft tokens. Raises ConfigError, beginning with `where`, if none
    has these."""
    is_shape = (
        isinstance(value, list)
        and len(value) == len(TREE)
        and all(type(x) is int and low <= x <= high for x, (low, high) in zip(value, (STEPS, TOPK, NODES), strict=True))
    )
    if not is_shape:
        raise ConfigError(f"{where}: expected [steps, topk, draft tokens] such as [3, 1, 4], found {show(value)}")
    steps, topk, nodes = value
    if not steps < nodes <= max_nodes(steps, topk):
        raise ConfigError(
            f"{where}: expected {steps + 1} to {max_nodes(steps, topk)} draft tokens for {steps} steps and topk "
            f"{topk}, found {nodes}"
        )
    return TreeShape(steps, topk, nodes)


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected an object, found {show(value)}")
    return value
