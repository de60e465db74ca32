"""Steps of two rows through a gated delta net: prompts in chunks, trees, what of them is accepted, plain steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from draftwing.kv.pool import DeltaSpec, KVPool, RowStates
from draftwing.ops.attention.batch import Batch, ChunkSpan, DeltaInputs, DeltaWeights
from draftwing.ops.table import TorchOps

ROWS, NODES, LONGEST = 2, 8, 200
SLOTS = 2 * ROWS + 2  # of states: two of each row, and two that are saved
PARENTS = [0, 0, 0, 1, 1, 2, 5, 6]
ACCEPTED = [0, 2, 5]  # of the tree
Make = Callable[..., Tensor]  # of a shape, in the model's dtype
Prompts = tuple[tuple[tuple[int, int], tuple[tuple[int, int], ...]], ...]  # lengths of chunks, and what is saved
PROMPTS: Prompts = ((3, 70), ()), ((80, 2), ((1, 5), (66, 6)))  # more than 64 tokens, which a CPU makes ready at once
SHORT: Prompts = ((3, 9), ()), ((12, 2), ((1, 5), (8, 6)))  # for kernels that go token by token


class DeltaSteps:
    """`make` gives numbers around 0 of a shape, on the device. The rows' texts are of their own."""

    def __init__(self, ops: TorchOps, spec: DeltaSpec, dtype: torch.dtype, make: Make, lazy: bool = False) -> None:
        self.ops, self.spec, self.dtype, self.make = ops, spec, dtype, make
        self.device = ops.device
        self.pool = KVPool([spec], ROWS * LONGEST, dtype, self.device)
        self.states = RowStates({0: spec}, SLOTS, ROWS, NODES, dtype, self.device, lazy)
        self.pool.states = self.states
        self.states.set(torch.tensor([[0, 1, 2, 0], [1, 3, 4, 0]], device=self.device))
        heads = spec.value_heads
        self.weights = DeltaWeights(
            make(spec.channels, spec.conv_width).T.contiguous().T.float() / 2, -make(heads).float().abs(),
            make(spec.decays).float(),
            make(spec.value_dim).float(), 1e-6,
        )  # fmt: skip
        if not spec.corrects:
            self.weights = self.weights._replace(
                norm=make(heads * spec.value_dim).float(), conv_bias=make(spec.channels).float(),
                skip=make(heads).float(),
            )  # fmt: skip
        table = 1 + torch.arange(ROWS * LONGEST).view(LONGEST, ROWS).t()
        self.table = torch.cat((table, torch.zeros(1, LONGEST, dtype=torch.int64)))
        self.kv_len = torch.zeros(ROWS, dtype=torch.int64)
        self.backend = ops.attention(self.pool)

    def inputs(self, count: int) -> DeltaInputs:
        spec = self.spec
        both = self.make(count, spec.channels + spec.value_heads * spec.value_dim)  # of one GEMM, so rows are apart
        gates = self.make(count, spec.value_heads + spec.decays)
        split = gates.tensor_split((spec.value_heads,), 1)
        return DeltaInputs(*both.tensor_split((spec.channels,), 1), *split)

    def run(self, batch: Batch, inputs: DeltaInputs) -> Tensor:
        return self.backend.bind(self.moved(batch), 0).delta(0, inputs, self.weights)

    def moved(self, batch: Batch) -> Batch:
        """Everything but the host's part on the device, where what is there already stays where it is."""
        return Batch(*(part.to(self.device) if isinstance(part, torch.Tensor) else part for part in batch))

    def advance(self, lengths: torch.Tensor, nodes: int = 0) -> None:
        self.ops.advance_states(self.states, torch.arange(ROWS, device=self.device), lengths.to(self.device), nodes)

    def chunks(self, lengths: tuple[int, int], saves: tuple[tuple[int, int], ...] = ()) -> Batch:
        """The next chunk of each row."""
        starts = self.kv_len.tolist()
        first = ChunkSpan(0, 0, starts[0], lengths[0], saves=saves)
        spans = first, ChunkSpan(1, lengths[0], starts[1], lengths[1])
        at = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)])
        rows = torch.arange(ROWS)
        slots = self.table[rows.repeat_interleave(torch.tensor(lengths)), at]
        return Batch(rows, at, at, slots, self.table, self.kv_len, chunks=spans, bound=LONGEST)

    def trees(self, parents: list[int]) -> Batch:
        """One of each row."""
        paths = [[0]]
        for node, parent in enumerate(parents[1:], 1):
            paths.append([*paths[parent], node])
        depth = max(map(len, paths))
        path = torch.tensor([[*own, *[0] * (depth - len(own))] for own in paths]).repeat(ROWS, 1, 1)
        lengths = torch.tensor([len(own) for own in paths]).repeat(ROWS, 1)
        at = (self.kv_len[:, None] + lengths - 1).flatten()
        slots = torch.cat([self.table[row, self.kv_len[row] :][: len(paths)] for row in range(ROWS)])
        return Batch(
            torch.arange(ROWS), at, at, slots, self.table, self.kv_len.clone(), path, lengths, window=len(paths),
            bound=LONGEST,
        )  # fmt: skip

    def commit(self, nodes: int, accepted: list[int]) -> None:
        """After a step of trees."""
        self.advance(self.kv_len, nodes)
        order = accepted + [node for node in range(nodes) if node not in accepted]
        for row in range(ROWS):
            here = self.table[row, self.kv_len[row] :][:nodes]
            here.copy_(here[order])
        self.kv_len += len(accepted)

    def all(self, prompts: Prompts = PROMPTS) -> Iterator[Tensor]:
        """What each step gives, and all that is kept at the end."""
        for lengths, saves in prompts:
            yield self.run(self.chunks(lengths, saves), self.inputs(sum(lengths)))
            self.kv_len += torch.tensor(lengths)
            self.advance(self.kv_len - 1)
        more = [([0], [0])] * (2 if self.states.lazy else 0)  # the first of these writes no state
        for parents, accepted in (
            (PARENTS, ACCEPTED), ([0], [0]), *more, (PARENTS, [0]), ([0, 0, 1], [0, 1, 2]), ([0], [0]),
        ):  # fmt: skip
            yield self.run(self.trees(parents), self.inputs(ROWS * len(parents)))
            self.commit(len(parents), accepted)
        yield from self.states.layers[0][1:]
        yield from (self.states.read, self.states.write, self.states.page, self.states.length, self.states.fresh)
