"""Drafters that look up on kernels: microseconds per launch inside a CUDA graph, at the default options."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from timing import replayed
from torch import Tensor

CONTEXT = 131072


class Slots(NamedTuple):
    tokens: Tensor
    kv_len: Tensor
    last: Tensor
    salt: Tensor


def bench() -> list[tuple[str, float]]:
    from draftwing.config.trees import TreeShape
    from draftwing.ops import make_ops
    from draftwing.ops.attention.batch import Batch
    from draftwing.spec.drafter import DraftStep, SeenTokens
    from draftwing.spec.lookup_drafter import NGramDrafter, SuffixDrafter

    cuda = torch.device("cuda")
    found = []
    for batch, length in ((1, 500), (1, 8000), (1, 120_000), (16, 500), (16, 8000), (64, 500), (64, 8000)):
        # Few token ids, so that there are many matches.
        tokens = torch.randint(0, 300, (batch + 1, CONTEXT), device=cuda)
        kv_len = torch.full((batch + 1,), length, device=cuda)
        slots = Slots(tokens, kv_len, tokens[:, length].contiguous(), torch.zeros_like(kv_len))
        rows = torch.arange(batch, device=cuda)
        none = rows[:0]
        seen = Batch(rows, none, none, none, none, kv_len[:batch] - 3)
        count = torch.full_like(rows, 3)
        for kind in (NGramDrafter, SuffixDrafter):
            drafter = kind(batch + 1, make_ops(cuda))
            name = f"{kind.__name__}, {batch} rows of {length} tokens"
            if kind is SuffixDrafter:
                begin = replayed(lambda d=drafter, a=(slots, rows, length): d.index.begin(*a))
                found.append((f"begin, {name}", begin))
            for width in (1, 9):
                ids = rows.new_zeros(batch * width)
                extend = replayed(partial(drafter.extend, SeenTokens(slots, seen, None, ids, count, none)))
                found.append((f"insert up to {width} tokens, {name}", extend))
            found.append((f"confidence, {name}", replayed(lambda d=drafter, a=(slots, rows, length): d.confidence(*a))))
            if length == 500:
                for shape in (TreeShape(5, 8, 8), TreeShape(8, 8, 16), TreeShape(18, 8, 64)):
                    micros = replayed(partial(drafter.propose, DraftStep(slots, rows, shape, length, none)))
                    found.append((f"build {shape.nodes} nodes deep {shape.depth}, {name}", micros))
    return found


if __name__ == "__main__":
    for label, micros in bench():
        print(f"{label:76} {micros:8.2f} us")
