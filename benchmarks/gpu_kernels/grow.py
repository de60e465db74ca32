"""What a model drafter does around its head, at the sizes of an 8B Llama: microseconds inside a CUDA graph.

An expansion is all launches of one tree but the head's own, whose hidden states and logits stand still here.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from timing import replayed
from torch import Tensor

from draftwing.config.trees import TreeShape
from draftwing.ops import make_ops
from draftwing.ops.expansion.spec import top_tokens
from draftwing.ops.table import TorchOps
from draftwing.ops.types import Continuations, First

HIDDEN, VOCAB, DRAFT_VOCAB, ROWS, LENGTH = 4096, 128256, 32000, 64, 4096


def make_slots(temperature: float) -> Any:
    """What the kernels read of a row table."""

    def ints(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, device="cuda")

    floats = torch.full((ROWS + 1, 3), temperature, device="cuda")
    return SimpleNamespace(
        table=ints(1 << 20, ROWS + 1, LENGTH), tokens=ints(VOCAB, ROWS + 1, LENGTH), kv_len=ints(512, ROWS + 1),
        last=ints(VOCAB, ROWS + 1), seed=ints(1 << 40, ROWS + 1), floats=floats,
    )  # fmt: skip


def bench() -> list[tuple[str, float]]:
    cuda, found = torch.device("cuda"), list[tuple[str, float]]()
    ops, by_torch = make_ops(cuda), TorchOps(cuda)
    greedy, noisy = make_slots(0.0), make_slots(0.8)
    target_ids = torch.randperm(VOCAB, device="cuda")[:DRAFT_VOCAB].sort().values

    def logits(nodes: int, vocab: int) -> Tensor:
        return (torch.randn(nodes, vocab, device="cuda") * 3).bfloat16()

    for size, topk, vocab in (
        (1, 8, DRAFT_VOCAB), (1, 8, VOCAB), (1, 1, VOCAB), (16, 8, DRAFT_VOCAB), (16, 8, VOCAB), (64, 1, VOCAB),
    ):  # fmt: skip
        rows, z = torch.arange(size, device="cuda"), logits(size * topk, vocab)
        ids = target_ids if vocab == DRAFT_VOCAB else None
        for name, slots in (("greedy", greedy), ("noisy", noisy)):
            us = replayed(
                lambda z=z, rows=rows, topk=topk, ids=ids, s=slots: ops.continuations(
                    z, s, rows, 2, topk, ids, rows[:0]
                )
            )
            found.append((f"continuations, {name}, {size * topk} x {vocab}, best {topk}", us))
        us = replayed(lambda z=z, topk=topk: top_tokens(z.float(), topk), 4)
        found.append((f"continuations, torch, greedy, {size * topk} x {vocab}, best {topk}", us))
    for shape, size, vocab, width, tail in (
        (TreeShape(5, 8, 32), 1, DRAFT_VOCAB, HIDDEN, 0),
        (TreeShape(5, 8, 32), 16, DRAFT_VOCAB, HIDDEN, 0),
        (TreeShape(5, 8, 32), 1, VOCAB, HIDDEN, 0),
        (TreeShape(3, 1, 4), 1, DRAFT_VOCAB, HIDDEN, 0),
        (TreeShape(3, 1, 4), 16, DRAFT_VOCAB, HIDDEN, 0),
        (TreeShape(4, 2, 7), 1, 49152, 0, 1),
    ):
        case = Expanded(shape, size, vocab, width, tail, greedy, target_ids if vocab == DRAFT_VOCAB else None)
        title = f"{tuple(shape)}, {size} rows, {vocab} tokens"
        found += [(f"{name}, {title}", us) for name, us in case.bench(ops, by_torch)]
    return found


class Expanded:
    """An expansion, and a draft extend, with a head that costs nothing."""

    def __init__(
        self, shape: TreeShape, size: int, vocab: int, width: int, tail: int, slots: Any, target_ids: Tensor | None
    ) -> None:
        self.shape, self.size, self.tail, self.slots, self.target_ids = shape, size, tail, slots, target_ids
        topk = shape.topk
        self.rows = torch.arange(size, device="cuda")
        self.hidden = torch.randn(size, topk, width or 576, device="cuda").bfloat16()
        self.logits = (torch.randn(size * topk, vocab, device="cuda") * 3).bfloat16()
        self.first = First(
            torch.randint(vocab, (ROWS + 1, topk), device="cuda"),
            -torch.rand(ROWS + 1, topk, device="cuda").cumsum(1),
            torch.randn(ROWS + 1, width, device="cuda").bfloat16(),
        )
        self.path = torch.randn(size * (shape.depth + 1), self.hidden.shape[2], device="cuda").bfloat16()
        self.count = torch.ones(size, dtype=torch.int64, device="cuda")

    def expansion(self, ops: TorchOps) -> Any:
        return ops.expand(self.slots, self.rows, self.shape, self.first, self.tail, 1 - self.tail, self.target_ids)

    def following(self, ops: TorchOps, logits: Tensor, ahead: int) -> Continuations:
        rows = self.rows
        return ops.continuations(logits, self.slots, rows, ahead, self.shape.topk, self.target_ids, rows[:0])

    def expand(self, ops: TorchOps) -> None:
        expansion = self.expansion(ops)
        for level in range(1, self.shape.depth):
            expansion.level()
            expansion.level_rows()
            expansion.add(self.following(ops, self.logits, level + 1), self.hidden)
        expansion.draft()

    def bench(self, ops: TorchOps, by_torch: TorchOps) -> list[tuple[str, float]]:
        slots, rows, ids = self.slots, self.rows, self.target_ids
        expansion = self.expansion(ops)
        expansion._candidate_ints.fill_(-1)  # levels in between, which are not run here
        expansion._candidate_score.fill_(-1e3)
        following = self.following(ops, self.logits, 2)
        one = self.following(ops, self.logits[: self.size], 1)
        feature = self.first.feature if self.first.feature.shape[1] else None
        found = [("first level", replayed(lambda: restart(expansion).level()))]

        def next_level() -> None:
            expansion._number = 1  # always the second level's turn
            expansion.add(following, self.hidden)
            expansion.level()

        def draft() -> None:
            expansion.add(following, self.hidden)
            expansion.draft()

        found += [("next level", replayed(next_level)), ("draft", replayed(draft))]
        newest = replayed(lambda: ops.newest_rows(self.path, self.count, 1, rows, feature))
        keep = replayed(lambda: ops.keep_first(one, rows, self.first, ids))
        found += [("newest rows", newest), ("keep first", keep)]
        if self.tail:
            chain = replayed(lambda: ops.chain(slots, rows, slots.kv_len[:ROWS], self.shape.depth + 2))
            found.append(("chain", chain))
        found.append(("expansion", replayed(lambda: self.expand(ops), 4)))
        found.append(("expansion by torch", replayed(lambda: self.expand(by_torch), 1)))
        return found


def restart(expansion: Any) -> Any:
    expansion._number, expansion._added = 0, None
    return expansion


if __name__ == "__main__":
    for label, us in bench():
        print(f"{us:9.1f} us  {label}")
