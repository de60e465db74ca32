"""Penalties and biases of drafts against a loop in float64, of every device; in C also inside of a head's top-k."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftwing.engine.devices import pick_device
from draftwing.engine.row_table import RowTable
from draftwing.ops.cpu.extension import load_extension
from draftwing.ops.torch.ops import TorchOps
from draftwing.ops.types import DraftEdits, LogitEditor, NoiseKey
from draftwing.requests.sampling_params import SamplingParams
from draftwing.sampling.edits import EditTable

TARGET, PROMPT, LENGTH = 90, 12, 40  # tokens of the target, of prompts, and of the longest text
ASKED = [
    {},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8, "frequency_penalty": 0.7, "presence_penalty": -0.4},
    {"logit_bias": {3: 4.0, 11: -100.0, 40: 0.5, 80: 3.0}},
    {"repetition_penalty": 1.1, "frequency_penalty": -0.5, "logit_bias": {7: 1.5, 8: -1.5}},
    {"dry_multiplier": 3.0, "dry_allowed_length": 1},  # which drafts do not know of
]


class Case:
    """Rows of `ASKED` in another order, with texts of few tokens, so that many come several times."""

    def __init__(self, ops: TorchOps, mapped: bool) -> None:
        g, count, device = torch.Generator().manual_seed(1), len(ASKED), ops.device
        self.ops, self.table = ops, RowTable(count, LENGTH, pick_device(device.type, ops=ops))
        self.table.tokens[:] = torch.randint(0, 30, self.table.tokens.shape, generator=g)
        self.table.kv_len[:count] = torch.randint(PROMPT, LENGTH, (count,), generator=g)
        self.edits = EditTable(count + 1, TARGET, device)
        for row, asked in enumerate(ASKED):
            self.edits.write(row, SamplingParams(**asked), PROMPT, ())
        self.rows = torch.tensor([4, 0, 2, 1, 3])
        # A head with some of the target's tokens in an order of its own, or its first ones.
        self.ids = torch.randperm(TARGET, generator=g)[:64] if mapped else torch.arange(64)
        draft_ids = torch.full((TARGET,), -1).index_copy_(0, self.ids, torch.arange(64))
        self.draft_ids = draft_ids.to(device) if mapped else None

    def editor(self, at: list[int] | None = None, rows: Tensor | None = None) -> LogitEditor:
        edits, device = self.edits, self.ops.device
        which = None if at is None else torch.tensor(at, device=device)
        some = DraftEdits(which, edits.prompt_len, edits.penalties, edits.bias_ids, edits.bias_values)
        rows = (self.rows if rows is None else rows).to(device)
        return self.ops.logit_editor(self.table, rows, some, LENGTH - 1, 64, self.draft_ids)

    def expected(self, logits: Tensor, rows: Tensor) -> Tensor:
        """logits [B, K, V] -> float64"""
        found = logits.double().clone()
        for b, row in enumerate(rows.tolist()):
            asked = ASKED[row]
            text = self.table.tokens[row, : int(self.table.kv_len[row]) + 1].tolist()
            for place, token in enumerate(self.ids.tolist()):
                x, repetition = found[b, :, place], asked.get("repetition_penalty", 1.0)
                if token in text:
                    x = torch.where(x > 0, x / repetition, x * repetition)
                if token in text[PROMPT:]:
                    x = x - asked.get("presence_penalty", 0.0)
                x = x - text[PROMPT:].count(token) * asked.get("frequency_penalty", 0.0)
                found[b, :, place] = x + asked.get("logit_bias", {}).get(token, 0.0)
        return found


def made(dtype: torch.dtype, rows: int, seed: int = 0) -> Tensor:
    return (torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed)) * 4).to(dtype)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("nodes", [1, 3])
def test_logits_are_edited_by_the_text(ops: TorchOps, dtype: torch.dtype, mapped: bool, nodes: int) -> None:
    case = Case(ops, mapped)
    logits = made(dtype, 5 * nodes)
    wanted = case.expected(logits.view(5, nodes, 64), case.rows).flatten(0, 1)
    assert not torch.equal(wanted, logits.double())
    wide = torch.zeros(5 * nodes, 70, dtype=dtype)  # rows of logits are apart
    wide[:, :64] = logits
    for at in (None, [0, 2, 3, 4]):  # of which row 1 of the batch, without edits, is none
        found = wide.clone().to(ops.device)
        case.editor(at).apply(found[:, :64])
        torch.testing.assert_close(found[:, :64].cpu().double(), wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
        assert not found[:, 64:].any()


def test_rows_without_edits_keep_their_bits(ops: TorchOps) -> None:
    case, logits = Case(ops, True), made(torch.bfloat16, 2)
    found = logits.clone().to(ops.device)
    case.editor(rows=torch.tensor([0, 5])).apply(found)
    assert torch.equal(found.cpu(), logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_head_edits_before_it_chooses(dtype: torch.dtype, mapped: bool, threads: int) -> None:
    """Against its parts, of which each is tested alone: GEMM, edits, choice; with noise and without, in any threads."""
    if load_extension() is None:
        pytest.skip("the C kernels were not built")
    from draftwing.ops.cpu.arena import Arena
    from draftwing.ops.cpu.blocks import BlockedGemm
    from draftwing.ops.cpu.gemm import HeadTopK
    from draftwing.ops.cpu.ops import CpuOps
    from draftwing.ops.cpu.workers import Workers

    ops = CpuOps(torch.device("cpu"))
    case, g = Case(ops, mapped), torch.Generator().manual_seed(2)
    weight, states = (torch.randn(n, 96, generator=g).to(dtype) for n in (64, 6))
    gemm = BlockedGemm([ops.quantize(weight, "Q8_0")], dtype, Workers(), Arena())
    readout = HeadTopK(gemm, None, None, case.ids if mapped else None)
    rows = torch.tensor([2, 0, 4])
    keys = NoiseKey(torch.tensor([5, 6, 7]), torch.tensor([1, 2, 3]), torch.tensor([0.7, 0.0, 1.3]))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for key in (None, keys):
            logits = gemm.linear(states, None)
            unedited = logits.clone()
            case.editor(rows=rows).apply(logits)
            assert not torch.equal(logits[:2], unedited[:2]) and torch.equal(logits[2:4], unedited[2:4])
            best, logp = ops.top_tokens(logits, 3, 4, key, case.ids)
            ids, scores = torch.zeros(6, 4, dtype=torch.int64), torch.zeros(6, 4)
            readout.best(states, None, ids, scores, key, case.editor(rows=rows))
            assert torch.equal(ids, case.ids[best])
            torch.testing.assert_close(scores, logp)
    finally:
        torch.set_num_threads(before)
