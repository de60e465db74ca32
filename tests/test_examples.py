"""The scripts in examples/ and the worked examples of CONTRIBUTING.md, on small random checkpoints.

examples/custom_drafter.py has tests of its own, in tests/spec/test_drafter.py.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import FakeEngine, local
from reference.learnable import write_target
from safetensors.torch import load_file, save_file
from scripted import serving
from scripts import script

from draftwing import LLM, Completion
from draftwing.layers.linear_ops.dense import FORMATS
from draftwing.models.config import from_hf
from draftwing.models.decoder import DecoderModel
from draftwing.models.families import FAMILIES
from draftwing.models.weight_map import checkpoint_names, stored_tensors

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(autouse=True)
def small_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of its own takes what memory is free."""
    monkeypatch.setattr("draftwing.engine.devices.cpu.CpuDevice.free_memory", lambda device: 64 << 20)


def test_offline_generation(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    offline = script(EXAMPLES / "offline_generation.py")
    offline.main(model)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" -> ")[0] for line in lines] == [repr(prompt) for prompt in offline.PROMPTS]


def test_async_generation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    example, engine = script(EXAMPLES / "async_generation.py"), FakeEngine()
    opened = contextlib.nullcontext((local(engine), engine.tokenizer))
    monkeypatch.setattr("draftwing.server.run.opened", lambda options: opened)
    asyncio.run(example.main())
    echoes = [f"{prompt!r} -> {prompt!r}" for prompt in example.PROMPTS]
    assert capsys.readouterr().out.splitlines() == ["Once upon a time", *echoes]


@pytest.mark.exhaustive
def test_structured_output(smollm2_path: Path) -> None:
    """With the default model: a random one writes escapes and spaces until it is cut."""
    found = script(EXAMPLES / "structured_output.py").main()
    assert [country["name"] for country in found] == ["Japan", "Kenya", "Peru"]
    assert all(set(country) == {"name", "continent", "islands"} for country in found)


@pytest.mark.slow
def test_compare_speculation(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert script(EXAMPLES / "compare_speculation.py").main(model)
    assert "tokens per second" in capsys.readouterr().out


def test_streaming_chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    questions = iter(["Hello?", "And then?", ""])
    monkeypatch.setattr(builtins, "input", lambda prompt: next(questions))
    with serving(FakeEngine()) as url:
        script(EXAMPLES / "streaming_chat.py").main(url)
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "chatting with echo" and "user:Hello?" in out and "user:And then?" in out


def blocks(section: str) -> list[str]:
    """The Python of a section of CONTRIBUTING.md."""
    page = (EXAMPLES.parent / "CONTRIBUTING.md").read_text(encoding="utf8")
    return re.findall(r"^```python\n(.*?)^```", page.split(f"\n## {section}\n")[1].split("\n## ")[0], re.M | re.S)


def answer(model: str, **options: Any) -> Completion:
    with LLM(model, **options) as llm:
        return llm.generate("abcabc", {"temperature": 1, "sampling_seed": 1, "max_new_tokens": 40})[0]


def test_contributing_add_a_drafter(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_drafter.py").write_text(blocks("Add a drafter")[0])
    monkeypatch.syspath_prepend(tmp_path)
    drafted = answer(model, speculative_algorithm="my_drafter:Again", speculative_fixed_shape=True)
    assert drafted.token_ids == answer(model, speculative_algorithm="none").token_ids
    assert drafted.meta_info["spec_num_proposed_drafts"] > 0


def test_contributing_add_a_device(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, for there is no such device here; what the page asks torch of it is stood in for."""
    code = blocks("Add a device")[0]
    assert 'kind = "xpu"' in code
    (tmp_path / "my_device.py").write_text(code.replace('kind = "xpu"', 'kind = "cpu"'))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.xpu, "synchronize", lambda: None)
    monkeypatch.setattr(torch.xpu, "mem_get_info", lambda: (64 << 20, 1 << 30), raising=False)
    trees = {"speculative_algorithm": "SUFFIX", "speculative_fixed_shape": True}
    drafted = answer(model, device="my_device:Xpu", **trees)
    assert drafted.token_ids == answer(model, device="cpu", speculative_algorithm="none").token_ids
    assert drafted.meta_info["spec_num_proposed_drafts"] > 0


@pytest.mark.slow
def test_contributing_add_a_weight_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One checkpoint in 8 bits and one dequantised: the text is the same."""
    code, line = blocks("Add a weight format")
    model = str(write_target(tmp_path / "model"))
    (tmp_path / "int8_rows.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    found = dict(vars(importlib.import_module("int8_rows")))
    exec(line, found)
    for name, make in found["FORMATS"].items():
        monkeypatch.setitem(FORMATS, name, make)
    stored: dict[str, torch.Tensor] = {}
    dense: dict[str, torch.Tensor] = {}
    for name, weight in load_file(f"{model}/model.safetensors").items():
        dense[name] = stored[name] = weight
        if "proj.weight" in name:
            scales = weight.abs().amax(1) / 127
            qweight = (weight / scales[:, None]).round().to(torch.int8)
            del stored[name]
            stored |= {name.replace("weight", "qweight"): qweight, name.replace("weight", "scales"): scales}
            dense[name] = qweight * scales[:, None]
    texts = []
    for folder, tensors in (("dense", dense), ("stored", stored)):
        shutil.copytree(model, tmp_path / folder)
        save_file(tensors, tmp_path / folder / "model.safetensors")
        config = json.loads((tmp_path / folder / "config.json").read_text())
        if folder == "stored":
            config["quantization_config"] = {"quant_method": "int8_rows"}
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
        texts.append(answer(str(tmp_path / folder)).token_ids)
    assert texts[0] == texts[1] and len(set(texts[0])) > 10


@pytest.mark.slow
def test_contributing_add_a_kind_of_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's recurrence in a checkpoint, served with drafts and without."""
    code, family = blocks("Add a kind of layer")
    (tmp_path / "recurrence.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(FAMILIES, "RecurrentForCausalLM", FAMILIES["LlamaForCausalLM"])  # until the test ends
    exec(family, dict(vars(importlib.import_module("recurrence"))))
    folder = write_target(tmp_path / "model")
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"architectures": ["RecurrentForCausalLM"], "state_size": 32, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(raw))
    config, generator = from_hf(raw), torch.Generator().manual_seed(0)
    assert {type(layer.mixer).__name__ for layer in config.layers} == {"AttentionConfig", "RecurrenceConfig"}
    model = DecoderModel(config, torch.float32, "cpu")
    for name, param in model.named_parameters():
        if param.dim() == 2:
            scale = (2 if name.startswith("lm_head") else 1) * param.shape[1] ** -0.5
            param.data.copy_(torch.randn(param.shape, generator=generator) * scale)
    save_file(
        {name: part.clone() for name, part in stored_tensors(model, checkpoint_names(config))},
        folder / "model.safetensors",
    )
    drafted = answer(str(folder), speculative_algorithm="NGRAM", speculative_fixed_shape=True)
    assert drafted.token_ids == answer(str(folder), speculative_algorithm="none").token_ids
    assert drafted.meta_info["spec_num_proposed_drafts"] > 0 and len(set(drafted.token_ids)) > 10
