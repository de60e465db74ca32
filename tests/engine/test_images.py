"""Prompts with images: the text is transformers', and the same with drafts as without, whatever else happens."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine.tile_attention import TileAttention
from engine_rig import Cycle, Rig, greedy, make_book, seeded, spread, spread_rig
from image_models import FEW, KINDS, PAD, in_blocks, loaded, picture, prompt_of, write_model
from image_models import greedy as transformers_greedy
from image_models import logits as transformers_logits
from torch import Tensor
from toy_grammar import ToyGrammar

from draftwing.config.trees import PLAIN, TreeShape
from draftwing.core import Admission
from draftwing.engine import image_features, prefill_graphs
from draftwing.engine.devices.cpu import CpuDevice
from draftwing.engine.graphs import RecordedStages
from draftwing.engine.image_features import ImageFeatures
from draftwing.engine.tower_graphs import TowerGraphs
from draftwing.models.decoder import DecoderModel
from draftwing.models.dummy import fill_random
from draftwing.models.heads.mtp import MTPHead
from draftwing.ops import make_ops
from draftwing.ops.cpu.extension import load_extension
from draftwing.ops.table import TorchOps
from draftwing.requests.images import RequestImage
from draftwing.requests.request import GenerationRequest, LogprobParams
from draftwing.requests.sampling_params import SamplingParams
from draftwing.sched.tower_schedule import TowerPiece
from draftwing.spec.build import make_model_drafter

TOKENS = 20
TREE = TreeShape(4, 3, 11)
CHAIN = TreeShape(4, 1, 5)
OTHERS = [kind for kind in KINDS if kind not in FEW]
WITHOUT_STATES = [kind for kind in KINDS if kind != "qwen3.5"]
# Sizes of the pictures of each prompt, with a seed: two requests have the same picture, two the same text.
SHOWN: list[list[tuple[int, int, int]]] = [
    [(40, 30, 0)], [], [(30, 40, 1), (64, 16, 2)], [(40, 30, 0)], [(40, 30, 3)], [(8, 8, 4)],
]  # fmt: skip


@pytest.fixture(scope="module", params=list(KINDS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("images") / request.param, request.param)


@pytest.fixture(scope="module")
def case(folder: Path, one_thread: None) -> Any:
    model = in_blocks(folder)
    prompts = [prompt_of(folder, i, shown) for i, shown in enumerate(SHOWN)]
    params = [greedy(TOKENS) if i < 4 else seeded(TOKENS, seed=i) for i in range(len(prompts))]
    expected = answers(Rig(model, rows=1, radix=False), prompts, params)
    assert len({token for answer in expected.tokens.values() for token in answer}) > 12, "answers say nothing"
    assert expected.tokens["0"] != expected.tokens["3"]
    return folder.name, model, prompts, params, expected


def answers(rig: Rig, prompts: Any, params: Any, **how: Any) -> Any:
    for i, ((ids, images), param) in enumerate(zip(prompts, params, strict=True)):
        rig.submit(str(i), ids, param, images=images)
    return rig.run(**how)


def drafting(case: Any, **how: Any) -> Rig:
    _, model, prompts, _, expected = case
    book = make_book([ids for ids, _ in prompts], expected)
    return Rig(model, book=book, **{"drafter": "oracle", "lag": 1, **how})


def answer(case: Any, **how: Any) -> tuple[Rig, Any]:
    _, _, prompts, params, expected = case
    rig = drafting(case, **how)
    found = answers(rig, prompts, params)
    assert found.tokens == expected.tokens
    return rig, found


@pytest.mark.further(folder=OTHERS)  # as log probabilities of all are
def test_greedy_text_is_transformers(case: Any, folder: Path) -> None:
    """In float32, with drafts."""
    kind, _, prompts, params, _ = case
    rig = Rig(loaded(folder)[0], drafter="ngram", policy=Cycle(TreeShape(7, 4, 8)))
    found = answers(rig, prompts[:4], params[:4]).tokens
    for i in range(4):
        images = [picture(*size) for size in SHOWN[i]]
        assert found[str(i)] == transformers_greedy(kind, prompts[i][0], images, TOKENS)


@torch.inference_mode()
@pytest.mark.further(folder="smolvlm")
def test_log_probabilities_of_prompts_are_transformers(case: Any, folder: Path) -> None:
    """And have the same bits in whatever chunks a prompt comes."""
    kind, _, prompts, *_ = case
    model = loaded(folder)[0]
    ids, images = prompts[2]
    each = []
    for chunk in (64, 1, 3, 19):
        rig = Rig(model, chunk=chunk)
        rig.submit("0", ids, greedy(1), images=images, logprobs=LogprobParams(start=0))
        each.append([value.value for value in rig.run().prompt_logprobs["0"][1:]])
    found = each[0]
    assert each == [found] * 4 or load_extension() is None  # torch has no such promise
    logits = transformers_logits(kind, ids, [picture(*size) for size in SHOWN[2]])[:-1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(ids)[1:, None])[:, 0]
    assert found == pytest.approx(expected.tolist(), abs=1e-4, rel=1e-4)


@pytest.mark.further(folder=OTHERS, chunk=[1, 64])
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.further(folder=["gemma4", "idefics3", "lfm2-vl", "smolvlm"])
@pytest.mark.covering
def test_disturbed_drafts_and_chunks_that_begin_inside_images(case: Any, chunk: int) -> None:
    rig, _ = answer(case, shapes=(TREE,), miss=2, chunk=chunk)
    assert rig.accept_length > 1.5


@pytest.mark.further(folder=OTHERS)
@pytest.mark.further(folder="gemma3", drafter="suffix")
@pytest.mark.further(folder="qwen3.5", drafter="ngram")
@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_lookups(case: Any, drafter: str) -> None:
    """Which never propose what stands for images, though an answer of each request says what comes before one. The
    second time they know the answers, whether these repeat themselves or not."""
    _, model, prompts, params, _ = case
    prompts = [([*ids, *ids[: ids.index(PAD)]] if PAD in ids else ids, images) for ids, images in prompts]
    expected = answers(Rig(model, rows=1, radix=False), prompts, params).tokens
    rig, drafts = drafting(case, policy=Cycle(TreeShape(7, 4, 8)), drafter=drafter, chunk=11), []
    propose = rig.drafter.propose

    def kept(step: Any) -> Any:
        drafts.append(propose(step))
        return drafts[-1]

    rig.drafter.propose = kept
    assert answers(rig, prompts, params).tokens == answers(rig, prompts, params).tokens == expected
    proposed = torch.cat([draft.tokens[:, 1:][draft.alive[:, 1:]] for draft in drafts])
    assert len(proposed) > 30 and not (proposed == PAD).any()


@pytest.mark.further(folder=OTHERS)
@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_predictions(case: Any, drafter: str | None) -> None:
    """Which may hold what stands for images, as a client writes them; it is proposed of none."""
    _, _, prompts, params, expected = case
    rig, drafts = drafting(case, policy=Cycle(CHAIN), drafter=drafter), []
    adjust = rig.executor._features.adjust

    def kept(*args: Any) -> Any:
        drafts.append(adjust(*args))
        return drafts[-1]

    rig.executor._features.adjust = kept  # type: ignore[method-assign]
    for i, ((ids, images), param) in enumerate(zip(prompts, params, strict=True)):
        guess = [each for token in expected.tokens[str(i)] for each in (token, PAD)]
        rig.submit(str(i), ids, param, images=images, prediction=tuple(guess))
    assert rig.run().tokens == expected.tokens and rig.accept_length > 2
    proposed = torch.cat([draft.tokens[:, 1:][draft.alive[:, 1:]] for draft in drafts])
    assert len(proposed) > 30 and not (proposed == PAD).any()


@pytest.mark.further(folder=["gemma4-mutual", "smolvlm"])
def test_beside_rows_that_decode(case: Any) -> None:
    if case[0] == "qwen3.5":
        pytest.skip("layers with states of rows have prompts and rows take turns")
    chunk = 40 if any(image.mutual for _, images in case[2] for image in images) else 9  # images come whole
    rig, _ = answer(case, shapes=(CHAIN,), miss=1, chunk=chunk, mixed=True)
    assert rig.stats.mixed > 2


@pytest.mark.further(folder=["gemma4", "gemma4-mutual", "idefics3", "lfm2-vl", "qwen3-vl", "smolvlm"], mixed=False)
@pytest.mark.further(folder=["gemma3", "gemma4", "idefics3", "lfm2-vl", "smolvlm"], mixed=True)
@pytest.mark.parametrize("mixed", [False, True])
def test_prompts_from_graphs(case: Any, mixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks that begin inside images, text of others beside them, and beside steps from graphs, too. Where tokens
    of an image see each other, chunks with these are launched."""
    kind, _, prompts, *_ = case
    if mixed and kind in ("qwen3.5", "lfm2-vl"):
        pytest.skip("on a CPU layers with states of rows have prompts and rows take turns")
    for name, value in {"SIZES": (16, 24), "MIXED_ROWS": (2, 3), "MIXED_QUERIES": 16}.items():
        monkeypatch.setattr(prefill_graphs, name, value)
    monkeypatch.setattr(TorchOps, "can_record", False)  # as on a GPU, where steps behind images have graphs, too
    rig = drafting(
        case, shapes=(TreeShape(2, 1, 3),), miss=1, chunk=24, graph_size=3, rows=3, mixed=mixed, slots=400,
        attn=partial(TileAttention, exact=True),
    )  # fmt: skip
    rig.executor.device.seconds = lambda begin, end: 0.0 if begin is end else 2e-3  # type: ignore[method-assign]
    prefills, target, launched = rig.executor.prefills, rig.executor.target, list[bool]()
    run = target.run

    def counted(batch: Any, *more: Any, **how: Any) -> Any:
        if batch.chunks:
            launched.append(batch.images is not None)
        return run(batch, *more, **how)

    monkeypatch.setattr(target, "run", counted)
    assert answers(rig, prompts, case[3]).tokens == case[4].tokens
    assert (prefills.mixed_replays if mixed else prefills.replays) > 2
    mutual = any(image.mutual for _, images in prompts for image in images)
    assert (all(launched) if mutual else not launched) and len(launched) >= mutual
    captures, towers = rig.executor.captures, rig.executor.towers
    rig.sched.tower_schedule.unseen = lambda *asked: None  # so that pictures are read with prompts, not in pieces
    for _ in range(2):
        while captures.later:
            captures.capture_next()
        assert rig.sched.flush_cache()
        rig.executor.flush()  # features, not graphs
        assert answers(rig, prompts, case[3]).tokens == case[4].tokens
    assert len(towers) and towers.replays, "two pictures have one size"


@pytest.mark.slow
@pytest.mark.further(kind="qwen3-vl", drafter=[None, "NEXTN"])
@pytest.mark.parametrize("drafter", [None, "ngram", "NEXTN"])
@pytest.mark.parametrize("kind", ["qwen3.5", "qwen3-vl"])
def test_steps_behind_images_are_recorded_on_a_cpu(
    kind: str, drafter: str | None, tmp_path: Path, one_thread: None
) -> None:
    """Where positions behind images are not those in the text, beside rows of text alone."""
    folder, ops = write_model(tmp_path / kind, kind), make_ops(torch.device("cpu"))
    model = in_blocks(folder)
    prompts = [prompt_of(folder, i, shown) for i, shown in enumerate(SHOWN)]
    params = [greedy(TOKENS) if i < 4 else seeded(TOKENS, seed=i) for i in range(len(prompts))]

    plain = Rig(model, rows=1, radix=False)
    if not isinstance(plain.executor.graphs, RecordedStages):
        pytest.skip("nothing is recorded here")
    plain.executor.graphs.key = lambda *key: None  # type: ignore[method-assign, assignment]
    expected = answers(plain, prompts, params).tokens
    drafts = _next_layer(model, ops) if drafter == "NEXTN" else drafter
    rig = Rig(model, rows=2, drafter=drafts, policy=Cycle(*[TreeShape(3, 2, 8)] * bool(drafter)))
    assert answers(rig, prompts, params).tokens == expected
    stages = rig.executor.graphs
    assert isinstance(stages, RecordedStages) and not stages.refused
    assert stages.replays > 3 * TOKENS and not plain.executor.graphs.replays


def _next_layer(model: DecoderModel, ops: TorchOps) -> Any:
    """Returns a drafter of a random prediction layer, in blocks."""
    head = MTPHead(model, 1, torch.float32, "cpu", model.config.weight_format)
    fill_random(head, "cpu")
    head.pack(ops)
    return make_model_drafter(head.eval(), 3, 4, torch.float32, ops)


@pytest.mark.further(folder=OTHERS)
def test_preemption(case: Any) -> None:
    """Whoever goes on afterwards has the features that are there: the tower reads no picture again."""
    rig, _ = answer(case, shapes=(TREE,), slots=90, chunk=8)
    assert rig.sched.retractions >= 1
    digests = {image.digest for _, images in case[2] for image in images}
    assert rig.executor._images is not None and rig.executor._images.runs == len(digests)


def watched(rig: Rig) -> list[str]:
    """Notes what happens in turn: "piece" and each "part" of the tower's work, "step" of those who decode, "chunk" of
    prompts, "mixed" of both."""
    tower, executor, events = rig.executor._images._tower, rig.executor, list[str]()  # type: ignore[union-attr]
    launch, run_piece, parts = executor.launch, type(executor).run_tower_piece, tower.parts

    def counted(*args: Any) -> Any:
        for made in parts(*args):
            events.append("part")
            yield made

    def launched(plan: Any, *guidance: Any) -> Any:
        events.append("mixed" if plan.mixed_prefill else "chunk" if plan.chunks else "step")
        return launch(plan, *guidance)

    def run(function: Any, *args: Any) -> Any:
        if function is run_piece:
            events.append("piece")
        return function(executor, *args)

    rig.executor._images._tower = SimpleNamespace(config=tower.config, parts=counted)  # type: ignore[union-attr, assignment]
    executor.launch, executor.run_on_all_ranks = launched, run  # type: ignore[method-assign]
    return events


def gaps_of(events: list[str]) -> set[str]:
    """What stands between two steps. Beside a part of a prompt, or right before, is nothing else."""
    text = " ".join(events)
    assert "part mixed" not in text
    return {gap.strip() for gap in text.replace("mixed", "step").split("step")[1:-1]}


@pytest.mark.further(folder=["gemma4-mutual", "idefics3", "lfm2-vl", "qwen3-vl", "smolvlm"])
@pytest.mark.further(folder=WITHOUT_STATES, lag=0)
@pytest.mark.further(lag=0, mixed=True)
@pytest.mark.further(lag=1, mixed=False)
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("lag", [0, 1])
def test_the_tower_runs_in_pieces_between_steps(case: Any, lag: int, mixed: bool) -> None:
    """Of those who decode; a piece is a layer, as a part of a prompt is short here."""
    kind, model, prompts, _, _ = case
    if mixed and kind == "qwen3.5":
        pytest.skip("layers with states of rows have prompts and rows take turns")
    (ids, images), (text, _) = prompts[2], prompts[1]
    expected = answers(Rig(model, rows=1, radix=False), [(text, ()), (ids, images)], [greedy(110), greedy(8)]).tokens
    rig = Rig(model, rows=3, chunk=2, lag=lag, mixed=mixed)
    events = watched(rig)

    def join(turn: int) -> None:
        if turn == 10:
            events.clear()
            rig.submit("1", ids, greedy(8), images=images)

    rig.submit("0", text, greedy(110))
    found = rig.run(between=join)
    assert found.tokens == expected
    features = rig.executor._images
    assert features is not None and features.runs == len({image.digest for image in images})
    assert events.count("part") == events.count("piece") == features.runs * (features._tower.config.depth + 1)
    beside = mixed and not images[0].mutual  # whole images are longer than what has room beside a step
    assert gaps_of(events) == {"", "piece part"} | (set() if beside else {"chunk"})


@pytest.mark.parametrize(("tokens", "seconds", "parts"), [(5, 9.0, 5), (99, 0.35, 3), (99, 0.0, 1), (1, 9.0, 1)])
def test_a_piece_ends_by_products_or_by_the_clock(
    tokens: int, seconds: float, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part takes 0.1 s and as many products as a token. It goes on where it ended."""
    clock, image = [0.0], RequestImage(0, (1, 1), np.zeros((8, 8, 3), np.uint8), b"one")

    def read(pixels: Tensor, tokens: int) -> Iterator[int | Tensor]:
        for _ in range(7):
            clock[0] += 0.1
            yield 1
        yield torch.zeros(1, 4)

    monkeypatch.setattr(image_features, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    tower: Any = SimpleNamespace(config=SimpleNamespace(depth=1, products=lambda *sides: 7), parts=read)
    device = CpuDevice()
    features = ImageFeatures(tower, False, 2, device, 1, False, TowerGraphs(None, device))
    features.run_piece(TowerPiece(image, 0, tokens, seconds))
    assert clock[0] == pytest.approx(0.1 * parts) and features.unseen([image], 0, 0, 6) is image
    for _ in range(7):
        features.run_piece(TowerPiece(image, 0, 2, 9.0))
        if features.runs:
            break
    assert clock[0] == pytest.approx(0.7) and features.unseen([image], 0, 0, 6) is None


def test_a_small_picture_leaves_what_a_large_one_has_begun() -> None:
    """Else those who send small ones would have the large one begin again and again."""
    begun: list[int] = []

    def read(pixels: Tensor, tokens: int) -> Iterator[int | Tensor]:
        begun.append(len(pixels))
        yield from [1] * len(pixels)
        yield torch.zeros(1, 4)

    tower: Any = SimpleNamespace(config=SimpleNamespace(depth=1, products=lambda *sides: sides[0]), parts=read)
    tower.features = lambda *asked: [*read(*asked)][-1]
    device = CpuDevice()
    features = ImageFeatures(tower, False, 2, device, 1, False, TowerGraphs(None, device))
    large, *small = (RequestImage(0, (1, 1), np.zeros((n, 8, 3), np.uint8), bytes([n])) for n in (9, 1, 2))
    for image in small:
        features.run_piece(TowerPiece(large, 0, 4, 9.0))
        assert features._of(image, 0).shape == (1, 4)
    assert begun == [9, 1, 2] and features.unseen([large, *small], 0, 0, 1) is large
    features.run_piece(TowerPiece(large, 0, 4, 9.0))
    assert begun == [9, 1, 2] and features.runs == 3, "it went on where it was, twice"


def test_what_was_begun_for_whoever_has_left_is_let_go() -> None:
    """Its memory with it. As long as another row has the picture, it goes on."""
    begun: list[weakref.ref[Tensor]] = []

    def read(pixels: Tensor, tokens: int) -> Iterator[int | Tensor]:
        held = torch.zeros(1, 4)
        begun.append(weakref.ref(held))
        yield from [1] * 9
        yield held

    tower: Any = SimpleNamespace(config=SimpleNamespace(depth=1, products=lambda *sides: 9), parts=read)
    device = CpuDevice()
    features = ImageFeatures(tower, False, 3, device, 1, False, TowerGraphs(None, device))
    image, nothing = RequestImage(0, (1, 1), np.zeros((8, 8, 3), np.uint8), b"one"), np.zeros(0, np.int64)

    def admit(row: int, images: tuple[RequestImage, ...]) -> None:
        request = GenerationRequest(f"{row} {len(images)}", [1], SamplingParams(), images=images)
        features.admit([Admission(row, [1], nothing, request, 0)])

    for row in (0, 1):
        admit(row, (image,))
    features.run_piece(TowerPiece(image, 0, 4, 9.0))
    admit(0, ())
    features.run_piece(TowerPiece(image, 0, 2, 9.0))
    assert len(begun) == 1 and begun[0]() is not None
    admit(1, ())
    assert begun[0]() is None


@pytest.mark.further(folder=WITHOUT_STATES)
def test_layers_are_read_in_parts(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the patches of a large picture, so that nobody who decodes waits for a whole layer."""
    _, model, prompts, _, expected = case
    monkeypatch.setattr(model.tower.module, "at_once", 40)
    (ids, images), (text, _) = prompts[2], prompts[1]
    rig = Rig(model, rows=3, chunk=1)
    events = watched(rig)

    def join(turn: int) -> None:
        if turn == 3:
            events.clear()
            rig.submit("2", ids, greedy(TOKENS), images=images)

    rig.submit("1", text, greedy(110))
    found = rig.run(between=join).tokens
    assert (found["1"][:TOKENS], found["2"]) == (expected.tokens["1"], expected.tokens["2"])
    features = rig.executor._images
    assert features is not None and events.count("piece") > features.runs * 3 * features._tower.config.depth // 2
    assert {gap.replace(" part", "") for gap in gaps_of(events)} == {"", "piece", "chunk"}


@pytest.mark.further(folder=WITHOUT_STATES)
def test_a_piece_is_as_long_as_a_part_of_a_prompt(case: Any) -> None:
    """So a long part has all of a small image with it, and nobody waits for a turn more."""
    _, model, prompts, _, _ = case
    (ids, images), (text, _) = prompts[0], prompts[1]
    pieces = []
    for chunk in (2, 100_000):
        rig = Rig(model, rows=2, chunk=chunk)
        events = watched(rig)
        rig.submit("1", text, greedy(40))
        rig.submit("0", ids, greedy(8), images=images)
        rig.run()
        pieces.append(events.count("piece"))
    features = rig.executor._images
    assert features is not None and pieces == [features.runs * (features._tower.config.depth + 1), 0]


@pytest.mark.further(folder=WITHOUT_STATES)
def test_pieces_and_prompts_of_others_take_turns(case: Any) -> None:
    """Between steps of who decodes all along. One whose picture is begun is aborted, and another one sends it again."""
    _, model, prompts, _, _ = case
    (ids, images), (text, _) = prompts[2], prompts[1]
    asked = [(text, (), 110), (ids, images, 8), ([5, *text * 3], (), 8)]
    alone = Rig(model, rows=1, radix=False)
    for i, (prompt, shown, tokens) in enumerate(asked):
        alone.submit(str(i), prompt, greedy(tokens), images=shown)
    expected, rig = alone.run().tokens, Rig(model, rows=4, chunk=4)
    events = watched(rig)
    rig.submit("0", text, greedy(110))

    def join(turn: int) -> None:
        if turn == 5:
            rig.submit("gone", ids, greedy(8), images=images)
        if turn == 12:
            rig.sched.abort("gone")
            for i, (prompt, shown, tokens) in enumerate(asked[1:], 1):
                rig.submit(str(i), prompt, greedy(tokens), images=shown)

    found = rig.run(between=join).tokens
    assert {uid: found[uid] for uid in expected} == expected
    assert gaps_of(events) == {"", "piece part", "chunk"}
    assert "piece part step chunk step piece" in " ".join(events)


@pytest.mark.further(folder=OTHERS)
def test_a_picture_of_nobody_who_waits_is_read_in_turns_too(case: Any) -> None:
    """So whoever comes meanwhile is served between two pieces."""
    _, model, prompts, _, expected = case
    rig, joined = Rig(model, rows=2, chunk=4), list[int]()
    events = watched(rig)
    rig.submit("0", prompts[0][0], greedy(TOKENS), images=prompts[0][1])

    def join(turn: int) -> None:
        if events.count("piece") == 2 and not joined:
            joined.append(len(events))
            rig.submit("1", prompts[1][0], greedy(TOKENS))

    found = rig.run(between=join)
    assert found.tokens == {uid: expected.tokens[uid] for uid in "01"}
    assert "chunk" in events[joined[0] : joined[0] + 6]


@pytest.mark.further(folder=OTHERS)
def test_prefix_hits(case: Any) -> None:
    """The same pictures are found again, and their features are not made again; other pictures never match."""
    _, model, prompts, params, expected = case
    book = make_book([ids for ids, _ in prompts], expected)
    rig = Rig(model, shapes=(TREE,), drafter="oracle", book=book, lag=1, slots=2000)
    assert answers(rig, prompts, params).tokens == expected.tokens
    images = rig.executor._images
    assert images is not None and images.runs == len({size for shown in SHOWN for size in shown})
    again = answers(rig, prompts, params)
    assert again.tokens == expected.tokens
    assert images.runs == 5
    cached = [out.meta["cached_tokens"] for out in again.final.values()]
    assert sum(cached) > 0 and (case[0] == "qwen3.5" or cached == [len(ids) - 1 for ids, _ in prompts])


@pytest.mark.further(folder=OTHERS)
def test_another_picture_of_the_same_size_matches_the_text_before_it_alone(case: Any) -> None:
    _, model, prompts, _, _ = case
    (ids, images), (_, others) = prompts[0], prompts[4]
    assert images[0].grid == others[0].grid
    alone = answers(Rig(model, rows=1, radix=False), [(ids, others)], [greedy(TOKENS)])
    rig = Rig(model, rows=1)
    first = answers(rig, [(ids, images)], [greedy(TOKENS)])
    found = answers(rig, [(ids, others)], [greedy(TOKENS)])
    assert found.tokens == alone.tokens != first.tokens
    assert found.final["0"].meta["cached_tokens"] <= images[0].start


@pytest.mark.further(folder=WITHOUT_STATES)
def test_features_that_have_no_room_are_made_again(case: Any) -> None:
    _, model, prompts, params, expected = case
    rig = Rig(model, rows=2, radix=False)
    images = rig.executor._images
    assert images is not None
    images._budget = 1
    assert answers(rig, prompts, params).tokens == expected.tokens
    assert answers(rig, prompts, params).tokens == expected.tokens
    assert images.runs > 8 and len(images._known) == 1


@pytest.mark.further(folder=WITHOUT_STATES)
def test_clients_do_not_share_features(case: Any) -> None:
    """Or the time of an answer would say who else has sent a picture."""
    _, model, prompts, *_ = case
    (ids, images), runs = prompts[0], []
    rig = Rig(model, rows=2)
    for salt in (1, 2, 1):
        rig.submit("0", ids, greedy(4), images=images, salt=salt)
        rig.run()
        assert rig.executor._images is not None
        runs.append(rig.executor._images.runs)
    assert runs == [len(images), 2 * len(images), 2 * len(images)]


@pytest.mark.further(folder=WITHOUT_STATES)
def test_several_answers_and_aborts(case: Any) -> None:
    _, model, prompts, _, _ = case
    ids, images = prompts[2]
    params = [seeded(TOKENS, seed=i) for i in range(4)]
    alone = answers(Rig(model, rows=1, radix=False), [(ids, images)] * 4, params)
    rig = Rig(model, policy=Cycle(TreeShape(7, 4, 8)), drafter="ngram", lag=1, chunk=5)
    rig.submit("gone", *prompts[0][:1], greedy(TOKENS), images=prompts[0][1])

    def abort(turn: int) -> None:
        if turn == 2:
            rig.sched.abort("gone")

    found = answers(rig, [(ids, images)] * 4, params, between=abort)
    assert {uid: found.tokens[uid] for uid in alone.tokens} == alone.tokens
    assert len({tuple(tokens) for tokens in alone.tokens.values()}) > 1


@pytest.mark.further(folder=WITHOUT_STATES)
def test_grammars(case: Any) -> None:
    """Half of the requests are held to one; with drafts and without the texts are the same."""
    _, model, prompts, params, expected = case
    vocab, found = model.config.vocab_size, []
    for how in ({"rows": 1, "radix": False}, {"drafter": "ngram", "policy": Cycle(TreeShape(7, 4, 8)), "chunk": 7}):
        rig = Rig(model, **how)
        for i, ((ids, images), param) in enumerate(zip(prompts, params, strict=True)):
            rig.submit(str(i), ids, param, images=images, grammar=ToyGrammar(i, vocab) if i % 2 == 0 else None)
        found.append(rig.run().tokens)
    assert found[0] == found[1] and found[0]["0"] != expected.tokens["0"] and found[0]["1"] == expected.tokens["1"]


@pytest.mark.slow
@pytest.mark.further(folder=WITHOUT_STATES)
def test_two_ranks(case: Any, tmp_path: Path) -> None:
    """Each has the whole tower, and the same features."""
    kind, _, prompts, params, _ = case
    if kind == "gemma4":
        pytest.skip("tables of layers are in no weight map of these threads")
    ops = make_ops(torch.device("cpu"))
    model, _ = loaded(write_model(tmp_path / kind, kind), packed=False)
    expected = answers(Rig(model, rows=1, radix=False), prompts, params)
    share = spread(model, ops)
    for one in (share, *share.others):
        one.tower = model.tower
    rig = spread_rig(share, policy=Cycle(TreeShape(7, 4, 8)), drafter="ngram", lag=1, chunk=7, slots=200)
    assert answers(rig, prompts, params).tokens == expected.tokens
    assert answers(rig, prompts, params).tokens == expected.tokens


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(60))
def test_random_engines(case: Any, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)

    def pick(*values: Any) -> Any:
        return values[int(torch.randint(len(values), (1,), generator=random))]

    shapes = pick((TREE,), (CHAIN,), (TreeShape(2, 4, 9),))
    answer(
        case, shapes=shapes, policy=pick(None, Cycle(*shapes), Cycle(*shapes, PLAIN)), miss=pick(0, 1, 3, 6),
        drafter=pick("oracle", "ngram", "suffix"), lag=pick(0, 1), chunk=pick(1, 2, 3, 5, 9, 17, 40, 64),
        slots=pick(130, 160, 200, 1000), rows=pick(1, 2, 3, 6), radix=pick(True, False),
        mixed=pick(True, False) if case[0] != "qwen3.5" else False,
    )  # fmt: skip
