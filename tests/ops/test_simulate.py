"""A simulated length: the walk of `accept` takes it, whatever the tree and the samples are."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from draftwing.errors import ConfigError
from draftwing.ops.drafts import graded, new_calibration
from draftwing.ops.reference.assign import learn
from draftwing.ops.reference.tree import Accepted, accept, derive, fraction_bits
from draftwing.ops.torch.ops import TorchOps
from draftwing.ops.types import Calibration, Draft, Tree
from draftwing.spec.simulate import Simulation

VOCAB = 12  # small: samples and siblings collide often


def random_draft(rng: random.Random, batch: int, nodes: int, depth: int) -> Draft:
    """Parents first, siblings distinct, no deeper than `depth`, some nodes dead."""
    every = []
    for _ in range(batch):
        tokens, parent, level, alive = [rng.randrange(VOCAB)], [0], [0], [True]
        for i in range(1, nodes):
            p = rng.randrange(i)
            token = rng.randrange(VOCAB)
            taken = {tokens[j] for j in range(1, i) if alive[j] and parent[j] == p}
            live = alive[p] and level[p] < depth and token not in taken and rng.random() < 0.9
            tokens.append(token)
            parent.append(p)
            level.append(level[p] + 1 if live else 0)
            alive.append(live)
        every.append((tokens, parent, alive))
    return Draft(*(torch.tensor(part) for part in zip(*every, strict=True)))


def chain(batch: int, nodes: int) -> Draft:
    parent = torch.arange(nodes).sub(1).clamp(min=0).expand(batch, nodes).contiguous()
    return Draft(torch.randint(VOCAB, (batch, nodes)), parent, torch.ones(batch, nodes, dtype=torch.bool))


def simulated(
    ops: TorchOps, simulation: Simulation, draft: Draft, tree: Tree, target: Tensor, rows: Tensor, kv_len: Tensor
) -> Tensor:
    """What the simulation makes of the samples, where the operations run."""
    given = target, rows, kv_len
    target, rows, kv_len = (x.to(ops.device) for x in given)
    draft, tree = Draft(*(x.to(ops.device) for x in draft[:3])), Tree(*(x.to(ops.device) for x in tree))
    return simulation(ops, draft, tree, target, rows, kv_len).cpu()


def accepted(ops: TorchOps, draft: Draft, depth: int, simulation: Simulation, rows: Tensor, kv_len: Tensor) -> Accepted:
    tree = derive(draft.parent, draft.alive, depth)
    target = torch.randint(VOCAB, draft.tokens.shape, generator=torch.Generator().manual_seed(1))
    before = target.clone()
    altered = simulated(ops, simulation, draft, tree, target, rows, kv_len)
    assert torch.equal(target, before), "the samples were changed in place"
    assert altered.shape == target.shape and altered.min().item() >= 0 and altered.max().item() < VOCAB
    return accept(draft.tokens, draft.parent, draft.alive, tree, altered)


def test_a_walk_goes_as_far_as_powers_of_the_chance_say(ops: TorchOps) -> None:
    rng, batch, depth = random.Random(0), 200, 4
    draft = random_draft(rng, batch, 9, depth)
    deepest = derive(draft.parent, draft.alive, depth).depth.amax(1)
    rows, kv_len = torch.arange(batch), torch.randint(1000, (batch,))
    simulation = Simulation(2.5, depth, VOCAB)
    count = accepted(ops, draft, depth, simulation, rows, kv_len).count
    # Where a node's children hold the first and the last id there is no token next to them.
    spoilt = []
    for tokens, parent, alive in zip(*(part.tolist() for part in draft[:3]), strict=True):
        children = [{tokens[i] for i in range(1, 9) if alive[i] and parent[i] == node} for node in range(9)]
        spoilt.append(any({0, VOCAB - 1} <= found for found in children))
    kept = ~torch.tensor(spoilt)
    assert kept.float().mean() > 0.8
    draws = fraction_bits(rows, kv_len) / 2**24
    wanted = sum((draws < (simulation.chance / 2**24) ** level).long() for level in range(1, depth + 1))
    assert len(set(wanted.tolist())) == depth + 1
    assert torch.equal(count[kept], (1 + torch.minimum(deepest, wanted))[kept])


@pytest.mark.further(ops="triton", mean=[1, 5])
@pytest.mark.parametrize("mean", [1, 2.3, 5])
def test_lengths_of_the_deepest_trees_and_of_others(ops: TorchOps, mean: float) -> None:
    batch = 200 if ops.name == "triton" else 4000  # interpreted rows take long
    rows, kv_len, simulation = torch.arange(batch) % 50, torch.arange(batch) // 50 * 3 + 7, Simulation(mean, 4, VOCAB)
    chance = simulation.chance / 2**24
    assert sum(chance**level for level in range(5)) == pytest.approx(mean, abs=1e-5)
    for depth in (4, 2):
        count = accepted(ops, chain(batch, depth + 1), depth, simulation, rows, kv_len).count.double()
        expected = sum(chance**level for level in range(depth + 1))
        assert abs(count.mean().item() - expected) <= 4 * count.std().item() / batch**0.5


@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("mean", [1.3, 2.5, 3.4])
def test_the_first_guesses_of_a_calibration_are_what_is_accepted(topk: int, mean: float) -> None:
    """Of whole trees, whose drafts have no grades that say anything."""
    depth, batch = 3, 2000
    levels = [topk**level for level in range(depth + 1)]
    parent = [0, *(node for node in range(sum(levels[:-1])) for _ in range(topk))]
    tokens = torch.tensor([2 + at % topk for at in range(len(parent))]).expand(batch, -1)
    draft = graded(Draft(tokens, torch.tensor(parent).expand(batch, -1), torch.ones_like(tokens, dtype=torch.bool)))
    rows, simulation = torch.arange(batch), Simulation(mean, depth, VOCAB, topk)
    found, tree = (
        accepted(TorchOps(torch.device("cpu")), draft, depth, simulation, rows, rows),
        derive(*draft[1:3], depth),
    )
    packed = torch.cat((tree.depth[:, :1], found.count[:, None], found.committed, found.order), 1)
    guesses = new_calibration(torch.device("cpu"), simulation.share)
    seen, right = (counts.clone() for counts in guesses)
    learn(draft, tree, packed, rows < 0, Calibration(seen, right))
    tried, was_right = (seen - guesses.seen)[0], (right - guesses.accepted)[0]
    assert tried[1] == batch * topk and tried[depth + 1 :].sum() == 0
    for level in range(1, depth + 1):
        error = 4 * (simulation.share / tried[level].item()) ** 0.5
        assert abs((was_right / tried)[level].item() - simulation.share) <= error


@pytest.mark.parametrize("mean", [0.5, 4.5])
def test_a_length_that_no_tree_has_is_refused(mean: float) -> None:
    with pytest.raises(ConfigError, match=rf"from 1 to 4, found {mean}"):
        Simulation(mean, 3, VOCAB)


def test_it_reads_no_data() -> None:
    """The steps of `tests/engine/test_no_host_reads.py` simulate nothing."""
    with FakeTensorMode():
        draft, rows = chain(3, 4), torch.arange(3)
        tree = derive(draft.parent, draft.alive, 3)
        found = Simulation(2.5, 3, VOCAB)(TorchOps(torch.device("cpu")), draft, tree, draft.tokens, rows, rows)
        assert found.shape == (3, 4)


@pytest.mark.parametrize("mean", [1.0, 2.4, 9.0])
def test_every_implementation_gives_the_same(ops: TorchOps, mean: float) -> None:
    for nodes, depth in ((2, 1), (9, 4), (33, 6)):
        draft = random_draft(random.Random(nodes), 6, nodes, depth)
        tree = derive(draft.parent, draft.alive, depth)
        target = torch.randint(VOCAB, draft.tokens.shape)
        rows, kv_len = torch.tensor([0, 1, 2, 63, 64, 64]), torch.tensor([0, 5, 900, 1 << 33, 0, 0])
        given = Simulation(mean, 8, VOCAB), draft, tree, target, rows, kv_len
        assert torch.equal(simulated(ops, *given), simulated(TorchOps(torch.device("cpu")), *given))
