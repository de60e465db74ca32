"""What rows keep between tokens: where earlier tokens' entries are found, against lists in Python; short convolutions
over chunks, trees and parts of trees, which give what they give over a text in one go."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftwing.kv.pool import KVPool, StateSpec
from draftwing.ops.attention.batch import Batch, ChunkSpan, Ragged
from draftwing.ops.attention.dense import DenseAttend
from draftwing.ops.cpu.tape import Recording, record
from draftwing.ops.row_states.spec import ancestor_slots, scan
from draftwing.ops.table import TorchOps

TABLE = torch.tensor([[0] * 12, [5, 9, 2, 14, 7, 3, 8, 1, 6, 0, 0, 0], [21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 0, 0]])
TEXT = {slot: 100 + slot for slot in range(40)}  # what the token in a slot adds


def chunks() -> tuple[Batch, list[list[int]]]:
    """Two chunks, one of which begins its text -> and the slots of each query's text, its own the last."""
    spans = (ChunkSpan(0, 0, 0, 3), ChunkSpan(1, 3, 4, 2))
    at = [(2, 0), (2, 1), (2, 2), (1, 4), (1, 5)]
    texts = [TABLE[row, : place + 1].tolist() for row, place in at]
    positions, slots = torch.tensor([place for _, place in at]), torch.tensor([text[-1] for text in texts])
    none = torch.zeros(2, dtype=torch.int64)
    return Batch(torch.tensor([2, 1]), positions, positions, slots, TABLE, none, chunks=spans), texts


def trees() -> tuple[Batch, list[list[int]]]:
    """A tree behind four tokens, one at the beginning of a text, and the dummy row."""
    paths, prefixes, rows = [[0], [0, 1], [0, 2], [0, 2, 3]], [4, 0, 0], [1, 2, 0]
    path = torch.tensor([own + [0] * (3 - len(own)) for own in paths]).expand(3, -1, -1)
    path_len = torch.tensor([len(own) for own in paths]).expand(3, -1)
    texts = [
        [*TABLE[row, :prefix].tolist(), *(int(TABLE[row, prefix + entry]) for entry in own)]
        for row, prefix in zip(rows, prefixes, strict=True)
        for own in paths
    ]
    slots, prefix = torch.tensor([text[-1] for text in texts]), torch.tensor(prefixes)
    at = (prefix[:, None] + path_len - 1).flatten()
    return Batch(torch.tensor(rows), at, at, slots, TABLE, prefix, path, path_len, window=4), texts


def test_ancestors_are_the_tokens_before() -> None:
    for batch, texts in (chunks(), trees()):
        found = ancestor_slots(batch, 3)
        assert found.tolist() == [[*reversed(text[:-1]), 0, 0, 0][:3] for text in texts]


def test_queries_of_a_tree_are_named_where_they_are_ancestors(triton_ops: TorchOps) -> None:
    from draftwing.ops.short_conv.triton import sources_of

    batch, texts = trees()
    moved = (part.to(triton_ops.device) if isinstance(part, Tensor) else part for part in batch)
    found = sources_of(Batch(*moved), 3, torch.zeros(0)).tolist()  # type: ignore[arg-type]
    written = {slot: -1 - query for query, slot in enumerate(batch.write_slots.tolist()) if slot}
    for text, own in zip(texts, found, strict=True):
        before = [*reversed(text[:-1]), 0, 0, 0][:3]
        assert not text[-1] or own == [written.get(slot, slot) for slot in before]


def test_a_scan_goes_along_each_path() -> None:
    for batch, texts in (chunks(), trees()):
        own = torch.tensor([TEXT[text[-1]] for text in texts])
        kept = torch.full((40, 2), -7)
        for text in texts:  # of the tokens that were there before
            for end in range(1, len(text)):
                if text[end - 1] not in batch.write_slots.tolist():
                    kept[text[end - 1]] = folded(text[:end])
        found = scan(batch, kept, lambda before, queries, own=own: 3 * before + own[queries, None])
        real = [i for i, text in enumerate(texts) if text[-1]]
        assert found[real, 0].tolist() == [folded(texts[i]) for i in real]
        assert torch.equal(kept[batch.write_slots[real]], found[real])
        untouched = [slot for slot in range(1, 40) if not any(slot in text for text in texts)]
        assert kept[untouched].eq(-7).all()


def folded(text: list[int]) -> int:
    state = 0
    for slot in text:
        state = 3 * state + TEXT[slot]
    return state


# -- short convolutions -----------------------------------------------------------------------------------------------

SIZES = [(40, 3), (144, 4), (64, 2)]
LONGEST = 60
PARENTS = [0, 0, 0, 2, 3, 4]
PATHS = [[0], [0, 1], [0, 2], [0, 2, 3], [0, 2, 3, 4], [0, 2, 3, 4, 5]]  # paths


class Texts:
    """Two rows, the second one with nothing before its tree."""

    def __init__(self, ops: TorchOps, channels: int, width: int, dtype: torch.dtype) -> None:
        self.ops, generator = ops, torch.Generator().manual_seed(channels)
        self.channels = channels
        self.random = lambda *shape: torch.randn(shape, generator=generator).to(dtype).to(ops.device)
        self.taps = self.random(channels, width).float()
        self.pool = KVPool([StateSpec((channels,), None)], 2 * LONGEST, dtype, ops.device)
        self.table = 1 + torch.randperm(2 * LONGEST, generator=generator).view(2, LONGEST).to(ops.device)
        self.made = self.random(LONGEST, 3 * channels)

    def run(self, batch: Batch, made: Tensor) -> Tensor:
        return self.ops.attention(self.pool).bind(batch, 0).short_conv(0, made, self.taps)

    def chunk(self, start: int, end: int) -> Tensor:
        at = torch.arange(start, end, device=self.table.device)
        zero, span = at[:1] - start, ChunkSpan(0, 0, start, end - start)
        batch = Batch(zero, at, at, self.table[0, at], self.table, zero + start, chunks=(span,), bound=LONGEST)
        return self.run(batch, self.made[start:end])

    def whole(self, made: Tensor) -> Tensor:
        """In one go: without a pool, which is of the same bits but for Triton, where it is one chunk of another one."""
        if self.ops.name != "triton":
            return DenseAttend().short_conv(0, made, self.taps)
        other = Texts(self.ops, self.channels, self.taps.shape[1], made.dtype)
        other.made = made
        return other.chunk(0, len(made))

    def trees(self, prefix: int) -> tuple[Batch, Tensor]:
        def put(values: list[int]) -> Tensor:
            return torch.tensor(values, device=self.table.device)

        count, at = len(PATHS), put([prefix, 0])
        path = put([[*own, *[0] * (5 - len(own))] for own in PATHS]).repeat(2, 1, 1)
        lengths = put([len(own) for own in PATHS]).repeat(2, 1)
        slots = torch.cat((self.table[0, prefix : prefix + count], self.table[1, :count]))
        positions = (at[:, None] + lengths - 1).flatten()
        batch = Batch(put([0, 1]), positions, positions, slots, self.table, at, path, lengths, count, bound=LONGEST)
        return batch, self.random(2 * count, 3 * self.channels)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float", "half"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.mark.further(ops="triton", channels=[40, 64])
@pytest.mark.further(ops="triton", dtype=torch.float32)
@pytest.mark.parametrize(("channels", "width"), SIZES)
def test_chunks_and_trees(ops: TorchOps, channels: int, width: int, dtype: torch.dtype) -> None:
    texts = Texts(ops, channels, width, dtype)
    expected = texts.whole(texts.made)
    b, c, u = (part.double() for part in texts.made.chunk(3, 1))
    padded = torch.cat((b.new_zeros(width - 1, channels), (b * u).to(dtype).double()))
    plain = c * sum(padded[j : j + LONGEST] * texts.taps[:, j] for j in range(width))
    cut = ops.name == "triton" and ops.device.type == "cpu"  # Triton's interpreter does not round to a half type
    wide = 1e-5 if dtype == torch.float32 else 6e-2 if cut else 1e-2
    torch.testing.assert_close(expected.double(), plain, rtol=wide, atol=wide)
    found = torch.cat([texts.chunk(*span) for span in ((0, 1), (1, 3), (3, 30), (30, 45))])
    assert torch.equal(found, expected[:45])
    batch, made = texts.trees(45)
    found = texts.run(batch, made)
    for query, path in enumerate(PATHS + PATHS):
        first = query // len(PATHS) * len(PATHS)
        own = made[first + torch.tensor(path)]
        whole = torch.cat((texts.made[:45], own)) if not first else own
        assert torch.equal(found[query], texts.whole(whole)[-1])


def test_parts_of_trees(ops: TorchOps, dtype: torch.dtype) -> None:
    texts = Texts(ops, 96, 3, dtype)
    texts.chunk(0, 45)
    batch, made = texts.trees(45)
    expected, some = texts.run(batch, made), torch.tensor([0, 2, 3, 6, 7, 8]).to(ops.device)
    assert batch.path is not None and batch.path_len is not None
    tree, starts = some // len(PATHS), torch.tensor([0, 3, 6], device=some.device)
    part = batch._replace(
        rows=tree, prefix_len=batch.prefix_len[tree], write_slots=batch.write_slots[some],
        path=batch.path.flatten(0, 1)[some, None], path_len=batch.path_len.flatten()[some, None],
        ragged=Ragged(batch.rows, batch.prefix_len, starts, len(PATHS), 3),
    )  # fmt: skip
    assert torch.equal(texts.run(part, made[some]), expected[some])


def test_a_step_of_the_kernel_is_recorded(ops: TorchOps) -> None:
    if ops.name != "cpu":
        pytest.skip("needs the C kernels")
    texts = Texts(ops, 96, 3, torch.bfloat16)
    texts.chunk(0, 45)
    batch, made = texts.trees(45)
    recording, out = record(lambda: texts.run(batch, made))
    made.copy_(texts.random(*made.shape))
    batch.prefix_len[0] = 40
    batch.write_slots[: len(PATHS)] = texts.table[0, 40 : 40 + len(PATHS)]
    texts.chunk(30, 45)
    expected = texts.run(batch, made)
    assert isinstance(recording, Recording) and not torch.equal(out, expected)
    texts.chunk(30, 45)
    recording.replay()
    assert torch.equal(out, expected)
