"""The engine on Triton's kernels, interpreted where there is no GPU: the text of the torch code, from graphs or not.

(On a GPU every test of this folder runs on the kernels.)
"""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from image_models import loaded, prompt_of, write_model
from layer_kinds import HYBRIDS, KINDS, MAMBA1, config_of
from plain_attention import FunctionAttend
from reference.exact_heads import exact_dspark
from torch.utils._python_dispatch import TorchDispatchMode

from draftwing.config.trees import PLAIN, TreeShape
from draftwing.core import NO_DEFERRAL, DraftDeferral
from draftwing.engine import prefill_graphs
from draftwing.engine.devices.cpu import CpuDevice
from draftwing.layers.config import NoMixer
from draftwing.layers.part_configs import ExpertConfig
from draftwing.models.adapters.adapter import AdapterSlots
from draftwing.models.decoder import WIDE
from draftwing.models.heads.base import DraftLM
from draftwing.models.heads.loader import load_draft_head
from draftwing.models.loader import load_model
from draftwing.ops.experts.routing import Routing
from draftwing.sched.state_slots import StateSizes
from draftwing.spec.block_drafter import BlockDrafter
from draftwing.spec.build import make_model_drafter

pytestmark = pytest.mark.slow

GridExecutor = pytest.importorskip("triton.runtime.interpreter").GridExecutor
TREE = TreeShape(3, 2, 5)
PART = TreeShape(3, 2, 7, 3)  # of whose nodes the batch verifies 3 for each row


@pytest.fixture
def interpreted(mended_interpreter):
    """A CPU whose operations are Triton's."""
    if torch.cuda.is_available():  # then kernels are compiled, also for the tests that run on the CPU
        pytest.skip("Triton is not interpreted where there is a GPU, on which it is what runs")
    from draftwing.ops.triton.ops import TritonOps

    return CpuDevice(ops=TritonOps(torch.device("cpu")))


@pytest.mark.further(drafter="model", tree=TREE)
@pytest.mark.further(drafter="block")  # whose kernels tests/spec/test_block_drafter.py runs
@pytest.mark.parametrize(
    ("drafter", "graph_size", "tree"),
    [(None, 1, TREE), ("ngram", 0, TREE), ("model", 0, TREE), ("model", 0, PART), ("block", 0, TREE)],
)
def test_the_text_is_the_same(harness, request, monkeypatch, tmp_path, drafter, graph_size, tree):
    device = request.getfixturevalue("interpreted")
    model, exact = harness.tiny_model(), exact_dspark()
    if drafter == "block":
        model = load_model(exact.target.write(tmp_path / "target"), torch.float32, "cpu")
    prompts = [[1, 2, 3, 4, 1, 2, 3], [5, 6, 7]]
    params = [harness.greedy(4), harness.seeded(2, top_k=20, top_p=0.9)]
    expected = harness.plain_answers(model, prompts, params)
    monkeypatch.setattr(prefill_graphs, "SIZES", (16,))  # as long as the prompts: the interpreter is slow
    if drafter == "model":
        head = DraftLM(harness.tiny_model(), harness.VOCAB)  # the target itself: all is accepted
        drafter = make_model_drafter(head, 3, 2, torch.float32, device.ops)
    elif drafter == "block":
        head = load_draft_head(exact.head.write(tmp_path / "head"), model, "DSPARK", torch.float32, "cpu")
        drafter = make_model_drafter(head, 3, 2, torch.float32, device.ops)
    shapes = (tree, PLAIN) if drafter else (PLAIN,)
    deferral = (
        DraftDeferral(12, 6, getattr(drafter, "from_tokens", False)) if hasattr(drafter, "kv_layers") else NO_DEFERRAL
    )
    rig = harness.Rig(
        model, shapes=shapes, drafter=drafter, rows=2, lag=1, graph_size=graph_size, chunk=3 if deferral.most else 64,
        deferral=deferral,
        attn=partial(device.ops.attention, exact=True), fake_device=device,
    )  # fmt: skip
    calls, run = [], rig.executor.run_stage
    rig.executor.run_stage = lambda stage, key, *args, **kw: (calls.append(key), run(stage, key, *args, **kw))[1]
    assert rig.answer(prompts, params).tokens == expected.tokens
    assert any(key is None for key in calls) and any(key is not None for key in calls) == (graph_size > 0)
    if rig.drafter is not None:
        assert tree in rig.stats.shapes
        assert not isinstance(rig.drafter, BlockDrafter) or rig.accept_length > 2


@pytest.mark.parametrize("name", ["delta", "recurrent", pytest.param("mamba1", marks=pytest.mark.exhaustive)])
def test_recurrent_layers(harness, interpreted, name):
    """Gated delta nets, whose plain steps write every second state, and short convolutions; plain steps are trees of
    one node through the same kernels."""
    mixers = HYBRIDS | KINDS | {"mamba1": MAMBA1}
    model = harness.model_of(config_of(mixers[name], harness.CONTEXT))
    prompts, params = [[1, 2, 3, 4, 1, 2, 3], [5, 6, 7]], [harness.greedy(5), harness.seeded(2, top_k=20, top_p=0.9)]
    expected = harness.plain_answers(model, prompts, params)
    book = harness.make_book(prompts, expected)
    rig = harness.Rig(
        model, drafter="oracle", book=book, miss=2, policy=harness.Cycle(PLAIN, PLAIN, TREE, PLAIN, PART), rows=2,
        lag=1, chunk=4, attn=partial(interpreted.ops.attention, exact=True), fake_device=interpreted,
        states=StateSizes(8, 16, 4, lazy=name == "delta") if name != "recurrent" else None,
    )  # fmt: skip
    assert rig.answer(prompts, params).tokens == expected.tokens
    assert rig.accept_length > 1


@pytest.mark.exhaustive  # tests/ops/attention/test_images.py has the kernel
@pytest.mark.parametrize("kind", ["gemma3", "gemma4-mutual"])
def test_images_whose_tokens_see_each_other(harness, interpreted, tmp_path, kind):
    """In parts of prompts that begin and end around images, beside a text."""
    folder = write_model(tmp_path / kind, kind)
    model, _ = loaded(folder, packed=False)
    prompts = [prompt_of(folder, i, shown) for i, shown in enumerate([[(40, 30, 0)], []])]
    found = []
    for how in (
        dict(rows=1),
        dict(rows=2, chunk=9, attn=partial(interpreted.ops.attention, exact=True), fake_device=interpreted),
    ):
        rig = harness.Rig(model, radix=False, **how)
        for i, (ids, images) in enumerate(prompts):
            rig.submit(str(i), ids, harness.greedy(3), images=images)
        found.append((rig.run().tokens, rig.stats.prefills > 2))
    assert found[0][0] == found[1][0] and found[1][1]


class Operations(TorchDispatchMode):
    """Notes torch's, but those that kernels' launchers ask for room with and views."""

    def __init__(self, found):
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view and "empty" not in function.__name__:
            self._found.append(function.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("experts", [None, ExpertConfig(6, Routing(2), 32)])
def test_the_first_operation_of_a_forward_is_one_of_torchs(harness, interpreted, monkeypatch, experts):
    """One that begins when all before it have ended: attention reads its batch ahead of the kernels before itself."""
    found, launch = [], GridExecutor.__call__
    model = harness.tiny_model(experts=experts)
    model.pack(interpreted.ops)
    model.set_max_positions(32)
    monkeypatch.setattr(GridExecutor, "__call__", lambda *args, **kw: (found.append("kernel"), launch(*args, **kw))[1])
    ids, positions, attend = (
        torch.zeros(5, dtype=torch.int64),
        torch.arange(5),
        FunctionAttend(lambda _, q, k, v: q.flatten(1)),
    )
    with torch.inference_mode(), Operations(found):
        model(ids, positions, attend, (1,))
    assert "kernel" in found[1:] and found[0].startswith("index_select"), found[:3]


def test_experts_give_a_tree_the_text_of_none(harness, interpreted):
    """Routing, tiles and GEMMs of experts, with and without drafts."""
    model = harness.tiny_model(experts=ExpertConfig(6, Routing(2), 32))
    model.pack(interpreted.ops)
    prompts, params = [[1, 2, 3, 4, 1, 2, 3], [5, 6, 7]], [harness.greedy(4), harness.seeded(3)]
    attn = partial(interpreted.ops.attention, exact=True)
    expected = harness.plain_answers(model, prompts, params, attn=attn, fake_device=interpreted)
    rig = harness.Rig(
        model, shapes=(TREE,), drafter="oracle", book=harness.make_book(prompts, expected), miss=1, rows=2, attn=attn,
        fake_device=interpreted,
    )  # fmt: skip
    assert rig.answer(prompts, params).tokens == expected.tokens
    assert rig.accept_length > 1.3


def test_what_layers_add_is_scaled_by_kernels(harness, interpreted, monkeypatch):
    """Those that add it, by as many as without a scale; torch's would wait for what runs in front."""
    config, ran = harness.tiny_model(experts=ExpertConfig(6, Routing(2), 32, shared=64)).config, []
    for scale in (1.0, 0.22):
        layers = tuple(replace(layer, residual_scale=scale) for layer in config.layers)
        ran.append(operations_of(replace(config, layers=layers), harness, interpreted, monkeypatch))
    assert ran[0] == ran[1] and ran[0].count("kernel") > 10


def operations_of(config, harness, interpreted, monkeypatch):
    """What the forward of one token runs on kernels, whose result is that of torch's operations."""
    found, launch, hidden = [], GridExecutor.__call__, []
    models = [harness.model_of(config) for _ in range(2)]
    models[1].pack(interpreted.ops)
    with monkeypatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", lambda *args, **kw: (found.append("kernel"), launch(*args, **kw))[1])
        for model in models:
            model.set_max_positions(32)
            found.clear()
            attend = FunctionAttend(lambda _, q, k, v: q.flatten(1))
            with torch.inference_mode(), Operations(found):
                hidden.append(model(torch.tensor([3]), torch.arange(1), attend)[0])
    torch.testing.assert_close(hidden[1], hidden[0], atol=1e-4, rtol=1e-4)
    return found


@pytest.mark.parametrize("experts", [None, ExpertConfig(6, Routing(2), 32, shared=64), ExpertConfig(6, Routing(2), 32)])
def test_a_forward_without_adapted_rows_runs_what_one_without_adapters_does(harness, interpreted, monkeypatch, experts):
    """Nothing is made in parts for the sake of rows that might be adapted."""
    found, launch, hidden = [], GridExecutor.__call__, []
    config = harness.tiny_model(experts=experts).config
    models = [harness.model_of(config) for _ in range(2)]

    def launched(executor, *args, **kw):
        found.append(executor.fn.__name__)
        return launch(executor, *args, **kw)

    monkeypatch.setattr(GridExecutor, "__call__", launched)
    ran = []
    for model in models:
        model.pack(interpreted.ops)
        model.set_max_positions(32)
        if model is models[1]:
            AdapterSlots(model, 2, 4, wide=WIDE)
        found.clear()
        attend = FunctionAttend(lambda _, q, k, v: q.flatten(1))
        with torch.inference_mode(), Operations(found):
            hidden.append(model(torch.tensor([3, 5]), torch.arange(2), attend)[0])
        ran.append(list(found))
    assert ran[0] == ran[1] and len(ran[0]) > 10
    assert torch.equal(hidden[0], hidden[1])


def test_layers_of_one_part_each_run_on_kernels(harness, interpreted, monkeypatch):
    """Experts without gates, one of which all rows go to, and an MLP: what they give is added by kernels as well."""
    config = harness.tiny_model(experts=ExpertConfig(6, Routing(2), 32, shared=64), activation="relu2").config
    experts = replace(config.layers[0], mixer=NoMixer())
    mixer, mlp = (replace(layer, experts=None, ffn=ffn) for layer, ffn in zip(config.layers, (0, 96), strict=True))
    mlp = replace(mlp, mixer=NoMixer())
    ran = [
        Counter(operations_of(replace(config, layers=some), harness, interpreted, monkeypatch))
        for some in ((mixer, mixer), (mixer, experts, mixer, mlp))
    ]
    more = ran[1] - ran[0]
    assert more["kernel"] > 5 and not [name for name in more if name.startswith(("add", "relu", "square"))], more


def test_experts_under_layer_norms(harness, interpreted, monkeypatch):
    """Whose kernel for sums under a norm takes no mean away."""
    config = harness.tiny_model(experts=ExpertConfig(6, Routing(2), 32)).config
    layers = tuple(replace(layer, norm=replace(layer.norm, centred=True)) for layer in config.layers)
    operations_of(replace(config, layers=layers, norm=layers[0].norm), harness, interpreted, monkeypatch)
