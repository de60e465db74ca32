"""What a step reports to a request that asked to see its drafts."""

from __future__ import annotations

from collections.abc import Sequence

from draftwing.core import StepResult, TracedNode, TracedStep


def traced_step(
    result: StepResult, row: int, traced: int, number: int, requests: int, tokens: Sequence[int]
) -> TracedStep:
    """row: of the result.  traced: its place among the plan's traced rows.  number, requests: as in `TracedStep`.
    tokens: that the request takes of the step; drafts past them do not count as accepted."""
    nodes = [] if result.drafts is None else _nodes(result, row, traced, len(tokens))
    return TracedStep(number, result.seconds, requests, nodes, list(tokens))


def _nodes(result: StepResult, row: int, traced: int, taken: int) -> list[TracedNode]:
    assert result.drafts is not None
    drafts = min(taken, int(result.count[row]) - 1)
    accepted = set(result.order[row, 1 : 1 + drafts].tolist())
    live = result.depth[row].nonzero()[0].tolist()
    place = {node: at for at, node in enumerate(live)}  # the root, node 0, has none
    tokens, parents = (part[traced].tolist() for part in result.drafts)
    source, verified = result.source[row].tolist(), result.verified[row].tolist()
    survival = result.survival[row].tolist()
    return [
        TracedNode(
            place.get(parents[node]), tokens[node], source[node], survival[node], verified[node], node in accepted
        )
        for node in live
    ]
