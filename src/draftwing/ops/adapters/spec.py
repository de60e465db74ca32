"""What adapters of low rank (LoRA) add to the results of products: y += up @ (scale * (down @ x)), each row by its own.

A weight of a model and its adapters are never merged: a row's sums are its own, in one order, whatever rows of other
adapters or of none are beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

SIZES = (1, 17, 65)  # rows of batches that devices may have different kernels for


class AdapterWeights(NamedTuple):
    """What the adapters in S slots add to one matrix. Its outputs lie in slices, such as q, k and v, each with factors
    of its own; `rank` is the most that any may have. Row numbers of a slot begin with 1, for 0 is nobody's."""

    down: Tensor  # [S, slices, rank, inputs], zeros past a slot's own rank
    up: Tensor  # [S, rank, outputs]
    ranks: Tensor  # [S, slices] int64; 0: nothing is added
    scales: Tensor  # [S, slices] float32
    ends: Tensor  # [slices] int64: the first output behind each
    bounds: tuple[int, ...]  # 0 and `ends`, on the host

    @classmethod
    def empty(
        cls, slots: int, rank: int, inputs: int, ends: list[int], dtype: torch.dtype, device: torch.device
    ) -> AdapterWeights:
        """Returns weights of slots that add nothing. dtype: of factors. ends: of the slices, the outputs last."""
        slices = len(ends)
        return cls(
            torch.zeros(slots, slices, rank, inputs, dtype=dtype, device=device),
            torch.zeros(slots, rank, ends[-1], dtype=dtype, device=device),
            torch.zeros(slots, slices, dtype=torch.int64, device=device),
            torch.zeros(slots, slices, dtype=torch.float32, device=device),
            torch.tensor(ends, device=device),
            (0, *ends),
        )

    @property
    def inputs(self) -> int:
        return self.down.shape[3]

    @property
    def outputs(self) -> int:
        return self.bounds[-1]

    @property
    def rank(self) -> int:
        """Returns the most that a slot has room for."""
        return self.down.shape[2]

    def set(self, slot: int, place: int, down: Tensor, up: Tensor, scale: float) -> None:
        """Fills a slice of a slot, from 1 on. down [r, inputs], up [outputs of the slice, r], r at most `rank`."""
        rank, begin, end = len(down), *self.bounds[place : place + 2]
        self.down[slot - 1, place, :rank].copy_(down)
        self.up[slot - 1, :rank, begin:end].copy_(up.T)
        self.ranks[slot - 1, place], self.scales[slot - 1, place] = rank, scale

    def clear(self, slot: int, count: int = 1) -> None:
        """Lets so many slots, from 1 on, add nothing."""
        for part in (self.ranks, self.scales, self.down, self.up):
            part[slot - 1 : slot - 1 + count].zero_()


class QueryAdapters:
    """slots: of the queries of the forward that runs, [M] int64, 0 of one without an adapter; None: all are without.
    plan: what `AdapterOps.adapter_plan` made of them, for the forward's products."""

    def __init__(self) -> None:
        self.slots: Tensor | None = None
        self.plan: Tensor | None = None

    @property
    def adds(self) -> bool:
        """Returns whether a query of this forward has an adapter."""
        return self.slots is not None

    @contextmanager
    def of(self, slots: Tensor | None, plan: Tensor | None = None) -> Iterator[None]:
        """Has the forward inside be of queries with these slots."""
        assert self.slots is None, "forwards of a model do not run inside each other"
        assert slots is None or slots.is_contiguous(), "kernels read a slot a query"
        self.slots, self.plan = slots, plan
        try:
            yield
        finally:
            self.slots = self.plan = None

    def narrow(self, at: Tensor) -> None:
        """Goes on with the queries `at` [F] int64 alone."""
        self.slots, self.plan = None if self.slots is None else self.slots[at], None


class AdapterOps:
    """Here for tensors of any dtype; a row's bits may depend on the batch. adapts_ahead: whether `adapter_down` is best
    called before the product to which `adapter_up` adds, beside which it may run."""

    adapts_ahead = False

    def empty_adapters(
        self, slots: int, rank: int, inputs: int, ends: list[int], dtype: torch.dtype, device: torch.device,
        in_blocks: bool,
    ) -> AdapterWeights:  # fmt: skip
        """Returns what `AdapterWeights.empty` does, in fewer bits where that is faster. dtype: of activations.
        in_blocks: whether the matrix itself is held in fewer bits than these."""
        half = in_blocks and dtype == torch.float32
        return AdapterWeights.empty(slots, rank, inputs, ends, torch.bfloat16 if half else dtype, device)

    def adapter_plan(self, slots: Tensor) -> Tensor | None:
        """slots [M] int64 -> what the operations below need of them, if they need anything; without it they make it
        each time."""
        return None

    def adapt(self, y: Tensor, x: Tensor, weights: AdapterWeights, slots: Tensor, plan: Tensor | None = None) -> None:
        """y [M, outputs] += what the adapters in `slots` [M] add for x [M, inputs], rounded once more."""
        self.adapter_up(y, self.adapter_down(x, weights, slots, plan), weights, slots, plan)

    def adapter_down(self, x: Tensor, weights: AdapterWeights, slots: Tensor, plan: Tensor | None = None) -> Tensor:
        """x [M, inputs] -> scale * (down @ x) by slice, [M, slices * rank] or several such parts, in float32 or wider;
        of rows without an adapter anything."""
        wide = torch.promote_types(x.dtype, torch.float32)
        made = torch.zeros(len(x), *weights.down.shape[1:3], dtype=wide, device=x.device)
        for slot in _used(slots, weights):
            sums = torch.einsum("mk,srk->msr", x.to(wide), weights.down[slot - 1].to(wide))
            made = torch.where((slots == slot).view(-1, 1, 1), sums * weights.scales[slot - 1].to(wide)[:, None], made)
        return made.flatten(1)

    def adapter_up(
        self, y: Tensor, made: Tensor, weights: AdapterWeights, slots: Tensor, plan: Tensor | None = None
    ) -> None:
        """y [M, outputs] += up @ made, of rows that have an adapter. made: as `adapter_down` gives it."""
        by_slice = made.unflatten(1, weights.down.shape[1:3])
        for slot in _used(slots, weights):
            up = weights.up[slot - 1].to(made.dtype)
            added = [
                by_slice[:, place] @ up[:, begin:end] for place, (begin, end) in enumerate(pairwise(weights.bounds))
            ]
            summed = (y.to(made.dtype) + torch.cat(added, 1)).to(y.dtype)
            y.copy_(torch.where((slots == slot).unsqueeze(1), summed, y))


def _used(slots: Tensor, weights: AdapterWeights) -> Iterable[int]:
    """Returns the slots of rows but 0; all that there are where the host would have to wait for what rows have."""
    if slots.device.type != "cpu":
        return range(1, len(weights.down) + 1)
    return (slot for slot in slots.unique().tolist() if slot)
