"""Penalties and biases in the C sampler against those in torch, which tests/sampling/test_edits.py holds to float64."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from draftwing.core import TOKEN
from draftwing.engine.devices import pick_device
from draftwing.engine.row_table import RowTable
from draftwing.ops.cpu.extension import load_extension
from draftwing.ops.cpu.ops import CpuOps
from draftwing.ops.torch.sampling import CANDIDATES
from draftwing.ops.types import Edits, Rescoring, SamplingGroups, Tree
from draftwing.requests.sampling_params import SamplingParams
from draftwing.sampling.edits import EditTable, Nodes

if load_extension() is None:
    pytest.skip("the C kernels were not built", allow_module_level=True)

NONE = torch.empty(0, dtype=torch.int64)
NODES, SIZE, DEPTH = 5, 64, 2
ASKED = [
    {},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8, "frequency_penalty": 0.7, "presence_penalty": -0.4},
    {"logit_bias": {3: 4.0, 11: -100.0, 40: 0.5}},
    {"repetition_penalty": 1.1, "frequency_penalty": -0.5, "logit_bias": {7: 1.5, 8: -1.5}},
    {"presence_penalty": 2.0},
    {"dry_multiplier": 2.0, "dry_allowed_length": 1},
    {
        "dry_multiplier": 0.7,
        "dry_base": 3.0,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "logit_bias": {4: 2.0},
    },
]


class Case(NamedTuple):
    table: RowTable
    edits: EditTable
    rows: Tensor
    logits: Tensor
    hidden: Tensor
    weight: Tensor
    tokens: Tensor
    tree: Tree

    @property
    def positions(self) -> Tensor:
        return self.table.kv_len[self.rows].unsqueeze(1) + self.tree.depth

    def row_edits(self) -> Edits:
        edits, table = self.edits, self.table
        return Edits(
            self.rows, table.tokens, edits.prompt_len, edits.penalties, edits.bias_ids, edits.bias_values, edits.costs,
            self.tokens, self.tree.path, self.tree.path_len,
        )  # fmt: skip

    def drawn(self, ops: CpuOps, rescored: bool, edits: bool = True) -> Tensor:
        rescoring = Rescoring(self.hidden, self.weight, lambda x, ids: ops.exact_logits(x, self.weight, ids))
        asked = SamplingGroups(NONE, NONE, NONE), True, rescoring if rescored else None
        return ops.draw(
            self.logits, self.positions, self.tree.depth, DEPTH, self.table, self.rows, *asked,
            self.row_edits() if edits else None,
        )  # fmt: skip


def make_case(ops: CpuOps, dtype: torch.dtype, vocab: int, temperature: float, filters: dict[str, float]) -> Case:
    """Rows of `ASKED` in another order, with texts of few tokens, so that many come several times."""
    generator = torch.Generator().manual_seed(vocab)
    count = len(ASKED)
    table = RowTable(count, 60, pick_device("cpu", ops=ops))
    table.tokens[:] = torch.randint(0, 30, table.tokens.shape, generator=generator)
    table.kv_len[:count] = torch.randint(20, 50, (count,), generator=generator)
    table.seed[:] = torch.randint(-(2**62), 2**62, (count + 1,), generator=generator)
    table.floats[:, 0], table.floats[:, 1] = temperature, filters.get("top_p", 1.0)
    table.floats[:, 2], table.top_k[:] = filters.get("min_p", 0.0), int(filters.get("top_k", 0))
    table.ban_until[1], table.ban_ids[:] = 10**6, -1
    table.ban_ids[1, :2] = torch.tensor([5, 9])
    edits = EditTable(count + 1, vocab, torch.device("cpu"))
    for row, asked in enumerate(ASKED):
        edits.write(row, SamplingParams(**asked), 15, ())
    rows = torch.randperm(count, generator=generator)
    parent = torch.tensor([[0, 0, 0, 1, 1]]).expand(count, NODES).contiguous()
    tokens = torch.randint(0, 30, (count, NODES), generator=generator)
    tokens[:, 0] = table.tokens[rows, table.kv_len[rows]]
    tree = Tree(
        torch.tensor([[0, 1, 1, 2, 2]]).expand(count, -1).contiguous(),
        torch.tensor([[[0, 0, 0], [0, 1, 1], [0, 2, 2], [0, 1, 3], [0, 1, 4]]]).expand(count, -1, -1).contiguous(),
        torch.tensor([[1, 2, 2, 3, 3]]).expand(count, -1).contiguous(),
    )
    assert (tree.depth.gather(1, parent) + 1 == tree.depth)[:, 1:].all()
    hidden = torch.randn(count, NODES, SIZE, generator=generator).to(dtype)
    weight = (torch.randn(vocab, SIZE, generator=generator) * 0.4).to(dtype)
    logits = (hidden.double() @ weight.double().T).to(dtype)
    return Case(table, edits, rows, logits, hidden, weight, tokens, tree)


@pytest.fixture
def ops() -> CpuOps:
    return CpuOps(torch.device("cpu"))


@pytest.mark.parametrize(
    ("temperature", "filters"),
    [(0.0, {}), (0.7, {}), (0.7, {"min_p": 0.1}), (0.7, {"top_k": 12, "top_p": 0.8})],
    ids=["greedy", "none", "min p", "k, p"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_token_is_that_of_the_edits_in_torch(
    ops: CpuOps, dtype: torch.dtype, temperature: float, filters: dict[str, float], threads: int
) -> None:
    """Bit for bit: a request that is prefilled again goes on with these."""
    case, before = make_case(ops, dtype, 333, temperature, filters), torch.get_num_threads()
    every, table = torch.arange(len(ASKED)), case.table
    newest = table.kv_len[case.rows]
    features = case.edits.features(case.rows.tolist())
    nodes = Nodes(case.rows, table.tokens, newest, 59, case.tokens, case.tree.path, case.tree.path_len)
    edit = case.edits.apply(case.logits.float(), features, nodes)

    def exact(ids: Tensor, only: Tensor | None) -> Tensor:
        assert only is None
        return edit.at(ops.exact_logits(case.hidden, case.weight, ids), ids, only)

    expected = ops.sample(
        edit.logits, case.positions, case.tree.depth, DEPTH, table.sampling(case.rows), every,
        every if filters else NONE, (case.rows == 1).nonzero().flatten(), exact,
    )  # fmt: skip
    try:
        torch.set_num_threads(threads)
        assert torch.equal(case.drawn(ops, rescored=True), expected)
    finally:
        torch.set_num_threads(before)
    assert not torch.equal(case.drawn(ops, rescored=True, edits=False) & TOKEN, expected)
    assert CANDIDATES < 333
