"""A simulated length: the walk of `accept` takes it, whatever the tree and the samples are."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from draftwing.errors import ConfigError
from draftwing.ops.torch.ops import TorchOps
from draftwing.ops.torch.tree import Accepted, accept, derive, fraction_bits
from draftwing.ops.types import Draft, Tree
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


@pytest.mark.parametrize("mean", [1, 2, 3, 5])
def test_whole_lengths_as_deep_as_the_tree_goes(ops: TorchOps, mean: int) -> None:
    rng, batch, depth = random.Random(mean), 200, 4
    draft = random_draft(rng, batch, 9, depth)
    deepest = derive(draft.parent, draft.alive, depth).depth.amax(1)
    rows, kv_len = torch.arange(batch), torch.randint(1000, (batch,))
    count = accepted(ops, draft, depth, Simulation(mean, VOCAB), rows, kv_len).count
    # Where a node's children hold the first and the last id there is no token beside them.
    spoilt = []
    for tokens, parent, alive in zip(*(part.tolist() for part in draft[:3]), strict=True):
        children = [{tokens[i] for i in range(1, 9) if alive[i] and parent[i] == node} for node in range(9)]
        spoilt.append(any({0, VOCAB - 1} <= found for found in children))
    kept = ~torch.tensor(spoilt)
    assert kept.float().mean() > 0.8
    assert torch.equal(count[kept], (1 + deepest.clamp(max=mean - 1))[kept])


def test_a_fraction_is_the_share_of_longer_walks(ops: TorchOps) -> None:
    batch = 200 if ops.name == "triton" else 4000  # interpreted rows take long
    draft = chain(batch, 5)
    rows, kv_len = torch.arange(batch) % 50, torch.arange(batch) // 50 * 3 + 7
    count = accepted(ops, draft, 4, Simulation(2.3, VOCAB), rows, kv_len).count
    assert set(count.tolist()) == {2, 3}
    assert abs(count.double().mean().item() - 2.3) < 4 * (0.3 * 0.7 / batch) ** 0.5


def test_rows_and_positions_decide_alone(ops: TorchOps) -> None:
    draft, rows, kv_len = chain(64, 4), torch.arange(64), torch.full((64,), 9)
    count = accepted(ops, draft, 3, Simulation(2.5, VOCAB), rows, kv_len).count
    part = Draft(*(x[10:20] for x in draft[:3]))
    assert torch.equal(accepted(ops, part, 3, Simulation(2.5, VOCAB), rows[10:20], kv_len[10:20]).count, count[10:20])
    later = accepted(ops, draft, 3, Simulation(2.5, VOCAB), rows, kv_len + 1).count
    assert not torch.equal(later, count)


def test_what_is_committed_are_the_drafts(ops: TorchOps) -> None:
    draft = chain(8, 6)
    found = accepted(ops, draft, 5, Simulation(4, VOCAB), torch.arange(8), torch.arange(8))
    assert torch.equal(found.committed[:, :3], draft.tokens[:, 1:4])
    assert not (found.committed[:, 3] == draft.tokens[:, 4]).any()


def test_plain_steps_stay_as_they_are(ops: TorchOps) -> None:
    draft = Draft(torch.ones(2, 1, dtype=torch.int64), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1) > 0)
    target = torch.tensor([[3], [4]])
    tree = derive(draft.parent, draft.alive, 0)
    assert torch.equal(
        simulated(ops, Simulation(3, VOCAB), draft, tree, target, torch.arange(2), torch.arange(2)), target
    )


def test_bits_are_uniform() -> None:
    bits = fraction_bits(torch.arange(10_000) % 100, torch.arange(10_000) // 100)
    assert bits.min() >= 0 and bits.max() < 1 << 24
    assert abs(bits.double().mean().item() / (1 << 24) - 0.5) < 0.015


def test_a_length_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"at least 1, found 0\.5"):
        Simulation(0.5, VOCAB)


def test_nothing_is_read_on_the_host() -> None:
    draft = chain(3, 4)
    tree = derive(draft.parent, draft.alive, 3)
    ops = TorchOps(torch.device("cpu"))
    with FakeTensorMode() as mode:
        fake = [[mode.from_tensor(x) for x in part if x is not None] for part in (draft, tree)]
        rows = mode.from_tensor(torch.arange(3))
        target = mode.from_tensor(torch.zeros(3, 4, dtype=torch.int64))
        assert Simulation(2.5, VOCAB)(ops, Draft(*fake[0]), Tree(*fake[1]), target, rows, rows).shape == (3, 4)


@pytest.mark.parametrize("mean", [1.0, 2.4, 9.0])
def test_every_implementation_gives_the_same(ops: TorchOps, mean: float) -> None:
    for nodes, depth in ((2, 1), (9, 4), (33, 6)):
        draft = random_draft(random.Random(nodes), 6, nodes, depth)
        tree = derive(draft.parent, draft.alive, depth)
        target = torch.randint(VOCAB, draft.tokens.shape)
        rows, kv_len = torch.tensor([0, 1, 2, 63, 64, 64]), torch.tensor([0, 5, 900, 1 << 33, 0, 0])
        given = Simulation(mean, VOCAB), draft, tree, target, rows, kv_len
        assert torch.equal(simulated(ops, *given), simulated(TorchOps(torch.device("cpu")), *given))
