"""Menus of tree shapes: what a policy may choose from, the largest first and plain decoding last."""

from __future__ import annotations

from draftwing.core import PLAIN, TreeShape


def part_of(shape: TreeShape, verified: int) -> TreeShape:
    """Returns the shape with so many nodes of a row verified on average."""
    return shape._replace(verified=0 if verified >= shape.nodes else verified)


def tree_menu(shape: TreeShape) -> tuple[TreeShape, ...]:
    """Returns options for a drafter that pays for every level it drafts, on a device that drafts a wide level as fast
    as a narrow one: the whole tree, parts of it, a tree of half the depth, one level, nothing."""
    depth, topk, nodes = shape.tree
    menu = [part_of(shape, n) for n in (nodes, nodes // 2, nodes // 4) if n > 1]
    if depth > 3:
        half = TreeShape(depth // 2, topk, max(nodes // 2, depth // 2 + 1))
        menu.append(part_of(half, max(nodes // 4, 2)))
    if depth > 1:
        menu.append(part_of(TreeShape(1, topk, topk + 1), 2))
    return (*dict.fromkeys(menu), PLAIN)


def chain_menu(shape: TreeShape) -> tuple[TreeShape, ...]:
    """Returns options where every row of a level costs: the whole tree, the chain as deep, half of it, one level,
    nothing."""
    chains = []
    depth = shape.depth
    while depth:
        chains.append(TreeShape(depth, 1, depth + 1))
        depth //= 2
    longest = part_of(chains[0], (chains[0].nodes + 1) // 2)
    return (*dict.fromkeys((shape, chains[0], *((longest,) if shape.depth > 2 else ()), *chains[1:])), PLAIN)


def match_menu(shape: TreeShape) -> tuple[TreeShape, ...]:
    """Returns options for a drafter that pays for nothing but what is verified: parts of the largest tree."""
    parts, nodes = [shape], shape.nodes // 2
    while nodes > 1:
        parts.append(part_of(shape, nodes))
        nodes //= 2
    return (*parts, PLAIN)


def half_menu(shape: TreeShape) -> tuple[TreeShape, ...]:
    """Returns options where a step may have to verify whole trees: halves of the largest one."""
    menu = [shape]
    while menu[-1].nodes > 3:
        nodes = menu[-1].nodes // 2
        menu.append(TreeShape(min(shape.depth, nodes - 1), min(shape.topk, nodes - 1), nodes))
    return (*menu, PLAIN)
