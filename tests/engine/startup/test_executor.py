"""Compiled forwards give the text of those that are not; the compiler's own backend is left out, it is CUDA's."""

import dataclasses
import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftwing.config.options import Options
from draftwing.config.trees import PLAIN, TreeShape
from draftwing.engine import build
from draftwing.engine.devices.cuda import defaults_for
from draftwing.engine.startup.executor import PARTS, Opaque, compile_forwards
from draftwing.errors import ConfigError
from draftwing.models.heads.base import DraftLM
from draftwing.ops import make_ops
from draftwing.ops.attention.attend import Attend
from draftwing.spec.build import make_model_drafter

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
    assert rig.answer(prompts, params).tokens == expected.tokens
    assert small and min(small) > 8, "small forwards are the compiler's"


def test_layers_find_all_that_attention_does():
    """Recurrent layers ask for `delta`, say, and those that share keys for `read`."""
    asked = []

    class Asked(Attend):
        def __call__(self, *args):
            asked.append(("call", args))

    for part in PARTS:
        setattr(Asked, part, lambda self, *args, part=part: asked.append((part, args)))
    opaque = Opaque(Asked())
    opaque(1, 2)
    for part in PARTS:
        getattr(opaque, part)(1, 2)
    assert asked == [(part, (1, 2)) for part in ("call", *PARTS)]
    assert {"read", "write", "fused", "delta", "short_conv"} <= set(PARTS)


TRACE = """
import operator, sys
import torch
import draftwing.engine.engine
from draftwing.ops.cpu.tape import record
assert not isinstance(record(lambda: torch.empty(2).view(2, 1))[0], str)
print("imported", "torch._dynamo" in sys.modules)
from torch import nn
from draftwing.ops.triton import common as triton_common
from draftwing.ops.triton.ops import TritonOps

class Part(nn.Module):
    def __init__(self, operation):
        super().__init__()
        self.operation = operation
        self.one, self.other = (nn.Parameter(torch.ones(64), False) for _ in range(2))
        self.table = nn.Parameter(torch.ones(9, 64), False)
        self.ops = TritonOps(torch.device("cpu"))
    def forward(self, x, delta, ids):
        if self.operation == "rms_norm":
            return self.ops.rms_norm(x, self.one, 1e-5)
        if self.operation == "add_rms_norm":
            return self.ops.add_rms_norm(x, delta, self.one, 1e-5)
        return self.ops.fuse_inputs(ids, self.table, x, (self.one, self.other), 1e-5)

def backend(graph, inputs):
    arithmetic.append(sum(node.target is operator.or_ for node in graph.graph.nodes))
    return graph.forward
for operation in ("rms_norm", "add_rms_norm", "fuse_inputs"):
    arithmetic = []
    torch.compiler.reset()
    with torch.inference_mode():
        part = Part(operation)
        try:
            torch.compile(part, dynamic=True, backend=backend)(torch.randn(3, 64), torch.randn(3, 64), torch.arange(3))
        except (RuntimeError, ValueError):  # of the launch: there is no GPU, or the tensors are not on it
            pass
    print(operation, len(arithmetic) > 0, sum(arithmetic))
triton_common._LAUNCH["cuda"] = {"PDL": True, "launch_pdl": True}  # as if there had been a launch
def scaled(x):
    return x * (2 if triton_common.launch_options(torch.device("cuda", 0))["PDL"] else 3)
print("options", *torch.compile(scaled, fullgraph=True, dynamic=True, backend="eager")(torch.ones(2)).tolist())
"""


@pytest.fixture(scope="module")
def traced():
    """What TRACE prints, by its first word: traced only, for there is no GPU, in a process without the interpreter."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("there is no Triton")
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", TRACE], env=environ, capture_output=True, text=True, timeout=120)
    return {first: rest for first, *rest in map(str.split, done.stdout.splitlines())}, done.stderr[-1000:]


@pytest.mark.parametrize("operation", ["rms_norm", "add_rms_norm", "fuse_inputs"])
def test_sizes_of_weights_are_constants(traced, operation):
    """Else the tiles of Triton kernels are variables, which the compiler refuses."""
    found, errors = traced
    assert found.get(operation) == ["True", "0"], errors  # no arithmetic on sizes


def test_launch_options_do_not_break_the_graph(traced):
    found, errors = traced
    assert found.get("options") == ["2.0", "2.0"], errors


def test_the_compiler_is_imported_for_who_asks_for_it(traced):
    """It takes a second of every start otherwise. What is recorded on a CPU needs none of it."""
    found, errors = traced
    assert found.get("imported") == ["False"], errors


def test_what_the_compiler_refuses_runs_as_it_is(harness, no_compiled_code_before):
    """On whatever line it fails: the text is that of forwards that are not compiled."""

    def refuse(graph, inputs):
        raise ValueError("no such kernel")

    model = harness.tiny_model()
    prompts, params = harness.prompts_for(2), [harness.greedy(8)] * 2
    expected = harness.plain_answers(model, prompts, params)
    compile_forwards(model, None, 8, make_ops(torch.device(harness.device)), backend=refuse)
    rig = harness.Rig(model)
    assert rig.answer(prompts, params).tokens == expected.tokens


def test_numerics_that_device_and_weights_allow(caplog: pytest.LogCaptureFixture) -> None:
    def options(**more: Any) -> Options:
        return Options(speculative_algorithm="none", random_seed=1, **more).resolve()

    def some(inexact: list[str]) -> Any:
        return SimpleNamespace(inexact=inexact)

    able, unable = (SimpleNamespace(ops=SimpleNamespace(batch_invariant=each), kind="cuda") for each in (True, False))
    with caplog.at_level(logging.WARNING):
        assert build.with_numerics(options(), able) == options()
        assert not build.with_numerics(options(fast_numerics=True), unable).deterministic
        assert not caplog.records
        found = build.with_numerics(options(), unable)
        assert not found.deterministic and "may depend on the batch" in caplog.text
    with pytest.raises(ConfigError, match="needs our own kernels"):
        build.with_numerics(options(enable_deterministic_inference=True), unable)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        build.warn_of(some([]))
        assert not caplog.records
        build.warn_of(some(["expected a.weight"]))
        assert "expected a.weight" in caplog.text
    for unlike in ("fast_numerics", "enable_torch_compile"):
        for asked in ({"enable_deterministic_inference": True}, {"replay_interval": 3}):
            with pytest.raises(ConfigError, match="exclude each other"):
                build.with_numerics(dataclasses.replace(options(), **{unlike: True}, **asked), able)
    with pytest.raises(ConfigError, match="--replay-interval needs our own kernels"):
        build.with_numerics(options(replay_interval=3), unable)


def test_not_with_deterministic_inference(monkeypatch):
    ops = SimpleNamespace(batch_invariant=True, title="stand-in")
    device = SimpleNamespace(
        device=torch.device("cuda"),
        ops=ops,
        defaults=defaults_for(80 << 30),
        names=lambda ranks: ["stand-in"],
        set_threads=lambda count, processors: None,
    )
    monkeypatch.setattr(build, "pick_device", lambda name: device)
    config = SimpleNamespace(architecture="LlamaForCausalLM", layers=(), encoder=None)
    monkeypatch.setattr(build, "load_config", lambda path: config)
    options = Options(
        enable_deterministic_inference=True, enable_torch_compile=True, speculative_algorithm="none"
    ).resolve()
    with pytest.raises(ConfigError, match="--enable-deterministic-inference and --enable-torch-compile exclude"):
        build.build(options, Path("/nowhere"))
