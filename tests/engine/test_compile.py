"""Compiled forwards give the text of those that are not; the compiler's own backend is left out, it is CUDA's."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from draftwing.config import Options
from draftwing.core import PLAIN, TreeShape
from draftwing.engine import build
from draftwing.engine.compile import compile_forwards
from draftwing.errors import ConfigError
from draftwing.spec.heads import DraftLM
from draftwing.spec.mtp_drafter import make_model_drafter

CHAIN = TreeShape(3, 1, 4)


@pytest.fixture
def no_compiled_code_before():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_the_text_is_the_same(harness, no_compiled_code_before):
    model, draft = harness.tiny_model(), harness.tiny_model(seed=1)
    prompts = harness.prompts_for(3)
    params = [harness.greedy(12)] * 3
    expected = harness.plain_answers(model, prompts, params)
    head = DraftLM(draft, harness.VOCAB)
    drafter = make_model_drafter(head, 7, 1, torch.float32, torch.device(harness.device))
    plain, small = model.forward, []
    model.forward = lambda ids, *args: (small.append(ids.shape[0]), plain(ids, *args))[1]
    compile_forwards(model, head, 8, backend="eager")
    rig = harness.Rig(model, shapes=(CHAIN, PLAIN), drafter=drafter)
    for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        rig.submit(str(i), prompt, param)
    assert rig.run().tokens == expected.tokens
    assert small and min(small) > 8, "small forwards are the compiler's"


def test_not_with_deterministic_inference(monkeypatch):
    device = SimpleNamespace(is_cuda=True, device=torch.device("cpu"), total_memory=lambda: 80 << 30)
    monkeypatch.setattr(build, "pick_device", lambda name: device)
    monkeypatch.setattr(build, "use_triton", lambda tensor: True)
    options = Options(enable_deterministic_inference=True, enable_torch_compile=True).resolve()
    with pytest.raises(ConfigError, match="--enable-deterministic-inference and --enable-torch-compile exclude"):
        build.build(options, Path("/nowhere"))
