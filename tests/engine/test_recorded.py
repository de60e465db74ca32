"""Steps that are replayed on a CPU give what they give when they run as they are written."""

import pytest
import torch

from draftwing.attn.native import NativeAttention
from draftwing.core import PLAIN, TreeShape
from draftwing.engine.device import pick_device
from draftwing.engine.graphs import Key
from draftwing.engine.recorded import RecordedStages
from draftwing.kernels.cpu import load
from draftwing.layers.linear import FEW_ROWS, can_pack
from draftwing.models.config import ModelConfig
from draftwing.models.decoder import DecoderModel

KERNELS = load()
pytestmark = pytest.mark.skipif(KERNELS is None, reason="the C kernels were not built")
TREE = TreeShape(3, 2, FEW_ROWS // 2)
CONTEXT = 128  # of the harness


def native(pool):
    return NativeAttention(pool, KERNELS)


def packed_model():
    """In bfloat16, of sizes that the kernels for few rows take."""
    config = ModelConfig(
        architecture="LlamaForCausalLM", hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32,
        ffn_size=192, vocab_size=64, max_positions=CONTEXT,
    )  # fmt: skip
    model, generator = DecoderModel(config, torch.float32, "cpu"), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                scale = 6 if name.startswith("lm_head") else 1
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale / weight.shape[1] ** 0.5)
    model = model.to(torch.bfloat16).eval()
    model.pack()
    return model


@pytest.fixture(scope="module")
def case(harness, one_thread):
    if harness.device != "cpu":
        pytest.skip("for the CPU")
    if not can_pack(torch.empty(0, dtype=torch.bfloat16)) or not KERNELS.raw.has_product:
        pytest.skip("this CPU has no kernel for few rows")
    model = packed_model()
    if model.layers[0].native is None:
        pytest.skip("this oneDNN packs weights, or sums, in another way than the kernel")
    prompts = harness.prompts_for(6)
    params = [harness.greedy(24) for _ in prompts]
    expected = harness.plain_answers(model, prompts, params, attn=native)
    return model, prompts, params, expected


def answers(harness, case, drafter, shape, unrecorded=False, params=None, **kw):
    model, prompts, greedy, _ = case
    rig = harness.Rig(model, shapes=(shape,), drafter=drafter, attn=native, **kw)
    stages = rig.executor.graphs
    assert isinstance(stages, RecordedStages)
    if unrecorded:
        stages.key = lambda shape, size: None
    for i, (prompt, param) in enumerate(zip(prompts, params or greedy, strict=True)):
        rig.submit(str(i), prompt, param)
    return rig.run().tokens, stages


@pytest.mark.parametrize(("drafter", "shape"), [(None, PLAIN), ("ngram", TREE)], ids=["none", "ngram"])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("lag", [0, 1])
def test_the_text_is_the_same(harness, case, drafter, shape, rows, lag):
    found, stages = answers(harness, case, drafter, shape, rows=rows, lag=lag)
    assert found == case[3].tokens
    assert stages.replayed > 20 and not stages.refused
    plain, stages = answers(harness, case, drafter, shape, unrecorded=True, rows=rows, lag=lag)
    assert plain == found and not stages.replayed


def test_rows_with_a_temperature_are_not_recorded(harness, case):
    params = [harness.seeded(12, seed=i) for i in range(6)]
    found, stages = answers(harness, case, None, PLAIN, params=params)
    assert not len(stages) and found == answers(harness, case, None, PLAIN, unrecorded=True, params=params)[0]


def test_steps_of_other_kernels_are_refused(harness, case):
    """In float32 torch multiplies itself."""
    model = harness.tiny_model()
    model.pack()
    _, prompts, params, _ = case
    expected = harness.plain_answers(model, prompts, params, attn=native)
    found, stages = answers(harness, (model, prompts, params, expected), None, PLAIN)
    assert found == expected.tokens and stages.refused and not stages.replayed


def test_more_rows_than_few_are_not_recorded():
    stages = RecordedStages(pick_device("cpu"), 9)
    assert stages.key(TreeShape(2, 2, 5), 1) == Key(TreeShape(2, 2, 5), 1)
    assert stages.key(TreeShape(2, 2, 5), 2) is None and stages.key(PLAIN, FEW_ROWS + 1) is None
