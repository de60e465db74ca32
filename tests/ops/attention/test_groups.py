"""Groups of nodes that read keys together: each node finds its keys, in the chunks that a plain step has them in."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from attention_cases import make_case
from torch import Tensor

from draftwing.ops.attention.batch import Ragged

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton"),
    pytest.mark.usefixtures("mended_interpreter"),
]


def keys_of(found: tuple[Tensor, ...], query: int, leader: int) -> dict[int, tuple[int, int]]:
    """By column of the page table what a query sees: lane and position."""
    columns, places, seen, group_of, _ = (each.tolist() for each in found)
    at, keys = leader + group_of[query], dict[int, tuple[int, int]]()
    for lane, column in enumerate(columns[at]):
        if seen[query][lane // 16] >> lane % 16 & 1:
            assert column >= 0 and column not in keys
            keys[column] = lane, places[at][lane]
    return keys


@pytest.mark.parametrize("any_lane", [False, True])
@pytest.mark.parametrize("nodes, chain", [(2, False), (5, False), (16, False), (23, False), (9, True), (40, True)])
@pytest.mark.further(any_lane=False, nodes=[5, 23, 40])
@pytest.mark.further(any_lane=True, nodes=[2, 9, 16])
def test_each_node_finds_its_keys(
    nodes: int, chain: bool, any_lane: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftwing.ops.attention import triton_groups

    monkeypatch.setattr(triton_groups, "is_hopper", lambda: any_lane)
    case = make_case([*range(32, 49), 0], nodes, device, chain=chain, seed=nodes)
    found = triton_groups.tree_groups(case.prefix, case.path, case.path_len)
    shared = 0
    for b, prefix in enumerate(case.prefix.tolist()):
        first = prefix // 16 * 16
        for node in range(nodes):
            query, leader = b * nodes + node, b * nodes + node // 4 * 4
            expected = {at: at for at in range(first, prefix)}
            length = int(case.path_len[b, node])
            expected |= {prefix + int(entry): prefix + i for i, entry in enumerate(case.path[b, node, :length])}
            keys = keys_of(found, query, leader)
            assert {column: place for column, (_, place) in keys.items()} == expected
            for lane, place in keys.values():
                assert lane // 16 == (place - first) // 16, "a key is in the chunk of its position"
                assert any_lane or lane == place - first
            assert 0 <= found.group_of[query] < found.groups[query] <= 4
            shared += int(found.groups[query] < min(4, nodes - node // 4 * 4))
    assert shared or (nodes > 16 and chain) or not (any_lane or chain), "some have a group together"


def test_ragged_trees_have_the_groups_of_others(device: torch.device) -> None:
    from draftwing.ops.attention.triton_groups import tree_groups

    case = make_case([37, 60, 9, 0], 9, device, seed=1)
    counts = [9, 0, 5, 2]
    picked = torch.tensor([b * 9 + node for b, count in enumerate(counts) for node in range(count)], device=device)
    starts = torch.tensor([0, 9, 9, 14, 16], device=device)
    ragged = Ragged(case.rows, case.prefix, starts, 9, 4)
    path, path_len = case.path.flatten(0, 1)[picked].unsqueeze(1), case.path_len.flatten()[picked].unsqueeze(1)
    found = tree_groups(case.prefix, path, path_len, ragged)
    for b, count in enumerate(counts):
        one = tree_groups(case.prefix[b : b + 1], case.path[b : b + 1, : max(count, 1)], case.path_len[b : b + 1])
        for node in range(count):
            query = int(starts[b]) + node
            assert keys_of(found, query, int(starts[b]) + node // 4 * 4) == keys_of(one, node, node // 4 * 4)


@pytest.mark.parametrize("window", [0, 20])
def test_attention_with_keys_in_any_lane(window: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftwing.ops.attention import triton_groups
    from draftwing.ops.attention.batch import AttentionKind

    monkeypatch.setattr(triton_groups, "is_hopper", lambda: True)
    case = make_case([31, 70, 44, 0], 17, device, (4, 2), dtype=torch.float16, seed=3)
    case = replace(case, kind=AttentionKind(window=window))
    torch.testing.assert_close(case.run().double(), case.expected(), atol=2e-3, rtol=2e-3)
