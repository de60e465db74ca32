"""Steps that are replayed on a CPU give what they give when they run as they are written."""

from dataclasses import replace

import pytest
import torch
from decoder_configs import decoder_config

from draftwing.config.trees import PLAIN, TreeShape
from draftwing.engine.devices import pick_device
from draftwing.engine.graphs import Key, RecordedStages
from draftwing.models.decoder import DecoderModel
from draftwing.models.heads.config import BlockConfig
from draftwing.models.heads.eagle import Eagle3Head
from draftwing.ops import make_ops
from draftwing.ops.attention.cpu import NativeAttention
from draftwing.ops.cpu.extension import load_extension
from draftwing.ops.cpu.tape import Recording, StepMemory, record
from draftwing.ops.cpu.workers import Workers
from draftwing.ops.gemm import onednn
from draftwing.ops.gemm.contract import FEW_ROWS
from draftwing.ops.runtime import RECORDED_ROWS
from draftwing.ops.sampling.cpu import CpuSamplingOps
from draftwing.spec.build import make_model_drafter
from draftwing.spec.lookup_drafter import NGramDrafter
from draftwing.spec.pair_drafter import PairDrafter
from draftwing.train.heads import new_block_head, new_eagle3_head, new_eagle_head

KERNELS = load_extension()
pytestmark = pytest.mark.skipif(KERNELS is None, reason="the C kernels were not built")
TREE = TreeShape(3, 2, FEW_ROWS // 2)
CONTEXT = 128  # of the harness


def native(pool):
    return NativeAttention(pool, KERNELS, Workers())


def random_model():
    """Of sizes that the kernels for few rows take."""
    config = decoder_config(
        hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32,
        ffn_size=192, vocab_size=64, max_positions=CONTEXT,
    )  # fmt: skip
    model, generator = DecoderModel(config, torch.float32, "cpu"), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                scale = 6 if name.startswith("lm_head") else 1
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale / weight.shape[1] ** 0.5)
    return model


def packed_model():
    """In bfloat16."""
    model = random_model().to(torch.bfloat16).eval()
    model.pack(make_ops(torch.device("cpu")))
    return model


@pytest.fixture(scope="module")
def case(on_cpu, one_thread):
    if not onednn.takes(torch.empty(0, dtype=torch.bfloat16)) or not KERNELS.has_product:
        pytest.skip("this CPU has no kernel for few rows")
    model = packed_model()
    if model.layers[0]._whole is None:
        pytest.skip("this oneDNN packs weights, or sums, in another way than the kernel")
    prompts = on_cpu.prompts_for(6)
    params = [on_cpu.greedy(24) for _ in prompts]
    expected = on_cpu.plain_answers(model, prompts, params, attn=native)
    return model, prompts, params, expected


def answers(harness, case, drafter, shape, unrecorded=False, params=None, **kw):
    """What recordings keep is spoilt before each step: nothing in it may be of use to a later one."""
    model, prompts, greedy, _ = case
    rig = harness.Rig(model, shapes=(shape,), drafter=drafter, attn=native, **kw)
    stages = rig.executor.graphs
    assert isinstance(stages, RecordedStages)
    if unrecorded:
        stages.key = lambda shape, size: None

    def run(stage, *args, **more):
        for chunk in stages.memory.chunks if stage == "draft" else ():
            chunk.fill(255)
        return stages.run(stage, *args, **more)

    rig.executor.run_stage = run
    return rig.answer(prompts, params or greedy).tokens, stages


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "shape"),
    [(None, PLAIN), ("ngram", TREE), ("suffix", TREE), ("ngram", TREE._replace(nodes=12, verified=3))],
    ids=["none", "ngram", "suffix", "some nodes"],
)
@pytest.mark.further(rows=1, lag=1)
@pytest.mark.further(rows=2, lag=0)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("lag", [0, 1])
def test_the_text_is_the_same(harness, case, drafter, shape, rows, lag):
    found, stages = answers(harness, case, drafter, shape, rows=rows, lag=lag)
    assert found == case[3].tokens
    assert stages.replays > 20 and not stages.refused
    plain, stages = answers(harness, case, drafter, shape, unrecorded=True, rows=rows, lag=lag)
    assert plain == found and not stages.replays


HEADS = {
    "EAGLE3": (1, 2),
    "EAGLE3+NGRAM": (1, 2),
    "EAGLE3, a layer twice": (1, 2, 1),
    "EAGLE3, from the norm": (1, 2),
    "EAGLE3, masks": (1, 2),
    "EAGLE": (),
    "DSPARK": (1, 2),
    "DSPARK+NGRAM": (1, 2),
    "DFLASH": (2,),
    "DFLASH, windows": (2,),
    "DFLASH, causal": (2,),
    "DSPARK, gated": (2,),
    "DSPARK, rnn": (2,),
    "DFLASH, domino": (2,),
    "DFLASH2": (1, 2),
}


def block_head(model, kind, seed):
    """Without a Markov head, or Domino's, all nodes of a level go on alike."""
    spark, more = kind.startswith("DSPARK"), kind.partition(", ")[2]
    markov = more if more in ("gated", "rnn", "domino") else "vanilla" if spark else ""
    windows, causal = {"windows": ((6, 0), (True, False)), "causal": ((), (True, True))}.get(more, ((), ()))
    block = BlockConfig(
        HEADS[kind],
        4,
        63,
        spark,
        windows,
        causal,
        0,
        markov,
        64,
        "markov" if spark else "",
        memory=32 * (markov == "domino"),
        **({"taps": 2, "group": 8, "candidates": 6} if kind == "DFLASH2" else {}),
    )
    head = new_block_head(model, block, layers=2, ffn_size=192, seed=seed)
    head.state_dtype = torch.bfloat16  # as the weights below
    return head


def with_masks(head):
    masked = Eagle3Head(head.config, replace(head.eagle, mask=63), head.target, torch.float32, "cpu")
    masked.load_state_dict(head.state_dict() | {"mask_hidden": torch.linspace(-1, 1, 256)})
    return masked


@pytest.mark.slow
@pytest.mark.further(seeded=True, kind=[kind for kind in HEADS if kind not in ("EAGLE3", "DSPARK", "DSPARK+NGRAM")])
@pytest.mark.further(seeded=False, kind=["EAGLE3", "DSPARK", "DSPARK+NGRAM"])  # half of what is mixed is greedy
@pytest.mark.further(kind=["EAGLE3+NGRAM", "EAGLE3, a layer twice"])
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("seeded", [False, True], ids=["greedy", "mixed"])
def test_heads_draft_the_same(harness, case, kind, seeded):
    """Text cannot tell: wrong drafts are only accepted less often."""
    model, prompts, params, _ = case
    if seeded:
        params = [harness.seeded(24, seed=i) if i % 3 == 0 else param for i, param in enumerate(params)]
        params[1] = harness.greedy(24, **ASKED["penalties"])
    expected = harness.plain_answers(model, prompts, params, attn=native)
    shape = TreeShape(3, 2, 8, 4)
    for seed in range(
        3, 9
    ):  # whether any drafts of a random head are accepted is a matter of last digits, so of the CPU
        lengths = []
        for unrecorded in (False, True):
            if kind == "EAGLE":
                head = new_eagle_head(model, 192, seed=seed)
            elif kind.startswith("D"):
                head = block_head(model, kind, seed)
            else:
                head = new_eagle3_head(model, None, HEADS[kind], 192, seed)
                head.fusion.from_normed = "norm" in kind
                if "masks" in kind:
                    head = with_masks(head)
            head = head.to(torch.bfloat16).eval().requires_grad_(False)
            head.pack(make_ops(torch.device("cpu")))
            ops = make_ops(torch.device("cpu"))
            drafter = make_model_drafter(head, 3, shape.topk, torch.bfloat16, ops)
            if "NGRAM" in kind:
                drafter = PairDrafter(drafter, NGramDrafter(3, ops, capacity=4096), shape, shape)
            rig = harness.Rig(model, shapes=(shape,), drafter=drafter, rows=2, attn=native)
            rig.sched._prefills.max_seconds = lambda waiting, *_: sum(
                waiting
            )  # prefills are not cut by the clock, see below
            stages = rig.executor.graphs
            if unrecorded:
                stages.key = lambda shape, size: None
            assert rig.answer(prompts, params).tokens == expected.tokens
            lengths.append(rig.accept_length)  # depends on who shares a step, as what is verified is divided among them
            if "norm" in kind:  # its residual stream is copied by torch
                assert stages.refused or unrecorded
            elif not unrecorded:
                assert not stages.refused and stages.replays > 20
        assert lengths[0] == lengths[1]
        if lengths[0] > 1:
            return
    pytest.fail("no head had a draft accepted")


def test_scratch_grows_in_few_steps(harness, case):
    """What recordings go on using is kept, so it must not be much."""
    rig = harness.Rig(case[0], shapes=(PLAIN,), attn=native)
    attention = rig.executor.attn
    for size in range(1, 3000):
        attention.scratch(size)
    kept = sum(one.numel() for one in attention._outgrown)
    assert kept < attention.scratch(1).numel() < 6000


ASKED = {
    "temperature": {},
    "filters": {"top_p": 0.9, "min_p": 0.05},
    "bans": {"min_new_tokens": 8},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "logit_bias": {5: 2.0}},
    "repetitions": {"dry_multiplier": 2.0, "dry_allowed_length": 1},
    "all": {"repetition_penalty": 0.8, "min_p": 0.1, "min_new_tokens": 6},
}


@pytest.mark.slow
@pytest.mark.further(rows=1)
@pytest.mark.further(asked=["temperature", "filters", "penalties"], rows=2, drafter=None)
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("drafter", [None, "ngram"])
@pytest.mark.parametrize("rows", [1, 2])
def test_what_the_sampler_applies_by_row_is_recorded(harness, case, asked, drafter, rows, monkeypatch):
    """Beside greedy rows without any of it, which later have the places of others in the row table."""
    params = [harness.seeded(24, seed=i, **ASKED[asked]) if i % 3 else harness.greedy(24) for i in range(6)]
    with monkeypatch.context() as patch:
        patch.setattr(CpuSamplingOps, "edits_by_row", False)  # torch edits
        expected = harness.plain_answers(case[0], case[1], params, attn=native).tokens
    shape = TREE if drafter else PLAIN
    found, stages = answers(harness, case, drafter, shape, params=params, rows=rows)
    assert found == expected and stages.replays > 20 and not stages.refused
    found, stages = answers(harness, case, drafter, shape, unrecorded=True, params=params, rows=rows)
    assert found == expected and not stages.replays


def test_what_torch_edits_is_not_recorded(harness, case):
    params = [harness.greedy(12, allowed_token_ids=[3, 4, 5])] * 6
    found, stages = answers(harness, case, None, PLAIN, params=params)
    assert found == harness.plain_answers(case[0], case[1], params, attn=native).tokens and not stages.replays


def test_steps_of_other_kernels_are_refused(harness, case):
    """In float32 torch multiplies itself."""
    model = harness.tiny_model()
    model.pack(make_ops(torch.device("cpu")))
    _, prompts, params, _ = case
    expected = harness.plain_answers(model, prompts, params, attn=native)
    found, stages = answers(harness, (model, prompts, params, expected), None, PLAIN)
    assert found == expected.tokens and stages.refused and not stages.replays


@pytest.mark.parametrize(
    ("drafter", "shape", "rows"), [(None, PLAIN, RECORDED_ROWS - 1), ("ngram", TREE, RECORDED_ROWS // TREE.nodes)]
)
def test_steps_of_more_rows_are_recorded_with_weights_in_blocks(on_cpu, drafter, shape, rows):
    """Whose GEMMs take any number of rows."""
    model = on_cpu.in_blocks(random_model(), make_ops(torch.device("cpu")))
    case = model, on_cpu.prompts_for(rows), [on_cpu.greedy(24)] * rows, None
    found, stages = answers(on_cpu, case, drafter, shape, rows=rows)
    assert stages.replays > 20 and not stages.refused
    plain, stages = answers(on_cpu, case, drafter, shape, unrecorded=True, rows=rows)
    assert plain == found and not stages.replays


@pytest.mark.slow
@pytest.mark.further(temperature=0.0, drafter=["ngram", "suffix"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafter", [None, "ngram", "suffix"])
def test_steps_of_all_sizes_have_the_same_memory(on_cpu, drafter, temperature, monkeypatch):
    """All together take what the largest does, whatever has been met."""
    monkeypatch.setattr(StepMemory, "CHUNK", 1 << 12)
    model, rows = on_cpu.in_blocks(random_model(), make_ops(torch.device("cpu"))), RECORDED_ROWS // TREE.nodes
    shapes = [PLAIN] if drafter is None else [TREE, TREE._replace(nodes=3), TREE._replace(depth=1, topk=1, nodes=2)]

    def params(lengths):  # every other one of them is greedy
        return [
            on_cpu.seeded(length, seed=i, temperature=temperature) if i % 2 and temperature else on_cpu.greedy(length)
            for i, length in enumerate(lengths)
        ]

    case = model, on_cpu.prompts_for(rows), params([24 + 16 * i for i in range(rows)]), None
    how = {"rows": rows, "policy": on_cpu.Cycle(*shapes)}
    found, stages = answers(on_cpu, case, drafter, PLAIN, **how)
    assert len(stages) >= 3 * rows and stages.replays and not stages.refused
    how["policy"] = on_cpu.Cycle(*shapes)
    assert answers(on_cpu, case, drafter, PLAIN, unrecorded=True, **how)[0] == found
    _, largest = answers(on_cpu, case, drafter, shapes[0], params=params([24] * rows), rows=rows)
    assert stages.memory.nbytes < 1.5 * largest.memory.nbytes


def test_larger_steps_are_not_recorded():
    stages = RecordedStages(pick_device("cpu"), RECORDED_ROWS + 1)
    assert stages.key(TreeShape(2, 2, 5), RECORDED_ROWS // 5) == Key(TreeShape(2, 2, 5), RECORDED_ROWS // 5)
    assert (
        stages.key(TreeShape(2, 2, 5), RECORDED_ROWS // 5 + 1) is None and stages.key(PLAIN, RECORDED_ROWS + 1) is None
    )


def test_a_last_stage_that_is_torch_s_own_leaves_the_others_recorded() -> None:
    stages, key = RecordedStages(pick_device("cpu"), 0), Key(PLAIN, 1)
    for _ in range(3):
        made = stages.run("verify", key, lambda: torch.empty(4))
        stages.run("commit", (key, False), lambda made=made: made + 1, keep=True)
    assert len(stages) == 1 and stages.replays == 1 and stages.key(PLAIN, 1) == key
    for _ in range(2):
        stages.run("draft", key, lambda: torch.ones(4) + 1)
    assert stages.key(PLAIN, 1) is None


def test_gates_of_several_rows_are_recorded() -> None:
    """They lie among what the same GEMM makes."""
    layer_ops = make_ops(torch.device("cpu"))
    made, x = torch.randn(3, 40, dtype=torch.bfloat16), torch.randn(3, 16, dtype=torch.bfloat16)
    recording, out = record(lambda: layer_ops.gate(made[:, :16], x))
    assert isinstance(recording, Recording) and torch.equal(out, layer_ops.gate(made[:, :16].contiguous(), x))
    made.normal_()
    recording.replay()
    assert torch.equal(out, layer_ops.gate(made[:, :16].contiguous(), x))
