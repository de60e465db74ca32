"""The radix tree against a flat model: a dictionary from token-window prefixes to slots."""

import numpy as np
import pytest

from draftwing.sched.kv_manager import SlotAllocator
from draftwing.sched.radix import RadixCache


def arr(tokens):
    return np.asarray(tokens, np.int64)


class Flat:
    """What the tree must remember: the slot of every window prefix that was inserted and not evicted."""

    def __init__(self, lookahead):
        self.window = 1 + lookahead
        self.slots = {}

    def match(self, tokens, salt, limit):
        out = []
        for t in range(min(limit, len(tokens) - self.window + 1)):
            slot = self.slots.get((salt, tuple(tokens[: t + self.window])))
            if slot is None:
                break
            out.append(slot)
        return out

    def insert(self, tokens, slots, salt):
        moved = []
        for t in range(len(tokens) - self.window + 1):
            key = (salt, tuple(tokens[: t + self.window]))
            if key not in self.slots:
                self.slots[key] = slots[t]
                moved.append(t)
        return moved

    def drop(self, gone):
        gone = set(gone)
        self.slots = {key: slot for key, slot in self.slots.items() if slot not in gone}


@pytest.mark.slow
@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_random_inserts_matches_and_evictions_agree_with_a_flat_model(lookahead):
    rng = np.random.default_rng(lookahead)
    pool, tree, flat = SlotAllocator(400), RadixCache(lookahead), Flat(lookahead)
    held, hits, evicted = [], 0, 0
    for _ in range(600):
        tokens = arr(rng.integers(0, 2, rng.integers(1, 30)))
        salt = int(rng.integers(0, 2))
        limit = int(rng.integers(0, 31))
        match = tree.match(tokens, salt, limit)
        assert match.slots.tolist() == flat.match(tokens.tolist(), salt, limit)
        hits += len(match.slots)
        tree.lock(match.node)
        held.append(match)
        positions = max(len(tokens) - lookahead, 0)
        if positions > len(match.slots):
            need = positions - len(match.slots)
            if need > pool.available:
                wanted = min(need, tree.evictable)
                gone = tree.evict(wanted)
                evicted += len(gone)
                assert len(gone) == wanted and not set(gone.tolist()) & {
                    slot for m in held for slot in m.slots.tolist()
                }
                flat.drop(gone.tolist())
                pool.free(gone)
            if need <= pool.available:
                slots = np.concatenate([match.slots, pool.alloc(need)])
                owned = np.r_[np.zeros(len(match.slots), bool), np.ones(need, bool)]
                tree.insert(tokens, slots, owned, salt)
                moved = flat.insert(tokens.tolist(), slots.tolist(), salt)
                assert np.flatnonzero(~owned).tolist() == sorted({*range(len(match.slots)), *moved})
                pool.free(slots[owned])
        while len(held) > 3:
            tree.unlock(held.pop(int(rng.integers(len(held)))).node)
        assert sorted(tree.slots().tolist()) == sorted(flat.slots.values())
        assert tree.size == len(flat.slots)
    for match in held:
        tree.unlock(match.node)
    assert tree.locked == 0 and hits > 300 and evicted > 100
    assert len(tree.evict(tree.evictable)) + pool.available == 400


def test_least_recently_used_leaf_goes_first_and_only_as_much_as_is_needed():
    tree = RadixCache(0)
    for start, tokens in ((0, [1, 2, 3]), (10, [4, 5, 6]), (20, [7, 8, 9])):
        tree.insert(arr(tokens), np.arange(start, start + 3), np.ones(3, bool), 0)
    tree.match(arr([1, 2, 3]), 0, 3)
    assert tree.evict(2).tolist() == [11, 12]
    assert tree.match(arr([4, 5, 6]), 0, 3).slots.tolist() == [10]
    assert tree.evict(3).tolist() == [20, 21, 22]


def test_locked_paths_are_not_evictable_and_splits_keep_their_locks():
    tree = RadixCache(0)
    tree.insert(arr([1, 2, 3, 4]), np.arange(4), np.ones(4, bool), 0)
    whole = tree.match(arr([1, 2, 3, 4]), 0, 4)
    tree.lock(whole.node)
    part = tree.match(arr([1, 2, 9]), 0, 3)  # splits the locked edge
    assert part.slots.tolist() == [0, 1] and tree.locked == 4 and tree.evictable == 0
    tree.unlock(whole.node)
    assert tree.evictable == 4


def test_disabled_cache_matches_nothing_and_takes_nothing():
    tree, owned = RadixCache(0, enabled=False), np.ones(3, bool)
    tree.insert(arr([1, 2, 3]), np.arange(3), owned, 0)
    assert owned.all() and len(tree.match(arr([1, 2, 3]), 0, 3).slots) == 0


def test_allocator_refuses_a_double_free():
    pool = SlotAllocator(4)
    slots = pool.alloc(4)
    assert sorted(slots.tolist()) == [1, 2, 3, 4]
    pool.free(slots)
    with pytest.raises(AssertionError, match="twice"):
        pool.free(slots[:1])


def test_many_salts_and_many_hits_leave_nothing_behind():
    for enabled in (True, False):
        tree = RadixCache(0, enabled)
        for salt in range(300):
            match = tree.match(arr([1, 2, 3]), salt, 2)
            tree.lock(match.node)
            node = tree.insert(arr([1, 2, 3]), np.arange(3), np.ones(3, bool), salt)
            tree.lock(node)
            tree.unlock(match.node)
            tree.unlock(node)
        assert len(tree._roots) == (300 if enabled else 0)
        tree.evict(tree.evictable)
        assert tree.size == 0 and not tree._roots and not tree._heap
    tree = RadixCache(0)
    tree.insert(arr([1, 2, 3]), np.arange(3), np.ones(3, bool), 0)
    for _ in range(500):
        match = tree.match(arr([1, 2, 3]), 0, 3)
        tree.lock(match.node)
        tree.unlock(match.node)
    assert len(tree._heap) == 1


def test_a_beginning_does_not_keep_the_rest_of_a_prompt_in_memory():
    cache = RadixCache(1)
    long, short = np.arange(5001), np.concatenate((np.arange(51), [7]))
    cache.insert(long, np.arange(1, 5001), np.ones(5000, bool), 0)
    upper = cache.match(short, 0, 50).node  # splits the long one
    assert len(upper.slots) == 50 and upper.slots.base is None and upper.keys.base is None
    cache.evict(4900)
    for node in cache.nodes():
        for part in (node.keys, node.slots):
            assert part.base is None or part.base.size <= 2 * part.size
