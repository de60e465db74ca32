"""Row-indexed device state: everything a step needs to know of a running request without asking the host.

The host writes a row at admission and appends slots; the device does the rest (kv_len, last, tokens, the order of
the page-table entries past kv_len). A step is a list of rows. The last row is a dummy for padding.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftwing.core import Admission, IntArray, Plan
from draftwing.engine.devices.base import Device
from draftwing.kv.pool import RowStates
from draftwing.ops.types import RowTensors, SamplingGroups

BAN_IDS = 16  # most stop ids of a request with min_new_tokens


class Upload(NamedTuple):
    """A prefill's numbers on the device; the sizes are known to the host."""

    rows: Tensor  # [B]
    groups: SamplingGroups
    kv_len: Tensor  # [B] kv_len after the step
    token_rows: Tensor  # [M] row of each query
    positions: Tensor  # [M]
    last: Tensor  # [F] flat index of the last query of each final chunk
    final: Tensor  # [F] batch index of each final chunk


class RowTable(RowTensors):
    def __init__(self, rows: int, length: int, device: Device) -> None:
        """rows: requests that may run at once; length: page-table entries of a row (context, plus the room that a
        step may need past the last token)."""
        super().__init__(rows, length, BAN_IDS, device.device, device.ops.table_dtype)
        self.device = device
        self.states: RowStates | None = None  # of a model with recurrent layers
        self.adapters: Tensor | None = None  # [R + 1] int64: slot of each row's adapter, 0: none; where there are some
        self._step: tuple[list[bytes], tuple[Tensor, SamplingGroups]] | None = None  # the newest of `upload_step`

    def take_adapters(self, heads: bool) -> None:
        """Has a column for the slots of rows' adapters from now on. heads: and one for those of heads of their own."""
        self.adapters = torch.zeros_like(self.kv_len)
        self.heads = torch.zeros_like(self.kv_len) if heads else None

    def upload(self, plan: Plan) -> Upload:
        """Brings a prefill to the device: one copy, then the scatters of what the host decided."""
        self._give_states(plan)
        parts = [*_pack_state(plan, self.length), *_sampling_groups(plan), *_pack_chunks(plan)]
        rows, noisy, filtered, banning, *chunks = self._send(parts)
        return Upload(rows, SamplingGroups(noisy, filtered, banning), *chunks)

    def upload_step(self, plan: Plan) -> tuple[Tensor, SamplingGroups]:
        """Brings a tree step to the device and returns its rows [B], and what they need of the sampler. Most steps find
        what the step before sent."""
        self.upload_state(plan)
        parts = _sampling_groups(plan)
        known = [part.tobytes() for part in parts]
        if self._step is None or self._step[0] != known:
            packed = self.device.upload(np.concatenate(parts))
            rows, *groups = packed.split([len(part) for part in parts])
            self._step = known, (rows, SamplingGroups(*groups))
        return self._step[1]

    def upload_state(self, plan: Plan) -> None:
        """Brings what a tree step changes of row state: often nothing."""
        self._give_states(plan)
        if plan.admits or plan.new_slots:
            self._send(_pack_state(plan, self.length))

    def _give_states(self, plan: Plan) -> None:
        if len(plan.states):
            assert self.states is not None, "state slots of a model without recurrent layers"
            self.states.set(self.device.upload(plan.states.ravel()).view(-1, 4))

    def _send(self, sections: list[IntArray]) -> list[Tensor]:
        """Copies them to the device, scatters those of `_pack_state`, and returns the others. Each begins at an even
        place, for Triton compiles a kernel once more for addresses that are no multiple of 16 bytes."""
        *places, end = accumulate((len(part) + len(part) % 2 for part in sections), initial=0)
        host = np.zeros(end, np.int64)
        for part, at in zip(sections, places, strict=True):
            host[at : at + len(part)] = part
        packed = self.device.upload(host)
        found = (packed[at : at + len(part)] for part, at in zip(sections, places, strict=True))
        slot_at, slot, token_at, token, admits, *others = found
        if admits.shape[0]:
            self._admit(admits.view(-1, ADMIT_WORDS))
            self.tokens.view(-1).index_copy_(0, token_at, token.to(self.tokens.dtype))
        if slot.shape[0]:
            self.page_table.view(-1).index_copy_(0, slot_at, slot.to(self.page_table.dtype))
        return others

    def _admit(self, fields: Tensor) -> None:
        """fields [A, ADMIT_WORDS] in the order of `_admission_words`."""
        rows = fields[:, 0]
        for column, state in enumerate((self.kv_len, self.seed, self.salt, self.top_k, self.ban_until), 1):
            state.index_copy_(0, rows, fields[:, column])
        for column, slots in enumerate((self.adapters, self.heads), 8):
            if slots is not None:
                slots.index_copy_(0, rows, fields[:, column])
        floats = fields[:, 6:8].contiguous().view(torch.float32)  # [A, 4]
        self.floats.index_copy_(0, rows, floats[:, :3])
        self.ban_ids.index_copy_(0, rows, fields[:, 10:])


ADMIT_WORDS = 10 + BAN_IDS


def _admission_words(admit: Admission) -> IntArray:
    """row, kv_len, seed, salt, top_k, ban_until, (temperature, top_p), (min_p, 0), adapter, head, ban ids
    padded with -1."""
    params = admit.request.params
    words = np.full(ADMIT_WORDS, -1, np.int64)
    ban_until = admit.prompt_len + params.min_new_tokens
    words[:6] = admit.row, len(admit.slots), admit.seed, admit.salt, params.top_k, ban_until
    words[6:8] = np.asarray([params.temperature, params.top_p, params.min_p, 0.0], np.float32).view(np.int64)
    words[8:10] = admit.adapter, admit.head
    if params.min_new_tokens:
        assert len(admit.stop_ids) <= BAN_IDS, "the engine refuses more"
        words[10 : 10 + len(admit.stop_ids)] = admit.stop_ids
    return words


def _pack_state(plan: Plan, length: int) -> list[IntArray]:
    """Returns what changes row state: slot positions and slots, token positions and tokens, admissions. Positions are
    flat indices into [rows, length]."""
    empty = np.empty(0, np.int64)
    slot_at, slots, token_at, tokens = [empty], [empty], [empty], [empty]
    for admit in plan.admits:
        slot_at.append(admit.row * length + np.arange(len(admit.slots)))
        slots.append(admit.slots)
        token_at.append(admit.row * length + np.arange(len(admit.tokens)))
        tokens.append(np.asarray(admit.tokens, np.int64))
    for row, start, new in plan.new_slots:
        slot_at.append(row * length + start + np.arange(len(new)))
        slots.append(new)
    admits = [empty, *map(_admission_words, plan.admits)]
    return [_joined(part) for part in (slot_at, slots, token_at, tokens, admits)]


def _sampling_groups(plan: Plan) -> list[IntArray]:
    """Returns the rows, and the fields of `SamplingGroups`."""
    return [plan.rows, plan.noisy, plan.filtered, plan.banning]


def _pack_chunks(plan: Plan) -> list[IntArray]:
    """Returns the fields of `Upload` that are about chunks."""
    empty = np.empty(0, np.int64)
    kv_len, token_rows, positions, last, final = [empty], [empty], [empty], [], []
    offset = 0
    for index, chunk in enumerate(plan.chunks):
        end = chunk.start + chunk.length
        kv_len.append(np.asarray([end]))
        token_rows.append(np.full(chunk.length, chunk.row))
        positions.append(np.arange(chunk.start, end))
        offset += chunk.length
        if chunk.final:
            last.append(offset - 1)
            final.append(index)
    prefill = [_joined(part) for part in (kv_len, token_rows, positions)]
    ends = [np.asarray(last, np.int64), np.asarray(final, np.int64)]
    return [*prefill, *ends]


def _joined(parts: list[IntArray]) -> IntArray:
    return np.concatenate(parts).astype(np.int64, copy=False)
