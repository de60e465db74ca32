"""How many operations a decode step takes besides the target's forward and sampling: each costs microseconds on a CPU
and a launch on a GPU. What it is today is the bound, so whoever adds one for a feature sees it. With the C kernels most
of them make room for a result, or are a draft head's products."""

from collections import Counter

import pytest
import torch
from engine_rig import Chosen
from torch.utils._python_dispatch import TorchDispatchMode

from draftwing.config.trees import PLAIN, TreeShape
from draftwing.ops import make_ops
from draftwing.ops.cpu.extension import load_extension
from draftwing.spec.build import make_model_drafter
from draftwing.train.heads import new_eagle3_head

TREE = TreeShape(4, 4, 8)


class Operations(TorchDispatchMode):
    """Counts them, views (which move no data) apart."""

    def __init__(self):
        super().__init__()
        self.work, self.views = Counter(), Counter()
        self.paused = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self.paused:
            (self.views if func.is_view else self.work)[str(func)] += 1
        return func(*args, **(kwargs or {}))


def eagle3_drafter(model):
    head = new_eagle3_head(model, torch.arange(0, model.config.vocab_size, 2))
    head.pack(make_ops(torch.device("cpu")))
    return make_model_drafter(head, 7, TREE.topk, torch.float32, make_ops(torch.device("cpu")))


def steady_step(harness, shape, drafter):
    """Operations of one step in the middle of two greedy answers, the loop one step ahead of the results. Between two
    steps that hand out slots."""
    model = harness.tiny_model()
    if drafter == "EAGLE3":
        drafter = eagle3_drafter(model)
    attn = make_ops(torch.device("cpu")).attention
    rig = harness.Rig(model, drafter=drafter, policy=Chosen(TREE), lag=1, ahead=60, attn=attn)
    for i, prompt in enumerate(harness.prompts_for(2)):
        rig.submit(str(i), prompt, harness.greedy(60))
    for _ in range(4):
        rig.loop.turn()
    rig.policy.shape = shape
    rig.loop.turn()
    count, executor = Operations(), rig.executor

    def unseen(function):
        def call(*args):
            count.paused = True
            try:
                return function(*args)
            finally:
                count.paused = False

        return call

    model.forward, model.logits = unseen(model.forward), unseen(model.logits)
    executor.commit_stage._sample = unseen(executor.commit_stage._sample)
    with count:
        rig.loop.turn()
    plan = rig.loop._flying[0].plan
    assert plan.shape == shape and len(plan.rows) == 2 and not plan.new_slots and not plan.admits
    return count


@pytest.mark.parametrize(
    ("drafter", "shape", "work", "views"),
    [
        (None, PLAIN, 6, 10),
        ("ngram", PLAIN, 6, 13),
        ("ngram", TREE, 15, 26),
        ("EAGLE3", PLAIN, 7, 12),
        ("EAGLE3", TREE, 112, 140),
    ],
    ids=["none", "ngram plain", "ngram tree", "eagle3 plain", "eagle3 tree"],
)
def test_operations_of_a_step(on_cpu, drafter, shape, work, views):
    """As they are recorded, when torch detaches what is made; a tree has the key of its noise read for each level."""
    if load_extension() is None:
        pytest.skip("the C kernels were not built")
    count = steady_step(on_cpu, shape, drafter)
    found = count.work.total(), count.views.total()
    assert found[0] <= work and found[1] <= views, f"found {found}: {count.work}, {count.views}"
