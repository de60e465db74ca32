"""Every draft head in a real engine against float64 references that recompute all of it from the committed text.

Vocabularies are tiny, so that drafts of random heads are often accepted and often rejected. At every checked step the
draft KV, the root's continuations, each growth step's logits, the tree and the positions must be those of one clean
pass over the text so far, whatever chunks, trees, rejections, prefix hits and preemptions came before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import engine_rig
import pytest
import torch
from engine_rig import InTurn
from reference import checkpoints, draft_heads, exact_heads
from reference.draft_cases import CASES, VOCAB, Case, load_head, mtp

from draftwing.config.trees import PLAIN, TreeShape
from draftwing.core import NO_DEFERRAL, DraftDeferral
from draftwing.models.heads.base import DraftLM
from draftwing.models.loader import load_model
from draftwing.ops import make_ops
from draftwing.ops.noise.spec import gumbel
from draftwing.requests.sampling_params import SamplingParams
from draftwing.sched.policy.shape_policy import FixedShape, ShapePolicy
from draftwing.spec.build import make_model_drafter
from draftwing.spec.model_drafter import ModelDrafter
from draftwing.spec.mtp_drafter import MTPDrafter

pytestmark = pytest.mark.slow

CHAIN, TREE = TreeShape(3, 1, 4), TreeShape(3, 3, 9)
# A float32 engine against float64. Its error grows with the values, and with the text that the CPU's rounding leads to.
CLOSE = 3e-4
NEAR: dict[str, float] = {"rtol": 1e-4, "atol": CLOSE}
TIE = 1e-3  # a tree that hangs on a smaller difference of scores may differ


def load_drafter(case: Case, folder: Any, topk: int, rows: int) -> tuple[Any, ModelDrafter]:
    """Target and drafter from checkpoints on disk, as the engine loads them."""
    ops = make_ops(torch.device("cpu"))
    model = load_model(case.target.write(folder / "target"), torch.float32, "cpu")
    if case.algorithm == "STANDALONE":
        assert case.head is not None
        draft = load_model(case.head.write(folder / "draft"), torch.float32, "cpu")
        draft.pack(ops)
        head: Any = DraftLM(draft, VOCAB)
    else:
        head = load_head(case.head, case.algorithm, folder, model, **case.options)
        head.pack(ops)
    model.pack(ops)
    return model, make_model_drafter(head, rows, topk, torch.float32, ops)


class Seen(NamedTuple):
    """One row of one proposal, and what the drafter's state was."""

    tokens: list[int]  # x_0 .. x_T
    kv: list[torch.Tensor]  # per draft layer [T, kv_heads, 2, head_dim]
    seed: torch.Tensor
    noise: tuple[int, float] | None  # seed and temperature
    first: tuple[torch.Tensor, torch.Tensor]  # ids, log probabilities [K]
    levels: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]  # positions, logits, ids, log probs
    draft: tuple[list[int], list[int]]  # tokens, parents
    shape: TreeShape
    verified_at: list[int]


class Rig(engine_rig.Rig):
    """One around the checkpoints, with a look at every proposal."""

    def __init__(
        self, case: Case, folder: Any, policy: ShapePolicy, slots: int = 1500, rows: int = 4,
        deferral: DraftDeferral = NO_DEFERRAL, **how: int,
    ) -> None:  # fmt: skip
        model, drafter = load_drafter(case, folder, max(shape.topk for shape in policy.menu), rows + 1)
        super().__init__(model, policy=policy, drafter=drafter, slots=slots, rows=rows, deferral=deferral, **how)
        self.stats.full, self.seen = 0, list[Seen]()
        self._spy()

    def _watch(self, plan, result):
        super()._watch(plan, result)
        self.stats.full += int((result.count == plan.shape.max_commit).sum()) if plan.kind == "tree" else 0

    def _spy(self):
        drafter, head, executor = self.drafter, self.drafter.head, self.executor
        propose, continuations, verify = drafter.propose, drafter._continuations, executor._batches.trees
        name = "run_layer" if isinstance(drafter, MTPDrafter) else "run"
        run, logits = getattr(head, name), head.logits
        calls: list[Any] = []

        def spy_run(ids, positions, features, level, attend):
            calls.append(positions.clone())
            return run(ids, positions, features, level, attend)

        def spy_logits(hidden):
            out = logits(hidden)
            calls.append(out.clone())
            return out

        def spy_continuations(*args):
            out = continuations(*args)
            calls.append(tuple(t.clone() for t in out))
            return out

        def spy_propose(step):
            slots, rows, shape, _, noisy, _ = step
            drafter._read_first(slots, rows, noisy)  # as `propose` begins
            before = [self._state(int(row), shape.topk) for row in rows]
            calls.clear()
            draft = propose(step)
            size, topk = len(rows), shape.topk
            del calls[:2]  # of the root's continuations
            assert len(calls) == 3 * (shape.depth - 1) and draft.alive.all()
            levels = [calls[i : i + 3] for i in range(0, len(calls), 3)]
            for b, state in enumerate(before):
                mine = [
                    tuple(part.view(size, topk, -1)[b] for part in (at, z, *following)) for at, z, following in levels
                ]
                drafted = (draft.tokens[b].tolist(), draft.parent[b].tolist())
                self.seen.append(Seen(*state, mine, drafted, shape, []))
            return draft

        def spy_verify(rows, draft, shape, *more):
            drafted = verify(rows, draft, shape, *more)
            at_nodes = drafted.batch.positions.view(len(rows), -1)
            for seen, at in zip(self.seen[-len(rows) :], at_nodes, strict=True):
                seen.verified_at.extend(at.tolist())
            return drafted

        drafter.propose, drafter._continuations, executor._batches.trees = spy_propose, spy_continuations, spy_verify
        head.logits = spy_logits
        setattr(head, name, spy_run)
        if isinstance(drafter, MTPDrafter):
            drafter._run = partial(self._run_apart, drafter._run)

    def _run_apart(self, run, batch, *rest):
        """No two queries write to one slot, of which a GPU would keep either."""
        written = batch.write_slots[batch.write_slots > 0]
        assert len(written) == len(written.unique())
        return run(batch, *rest)

    def _state(self, row: int, topk: int) -> tuple[Any, ...]:
        slots, drafter = self.slots, self.drafter
        length = int(slots.kv_len[row])
        tokens = slots.tokens[row, : length + 1].tolist()
        assert tokens[-1] == int(slots.last[row])
        at = slots.page_table[row, :length]
        kv = [self.pool.kv[len(self.executor.model.kv_layers) + j][at].clone() for j in range(len(drafter.kv_layers))]
        noise = (int(slots.seed[row]), float(slots.floats[row, 0])) if slots.floats[row, 0] else None
        first = (drafter._first.ids[row, :topk].clone(), drafter._first.logp[row, :topk].clone())
        return tokens, kv, drafter._first.feature[row].clone(), noise, first


def growth_positions(case: Case, last: int, level: int) -> list[int]:
    """Of the rows that a node of this level is run with, in a text x_0 .. x_last."""
    if case.algorithm == "STANDALONE":
        return [last + level]
    layers = case.target.config.get("num_nextn_predict_layers", 1)
    if level < layers:  # rows before the text are run, and not read
        return [max(last - level + i, 0) for i in range(level)]
    return [last + level - layers]


def check(case: Case, seen: Seen) -> bool:
    """Compares one proposal with the reference; False if the tree hangs on a near tie and was not compared."""
    draft = case.reference(seen.tokens)
    last = len(seen.tokens) - 1
    assert len(draft.kv) == len(seen.kv)
    for layer, ((k, v), stored) in enumerate(zip(draft.kv, seen.kv, strict=True)):
        # Of several MTP layers the text determines one row less each.
        assert len(k) == max(last - (layer if case.algorithm == "NEXTN" else 0), 0) and len(stored) == last
        stored = stored[: len(k)]
        torch.testing.assert_close(stored[:, :, 0].double(), k, **NEAR, msg=f"draft keys, T = {last}")
        torch.testing.assert_close(stored[:, :, 1].double(), v, **NEAR, msg=f"draft values, T = {last}")
    if seen.seed.numel():
        torch.testing.assert_close(seen.seed.double(), draft.hidden, **NEAR)
    noise = None
    if seen.noise is not None:
        seed, temperature = seen.noise

        def noise(position: int) -> torch.Tensor:
            drawn = gumbel(torch.tensor([seed]), torch.tensor([[position]]), VOCAB)
            return temperature * drawn[0, 0].double()

    tree = draft_heads.draft_tree(draft, *seen.shape[:3], noise=noise)
    topk = seen.shape.topk
    torch.testing.assert_close(
        seen.first[1].double(), torch.tensor(tree.flat_scores[:topk], dtype=torch.float64), **NEAR
    )
    if tree.gap < TIE:
        return False
    assert seen.first[0].tolist() == [path[-1] for path in tree.flat_paths[:topk]]
    for level, (positions, logits, ids, logp) in enumerate(seen.levels, 1):
        assert positions.tolist() == [growth_positions(case, last, level)] * topk
        first = topk + (level - 1) * topk * topk
        for j in range(topk):
            children = range(first + j * topk, first + (j + 1) * topk)
            paths = [tree.flat_paths[c] for c in children]
            expected = draft.logits(paths[0][:-1])
            torch.testing.assert_close(logits[j].double(), expected, **NEAR)
            assert ids[j].tolist() == [path[-1] for path in paths]
            above = tree.flat_scores[tree.flat_paths.index(paths[0][:-1])]
            expected_logp = torch.tensor([tree.flat_scores[c] - above for c in children], dtype=torch.float64)
            torch.testing.assert_close(logp[j].double(), expected_logp, rtol=1e-4, atol=2 * CLOSE)
    assert seen.draft == (tree.tokens, tree.parents)
    assert seen.verified_at == tree.positions
    return True


def prompts_for(count: int, seed: int) -> list[list[int]]:
    """Prompts of 2 to 30 tokens; every second goes on from where another one starts, for prefix hits."""
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int) -> list[int]:
        return torch.randint(0, VOCAB, (length,), generator=generator).tolist()

    common = draw(14)
    return [[*(common if i % 2 else []), *draw(2 + (i * 5) % 16)] for i in range(count)]


def ask(rig: Rig, prompts: list[list[int]], tokens: int = 34, tag: str = "") -> Any:
    for i, prompt in enumerate(prompts):
        # at a high temperature the shared noise makes even random heads agree with the target now and then
        how = {"temperature": 4.0, "sampling_seed": 40 + i} if i % 3 else {"temperature": 0.0}
        rig.submit(f"{tag}{i}", prompt, SamplingParams(max_new_tokens=tokens, **how))
    return rig.run()


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def check_some(case: Case, rig: Rig, count: int) -> None:
    """Checks `count` proposals spread over the run; most of them must be comparable in full."""
    compared = [check(case, seen) for seen in rig.seen[:: max(1, len(rig.seen) // count)]]
    assert sum(compared) > len(compared) / 2


DEFERRAL = DraftDeferral(40, 12)  # chunks of a prompt are seen together
# tests/models/heads/test_eagle.py has the numbers of every head; here are those of which an engine does something else.
OF_HEADS_ALONE = [
    *("eagle2 fc bias", "eagle2 qwen2", "eagle3 prefix", "eagle3 aux norm", "eagle3 norm before fc"),
    *("eagle3 speculators", "eagle3 forced ids", "eagle3 head_dim", "eagle3 two layers", "eagle3 shared head"),
    *("eagle3 fc_norm", "eagle3 five aux"),
]
MAIN = ["eagle2 llama", "eagle3 official", "mtp", "mtp 2 layers", "mtp 3 layers", "standalone"]


@pytest.mark.further(name=OF_HEADS_ALONE)
@pytest.mark.further(name="mtp 2 layers")
@pytest.mark.further(shape=CHAIN, name=["mtp", "eagle2 llama", "standalone"])
@pytest.mark.parametrize(
    "name, shape",
    [
        *(pytest.param(name, TREE, id=f"{name}-tree") for name in CASES),
        *(pytest.param(name, CHAIN, id=f"{name}-chain") for name in MAIN),
    ],
)
def test_engine_drafts_what_the_reference_drafts(name, shape, tmp_path):
    case = CASES[name]()
    rig = Rig(case, tmp_path, FixedShape(shape), chunk=7, lag=1, deferral=DEFERRAL)
    prompts = prompts_for(4, seed=3)
    answers = ask(rig, prompts, 20).tokens
    more = [[*prompts[i], *answers[str(i)][:13]] for i in (1, 3)]  # go on in the middle of what was generated
    final = ask(rig, more, 8, "more ").final
    for i, prompt in enumerate(more):
        assert final[f"more {i}"].meta["cached_tokens"] >= len(prompt) - 1 - rig.drafter.lookahead
    assert rig.accept_length > 1.15 and rig.stats.full < rig.stats.rows, "accepts and rejections must mix"
    assert shape.topk == 1 or rig.stats.moved > 3
    check_some(case, rig, 6)


@pytest.mark.further(chunk=1, name=["eagle2 llama", "mtp", "standalone"])
@pytest.mark.further(chunk=3, name=["eagle3 official", "mtp 3 layers"])
@pytest.mark.further(name=["mtp", "mtp 2 layers", "eagle2 llama"])
@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("name", MAIN)
def test_chunks_and_preemption_leave_the_same_draft_kv(name, chunk, tmp_path):
    case = CASES[name]()
    rig = Rig(case, tmp_path, FixedShape(TREE), chunk=chunk, slots=86, deferral=DEFERRAL if chunk > 1 else NO_DEFERRAL)
    ask(rig, prompts_for(5, seed=4), 30)
    assert rig.sched.retractions >= 1
    check_some(case, rig, 8)


@pytest.mark.further(layers=2)
@pytest.mark.further(layers=3, chunk=[1, 4, 5, 6, 7])
@pytest.mark.parametrize("layers, chunk", [(2, 1), (2, 2), (2, 5), *((3, chunk) for chunk in range(1, 8))])
def test_several_layers_with_chunks_of_any_length(layers, chunk, tmp_path):
    """Prompts of every length around the number of layers, then again and continued, off the prefix cache."""
    case = mtp(layers)
    deferral = DEFERRAL if chunk % 2 else NO_DEFERRAL
    rig = Rig(case, tmp_path, FixedShape(TREE), chunk=chunk, lag=chunk % 2, deferral=deferral)
    prompts = [prompt[:length] for length, prompt in enumerate(prompts_for(6, seed=6), 1)]
    prompts.append(prompts_for(8, seed=6)[7])
    answers = ask(rig, prompts, 7).tokens
    more = [[*prompt, *answers[str(i)]][: 5 + 2 * i] for i, prompt in enumerate(prompts)]
    final = ask(rig, more, 4, "more ").final
    assert sum(out.meta["cached_tokens"] for out in final.values()) > 20
    check_some(case, rig, 10)


@pytest.mark.further(name=["mtp", "mtp 2 layers", "eagle2 llama"])
@pytest.mark.further(lag=0)
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("name", MAIN)
def test_changing_shapes_and_catching_up(name, lag, tmp_path):
    """After few steps without drafts and after more than may be kept; then with prefixes that ended behind."""
    case = CASES[name]()
    policy = InTurn(TREE, PLAIN, TreeShape(4, 2, 8), TreeShape(1, 3, 4), *[PLAIN] * 37, CHAIN, TREE)
    rig = Rig(case, tmp_path, policy, chunk=9, lag=lag)
    prompts = prompts_for(6, seed=7)
    answers = ask(rig, prompts, 49).tokens
    seen = len(rig.seen)
    assert {one.shape for one in rig.seen} == set(policy.menu) - {PLAIN}
    policy.menu = (CHAIN, PLAIN)
    more = [[*prompts[i], *answers[str(i)][:43]] for i in (1, 3, 4)]
    final = ask(rig, more, 8, "more ").final
    for i, prompt in enumerate(more):
        assert final[f"more {i}"].meta["cached_tokens"] >= len(prompt) - 1 - rig.drafter.lookahead
    assert len(rig.seen) > seen + 3
    check_some(case, rig, 16)


@pytest.mark.further(menu=[[TreeShape(2, 2, 5)]])
@pytest.mark.parametrize("menu", [[TreeShape(6, 2, 12)], [TreeShape(2, 2, 5)], [TREE, PLAIN, PLAIN, PLAIN]], ids=str)
def test_texts_of_fewer_tokens_than_layers(menu, tmp_path):
    """The rows that would stand before the first position neither leave anything behind nor are read."""
    case = mtp(5)
    rig = Rig(case, tmp_path, InTurn(*menu), chunk=2)
    ask(rig, [[7], [3, 1], [4, 4, 4], [2, 7, 1, 8]], 8)
    lengths = {len(seen.tokens) - 1 for seen in rig.seen}
    assert min(lengths) < 5 < max(lengths)
    check_some(case, rig, 10)


EXACT: dict[str, tuple[Callable[[], exact_heads.Exact], str]] = {
    "eagle2": (lambda: exact_heads.exact_eagle2(1), "EAGLE"),
    "eagle2 zero bias": (lambda: exact_heads.exact_eagle2(2, fc_bias=True), "EAGLE"),
    "eagle3": (lambda: exact_heads.exact_eagle3(3), "EAGLE3"),
    "eagle3 shared head": (lambda: exact_heads.exact_eagle3(5, rows=None, style="layers"), "EAGLE3"),
    "mtp": (lambda: exact_heads.exact_mtp(6), "NEXTN"),
    "mtp 2 layers": (lambda: exact_heads.exact_mtp(8, layers=2), "NEXTN"),
    "mtp 3 layers": (lambda: exact_heads.exact_mtp(7, layers=3), "NEXTN"),
}


@pytest.mark.further(name=["eagle2 zero bias", "eagle3", "mtp", "mtp 2 layers"])
@pytest.mark.further(lag=0, name=["eagle3 shared head", "mtp 3 layers"])
@pytest.mark.further(lag=1, name="eagle2")
@pytest.mark.parametrize("shape, lag", [(TreeShape(4, 1, 5), 0), (TreeShape(4, 3, 12), 1)], ids=["chain", "tree"])
@pytest.mark.parametrize("name", EXACT)
def test_constructed_heads_are_always_accepted(name, shape, lag, tmp_path):
    make, algorithm = EXACT[name]
    exact = make()
    case = Case(exact.target, exact.head, algorithm, lambda tokens: pytest.fail("not compared"))
    rig = Rig(case, tmp_path, FixedShape(shape), chunk=5, lag=lag)
    generator = torch.Generator().manual_seed(9)
    prompts = []
    for i in range(5):
        start = torch.randint(0, checkpoints.VOCAB, (2 + 4 * i,), generator=generator).tolist()
        prompts.append([*start, exact.starts[3 * i]])
        rig.submit(str(i), prompts[-1], SamplingParams(max_new_tokens=41, temperature=0.0))
    answers = rig.run()
    for i, prompt in enumerate(prompts):
        expected = [prompt[-1]]
        for _ in range(41):
            expected.append(int(exact.successor[expected[-1]]))
        assert answers.tokens[str(i)] == expected[1:]
        # one token of the prefill, then eight full steps
        meta = answers.final[str(i)].meta
        assert meta["spec_verify_ct"] == 8
        assert meta["spec_correct_drafts_histogram"] == [0] * shape.depth + [8]
