"""The shared memory against plain lists of what every stretch of decoding generated."""

import random
from dataclasses import dataclass, field

import pytest
import torch

from draftwing.ops.ngram.spec import NGramMemory

CPU = torch.device("cpu")
WINDOW, BRANCH, CONTEXT, MIN_CELLS = 6, 7, 400, 40


@dataclass
class Stretch:
    row: int
    salt: int
    tokens: list[int] = field(default_factory=list)  # generated tokens only


class World:
    """A row table's worth of histories, a memory fed from them, and the lists to check it against."""

    def __init__(self, rows: int, capacity: int, vocab: int, seed: int, min_window: int = 2) -> None:
        self.rng = random.Random(seed)
        self.vocab, self.rows = vocab, rows
        self.memory = NGramMemory(min_window, WINDOW, BRANCH, capacity, rows + 1, CPU, min_cells=MIN_CELLS)
        self.min_window = min_window
        self.tokens = torch.zeros(rows + 1, CONTEXT, dtype=torch.int64)
        self.kv_len = [0] * (rows + 1)
        self.salt = [0] * (rows + 1)
        self.stretches: list[Stretch] = []
        self.current: dict[int, Stretch] = {}

    def admit(self, row: int, salt: int = 0, prompt: list[int] | None = None) -> None:
        prompt = prompt or [self.rng.randrange(self.vocab) for _ in range(self.rng.randint(1, 9))]
        first = self.rng.randrange(self.vocab)
        self.tokens[row, : len(prompt) + 1] = torch.tensor([*prompt, first])
        self.kv_len[row], self.salt[row] = len(prompt), salt
        self.current[row] = Stretch(row, salt, [first])
        self.memory.begin(torch.tensor([row]), torch.tensor([salt]))

    def step(self, new: dict[int, list[int]], limit: int, padding: int = 0) -> None:
        """One decode step that generates new[row] in each row, with dummy rows behind."""
        rows = list(new)
        prefix = [self.kv_len[r] for r in rows]
        for row in rows:
            start = self.kv_len[row] + 1
            self.tokens[row, start : start + len(new[row])] = torch.tensor(new[row], dtype=torch.int64)
            self.kv_len[row] += len(new[row])
            stretch = self.current[row]
            if stretch not in self.stretches and new[row]:
                self.stretches.append(stretch)
            stretch.tokens += new[row]
        pad = [self.rows] * padding
        self.memory.insert(
            self.tokens,
            torch.tensor(rows + pad),
            torch.tensor(prefix + [0] * padding),
            torch.tensor([len(new[r]) for r in rows] + [1] * padding),
            limit,
        )

    def lookup(self, suffix: list[int], salt: int, row: int) -> list[tuple[int, list[int]]]:
        """suffix in reading order -> the distinct (match, continuation) pairs found for a request in this row."""
        newest = [-2] * (WINDOW - len(suffix)) + suffix[-WINDOW:]
        tag = self.memory.tag.clone()
        cursor = self.memory.row.clone()
        self.memory.begin(torch.tensor([row]), torch.tensor([salt]))
        missing, continued = self.memory.lookup(torch.tensor([newest]), torch.tensor([row]))
        self.memory.row.copy_(cursor)
        assert torch.equal(self.memory.tag, tag)
        found = set()
        for gap, tail in zip(missing[0].tolist(), continued[0].t().tolist(), strict=True):
            known = [t for t in tail if t >= 0]
            assert tail == known + [-1] * (BRANCH - len(known))
            if WINDOW - gap >= self.min_window:
                assert known
                found.add((WINDOW - gap, tuple(known)))
        return sorted(((m, list(known)) for m, known in found), reverse=True)

    def expected(self, suffix: list[int], salt: int) -> list[tuple[int, list[int]]]:
        """Every occurrence in what was generated under the salt."""
        found = []
        for stretch in self.stretches:
            if stretch.salt != salt:
                continue
            for end in range(len(stretch.tokens) - 1):
                m = 0
                while m < min(WINDOW, len(suffix)) and end - m >= 0 and stretch.tokens[end - m] == suffix[-1 - m]:
                    m += 1
                if m >= self.min_window:
                    found.append((m, stretch.tokens[end + 1 : end + 1 + BRANCH]))
        return found


def run_random(world: World, steps: int, salts: tuple[int, ...] = (0,)) -> None:
    rng = world.rng
    for row in range(world.rows):
        world.admit(row, rng.choice(salts))
    for _ in range(steps):
        rows = rng.sample(range(world.rows), rng.randint(1, world.rows))
        for row in rows:
            if rng.random() < 0.05 or world.kv_len[row] + 8 > CONTEXT:
                world.admit(row, rng.choice(salts))
        world.step(
            {r: [rng.randrange(world.vocab) for _ in range(rng.randint(1, 5))] for r in rows}, 5, rng.randint(0, 2)
        )


def test_finds_the_longest_match_and_all_that_followed() -> None:
    world = World(rows=4, capacity=2_000_000, vocab=5_000, seed=1)
    run_random(world, 150)
    asked = 0
    for stretch in world.stretches:
        for end in range(1, len(stretch.tokens) - 1, 7):
            suffix = stretch.tokens[: end + 1]
            expected = world.expected(suffix, 0)
            found = world.lookup(suffix, 0, row=world.rows)
            # With 5,000 tokens no pair repeats, and the table is empty enough that none is crowded out.
            assert found[0][0] == max(m for m, _ in expected)
            assert sorted(found) == sorted(expected)
            asked += 1
    assert asked > 80


@pytest.mark.parametrize("capacity", [1, 100_000])
def test_small_vocabulary_ring_wrap_and_salts_give_only_true_matches(capacity: int) -> None:
    world = World(rows=3, capacity=capacity, vocab=3, seed=2, min_window=1)
    wraps = capacity == 1
    hits = exact = 0
    for _ in range(12):
        run_random(world, 25, salts=(0, 7, 8))
        for row in range(world.rows):
            suffix = world.tokens[row, : world.kv_len[row] + 1].tolist()
            salt = world.salt[row]
            expected = world.expected(suffix, salt)
            for m, tail in world.lookup(suffix, salt, row):
                # Lengths are exact but for what the end of a ring cuts off or was overwritten; so are continuations.
                lengths = [n for n, other in expected if tail == other[: len(tail)]]
                assert any(m <= n if wraps else m == n for n in lengths)
                exact += m in lengths
                hits += 1
    assert hits > 60 and exact > 0.8 * hits
    assert (int(world.memory.row[:-1, -1].min()) > 2 * world.memory.cells) == wraps


def test_prompts_are_left_out() -> None:
    world = World(rows=2, capacity=1_000, vocab=50, seed=4)
    prompt, output = list(range(100, 112)), list(range(200, 212))
    world.admit(0, prompt=prompt)
    first = world.current[0].tokens[0]
    world.step({0: output}, 12)
    assert world.lookup(prompt, 0, row=1) == []
    for row in (0, 1):
        assert world.lookup(output[:4], 0, row) == [(4, output[4 : 4 + BRANCH])]
    # The window of a prompt's last and the output's first token joins the two: private as well.
    assert world.lookup([prompt[-1], first], 0, row=1) == []
    assert world.lookup([prompt[-1], first, output[0]], 0, row=1) == [(2, output[1 : 1 + BRANCH])]


def test_dummy_row_stores_nothing() -> None:
    world = World(rows=1, capacity=1, vocab=50, seed=4)
    world.admit(0)
    world.tokens[1, :8] = torch.arange(30, 38)
    for at in range(3):
        world.step({0: [at]}, 5, padding=2)
    assert world.lookup([30], 0, row=0) == world.lookup([30, 31], 0, row=0) == []
    assert int((world.memory.table > 0).sum()) <= 2 * 3  # three windows of two lengths


def test_a_new_request_in_a_row_is_not_linked_to_the_former() -> None:
    world = World(rows=2, capacity=1_000, vocab=50, seed=5)
    world.admit(0, prompt=[1, 2, 3])
    world.step({0: [10, 11, 12, 13]}, 4)
    world.admit(0, prompt=[1, 2, 3, 4, 5, 6, 7])  # starts at the very length where the former ended
    world.step({0: [20, 21, 22, 23]}, 4)
    assert world.lookup([11, 12], 0, row=1) == [(2, [13])]
    assert world.lookup([12, 13], 0, row=1) == []
    assert world.lookup([10, 11, 12], 0, row=0)[0][1] == [13]  # the former request's text is another's now


def test_rings_do_not_touch_each_other() -> None:
    """A row that waits keeps its text and goes on where it was, however often the others' rings go round."""
    world = World(rows=3, capacity=1, vocab=1_000, seed=7)
    for row in range(3):
        world.admit(row)
    world.step({1: list(range(2_000, 2_005))}, 5)
    for at in range(0, 3 * world.memory.cells + 20, 5):
        world.step({row: [10_000 * row + 3_000 + at + i for i in range(5)] for row in (0, 2)}, 5)
    world.step({1: [2_005, 2_006, 2_007]}, 5)
    assert world.lookup([2_003, 2_004], 0, row=0) == [(2, [2_005, 2_006, 2_007])]
    assert world.lookup([2_000, 2_001], 0, row=0) == [(2, list(range(2_002, 2_008)))]
    for row in (0, 2):
        newest = 10_000 * row + 3_000 + at
        assert world.lookup([newest, newest + 1], 0, row=1) == [(2, [newest + 2, newest + 3, newest + 4])]


def test_a_row_that_jumps_starts_another_stretch() -> None:
    world = World(rows=2, capacity=1_000, vocab=50, seed=8)
    world.admit(0)
    world.step({0: [60, 61, 62]}, 3)
    world.tokens[0, world.kv_len[0] + 1] = 63  # never shown to the memory
    world.kv_len[0] += 1
    world.step({0: [64, 65, 66]}, 3)
    assert world.lookup([60, 61], 0, row=1) == [(2, [62])]
    assert world.lookup([61, 62, 63], 0, row=1) == []
    assert world.lookup([63, 64], 0, row=1) == [(2, [65, 66])]


def test_long_step() -> None:
    world = World(rows=1, capacity=2_000, vocab=50, seed=8)
    world.admit(0)
    text = list(range(100, 190))
    world.step({0: text}, 120)
    for end in range(2, 80):
        assert world.lookup(text[:end], 0, row=1)[0] == (min(end, WINDOW), text[end : end + BRANCH])


def test_flush_forgets_and_goes_on() -> None:
    world = World(rows=2, capacity=1_000, vocab=50, seed=9)
    world.admit(0)
    world.step({0: [60, 61, 62, 63]}, 4)
    world.memory.flush()
    assert world.lookup([60, 61], 0, row=1) == []
    world.step({0: [64, 65, 66]}, 4)
    assert world.lookup([62, 63], 0, row=1) == []
    assert world.lookup([64, 65], 0, row=1) == [(2, [66])]


def test_large_capacity_starts_without_touching_memory() -> None:
    memory = NGramMemory(1, 12, 18, 10_000_000, 65, CPU)
    assert 9_900_000 <= 65 * memory.cells <= 10_000_000
    assert memory.log.nbytes + memory.table.nbytes < 160e6
