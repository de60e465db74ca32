"""A drafter that catches up is where one is that saw every step: the same bits of KV, features and drafts, and nobody
else's KV is touched on the way."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_rig import Chosen, InTurn

from draftwing.config.trees import LOOKUP_ALONE, PLAIN, TreeShape
from draftwing.core import MAX_BACKLOG, NO_DEFERRAL, DraftChunk, DraftDeferral, DraftExtend
from draftwing.engine.devices import pick_device
from draftwing.engine.draft_kv_backlog import ROOM, DraftKVBacklog
from draftwing.engine.row_table import RowTable
from draftwing.models.heads.base import DraftLM
from draftwing.models.heads.config import BlockConfig
from draftwing.models.heads.mtp import MTPHead
from draftwing.ops import make_ops
from draftwing.ops.runtime import Runtime
from draftwing.sched.policy.shape_policy import FixedShape
from draftwing.spec.build import make_model_drafter
from draftwing.spec.lookup_drafter import NGramDrafter
from draftwing.spec.pair_drafter import PairDrafter
from draftwing.train.heads import new_block_head, new_eagle3_head, new_eagle_head

pytestmark = pytest.mark.slow

TREE = TreeShape(3, 2, 5)
# Of two ways to the same float32: the difference grows with the values, which another CPU's text may lead to.
NEAR: dict[str, float] = {"rtol": 1e-4, "atol": 1e-5}
WIDTH = 6


def drafts_of(
    harness: Any,
    kind: str,
    lagging: bool,
    lag: int,
    deferral: DraftDeferral = NO_DEFERRAL,
    dtype: torch.dtype = torch.bfloat16,
) -> list[torch.Tensor]:
    """Every draft of a run, with the state that it was made from."""
    ops, model = make_ops(torch.device("cpu")), harness.tiny_model(dtype=dtype)
    model.pack(ops)
    head: Any = DraftLM(harness.tiny_model(seed=1), harness.VOCAB)
    if kind != "STANDALONE":
        head = new_eagle_head(model, 96, seed=3) if kind == "EAGLE" else new_eagle3_head(model, None, (1, 2), 96, 3)
        head = head.to(dtype).eval().requires_grad_(False)
        head.pack(ops)
    drafter = make_model_drafter(head, 7, TREE.topk, dtype, ops)
    if not lagging:
        drafter.skips_extend = lambda shape: False
    now_and_then = InTurn(PLAIN, PLAIN, TREE, *[PLAIN] * (MAX_BACKLOG + 7), TREE, TREE)
    rig = harness.Rig(model, drafter=drafter, policy=now_and_then, lag=lag, attn=ops.attention, deferral=deferral)
    found, propose = [], drafter.propose
    layer = len(model.kv_layers)

    def spy(step: Any) -> Any:
        table = step.table
        for row in step.rows.tolist():
            slots = table.page_table[row, : int(table.kv_len[row])]
            found.extend((rig.pool.kv[layer][slots].clone(), drafter._first.feature[row].clone()))
        draft = propose(step)
        found.extend((draft.tokens.clone(), draft.parent.clone()))
        return draft

    drafter.propose = spy
    rig.executor.graphs.key = lambda shape, size: None
    params = [harness.seeded(70, seed=i) if i % 2 else harness.greedy(70) for i in range(3)]
    rig.answer(harness.prompts_for(3), params)
    return found


def drafts_and_passes(harness: Any, kind: str, lag: int, deferral: DraftDeferral) -> tuple[list[Any], list[list[int]]]:
    """The drafts of one that lags, and of its passes over text the lengths of their parts."""
    passes, see = list[list[int]](), DraftKVBacklog._see

    def noted(self: DraftKVBacklog, parts: Any) -> None:
        passes.append([part.length for part in parts])
        see(self, parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftKVBacklog, "_see", noted)
        return drafts_of(harness, kind, True, lag, deferral, torch.float32), passes


# Steps in flight, and the ways of a drafter, are apart from each other.
@pytest.mark.parametrize(("kind", "lag"), [("EAGLE", 0), ("EAGLE3", 1)])
def test_the_same_bits(on_cpu: Any, kind: str, lag: int) -> None:
    expected, found = (drafts_of(on_cpu, kind, lagging, lag) for lagging in (False, True))
    assert len(found) == len(expected) >= 30
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("deferral", "lag"),
    [(DraftDeferral(0, 100, True), 1), (DraftDeferral(0, 50, True, 20), 0)],
    ids=["late", "at rest"],
)
def test_text_that_the_host_knows_is_seen_as_a_prompt_is(on_cpu: Any, lag: int, deferral: DraftDeferral) -> None:
    """Of several rows in a pass, and by a drafter that needs tokens alone further behind than a pass over rows goes."""
    expected = drafts_of(on_cpu, "STANDALONE", False, lag, dtype=torch.float32)
    found, passes = drafts_and_passes(on_cpu, "STANDALONE", lag, deferral)
    assert len(found) == len(expected) >= 30
    for pair in zip(found, expected, strict=True):
        torch.testing.assert_close(*pair, **NEAR)
    assert max(map(len, passes)) >= 2 and max(map(max, passes)) >= deferral.backlog // 16, "rows together"
    assert max(map(sum, passes)) <= deferral.most


def test_hidden_states_beside_spoilt_slots_are_zeroed(on_cpu: Any) -> None:
    model = on_cpu.tiny_model()
    head = new_eagle3_head(model, None, (1, 2), 96, 3).eval().requires_grad_(False)
    drafter = make_model_drafter(head, 7, TREE.topk, torch.float32, make_ops(torch.device("cpu")))
    rig = on_cpu.Rig(model, drafter=drafter, deferral=DraftDeferral(0, 50, by_slot=True))
    kept = rig.executor._backlog._slots.fill_(float("nan"))
    rig.executor.clear(np.array([3, 5]))
    assert torch.isfinite(kept).all(1).nonzero().flatten().tolist() == [3, 5]


@pytest.mark.parametrize(("kind", "lag"), [("EAGLE", 1), ("EAGLE3", 0)])
def test_hidden_states_that_lie_with_the_slots(on_cpu: Any, kind: str, lag: int, monkeypatch: Any) -> None:
    """A drafter that saw neither prompts nor answers while nothing was drafted is where one is that saw all."""
    monkeypatch.setattr("draftwing.sched.draft_backlog.RESTED", -1)
    expected = drafts_of(on_cpu, kind, False, lag, dtype=torch.float32)
    found, passes = drafts_and_passes(on_cpu, kind, lag, DraftDeferral(0, 50, by_slot=True))
    assert len(found) == len(expected) >= 30
    for pair in zip(found, expected, strict=True):
        torch.testing.assert_close(*pair, **NEAR)
    assert max(map(len, passes)) >= 2 and max(map(max, passes)) > MAX_BACKLOG and max(map(sum, passes)) <= 50


def mixed_prefills(rig: Any) -> set[tuple[bool, ...]]:
    """Of each prefill to come that a head sees in part only: whether it sees the chunks."""
    found, launch = set(), rig.executor.launch

    def look(plan: Any, guidance: Any = None) -> Any:
        seen = tuple(chunk.kept is None for chunk in plan.chunks)
        if len(set(seen)) == 2:
            found.add(seen)
        return launch(plan, guidance)

    rig.executor.launch = look
    return found


@pytest.mark.parametrize(("chunk", "lag"), [(40, 1), (64, 0)])
def test_a_long_prompt_beside_a_short_one_at_rest(
    on_cpu: Any, lag: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head sees the long one at once, whichever comes first, and the other when it drafts."""
    monkeypatch.setattr(
        "draftwing.sched.policy.prefill_budget.PrefillBudget.record", lambda *_: None
    )  # a slow machine prefills less at once
    monkeypatch.setattr("draftwing.sched.draft_backlog.RESTED", 2)
    monkeypatch.setattr("draftwing.sched.draft_backlog.UNSEEN", 30)
    model, policy = on_cpu.tiny_model(), Chosen(TREE)
    prompts, params = [[0, 7, 7], [1, *range(2, 46)], [2, 3, 4, 5, 6, 9]], [on_cpu.greedy(20)] * 3
    book = on_cpu.make_book(prompts, expected := on_cpu.plain_answers(model, prompts, params))
    deferral = DraftDeferral(0, 16, by_slot=True)
    rig = on_cpu.Rig(model, policy=policy, drafter="oracle", book=book, lag=lag, chunk=chunk, deferral=deferral)
    mixed = mixed_prefills(rig)
    rig.submit("0", prompts[0], params[0])
    rig.run()  # which looks at all of the drafter's KV
    for i in (1, 2):
        rig.submit(str(i), prompts[i], params[i])

    def between(turn: int) -> None:
        policy.shape = TREE if turn > 2 else PLAIN

    assert rig.run(between=between).tokens == {uid: expected.tokens[uid] for uid in "12"}
    assert mixed == {(False, True) if chunk == 40 else (True, False)}


@pytest.mark.parametrize(("turns", "lag"), [(2, 0), (3, 1), (4, 0), (5, 1)])
def test_answers_to_a_prompt_that_was_not_seen(
    on_cpu: Any, lag: int, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They begin to draft together, soon after their prompt; the head sees it once."""
    monkeypatch.setattr("draftwing.sched.draft_backlog.RESTED", 2)
    model, policy = on_cpu.tiny_model(), Chosen(TREE)
    prompts, params = [[0, 7, 7], [1, *range(2, 46)]], [on_cpu.greedy(20)] * 2
    book = on_cpu.make_book(prompts, expected := on_cpu.plain_answers(model, prompts, params))
    deferral = DraftDeferral(0, 50, by_slot=True)
    rig = on_cpu.Rig(model, policy=policy, drafter="oracle", book=book, lag=lag, deferral=deferral)
    policy.shape = PLAIN
    rig.submit("0", prompts[0], params[0])
    rig.run()
    for i in range(1, 4):
        rig.submit(str(i), prompts[1], params[1])
    others = [0]

    def between(turn: int) -> None:
        others[0] += len(rig.sched.running) == 3
        policy.shape = TREE if others[0] >= turns else PLAIN

    assert rig.run(between=between).tokens == dict.fromkeys("123", expected.tokens["1"])


@pytest.mark.further(lag=0)
@pytest.mark.parametrize("lag", [0, 1])
def test_a_lookup_sees_prompts_that_its_head_does_not(on_cpu: Any, lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its row is the new request's, which sees nothing of what the one before it said."""
    monkeypatch.setattr(
        "draftwing.sched.policy.prefill_budget.PrefillBudget.record", lambda *_: None
    )  # a slow machine prefills less at once
    monkeypatch.setattr("draftwing.sched.draft_backlog.UNSEEN", 30)
    ops, model, alone = make_ops(torch.device("cpu")), on_cpu.tiny_model(), TreeShape(6, 2, 8, proposer=LOOKUP_ALONE)
    head = new_eagle3_head(model, None, (1, 2), 96, 3).eval().requires_grad_(False)
    head.pack(ops)
    lookup, policy = NGramDrafter(4, ops, capacity=4096), Chosen(TREE, alone)
    drafter = PairDrafter(make_model_drafter(head, 4, 2, torch.float32, ops), lookup, TREE, TreeShape(6, 2, 8))
    rig = on_cpu.Rig(model, policy=policy, drafter=drafter, lag=lag, rows=3, radix=False)
    assert rig.executor.deferral.by_slot
    mixed, params = mixed_prefills(rig), on_cpu.greedy(14)
    for i in range(2):
        rig.submit(str(i), [9 - i, 2, 3], params, salt=1)
    answer = rig.run().tokens["1"]
    policy.shape = alone
    rig.submit("long", [11, *range(2, 40)], params, salt=1)
    rig.submit("other", [8, 2, 3], params, salt=2, traced=True)  # in the row that was request 1's
    trace, outputs = [], rig.sched.take_outputs

    def look() -> Any:
        for out in outputs():
            trace.extend(step for step in out.trace if out.uid == "other")
            yield out

    rig.sched.take_outputs = look
    assert rig.run().tokens["other"] == answer and mixed == {(True, False)}
    known = [8, 2, 3]
    for step in trace:
        assert {node.token for node in step.nodes} <= set(known), "drafts from another's answer"
        known += step.tokens


@pytest.mark.further(lag=0)
@pytest.mark.parametrize("lag", [0, 1])
def test_a_head_that_rests_does_not_run(on_cpu: Any, lag: int) -> None:
    """Neither for prompts nor for answers nor for the cache, and who goes on from there has it see what it needs."""
    ops, model, policy = make_ops(torch.device("cpu")), on_cpu.tiny_model(), FixedShape(TREE)
    head = new_eagle3_head(model, None, (1, 2), 96, 3).eval().requires_grad_(False)
    drafter = make_model_drafter(head, 7, TREE.topk, torch.float32, ops)
    rig = on_cpu.Rig(model, drafter=drafter, policy=policy, lag=lag, chunk=16)
    ran: list[int] = []
    features = head.features
    head.features = lambda hidden: (ran.append(len(hidden)), features(hidden))[1]
    policy.choose = lambda load: PLAIN  # type: ignore[method-assign]
    prompts, params = on_cpu.prompts_for(6, longest=40), [on_cpu.greedy(45)] * 6
    whole = on_cpu.plain_answers(model, prompts, params).tokens
    for part in (slice(0, 1), slice(1, 6)):
        ran.clear()
        for i in range(6)[part]:
            rig.submit(str(i), prompts[i], params[i])
        assert rig.run().tokens == {str(i): whole[str(i)] for i in range(6)[part]}
    assert not ran, "not even once"
    policy.choose = lambda load: TREE  # type: ignore[method-assign]
    text = prompts[3] + whole["3"][:30]
    req = rig.submit("3", text, on_cpu.greedy(15))
    assert rig.run().tokens["3"] == whole["3"][30:] and req.cached_tokens == len(text) - 1
    pieces = -(-(len(text) - 1) // 16)  # as long as a prefill
    assert sum(ran[:pieces]) == len(text) - 1 and max(ran) == 16


class Watcher:
    """In place of a drafter: keeps what it is shown, with what then stands in the page table."""

    kv_layers, tail = (None,), 1

    def __init__(self) -> None:
        self.seen: list[SimpleNamespace] = []

    def catch_up(self, seen: Any, drafts: Any) -> None:
        table, batch, hidden, next_ids, count, noisy = seen
        pages = table.page_table.clone()
        self.seen.append(
            SimpleNamespace(
                batch=batch, hidden=hidden, ids=next_ids, count=count, noisy=noisy, pages=pages, drafts=drafts
            )
        )


@pytest.mark.parametrize(("behind", "sizes"), [(1, ()), (2, (1, 4)), (7, ()), (MAX_BACKLOG, (4, 8))])
def test_what_is_shown(harness: Any, behind: int, sizes: tuple[int, ...]) -> None:
    """sizes: numbers of rows that are tried before; the others are the dummy then."""
    device = pick_device(harness.device)
    g, drafter = torch.Generator().manual_seed(behind), Watcher()
    table = RowTable(4, 2 * MAX_BACKLOG + ROOM + 1, device)
    pages = torch.randperm(5 * table.length, generator=g).view(5, -1) + 1
    tokens = torch.randint(0, 90, (5, table.length), generator=g)
    kv_len, rows = torch.tensor([MAX_BACKLOG, 50, 40, 2 * MAX_BACKLOG, 0]), [3, 1]
    table.page_table[:], table.tokens[:], table.kv_len[:] = pages, tokens, kv_len
    lag = DraftKVBacklog(drafter, table, device.ops, WIDTH, torch.float32, sizes=sizes)
    # Row 1 is one position behind less than row 3, in steps of one position each.
    known = {3: 2 * MAX_BACKLOG - behind, 1: 50 - max(behind - 1, 1)}
    truth = torch.randn(4, table.length, WIDTH, generator=g).to(device.device)
    for row, start in known.items():
        for p in range(start, int(kv_len[row])):
            at, one = torch.tensor([row], device=device.device), torch.ones(1, dtype=torch.int64, device=device.device)
            lag.keep(at, one * p, one, truth[row, p : p + 1], None)
    lag.catch_up(DraftExtend(np.asarray(rows), behind, 2 * MAX_BACKLOG), np.asarray([0, 1]), True)
    (seen,) = drafter.seen
    assert seen.drafts
    size = 4 if sizes else 2
    width = len(seen.ids) // size
    assert seen.batch.rows.tolist() == [*rows, *[4] * (size - 2)] and seen.noisy.tolist() == [1]
    assert seen.count[:2].tolist() == [int(kv_len[row]) - known[row] for row in rows]
    for b, row in enumerate(rows):
        start, end = known[row], int(kv_len[row])
        mine = slice(b * width, b * width + end - start)
        assert seen.batch.prefix_len[b] == start and seen.batch.positions[mine].tolist() == [*range(start, end)]
        assert seen.batch.ids[mine].tolist() == tokens[row, start:end].tolist()
        assert seen.ids[mine].tolist() == tokens[row, start + 1 : end + 1].tolist()
        assert seen.batch.write_slots[mine].tolist() == pages[row, start:end].tolist()
        assert torch.equal(seen.hidden[mine], truth[row, start:end])
        # What comes after the newest token, and the row of the drafter's tail, is nobody's.
        beyond = seen.batch.write_slots.view(size, -1)[b, end - start + drafter.tail :]
        assert not beyond.any() and not seen.pages[row, end + drafter.tail : start + width + 1].any()
    if sizes:  # no pass has more rows than any that was tried
        lag._sizes = (1,)
        lag.catch_up(DraftExtend(np.asarray(rows), behind, 2 * MAX_BACKLOG), np.asarray([0, 1]), True)
        assert [one.batch.rows.tolist() for one in drafter.seen[1:]] == [[row] for row in rows]
    assert torch.equal(table.page_table.cpu(), pages), "the page table is what it was"
    assert not lag._unseen.behind.any()


def test_a_part_of_a_text_whose_end_was_seen_leaves_no_more_to_see(harness: Any) -> None:
    device, drafter = pick_device(harness.device), Watcher()
    table = RowTable(4, 2 * MAX_BACKLOG + ROOM + 1, device)
    table.kv_len[1] = 50
    lag = DraftKVBacklog(drafter, table, device.ops, 0, torch.float32, DraftDeferral(0, 64, True))
    lag.reset(torch.tensor([1], device=device.device), 1)
    lag.catch_up(DraftExtend(np.asarray([1]), 1, 50, (DraftChunk(1, 10, 5, 0),)), np.empty(0, np.int64), True)
    part, rest = drafter.seen
    assert part.batch.positions.tolist() == [*range(10, 15)] and not part.drafts
    assert rest.count.tolist() == [1] and rest.batch.prefix_len.tolist() == [49]


@pytest.fixture(scope="module")
def at_once(on_cpu: Any) -> Callable[[str], tuple[list[torch.Tensor], Any]]:
    """`kv_of_prompts` of a drafter that sees each chunk."""
    return cache(lambda kind: kv_of_prompts(on_cpu, kind, NO_DEFERRAL))


@pytest.mark.further(kind="STANDALONE")
@pytest.mark.parametrize("kind", ["EAGLE3", "STANDALONE", "MTP", "DSPARK"])
def test_queries_that_are_rounded_up(on_cpu: Any, at_once: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: what is added to a prompt's queries changes nothing of its KV."""
    expected, _ = at_once(kind)
    asked: list[int] = []
    monkeypatch.setattr(Runtime, "round_up_rows", lambda self, count: asked.append(count) or -(-count // 16) * 16)
    for deferral in (NO_DEFERRAL, DraftDeferral(200, 100))[: 1 + (kind in ("EAGLE3", "STANDALONE"))]:
        asked.clear()
        found, passes = kv_of_prompts(on_cpu, kind, deferral)
        assert passes and any(count % 16 for count in asked)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, **NEAR)


def kv_of_prompts(harness: Any, kind: str, deferral: DraftDeferral) -> tuple[list[torch.Tensor], Any]:
    """The drafter's KV of prompts in chunks of 5, of which one ends in the middle and is asked for again."""
    ops, model = make_ops(torch.device("cpu")), harness.tiny_model()
    head: Any = DraftLM(harness.tiny_model(seed=1), harness.VOCAB)
    if kind == "EAGLE3":
        head = new_eagle3_head(model, None, (1, 2), 96, 3).eval().requires_grad_(False)
    elif kind == "MTP":
        head = MTPHead(model, 3, torch.float32, "cpu").eval().requires_grad_(False)
        generator = torch.Generator().manual_seed(3)
        for name, weight in head.named_parameters():
            weight.normal_(1.0 if "norm" in name else 0.0, 0.1, generator=generator)
    elif kind == "DSPARK":
        block = BlockConfig((1, 2), 4, harness.VOCAB - 1, True, (), (), 0, "vanilla", 16, "")
        head = new_block_head(model, block, layers=2, ffn_size=96, seed=3).eval().requires_grad_(False)
    drafter = make_model_drafter(head, 7, TREE.topk, torch.float32, ops)
    policy = harness.Cycle(TREE)
    rig = harness.Rig(model, drafter=drafter, policy=policy, chunk=5, deferral=deferral)
    passes, extend = [], drafter.extend
    drafter.extend = lambda seen: (passes.extend(seen.batch.chunks), extend(seen))
    long = [*range(40), *range(7, 47)]
    if deferral.from_tokens:  # nobody has seen what stands in the cache
        rig.submit("first", [1, 2], harness.greedy(3))
        rig.run()
        passes.clear()
        rig.sched._prefills._waited, rig.sched._prefills.rest = 1000, lambda: None  # as with others
        rig.submit("skipped", long[:35], harness.greedy(9))
        (text,) = harness.plain_answers(model, [long[:35]], [harness.greedy(9)]).tokens.values()
        assert rig.run().tokens["skipped"] == text and not [span for span in passes if span.length > 1]
        rig.sched._prefills._waited = 0
    rig.submit("aborted", long, harness.greedy(9))
    for _ in range(6):
        rig.loop.turn()
    rig.sched.abort("aborted")
    found = []
    layers = range(len(model.kv_layers), len(rig.pool.kv))
    for i, prompt in enumerate([long, long[3:40], [*long[:50], 3, 2, 1]]):
        req = rig.submit(str(i), prompt, harness.greedy(9))
        while len(req.tokens) < len(prompt) + 2:
            rig.loop.turn()
        slots = torch.from_numpy(req.slots[: len(prompt) - 1])
        found += [rig.pool.kv[layer][slots].clone() for layer in layers]
        rig.run()
        assert i == 1 or req.cached_tokens > (20 if i == 0 else 45)
    return found, passes


@pytest.mark.parametrize("kind", ["EAGLE3", "STANDALONE"])
def test_a_prompt_that_is_seen_in_one_pass(
    on_cpu: Any, at_once: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its KV is that of a prompt that is seen chunk by chunk, whatever was aborted and found in the cache."""
    expected, parts = at_once(kind)
    assert max(span.length for span in parts if not span.final) == 5
    monkeypatch.setattr("draftwing.sched.draft_backlog.RESTED", -1)
    more = DraftDeferral(0, 22, kind == "STANDALONE", by_slot=kind == "EAGLE3")
    for deferral in (DraftDeferral(200, 100), DraftDeferral(22, 22), more):
        found, passes = kv_of_prompts(on_cpu, kind, deferral)
        assert len(passes) < len(parts) / 2 and max(span.length for span in passes) >= 20
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, **NEAR)
