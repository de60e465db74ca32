"""A server of several tiny models, in processes of its own."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_checkpoint import write_checkpoint, write_tokenizer

from draftwing.machine import import_environment

OPTIONS = {"speculative_algorithm": "none", "max_total_tokens": 4096, "log_level": "warning", "device": "cpu"}
SECONDS = 120  # for what takes some seconds on an idle machine


class Process:
    """`draftwing serve` of a folder of models."""

    def __init__(self, folder: Path, port: int, *flags: str) -> None:
        options = [f"--{name.replace('_', '-')}={value}" for name, value in {**OPTIONS, "log_level": "info"}.items()]
        command = [sys.executable, "-m", "draftwing", "serve", "--models-dir", str(folder), "--port", str(port)]
        self.process = subprocess.Popen(
            [*command, *options, *flags], stderr=subprocess.PIPE, text=True, env=import_environment()
        )
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if "OpenAI API: " in line:
                self.url = line.split("OpenAI API: ")[1].strip().removesuffix("/v1")
                break
        else:
            raise AssertionError("it did not start")
        # So that it never waits for somebody to read its log.
        self.log = subprocess.Popen(["cat"], stdin=self.process.stderr, stdout=subprocess.DEVNULL)

    def below(self, what: str = "") -> list[int]:
        """Returns the processes that it has started, and those that they have, whose command has this text."""
        found, waiting = [], [self.process.pid]
        while waiting:
            with contextlib.suppress(OSError):
                for children in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
                    new = [int(child) for child in children.read_text().split()]
                    waiting += new
                    found += new
        return [pid for pid in found if what in command(pid)]

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        code = self.process.wait(SECONDS)
        self.log.wait(SECONDS)
        return code


def command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def wait_for(processes: list[int]) -> None:
    """Returns when all of them are gone."""
    end = time.monotonic() + SECONDS
    while any(map(command, processes)):
        assert time.monotonic() < end
        time.sleep(0.05)


def write_models(folder: Path) -> None:
    """Writes three models of different families."""
    write_checkpoint(folder / "qwen2", seed=1)
    sizes: dict[str, Any] = {
        "vocab_size": 258, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 1024, "eos_token_id": 256,
        "bos_token_id": None, "pad_token_id": 257, "tie_word_embeddings": True,
    }  # fmt: skip
    for name in ("Llama", "Qwen3"):
        torch.manual_seed(len(name))
        config = getattr(transformers, f"{name}Config")(**sizes)
        model = getattr(transformers, f"{name}ForCausalLM")(config).float()
        for weight in model.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.3)
        model.save_pretrained(folder / name.lower())
        write_tokenizer(folder / name.lower())
