"""Trees under a grammar against walks along each single path."""

import json
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from draftwing.grammar import GrammarCompiler, Guided, guide
from draftwing.grammar.translation import Translator
from draftwing.requests.grammar_field import Grammar

SCHEMA = {
    "type": "object",
    "properties": {"command": {"enum": ["start", "stop"]}, "count": {"type": "integer"}, "note": {"type": "string"}},
    "required": ["command", "count"],
    "additionalProperties": False,
}
GRAMMARS = [
    Grammar("json_schema", json.dumps(SCHEMA)),
    Grammar("regex", "(cat|cow|dog)( and (cat|cow))*"),
    Grammar("ebnf", 'root ::= "(" root ")" | [0-9]+'),
]


@pytest.fixture(scope="module")
def compact(byte_vocab):
    """Without free whitespace, so that much is forced."""
    tokenizer = byte_vocab.tokenizer
    return GrammarCompiler(tokenizer, byte_vocab.size, tokenizer.stop_ids, Translator(tokenizer, ""))


def random_tree(vocab, state, rng, nodes):
    """Half of its nodes legal, siblings distinct, some dead."""
    tokens, parent, alive = np.zeros(nodes, np.int64), np.zeros(nodes, np.int64), np.ones(nodes, bool)
    states = [state.fork()]
    for i in range(1, nodes):
        parent[i] = p = rng.randrange(i)
        allowed = vocab.bits(states[p].mask()) if states[p] is not None else []
        taken = {int(tokens[j]) for j in range(1, i) if parent[j] == p}
        token = int(rng.choice(allowed)) if len(allowed) and rng.random() < 0.7 else rng.randrange(vocab.size)
        while token in taken:
            token = rng.randrange(vocab.size)
        tokens[i] = token
        alive[i] = alive[p] and rng.random() < 0.9
        child = states[p].fork() if states[p] is not None else None
        states.append(child if child is not None and child.advance(token) else None)
    return tokens, parent, alive, states


def path(parent, node):
    steps = []
    while node:
        steps.append(node)
        node = int(parent[node])
    return steps[::-1]


def check_tree(vocab, state, guided, max_depth):
    tokens, parent, alive = guided.tokens, guided.parent, guided.alive
    assert alive[0] and parent[0] == 0
    masks = guided.masks()
    assert masks is guided.masks() and masks.shape == (tokens.size, -(-vocab.size // 32))
    assert (masks[0] == state.mask()).all()
    siblings = set()
    for node in range(1, tokens.size):
        assert parent[node] < node
        if not alive[node]:
            assert masks[node].any()
            continue
        assert alive[parent[node]]
        key = int(parent[node]), int(tokens[node])
        assert key not in siblings
        siblings.add(key)
        steps = path(parent, node)
        assert len(steps) <= max_depth
        alone = state.fork()
        assert alone.run([int(tokens[i]) for i in steps]) == len(steps)
        assert (alone.mask() == masks[node]).all()


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda g: g.kind)
def test_random_trees(byte_vocab, compact, grammar):
    rng = random.Random(grammar.text)
    inserted = kept = killed = 0
    for _ in range(25):
        state = compact.compile(grammar)
        for _ in range(rng.randrange(6)):
            allowed = byte_vocab.bits(state.mask())
            assert state.advance(int(rng.choice(allowed)))
        nodes, max_depth = rng.choice([1, 2, 5, 12, 24]), 24
        tokens, parent, alive, states = random_tree(byte_vocab, state, rng, nodes)
        given = tokens.copy(), parent.copy(), alive.copy()
        before = state.mask()
        guided = guide(state, tokens, parent, alive, max_depth)
        assert all((a == b).all() for a, b in zip(given, (tokens, parent, alive), strict=True))
        check_tree(byte_vocab, state, guided, max_depth)
        assert (state.mask() == before).all()
        for node in range(1, nodes):
            if alive[node] and states[node] is not None:  # what was legal stays where it was
                assert guided.alive[node] and guided.tokens[node] == tokens[node]
                assert guided.parent[node] == parent[node]
                kept += 1
            elif alive[node]:
                killed += 1
            inserted += bool(guided.alive[node] and not (alive[node] and states[node] is not None))
    assert kept and killed and (inserted or grammar.kind == "ebnf")


def test_forced_text_fills_dead_places(byte_vocab, compact):
    state = compact.compile(GRAMMARS[0])
    tokens, parent, alive = np.zeros(8, np.int64), np.zeros(8, np.int64), np.zeros(8, bool)
    forced = state.forced()
    assert len(forced) > 1
    for max_depth, nodes in [(7, 8), (2, 8), (7, 2), (0, 1)]:
        guided = guide(state, tokens[:nodes], parent[:nodes], alive[:nodes], max_depth)
        count = min(max_depth, nodes - 1, len(forced))
        live = np.flatnonzero(guided.alive)[1:]
        assert guided.tokens[live].tolist() == forced[:count]
        assert guided.parent[live].tolist() == [0, *live.tolist()][:count]
        check_tree(byte_vocab, state, guided, max_depth)


def test_a_chain_that_is_partly_there_is_completed(byte_vocab, compact):
    state = compact.compile(GRAMMARS[0])
    forced = state.forced()
    tokens = np.array([0, forced[0], 5, 5, 5, 5], np.int64)
    parent = np.array([0, 0, 1, 2, 3, 4], np.int64)
    guided = guide(state, tokens, parent, np.ones(6, bool), 5)
    assert guided.alive[1] and guided.tokens[1] == forced[0]
    assert guided.tokens[np.flatnonzero(guided.alive)[1:]].tolist() == forced[:5]
    check_tree(byte_vocab, state, guided, 5)


def test_forced_text_follows_a_leaf(byte_vocab, compact):
    state = compact.compile(Grammar("regex", "[0-9](abcabc){3}x|[a-c]z*"))
    digit = byte_vocab.encode("7")[0]
    after = state.fork()
    assert not state.forced() and after.advance(digit) and len(after.forced()) > 1
    tokens, parent = np.full(9, digit, np.int64), np.arange(9, dtype=np.int64) - 1
    parent[0] = 0
    guided = guide(state, tokens, parent, np.ones(9, bool), 8)
    live = np.flatnonzero(guided.alive)
    assert guided.tokens[live[1:]].tolist() == [digit, *after.forced()][:8]
    check_tree(byte_vocab, state, guided, 8)


def test_nodes_after_the_end(byte_vocab, compact):
    state = compact.compile(Grammar("regex", "[0-9]"))
    digit, eos = byte_vocab.encode("7")[0], byte_vocab.eos
    tokens = np.array([0, digit, eos, eos, digit, eos], np.int64)
    parent = np.array([0, 0, 1, 2, 2, 0], np.int64)
    guided = guide(state, tokens, parent, np.ones(6, bool), 3)
    assert guided.alive.tolist() == [True, True, True, True, False, False]
    assert [byte_vocab.bits(m).tolist() for m in guided.masks()[1:4]] == [[eos]] * 3


def test_rows_in_parallel(byte_vocab, compact):
    rng = random.Random(3)
    rows, alone = [], []
    for i in range(6):
        state = compact.compile(GRAMMARS[i % 3])
        tree = random_tree(byte_vocab, state, rng, 10)[:3]
        rows.append(guide(state, *tree, 9))
        alone.append(guide(state.fork(), *tree, 9).masks())
    with ThreadPoolExecutor(2) as pool:
        for found, expected in zip(pool.map(Guided.masks, rows), alone, strict=True):
            assert (found == expected).all()


def test_a_node_that_became_illegal_is_no_fault(byte_vocab):
    """Forced text may be cut into other tokens after its first: the node is never drawn, its mask never read."""
    state = byte_vocab.compiler.compile(Grammar("regex", "(ax|by){3}"))
    root = byte_vocab.bits(state.mask())
    tree = guide(state, np.asarray([0, root[0], 0]), np.asarray([0, 0, 1]), np.asarray([True, True, False]), 2)
    after = state.fork()
    assert after.advance(int(root[0]))
    tree.tokens[2], tree.parent[2], tree.alive[2] = root[0], 1, True
    masks = tree.masks()
    assert byte_vocab.bits(masks[0]).tolist() == root.tolist()
    assert byte_vocab.bits(masks[1]).tolist() == byte_vocab.bits(after.mask()).tolist()
    assert int(root[0]) not in byte_vocab.bits(after.mask()), "the node is legal after all"
    assert byte_vocab.bits(state.mask()).tolist() == root.tolist(), "the state is not where it was"
