"""Numbers of rows that are tried before anybody waits, and batches that have them."""

from __future__ import annotations

import torch

from draftwing.core import Chunk
from draftwing.ops.attention import Batch, spans_of
from draftwing.ops.even import STEP, even, evens


def test_every_number_is_rounded_up_to_one_of_few() -> None:
    known = evens(16384)
    assert known == sorted(set(known)) and len(known) < 40
    for count in range(1, 16385):
        size = even(count)
        assert size == min(one for one in known if one >= count)
        assert size - count < max(16, size // 2) and size - count < STEP


def test_a_padded_batch_is_the_batch_and_chunks_of_the_dummy() -> None:
    length, dummy, lengths = 20, 5, (7, 4)
    chunks = [Chunk(row, 3 * row, size, True) for row, size in enumerate(lengths)]
    count = sum(lengths)
    batch = Batch(
        rows=torch.arange(2), ids=torch.arange(1, count + 1), positions=torch.arange(count),
        write_slots=torch.arange(30, 30 + count), table=torch.zeros(dummy + 1, length, dtype=torch.int64),
        prefix_len=torch.tensor([0, 3]), chunks=spans_of(chunks), bound=9,
    )  # fmt: skip
    assert batch.padded(count, dummy).chunks == batch.chunks
    more = batch.padded(32, dummy)
    assert more.ids.shape == more.positions.shape == more.write_slots.shape == (32,)
    for before, after in zip(batch, more, strict=True):
        if isinstance(before, torch.Tensor) and before is not batch.table:
            assert torch.equal(after[: len(before)], before)
    added = more.chunks[2:]
    assert sum(span.length for span in more.chunks) == 32 and not any(span.final for span in added)
    assert not more.ids[count:].any() and not more.write_slots[count:].any()
    for span in added:
        assert more.rows[span.row] == dummy and more.prefix_len[span.row] == span.start == 0
        here = more.positions[span.offset : span.offset + span.length]
        assert here.tolist() == list(range(span.length)) and span.length < min(length, more.bound + 1)
