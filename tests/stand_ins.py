"""Small stand-ins, in the real formats and under the real names, for the checkpoints that documented commands name.

Heads are the constructed exact ones (reference/exact_heads.py): they are right as long as their drafts are in their
vocabulary, so that a command that is served with a head that is read wrongly does not pass.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import torch
from reference.block_heads import dflash_head
from reference.checkpoints import Checkpoint
from reference.exact_heads import exact_dspark, exact_eagle2, exact_eagle3, exact_mtp
from tiny_checkpoint import VOCAB, write_checkpoint, write_tokenizer

from draftwing.utils import launch_server_cmd, terminate_process, wait_for_server

# The commands ask for most of the memory, which takes long to fill: this machine has little.
SMALL_MACHINE = """
import sys
if "draftwing.engine.process.worker" in sys.orig_argv:
    from draftwing.engine.devices.cpu import CpuDevice
    CpuDevice.free_memory = lambda device: 64 << 20
"""
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": 256,
}  # fmt: skip
EAGLE3_TOKENS = 200


def write_model(folder: Path, model: Checkpoint) -> None:
    model.write(folder)
    write_tokenizer(folder)


def llama2(folder: Path) -> None:
    """A head with a bias in fc, of which its config says nothing."""
    exact = exact_eagle2(seed=1, fc_bias=True, rope_scaling=None, rope_theta=10000.0, torch_dtype="float16", **SIZES)
    write_model(folder / "meta-llama/Llama-2-7b-chat-hf", exact.target)
    config = {k: v for k, v in exact.head.config.items() if k != "bias"}
    head = Checkpoint(exact.head.tensors, config)
    head.write(folder / "lmsys/sglang-EAGLE-llama2-chat-7B", "pytorch_model.bin")


def llama3(folder: Path) -> None:
    exact = exact_eagle2(seed=2, rope_scaling=None, torch_dtype="bfloat16", **SIZES)
    write_model(folder / "meta-llama/Meta-Llama-3-8B-Instruct", exact.target)
    exact.head.write(folder / "lmsys/sglang-EAGLE-LLaMA3-Instruct-8B", "pytorch_model.bin")
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0)).tolist()
    frequent = [*order[:240], *order[:8]]  # published lists repeat some tokens
    (folder / "thunlp/LLaMA3-Instruct-8B-FR-Spec").mkdir(parents=True)
    torch.save(frequent, folder / "thunlp/LLaMA3-Instruct-8B-FR-Spec/freq_32768.pt")


def llama31(folder: Path) -> None:
    """The official layout: midlayer.*, d2t and t2d, a config that names no layers."""
    exact = exact_eagle3(seed=3, rows=EAGLE3_TOKENS, layers=6, reach=512, **SIZES)
    # Answers follow the last token of the chat template, which has to be one that the head knows.
    assert byte_id(":") in exact.starts
    write_model(folder / "meta-llama/Llama-3.1-8B-Instruct", exact.target)
    exact.head.write(folder / "jamesliu1/sglang-EAGLE3-Llama-3.1-Instruct-8B", "pytorch_model.bin")


def qwen3(folder: Path) -> None:
    """DeepSpec's layout, and z-lab's: a constructed head, which knows what follows, and a random one."""
    exact = exact_dspark(seed=6, layers=5, **SIZES, head_changes={"block_size": 7})
    write_model(folder / "Qwen/Qwen3-8B", exact.target)
    assert exact.head is not None
    exact.head.write(folder / "deepseek-ai/dspark_qwen3_8b_block7")
    dflash_head(exact.target, block_size=16).write(folder / "z-lab/Qwen3-8B-DFlash-b16")


def mimo(folder: Path) -> None:
    write_model(folder / "XiaomiMiMo/MiMo-7B-RL", exact_mtp(seed=5, **{**SIZES, "head_dim": 32}).target)


def qwen25(folder: Path) -> None:
    """Without a constructed head: the smaller model is a random one."""
    write_checkpoint(folder / "Qwen/Qwen2.5-7B-Instruct", seed=1, layers=2)
    write_checkpoint(folder / "Qwen/Qwen2.5-1.5B-Instruct", seed=1, layers=1)


def byte_id(character: str) -> int:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet()).index(character)


def write_all(folder: Path, *families: Callable[[Path], None]) -> Path:
    for write in families:
        write(folder)
    (folder / "sitecustomize.py").write_text(SMALL_MACHINE)
    return folder


@contextlib.contextmanager
def served(command: str) -> Iterator[str]:
    """Runs a server command until it answers, gives its address, and ends it in an orderly way."""
    process, port = launch_server_cmd(command)
    try:
        wait_for_server(f"http://localhost:{port}", timeout=60, process=process)
        yield f"http://127.0.0.1:{port}"
    finally:
        terminate_process(process)
    assert process.returncode == 0


def model_of(command: str) -> str:
    words = shlex.split(command.replace("\\\n", " "))
    return next(after for word, after in itertools.pairwise(words) if word in ("--model", "--model-path"))


def chat(url: str, model: str) -> dict[str, Any]:
    """One short question; the answer's JSON."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hello?"}], "temperature": 0, "max_tokens": 8}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).raise_for_status().json()


def accept_length(url: str) -> float:
    """Tokens per step with drafts, after a greedy answer to a prompt that ends as the stand-ins' chat template does.

    Of all such steps since the server started, and of no others: heads that need not draft do so in their first steps,
    and then where it pays, which depends on how busy this machine is.
    """
    body = {"text": "user: What?\nassistant:", "sampling_params": {"temperature": 0, "max_new_tokens": 48}}
    httpx.post(f"{url}/generate", json=body, timeout=60).raise_for_status()
    page = scrape(url)
    drafts, accepted = (
        sum(map(float, re.findall(rf"^draftwing:spec_{name}_total{{.*}} (.+)$", page, re.MULTILINE)))
        for name in ("drafts", "accepted_tokens")
    )
    return 1 + accepted / drafts if drafts else 1.0


def scrape(url: str) -> str:
    """/metrics, with the engine's numbers: on a busy machine these may miss a scrape, which does not wait long."""
    for _ in range(20):
        page = httpx.get(f"{url}/metrics").raise_for_status().text
        if "engine_stats_age_seconds" in page:
            return page
    raise TimeoutError(f"the engine of {url} tells no numbers")
