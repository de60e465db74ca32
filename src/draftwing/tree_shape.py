"""Shapes of draft trees, and who proposes what is in them. Options name them: nothing imported here takes time."""

from __future__ import annotations

from typing import NamedTuple


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
# Who proposed a node: a model, a lookup of earlier text, or both.
SOURCES = ("other", "model", "lookup", "both")
OTHER, MODEL, LOOKUP = range(3)
MAX_CONFIDENCE = 31  # a drafter's confidence for a row's next draft lies in [0, MAX_CONFIDENCE]
