"""The tiny model in a real engine, on whatever a test asks for."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from block_ops import BlockTorchOps
from engine_rig import (
    CONTEXT,
    CUDA,
    VOCAB,
    Cycle,
    Rig,
    answers_without_speculation,
    greedy,
    in_blocks,
    make_book,
    model_of,
    prompts_for,
    seeded,
    spread,
    spread_rig,
    tiny_model,
)

from draftwing.engine.devices import pick_device
from draftwing.ops.attention.spec import TorchAttention


@pytest.fixture(scope="session", params=["cpu", CUDA])
def harness(request):
    """What the tests of the engine are made of, on the CPU and on CUDA. Where a test asks for it: "blocks", with
    weights in blocks, by the CPU's own operations where they have such GEMMs; "torch", by torch's attention on
    the CPU; "own cuda", by a GPU's own; "ranks", a model spread over two ranks, whose plain answers are those
    of the whole; "ranks with whole experts", where each has half of its experts."""
    rig, of_config = Rig, None
    if request.param.startswith("ranks"):
        device, how, rig, whole_experts = "cpu", {}, spread_rig, request.param.endswith("whole experts")

        def model(*args, **kw):
            return spread(tiny_model(*args, **kw), pick_device("cpu").ops, whole_experts)

        def of_config(*args, **kw):
            return spread(model_of(*args, **kw), pick_device("cpu").ops, whole_experts)
    elif request.param == "blocks":
        device, ops = "cpu", pick_device("cpu").ops
        ops = ops if ops.block_kinds else BlockTorchOps(ops.device)
        how = {"attn": ops.attention, "kv_dtype": torch.bfloat16, "fake_device": pick_device(ops.device.type, ops=ops)}

        def model(*args, **kw):
            return in_blocks(tiny_model(*args, **kw), ops)

        def of_config(*args, **kw):
            return in_blocks(model_of(*args, **kw), ops)
    elif request.param == "torch":
        device, model, how = "cpu", tiny_model, {"attn": TorchAttention}
    elif request.param == "own cuda":
        device, model = "cuda", partial(tiny_model, device="cuda")
        how = {"attn": pick_device("cuda").ops.attention, "device": "cuda"}
    else:
        device, model = request.param, partial(tiny_model, device=request.param)
        how = {"device": device}
    return SimpleNamespace(
        Rig=partial(rig, **how), Cycle=Cycle, tiny_model=model, model_of=of_config or partial(model_of, device=device),
        prompts_for=prompts_for, in_blocks=in_blocks,
        greedy=greedy, seeded=seeded, plain_answers=partial(answers_without_speculation, **how),
        one_rank=Rig, make_book=make_book, VOCAB=VOCAB, CONTEXT=CONTEXT, device=device, name=request.param,
    )  # fmt: skip


@pytest.fixture(scope="session")
def on_cpu(harness):
    """The same, for tests of what is the same everywhere, or of a CPU alone."""
    return harness if harness.device == "cpu" else pytest.skip("for the CPU")
