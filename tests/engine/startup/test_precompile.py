"""Kernels that are compiled while weights load: those that an engine launches, and no harm where it fails."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked_scripts import Forks

from draftwing.config.options import Options
from draftwing.engine.devices.cuda import defaults_for
from draftwing.engine.startup import before_torch, compiler_process, precompile, without_data
from draftwing.engine.startup.compiler_process import FAILED, STAGES, Compiler, Job, Precompilation
from draftwing.layers.experts import ExpertMLP
from draftwing.models.decoder import DecoderModel
from draftwing.models.loader import load_config
from draftwing.ops.experts import cuda_many as experts_many
from draftwing.ops.experts.cuda import DENSE, Layout
from draftwing.ops.experts.rows import FP8
from draftwing.ops.gemm import cuda_dense, cuda_groups

pytestmark = pytest.mark.slow

pytest.importorskip("triton")
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 48,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
CHILD = """
import json, pickle, sys
from concurrent.futures import ThreadPoolExecutor
from draftwing.engine.startup import precompile
whole, launches, said = precompile.compile_with_launcher, [], []
precompile.ProcessPoolExecutor = lambda count, context: ThreadPoolExecutor(1)
precompile._compile_driver = lambda: None
precompile._products = lambda job: []
precompile.compile_with_launcher = launches.append
precompile._compile(pickle.load(sys.stdin.buffer), lambda stage, words: said.append([stage, len(launches)]))
smallest = next(launch for launch in launches if launch.name == "_silu_mul_kernel")
LAUNCHER
from draftwing.ops.sampling import triton_filters as filters
for launch in {one.name: one for one in launches if one.module == filters.__name__}.values():  # one of each kernel
    for function in vars(filters).values():
        if hasattr(function, "cache_key"):
            function.hash, function.used_global_vals = None, {}  # as where nothing else was compiled
    function = getattr(filters, launch.name)
    function.preload = lambda specialization: None
    precompile.compile_launch(launch)
    assert function.cache_key == launch.cache_key, "else the engine would not find it"
print(json.dumps(said))
print(json.dumps([[launch.name, launch.specialization] for launch in launches]))
"""
# Against a library of the driver that does nothing.
LAUNCHER = """
import ctypes, os, re, subprocess
from pathlib import Path
from triton.backends.nvidia import driver
from triton.runtime import build
folder = Path(os.environ["TRITON_CACHE_DIR"]).parent
names = set(re.findall(r"\\bcu[A-Z]\\w+", Path(driver.__file__).read_text()))
source = "".join(f"int {name}() {{ return 1; }}\\n" for name in names)
command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", folder / "libcuda.so.1", "-x", "c", "-"]
subprocess.run(command, input=source.encode(), check=True)
ctypes.CDLL(folder / "libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
driver.libcuda_dirs.cache_clear()
whole(smallest)
build._build = None  # a launch would call this, if it were not for that
kernel = precompile.compile_launch(smallest)
assert driver.CudaLauncher(kernel.src, kernel.metadata).launch is not None
"""
CHILD = CHILD.replace("LAUNCHER", LAUNCHER if shutil.which("gcc") else "precompile.compile_launch(smallest)")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options = Options(
        model=str(tmp_path), load_format="dummy", speculative_algorithm="NGRAM", cuda_graph_max_bs=2,
        speculative_num_draft_tokens=4, max_running_requests=2, chunked_prefill_size=64,
    ).resolve()  # fmt: skip
    engine, half = options.for_engine(defaults_for(80 << 30)), torch.bfloat16
    return Job(engine, tmp_path, None, None, half, half, (9, 0), 80 << 30)


Printed = Callable[[str, Job], list[str]]


@pytest.fixture
def printed_by(forks: Forks, tmp_path: Path) -> Printed:
    """Runs a script with a job -> its lines."""
    cache = os.environ["TRITON_CACHE_DIR"]
    return lambda script, job: forks.run(script, tmp_path, given=pickle.dumps(job), cache=cache)


@pytest.mark.further(pool="*fp8e4nv")
@pytest.mark.parametrize(
    ("kv_dtype", "pool", "prompts"),
    [(torch.bfloat16, "*bf16", "hopper_prefill"), (torch.float8_e4m3fn, "*fp8e4nv", "prefill")],
)
def test_what_an_engine_launches(
    kv_dtype: torch.dtype, pool: str, prompts: str, job: Job, tmp_path: Path, printed_by: Printed
) -> None:
    job = job._replace(kv_dtype=kv_dtype)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"head_dim": 64}))
    lines = printed_by(CHILD, job)
    said, found = map(json.loads, lines[-2:])
    names = {name for name, _ in found}
    assert all(pool in how for name, how in found if name == f"_{prompts}_kernel")
    # Of every stage, of prompts, of filters, and of what few requests ask for; norm and rope as the model has them.
    wanted = f"rms_norm rope {prompts} tree silu_mul pick limit commit confidence build chosen_logits merge"
    assert {f"_{name}_kernel" for name in wanted.split()} <= names
    assert list((tmp_path / "cache").glob("*/_silu_mul_kernel.cubin"))
    assert not list((tmp_path / "cache").glob("*/_rope_kernel.cubin")), "it was only asked for"
    (trial, at), *others = said  # a stage is ready as soon as all is compiled that it launches
    assert trial == "memory" and f"_{prompts}_kernel" in {name for name, _ in found[:at]} and 10 < at < len(found)
    assert [stage for stage, _ in others] == ["graphs", "prompts"] and at <= others[0][1] <= others[1][1]


@pytest.mark.exhaustive  # the others show that launches of an engine are found
def test_prompts_with_images_whose_tokens_see_each_other(job: Job, tmp_path: Path, printed_by: Printed) -> None:
    """Their kernels are compiled ahead as those of text are: of layers with a window and without."""
    from draftwing.ops.attention.triton_prefill import _prefill_kernel

    text = {
        **CONFIG, "model_type": "gemma3_text", "sliding_window": 16, "num_hidden_layers": 3, "head_dim": 64,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "query_pre_attn_scalar": 64,
        "hidden_activation": "gelu_pytorch_tanh",
    }  # fmt: skip
    del text["hidden_act"]
    vision = {
        "model_type": "siglip_vision_model", "image_size": 32, "patch_size": 4, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    }  # fmt: skip
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text,
        "vision_config": vision, "image_token_index": 40, "boi_token_index": 41, "eoi_token_index": 42,
        "mm_tokens_per_image": 16,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = [json.loads(how) for name, how in json.loads(printed_by(CHILD, job)[-1]) if name == "_prefill_kernel"]
    ways = set()
    for how in found:
        constants = zip(how["constant_keys"], how["constant_vals"], strict=True)
        named = {_prefill_kernel.arg_names[key[0]]: value for key, value in constants}
        ways.add((how["signature"]["counts"], named["WINDOW"]))
    assert ways == {("constexpr", 16), ("*i32", 16), ("*i32", 0)}, "text without a window has a kernel of Hopper's"


HYBRID = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "num_hidden_layers": 4, "head_dim": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}  # fmt: skip


MAMBA = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "num_hidden_layers": 3,
    "head_dim": None, "layer_types": ["mamba", "mamba", "attention"], "mamba_n_heads": 8, "mamba_d_state": 32,
    "num_local_experts": 0, "shared_intermediate_size": 96,
}  # fmt: skip


@pytest.mark.exhaustive  # the others show that launches of an engine are found
@pytest.mark.parametrize(("own", "norm"), [(HYBRID, "_norm_kernel"), (MAMBA, "_group_norm_kernel")])
def test_gated_delta_nets_have_the_same_kernels_for_chunks_and_trees(
    own: dict[str, Any], norm: str, job: Job, tmp_path: Path, printed_by: Printed
) -> None:
    """But for how they are launched, and how the recurrence is laid out; plans of both are made on the device."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | own))
    from draftwing.ops.delta_net import triton as delta_net
    from draftwing.ops.delta_net import triton_norm, triton_walk

    found = [(name, json.loads(how)) for name, how in json.loads(printed_by(CHILD, job)[-1])]
    names = [name for name, _ in found]
    form = {"STAGES", "LANES", "WARPS", "PER", "TURN"}
    for kernel, count in (
        (delta_net._inputs_kernel, 2), (triton_walk._walk_kernel, 3), (getattr(triton_norm, norm), 1),
    ):  # fmt: skip
        ways = [how for name, how in found if name == kernel.__name__]
        assert len(ways) == count
        for how in ways:
            del how["key"], how["options"]["launch_pdl"]
            if count == 3:
                del how["options"]["num_warps"]
            constants = zip(how.pop("constant_keys"), how.pop("constant_vals"), strict=True)
            how["constants"] = [one for one in constants if kernel.arg_names[one[0][0]] not in form]
        assert all(how == ways[0] for how in ways)
    assert {"_plan_trees_kernel", "_plan_chunks_kernel", "_advance_kernel", "_prefill_kernel"} <= set(names)


MIXED = """
import json, pickle, random, sys
import numpy as np
import torch
from triton import knobs
from draftwing.core import MAX_BACKLOG, DraftExtend
from draftwing.engine import prefill_graphs as prefill
from draftwing.engine.startup import precompile
from draftwing.engine.startup.memory import graph_counts
from draftwing.engine.startup.warm_up import GREEDY, _mixed, _prompt, _step
from draftwing.requests.sampling_params import SamplingParams
prefill.MIXED_QUERIES = 128  # the context is short
run, late = precompile._run_without_data, []
def serve(*args):
    parts = run(*args)
    begin, rng, executor = knobs.runtime.jit_cache_hook, random.Random(1), parts.executor
    def note(**launch):
        late.append(launch["fn"].name)
        return begin(**launch)
    knobs.runtime.jit_cache_hook = note
    rows = parts.sched.config.max_rows
    for count in range(1, rows + 1):
        who = np.asarray(rng.sample(range(rows), count))
        behind, longest = rng.randint(1, MAX_BACKLOG), rng.randint(MAX_BACKLOG, 100)
        with torch.inference_mode():
            executor._backlog.catch_up(DraftExtend(who, behind, longest), np.arange(rng.randint(0, count)), True)
    replays = executor.captures.replays
    for count in range(1, rows - 1):
        params = rng.choice((GREEDY, SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.9)))
        prompts = _prompt(rng.randint(1, 110), rng.randint(1, 2), params)
        shape = rng.choice([one for one in parts.sched.choice.policy.menu if executor.target.mixes(one, count)])
        plan = _mixed(_step(executor.table.rows, shape, 100, count), prompts)
        executor.commit(executor.launch(plan))
    menu, length = parts.sched.choice.policy.menu, executor.table.length
    print(json.dumps([len(executor.captures), sum(graph_counts(executor, menu, rows, 256, length, True))]))
    print(executor.captures.replays - replays)
    return parts
precompile._run_without_data = serve
precompile.collect(pickle.load(sys.stdin.buffer))
print(json.dumps(late))
"""


def test_no_kernel_is_compiled_for_other_numbers_of_rows(job: Job, tmp_path: Path, printed_by: Printed) -> None:
    """That catch up, and beside prompts: how attention cuts its work depends on it."""
    options = Options(
        model=str(tmp_path), load_format="dummy", speculative_algorithm="STANDALONE", cuda_graph_max_bs=10,
        speculative_draft_model_path=str(tmp_path), max_running_requests=10, chunked_prefill_size=256,
        enable_mixed_chunk=True, context_length=120,
    ).resolve()  # fmt: skip
    job = job._replace(options=options.for_engine(defaults_for(80 << 30)), draft_path=tmp_path)
    *_, (captured, expected), replays, late = map(json.loads, printed_by(MIXED, job))
    assert not late and replays > 4
    assert captured == expected > 40, "memory was kept back for as many graphs"


OF_LATENTS = """
import json, pickle, sys
from draftwing.engine.startup import precompile
needed = precompile.collect(pickle.load(sys.stdin.buffer))
experts = [launch.specialization for launch in needed.launches if launch.name == "_expert_gemm_kernel"]
compiled = {launch.name: launch for launch in needed.launches if ".suffix" in launch.module}  # one of each kernel
for launch in compiled.values():
    precompile.compile_launch(launch)
kinds, names = [layout.kind for layout in needed.experts], list(compiled)
print(json.dumps([kinds, list(map(json.loads, experts)), sorted(needed.heads), names]))
"""


@pytest.mark.further(quantization="none")
@pytest.mark.parametrize(("quantization", "weight", "kind"), [("fp8", "*i32", FP8), ("none", "*bf16", DENSE)])
def test_kernels_of_experts_latents_and_suffixes(
    quantization: str, weight: str, kind: int, job: Job, tmp_path: Path, printed_by: Printed
) -> None:
    """Those of experts are of their format; those of heads of keys, whose rows are a chunk, and of values, whose rows
    are two. And suffixes' compile: the interpreter runs kernels whose values change their type in a loop, too."""
    latents = {
        "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "first_k_dense_replace": 1,
        "kv_lora_rank": 128, "q_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 16, "v_head_dim": 32,
        "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "norm_topk_prob": True, "routed_scaling_factor": 1.5, "n_group": 1, "topk_group": 1,
        "num_key_value_heads": 4,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | latents))
    asked: dict[str, Any] = {"speculative_algorithm": "SUFFIX", "quantization": quantization}
    job = job._replace(options=dataclasses.replace(job.options, chunked_prefill_size=256, **asked))
    kinds, launches, heads, compiled = json.loads(printed_by(OF_LATENTS, job)[-1])
    assert kinds == [kind]  # of few rows
    assert {launch["signature"]["weight"] for launch in launches} == {weight}  # of many
    assert heads == [1, 2] and "_grow_kernel" in compiled


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Lets the process do something else; `engine` is its connection, `folder` that of the test."""
    lines = ["import os, time", "from multiprocessing.connection import Connection", "from pathlib import Path"]
    lines += [f"folder = Path({str(tmp_path)!r})", "def main(file):", "    engine = Connection(file)"]
    (tmp_path / "stand_in.py").write_text("\n".join([*lines, *(f"    {line}" for line in script.splitlines())]))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(compiler_process, "_MODULE", "stand_in")


COMPILES = """
engine.recv_bytes()
done = engine.recv()
with (folder / "runs").open("a") as runs:
    print(file=runs)
for stage in ("memory", "graphs", "prompts"):
    engine.send((stage, "all were compiled"))
done.parent.mkdir(exist_ok=True)
done.touch()
"""


def test_it_runs_once(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, COMPILES)

    def run(job: Job) -> str:
        ahead = compiler_process.precompile(job)
        assert ahead is not None
        for stage in STAGES:
            ahead.wait(stage)
        ahead.stop(30)
        return (tmp_path / "runs").read_text()

    job = job._replace(token_ids=torch.arange(3))
    assert run(job) == run(job) == run(job._replace(token_ids=torch.arange(3))) == "\n"
    assert run(job._replace(options=dataclasses.replace(job.options, port=31234))) == "\n"  # no kernel depends on it
    assert run(job._replace(capability=(8, 0))) == "\n\n"
    assert run(job._replace(token_ids=torch.arange(1, 4))) == "\n\n\n"


def test_it_runs_again_in_a_copy_of_the_folder(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton finds nothing there: its files name the folder that they were in."""
    stand_in(tmp_path, monkeypatch, COMPILES)
    for i, folder in enumerate((tmp_path / "one", tmp_path / "other"), 1):
        if i > 1:
            shutil.copytree(tmp_path / "one", folder)
        monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
        for _ in range(2):
            ahead = compiler_process.precompile(job)
            assert ahead is not None
            ahead.wait(STAGES[-1])
            ahead.stop(30)
            assert (tmp_path / "runs").read_text() == "\n" * i


def test_a_stage_does_not_wait_for_the_next(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "engine.send(('memory', ''))\nwhile not (folder / 'go').exists(): time.sleep(0.01)\nengine.send(('graphs', ''))"
    )
    stand_in(tmp_path, monkeypatch, script + "\ntime.sleep(60)")
    ahead = Precompilation(job)
    ahead.wait("memory")
    waiting = threading.Thread(target=ahead.wait, args=("graphs",))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    (tmp_path / "go").touch()
    waiting.join(30)
    assert not waiting.is_alive()
    ahead.stop()


def test_it_can_be_stopped_and_a_large_job_does_not_wait_for_its_reader(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, "(folder / str(os.getpid())).with_suffix('.pid').touch()\ntime.sleep(60)")
    ahead = Precompilation(job._replace(token_ids=torch.arange(100_000)))  # more than a pipe holds
    while not (pids := [int(file.stem) for file in tmp_path.glob("*.pid")]):
        time.sleep(0.01)
    ahead.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
    ahead.stop()  # once more is harmless


@pytest.mark.parametrize(
    "script, why",
    [
        ("engine.send(('failed', 'it broke'))", "the start slower: it broke"),
        ("os._exit(1)", "the start slower: its process ended with exit code 1"),
        ("os.kill(os.getpid(), 9)", "the start slower: its process ended by signal 9"),
        ("time.sleep(60)", "not compiled within 0 s"),
    ],
)
def test_what_fails_is_only_logged(
    script: str, why: str, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    stand_in(tmp_path, monkeypatch, script)
    monkeypatch.setattr(compiler_process, "PATIENCE", 0.3 if "within" in why else 60)
    ahead = compiler_process.precompile(job)
    assert ahead is not None
    for stage in STAGES:
        ahead.wait(stage)
    ahead.stop()
    assert [record.message for record in caplog.records if "slower" in record.message] == [caplog.messages[-1]]
    assert why in caplog.text
    monkeypatch.setattr(compiler_process.sys, "executable", str(tmp_path / "missing"))
    assert compiler_process.precompile(job) is None


@pytest.mark.slow
def test_a_job_that_cannot_be_read_is_said() -> None:
    compiler = Compiler.start()
    try:
        compiler.connection.send_bytes(b"no pickle")
        compiler.connection.send("done")
        assert compiler.connection.poll(60)
        stage, why = compiler.connection.recv()
        assert stage == FAILED and why.startswith("UnpicklingError")
    finally:
        compiler.end()


def test_a_process_that_gets_no_job_ends(job: Job) -> None:
    process = subprocess.Popen(["sleep", "60"])
    compiler = Compiler(process.pid, Pipe()[0], process.wait)
    unfit: Any = lambda: None  # noqa: E731 (pickle does not take it)
    assert compiler_process.precompile(job._replace(draft_path=unfit), compiler) is None
    assert process.returncode == -signal.SIGKILL


def test_an_engine_starts_where_there_is_no_room_for_a_fork(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise BlockingIOError("no room")

    monkeypatch.setattr(os, "fork", fork)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(before_torch, "has_driver", lambda: True)
    assert Compiler.ready_for(dataclasses.replace(job.options, device="cuda")) is None


def test_without_a_driver_nothing_is_prepared_for_a_gpu(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch from PyPI is for GPUs on machines without one, too."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    library = tmp_path / "lib" / "libtorch_cuda.so"
    library.parent.mkdir()
    library.touch()
    found = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    monkeypatch.setattr(before_torch, "_DRIVER", "libno_such_driver.so")
    assert before_torch.begin() is None
    assert Compiler.ready_for(dataclasses.replace(job.options, device="auto")) is None


def test_whoever_stops_a_process_that_ends_meanwhile_kills_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Least of all its own group, which is that of number 0."""
    killed: list[int] = []
    compiler = Compiler(1 << 30, Pipe()[0], lambda: 0)

    def kill(pid: int, number: int) -> None:
        killed.append(pid)
        compiler.reap()  # as another thread does

    monkeypatch.setattr(os, "killpg", kill)
    monkeypatch.setattr(os, "kill", kill)
    compiler.stop()
    assert {*killed} == {1 << 30}


FORKED = """
import os, pickle, sys
from multiprocessing.connection import Connection
from draftwing.engine.startup import precompile
from draftwing.engine.startup.compiler_process import STAGES, Compiler, Precompilation
def main(file):
    with Connection(file) as engine:
        job, done = pickle.loads(engine.recv_bytes()), engine.recv()
        names = [name for name in os.listdir("/proc/self/fd") if name != str(file)]
        files = {os.path.realpath(f"/proc/self/fd/{name}") for name in names}
        for stage in STAGES:
            engine.send((stage, f"{job.dtype} {sorted(one for one in files if os.path.exists(one))}"))
        done.parent.mkdir(exist_ok=True)
        done.touch()
precompile.main = main
job = pickle.load(sys.stdin.buffer)
kept = open("/dev/null")
import logging
logging.basicConfig(level=logging.DEBUG, stream=sys.stdout)
for _ in range(2):  # the second one has nothing to do
    ahead = Precompilation(job, Compiler.fork())
    for stage in STAGES:
        ahead.wait(stage)
    ahead.stop(30)
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("none is left")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="files of a process are listed by Linux")
def test_a_fork_keeps_no_file_of_its_parent(job: Job, printed_by: Printed) -> None:
    lines = printed_by(FORKED, job)
    assert [line for line in lines if "torch.bfloat16 ['/dev/null']" in line] and lines[-1] == "none is left"


LARGE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("changes", "options", "capability", "least", "expected"),
    [
        ({}, {}, (9, 0), 128 * 128, True),
        ({}, {}, (9, 0), without_data.FP8_FROM, False),
        ({}, {}, (8, 9), 0, False),
        ({}, {"fp8_activations": "none"}, (9, 0), 0, False),
        ({}, {"quantization": "none"}, (9, 0), 0, False),
        ({"activation_scheme": "static"}, {}, (9, 0), 0, False),
        ({"weight_block_size": [64, 64]}, {}, (9, 0), 0, False),
    ],
)
def test_kernels_for_activations_in_fp8(
    job: Job, changes: dict[str, Any], options: dict[str, Any], capability: tuple[int, int], least: int,
    expected: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of models that have matrices of so many values at least."""
    monkeypatch.setattr(without_data, "FP8_FROM", least)
    (job.path / "config.json").write_text(json.dumps({**CONFIG, **LARGE, "quantization_config": {**BLOCKS, **changes}}))
    job = job._replace(options=dataclasses.replace(job.options, **options), capability=capability)
    assert without_data.multiplies_fp8(precompile.model_without_data(job)) == expected


@pytest.mark.parametrize(
    ("capability", "dtype", "expected"),
    [((9, 0), torch.bfloat16, True), ((9, 0), torch.float16, False), ((8, 9), torch.bfloat16, False)],
)
def test_kernels_for_more_than_few_rows(
    job: Job, capability: tuple[int, int], dtype: torch.dtype, expected: bool
) -> None:
    products = list(precompile._products(job._replace(capability=capability, dtype=dtype)))
    for groups in cuda_dense.GROUPS:
        assert ((cuda_dense.compile_ahead, groups, capability) in products) == expected


@pytest.mark.parametrize(
    ("capability", "kind", "expected"), [((9, 0), DENSE, True), ((9, 0), FP8, False), ((8, 9), DENSE, False)]
)
def test_kernels_for_experts_of_many_pairs(job: Job, capability: tuple[int, int], kind: int, expected: bool) -> None:
    """Of weights in 16 bits, on Hopper."""
    needed = precompile.Needed([], {Layout(kind)}, set(), False)
    products = list(precompile._held_products(job._replace(capability=capability), needed))
    made = (experts_many.compile_ahead, job.dtype, capability)
    assert (made in products) == expected and len(products) > expected


def test_kernels_of_the_last_rank_are_made_too_where_it_has_less(job: Job) -> None:
    """Of 33 blocks of 64 columns it has 8, rank 0 has 9."""
    experts = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 33 * 64, "norm_topk_prob": True, "num_key_value_heads": 4,
    }  # fmt: skip
    (job.path / "config.json").write_text(json.dumps({**CONFIG, **experts, "quantization_config": BLOCKS}))
    job = job._replace(options=dataclasses.replace(job.options, tp_size=4))
    models = [precompile.model_without_data(job, rank) for rank in precompile._unlike_ranks(job)]
    layouts = [precompile._layouts(one, torch.bfloat16) for one in models]
    assert [{layout.chunks for layout in some} for some in layouts] == [{1, 9}, {1, 8}]
    assert precompile._unlike_ranks(job._replace(options=dataclasses.replace(job.options, tp_size=1))) == (0,)
    (job.path / "config.json").write_text(json.dumps(CONFIG))
    assert precompile._unlike_ranks(job._replace(options=dataclasses.replace(job.options, tp_size=2))) == (0,)


def test_experts_of_all_rows_are_held_as_others(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have activations in 16 bits, however large they are: so those of others can take them in."""
    experts = {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "first_k_dense_replace": 1,
        "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
        "norm_topk_prob": True, "routed_scaling_factor": 1.5, "n_group": 1, "topk_group": 1, "hidden_size": 128,
        "intermediate_size": 128, "quantization_config": BLOCKS,
    }  # fmt: skip
    (job.path / "config.json").write_text(json.dumps(CONFIG | experts))
    monkeypatch.setattr(without_data, "FP8_FROM", 0)
    config = load_config(job.path)
    model = DecoderModel(config, torch.bfloat16, "meta")
    without_data.hold_experts(model, torch.bfloat16, "auto", config.quantization)
    without_data.hold_fp8(model, "auto")
    mlp = model.layers[1].mlp
    assert isinstance(mlp, ExpertMLP) and mlp.shared is not None and model.layers[0].mlp.gate_up.takes_fp8
    assert mlp.gate_up.op.can_append(mlp.shared.gate_up.op) and mlp.down.op.can_append(mlp.shared.down.op)


def test_of_weights_in_nvfp4_no_kernels_are_made_that_read_them(job: Job) -> None:
    """They are dequantised; those in fp8 beside them stay as they are."""
    experts = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4, "hidden_size": 128,
        "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    }  # fmt: skip
    attention = {"quant_algo": "FP8", "quant_method": "modelopt"}
    fp4 = {"quant_algo": "NVFP4", "group_size": 16, "quant_method": "modelopt"}
    widths = []
    for stored in (fp4, attention):
        (job.path / "config.json").write_text(json.dumps(CONFIG | experts | {"quantization_config": stored}))
        config = load_config(job.path)
        widths.append(precompile._widths("auto", config.quantization))
        model = DecoderModel(config, torch.bfloat16, "meta")
        without_data.hold_experts(model, torch.bfloat16, "auto", config.quantization)
        mlp = model.layers[0].mlp
        assert isinstance(mlp, ExpertMLP) and isinstance(mlp.gate_up.op, without_data.Held) == (stored is attention)
    assert not widths[0] and any(width.fp8 for width in widths[1])


OF_FP8 = """
import pickle, sys
from draftwing.engine.startup import precompile, without_data
without_data.FP8_FROM = 0
for launch in precompile.collect(pickle.load(sys.stdin.buffer)).launches:
    if "*fp8e4nv" in launch.specialization:
        precompile.compile_launch(launch)
        print(launch.name)
"""


@pytest.mark.exhaustive
def test_kernels_that_store_activations_in_fp8_compile(job: Job, tmp_path: Path, printed_by: Printed) -> None:
    """Norms of layers and of delta nets, and gates of attention: before products whose weights are for such."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "linear_value_head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **HYBRID, **sizes, "quantization_config": BLOCKS}))
    names = {name for name in printed_by(OF_FP8, job) if name.startswith("_")}
    assert names == {"_rms_norm_kernel", "_add_rms_norm_kernel", "_gate_kernel", "_norm_kernel"}


@pytest.mark.parametrize(
    ("hidden", "asked", "drafter", "expected"),
    [
        (64, "auto", "EAGLE", set()),
        (4096, "auto", "EAGLE", {"w4a16"}),
        (4096, "none", "EAGLE", set()),
        (4096, "auto", "NGRAM", set()),
        (64, "int8", "EAGLE", {"int8"}),
    ],
)
def test_kernels_for_a_copy_of_the_lm_head(job: Job, hidden: int, asked: str, drafter: str, expected: set[str]) -> None:
    """Of a weight that is not quantised there is nothing else for `gemm_groups.cu`."""
    (job.path / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": hidden, "vocab_size": 32768}))
    options = dataclasses.replace(job.options, speculative_algorithm=drafter, speculative_lm_head_quantization=asked)
    products = precompile._products(job._replace(options=options))  # to compile the others takes minutes
    found = {width for function, _, width, *_ in products if function is cuda_groups.compile_ahead}
    assert found == {without_data.MADE[name] for name in expected}
