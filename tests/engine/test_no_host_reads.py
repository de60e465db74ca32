"""Propose, verify and commit run on tensors that have no data: nothing on the device's path reads them on the host or
lets a shape depend on them. On a CPU such a read costs nothing and hides; on CUDA it is a stall, and cannot be captured
in a graph.

What few requests ask for besides sampling talks with the host, and runs under a watch instead: data reach the device by
`Device.upload` alone, which does not wait, and leave it by `Device.download`."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from layer_kinds import HYBRIDS, INDEXED, KINDS, MAMBA1, PICKING, config_of, streams_config
from reference import exact_heads
from reference.draft_cases import load_head
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from toy_grammar import ToyGrammar

from draftwing.config.trees import PLAIN, TreeShape
from draftwing.core import Admission, Chunk, DraftChunk, DraftDeferral, DraftExtend, Plan
from draftwing.engine.devices import pick_device
from draftwing.engine.devices.base import Download
from draftwing.engine.request_features import RequestFeatures
from draftwing.layers.part_configs import ExpertConfig
from draftwing.models.heads.base import DraftLM
from draftwing.models.loader import load_model
from draftwing.ops.experts.routing import Routing
from draftwing.ops.table import TorchOps
from draftwing.requests.request import GenerationRequest, LogprobParams, SpecLimits, ThinkingBudget
from draftwing.requests.sampling_params import SamplingParams
from draftwing.spec.build import make_model_drafter
from draftwing.spec.lookup_drafter import NGramDrafter, SuffixDrafter
from draftwing.spec.pair_drafter import PairDrafter

pytestmark = pytest.mark.slow

HEADS = {
    "EAGLE": exact_heads.exact_eagle2,
    "EAGLE3": exact_heads.exact_eagle3,
    "EAGLE3 masks": exact_heads.exact_masks,
    "DSPARK": exact_heads.exact_dspark,
    "DFLASH": exact_heads.exact_domino,
    "DFLASH2": exact_heads.exact_dflash2,
    "NEXTN": exact_heads.exact_mtp,
    "NEXTN 3": partial(exact_heads.exact_mtp, layers=3),
}
SHAPES = [PLAIN, TreeShape(4, 1, 5), TreeShape(3, 3, 8)]


class FakeDevice:
    """Uploads arrive as tensors without data."""

    has_own_memory = False
    active_threads = 1.0
    device = torch.device("meta")

    def __init__(self):
        self.ops = TorchOps(self.device)

    def upload(self, host):
        return torch.empty(host.shape, dtype=torch.int64, device=self.device)

    def download(self, tensor):
        return Download(lambda: tensor, self.mark())

    def mark(self):
        return 0.0

    def seconds(self, begin, end):
        return end - begin

    def torch_in_active_threads(self):
        return nullcontext()

    def beside(self, first, other):
        return first(), other()


def plans(shape, params, catch_up=False):
    """Two requests prefill (one of them in two chunks), then both take tree steps."""
    rows = np.asarray([0, 2])
    request = GenerationRequest("", [5, 6, 7, 8, 9], params)
    admits = tuple(Admission(int(row), request.prompt_ids, np.asarray([40 + row]), request, 11, (3, 4)) for row in rows)
    both = np.asarray([0, 1])
    noisy = both[: int(params.temperature > 0) + int(params.top_p < 1)]  # none, one of the two, both
    filtered = both if params.filtered else both[:0]
    banning = both if params.min_new_tokens else both[:0]
    new = tuple((int(row), 1, np.arange(10 * row + 1, 10 * row + 5)) for row in rows)
    # Of a drafter with KV the chunk that is not the last is deferred.
    chunks = (Chunk(0, 1, 4, True), Chunk(2, 1, 2, False, 4 if catch_up else None))
    yield Plan(0, "prefill", rows, rows, PLAIN, 5, admits, new, chunks, noisy[:1], filtered[:1], banning[:1])
    seen = (DraftChunk(2, 1, 2, 4),) if catch_up else ()
    last = (Chunk(2, 3, 2, True),)
    yield Plan(1, "prefill", rows[1:], rows[1:], PLAIN, 5, (), (), last, noisy[:1], filtered[:1], shown=seen)
    yield Plan(2, "prefill", rows[1:], rows[1:], PLAIN, 5, (), (), (Chunk(2, 3, 1, False),))
    more = tuple((int(row), 5, np.arange(10 * row + 50, 10 * row + 50 + 20)) for row in rows)
    yield Plan(3, "tree", rows, rows, shape, 5, (), more, (), noisy, filtered, banning)
    texts = tuple(DraftChunk(int(row), 1, 2, 2 * i) for i, row in enumerate(rows))
    late = DraftExtend(rows, 3, 5 + shape.max_commit, texts) if catch_up else None
    yield Plan(4, "tree", rows, rows, shape, 5 + shape.max_commit, (), (), (), noisy, filtered, banning, catch_up=late)


def mixed_plan(shape, params):
    """After `plans`: the first request decodes beside the end of the other one's prompt."""
    _, end, *_, last = plans(shape, params)
    one = {name: getattr(last, name)[:1] for name in ("rows", "admission", "noisy", "filtered", "banning")}
    return replace(last, step=5, mixed=True, mixed_prefill=replace(end, step=6, mixed=True), **one)


DRAFTERS = "ngram", "suffix", "oracle", "STANDALONE", "EAGLE3+NGRAM", *HEADS
FURTHER = ["EAGLE3+NGRAM", "EAGLE", "suffix", "STANDALONE", "NEXTN 3"]  # one case of each
PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "mixed": SamplingParams(temperature=0.8),
    "everything": SamplingParams(temperature=0.8, top_p=0.9, top_k=20, min_p=0.02, min_new_tokens=4),
}


@pytest.mark.further(drafter=["oracle", "NEXTN"])  # a drafter of tests, and the first layer of NEXTN 3
@pytest.mark.further(drafter=FURTHER, shape=[PLAIN, SHAPES[1]])
@pytest.mark.further(drafter=FURTHER, sampling=["greedy", "mixed"])
@pytest.mark.further(drafter="EAGLE")  # as EAGLE3
@pytest.mark.further(drafter=["EAGLE3", "EAGLE3 masks", "DSPARK", "DFLASH", "DFLASH2"], shape=[PLAIN, SHAPES[1]])
@pytest.mark.further(drafter=["EAGLE3 masks", "DSPARK", "DFLASH", "DFLASH2", "ngram"], sampling=["greedy", "mixed"])
@pytest.mark.further(drafter="EAGLE3", sampling="mixed")
@pytest.mark.further(drafter=None, sampling=["greedy", "mixed"])
@pytest.mark.further(drafter="ngram", shape=SHAPES[1:])  # the pair has it, and EAGLE3
@pytest.mark.further(drafter="EAGLE3", sampling="everything")
@pytest.mark.parametrize(
    ("drafter", "shape", "sampling"),
    [
        *((None, PLAIN, sampling) for sampling in PARAMS),
        *((drafter, shape, "everything") for drafter in DRAFTERS for shape in SHAPES),
        *((drafter, SHAPES[-1], sampling) for drafter in DRAFTERS for sampling in ("greedy", "mixed")),
    ],
    ids=str,
)
def test_a_step_needs_no_data(on_cpu, drafter, shape, sampling, tmp_path):
    model, head, params = on_cpu.tiny_model(), None, PARAMS[sampling]
    name, _, lookup = (drafter or "").partition("+")
    if name in HEADS:
        exact = HEADS[name]()
        model = load_model(exact.target.write(tmp_path / "target"), torch.float32, "cpu")
        head = load_head(exact.head, name, tmp_path, model)
        head.to("meta")
        if getattr(head, "target_ids", None) is not None:
            head.target_ids = head.target_ids.to("meta")
    elif drafter == "STANDALONE":
        head = DraftLM(model, on_cpu.VOCAB)
    model.to("meta")
    device = FakeDevice()
    with device.device:
        book = torch.zeros(on_cpu.VOCAB, on_cpu.CONTEXT + 64, dtype=torch.int64)
        if drafter == "suffix":  # each node takes time
            drafter = SuffixDrafter(7, device.ops, SHAPES[-1], capacity=4096)
        if head is not None:
            drafter = make_model_drafter(head, 7, shape.topk, torch.float32, device.ops)
            if lookup:
                drafter = PairDrafter(drafter, NGramDrafter(7, device.ops, capacity=4096), shape, shape)
        rig = on_cpu.Rig(
            model, shapes=(shape,), drafter=drafter, book=book, fake_device=device, deferral=DraftDeferral(8, 8)
        )
        for plan in (*plans(shape, params, bool(rig.drafter and rig.drafter.kv_layers)), mixed_plan(shape, params)):
            for flying in rig.executor.commit(rig.executor.launch(plan)).parts:
                packed, commit = flying.download.wait(), flying.plan.shape.max_commit
                assert tuple(packed.shape) == (len(flying.plan.rows), 2 + commit + 2 * flying.plan.shape.nodes)


@pytest.mark.parametrize("kind", [*KINDS, *HYBRIDS, "mamba1", "indexed", "picking", "streams", "experts and windows"])
def test_layers_that_differ_without_data(on_cpu, kind):
    device = FakeDevice()
    if mixers := (KINDS | HYBRIDS | {"mamba1": MAMBA1, "indexed": INDEXED, "picking": PICKING}).get(kind):
        model = on_cpu.model_of(config_of(mixers, on_cpu.CONTEXT)).to("meta")
    elif kind == "streams":
        model = on_cpu.model_of(streams_config(on_cpu.CONTEXT)).to("meta")
    else:
        model = on_cpu.tiny_model(experts=ExpertConfig(6, Routing(2), 32), windows=(6, 0), sinks=True).to("meta")
    model.pack(device.ops)
    with device.device:
        book = torch.zeros(on_cpu.VOCAB, on_cpu.CONTEXT + 64, dtype=torch.int64)
        rig = on_cpu.Rig(model, shapes=SHAPES[2:], drafter="oracle", book=book, fake_device=device)
        for plan in plans(SHAPES[2], SamplingParams(temperature=0.0)):
            rig.executor.commit(rig.executor.launch(plan)).download.wait()


class Watch(TorchDispatchMode):
    """Operations that would wait on CUDA are errors, except in `Device.upload`."""

    READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal")
    uploading = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        assert name not in self.READS, "data were read on the host"
        assert name != "aten::lift_fresh" or self.uploading, "data came from the host by themselves"
        if name in ("aten::index", "aten::index_put", "aten::index_put_"):
            assert all(at is None or at.dtype != torch.bool for at in args[1]), "a shape depends on data"
        with self:  # in inference mode `item`, say, comes here whole
            found = func.decompose(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if found is NotImplemented else found

    def around(self, stage):
        def run(*args):
            with self, pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.Tensor, "tolist", self.not_dispatched)
                return stage(*args)

        return run

    def not_dispatched(self, *args):
        """What torch does on a CPU without an operation."""
        raise AssertionError("data were read on the host")

    def around_upload(self, upload):
        def run(host):
            self.uploading = True
            try:
                return upload(host)
            finally:
                self.uploading = False

        return run


def liked(tokens, logits):
    """A logits processor, which runs on the host."""
    logits[len(tokens) % len(logits)] += 4.0
    return logits


@pytest.mark.further(own=True, drafter=[None, "oracle", "ngram", "suffix", "STANDALONE"])
@pytest.mark.further(own=False, drafter=[None, "oracle", "ngram", "suffix", "STANDALONE"])  # parts of the pair
@pytest.mark.parametrize("own", [False, True], ids=["torch", "the CPU's own operations"])
@pytest.mark.parametrize("drafter", [None, "oracle", "ngram", "suffix", "STANDALONE", "STANDALONE+NGRAM"])
def test_special_rows_talk_with_the_host_by_uploads_and_downloads(on_cpu, drafter, own, monkeypatch):
    """What torch does not dispatch it does not watch: the CPU's own operations hide those that a GPU would run."""
    h, watch = on_cpu, Watch()
    device = pick_device("cpu") if own else pick_device("cpu", ops=TorchOps(torch.device("cpu")))
    device.upload = watch.around_upload(device.upload)
    processed = RequestFeatures._processed

    def unwatched(*args):
        with _disable_current_modes():
            return processed(*args)

    monkeypatch.setattr(RequestFeatures, "_processed", unwatched)
    book, shape = torch.zeros(h.VOCAB, h.CONTEXT + 64, dtype=torch.int64), TreeShape(4, 3, 11)
    name, _, lookup = (drafter or "").partition("+")
    if name == "STANDALONE":
        head = DraftLM(h.tiny_model(seed=1), h.VOCAB)
        drafter = make_model_drafter(head, 7, shape.topk, torch.float32, device.ops)
        if lookup:
            drafter = PairDrafter(drafter, NGramDrafter(7, device.ops, capacity=4096), shape, shape)
    rig = h.Rig(h.tiny_model(), shapes=(shape,), drafter=drafter, book=book, fake_device=device)
    rig.executor.launch, rig.executor.commit = watch.around(rig.executor.launch), watch.around(rig.executor.commit)
    edited = h.seeded(
        10, frequency_penalty=0.5, repetition_penalty=1.2, dry_multiplier=0.5, logit_bias=((3, 1.0),),
        allowed_token_ids=tuple(range(40)),
        bad_words=("x",), top_k=20, top_p=0.9, min_p=0.02, min_new_tokens=3,
    )  # fmt: skip
    rig.submit("edited", [1, 2, 3], edited, stop_ids=(5,), bad_word_ids=((4,), (6, 7, 8)))
    rig.submit("guided", [2, 2, 3], h.greedy(10), grammar=ToyGrammar(1, h.VOCAB))
    rig.submit("limited", [3, 2, 3], h.greedy(10), limits=SpecLimits(2, 2, 4), traced=True)
    rig.submit("predicted", [4, 2, 3], h.greedy(10), prediction=(1, 2, 3, 4))
    rig.submit("logprobs", [5, 2, 3], h.greedy(10), logprobs=LogprobParams(3, (1, 2), 0))
    rig.submit("processed", [6, 2, 3], h.seeded(10), processor=liked)
    rig.submit("thinking", [7, 2, 3], h.seeded(10), thinking=ThinkingBudget(5, (9,), (9, 9, 8), True, True))
    assert len(rig.run().final) == 7
