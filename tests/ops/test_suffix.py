"""The suffix index of every implementation against one of dictionaries and lists: the same counts, confidences and
trees all along."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import pytest
import torch
from lookup_slots import Slots
from torch import Tensor

from draftwing.config.trees import LOOKUP, MAX_CONFIDENCE, PLAIN, TreeShape
from draftwing.ops.assign.spec import LEVELS, level_of
from draftwing.ops.suffix.spec import BACK, ESCAPE, LENGTHS, OTHERS, WAYS, SuffixIndex
from draftwing.ops.table import TorchOps

SHAPES = [TreeShape(5, 3, 8), TreeShape(16, 4, 17), TreeShape(3, 1, 4), TreeShape(2, 2, 40), TreeShape(1, 2, 2), PLAIN]


@pytest.fixture
def few(ops: TorchOps) -> int:
    """By how much tests of this implementation are shorter: the interpreter takes its time."""
    return 9 if ops.name == "triton" and ops.device.type == "cpu" else 3 if ops.name == "torch" else 1


class Node(NamedTuple):
    token: int
    parent: int
    depth: int
    single: np.float32  # probability given its parent
    path: np.float32


class Dictionary:
    """What followed each context of each owner: lists of [token, count], the newest first."""

    def __init__(
        self, rows: int, depth: int, nodes: int, max_context: int = 24, min_prob: float = 0.005, image_token: int = -1
    ) -> None:
        self.image_token = image_token
        self.lengths = [length for length in LENGTHS if length <= max_context]
        self.depth, self.nodes, self.min_prob = depth, nodes, np.float32(min_prob)
        self.known: dict[tuple[object, ...], list[list[int]]] = {}
        self.life = [0] * rows
        escape = np.asarray(ESCAPE, np.float32)[:, None, None] * np.asarray([1, OTHERS], np.float32)[:, None]
        self.escape = escape * np.arange(WAYS + 1, dtype=np.float32)  # by length, owner and number of tokens

    def insert(self, row: int, salt: int, text: list[int], first: int, shared: bool) -> None:
        for at in range(max(first, 1), len(text)):
            if text[at] == self.image_token:
                continue
            for length in self.lengths:
                if length > at:
                    break
                for owner in self.owners(row, salt) if shared else self.owners(row, salt)[:1]:
                    ways = self.known.setdefault((owner, *text[at - length : at]), [])
                    count = sum(count for token, count in ways if token == text[at]) + 1
                    others = [[token, (count + 1) // 2] for token, count in ways if token != text[at]]
                    ways[:] = [[text[at], count], *others][:WAYS]

    def owners(self, row: int, salt: int) -> list[object]:
        return [("row", row, self.life[row]), ("salt", salt)]

    def following(self, row: int, salt: int, text: list[int], most: int) -> tuple[list[tuple[int, np.float32]], int]:
        """(token, probability) of what follows, and how many lengths may be tried for what follows that."""
        known = [
            (index, number, self.known[(owner, *text[-length:])])
            for index, length in reversed([*enumerate(self.lengths[:most])])
            for number, owner in enumerate(self.owners(row, salt))
            if length <= len(text) and (owner, *text[-length:]) in self.known
        ]
        found: dict[int, np.float32] = {}
        left = np.float32(1)
        for index, number, ways in known[:BACK]:
            fresh = [(token, np.float32(count)) for token, count in ways if token not in found]
            escape = self.escape[index, number, len(fresh)]
            total = np.float32(sum(count for _, count in fresh)) + escape
            found |= {token: left * (count / total) for token, count in fresh}
            if fresh:
                left = left * (escape / total)
        return [*found.items()], min(known[0][0] + 2, len(self.lengths)) if known else 0

    def grow(self, row: int, salt: int, text: list[int]) -> list[Node]:
        """The nodes below the root, as they are chosen."""
        nodes = [Node(-1, 0, 0, np.float32(1), np.float32(1))]
        waiting: list[Node] = []
        paths, reach = [text], [len(self.lengths)]
        for number in range(self.nodes):
            if number:
                if not waiting:
                    break
                best = max(waiting, key=lambda node: node.path)  # of equals the first
                waiting.remove(best)
                nodes.append(best)
                paths.append([*paths[best.parent], best.token])
                reach.append(0)
            node = nodes[number]
            if node.depth == self.depth:
                continue
            following, reach[number] = self.following(row, salt, paths[number], reach[node.parent])
            for token, single in following:
                if node.path * single >= self.min_prob:
                    waiting.append(Node(token, number, node.depth + 1, single, node.path * single))
        return nodes[1:]


class World:
    """An index and the dictionary, shown the same requests."""

    def __init__(
        self, ops: TorchOps, rows: int, context: int, depth: int = 16, nodes: int = 17, **options: float
    ) -> None:
        self.rows, self.context, self.device = rows, context, ops.device
        self.index: SuffixIndex = ops.suffix_index(rows + 1, ops.device, depth=depth, nodes=nodes, secret=1, **options)
        allowed = {name: value for name, value in options.items() if name != "capacity"}
        self.dictionary = Dictionary(rows, depth, nodes, **allowed)  # type: ignore[arg-type]
        garbage = torch.randint(0, 5, (rows + 1, context), generator=torch.Generator().manual_seed(1))
        garbage[rows] = 0
        self.slots = Slots(
            garbage.to(ops.device, ops.table_dtype), *torch.zeros(3, rows + 1, dtype=torch.int64, device=ops.device)
        )
        self.text: list[list[int]] = [[] for _ in range(rows)]
        self.salt = [0] * rows

    def ids(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)

    def _write(self, row: int, text: list[int]) -> None:
        self.text[row] = text
        self.slots.tokens[row, : len(text)] = self.ids(text)
        self.slots.kv_len[row], self.slots.last[row], self.slots.salt[row] = len(text) - 1, text[-1], self.salt[row]

    def begin(self, row: int, prompt: list[int], salt: int = 0) -> None:
        self.salt[row] = salt
        self._write(row, prompt)
        self.index.begin(self.slots, self.ids([row]), len(prompt) + 2)
        self.dictionary.life[row] += 1
        self.dictionary.insert(row, salt, prompt, 1, shared=False)

    def step(self, new: dict[int, list[int]], limit: int, padding: int = 0) -> Tensor:
        """A step that generated `new`; checks the next trees, which are whole when they are proposed, and returns the
        confidences."""
        rows = [*new, *[self.rows] * padding]
        before = [len(self.text[row]) - 1 for row in new] + [0] * padding
        counts = [len(tokens) for tokens in new.values()] + [1] * padding
        for row, tokens in new.items():
            self._write(row, self.text[row] + tokens)
            self.dictionary.insert(row, self.salt[row], self.text[row], len(self.text[row]) - len(tokens), shared=True)
        self.index.insert(self.slots, self.ids(rows), self.ids(before), self.ids(counts), limit)
        bound = max(len(text) for text in self.text)
        found = self.index.confidence(self.slots, self.ids(rows), bound).cpu()
        assert not found[len(new) :].any()  # the dummy row proposes nothing
        self.index.propose(self.slots, self.ids(list(new)), TreeShape(self.dictionary.depth, 1, self.dictionary.nodes))
        for b, row in enumerate(new):
            self.check(row, int(found[b]))
        return found

    def check(self, row: int, confidence: int) -> None:
        expected = self.dictionary.grow(row, self.salt[row], self.text[row])
        token, parent, depth, grade = self.index.grown[:, row].tolist()
        assert self.dictionary.image_token not in token
        found = list(zip(token, parent, depth, grade, strict=True))[1 : 1 + len(expected)]
        assert found == [(n.token, n.parent, n.depth, grade_of(n.single)) for n in expected]
        assert not any(depth[1 + len(expected) :])
        total = sum(int(node.path * np.float32(4096)) for node in expected)
        assert confidence == min(max((total + 2048) // 4096, len(expected) > 0), MAX_CONFIDENCE)

    def check_draft(self, rows: list[int], shape: TreeShape) -> int:
        """Drafts are what the kept trees have within a shape; returns the live ones."""
        draft = self.index.propose(self.slots, self.ids(rows), shape)
        assert (draft.grade is None) == (shape == PLAIN)
        for b, row in enumerate(rows):
            token, parent, depth, grade = self.index.grown[:, row].tolist()
            kept = [n for n in range(1, len(token)) if 0 < depth[n] <= shape.depth][: shape.nodes - 1]
            place = {0: 0} | {n: i + 1 for i, n in enumerate(kept)}
            dead = shape.nodes - 1 - len(kept)
            last = int(self.slots.last[row])
            assert draft.tokens[b].tolist() == [last, *(token[n] for n in kept), *[last] * dead]
            assert draft.parent[b].tolist() == [0, *(place[parent[n]] for n in kept), *[0] * dead]
            assert draft.alive[b].tolist() == [True] * (1 + len(kept)) + [False] * dead
            assert draft.grade is None or draft.grade[b].tolist() == [0, *(grade[n] for n in kept), *[0] * dead]
            children = [(place[parent[n]], token[n]) for n in kept]
            assert len(set(children)) == len(children)
        return int(draft.alive.sum()) - len(rows)


def grade_of(single: np.float32) -> int:
    """Of a node of this probability."""
    return LEVELS * LOOKUP + int(level_of(torch.tensor(single).log()))


def live(world: World, few: int, seed: int, vocab: int, limit: int, copies: float) -> float:
    """Random requests that come and go, some of them copying from what was said before; drafts per step."""
    rng = random.Random(seed)
    drafts, steps = 0, 120 // few
    for row in range(world.rows):
        world.begin(row, [rng.randrange(vocab) for _ in range(rng.randint(1, 40))])
    for at in range(steps):
        new = {}
        for row in rng.sample(range(world.rows), rng.randint(1, world.rows)):
            text = world.text[row]
            if rng.random() < 0.05 or len(text) + limit >= world.context - 1:
                source = rng.choice(world.text)
                text = source[-rng.randint(1, 60) :]
                world.begin(row, text, rng.choice((0, 0, 7, 2**62 + 1)))
            new[row] = [rng.randrange(vocab) for _ in range(rng.randint(1, limit))]
            if rng.random() < copies and len(text) > 20:
                start = rng.randrange(len(text) - 10)
                new[row] = text[start : start + rng.randint(1, limit)]
        world.step(new, limit, padding=at % 3)
        drafts += world.check_draft(list(new), SHAPES[at % len(SHAPES)])
        if at == steps // 2:
            world.index.flush()
            assert not world.index.grown.any()
            known = world.dictionary.known
            world.dictionary.known = {key: ways for key, ways in known.items() if key[0][0] == "row"}  # type: ignore[index]
    return drafts / steps


@pytest.mark.slow
@pytest.mark.further(ops=["torch", "triton"], longest=[1, 24, 32])
@pytest.mark.parametrize(("longest", "least"), [(24, 0.02), (32, 0.2), (3, 0.001), (1, 0.05)])
def test_lives(ops: TorchOps, few: int, longest: int, least: float) -> None:
    rows, depth, nodes = (4, 16, 17) if few == 1 else (2, 8, 9)
    world = World(ops, rows, 300, depth, nodes, capacity=1 << 17, max_context=longest, min_prob=least)
    assert live(world, few, seed=longest, vocab=4, limit=6, copies=0.5) > 2


def test_images_follow_nothing(ops: TorchOps, few: int) -> None:
    """A third of the tokens stand for some: contexts have them, drafts do not."""
    rows, depth, nodes = (4, 16, 17) if few == 1 else (2, 5, 6)
    world = World(ops, rows, 300, depth, nodes, capacity=1 << 17, max_context=24 if few == 1 else 4, image_token=2)
    assert live(world, few * 4, seed=2, vocab=3, limit=6, copies=0.5) > 2
    assert sum(text.count(2) for text in world.text) > 10


@pytest.mark.slow
@pytest.mark.further(ops=["torch", "triton"])
def test_many_tokens_follow(ops: TorchOps, few: int) -> None:
    """More than a bucket holds: the newest are kept."""
    world = World(ops, 2, 300, nodes=40 if few == 1 else 20, capacity=1 << 20, max_context=3, min_prob=0.001)
    assert live(world, few, 3, 30, 4, 0.3) > 2


def test_long_copies(ops: TorchOps, few: int) -> None:
    """A text of different tokens, repeated: one chain as deep as the tree may be, trusted more and more."""
    text, depth = list(range(100, 160 if few == 1 else 120)), 24 if few == 1 else 12
    world = World(ops, 1, 200, depth=depth, nodes=depth + 1, capacity=1 << 16)
    world.begin(0, [*text, 5, 100])
    found = [int(world.step({0: [token]}, 17)) for token in text[1 : max(20 // few, 4)]]
    assert found == sorted(found) and found[0] >= 1 and (few > 1 or found[-1] >= 12)
    assert world.check_draft([0], TreeShape(depth, 1, depth + 1)) == depth


def test_a_tree_grows_whole_where_it_is_proposed(ops: TorchOps) -> None:
    """On a CPU no further than its confidence needs before; the confidence is that of the whole tree."""
    if not hasattr(ops.suffix_index(2, ops.device), "whole"):
        pytest.skip("trees grow whole at once here")
    world, rng, early = World(ops, 4, 300, capacity=1 << 16), random.Random(1), 0
    for row in range(4):
        world.begin(row, [rng.randrange(12) for _ in range(40)])
    for _ in range(20):
        for row, text in enumerate(world.text):
            world._write(row, [*text, rng.randrange(12)])
            world.dictionary.insert(row, 0, world.text[row], len(world.text[row]) - 1, shared=True)
        rows, before = world.ids([0, 1, 2, 3]), world.slots.kv_len[:4] - 1
        world.index.insert(world.slots, rows, before, torch.ones_like(before), 1)
        found = world.index.confidence(world.slots, rows, 300).tolist()
        nodes = (world.index.grown[2, :4] > 0).sum(1).tolist()
        for row in range(4):
            early += nodes[row] < len(world.dictionary.grow(row, 0, world.text[row]))
        world.index.propose(world.slots, rows[:2], TreeShape(2, 2, 3))
        for row in (0, 1):
            world.check(row, found[row])
        world.index.propose(world.slots, rows, TreeShape(16, 4, 17))
        for row in range(4):
            world.check(row, found[row])
    assert early > 40


def test_salts_are_kept_apart(ops: TorchOps) -> None:
    world = World(ops, 3, 100, capacity=1 << 16)
    for row, salt in enumerate((5, 6, 5)):
        world.begin(row, [90 + row], salt)
    world.step({0: [1, 2, 3, 4, 5, 6]}, 6)
    assert world.step({1: [1, 2], 2: [1, 2]}, 6).tolist()[0] == 0
    assert world.check_draft([1], SHAPES[0]) == 0 and world.check_draft([2], SHAPES[0]) > 3


def test_prompts_stay_in_their_row_and_rows_forget(ops: TorchOps) -> None:
    world = World(ops, 2, 100, capacity=1 << 16)
    world.begin(0, [1, 2, 3, 4, 5, 1])
    assert int(world.step({0: [2]}, 2)) > 0
    world.begin(1, [9])
    assert int(world.step({1: [1, 2]}, 2)) == 0, "a prompt was shared"
    world.begin(0, [8])
    assert world.check_draft([0], SHAPES[0]) == 0
    assert int(world.step({0: [3, 4]}, 2)) == 0, "a row remembers another request"


def test_what_is_remembered_is_for_its_salt_alone(ops: TorchOps) -> None:
    world, rng = World(ops, 3, 100, capacity=1 << 16), random.Random(4)
    texts = [[rng.randrange(4) for _ in range(length)] for length in (40, 25)]
    world.salt[:2] = 5, 6
    for row, (text, first) in enumerate(zip(texts, (3, 0), strict=True)):
        world._write(row, text)
        world.dictionary.insert(row, world.salt[row], text, first + 1, shared=True)
        world.dictionary.life[row] += 1  # no row owns it
    counts = [len(texts[0]) - 4, len(texts[1]) - 1]
    world.index.remember(world.slots, *map(world.ids, ([0, 1], [3, 0], counts)), 40)
    for salt, copied in ((5, texts[0]), (6, texts[1]), (0, texts[0])):
        world.begin(2, copied[4:8], salt)
        world.step({2: copied[8:11]}, 4)
        assert (world.check_draft([2], SHAPES[0]) > 3) == (salt > 0)
    world.begin(0, texts[0][4:8], 7)
    assert int(world.step({0: [texts[0][8]]}, 1)) <= 1


def test_nobody_can_compute_another_owners_context(ops: TorchOps) -> None:
    """The hash is linear. This context was computed, by lattice reduction, from the difference between two rows' owners
    when that was the same in every index: in the hash it met the one that the other row's prompt goes on from."""
    known = [8805, 37303, 4135, 16716, 7727, 32468, 29457, 30949, 42702, 24878, 13759, 6151]
    computed = [*[24575] * 5, 24347, 24413, 24673, 24829, 24573, 24658, 24220]
    secret, victim, attacker = [4242, 777, 31337], 3, 5
    index: SuffixIndex = ops.suffix_index(9, ops.device, capacity=1 << 14)
    zeros = torch.zeros(3, 9, dtype=torch.int64, device=ops.device)
    slots = Slots(torch.zeros(9, 64, dtype=torch.int64, device=ops.device), *zeros)
    found = []
    for row, text in ((victim, [*known, *secret, 1]), (attacker, computed), (victim, known)):
        slots.tokens[row, : len(text)] = torch.tensor(text, device=ops.device)
        slots.kv_len[row], slots.last[row], slots.salt[row] = len(text) - 1, text[-1], 1 + row
        rows = torch.tensor([row], device=ops.device)
        if len(found) < 2:
            index.begin(slots, rows, len(text))
        found.append(int(index.confidence(slots, rows, len(text))))
    assert found[1] == 0, "what another row's prompt goes on with was drafted"
    assert found[2] > 0, "there was nothing to be found"


def test_owners_are_secrets(ops: TorchOps) -> None:
    """No two of them differ by the same in two indexes, but where those are given one secret."""
    first, second, again = (ops.suffix_index(7, ops.device, capacity=1, secret=secret) for secret in (None, None, 5))
    starts = [torch.cat((index.owner[:, 0], index.epoch)) for index in (first, second)]
    differences = [(one[:, None] - one).flatten().tolist() for one in starts]
    different = set(differences[0]) | set(differences[1])
    assert len(different) == 1 + 2 * 8 * 7, "0, and two differences of each pair in each index"
    same = ops.suffix_index(7, ops.device, capacity=1, secret=5)
    assert torch.equal(same.owner, again.owner) and torch.equal(same.epoch, again.epoch)


@pytest.mark.slow
@pytest.mark.further(ops="torch")
def test_old_text_leaves(ops: TorchOps, few: int) -> None:
    """Memory is bounded: far more is said than it holds, and what is new is known."""
    if few > 3:
        pytest.skip("too long for the interpreter")
    reference = [TorchOps(torch.device("cpu"))] if ops.name != "torch" else []
    sides = [World(there, 1, 6000, capacity=1) for there in (ops, *reference)]
    rng = random.Random(4)
    text = [rng.randrange(1 << 22) for _ in range(3000)]
    for world in sides:
        world._write(0, [*text, *text[2950:2970]])
        world.index.begin(world.slots, world.ids([0]), 4000)
        assert world.index.confidence(world.slots, world.ids([0]), 4000).tolist()[0] > 6
        world._write(0, text[:100])
        assert world.index.confidence(world.slots, world.ids([0]), 4000).tolist() == [0]
    tables = [world.index.table[:-1].cpu() for world in sides]
    assert torch.equal(tables[0], tables[-1]) and (tables[0] > 0).float().mean() > 0.9


def test_a_long_prompt(ops: TorchOps, few: int) -> None:
    """Its halves meet: everything is known twice."""
    length = 1500 // min(few, 6) // min(few, 6)
    rng = random.Random(6)
    text = [rng.randrange(40) for _ in range(length)]
    world = World(ops, 2, 2 * length + 50, capacity=1 << 17)
    world.begin(1, [*text, *text[: length // 2]])
    for at in range(length // 2, length // 2 + 6, 3):
        world.step({1: text[at : at + 3]}, 4)
    assert world.check_draft([1], SHAPES[1]) > 10


def test_strided_arguments(ops: TorchOps) -> None:
    """A column of a packed result takes the confidences."""
    world = World(ops, 2, 20, capacity=1 << 12)
    for row in range(2):
        world.begin(row, [1, 2, 3, 1, 2])
    packed = torch.full((3, 5), -1, dtype=torch.int64, device=ops.device)
    world.index.confidence(world.slots, world.ids([0, 1, 2]), 19, packed[:, 2])
    assert packed[:2, 2].tolist() == [packed[0, 2].item()] * 2 and packed[0, 2] > 0 and packed[2, 2] == 0
    assert (packed[:, [0, 1, 3, 4]] == -1).all()
