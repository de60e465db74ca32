"""States of grammars: masks, ends, forced text, against `re`, the instances of MaskBench, and brute force."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from draftwing.errors import RequestError
from draftwing.grammar.compiler import GrammarCompiler, Translator
from draftwing.grammar.state import Guided, guide
from draftwing.requests.grammar_field import Grammar

DATA = Path(__file__).parent / "data"
CASES = [json.loads(line) for line in (DATA / "maskbench_sample.jsonl").read_text(encoding="utf8").splitlines()]
REGEXES = [
    *(DATA / "regexes.txt").read_text().splitlines(), "(?:[0-9]{1,3}\\.){3}[0-9]{1,3}",
    "(yes|no|maybe)( [a-z]+){2,4}", "[^a-z]{3}|é+€?", "a*", "https?://[a-z]+/x",
]  # fmt: skip
OBJECT = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def start(vocab, kind, text):
    return vocab.compiler.compile(Grammar(kind, text if isinstance(text, str) else json.dumps(text)))


def walk(vocab, state, rng, confidences=(), limit=90):
    """A random legal answer; now and then, where it is legal, one of the words `confidences`. None if it did not
    end."""
    tokens = []
    while len(tokens) < limit:
        if confidences and rng.random() < 0.5:
            for token in vocab.encode(rng.choice(confidences)):
                if not state.advance(token):
                    break
                tokens.append(token)
        allowed = vocab.bits(state.mask())
        assert allowed.size, "a mask without any token"
        assert (vocab.eos in allowed) == state.may_end
        if state.may_end and (state.done or rng.random() < 0.3):
            return tokens
        token = int(rng.choice(allowed[allowed != vocab.eos]))
        assert state.advance(token)
        tokens.append(token)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("pattern", REGEXES)
def test_every_random_walk_matches_the_regex(vocab, pattern):
    root = start(vocab, "regex", pattern)
    rng = random.Random(pattern)
    words = re.findall(r"[A-Za-z :/']+", re.sub(r"\[.*?\]", "", pattern))
    confidences = [*words, *(word * 8 for word in words), "".join(words[:2]), "a", "7", "A"]
    finished = 0
    for _ in range(8):
        tokens = walk(vocab, root.fork(), rng, confidences)
        if tokens is None:
            continue
        data = b"".join(vocab.bytes[t] for t in tokens)
        assert re.fullmatch(pattern, data.decode()), data
        finished += 1
    assert finished


@pytest.mark.parametrize("name", ["byte_vocab", "spm_vocab"])
def test_masks_are_exactly_the_prefixes(request, name):
    """Against all tokens, one by one: legal if some string of the language begins with the text and the token."""
    vocab = request.getfixturevalue(name)
    words = ["cat", "cats", "catalogue", "dog and cat", "do", "é€", "e"]
    state = start(vocab, "regex", "|".join(words))
    prefixes = {w.encode()[:i] for w in words for i in range(1, len(w.encode()) + 1)}
    whole = {w.encode() for w in words}
    rng = random.Random(0)
    for _ in range(15):
        at, text = state.fork(), b""
        while True:
            legal = {i for i, b in enumerate(vocab.bytes) if b and text + b in prefixes}
            allowed = set(vocab.bits(at.mask()).tolist()) - {vocab.eos}
            # Where text is forced, the mask is the tokenizer's choice; otherwise all that is legal.
            forced = at.forced()
            assert allowed == ({forced[0]} if forced else legal)
            assert allowed <= legal
            assert at.may_end == (text in whole)
            assert at.done == (not legal)
            if not allowed:
                break
            token = rng.choice(sorted(allowed))
            assert at.advance(token)
            text += vocab.bytes[token]


def test_advance_agrees_with_the_mask(vocab):
    rng = random.Random(1)
    for kind, text in [("json_schema", OBJECT), ("regex", "ab(cd|ce)+f"), ("ebnf", 'root ::= "(" root ")" | "xy"')]:
        state = start(vocab, kind, text)
        for _ in range(12):
            allowed = set(vocab.bits(state.mask()).tolist())
            for token in range(vocab.size):
                before = state.may_end
                if state.advance(token):
                    assert token in allowed
                    state.rollback(1)
                else:
                    assert token not in allowed
                assert state.may_end == before
            assert set(vocab.bits(state.mask()).tolist()) == allowed
            choices = sorted(allowed - {vocab.eos})
            if not choices:
                break
            state.advance(rng.choice(choices))


@pytest.mark.parametrize("part", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in (1, 2))])
def test_json_schema_instances(vocab, part):
    for case in CASES[part::3]:
        if case["supported"]:
            root = start(vocab, "json_schema", case["schema"])
            for test in case["tests"]:
                assert taken(vocab, root, json.dumps(test["data"], ensure_ascii=False)) == test["valid"], case["name"]
        else:
            with pytest.raises(RequestError) as error:
                start(vocab, "json_schema", case["schema"])
            assert error.value.param == "json_schema"


def taken(vocab, root, text):
    """A forced stretch may be cut differently from the whole text: then the same bytes are taken the forced way."""
    if vocab.accepts(root, text):
        state = root.fork()
        for token in vocab.encode(text):
            if token not in vocab.bits(state.mask()):
                break
            assert state.advance(token)
        else:
            return state.may_end and vocab.eos in vocab.bits(state.mask())
    return by_bytes(vocab, root.fork(), text.encode())


def by_bytes(vocab, state, data):
    """Whether some tokenization of `data` is legal: at each place the forced token, or the longest legal one."""
    while data:
        fits = [t for t in vocab.bits(state.mask()) if t != vocab.eos and data.startswith(vocab.bytes[t])]
        if not fits:
            return False
        token = max(fits, key=lambda t: len(vocab.bytes[t]))
        state.advance(int(token))
        data = data[len(vocab.bytes[token]) :]
    return state.may_end


def test_forced_text_is_legal_and_leaves_no_choice(vocab):
    compact = GrammarCompiler(vocab.tokenizer, vocab.size, vocab.tokenizer.stop_ids, Translator(vocab.tokenizer, ""))
    schema = {**OBJECT, "properties": {"an_unusual_name": {"const": "value"}, "b": {"type": "null"}}}
    schema["required"] = ["an_unusual_name", "b"]
    state = compact.compile(Grammar("json_schema", json.dumps(schema)))
    forced = []
    while chain := state.forced():
        for token in chain:
            assert vocab.bits(state.mask()).tolist() == [token]
            assert state.advance(token)
            forced.append(token)
    text = '{"an_unusual_name":"value","b":null}'
    assert text.startswith(vocab.text(forced)) and len(vocab.text(forced)) > 15


def test_the_end(vocab):
    state = start(vocab, "regex", "[0-9]{2}")
    assert not state.advance(vocab.eos)
    for char in "42":
        assert not state.may_end and not state.done and vocab.eos not in vocab.bits(state.mask())
        assert state.advance(vocab.encode(char)[0])
    assert state.may_end and state.done and state.forced() == []
    assert vocab.bits(state.mask()).tolist() == [vocab.eos]
    assert not state.advance(vocab.encode("1")[0])
    assert state.advance(vocab.eos) and state.done and vocab.bits(state.mask()).tolist() == [vocab.eos]
    assert state.advance(vocab.eos)
    for one in (state.fork(), state):
        one.rollback(3)
        assert not one.may_end and vocab.eos not in vocab.bits(one.mask())


def test_no_token_is_illegal_because_the_grammar_became_too_complex(byte_vocab):
    """Any number of letters is legal, which thirty rules may divide in any way; the library gives up after a few."""
    names = [f"s{i}" for i in range(30)]
    rules = [f"root ::= {' | '.join(names)}", *(f'{name} ::= {name} {name} | "a"' for name in names)]
    state = start(byte_vocab, "ebnf", "\n".join(rules))
    (letter,) = byte_vocab.encode("a")
    with pytest.raises(RequestError, match="too complex"):
        for _ in range(1000):
            assert letter in byte_vocab.bits(state.mask())
            assert state.advance(letter)


def test_several_stop_ids_and_none(byte_vocab):
    tokenizer = byte_vocab.tokenizer
    plain = byte_vocab.encode("b")[0]
    both = GrammarCompiler(tokenizer, byte_vocab.size, [byte_vocab.eos, plain, 10**6])
    state = both.compile(Grammar("regex", "a*b?"))
    assert {byte_vocab.eos, plain} <= set(byte_vocab.bits(state.mask()))
    state = both.compile(Grammar("regex", "ab"))  # a stop id is no text, so this answer cannot be completed with it
    assert plain not in byte_vocab.bits(state.mask())
    none = GrammarCompiler(tokenizer, byte_vocab.size, [])
    state = none.compile(Grammar("regex", "a"))
    assert state.advance(byte_vocab.encode("a")[0])
    assert state.done and not state.mask().any()


def test_narrow_logits(byte_vocab):
    narrow = GrammarCompiler(byte_vocab.tokenizer, 1001, byte_vocab.tokenizer.stop_ids)
    mask = narrow.compile(Grammar("regex", ".*")).mask()
    assert mask.shape == (32,)
    wide = byte_vocab.bits(start(byte_vocab, "regex", ".*").mask())
    found = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    assert found.tolist() == wide[wide < 1001].tolist()


def test_rollback_and_fork_give_the_same_masks(vocab):
    rng = random.Random(2)
    for kind, text in [("json_schema", OBJECT), ("regex", "(ab|a(bc)*){2,9}x"), ("json_object", "")]:
        state = start(vocab, kind, text)
        path = [state.mask()]
        tokens = []
        for _ in range(15):
            allowed = vocab.bits(path[-1])
            token = int(rng.choice(allowed))
            if token == vocab.eos:
                break
            tokens.append(token)
            assert state.advance(token)
            path.append(state.mask())
        copy = state.fork()
        for back in range(len(tokens)):
            assert (state.mask() == path[len(tokens) - back]).all()
            state.rollback(1)
        assert (state.mask() == path[0]).all()
        assert (copy.mask() == path[-1]).all()
        fresh = start(vocab, kind, text)
        assert fresh.run(tokens) == len(tokens) and (fresh.mask() == path[-1]).all()


def test_json_object_and_free_schemas(vocab):
    for text, schema in [("", "json_object"), ("true", "json_schema"), ("{}", "json_schema")]:
        state = start(vocab, schema, text)
        assert vocab.accepts(state, '{"a": [1, null]}') and not vocab.accepts(state, '{"a": [1, null}')
        assert vocab.accepts(state, "[1]") == (schema == "json_schema")


def test_a_schema_cannot_relax_itself(vocab):
    schema = {"not": {"type": "string"}, "x-guidance": {"lenient": True}}
    with pytest.raises(RequestError, match="not"):
        start(vocab, "json_schema", schema)


@pytest.mark.parametrize(
    "kind, text, reason",
    [
        ("regex", "(a", "unclosed"), ("regex", "a(?=b)", "look"), ("regex", "x" * 500_000, "at most"),
        ("regex", "(?:a{1000}){1000}", "repetitions"),
        ("json_schema", json.dumps({"items": {"pattern": "a?" * 9000}}), "characters"), ("json_schema", "{", "JSON"),
        ("json_schema", "3", "expected an object"), ("json_schema", '{"const": NaN}', "NaN"),
        ("json_schema", "false", "nothing"), ("json_schema", '{"type": "wrong"}', "wrong"),
        ("json_schema", "[" * 100_000, "nested"), ("json_schema", '{"items":' * 300 + "{}" + "}" * 300, "recursion"),
        ("ebnf", "root ::= x", "not defined"), ("ebnf", 'root ::= "a" root', "never ends"),
        ("structural_tag", "[]", "object"), ("structural_tag", '{"format": {"type": "made_up"}}', "made_up"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(vocab, kind, text, reason):
    with pytest.raises(RequestError, match=reason) as error:
        vocab.compiler.compile(Grammar(kind, text))
    assert error.value.param == kind and len(str(error.value)) < 500
    with pytest.raises(RequestError) as error:
        vocab.compiler.compile(Grammar(kind, text), param="response_format")
    assert error.value.param == "response_format"


@pytest.mark.slow
def test_long_chains_of_references_do_no_harm(byte_vocab):
    """They recurse in the library, far beyond an ordinary stack."""
    chain = {f"a{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(3500)}
    schema = {"$defs": {**chain, "a3500": {"type": "null"}}, "$ref": "#/$defs/a0"}
    state = start(byte_vocab, "json_schema", schema)
    assert byte_vocab.accepts(state, '{"x": {"x": {}}}')


def test_a_language_without_strings_is_refused(vocab):
    with pytest.raises(RequestError, match="no text fulfils it"):
        start(vocab, "regex", r"[^\x00-\x{10ffff}]")


def test_threads_share_a_compiler(byte_vocab):
    grammars = [Grammar("regex", f"[a-z]{{{n}}}[0-9]") for n in range(1, 6)]
    compiler = GrammarCompiler(byte_vocab.tokenizer, byte_vocab.size, byte_vocab.tokenizer.stop_ids, cache_size=2)
    expected = [compiler.compile(g).mask().tolist() for g in grammars]
    failures = []

    def work(seed):
        rng = random.Random(seed)
        for _ in range(30):
            i = rng.randrange(len(grammars))
            if compiler.compile(grammars[i]).mask().tolist() != expected[i]:
                failures.append(i)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and len(compiler._cache) == 2


def test_the_library_is_loaded_by_the_first_grammar_only():
    code = "import sys, draftwing.grammar; print('llguidance' in sys.modules, 'torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]


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
