"""A user's own device, examples/custom_device.py: as a class and by name, with trees, in LLM and in a server."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from reference.learnable import ENGINE, write_target

from draftwing import LLM, ConfigError
from draftwing.config import devices
from draftwing.config.devices import find_device
from draftwing.config.options import Options
from draftwing.engine.build import spread
from draftwing.engine.devices import pick_device
from draftwing.engine.devices.base import Device
from draftwing.engine.devices.cpu import CpuDevice
from draftwing.utils import launch_server_cmd, terminate_process, wait_for_server

EXAMPLES = Path(__file__).parents[3] / "examples"
PROMPTS = ["red lorry, yellow lorry, red lorry, yellow lorry, red lorry, ", "yellow lorry, "]
PARAMS = [
    {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True},
    {"temperature": 2.0, "sampling_seed": 1, "max_new_tokens": 60, "ignore_eos": True},
]
TREES = {"speculative_algorithm": "NGRAM", "speculative_fixed_shape": True}  # every step drafts
SIZES = {name: value for name, value in ENGINE.items() if name != "device"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_target(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("custom_device", EXAMPLES / "custom_device.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["custom_device"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["custom_device"]


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"speculative_algorithm": "none"}, TREES], ids=["plain", "trees"])
def test_it_serves_the_text_of_the_cpu(model: str, example: Any, how: dict[str, Any]) -> None:
    with LLM(model, **SIZES, **how, device="cpu") as llm:
        expected = [answer.token_ids for answer in llm.generate(PROMPTS, PARAMS)]
    with LLM(model, **SIZES, **how, device=example.FarCpu) as llm:
        device, options = llm.engine.parts.executor.device, llm.engine.parts.options
        answers = llm.generate(PROMPTS, PARAMS)
    assert [answer.token_ids for answer in answers] == expected and len(set(expected[0])) > 20
    assert isinstance(device, example.FarCpu) and device.downloads > 10 and device.uploads
    assert options.max_running_requests == SIZES.get("max_running_requests", 16) and options.enable_overlap
    if how is TREES:
        meta = answers[0].meta_info
        assert meta["spec_num_correct_drafts"] > 0


@pytest.mark.slow
@pytest.mark.exhaustive  # test_examples.py has one by name, and test_drafter.py what a server imports again
def test_a_server_has_it_by_name(model: str) -> None:
    path = os.pathsep.join(filter(None, (str(EXAMPLES), os.environ.get("PYTHONPATH"))))
    command = (
        f"PYTHONPATH={path} python -m draftwing.launch_server --model-path {model} --device custom_device:FarCpu "
        "--speculative-algorithm NGRAM --max-total-tokens 2048"
    )
    process, port = launch_server_cmd(command)
    try:
        wait_for_server(f"http://localhost:{port}", timeout=60, process=process)
        body = {"text": PROMPTS[0], "sampling_params": PARAMS[0]}
        answer = httpx.post(f"http://127.0.0.1:{port}/generate", json=body, timeout=60).raise_for_status().json()
        info = httpx.get(f"http://127.0.0.1:{port}/server_info", timeout=60).raise_for_status().json()
    finally:
        terminate_process(process)
    with LLM(model, **SIZES, device="cpu", speculative_algorithm="none") as llm:
        expected = llm.generate(PROMPTS[0], PARAMS[0])[0]
    assert answer["text"] == expected.text
    assert (
        info["device"] == "cpu" and info["capability"]["devices"] == ["FarCpu"] and info["max_running_requests"] == 16
    )


def test_names_are_checked_before_anything_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "import_attribute", lambda *args: pytest.fail("imported"))
    assert Options(device="nowhere:Nothing").resolve().device == "nowhere:Nothing"
    for wrong in ("tpu", "CPU", "cpu "):
        with pytest.raises(ConfigError, match="device must be one of auto, cpu, cuda, or module:Class"):
            Options(device=wrong).resolve()


class Half(Device):
    """Lacks most of what a device has to define."""

    kind = "cpu"

    def mark(self) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ("nowhere:Nothing", "cannot be loaded"),
        ("draftwing.engine.devices.cpu:Nothing", "cannot be loaded"),
        ("collections:OrderedDict", "derived from draftwing.Device"),
        ("os:getcwd", "derived from draftwing.Device"),
        (dict, "derived from draftwing.Device"),
        (Half, "define defaults and download and free_memory"),
    ],
)
def test_what_is_no_device_is_refused(asked: str | type[Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        find_device(asked)


def test_installed_packages_name_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the entry point `draftwing.devices`; they replace none of the package's."""
    point = EntryPoint("far", "draftwing.engine.devices.cpu:CpuDevice", devices.ENTRY_POINTS)
    own = EntryPoint("cpu", "nowhere:Nothing", devices.ENTRY_POINTS)
    monkeypatch.setattr(devices, "entry_points", lambda group: [point, own] if group == devices.ENTRY_POINTS else [])
    assert Options(device="far").resolve().device == "far"
    assert type(pick_device("far")) is CpuDevice is type(pick_device("cpu"))
    with pytest.raises(ConfigError, match=r"auto, cpu, cuda, far"):
        Options(device="near").resolve()


def test_a_device_that_is_missing_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert type(pick_device("auto")) is CpuDevice
    with pytest.raises(ConfigError, match="--device cuda: torch finds no CUDA device here; use --device cpu or auto"):
        pick_device("cuda")


def test_ranks_are_processes_that_have_to_import_it() -> None:
    own = type("Own", (CpuDevice,), {"__module__": "__main__"})
    config: Any = SimpleNamespace(spread=lambda ranks: None)
    options = Options(device=own, tp_size=2, speculative_algorithm="none").resolve()
    with pytest.raises(ConfigError, match="--tp-size 2: expected a device in a module"):
        spread(options, config, own())
    assert spread(dataclasses.replace(options, device=CpuDevice), config, CpuDevice()).num_threads
