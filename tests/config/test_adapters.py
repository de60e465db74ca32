"""What names say of the model that an adapter was trained on."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftwing.config.adapters import may_be_one

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
CACHE = (
    "/home/x/.cache/huggingface/hub/models--meta-llama--Llama-3.1-8B/snapshots/0e9e39f249a16976918f6564b8830bc894c89659"
)


@pytest.mark.parametrize(
    ("base", "model"),
    [
        (LLAMA, LLAMA),
        (LLAMA, "hf.co/bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Q4_K_M"),
        ("unsloth/meta-llama-3.1-8b-instruct-unsloth-bnb-4bit", LLAMA),
        ("hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4", "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic"),
        ("Qwen/Qwen2.5-7B-Instruct", "neuralmagic/Qwen2.5-7B-Instruct-quantized.w4a16"),
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B-GPTQ-Int4"),
        ("meta-llama/Llama-3.1-8B", CACHE),
        ("Meta Llama 3.1 8B Instruct", "/models/Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf"),
        # names that their owners gave
        ("/home/x/Llama-3.1-8B-Instruct/", LLAMA),
        ("C:\\models\\Llama-3.1-8B-Instruct", LLAMA),
        ("./out/checkpoint-300", LLAMA),
        ("outputs/merged", LLAMA),
        ("", LLAMA),
        (LLAMA, "/srv/models/llama-8b-prod"),
        (LLAMA, "/srv/models/production"),
        ("Qwen/Qwen3-8B", "smollm2"),
    ],
)
def test_names_that_may_be_of_one_model(base: str, model: str) -> None:
    assert may_be_one(base, model) and may_be_one(model, base)


@pytest.mark.parametrize(
    ("base", "model"),
    [
        ("mistralai/Mistral-7B-v0.1", "HuggingFaceH4/zephyr-7b-beta"),
        ("mistralai/Mistral-7B-Instruct-v0.2", "/models/zephyr-7b-beta"),
        ("Yi 6B Chat", "/models/llama-6b-chat.Q8_0.gguf"),
        ("meta-llama/Llama-3.1-8B", LLAMA),
        (LLAMA, CACHE),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b"),
        ("Qwen/Qwen2-7B", "unsloth/Qwen2.5-7B-bnb-4bit"),
    ],
)
def test_names_of_two_models(base: str, model: str) -> None:
    assert not may_be_one(base, model) and not may_be_one(model, base)


def test_a_relative_folder_is_no_name_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not may_be_one(LLAMA, "models/llama-3.1-8b-ours")
    (tmp_path / "models" / "llama-3.1-8b-ours").mkdir(parents=True)
    assert may_be_one(LLAMA, "models/llama-3.1-8b-ours")


@pytest.mark.parametrize("name", ["a" * 299, "a/" * 150, "llama-8b\0", "a" * 100_000 + "/llama-8b", "\udcff-8b"])
def test_names_that_no_file_can_have(name: str) -> None:
    assert may_be_one(name, name)
