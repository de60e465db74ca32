"""Drafters that look up what was seen, through the lives of requests; their indexes are compared in tests/ops."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from lookup_slots import Slots
from torch import Tensor

from draftwing.config.options import Options
from draftwing.config.trees import TreeShape
from draftwing.errors import ConfigError
from draftwing.ops import make_ops
from draftwing.ops.attention.batch import Batch, ChunkSpan
from draftwing.ops.ngram.spec import OWN, STEADY
from draftwing.ops.suffix.spec import LENGTHS
from draftwing.ops.table import TorchOps
from draftwing.ops.types import Draft, RowTensors
from draftwing.spec.drafter import DraftStep, PastText, SeenTokens
from draftwing.spec.lookup_drafter import LookupDrafter, NGramDrafter, SuffixDrafter

NONE = torch.empty(0, dtype=torch.int64)
NGRAM, SUFFIX = TreeShape(5, 3, 8), TreeShape(15, 4, 16)
both = pytest.mark.parametrize("kind", [NGramDrafter, SuffixDrafter])


@pytest.fixture(params=["torch", "cpu"])
def ops(request: pytest.FixtureRequest) -> TorchOps:
    """Triton's indexes are compared with these in tests/ops."""
    if request.param == "torch":
        return TorchOps(torch.device("cpu"))
    found = make_ops(torch.device("cpu"))
    return found if found.name == "cpu" else pytest.skip("the C extension was not built, or is not wanted")


def make_slots(rows: int, context: int) -> Slots:
    return Slots(
        torch.zeros(rows + 1, context, dtype=torch.int64), *torch.zeros(3, rows + 1, dtype=torch.int64).unbind(0)
    )


def fill(slots: Slots, row: int, text: list[int], salt: int = 0) -> None:
    slots.tokens[row] = 10**6 + torch.arange(slots.tokens.shape[1])  # garbage past the text
    slots.tokens[row, : len(text)] = torch.tensor(text)
    slots.kv_len[row], slots.last[row], slots.salt[row] = len(text) - 1, text[-1], salt


def prefill(drafter: LookupDrafter, slots: Slots, row: int, final: bool = True) -> None:
    rows, length = torch.tensor([row]), int(slots.kv_len[row])
    batch = Batch(rows, NONE, NONE, NONE, NONE, rows, chunks=(ChunkSpan(0, 0, 0, length, final),))
    drafter.extend(SeenTokens(slots, batch, None, torch.zeros(length, dtype=torch.int64), None, NONE))


def committed(drafter: LookupDrafter, slots: Slots, rows: Tensor, before: Tensor, count: Tensor, width: int) -> None:
    """Shows the drafter what a step committed: count [B] tokens of each row, behind its `before` [B] cached ones."""
    ids = torch.zeros(width * len(rows), dtype=torch.int64)
    drafter.extend(SeenTokens(slots, Batch(rows, NONE, NONE, NONE, NONE, before), None, ids, count, NONE))


def accepted(draft: Draft, following: list[int]) -> int:
    """Draft tokens that a target which says `following` accepts, of the first row."""
    tokens, parent, alive = (part[0].tolist() for part in draft[:3])
    node = count = 0
    for token in following:
        hits = [i for i in range(1, len(tokens)) if alive[i] and parent[i] == node and tokens[i] == token]
        if not hits:
            break
        node, count = hits[0], count + 1
    return count


def replay(
    drafter: LookupDrafter, slots: Slots, row: int, prompt: list[int], answer: list[int], salt: int = 0
) -> list[int]:
    """Generates `answer` with drafts; returns the confidence before each step."""
    everything, rows, length = prompt + answer, torch.tensor([row]), len(prompt)
    shape = NGRAM if isinstance(drafter, NGramDrafter) else SUFFIX
    fill(slots, row, everything[: length + 1], salt)
    prefill(drafter, slots, row)
    confidences = []
    while length < len(everything) - 1:
        confidences.append(int(drafter.confidence(slots, rows, length)))
        draft = drafter.propose(DraftStep(slots, rows, shape, length, NONE))
        assert (draft.alive.sum() > 1) == (confidences[-1] > 0)
        count = min(accepted(draft, everything[length + 1 :]) + 1, len(everything) - 1 - length)
        before, length = length, length + count
        fill(slots, row, everything[: length + 1], salt)
        committed(drafter, slots, rows, torch.tensor([before]), torch.tensor([count]), shape.max_commit)
    return confidences


@pytest.mark.slower(ops="torch")
@both
def test_copying_a_prompt_accepts_whole_chains(ops: TorchOps, kind: type[LookupDrafter]) -> None:
    """Records that share more than a match's most tokens: the newest record must not win over the one being copied."""
    rng = random.Random(5)
    frame = list(range(100, 120))
    records = [x for _ in range(12) for x in [*frame, *(rng.randrange(50) for _ in range(4))]]
    drafter = kind(3, ops, capacity=1 << 14)  # type: ignore[call-arg, arg-type]
    confidences = replay(drafter, make_slots(2, 700), 0, [1, 2, *records, 3], records)
    least = 0.9 * NGRAM.max_commit if kind is NGramDrafter else 0.7 * SUFFIX.max_commit
    assert len(records) / len(confidences) > least
    if kind is NGramDrafter:
        assert max(confidences) == 12 + 12  # copying
        assert confidences.count(24) > 0.8 * len(confidences)


def test_novel_text_has_no_confidence(ops: TorchOps) -> None:
    drafter = NGramDrafter(3, ops, capacity=1)
    assert replay(drafter, make_slots(2, 200), 0, list(range(50)), list(range(50, 120))) == [0] * 69


@pytest.mark.slower(ops="torch")
@pytest.mark.further(ops="torch", kind=SuffixDrafter)  # a second for each step; tests/ops compares the indexes
@pytest.mark.parametrize("kind", [NGramDrafter, pytest.param(SuffixDrafter, marks=pytest.mark.slow)])
def test_an_answer_helps_later_requests_of_its_salt_only(ops: TorchOps, kind: type[LookupDrafter]) -> None:
    answer, slots = list(range(100, 140)), make_slots(3, 300)
    drafter = kind(4, ops, capacity=1 << 14)  # type: ignore[call-arg, arg-type]
    steps = [
        len(replay(drafter, slots, row, prompt, answer, salt))
        for row, prompt, salt in ((0, [1, 2, 3], 5), (1, [4, 5], 6), (1, [4, 5], 0), (1, [4, 5], 5))
    ]
    assert steps[:3] == [39] * 3 and steps[3] < 39 / (3 if kind is NGramDrafter else 4)
    again = DraftStep(slots, torch.tensor([1]), SUFFIX, 300, NONE)
    assert drafter.propose(again).alive.sum() > 1
    drafter.flush()
    assert drafter.propose(again).alive.sum() == 1
    assert len(replay(drafter, slots, 2, [4, 5], answer, 5)) == 39


@pytest.mark.slower(ops="torch")
@pytest.mark.further(ops="torch", kind=SuffixDrafter)
@pytest.mark.parametrize("kind", [NGramDrafter, pytest.param(SuffixDrafter, marks=pytest.mark.slow)])
def test_what_is_remembered_drafts_as_what_was_generated(ops: TorchOps, kind: type[LookupDrafter]) -> None:
    """More texts than rows, of other lengths, one longer than a row, and rows that hold other texts."""
    rng, table = random.Random(3), RowTensors(2, 100, 1, torch.device("cpu"))
    said = [[rng.randrange(1000, 2000) for _ in range(length)] for length in (40, 90, 3, 1, 64)]
    texts = [
        PastText(salt, np.asarray([7, 8, 9, *answer, 5] * (2 if i == 4 else 1), np.int32), 3)
        for i, (salt, answer) in enumerate(zip((5, 6, 5, 5, 6), said, strict=True))
    ]
    lived, drafter = (kind(3, ops, capacity=1 << 14) for _ in range(2))  # type: ignore[call-arg, arg-type]
    slots = make_slots(2, 300)
    for text in texts:
        tokens = text.tokens[:100].tolist()
        replay(lived, slots, 0, tokens[:3], tokens[3:], text.salt)
    drafter.remember(table, texts)
    for salt, number in ((5, 0), (6, 1), (5, 1), (6, 4), (0, 0)):
        before, after = (replay(one, slots, 1, [1, 2], said[number], salt) for one in (lived, drafter))
        assert before == after
        assert (len(after) < len(said[number]) / 3) == ((salt, number) in {(5, 0), (6, 1), (6, 4)})


@pytest.mark.parametrize(("kind", "in_parts", "whole"), [(NGramDrafter, 2, 2), (SuffixDrafter, 0, 1)])
def test_a_row_begins_anew_at_the_end_of_a_prompt(
    ops: TorchOps, kind: type[LookupDrafter], in_parts: int, whole: int
) -> None:
    """in_parts, whole: confidences before and after the last chunk; SUFFIX learns a prompt at its end."""
    drafter, slots, rows = kind(2, ops, capacity=1 << 14), make_slots(1, 50), torch.tensor([0])  # type: ignore[call-arg, arg-type]
    fill(slots, 0, [1, 2, 3, 1, 2])
    prefill(drafter, slots, 0, final=False)
    assert drafter.confidence(slots, rows, 4).tolist() == [in_parts]
    prefill(drafter, slots, 0)
    assert drafter.confidence(slots, rows, 4).tolist() == [whole]
    assert drafter.propose(DraftStep(slots, rows, SUFFIX, 4, NONE)).alive.sum() > 1
    fill(slots, 0, [7, 1, 2])
    prefill(drafter, slots, 0)
    assert drafter.propose(DraftStep(slots, rows, SUFFIX, 2, NONE)).alive.sum() == 1, "the former request's draft"
    assert drafter.confidence(slots, rows, 2).tolist() == [0]


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("ngram", {"min_match_window_size": 0}),
        ("ngram", {"min_match_window_size": 5, "max_match_window_size": 4}),
        ("ngram", {"max_match_window_size": 200}),
        ("ngram", {"min_bfs_breadth": 3, "max_bfs_breadth": 2}),
        ("ngram", {"branch_length": 0}),
        ("ngram", {"capacity": 0}),
        ("suffix", {"max_depth": 0}),
        ("suffix", {"max_depth": LENGTHS[-1] + 1}),
        ("suffix", {"min_prob": 0.0}),
        ("suffix", {"capacity": 0}),
    ],
    ids=str,
)
def test_options_that_cannot_work_are_refused(algorithm: str, options: dict[str, float]) -> None:
    named = {f"speculative_{algorithm}_{name}": value for name, value in options.items()}
    with pytest.raises(ConfigError, match="must be at "):
        Options.from_kwargs(speculative_algorithm=algorithm, **named).resolve()


@pytest.mark.parametrize(
    ("given", "shape"),
    [({}, SUFFIX), ({"num_draft_tokens": 25}, TreeShape(24, 4, 25)), ({"num_steps": 6}, TreeShape(6, 4, 16))],
)
def test_shapes_of_suffix_trees(given: dict[str, int], shape: TreeShape) -> None:
    fields = {f"speculative_{name}": value for name, value in given.items()}
    options = Options(speculative_algorithm="suffix", **fields).resolve()
    assert options.speculative_algorithm == "SUFFIX" and options.speculative_shape == shape


def brute_search(history: list[int], low: int, high: int, distance: int) -> list[tuple[int, int]]:
    """(match length, index of the last matched token) of the best `OWN` matches, best first."""
    newest = len(history) - 1
    found = []
    for end in range(newest):
        m = 0
        while m < high and end - m >= 0 and history[end - m] == history[newest - m]:
            m += 1
        if m >= low:
            found.append((m, distance > 0 and end == newest - distance, end))
    return [(m, end) for m, _, end in sorted(found, reverse=True)[:OWN]]


@pytest.mark.parametrize("low, high", [(1, 12), (2, 5), (3, 3), (1, 1)])
def test_own_history_search_is_exact(ops: TorchOps, low: int, high: int) -> None:
    rng = random.Random(low * 100 + high)
    slots = make_slots(6, 80)
    drafter = NGramDrafter(7, ops, min_window=low, max_window=high, branch_length=6, capacity=1)
    rows, distances, hits = torch.arange(6), [0] * 6, 0
    for _ in range(40):
        histories = [[rng.randrange(rng.choice((2, 4))) for _ in range(rng.randint(1, 70))] for _ in range(6)]
        for row, history in enumerate(histories):
            fill(slots, row, history)
        bound = max(len(h) for h in histories) - 1 + rng.randint(0, 5)
        best = drafter.confidence(slots, rows, bound).tolist()
        for row, history in enumerate(histories):
            expected = brute_search(history, low, high, distances[row])
            longest, end = expected[0] if expected else (0, 0)
            copying = longest > 0 and distances[row] > 0 and end == len(history) - 1 - distances[row]
            assert best[row] == longest + (high if copying else 0)
            assert drafter.index.match[row, : len(expected)].tolist() == [m for m, _ in expected]
            assert not drafter.index.match[row, len(expected) :].any()  # nothing shared
            for c, (_, end) in enumerate(expected):
                follow = history[end + 1 :]
                follow = (follow * 6)[:6]  # repeats itself past the newest token
                assert drafter.index.candidates[row, :, c].tolist() == follow
            if expected and expected[0][0] >= min(STEADY, high):
                distances[row] = len(history) - 1 - expected[0][1]
            hits += len(expected)
        for row in range(6):
            if rng.random() < 0.5:  # else the source carries over, as within a request
                prefill(drafter, slots, row)
                distances[row] = 0
    assert hits > 200


def random_life(drafter: NGramDrafter, together: bool) -> list[Draft]:
    """Random decoding of 4 rows, all in one batch (padded) or one by one."""
    rng = random.Random(9)
    slots = make_slots(4, 300)
    histories = [[rng.randrange(4) for _ in range(5)] for _ in range(4)]
    for row, history in enumerate(histories):
        fill(slots, row, history)
        prefill(drafter, slots, row)
    drafts = []
    for _ in range(30):
        before = [len(h) - 1 for h in histories]
        counts = [rng.randint(1, 6) for _ in range(4)]
        for row, history in enumerate(histories):
            history += [rng.randrange(4) for _ in range(counts[row])]
            fill(slots, row, history)
        bound = max(len(h) for h in histories) - 1
        batches = [[0, 1, 2, 3, 4, 4]] if together else [[0], [1], [2], [3]]
        for batch in batches:
            rows = torch.tensor(batch)
            prefix = torch.tensor([*before, 0])[rows]
            committed(drafter, slots, rows, prefix, torch.tensor([*counts, 1])[rows], 6)
        for batch in batches:
            drafter.confidence(slots, torch.tensor(batch), bound)
        parts = [drafter.propose(DraftStep(slots, torch.tensor(batch), NGRAM, bound, NONE)) for batch in batches]
        drafts.append(Draft(*(torch.cat(p)[:4] for p in zip(*parts, strict=True))))
    return drafts


@pytest.mark.slower(ops="torch")
def test_batched_single_and_repeated_runs_agree(ops: TorchOps) -> None:
    runs = [random_life(NGramDrafter(5, ops, capacity=100_000), together) for together in (True, True, False)]
    for batched, again, single in zip(*runs, strict=True):
        for one, two, three in zip(batched[:3], again[:3], single[:3], strict=True):
            assert torch.equal(one, two) and torch.equal(one, three)
