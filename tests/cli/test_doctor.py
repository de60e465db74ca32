"""What `draftwing doctor` says of this machine, and of one on which much is wrong."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_hub
import pytest
import torch
from fake_hub import FakeHub

import draftwing
from draftwing import machine
from draftwing.cli import doctor
from draftwing.cli.main import main
from draftwing.config.foreign_names import COMMANDS
from draftwing.ops.cpu import extension
from draftwing.ops.cuda import nvrtc
from draftwing.utils import free_port

ALWAYS = {
    "version", "packages", "processor", "CPU kernels", "memory", "open files", "cache", "hub's cache", "hub",
    "environment", "port", "optional packages",
}  # fmt: skip


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "ours"))
    monkeypatch.setenv("DRAFTWING_PORT", str(free_port()))
    with fake_hub.running({}) as server:
        fake_hub.connect(monkeypatch, server.url, tmp_path / "cache")
        yield server


def examined(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, dict[str, Any]]]:
    """Its exit code, and its findings by name."""
    capsys.readouterr()
    try:
        code = main(["doctor", "--json"])
    except SystemExit as error:
        code = int(str(error.code))
    return code, {one["name"]: one for one in json.loads(capsys.readouterr().out)}


def test_this_machine(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = examined(capsys)
    assert found.keys() >= ALWAYS and draftwing.__version__ in found["version"]["text"]
    assert (code == 0) == all(one["ok"] for one in found.values())
    assert all(one["ok"] == (not one["advice"]) for one in found.values()) and not hub.asked
    for name in ("version", "hub", "port", "environment", "cache"):
        assert found[name]["ok"], found[name]
    chosen = extension.chosen_isa()
    assert found["CPU kernels"]["text"].startswith("none" if chosen is None else chosen.name)
    try:
        main(["doctor"])
    except SystemExit as error:
        assert error.code == code
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith(("ok ", "warning "))]) == len(found)


@pytest.mark.slower(wrong=["variable", "memory", "disk", "files", "packages", "kernels", "isa", "busy"])
@pytest.mark.parametrize(
    "wrong", ["port", "hub", "variable", "memory", "disk", "files", "packages", "kernels", "isa", "busy", "check"]
)
def test_what_is_wrong_has_an_advice(
    wrong: str, hub: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, said, forget = wrong, "", extension.chosen_isa.cache_clear
    with socket.socket() as taken:
        if wrong == "port":
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            monkeypatch.setenv("DRAFTWING_PORT", str(taken.getsockname()[1]))
            said = "in use"
        elif wrong == "hub":
            monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{free_port()}")
            said = "127.0.0.1"
        elif wrong == "variable":
            monkeypatch.setenv("DRAFTWING_DTYPE", "int3")
            name, said = "environment", "DRAFTWING_DTYPE"
        elif wrong == "memory":
            monkeypatch.setattr(machine, "free_memory", lambda: 5 << 20)
            said = "0.0 GiB free"
        elif wrong == "disk":
            monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 20))
            name, said = "cache", "0.0 GiB free"
        elif wrong == "files":
            monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (256, 256))
            name, said = "open files", "256"
        elif wrong == "packages":
            real = doctor.importlib.metadata.version
            monkeypatch.setattr(
                doctor.importlib.metadata, "version", lambda package: "0.0.1" if package == "uvicorn" else real(package)
            )
            said = "uvicorn"
        elif wrong == "kernels":
            monkeypatch.setattr(extension, "chosen_isa", lambda: None)
            name, said = "CPU kernels", "none"
        elif wrong == "isa":
            forget()
            monkeypatch.setenv("DRAFTWING_CPU_ISA", "avx9000")
            name, said = "kernels", "avx9000"
        elif wrong == "busy":
            monkeypatch.setattr(os, "getloadavg", lambda: (5000.0, 0.0, 0.0))
            name, said = "processor", "load 5000.0"
        else:
            monkeypatch.setattr(machine, "processors", lambda: 1 / 0)
            name, said = "processor", "ZeroDivisionError"
        code, found = examined(capsys)
    forget()
    assert code == 1 and found[name]["advice"] and said in found[name]["text"], found[name]
    assert "port" in found or wrong == "variable"  # the others were made all the same


@pytest.mark.parametrize(
    ("capability", "free", "nvrtc_there", "wrong"),
    [
        ((9, 0), 70, True, set()), ((7, 5), 70, True, {"GPU 0", "GPU 1"}), ((9, 0), 10, True, {"GPU 0", "GPU 1"}),
        ((8, 0), 70, False, {"NVRTC"}),
    ],
)  # fmt: skip
def test_gpus(
    capability: tuple[int, int], free: int, nvrtc_there: bool, wrong: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def library() -> None:
        if not nvrtc_there:
            raise OSError("no libnvrtc")

    for name, value in {
        "is_available": lambda: True, "device_count": lambda: 2, "get_device_capability": lambda number: capability,
        "mem_get_info": lambda number: (free << 30, 80 << 30), "get_device_name": lambda number: f"card {number}",
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(nvrtc, "library", library)
    found = {one.name: one for one in doctor.findings() if one.name.startswith(("GPU", "NVRTC"))}
    assert found.keys() == {"GPU 0", "GPU 1", "NVRTC"} and {name for name in found if found[name].advice} == wrong
    assert f"card 1, capability {capability[0]}.{capability[1]}, {free}.0 GiB of 80.0" in found["GPU 1"].text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0 and capsys.readouterr().out == f"draftwing {draftwing.__version__}\n"
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"draftwing {draftwing.__version__}\n"


def test_commands_of_other_programs(capsys: pytest.CaptureFixture[str]) -> None:
    for command, instead in COMMANDS.items():
        with pytest.raises(SystemExit) as ended:
            main([command, "x", "--y"])
        said = capsys.readouterr().err.splitlines()[-1]
        assert ended.value.code == 2 and instead in said and "invalid choice" not in said
