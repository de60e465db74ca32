"""The sampler in C (ops/cpu/csrc/sampling.c), for all batches of the process: its noise differs from torch's in the
last bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwing.ops.cpu.arguments import addresses, ints
from draftwing.ops.cpu.extension import DTYPES, MAX_TOPK
from draftwing.ops.cpu.runtime import CpuRuntime, InC
from draftwing.ops.cpu.workers import Workers
from draftwing.ops.expansion.spec import TextEditor
from draftwing.ops.sampling.spec import CANDIDATES, Exact, SamplingOps, without_banned
from draftwing.ops.types import (
    Edits,
    Level,
    NoiseKey,
    Rescoring,
    RowTensors,
    SampleInputs,
    SamplingGroups,
    SamplingRows,
)


class CpuSamplingOps(InC, SamplingOps):
    """Overrides all of `SamplingOps`."""

    draws_by_row = True
    edits_by_row = True

    def __init__(self, runtime: CpuRuntime) -> None:
        super().__init__(runtime)
        self._scratches: dict[tuple[int, int], Any] = {}  # arrays

    def draw(
        self,
        drawn: SampleInputs,
        table: RowTensors,
        drawing: SamplingGroups,
        filtered: bool,
        rescoring: Rescoring | None,
        edits: Edits | None = None,
    ) -> Tensor:
        """Finds out by value what each row asks for."""
        x = drawn.logits if drawn.logits.dtype in DTYPES else drawn.logits.float()
        params, _ = self.sampling_rows(table, drawn.rows, 0)
        count = 1 if rescoring is None else min(CANDIDATES, x.shape[-1])
        edited = None if edits is None else _arguments_of(drawn, table, edits)
        ids, noise, changes = self._candidates(x, drawn.positions, drawn.depth, params, count, filtered, edited=edited)
        if rescoring is None:
            return ids.squeeze(-1)
        return self.best_candidate(ids, noise, rescoring.exact(ids, None), changes)

    def sampling_rows(self, table: RowTensors, rows: Tensor, ahead: int) -> tuple[SamplingRows, Tensor]:
        """Returns what `table.sampling` does of rows [B], and their positions kv_len + ahead [B] int64."""
        bans = table.ban_ids.shape[1]
        numbers, floats = self._read_rows(table, rows, ahead)
        seed, position, top_k, ban_until = numbers[: 4 * len(rows)].view(4, -1).unbind()
        ban_ids = numbers[4 * len(rows) :].view(-1, bans)
        return SamplingRows(seed, floats[0], top_k, floats[1], floats[2], ban_until, ban_ids), position

    def noise_key(self, table: RowTensors, rows: Tensor, ahead: int) -> NoiseKey:
        """`ExpansionOps.noise_key`"""
        numbers, floats = self._read_rows(table, rows, ahead)
        seed, position, *_ = numbers[: 4 * len(rows)].view(4, -1).unbind()
        return NoiseKey(seed, position, floats)

    def _read_rows(self, table: RowTensors, rows: Tensor, ahead: int) -> tuple[Tensor, Tensor]:
        """Returns seed, position, top_k, ban_until and ban_ids one after the other, [(4 + S) * B] int64, and
        temperature, top_p, min_p [3, B]."""
        batch, bans, rows = rows.shape[0], table.ban_ids.shape[1], rows.contiguous()
        numbers, floats = ints((4 + bans) * batch), torch.empty(3, batch, dtype=torch.float32)
        read = table.seed, table.kv_len, table.floats, table.top_k, table.ban_until, table.ban_ids
        assert all(field.is_contiguous() for field in read)
        self.raw.sampling_rows(rows, batch, *read, bans, ahead, numbers, floats)
        return numbers, floats

    def gumbel(self, seed: Tensor, position: Tensor, vocab: int) -> Tensor:
        return self._gumbel(seed, position, None, vocab)

    def gumbel_at(self, seed: Tensor, position: Tensor, token_ids: Tensor) -> Tensor:
        return self._gumbel(seed, position, token_ids, token_ids.shape[-1])

    def sample(
        self,
        logits: Tensor,
        positions: Tensor,
        depth: Tensor,
        depth_max: int,
        params: SamplingRows | None,
        noisy: Tensor,
        filtered: Tensor,
        banning: Tensor,
        exact: Exact | None = None,
    ) -> Tensor:
        assert params is not None or (not noisy.shape[0] and not banning.shape[0])
        if params is not None and banning.shape[0]:
            logits = without_banned(logits, positions, params, banning)
        x = logits if logits.dtype in DTYPES else logits.float()
        count = 1 if exact is None else min(CANDIDATES, x.shape[-1])
        ids, noise = self.candidates(x, positions, depth, params if noisy.shape[0] else None, filtered, count)
        if exact is None:
            return ids.squeeze(-1)
        return self.best_candidate(ids, noise, exact(ids, None))  # the noise of what was removed is -inf

    def candidates(
        self,
        logits: Tensor,
        positions: Tensor,
        depth: Tensor,
        params: SamplingRows | None,
        filtered: Tensor,
        count: int,
    ) -> tuple[Tensor, Tensor]:
        """Returns the best candidates of each node, bans aside.

        logits [B, N, V] float32 or bfloat16; positions, depth [B, N] int64; params: fields [B], None where all rows are
        greedy; filtered [Bf] int64: batch indices of rows with filters; count: at most `MAX_TOPK` and V. Returns ids
        [B, N, count] int64, in ascending order, and what the noise adds to their logits [B, N, count] float32, -inf
        where a token cannot be chosen. Of equally good tokens those with the lowest ids.
        """
        flags = None
        if params is not None:
            params = params._replace(ban_until=torch.zeros_like(params.ban_until))
            if filtered.shape[0]:
                flags = torch.zeros_like(params.seed).index_fill_(0, filtered, 1)
        return self._candidates(logits, positions, depth, params, count, flags is not None, flags)[:2]

    def _candidates(
        self,
        logits: Tensor,
        positions: Tensor,
        depth: Tensor,
        params: SamplingRows | None,
        count: int,
        filtered: bool,
        flags: Tensor | None = None,
        edited: tuple[Any, ...] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """`candidates` after bans and edits, and of each what an edit makes of its logit, None without edits.

        filtered: whether any row has filters; flags [B] int64: which rows have them, None: those whose values say so.
        edited: see `_arguments_of`.
        """
        batch, nodes, vocab = logits.shape
        assert count <= min(MAX_TOPK, vocab) and positions.dtype == depth.dtype == torch.int64
        logits, positions, depth = logits.contiguous(), positions.contiguous(), depth.contiguous()
        fields: list[Any] = [None] * 8  # seed, temperature, flags, top_k, top_p, min_p, ban_until, ban_ids
        if params is not None:
            seed, temperature, top_k, top_p, min_p, *banned = (field.contiguous() for field in params)
            filters = (flags, top_k, top_p, min_p) if filtered else [None] * 4
            fields = [seed, temperature, *filters, *banned]
        ids, noise = ints(batch, nodes, count), torch.empty(batch, nodes, count, dtype=torch.float32)
        more: tuple[Any, ...] = ()
        changes, width = None, 0
        if edited is not None:
            changes, width = torch.empty(batch, nodes, count, 2, dtype=torch.float32), edited[-4]
            more = *edited, changes
        # One size for trees of all depths: the kernel has a stride of its own.
        scratch = self.scratch(self.workers.most, 5 * (-(-vocab // 16) * 16) + -(-width // 256) * 256)
        self.raw.draw(
            ids, noise, count, logits, logits.dtype == torch.bfloat16, batch * nodes, nodes, vocab, positions, depth,
            *fields, 0 if params is None else params.ban_ids.shape[1], scratch, self.workers.address, *more,
        )  # fmt: skip
        return ids, noise, changes

    def scratch(self, threads: int, size: int) -> int:
        """Returns the address of memory of the sampler [threads, size] int32. All calls share it, also those that are
        recorded: it is large, and in the caches where rows have edits or filters. One call at a time."""
        if (threads, size) not in self._scratches:
            # No tensor: what torch makes while calls are recorded is of that step alone.
            self._scratches[threads, size] = np.empty((threads, size), np.int32)
        return int(self._scratches[threads, size].ctypes.data)

    def best_candidate(self, ids: Tensor, noise: Tensor, logits: Tensor, changes: Tensor | None = None) -> Tensor:
        """ids [B, N, K] int64, noise, logits [B, N, K] float32, changes [B, N, K, 2] float32 or None: factor and
        summand of each logit's edit -> of each node the id with the largest noise + logit, the first of equals, [B, N].
        In torch it is five operations, all of which start slowly."""
        batch, nodes, count = ids.shape
        assert ids.dtype == torch.int64 and noise.dtype == logits.dtype == torch.float32
        assert noise.shape == logits.shape == ids.shape and count
        ids, noise, logits = ids.contiguous(), noise.contiguous(), logits.contiguous()
        tokens = ids.new_empty(batch, nodes)
        assert changes is None or (changes.shape == (*ids.shape, 2) and changes.is_contiguous())
        self.raw.heaviest(tokens, ids, noise, logits, batch * nodes, count, changes)
        return tokens

    def _gumbel(self, seed: Tensor, position: Tensor, token_ids: Tensor | None, size: int) -> Tensor:
        """token_ids None: 0 .. size - 1."""
        batch, nodes = position.shape
        assert seed.dtype == position.dtype == torch.int64
        seed, position = seed.contiguous(), position.contiguous()
        stride = 0
        if token_ids is not None:
            token_ids = token_ids.long()
            if token_ids.dim() > 1:
                token_ids, stride = token_ids.expand(batch, nodes, size), size
            token_ids = token_ids.contiguous()
        out = torch.empty(batch, nodes, size, dtype=torch.float32)
        self.raw.gumbel(out, seed, position, token_ids, batch * nodes, nodes, size, stride, self.workers.address)
        return out


def _arguments_of(drawn: SampleInputs, table: RowTensors, edits: Edits) -> tuple[Any, ...]:
    """Returns how edits are passed to the C kernel; their tensors are contiguous."""
    rows, tokens, path, path_len = (
        part.contiguous() for part in (drawn.rows, drawn.tokens, drawn.path, drawn.path_len)
    )
    assert all(part.is_contiguous() for part in (table.tokens, *edits[:5]))
    (nodes, width), biases, longest = path.shape[1:], edits.bias_ids.shape[1], edits.costs.shape[1] - 1
    read = rows, table.tokens, table.tokens.shape[1], *edits[:4], biases, edits.costs, longest
    return *read, None, None, tokens, width, path, path_len, nodes


class CpuLogitEditor:
    """A `LogitEditor`. Each call counts the text again, which takes less than the logits of a node."""

    def __init__(
        self, raw: Any, workers: Workers, scratch: Callable[[int, int], int], table: RowTensors, rows: Tensor,
        edits: Edits, bound: int, vocab: int, draft_ids: Tensor | None,
    ) -> None:  # fmt: skip
        """raw: the extension module; scratch: as `CpuSamplingOps.scratch`; the others as for
        `ExpansionOps.logit_editor`. Finds out by value which rows have edits."""
        self._raw, self._workers, self._scratch = raw, workers, scratch
        self._vocab, self.batch = vocab, rows.shape[0]
        self._others = table, rows, edits, bound, vocab, draft_ids  # of an editor in torch
        self._levels: list[Level] = []
        rows, own = rows.contiguous(), edits[:5]
        assert table.tokens.is_contiguous() and all(part.is_contiguous() for part in own)
        self._held = rows
        prompt_len, penalties, bias_ids, bias_values, costs = addresses(own)
        self._numbers = (
            rows.data_ptr(), table.tokens.data_ptr(), table.tokens.shape[1], prompt_len, penalties, bias_ids,
            bias_values, edits.bias_ids.shape[1], costs, edits.costs.shape[1] - 1,
            0 if draft_ids is None else draft_ids.data_ptr(), table.kv_len.data_ptr(),
        )  # fmt: skip
        self._above = ints(self.batch, 0)  # [B * K, D] tokens from below the root down to each node of the level

    def follow(self, level: Level) -> None:
        ids, parent = level.ids.contiguous(), level.parent.contiguous()
        batch, topk = ids.shape
        width = self._above.shape[1]
        above = ints(batch * topk, width + 1)
        self._raw.descend(above, self._above, width, ids, parent, batch, topk)
        self._above = above
        self._levels.append(level)

    def numbers(self, nodes: int) -> tuple[int, ...]:
        """Returns how it is passed to the C kernels, of M nodes."""
        one_for_all = nodes < len(self._above)
        return *self._numbers, self._above.data_ptr(), -1 if one_for_all else self._above.shape[1]

    def apply(self, logits: Tensor) -> None:
        if logits.dtype not in DTYPES:
            plain = TextEditor(*self._others)
            for level in self._levels:
                plain.follow(level)
            plain.apply(logits)
            return
        rows, vocab = logits.shape
        assert vocab == self._vocab and logits.stride(1) == 1
        scratch = self._scratch(self._workers.most, 2 * vocab)
        self._raw.edit_logits(
            logits, logits.dtype == torch.bfloat16, self.batch, rows // self.batch, logits.stride(0), vocab,
            scratch, self._workers.address, *self.numbers(rows),
        )  # fmt: skip
