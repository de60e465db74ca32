"""`draftwing doctor`: what this machine has, and what about it keeps a server from starting or makes it slow."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from draftwing import machine
from draftwing.config.options import Options
from draftwing.config.sources import with_sources
from draftwing.errors import ConfigError
from draftwing.files import cache_folder
from draftwing.version import __version__

GIB = 1 << 30
LEAST_MEMORY, LEAST_DISK = GIB, 5 * GIB  # free bytes: the default model takes less than the first
HUB_SECONDS = 3.0
OPTIONAL = ("triton", "ray", "opentelemetry-sdk", "matplotlib", "tensorboard")


class Finding(NamedTuple):
    """advice: what to do; empty where all is well."""

    name: str
    text: str
    advice: str = ""


def add_doctor(commands: Any) -> dict[str, Callable[[dict[str, Any]], None]]:
    """Adds the parser to argparse's `commands`; returns what runs the command."""
    doctor = commands.add_parser(
        "doctor", help="check this machine",
        description="Checks processor, kernels, GPU, memory, caches, packages, the hub and the port, and says what to "
        "do about what is wrong. Exits with 1 where something is. Nothing is downloaded.",
    )  # fmt: skip
    doctor.add_argument("--json", action="store_true", help="print JSON")
    return {"doctor": run_doctor}


def run_doctor(arguments: dict[str, Any]) -> None:
    """Prints what is found. Raises SystemExit with code 1 where there is something to do."""
    found = list(findings())
    if arguments["json"]:
        lines = [one._asdict() | {"ok": not one.advice} for one in found]
        print(json.dumps(lines, indent=1))
    else:
        for one in found:
            print(f"{'warning' if one.advice else 'ok':8} {one.name}: {one.text}")
            if one.advice:
                print(f"{'':8} -> {one.advice}")
    if any(one.advice for one in found):
        raise SystemExit(1)


def findings() -> Iterator[Finding]:
    """Yields what each check finds; one that fails is a finding, too."""
    for check in (_python, _packages, _processor, _kernels, _memory, _gpu, _caches, _hub, _options, _optional):
        try:
            yield from check()
        except ConfigError as error:  # which says what to do
            yield Finding(check.__name__.strip("_"), str(error), "mend it: the server refuses it, too")
        except Exception as error:
            yield Finding(check.__name__.strip("_"), f"{type(error).__name__}: {error}", "the check failed: report it")


def _python() -> Iterator[Finding]:
    text = f"draftwing {__version__}, Python {platform.python_version()}, {platform.platform()}"
    free = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    yield Finding("version", text, "free-threaded Python is not tested: take the usual one" if free else "")


def _packages() -> Iterator[Finding]:
    """Of the requirements of the package that is installed."""
    from packaging.requirements import Requirement

    try:
        every = [Requirement(text) for text in importlib.metadata.requires("draftwing") or ()]
    except importlib.metadata.PackageNotFoundError:
        yield Finding("packages", "draftwing runs from its sources", "pip install -e . also checks what it needs")
        return
    needs = [need for need in every if need.marker is None or need.marker.evaluate({"extra": ""})]
    wrong = []
    for need in needs:
        version = _version(need.name)
        if version is None or not need.specifier.contains(version, prereleases=True):
            wrong.append((str(need).partition(";")[0].strip(), version))
    if wrong:
        text = ", ".join(f"{need} is needed, {version or 'nothing'} found" for need, version in wrong)
        yield Finding("packages", text, "pip install " + " ".join(f"'{need}'" for need, _ in wrong))
    else:
        yield Finding("packages", f"all {len(needs)} fit; torch {_version('torch')}")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> Iterator[Finding]:
    from draftwing.engine.devices.cpu import CpuDevice

    load, found = os.getloadavg()[0], machine.processors()
    text = f"{CpuDevice().name}, {found}; load {load:.1f}"
    busy = load > found.threads + 1
    yield Finding("processor", text, "other programs keep it busy: tokens come late meanwhile" if busy else "")


def _kernels() -> Iterator[Finding]:
    from draftwing.ops.cpu import extension
    from draftwing.ops.cpu.isa import PLAIN, known_sets

    chosen = extension.chosen_isa()  # raises ConfigError for a DRAFTWING_CPU_ISA that cannot be had
    built = extension.built_sets()
    if chosen is None:
        switched = os.environ.get("DRAFTWING_NATIVE") == "0"
        advice = "unset DRAFTWING_NATIVE" if switched else "install a wheel, or again where a C compiler is"
        yield Finding("CPU kernels", "none: torch computes, several times slower", advice)
        return
    extension.checked(importlib.import_module(chosen.module_name))
    features = frozenset(importlib.import_module(PLAIN.module_name).cpu_features())
    better = known_sets()[known_sets().index(chosen) + 1 :]
    lacks = [f"{isa.name} needs {', '.join(sorted(isa.needs - features))}" for isa in better if isa.needs - features]
    unbuilt = [isa.name for isa in better if isa not in built and not isa.needs - features]
    text = "; ".join([f"{chosen.name} of {', '.join(isa.name for isa in built)}", *lacks])
    advice = f"{', '.join(unbuilt)} would be faster here and is not built: install a wheel" if unbuilt else ""
    if os.environ.get("DRAFTWING_CPU_ISA") and chosen != extension.usable_sets()[-1]:
        advice = f"unset DRAFTWING_CPU_ISA for {extension.usable_sets()[-1].name}, which is faster"
    yield Finding("CPU kernels", text, advice)


def _memory() -> Iterator[Finding]:
    free, limit = machine.free_memory(), machine.memory_limit()
    if free is None:
        yield Finding("memory", "unknown on this system", "give --max-total-tokens")
    else:
        text = f"{_size(free)} free" + (f", limited to {_size(limit)}" if limit is not None else "")
        yield Finding("memory", text, "too little for most models: end other programs" if free < LEAST_MEMORY else "")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    few = files != resource.RLIM_INFINITY and files < 2 * Options.max_connections
    advice = f"ulimit -Hn 4096, or --max-connections {max(files // 4, 1)}" if few else ""
    yield Finding("open files", "no limit" if files == resource.RLIM_INFINITY else f"at most {files}", advice)


def _gpu() -> Iterator[Finding]:
    import torch

    from draftwing.engine.devices.cuda import CudaDevice

    built = f"torch {torch.__version__}, " + (f"CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs")
    missing = CudaDevice.missing()
    if missing:
        there = shutil.which("nvidia-smi") is not None or Path("/dev/nvidiactl").exists()
        advice = "compare the driver's CUDA (nvidia-smi) with torch's; in Docker --gpus all" if there else ""
        yield Finding("GPU", f"{built}: {missing}" + (", though there is a driver" if there else ""), advice)
        return
    for number in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(number)
        free, total = torch.cuda.mem_get_info(number)
        text = f"{torch.cuda.get_device_name(number)}, capability {major}.{minor}, {_size(free)} of {_size(total)} free"
        advice = "below 8.0 plain PyTorch computes, slowly" if major < 8 else ""
        if not advice and free < total / 2:
            advice = "other programs have most of its memory: nvidia-smi names them"
        yield Finding(f"GPU {number}", f"{text}; {built}", advice)
    version = _version("triton")
    yield Finding(
        "Triton", version or "not there", "" if version else "pip install triton: its kernels compute on a GPU"
    )
    from draftwing.ops.cuda import nvrtc

    try:
        nvrtc.library()
        yield Finding("NVRTC", "found")
    except OSError as error:
        yield Finding(
            "NVRTC", str(error), f"pip install nvidia-cuda-nvrtc-cu{(torch.version.cuda or '13').split('.')[0]}"
        )
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        yield Finding("C compiler", "none", "install gcc: Triton compiles a few lines of C when it starts")


def _caches() -> Iterator[Finding]:
    from huggingface_hub import constants

    for name, folder in (("cache", cache_folder()), ("hub's cache", Path(constants.HF_HUB_CACHE))):
        size = sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_dir())
        there = next(one for one in (folder, *folder.parents) if one.exists())
        free = shutil.disk_usage(there).free
        advice = f"make {there} writable, or set another one" if not os.access(there, os.W_OK) else ""
        if free < LEAST_DISK:
            advice = "little room for models: `draftwing rm`, or HF_HOME on another disk"
        yield Finding(name, f"{folder}: {_size(size)}, {_size(free)} free on its disk", advice)


def _hub() -> Iterator[Finding]:
    from huggingface_hub import constants, get_token

    from draftwing.models.hub_files import connect

    login = "logged in" if get_token() else "not logged in, which gated models need"
    if constants.HF_HUB_OFFLINE:
        yield Finding("hub", "not asked: HF_HUB_OFFLINE")
        return
    try:
        connect(HUB_SECONDS)
        yield Finding("hub", f"{constants.ENDPOINT} answers; {login}")
    except OSError as error:
        advice = "models that are not in the caches cannot be fetched: check network and proxy, or HF_ENDPOINT"
        yield Finding("hub", f"{constants.ENDPOINT}: {error}", advice)


def _options() -> Iterator[Finding]:
    from draftwing.server.run import bind

    try:
        options = Options.from_kwargs(**with_sources({}, os.environ)).resolve()
    except ConfigError as error:
        yield Finding("environment", str(error), "mend or unset it")
        return
    set_here = sorted(name for name in os.environ if name.startswith("DRAFTWING_"))
    yield Finding("environment", ", ".join(set_here) or "no variable of draftwing's is set")
    try:
        bind(options.host, options.port).close()
        yield Finding("port", f"{options.host}:{options.port} is free")
    except ConfigError as error:
        yield Finding("port", str(error), "another server may run there; --port 0 takes a free one")


def _optional() -> Iterator[Finding]:
    versions = {name: _version(name) for name in OPTIONAL}
    text = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    absent = ", ".join(name for name, version in versions.items() if version is None)
    yield Finding("optional packages", "; ".join(filter(None, (text, absent and f"not installed: {absent}"))))


def _size(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
