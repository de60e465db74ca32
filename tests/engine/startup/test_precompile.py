"""Kernels that are compiled while weights load: those that an engine launches, and no harm where it fails."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import DEVNULL, PIPE

import pytest
import torch

from draftwing.config.options import Options
from draftwing.engine.devices.cuda import defaults_for
from draftwing.engine.startup import precompile
from draftwing.ops.cuda import gemm, gemm_groups, gemm_tall
from draftwing.ops.cuda.gemm_experts import DENSE
from draftwing.ops.cuda.gemm_groups import Width
from draftwing.ops.expert_rows import FP8

pytestmark = pytest.mark.slow

pytest.importorskip("triton")
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 48,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
CHILD = """
import json, os, pickle, sys
from draftwing.engine.startup.precompile import collect, compile_launch
launches = collect(pickle.load(sys.stdin.buffer)).launches
for kernel in ("_silu_mul_kernel", "_hopper_prefill_kernel", "_prefill_kernel"):
    for launch in [launch for launch in launches if launch.name == kernel][:1]:
        compile_launch(launch)
print(json.dumps([[launch.name, launch.specialization] for launch in launches]))
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> precompile.Job:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options = Options(
        model=str(tmp_path), load_format="dummy", speculative_algorithm="NGRAM", cuda_graph_max_bs=2,
        speculative_num_draft_tokens=4, max_running_requests=2, chunked_prefill_size=64,
    ).resolve()  # fmt: skip
    engine, half = options.for_engine(defaults_for(80 << 30)), torch.bfloat16
    return precompile.Job(engine, tmp_path, None, None, half, half, (9, 0))


FORKS = """
import os, pickle, sys
from io import BytesIO, TextIOWrapper
import triton
from draftwing.engine import build
from draftwing.engine.startup import precompile
while True:
    script, job, out, environ = pickle.load(sys.stdin.buffer)
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    file = os.open(out, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1), os.dup2(file, 2)
    os.environ |= environ
    sys.stdin = TextIOWrapper(BytesIO(pickle.dumps(job)))
    exec(script, {})
    sys.exit()
"""
Printed = Callable[[str, precompile.Job], list[str]]


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen[bytes]]:
    """A process that compiles, as none of the tests can, in children that need not import anything."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"DRAFTWING_NATIVE": "1"}
    with subprocess.Popen([sys.executable, "-c", FORKS], env=env, stdin=PIPE, stdout=PIPE, stderr=DEVNULL) as process:
        yield process
        process.kill()


@pytest.fixture
def printed_by(forks: subprocess.Popen[bytes], tmp_path: Path) -> Printed:
    """Runs a script with a job -> its lines."""

    def run(script: str, job: precompile.Job) -> list[str]:
        assert forks.stdin is not None and forks.stdout is not None
        environ = {"TRITON_CACHE_DIR": os.environ["TRITON_CACHE_DIR"]}
        forks.stdin.write(pickle.dumps((script, job, str(tmp_path / "printed"), environ)))
        forks.stdin.flush()
        status, printed = forks.stdout.readline(), (tmp_path / "printed").read_text()
        assert status == b"0\n", printed
        return printed.splitlines()

    return run


@pytest.mark.further(pool="*fp8e4nv")
@pytest.mark.parametrize(
    ("kv_dtype", "pool", "prompts"),
    [(torch.bfloat16, "*bf16", "hopper_prefill"), (torch.float8_e4m3fn, "*fp8e4nv", "prefill")],
)
def test_what_an_engine_launches(
    kv_dtype: torch.dtype, pool: str, prompts: str, job: precompile.Job, tmp_path: Path, printed_by: Printed
) -> None:
    job = job._replace(kv_dtype=kv_dtype)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"head_dim": 64}))
    lines = printed_by(CHILD, job)
    found = json.loads(lines[-1])
    names = {name for name, _ in found}
    assert all(pool in how for name, how in found if name == f"_{prompts}_kernel")
    # Of every stage, of prompts, of filters, and of what few requests ask for; norm and rope as the model has them.
    wanted = f"rms_norm rope {prompts} tree silu_mul pick limit commit confidence build chosen_logits merge"
    assert {f"_{name}_kernel" for name in wanted.split()} <= names
    for compiled in ("silu_mul", prompts):
        assert list((tmp_path / "cache").glob(f"*/_{compiled}_kernel.cubin"))
    assert not list((tmp_path / "cache").glob("*/_rope_kernel.cubin")), "it was only asked for"


HYBRID = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "num_hidden_layers": 4, "head_dim": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}  # fmt: skip


@pytest.mark.exhaustive  # the others show that launches of an engine are found
def test_gated_delta_nets_have_the_same_kernels_for_chunks_and_trees(
    job: precompile.Job, tmp_path: Path, printed_by: Printed
) -> None:
    """But for how they are launched, and stages of the recurrence; plans of both are made on the device."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | HYBRID))
    from draftwing.ops.triton import delta_net

    found = [(name, json.loads(how)) for name, how in json.loads(printed_by(CHILD, job)[-1])]
    names = [name for name, _ in found]
    for kernel, count in ((delta_net._inputs_kernel, 2), (delta_net._walk_kernel, 2), (delta_net._norm_kernel, 1)):
        ways = [how for name, how in found if name == kernel.__name__]
        assert len(ways) == count
        for how in ways:
            del how["key"], how["options"]["launch_pdl"]
            constants = zip(how.pop("constant_keys"), how.pop("constant_vals"), strict=True)
            how["constants"] = [one for one in constants if kernel.arg_names[one[0][0]] != "STAGES"]
        assert all(how == ways[0] for how in ways)
    assert {"_plan_trees_kernel", "_plan_chunks_kernel", "_advance_kernel", "_prefill_kernel"} <= set(names)


WHILE_SERVING = """
import json, pickle, random, sys
import numpy as np
import torch
from triton import knobs
from draftwing.core import MAX_BACKLOG, DraftExtend
from draftwing.engine.startup import precompile
run, late = precompile._run_without_data, []
def serve(job):
    parts = run(job)
    begin, rng = knobs.runtime.jit_cache_hook, random.Random(1)
    def note(**launch):
        late.append(launch["fn"].name)
        return begin(**launch)
    knobs.runtime.jit_cache_hook = note
    rows = parts.sched.config.max_rows
    for count in range(1, rows + 1):
        who = np.asarray(rng.sample(range(rows), count))
        behind, longest = rng.randint(1, MAX_BACKLOG), rng.randint(MAX_BACKLOG, 100)
        with torch.inference_mode():
            parts.executor._backlog.catch_up(DraftExtend(who, behind, longest), np.arange(rng.randint(0, count)), True)
    return parts
precompile._run_without_data = serve
launches, _ = precompile.collect(pickle.load(sys.stdin.buffer))
print(json.dumps([len(launches), late]))
"""


def test_no_kernel_is_compiled_for_another_number_of_rows_that_catch_up(
    job: precompile.Job, tmp_path: Path, printed_by: Printed
) -> None:
    """How attention cuts its work depends on it."""
    options = Options(
        model=str(tmp_path), load_format="dummy", speculative_algorithm="STANDALONE", cuda_graph_max_bs=70,
        speculative_draft_model_path=str(tmp_path), max_running_requests=70, chunked_prefill_size=64,
    ).resolve()  # fmt: skip
    job = job._replace(options=options.for_engine(defaults_for(80 << 30)), draft_path=tmp_path)
    lines = printed_by(WHILE_SERVING, job)
    count, late = json.loads(lines[-1])
    assert count > 20 and not late


MIXED = """
import json, pickle, random, sys
from triton import knobs
from draftwing.engine.graphs import prefill
from draftwing.engine.startup import precompile
from draftwing.engine.startup.warm_up import GREEDY, _mixed, _prompt, _step
from draftwing.requests.sampling_params import SamplingParams
prefill.MIXED_QUERIES = 128  # the context is short
run, late = precompile._run_without_data, []
def serve(job):
    parts = run(job)
    begin, rng, executor = knobs.runtime.jit_cache_hook, random.Random(1), parts.executor
    def note(**launch):
        late.append(launch["fn"].name)
        return begin(**launch)
    knobs.runtime.jit_cache_hook = note
    replays = executor.replays
    for count in range(1, 17):
        params = rng.choice((GREEDY, SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.9)))
        prompts = _prompt(rng.randint(1, 110), rng.randint(1, 2), params)
        shape = rng.choice([one for one in parts.sched.choice.policy.menu if executor.target.mixes(one, count)])
        plan = _mixed(_step(executor.table.rows, shape, 100, count), prompts)
        executor.commit(executor.launch(plan))
    print(executor.replays - replays)
    return parts
precompile._run_without_data = serve
precompile.collect(pickle.load(sys.stdin.buffer))
print(json.dumps(late))
"""


def test_no_kernel_is_compiled_for_other_numbers_of_rows_beside_prompts(
    job: precompile.Job, tmp_path: Path, printed_by: Printed
) -> None:
    options = Options(
        model=str(tmp_path), load_format="dummy", speculative_algorithm="STANDALONE", cuda_graph_max_bs=20,
        speculative_draft_model_path=str(tmp_path), max_running_requests=20, chunked_prefill_size=256,
        enable_mixed_chunk=True, context_length=120,
    ).resolve()  # fmt: skip
    job = job._replace(options=options.for_engine(defaults_for(80 << 30)), draft_path=tmp_path)
    *_, replays, late = map(json.loads, printed_by(MIXED, job))
    assert not late and replays > 10


OF_EXPERTS = """
import json, pickle, sys
from draftwing.engine.startup.precompile import collect
needed = collect(pickle.load(sys.stdin.buffer))
print(json.dumps([layout.kind for layout in needed.experts]))
for launch in needed.launches:
    if launch.name == "_expert_gemm_kernel":
        print(launch.specialization)
"""


@pytest.mark.further(quantization="none")
@pytest.mark.parametrize(("quantization", "weight", "kind"), [("fp8", "*i32", FP8), ("none", "*bf16", DENSE)])
def test_kernels_of_experts_are_those_of_their_format(
    quantization: str, weight: str, kind: int, job: precompile.Job, tmp_path: Path, printed_by: Printed
) -> None:
    experts = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4,
               "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | experts))
    options = dataclasses.replace(job.options, quantization=quantization, chunked_prefill_size=256)
    job = job._replace(options=options)
    lines = printed_by(OF_EXPERTS, job)
    kinds, *launches = map(json.loads, lines)
    assert kinds == [kind]  # of few rows
    assert {launch["signature"]["weight"] for launch in launches} == {weight}  # of many


OF_HEADS = """
import json, pickle, sys
from draftwing.engine.startup.precompile import collect
print(json.dumps(sorted(collect(pickle.load(sys.stdin.buffer)).heads)))
"""


def test_kernels_of_heads_are_those_of_their_rows(job: precompile.Job, tmp_path: Path, printed_by: Printed) -> None:
    """Of keys, whose rows are a chunk, and of values, whose rows are two."""
    latents = {
        "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "first_k_dense_replace": 2,
        "kv_lora_rank": 128, "q_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 16, "v_head_dim": 32,
        "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "norm_topk_prob": True, "routed_scaling_factor": 1.5, "n_group": 1, "topk_group": 1,
        "num_key_value_heads": 4,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | latents))
    assert json.loads(printed_by(OF_HEADS, job)[-1]) == [1, 2]


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """In place of Python."""
    file = tmp_path / "python"
    file.write_text(f"#!/bin/sh\ncat > /dev/null\n{script}\n")
    file.chmod(0o755)
    monkeypatch.setattr(precompile.sys, "executable", str(file))


def test_it_runs_once(job: precompile.Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, f"echo >> {tmp_path}/runs")
    for _ in range(2):
        ahead = precompile.precompile(job)
        assert ahead is not None
        ahead.wait()
    assert (tmp_path / "runs").read_text() == "\n"
    elsewhere = job._replace(options=dataclasses.replace(job.options, port=31234))  # which no kernel depends on
    precompile.Precompilation(elsewhere).wait()
    assert (tmp_path / "runs").read_text() == "\n"
    other = job._replace(capability=(8, 0))
    precompile.Precompilation(other).wait()
    assert (tmp_path / "runs").read_text() == "\n\n"


def test_it_can_be_stopped_and_a_large_job_does_not_wait_for_its_reader(
    job: precompile.Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, "sleep 20")
    ahead = precompile.Precompilation(job._replace(token_ids=torch.arange(100_000)))  # more than a pipe holds
    assert ahead._process is not None and ahead._process.poll() is None
    ahead.stop()
    assert ahead._process.returncode == -9
    ahead.stop()  # once more is harmless


@pytest.mark.parametrize(
    "script, why",
    [("echo it broke >&2; exit 3", "the start slower: it broke"), ("sleep 20", "not compiled within 0 s")],
)
def test_what_fails_is_only_logged(
    script: str, why: str, job: precompile.Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    stand_in(tmp_path, monkeypatch, script)
    monkeypatch.setattr(precompile, "PATIENCE", 0.3)
    ahead = precompile.precompile(job)
    assert ahead is not None
    if "broke" in script:
        assert ahead._process is not None
        ahead._process.wait()
    ahead.wait()
    assert why in caplog.text
    monkeypatch.setattr(precompile.sys, "executable", str(tmp_path / "missing"))
    assert precompile.precompile(job) is None


@pytest.mark.parametrize(
    ("hidden", "asked", "drafter", "expected"),
    [
        (64, "auto", "EAGLE", set()),
        (4096, "auto", "EAGLE", {"int8"}),
        (4096, "none", "EAGLE", set()),
        (4096, "auto", "NGRAM", set()),
        (64, "w4a16", "EAGLE", {"w4a16"}),
    ],
)
def test_kernels_for_a_copy_of_the_lm_head(
    job: precompile.Job, hidden: int, asked: str, drafter: str, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a weight that is not quantised there is nothing else for `gemm_groups.cu`, and nothing for `gemm_tall.cu`."""
    found: list[Width] = []
    monkeypatch.setattr(gemm, "compile_ahead", lambda *rest: None)
    monkeypatch.setattr(gemm_groups, "compile_ahead", lambda dtype, width, capability: found.append(width))
    monkeypatch.setattr(gemm_tall, "compile_ahead", lambda *rest: pytest.fail("nothing of many rows is multiplied"))
    (job.path / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": hidden, "vocab_size": 32768}))
    options = dataclasses.replace(job.options, speculative_algorithm=drafter, speculative_lm_head_quantization=asked)
    precompile._compile_products(job._replace(options=options))
    assert found == [precompile.MADE[name] for name in expected]
