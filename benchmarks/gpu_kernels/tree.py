"""Tree kernels: microseconds per launch inside a CUDA graph."""

from __future__ import annotations

import torch
from timing import replayed

CONTEXT = 8192


def bench() -> list[tuple[str, float]]:
    from draftwing.ops.triton import tree as kernels

    found = []
    for batch in (1, 16, 64):
        rows = torch.arange(batch, device="cuda")
        table = torch.zeros(batch + 1, CONTEXT, dtype=torch.int64, device="cuda")
        text = torch.zeros_like(table)
        start = torch.full((batch + 1,), 600, device="cuda")
        last = torch.zeros_like(start)
        label = f"plain inputs, {batch} rows"
        found.append((label, replayed(lambda a=(rows, table, start, last): kernels.plain_inputs(*a))))
        for depth, nodes in ((0, 1), (3, 4), (5, 32), (8, 64)):
            node = torch.arange(nodes, device="cuda")
            parent = ((node - 1).clamp(0) if nodes == depth + 1 else node // 2).expand(batch, nodes).contiguous()
            alive = parent >= 0
            below = torch.zeros_like(parent)
            for i in range(1, nodes):
                below[:, i] = below.gather(1, parent[:, i : i + 1])[:, 0] + 1
            tokens = node.expand(batch, nodes).contiguous()
            target = tokens - 1000  # nothing is accepted, so kv_len moves by one a launch; the walk takes as long
            geometry = (parent, alive, rows, table, start, depth)
            settle = (tokens, parent, alive, below, target, rows, table, text, start.clone(), last, depth)
            shape = f"{nodes} nodes deep {depth}, {batch} rows"
            found += [
                (f"target inputs, {shape}", replayed(lambda a=geometry: kernels.target_inputs(*a))),
                (f"settle without path, {shape}", replayed(lambda a=settle: kernels.accept_and_advance(*a))),
                (f"settle with path, {shape}", replayed(lambda a=settle: kernels.accept_and_advance(*a, 31, 1))),
            ]
    return found


if __name__ == "__main__":
    for label, micros in bench():
        print(f"{label:50} {micros:8.2f} us")
