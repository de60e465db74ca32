"""Menus have what they are asked for first, and plain decoding last."""

from __future__ import annotations

import pytest
from worlds import TREE

from draftwing.core import PLAIN, TreeShape
from draftwing.sched.policy.menus import chain_menu, half_menu, match_menu, tree_menu


@pytest.mark.parametrize("menu_of", [tree_menu, chain_menu, match_menu, half_menu])
@pytest.mark.parametrize(
    "tree",
    [TREE[:3], (3, 1, 4), (4, 2, 8), (1, 1, 2), (2, 2, 5), (6, 8, 64)],
    ids=lambda tree: "-".join(map(str, tree)),
)
def test_menus(menu_of: object, tree: tuple[int, int, int]) -> None:
    shape = TreeShape(*tree)
    menu = menu_of(shape)  # type: ignore[operator]
    assert menu[0] == shape and menu[-1] == PLAIN and len(set(menu)) == len(menu)
    for one in menu[:-1]:
        assert 1 < one.queries <= one.nodes <= max(shape.nodes, shape.topk + 1) and 0 < one.depth <= shape.depth
        assert one.nodes > one.depth and one.topk <= shape.topk
