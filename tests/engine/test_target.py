"""Prompts from graphs: the same text and states as without them, padding that leaves no trace.

On a CPU `record_by_calling` stands in for CUDA's graphs, and for most of its kernels torch's attention over the same
tiles.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from engine.tile_attention import TileAttention, paged
from layer_kinds import HYBRIDS, KINDS, RECURRENT, config_of
from toy_grammar import ToyGrammar

from draftwing.config.trees import PLAIN, TreeShape
from draftwing.core import Chunk
from draftwing.engine import prefill_graphs, prefill_inputs
from draftwing.engine.graphs import WANTED, Key
from draftwing.ops.attention.batch import Batch, spans_of
from draftwing.requests.request import LogprobParams, SpecLimits
from draftwing.sched.state_slots import StateSizes


def rig_of(harness, model, monkeypatch, sizes, exact=True, size=1, kernels=False, **kw):
    """kernels: whether attention is Triton's on a CPU, too, where the interpreter is slow."""
    if harness.device == "cpu" and torch.cuda.is_available():
        pytest.skip("kernels run where the GPU is")
    monkeypatch.setattr(prefill_graphs, "SIZES", sizes)
    attention = paged.PagedAttention if kernels or harness.device == "cuda" else TileAttention
    return harness.Rig(
        model, attn=partial(attention, exact=exact), graph_size=size, device=harness.device, **kw
    )  # fmt: skip


def watch(prefills):
    """(from graphs, without), counted from now on."""
    counts, run = [0, 0], prefills.run

    def spy(*asked):
        found = run(*asked)
        counts[found is None] += 1
        return found

    prefills.run = spy
    return counts


@pytest.fixture(scope="module")
def model(harness):
    return harness.tiny_model()


@pytest.mark.further(exact=False)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.usefixtures("mended_interpreter")
def test_the_text_is_the_same(harness, model, monkeypatch, exact):
    prompts = harness.prompts_for(4)
    params = [harness.greedy(3) for _ in prompts]
    expected = harness.plain_answers(model, prompts, params)
    # Prompts come in parts, and several at once.
    rig = rig_of(harness, model, monkeypatch, (16, 24), exact, kernels=True, chunk=24, lag=1)
    counts = watch(rig.executor.prefills)
    assert rig.answer(prompts, params).tokens == expected.tokens
    assert counts[0] > 1 and counts[1] == 0


@pytest.mark.parametrize("kind", ["shared", pytest.param("mixed", marks=pytest.mark.exhaustive)])
def test_layers_of_several_shapes_have_tiles_of_their_own(harness, monkeypatch, kind):
    model = harness.model_of(config_of(KINDS[kind], harness.CONTEXT))
    prompts = harness.prompts_for(3, longest=14)
    params = [harness.greedy(2) for _ in prompts]
    expected = harness.plain_answers(model, prompts, params)
    rig = rig_of(harness, model, monkeypatch, (16, 24), chunk=24)
    counts = watch(rig.executor.prefills)
    assert rig.answer(prompts, params).tokens == expected.tokens and counts[0] > 1 and counts[1] == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers(harness, monkeypatch, kind):
    """Prompts in parts, of which snapshots are taken, and again from these."""
    model = harness.model_of(config_of(RECURRENT[kind], harness.CONTEXT))
    monkeypatch.setattr(prefill_inputs, "MAX_CHUNKS", 6)
    prompts = harness.prompts_for(3)
    params = [harness.greedy(4) if i % 2 else harness.seeded(4, seed=i) for i in range(len(prompts))]
    expected = harness.plain_answers(model, prompts, params)
    states = StateSizes(40, 8, 4) if kind in HYBRIDS else None
    rig = rig_of(harness, model, monkeypatch, (16, 24), chunk=24, lag=1, states=states)
    counts = watch(rig.executor.prefills)
    assert rig.answer(prompts, params).tokens == expected.tokens
    again = rig.answer(prompts, params)
    assert again.tokens == expected.tokens and any(out.meta["cached_tokens"] for out in again.final.values())
    assert counts[0] > 2 and counts[1] == 0


@torch.inference_mode()
@pytest.mark.usefixtures("mended_interpreter")
def test_states_of_rows_are_those_of_a_forward(harness, monkeypatch):
    """And snapshots, of more chunks than one; a graph's padding leaves the dummy row's state as it was. Of more
    snapshots than a graph has room for there is none."""
    model = harness.model_of(config_of(HYBRIDS["delta"], harness.CONTEXT))
    monkeypatch.setattr(prefill_inputs, "MAX_CHUNKS", 4)
    rig = rig_of(harness, model, monkeypatch, (8, 16), kernels=True, states=StateSizes(16, 16, 4))
    slots, executor, states = rig.slots, rig.executor, rig.pool.states
    generator = torch.Generator().manual_seed(3)
    slots.tokens[:-1] = torch.randint(0, harness.VOCAB, slots.tokens[:-1].shape, generator=generator)
    slots.page_table[:3] = torch.arange(1, 3 * slots.length + 1).view(3, -1)
    states.set(torch.tensor([[row, 0, 1 + row, 0] for row in range(3)], device=states.read.device))
    plans = [
        [Chunk(0, 0, 9, True, None, ((4, 10), (9, 11))), Chunk(2, 0, 5, True)],
        [Chunk(2, 5, 5, False, None, ((1, 13), (2, 14), (5, 15))), Chunk(0, 9, 2, True), Chunk(1, 0, 1, True)],
    ]
    for turn, chunks in enumerate(plans):
        batch = batch_of(slots, chunks)
        own = [*states.write[batch.rows].tolist(), *(slot for chunk in chunks for _, slot in chunk.saves)]
        expected = executor.target.run(batch)[0].clone()
        before = [(layer.state.clone(), layer.conv.clone()) for layer in states.layers.values()]
        for layer in states.layers.values():
            layer.state[own], layer.conv[own] = torch.nan, torch.nan
        found, _ = executor.prefills.run(chunks)
        assert torch.equal(found, expected)
        for layer, (state, conv) in zip(states.layers.values(), before, strict=True):
            assert torch.equal(layer.state, state) and torch.equal(layer.conv, conv)
        executor.ops.advance_states(
            states, batch.rows, batch.positions[[s.offset + s.length - 1 for s in batch.chunks]]
        )
        if not turn:  # a row that began with the state of an empty text writes to another slot than that one
            entries = [[row, -1, 4 + row, -1] for row in (0, 2)]
            states.set(torch.tensor(entries, device=states.read.device))
    many = tuple((i + 1, 10) for i in range(8))
    assert executor.prefills.run([Chunk(0, 21, 9, True, None, many)]) is None
    assert executor.prefills.run([Chunk(0, 21, 9, True, None, many[:7])]) is not None


def test_layers_that_need_the_hosts_chunks_have_no_graphs_of_prompts(harness, monkeypatch):
    model = harness.model_of(config_of(KINDS["recurrent"], harness.CONTEXT))
    assert not rig_of(harness, model, monkeypatch, (16,)).executor.prefills.sizes


@torch.inference_mode()
def test_states_are_those_of_a_forward(harness, model, monkeypatch):
    """Of chunks that begin anywhere, of fewer queries than the graph has and of as many."""
    rig = rig_of(harness, model, monkeypatch, (16, 32))
    slots, executor = rig.slots, rig.executor
    generator = torch.Generator().manual_seed(3)
    slots.tokens[:-1] = torch.randint(0, harness.VOCAB, slots.tokens[:-1].shape, generator=generator)
    table = torch.arange(1, 3 * slots.length + 1).view(3, -1)  # no two entries share a slot
    slots.page_table[:3] = table[:, torch.randperm(slots.length, generator=generator)]
    plans = [
        [Chunk(0, 0, 19, True), Chunk(2, 0, 13, True)],
        [Chunk(1, 0, 26, True)],
        [Chunk(2, 13, 7, False), Chunk(0, 19, 2, True), Chunk(1, 26, 4, True)],
    ]
    for chunks in plans:
        batch = batch_of(slots, chunks)
        expected = executor.target.run(batch)[0].clone()
        for kv in rig.pool.kv:
            kv[batch.write_slots] = torch.nan
        found, aux_layers = executor.prefills.run(chunks)
        assert aux_layers is None and torch.equal(found, expected)
        assert all(kv[batch.write_slots].isfinite().all() for kv in rig.pool.kv), "they are written again"
    assert all(kv[0].isfinite().all() for kv in rig.pool.kv), "what the dummy row writes"


@torch.inference_mode()
def test_what_no_graph_is_for(harness, model, monkeypatch):
    monkeypatch.setattr(prefill_inputs, "MAX_CHUNKS", 4)
    rig = rig_of(harness, model, monkeypatch, (16, 1 << 20))
    prefills = rig.executor.prefills
    assert prefills.sizes == [16] and len(rig.executor.captures) == len(rig.executor.graphs) + 1
    assert prefills.run([Chunk(0, 0, 17, True)]) is None
    assert prefills.run([Chunk(row, 0, 1, True) for row in range(4)]) is None
    assert prefills.run([Chunk(row, 0, 1, True) for row in range(3)]) is not None


def test_sizes_that_take_as_long_as_larger_ones_are_left_out(harness, model, monkeypatch):
    monkeypatch.setattr(prefill_graphs, "MIXED_QUERIES", 16)
    monkeypatch.setattr(prefill_graphs, "MIXED_ROWS", (2,))
    rig = rig_of(harness, model, monkeypatch, (8, 16, 24, 32), size=2, mixed=True)
    prefills, key = rig.executor.prefills, Key(PLAIN, 2)
    took = {prefills._graphs[size, False][0]: ms for size, ms in ((8, 9.0), (16, 4.0), (24, 6.5), (32, 6.0))}
    replayed = []

    def timed(fn, times):
        fn()  # what it reads is of its own size, or it reads past the tables
        replayed.append(took[fn])
        return [2 * took[fn], took[fn]]

    monkeypatch.setattr(rig.executor.device, "timed", timed)
    prefills.leave(key)
    prefills.drop_slow()
    assert replayed == [6.0, 6.5, 4.0] and prefills.sizes == [8, 16, 32] and prefills.mixed_sizes == [16, 32]
    assert prefills.later == {(30, key, False): 0, (14, key, False): 0}
    before = prefills.replays
    with torch.inference_mode():
        assert prefills.run([Chunk(0, 0, 20, True)]) is not None and prefills.replays == before + 1


@pytest.mark.parametrize("kind", HYBRIDS)
def test_what_sizes_take_includes_recurrent_layers(harness, monkeypatch, kind):
    """They leave padding out: a graph of nothing else would take less than prompts do."""
    monkeypatch.setattr(prefill_graphs, "MIXED_QUERIES", 16)
    model = harness.model_of(config_of(RECURRENT[kind], harness.CONTEXT))
    rig = rig_of(harness, model, monkeypatch, (16,), states=StateSizes(20, 4, 4))
    states, ran = rig.executor.table.states, []

    def timed(fn, times):
        states.clear_dummy()
        fn()
        ran.append(all(layer.conv[states.dummy].any() for layer in states.layers.values()))
        return [1.0]

    monkeypatch.setattr(rig.executor.device, "timed", timed)
    rig.executor.prefills.drop_slow()
    assert ran == [True] and all(layer.state.isfinite().all() for layer in states.layers.values())


def test_sizes_that_make_fewer_tokens_a_second_are_left_out():
    """Milliseconds of the products of an 8B model on an H200, of its forward on an H100, and what is no rule."""
    sizes = (256, 384, 512, 640, 768, 896, 1024)
    for times, slow in (
        ((6.05, 7.87, 9.85, 12.33, 14.41, 17.55, 18.57), [896]),
        ((7.8, 9.0, 10.5, 13.0, 15.3, 20.0, 19.5), [896]),
        ((3, 4, 5, 6, 7, 8, 9), []),
        ((3, 4, 5, 5, 5, 5, 20), [512, 640, 768]),
        # A device that 256 tokens fill: attention makes each token of more a little slower. 300 are not to take 41 ms.
        ((10, 15.7, 21, 26.4, 31.9, 37.4, 43), []),
        ((10, 15.7, 21, 26.4, 31.9, 40, 43), [896]),
    ):
        assert prefill_graphs.slow_sizes(dict(zip(sizes, times, strict=True))) == slow
    assert prefill_graphs.slow_sizes({}) == []


def batch_of(slots, chunks):
    rows = torch.tensor([chunk.row for chunk in chunks], device=slots.page_table.device)
    token_rows = torch.cat([torch.full((chunk.length,), chunk.row) for chunk in chunks]).to(rows)
    positions = torch.cat([torch.arange(chunk.start, chunk.start + chunk.length) for chunk in chunks]).to(rows)
    at = token_rows, positions
    return Batch(
        rows,
        slots.tokens[at],
        positions,
        slots.page_table[at],
        slots.page_table,
        slots.kv_len[rows],
        chunks=spans_of(chunks),
    )


@pytest.mark.parametrize(("exact", "drafts"), [(True, True), pytest.param(False, False, marks=pytest.mark.exhaustive)])
def test_prompts_beside_rows_that_decode(harness, model, monkeypatch, exact, drafts):
    """Graphs of both: of fewer rows than they have and of as many, and of more, or of large trees, for which there are
    none. Beside prompts of more tokens than a graph has the forward is launched, between graphs."""
    monkeypatch.setattr(prefill_graphs, "MIXED_ROWS", (2, 3))
    monkeypatch.setattr(prefill_graphs, "MIXED_QUERIES", 16)
    monkeypatch.setattr(prefill_graphs, "MIXED_NODES", 9)
    prompts = harness.prompts_for(6, longest=12)
    prompts[2] = [*prompts[2], *prompts[3], *prompts[4]]
    params = [harness.greedy(5 + i % 3) for i in range(len(prompts))]
    expected = harness.plain_answers(model, prompts, params)
    more = {}
    if drafts:
        policy = harness.Cycle(TreeShape(2, 1, 3), TreeShape(3, 2, 5))
        more = {"drafter": "oracle", "policy": policy, "miss": 1, "book": harness.make_book(prompts, expected)}
    rig = rig_of(harness, model, monkeypatch, (16,), exact, size=3, rows=4, chunk=40, lag=1, mixed=True, **more)
    rig.executor.device.seconds = lambda begin, end: 0.0 if begin is end else 2e-3  # they decide how prompts are cut
    prefills, counts, shapes = rig.executor.prefills, [0, 0], set()
    run = prefills.run_mixed

    def spy(chunks, key, *more):
        found, queries = run(chunks, key, *more), key.size * key.shape.queries
        assert (found is None) == (sum(chunk.length for chunk in chunks) > (16 - queries) // 2 * 2), "16 are in one"
        counts[found is None] += 1
        shapes.add(key.shape)
        return found

    prefills.run_mixed = spy
    # Of prompts, of one token of two or three rows, of chains of so many, and of larger trees of none.
    assert len(prefills) == (1 + 2 + 2 if drafts else 1 + 2)

    def between(turn):
        if turn % 2 == 0 and turn // 2 < len(prompts) - 2:
            i = turn // 2 + 2
            rig.submit(str(i), prompts[i], params[i])

    assert rig.answer(prompts[:2], params[:2], between=between).tokens == expected.tokens
    assert min(counts) > 0 and rig.stats.mixed == sum(counts)
    assert shapes == ({TreeShape(2, 1, 3), PLAIN} if drafts else {PLAIN})


@pytest.mark.slow
@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers_beside_rows_that_decode(harness, monkeypatch, kind):
    monkeypatch.setattr(prefill_graphs, "MIXED_ROWS", (2,))
    monkeypatch.setattr(prefill_graphs, "MIXED_QUERIES", 16)
    monkeypatch.setattr(prefill_graphs, "MIXED_NODES", 6)
    monkeypatch.setattr(prefill_inputs, "MAX_CHUNKS", 4)
    model = harness.model_of(config_of(RECURRENT[kind], harness.CONTEXT))
    prompts = harness.prompts_for(4, longest=12)
    params = [harness.greedy(5 + i % 3) for i in range(len(prompts))]
    expected = harness.plain_answers(model, prompts, params)
    rig = rig_of(
        harness, model, monkeypatch, (16,), size=2, rows=2, chunk=16, lag=1, mixed=True, drafter="oracle", miss=1,
        policy=harness.Cycle(TreeShape(2, 1, 3), PLAIN), book=harness.make_book(prompts, expected),
        states=StateSizes(20, 4, 4) if kind in HYBRIDS else None,
    )  # fmt: skip
    rig.executor.device.seconds = lambda begin, end: 0.0 if begin is end else 2e-3

    def between(turn):
        if turn % 2 == 0 and turn // 2 < len(prompts) - 1:
            rig.submit(str(turn // 2 + 1), prompts[turn // 2 + 1], params[turn // 2 + 1])

    assert rig.answer(prompts[:1], params[:1], between=between).tokens == expected.tokens
    assert rig.executor.prefills.mixed_replays > 1


@pytest.mark.parametrize("drafts", [False, True])
def test_rows_that_ask_for_more_have_the_forward_from_graphs(harness, model, monkeypatch, drafts):
    """Log probabilities, a limit and a grammar, beside the prompts of others."""
    monkeypatch.setattr(prefill_graphs, "MIXED_ROWS", (2,))
    monkeypatch.setattr(prefill_graphs, "MIXED_QUERIES", 16)
    monkeypatch.setattr(prefill_graphs, "MIXED_NODES", 9)
    prompts = harness.prompts_for(4, longest=8)
    params = [harness.greedy(9), harness.greedy(7), harness.seeded(6, seed=2), harness.greedy(1)]
    asks = [
        {"logprobs": LogprobParams(2)},
        {"limits": SpecLimits(1, 1, 2), "prediction": (1, 2, 3, 4)},  # predicted outputs alone have no graphs
        {"grammar": ToyGrammar(1, harness.VOCAB)},
        {},
    ]

    def answers(rig):
        def submit(i):
            rig.submit(str(i), prompts[i], params[i], **asks[i])

        submit(0)
        return rig.run(between=lambda turn: submit(turn // 2 + 1) if turn % 2 == 0 and turn < 6 else None)

    expected = answers(harness.Rig(model, rows=1))
    asks[2] = {"grammar": ToyGrammar(1, harness.VOCAB)}  # the first one has come to its end
    more = {"policy": harness.Cycle(TreeShape(2, 1, 3))}
    if drafts:
        book = harness.make_book(prompts, harness.plain_answers(model, prompts, params))
        more |= {"drafter": "oracle", "book": book, "miss": 1}
    rig = rig_of(harness, model, monkeypatch, (16,), size=2, rows=2, chunk=16, mixed=True, **more)
    rig.executor.device.seconds = lambda begin, end: 0.0 if begin is end else 2e-3  # they decide how prompts are cut
    special, step = [], rig.executor.steps.step

    def watched(plan, guidance):
        found = step(plan, guidance)
        if plan.mixed and found.special is not None:
            special.append(found.forward_key is not None)
        return found

    rig.executor.steps.step = watched
    got = answers(rig)
    assert got.tokens == expected.tokens and rig.stats.mixed > 0 and True in special
    assert drafts or False in special
    values = [[one.value for one in found.logprobs["0"]] for found in (got, expected)]
    assert len(values[0]) == 9 and values[0] == pytest.approx(values[1], abs=1e-4)


def test_nothing_is_mixed_where_no_graph_has_as_few_queries(harness, model, monkeypatch):
    rig = rig_of(harness, model, monkeypatch, (16,), size=8, mixed=True)
    assert not rig.executor.target.mixes(PLAIN, 1) and len(rig.executor.prefills) == 1


@pytest.mark.slow
def test_graphs_beside_steps_may_be_captured_later(harness, model, monkeypatch):
    """Until then both take turns in the step, each replayed from its own graph."""
    monkeypatch.setattr(prefill_graphs, "MIXED_ROWS", (1, 2))
    monkeypatch.setattr(prefill_graphs, "MIXED_QUERIES", 16)
    prompts = harness.prompts_for(3, longest=8)
    params = [harness.greedy(5 + i) for i in range(3)]
    expected = harness.plain_answers(model, prompts, params).tokens
    rig = rig_of(harness, model, monkeypatch, (16,), size=2, rows=3, chunk=16, mixed=True)
    executor, prefills = rig.executor, rig.executor.prefills
    whole = len(prefills)
    executor.graphs.clear()
    prefills.clear()
    executor.captures.capture((PLAIN,), some=True)
    assert len(prefills) == 1 and executor.captures.later == whole - 1 == 2

    def answers():
        turns = iter(range(1, 3))

        def between(turn):
            if turn % 2 == 0 and (i := next(turns, None)) is not None:
                rig.submit(str(i), prompts[i], params[i])

        return rig.answer(prompts[:1], params[:1], between=between).tokens

    assert answers() == expected and rig.stats.mixed > 1
    assert prefills.mixed_replays == 0 and sum(prefills.later.values()) == rig.stats.mixed
    while executor.captures.later:
        executor.captures.capture_next()
    assert len(prefills) == whole
    assert answers() == expected and prefills.mixed_replays > 1


def test_graphs_are_wanted_when_forwards_take_turns(harness, model, monkeypatch):
    """As often as a capture takes longer than what turns lose. What is wanted most comes first, of both kinds: while
    requests run, and while nobody does."""
    monkeypatch.setattr(prefill_graphs, "MIXED_ROWS", (1,))
    monkeypatch.setattr(prefill_graphs, "MIXED_QUERIES", 16)
    how = dict(size=2, rows=3, chunk=32, mixed=True)
    executor = rig_of(harness, model, monkeypatch, (16, 32), **how).executor
    prefills, key = executor.prefills, Key(PLAIN, 1)
    executor.graphs.clear()
    prefills.clear()
    executor.captures.capture((PLAIN,), some=True)

    def took_turns(length, times):
        for _ in range(times):
            prefills.took_turns([Chunk(0, 0, length, True)], key)

    took_turns(30, 1)
    took_turns(3, WANTED - 2)
    for _ in range(2 * WANTED):  # with images, which no graph of this model takes
        prefills.took_turns([Chunk(0, 0, 30, True)], key, SimpleNamespace(images=object(), turns=None))
    assert not executor.captures.wanted
    took_turns(14, 2)  # the graph of 3 tokens is that of 14, too
    assert executor.captures.wanted
    steps = executor.graphs.later
    steps[Key(PLAIN, 2)] = 2 * WANTED
    executor.captures.capture_next()
    assert not steps and executor.captures.wanted
    executor.captures.capture_next()
    assert {size for size, *_ in prefills.later} == {30} and not executor.captures.wanted
    steps[Key(PLAIN, 2)] = 2
    executor.captures.capture_next()
    assert not steps and prefills.later, "a step and two of another kind"
