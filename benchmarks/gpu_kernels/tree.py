"""Tree kernels: microseconds per launch inside a CUDA graph."""

from __future__ import annotations

import torch
from timing import replayed

from draftwing.engine.devices import pick_device
from draftwing.engine.row_table import RowTable
from draftwing.ops import make_ops
from draftwing.ops.assign.spec import new_calibration
from draftwing.ops.types import Draft

CONTEXT = 8192


def bench() -> list[tuple[str, float]]:
    cuda, found = torch.device("cuda"), []
    ops = make_ops(cuda)
    for batch in (1, 16, 64):
        rows = torch.arange(batch, device=cuda)
        slots = RowTable(batch, CONTEXT, pick_device("cuda", ops=ops))
        slots.kv_len.fill_(600)
        found.append((f"plain inputs, {batch} rows", replayed(lambda s=slots, r=rows: ops.plain_inputs(s, r))))
        for depth, nodes in ((0, 1), (3, 4), (5, 32), (8, 64)):
            node = torch.arange(nodes, device=cuda)
            parent = ((node - 1).clamp(0) if nodes == depth + 1 else node // 2).expand(batch, nodes).contiguous()
            tokens = node.expand(batch, nodes).contiguous()
            target = tokens - 1000  # nothing is accepted, so kv_len moves by one a launch; the walk takes as long
            draft, shape = Draft(tokens, parent, parent >= 0), f"{nodes} nodes deep {depth}, {batch} rows"
            tree, inputs = ops.tree_inputs(slots, rows, draft, depth)
            done = slots, rows, draft, tree, target, inputs.prefix_len, 31
            found += [
                (f"tree inputs, {shape}", replayed(lambda a=(slots, rows, draft, depth): ops.tree_inputs(*a))),
                (f"commit without path, {shape}", replayed(lambda a=done: ops.commit(*a, False))),
                (f"commit with path, {shape}", replayed(lambda a=done: ops.commit(*a, True))),
            ]
            if nodes > 1:
                counts = new_calibration(cuda)
                rank = draft._replace(grade=16 + node.expand(batch, nodes) % 16), tree, rows, slots.rows, counts
                ranked, total = ops.rank(*rank), batch * max(2, nodes // 4)
                assign = slots, rows, draft, tree, inputs, ranked, total
                learn = *done, True, ranked.mark, counts
                found += [
                    (f"rank, {shape}", replayed(lambda a=rank: ops.rank(*a))),
                    (f"assign {total}, {shape}", replayed(lambda a=assign: ops.assign(*a))),
                    (f"commit and learn, {shape}", replayed(lambda a=learn: ops.commit(*a))),
                ]
            slots.kv_len.fill_(600)
    return found


if __name__ == "__main__":
    for label, micros in bench():
        print(f"{label:50} {micros:8.2f} us")
