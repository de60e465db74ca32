"""Measuring scripts of benchmarks/ and tools/: each can be imported, and one runs."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from reference.learnable import ENGINE, prompts, write_target
from scripts import script

from draftwing import LLM
from draftwing.models.heads.config import BlockConfig
from draftwing.models.loader import load_model
from draftwing.ops.experts.cuda import KINDS as expert_kinds
from draftwing.train.checkpoint import save_head
from draftwing.train.heads import new_block_head

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(
    path for folder in ("benchmarks", "benchmarks/gpu_kernels", "tools") for path in (ROOT / folder).glob("*.py")
)
SMALL = ("num_threads=1", "max_total_tokens=4000")
# The smallest work that goes through all of the script. A lookup drafts: there is no head to write.
OFF_IS_FREE = ["--drafters=NGRAM", "--batches=1", "--pairs=2", "--tokens=8"]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_it_can_be_imported(path: Path) -> None:
    """With all that its functions import of the package."""
    script(path)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("draftwing"):
            home = importlib.import_module(str(node.module))
            for name in (alias.name for alias in node.names):
                assert hasattr(home, name) or find_spec(f"{node.module}.{name}"), f"{node.module} has no {name}"


def test_shell_scripts_can_be_read() -> None:
    for path in (ROOT / "tools").glob("*.sh"):
        subprocess.run(["bash", "-n", str(path)], check=True)


def test_one_runs(model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run = script(ROOT / "benchmarks" / "off_is_free.py")
    monkeypatch.setattr(sys, "argv", ["off_is_free", "--model", model, *OFF_IS_FREE, *SMALL])
    run.main()
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("count", [1, 2, 3, 10, 51])
def test_sampling_is_measured_with_so_many_prompts(count: int) -> None:
    found = script(ROOT / "benchmarks" / "sampling_quality.py").prompts(count)
    assert len(found) == len(set(found)) == count


def test_sampling_is_measured_with_one_prompt(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = script(ROOT / "benchmarks" / "sampling_quality.py")
    own = ["--prompts=1", "--tokens=2", "temperature=0"]
    monkeypatch.setattr(sys, "argv", ["sampling_quality", f"--model={model}", *own])
    run.main()
    assert "temperature=0" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["host_level", "sleep"])
def test_what_turns_an_engine_itself_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By parts of the engine that nobody else names."""
    run = script(ROOT / "benchmarks" / "gpu_kernels" / f"{name}.py")
    own = ["--tokens=1000"] if name == "host_level" else ["--times=1"]
    monkeypatch.setattr(sys, "argv", [name, "--tiny", "--shapes=8b", *own, "num_threads=1"])
    run.main()
    assert capsys.readouterr().out.strip()


def test_profiles_tell_products_of_experts_from_others() -> None:
    """Kernels for many pairs have the bare names of what they do."""
    kinds = {
        "norms, activations, positions": ["_rms_norm_kernel"],
        "products": ["dense_many_256_1_0_held", "plain_16"],
        "routes and sums of experts": ["_route_kernel", "_count_kernel", "_begin_kernel", "_mix_norm_kernel"],
        "quantising, copies of x in order": ["_order_kernel"],
        "experts": [*expert_kinds, "silu_16"],  # the last one between routes and their sum
    }
    named = [(name, 2.0**i) for i, name in enumerate(name for names in kinds.values() for name in names)]
    took, order = dict(named), ["_mix_norm_kernel", "_rms_norm_kernel", "plain_16", "dense_many_256_1_0_held"]
    launched = [*order, *(name for name, _ in named if name not in order)]
    found = script(ROOT / "benchmarks" / "gpu_kernels" / "floors.py").by_kind([(name, took[name]) for name in launched])
    assert found == {kind: sum(took[name] for name in names) for kind, names in kinds.items()}


def test_an_inflated_pair_writes_the_same_text(tmp_path: Path) -> None:
    inflate = script(ROOT / "tools" / "inflate.py")
    shape = {"hidden_size": 80, "intermediate_size": 200, "num_hidden_layers": 8, "num_attention_heads": 12,
             "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 300}  # fmt: skip
    small, large = write_target(tmp_path / "small"), tmp_path / "large"
    inflate.inflate_target(small, large, {**inflate.LLAMA_8B, **shape}, torch.float32, "cpu")
    block = BlockConfig((1, 3, 5), 4, 255, True, (), (), tied=True, markov="vanilla", rank=8, confidence="markov")
    target = load_model(small, torch.float32, "cpu")
    stored = save_head(new_block_head(target, block, torch.arange(0, 250, 2), layers=2, seed=3), tmp_path / "head",
                       torch.float32)  # fmt: skip
    head = tmp_path / "large_head"
    inflate.main(["head", str(stored), str(head), "--target", str(small), "--dtype", "float32", "--rank", "16",
                  "--shape", json.dumps(shape)])  # fmt: skip
    answers = []
    for folder, draft in ((small, stored), (large, head)):
        options = {"speculative_algorithm": "DSPARK", "speculative_draft_model_path": str(draft),
                   "speculative_fixed_shape": True}  # fmt: skip
        with LLM(str(folder), **ENGINE, **options) as llm:
            (answer,) = llm.generate(prompts(1, 5), {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True})
        answers.append((answer.token_ids, answer.meta_info["spec_num_correct_drafts"]))
    assert answers[0] == answers[1]
