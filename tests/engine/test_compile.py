"""Compiled forwards give the text of those that are not; the compiler's own backend is left out, it is CUDA's."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from draftwing.config.options import Options
from draftwing.core import PLAIN, TreeShape
from draftwing.engine import build
from draftwing.engine.compile import compile_forwards
from draftwing.errors import ConfigError
from draftwing.ops import make_ops
from draftwing.spec.heads import DraftLM
from draftwing.spec.mtp_drafter import make_model_drafter

pytestmark = pytest.mark.slow

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
    ops = make_ops(torch.device(harness.device))
    drafter = make_model_drafter(head, 7, 1, torch.float32, ops)
    plain, small = model.forward, []
    model.forward = lambda ids, *args: (small.append(ids.shape[0]), plain(ids, *args))[1]
    compile_forwards(model, head, 8, ops, backend="eager")
    rig = harness.Rig(model, shapes=(CHAIN, PLAIN), drafter=drafter)
    for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        rig.submit(str(i), prompt, param)
    assert rig.run().tokens == expected.tokens
    assert small and min(small) > 8, "small forwards are the compiler's"


TRACE = """
import operator, sys
import torch
from torch import nn
from draftwing.ops.triton.ops import TritonOps

class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.ones(64), False) for _ in range(2))
        self.table = nn.Parameter(torch.ones(9, 64), False)
        self.ops = TritonOps(torch.device("cpu"))
    def forward(self, x, delta, ids):
        if sys.argv[1] == "rms_norm":
            return self.ops.rms_norm(x, self.one, 1e-5)
        if sys.argv[1] == "add_rms_norm":
            return self.ops.add_rms_norm(x, delta, self.one, 1e-5)
        return self.ops.fuse_inputs(ids, self.table, x, (self.one, self.other), 1e-5)

arithmetic = []
def backend(graph, inputs):
    arithmetic.append(sum(node.target is operator.or_ for node in graph.graph.nodes))
    return graph.forward
with torch.inference_mode():
    part = Part()
    try:
        torch.compile(part, dynamic=True, backend=backend)(torch.randn(3, 64), torch.randn(3, 64), torch.arange(3))
    except (RuntimeError, ValueError):  # of the launch: there is no GPU, or the tensors are not on it
        pass
print(len(arithmetic) > 0, sum(arithmetic))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton")
@pytest.mark.parametrize("operation", ["rms_norm", "add_rms_norm", "fuse_inputs"])
def test_sizes_of_weights_are_constants(operation):
    """Else the tiles of Triton kernels are variables, which the compiler refuses. Traced only, for there is no GPU."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", TRACE, operation]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["True", "0"], done.stderr[-1000:]  # no arithmetic on sizes


def test_the_compiler_is_imported_for_who_asks_for_it():
    """It takes a second of every start otherwise."""
    code = "import sys, draftwing.engine.engine; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["False"], done.stderr[-1000:]


OPTIONS = """
import torch
from draftwing.ops.triton import common as triton_common
triton_common._LAUNCH["cuda"] = {"PDL": True, "launch_pdl": True}  # as if there had been a launch
def scaled(x):
    return x * (2 if triton_common.launch_options(torch.device("cuda", 0))["PDL"] else 3)
print(torch.compile(scaled, fullgraph=True, dynamic=True, backend="eager")(torch.ones(2)).tolist())
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton")
def test_launch_options_do_not_break_the_graph():
    done = subprocess.run([sys.executable, "-c", OPTIONS], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["[2.0,", "2.0]"], done.stderr[-1000:]


def test_what_the_compiler_refuses_runs_as_it_is(harness, no_compiled_code_before):
    """On whatever line it fails: the text is that of forwards that are not compiled."""

    def refuse(graph, inputs):
        raise ValueError("no such kernel")

    model = harness.tiny_model()
    prompts, params = harness.prompts_for(2), [harness.greedy(8)] * 2
    expected = harness.plain_answers(model, prompts, params)
    compile_forwards(model, None, 8, make_ops(torch.device(harness.device)), backend=refuse)
    rig = harness.Rig(model)
    for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        rig.submit(str(i), prompt, param)
    assert rig.run().tokens == expected.tokens


def test_not_with_deterministic_inference(monkeypatch):
    ops = SimpleNamespace(batch_invariant=True, title="stand-in")
    device = SimpleNamespace(device=torch.device("cuda"), ops=ops, total_memory=lambda: 80 << 30)
    monkeypatch.setattr(build, "pick_device", lambda name: device)
    monkeypatch.setattr(build, "load_config", lambda path: SimpleNamespace(architecture="LlamaForCausalLM"))
    options = Options(enable_deterministic_inference=True, enable_torch_compile=True).resolve()
    with pytest.raises(ConfigError, match="--enable-deterministic-inference and --enable-torch-compile exclude"):
        build.build(options, Path("/nowhere"))
