"""Heads that draft a block, or with masks, in every published layout, against float64 written from the formats alone:
keys and values of the text, the trees, and the scores behind them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from reference import draft_heads
from reference.block_heads import (
    accepted,
    block_pass,
    dflash2_head,
    dflash_head,
    domino_head,
    dspark_head,
    speculators_head,
)
from reference.checkpoints import Checkpoint, eagle3_head, llama_target

from draftwing.config.trees import MODEL, PLAIN, TreeShape
from draftwing.kv.pool import KVPool
from draftwing.models.heads.block import BlockHead
from draftwing.models.heads.loader import load_draft_head
from draftwing.models.loader import load_model
from draftwing.ops import make_ops
from draftwing.ops.attention.batch import Batch, ChunkSpan
from draftwing.ops.noise.spec import gumbel
from draftwing.ops.table import TorchOps
from draftwing.spec.block_drafter import BlockDrafter
from draftwing.spec.build import make_model_drafter
from draftwing.spec.drafter import DraftStep, SeenTokens

CPU = torch.device("cpu")
TORCH, NATIVE = TorchOps(CPU), make_ops(CPU)
VOCAB, LENGTH = 12, 96
CLOSE = 3e-4
NEAR: dict[str, float] = {"rtol": 1e-4, "atol": CLOSE}  # float32 against float64: the error grows with the values
NOISY = [0, 2]  # rows with a temperature, where they draft with others
TIE = 1e-3  # a tree that hangs on a smaller difference of scores may differ
TARGET = llama_target(4, num_hidden_layers=5, vocab_size=VOCAB)
SCALED = {"input_embedding_scale": 1.5, "output_multiplier": 0.7, "final_logit_softcapping": 7.0, "conv_group_size": 16}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}


class Case(NamedTuple):
    """A head, and what its config is expected to say. rows: of a block, 0: it drafts with masks."""

    algorithm: str
    make: Callable[[], Checkpoint]
    rows: int = 0
    from_anchor: bool = False
    windows: tuple[int, int] = (0, 0)
    causal: tuple[bool, bool] = (False, False)
    stored: Callable[[Checkpoint], Checkpoint] = lambda head: head
    seen: int | None = None  # what its layers are told to see at most


def aliased(head: Checkpoint) -> Checkpoint:
    """Under the names that some exports have."""
    tensors, config = dict(head.tensors), head.config
    names = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
    for name in list(tensors):
        for theirs, other in names.items():
            if name.startswith(theirs):
                tensors[name.replace(theirs, other)] = tensors.pop(name)
    return Checkpoint(tensors, config)


def with_embedding_names(head: Checkpoint) -> Checkpoint:
    """Codebooks as embeddings are called."""
    return Checkpoint({f"{name}.weight" if "codebook" in name else name: x for name, x in head.tensors.items()},
                      head.config)  # fmt: skip


CASES = {
    "dflash": Case("DFLASH", lambda: dflash_head(TARGET), 6, False),
    "dflash, other names": Case("DFLASH", lambda: dflash_head(TARGET), 6, False, stored=aliased),
    "dflash, windows": Case("DFLASH", lambda: dflash_head(TARGET, **SLIDING), 6, False, (7, 0), (True, False)),
    "dflash, windows that see the block": Case(
        "DFLASH", lambda: dflash_head(TARGET, dflash_config={"use_swa": True, "swa_window_size": 9}), 6, False, (9, 9)
    ),
    "dflash, trained on short texts": Case(
        "DFLASH", lambda: dflash_head(TARGET, max_position_embeddings=8), 6, False, (8, 8)
    ),
    "dflash2, trained on texts shorter than its window": Case(
        "DFLASH2", lambda: dflash2_head(TARGET, **SLIDING, max_position_embeddings=5), 6, False, (5, 5)
    ),
    "dflash, causal": Case(
        "DFLASH", lambda: dflash_head(TARGET, dflash_config={"causal": True}), 6, False, (0, 0), (True, True)
    ),
    "dflash, causal as JetSpec calls it": Case(
        "DFLASH", lambda: dflash_head(TARGET, dflash_config={"causal_head": True}), 6, False, (0, 0), (True, True)
    ),
    "dflash, speculators": Case("DFLASH", lambda: speculators_head(TARGET, "dflash"), 5, False),
    "dflash, scaled": Case("DFLASH2", lambda: dflash_head(TARGET, dflash_config=SCALED), 6, False),
    "dspark": Case("DSPARK", lambda: dspark_head(TARGET), 5, True),
    "dspark, gated": Case("DSPARK", lambda: dspark_head(TARGET, markov_head_type="gated"), 5, True),
    "dspark, recurrent": Case("DSPARK", lambda: dspark_head(TARGET, markov_head_type="rnn"), 5, True),
    "dspark, speculators": Case("DSPARK", lambda: speculators_head(TARGET), 5, False),
    "dspark, speculators, from the anchor": Case(
        "DSPARK", lambda: speculators_head(TARGET, sample_from_anchor=True), 5, True
    ),
    "dflash2": Case("DFLASH2", lambda: dflash2_head(TARGET), 6, False),
    "dflash2, windows, three taps": Case(
        "DFLASH", lambda: dflash2_head(TARGET, **SLIDING, dflash_config={"conv_kernel_size": 3}), 6, False, (7, 0)
    ),
    "dflash2, seeing little": Case("DFLASH2", lambda: dflash2_head(TARGET, **SLIDING), 6, False, (5, 5), seen=5),
    "dflash2, scaled": Case(
        "DFLASH2", lambda: dflash2_head(TARGET, dflash_config=SCALED), 6, False, stored=with_embedding_names
    ),
    "dflash2, speculators": Case("DFLASH2", lambda: speculators_head(TARGET, "dflash2"), 5, False),
    "domino": Case("DFLASH", lambda: domino_head(TARGET), 6, False),
    "domino, from the anchor": Case(
        "DFLASH", lambda: domino_head(TARGET, block_size=5, dflash_config={"shift_label": True}), 5, True
    ),
    "masks": Case("EAGLE3", lambda: masked_head(layers=2, embedding=True, pard_token=5)),
    "masks, windows": Case("EAGLE3", lambda: masked_head(layers=2, ptd_token_id=5, **SLIDING)),
    "masks, speculators": Case(
        "EAGLE3", lambda: masked_head(style="speculators", norm_before_residual=True, fc_norm=True, mask_token_id=5)
    ),
    "masks, last state": Case(
        "EAGLE3", lambda: masked_head(aux=0, pard_token=5, eagle_config={"use_aux_hidden_state": False})
    ),
}


def masked_head(**changes: Any) -> Checkpoint:
    layers = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}  # whose outputs are meant
    return eagle3_head(TARGET, rows=8, vocab_size=VOCAB, **layers | changes)


CHAINS = "dflash, causal", "dflash2", "dspark, recurrent", "domino, from the anchor", "masks"
OTHERS = [name for name in CASES if name not in CHAINS]
# tests/models/heads/test_published_heads.py has their numbers.
OF_HEADS_ALONE = ["dflash, causal as JetSpec calls it", "masks, speculators", "masks, last state"]


@pytest.fixture(autouse=True)
def no_grad():
    with torch.inference_mode():
        yield


class Rig:
    """A drafter whose pool and page table are filled for some texts, by the reference's hidden states of the target."""

    def __init__(self, case: Case, folder: Path, ops: Any, texts: list[list[int]], topk: int) -> None:
        self.checkpoint = case.make()
        model = load_model(TARGET.write(folder / "target"), torch.float32, CPU)
        head = load_draft_head(
            case.stored(self.checkpoint).write(folder / "head"), model, case.algorithm, torch.float32, CPU
        )
        assert isinstance(head, BlockHead) == bool(case.rows)
        if case.seen is not None:
            head.see_at_most(case.seen)
        head.pack(ops)
        model.pack(ops)
        count, g = len(texts), torch.Generator().manual_seed(1)
        self.pool = KVPool(head.kv_layers, (count + 1) * LENGTH, torch.float32, CPU)
        self.drafter: Any = make_model_drafter(head, count + 1, topk, torch.float32, ops)
        self.drafter.attach(ops.attention(self.pool), 0, LENGTH)
        pages = torch.randperm((count + 1) * LENGTH, generator=g).view(count + 1, LENGTH) + 1
        pages[count].zero_()
        kv_len = torch.tensor([*(len(text) - 1 for text in texts), 0])
        tokens = torch.zeros(count + 1, LENGTH, dtype=torch.int64)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = torch.tensor(text)
        floats = torch.zeros(count + 1, 3)
        floats[NOISY, 0] = 4.0
        self.table: Any = SimpleNamespace(
            rows=count, length=LENGTH, page_table=pages.to(ops.table_dtype), tokens=tokens.to(ops.table_dtype),
            kv_len=kv_len, floats=floats,
            last=tokens.gather(1, kv_len.unsqueeze(1)).squeeze(1), seed=torch.arange(count + 1) + 40,
            top_k=torch.zeros(count + 1, dtype=torch.int64), ban_until=torch.zeros(count + 1, dtype=torch.int64),
            ban_ids=torch.full((count + 1, 1), -1), slots_at=lambda rows, at: self.table.page_table[rows, at].long(),
            tokens_at=lambda rows, at: self.table.tokens[rows, at].long(),
        )  # fmt: skip
        for row, text in enumerate(texts):
            self._show(row, text)

    def _show(self, row: int, text: list[int]) -> None:
        """The text in two chunks, then its last positions again as an accepted path of a step."""
        ran = draft_heads.run_target(TARGET.tensors, TARGET.config, text[:-1])
        streams = [*ran.streams, ran.hidden]  # the last as `final_aux_layer` has it
        hidden = torch.cat([streams[i] for i in self.drafter.aux_layers], 1).float()
        length, rows, none = len(text) - 1, torch.tensor([row]), torch.zeros(0, dtype=torch.int64)
        cut = length // 2
        parts = [(0, cut), (cut, length)] if cut else [(0, length)]
        for start, end in (*parts, (max(length - 3, 0), length)):
            at = torch.arange(start, end)
            step = torch.arange(end - start)
            batch = Batch(
                rows, torch.tensor(text[start:end]), at, self.table.page_table[row, at].long(), self.table.page_table,
                torch.tensor([start]), bound=LENGTH,
            )  # fmt: skip
            if (start, end) in parts:
                batch = batch._replace(chunks=(ChunkSpan(0, 0, start, end - start, end == length),))
            else:
                path_len = (step + 1).unsqueeze(0)
                path = step.expand(1, len(step), len(step)).contiguous()
                batch = batch._replace(path=path, path_len=path_len, window=len(step))
            count = None if batch.chunks else torch.tensor([end - start])
            follow = torch.tensor(text[start + 1 : end + 1])
            self.drafter.extend(SeenTokens(self.table, batch, hidden[start:end], follow, count, none))


def drawn_noise(seed: int, position: int) -> torch.Tensor:
    return 4.0 * gumbel(torch.tensor([seed]), torch.tensor([[position]]), VOCAB)[0, 0].double()


def texts(count: int) -> list[list[int]]:
    g = torch.Generator().manual_seed(9)
    return [torch.randint(0, VOCAB, (2 + 7 * i,), generator=g).tolist() for i in range(count)]


@pytest.mark.slow
@pytest.mark.further(name=OF_HEADS_ALONE)
@pytest.mark.further(shape=TreeShape(1, 3, 4))
@pytest.mark.further(shape=TreeShape(4, 1, 5), name=OTHERS)
@pytest.mark.further(ops=TORCH, name=OTHERS)
@pytest.mark.further(ops=TORCH, shape=TreeShape(4, 1, 5))
@pytest.mark.parametrize("ops", [TORCH, NATIVE], ids=["torch", "native"])
@pytest.mark.parametrize("shape", [TreeShape(4, 1, 5), TreeShape(4, 3, 14), TreeShape(1, 3, 4)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_trees_are_those_of_the_reference(tmp_path: Path, name: str, shape: TreeShape, ops: Any) -> None:
    compare(CASES[name], tmp_path, ops, shape)


@pytest.mark.slow
@pytest.mark.usefixtures("mended_interpreter")
@pytest.mark.parametrize("name", ["dflash, windows", "dflash2", "dspark, gated", "masks, windows"])
def test_trees_of_kernels_for_a_gpu(tmp_path: Path, name: str) -> None:
    """Interpreted where there is no GPU."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("Triton is not interpreted where there is a GPU")
    from draftwing.ops.triton.ops import TritonOps

    compare(CASES[name], tmp_path, TritonOps(CPU), TreeShape(4, 2, 8), count=3)
    if name.startswith("dspark"):
        compare_grades(tmp_path, "dspark", TritonOps(CPU))


def compare(case: Case, tmp_path: Path, ops: Any, shape: TreeShape, count: int = 5) -> None:
    known = texts(count)
    rig = Rig(case, tmp_path, ops, known, shape.topk)
    rows = torch.tensor([row for row in (4, 0, 2, 1, 3) if row < count])
    noisy = torch.tensor([rows.tolist().index(row) for row in NOISY])
    if case.rows:
        assert rig.drafter.head.config_of_block.steps == case.rows - (not case.from_anchor)
    draft = rig.drafter.propose(DraftStep(rig.table, rows, shape, max(map(len, known)), noisy))
    compared = 0
    for place, row in enumerate(rows.tolist()):
        expected = expected_of(case, rig.checkpoint, known[row])
        at = rig.table.page_table[row, : len(known[row]) - 1]
        for layer, (k, v) in enumerate(expected.kv):
            torch.testing.assert_close(rig.pool.kv[layer][at, :, 0].double(), k, **NEAR)
            torch.testing.assert_close(rig.pool.kv[layer][at, :, 1].double(), v, **NEAR)
        noise = None
        if place in noisy.tolist():
            noise = partial(drawn_noise, 40 + row)
        tree = draft_heads.draft_tree(expected, *shape.tree, noise=noise)
        if tree.gap >= TIE:
            assert (draft.tokens[place].tolist(), draft.parent[place].tolist()) == (tree.tokens, tree.parents)
            compared += 1
        logp = torch.tensor(tree.flat_scores[: shape.topk], dtype=torch.float64)
        torch.testing.assert_close(rig.drafter._first.logp[row].double(), logp, **NEAR)
    assert compared >= count - 1


def expected_of(case: Case, head: Checkpoint, text: list[int]) -> draft_heads.DraftPass:
    if not case.rows:
        return draft_heads.eagle3(*TARGET, *head, text)
    return block_pass(TARGET, head, text, case.rows, case.from_anchor, case.windows, case.causal)


@pytest.mark.slow
@pytest.mark.parametrize("ops", [TORCH, NATIVE], ids=["torch", "native"])
@pytest.mark.parametrize("name", ["dspark", "dspark, recurrent"])
def test_grades_are_moved_by_the_confidence_head(tmp_path: Path, name: str, ops: Any) -> None:
    """Those of siblings alike, by a third of what it says beyond the best of them, in steps of log odds."""
    compare_grades(tmp_path, name, ops)


def compare_grades(tmp_path: Path, name: str, ops: Any) -> None:
    case, known, shape = CASES[name], texts(4), TreeShape(4, 3, 14)
    rig = Rig(case, tmp_path, ops, known, shape.topk)
    rows, none = torch.tensor([3, 1]), torch.zeros(0, dtype=torch.int64)
    draft = rig.drafter.propose(DraftStep(rig.table, rows, shape, 40, none))
    close = 0
    for place, row in enumerate(rows.tolist()):
        expected = block_pass(TARGET, rig.checkpoint, known[row], case.rows, True)
        tokens, parents = draft.tokens[place].tolist(), draft.parent[place].tolist()
        paths: list[tuple[int, ...]] = [()]
        levels, sure = [0.0], [0.0]
        for node in range(1, shape.nodes):
            above = paths[parents[node]]
            paths.append((*above, tokens[node]))
            likely = expected.at(above).softmax(0)[tokens[node]].item()
            levels.append(level(likely))
            sure.append(level(accepted(TARGET, rig.checkpoint, known[row], case.rows, above)))
        assert draft.grade[place, 0] == 0
        for node in range(1, shape.nodes):
            siblings = [i for i in range(1, shape.nodes) if parents[i] == parents[node]]
            if all(abs(x % 1 - 0.5) > 0.01 for x in (sure[node], *(levels[i] for i in siblings))):
                best = max(round(levels[i]) for i in siblings)
                grade = round(levels[node]) + math.floor((round(sure[node]) - best) / 3 + 0.5)
                assert int(draft.grade[place, node]) == 16 * MODEL + min(max(grade, 0), 15)
                close += grade != round(levels[node])
    assert close > 5


def level(p: float) -> float:
    """Of a probability, before it is rounded."""
    return min(max(1.25 * math.log(p / (1 - p)) + 7, 0), 15)


def test_a_block_of_one_token_less_than_its_rows() -> None:
    """What a step may write: the rows of a block, however few nodes it verifies; nothing where nobody drafts."""
    config = SimpleNamespace(rows=6)
    kinds: Any = {"config_of_block": config, "state_width": 0, "state_dtype": torch.float32}
    head: Any = SimpleNamespace(aux_layers=(1,), kv_layers=(), draft_ids=lambda: None, **kinds)
    drafter = BlockDrafter(head, 3, 2, TorchOps(CPU))
    assert drafter.span(PLAIN) == 1 and drafter.span(TreeShape(1, 1, 2)) == 6 and drafter.span(TreeShape(2, 4, 9)) == 9
    assert drafter.lookahead == drafter.tail == 0


def test_what_may_not_follow_is_not_drafted(tmp_path: Path) -> None:
    known, ops = texts(3), TorchOps(CPU)
    rig = Rig(CASES["dspark, speculators"], tmp_path, ops, known, 2)
    rows, none, shape = torch.tensor([2, 1]), torch.zeros(0, dtype=torch.int64), TreeShape(3, 2, 7)
    free = rig.drafter.propose(DraftStep(rig.table, rows, shape, 40, none))
    banned = torch.zeros(1, VOCAB, dtype=torch.bool)
    banned[0, free.tokens[1, 1]] = True
    rig.drafter.constrain(rig.table, rows[1:], banned, none)
    held = rig.drafter.propose(DraftStep(rig.table, rows, shape, 40, none))
    assert torch.equal(held.tokens[0], free.tokens[0])
    assert held.tokens[1, 1] != free.tokens[1, 1]
    again = rig.drafter.propose(DraftStep(rig.table, rows, shape, 40, none))
    assert all(torch.equal(a, b) for a, b in zip(again, free, strict=True)), "it holds for one step"
