"""Times of the sampling kernels: a decode step, a batch and a tree batch, greedy, noisy and filtered."""

from __future__ import annotations

from typing import NamedTuple

import torch
from timing import replayed
from torch import Tensor

VOCAB, HIDDEN, BANS = 128256, 4096, 16


class Table(NamedTuple):
    seed: Tensor
    floats: Tensor
    top_k: Tensor
    ban_until: Tensor
    ban_ids: Tensor


def make_table(rows: int, kind: str) -> Table:
    device = torch.device("cuda")
    table = Table(
        torch.arange(rows, device=device),
        torch.tensor([0.0 if kind == "greedy" else 1.0, 1.0, 0.0], device=device).repeat(rows, 1),
        torch.zeros(rows, dtype=torch.int64, device=device),
        torch.zeros(rows, dtype=torch.int64, device=device),
        torch.full((rows, BANS), -1, device=device),
    )
    if kind == "top-p":
        table.floats[:, 1] = 0.9
    if kind == "top-k top-p":
        table.floats[:, 1] = 0.95
        table.top_k.fill_(40)
    return table


def measure(rows: int, nodes: int, kind: str, spread: float) -> float:
    """Microseconds of one `draw`; the logits are read from memory where they are more than the cache holds."""
    from draftwing.ops import make_ops
    from draftwing.ops.types import Rescoring, SampleInputs, SamplingGroups

    torch.manual_seed(0)
    hidden = torch.randn(rows, nodes, HIDDEN, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(VOCAB, HIDDEN, dtype=torch.bfloat16, device="cuda").mul_(spread / HIDDEN**0.5)
    logits = hidden @ weight.T
    depth = torch.arange(nodes, device="cuda").expand(rows, nodes).contiguous()
    table = make_table(rows, kind)
    order = torch.arange(rows, device="cuda")
    filtered = kind.startswith("top")

    ops, nobody = make_ops(torch.device("cuda")), SamplingGroups(order[:0], order[:0], order[:0])
    rescoring = Rescoring(hidden, weight, lambda states, ids: ops.exact_logits(states, weight, ids))

    drawn = SampleInputs(order, logits, hidden, depth, depth, nodes, depth, depth.unsqueeze(2), depth)

    def once() -> None:
        ops.draw(drawn, table, nobody, filtered, rescoring)

    return replayed(once)


def bench() -> list[tuple[str, float]]:
    """Logits of standard deviation 3 (a trained model's tail), and of 1, where top-p keeps most of the vocabulary."""
    results = []
    for rows, nodes in ((1, 1), (1, 32), (16, 1), (64, 1), (16, 32)):
        for kind in ("greedy", "noisy", "top-k top-p", "top-p"):
            results.append((f"draw {rows}x{nodes} {kind}", measure(rows, nodes, kind, 3.0)))
    for rows in (1, 64):
        results.append((f"draw {rows}x1 top-p, flat logits", measure(rows, 1, "top-p", 1.0)))
    return results


if __name__ == "__main__":
    for label, microseconds in bench():
        print(f"{microseconds:9.2f}  {label}")
