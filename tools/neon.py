"""`make neon`: the C extension for aarch64, compiled across and run by an emulator, against this machine's.

Each instruction set runs tests/ops/isa_probe.py, which prints hashes of what the kernels give. With `--text` it runs
tests/engine/text_probe.py, which prints tokens of the default model (minutes). Everything goes into build/neon:
Debian's Python for arm64 and wheels for it (170 MB the first time), and a copy of the package with the modules. It
needs Debian or Ubuntu, but not root.
"""

from __future__ import annotations

import glob
import importlib.metadata
import json
import os
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
FOLDER = HERE / "build" / "neon"
ROOT, SITE, SOURCE = FOLDER / "root", FOLDER / "site", FOLDER / "src"
TOOLS = {
    "aarch64-linux-gnu-gcc": "gcc-aarch64-linux-gnu libc6-dev-arm64-cross",
    "qemu-aarch64": "qemu-user",
    "apt-get": "apt",
    "dpkg-deb": "dpkg",
}
TORCH = "torch==2.10.0"  # the last one whose wheel for aarch64 is a CPU's alone
WHEELS = ("numpy", "pydantic_core", "regex", "safetensors", "tokenizers")  # with code of a machine; as installed here
PLATFORMS = ("2_17", "2_24", "2_26", "2_27", "2_28")
# Programs with their arguments. Both print a JSON object, {case: what must be the same everywhere}.
KERNELS = ("tests/ops/isa_probe.py",)
TEXT = ("tests/engine/text_probe.py", "12")


def run(*command: str | Path, **options: object) -> str:
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, **options).stdout  # type: ignore


def missing() -> list[str]:
    """Debian's packages of the tools that are not here."""
    return [package for tool, package in TOOLS.items() if shutil.which(tool) is None]


def ready() -> bool:
    """Whether a run downloads nothing."""
    return not missing() and (FOLDER / "complete").exists()


def fetch_python() -> None:
    """Debian's Python for arm64 into ROOT, by an apt of its own that knows of no other package."""
    own = FOLDER / "apt"
    for part in ("state/lists/partial", "cache/archives/partial"):
        (own / part).mkdir(parents=True, exist_ok=True)
    (own / "state" / "status").touch()
    settings = {
        "APT::Architecture": "arm64", "APT::Architectures": "arm64", "Dir::State": f"{own}/state",
        "Dir::State::status": f"{own}/state/status", "Dir::Cache": f"{own}/cache", "Debug::NoLocking": "1",
        "APT::Sandbox::User": "", "APT::Install-Recommends": "0",
    }  # fmt: skip
    apt = ["apt-get", "-qq", *(word for name, value in settings.items() for word in ("-o", f"{name}={value}"))]
    run(*apt, "update")
    run(*apt, "--yes", "--download-only", "install", "python3", "libpython3-dev", "libstdc++6", "libgomp1")
    for package in glob.glob(f"{own}/cache/archives/*.deb"):
        run("dpkg-deb", "--extract", package, ROOT)


def python() -> tuple[Path, str]:
    """Of ROOT, with its version."""
    found = Path(ROOT / "usr/bin/python3").resolve().name
    return ROOT / "usr/bin" / found, found.removeprefix("python")


def fetch_wheels() -> None:
    pins = [TORCH, *(f"{name}=={importlib.metadata.version(name)}" for name in WHEELS)]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", FOLDER / "wheels"]
    platforms = [f"--platform=manylinux_{version}_aarch64" for version in PLATFORMS]
    run(*command, *platforms, "--platform=manylinux2014_aarch64", f"--python-version={python()[1]}", *pins)
    for wheel in (FOLDER / "wheels").glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(SITE)


def emulated_python() -> Path:
    """Writes a program that runs Python in the emulator, and which is this Python's `sys.executable`: processes that it
    starts with that are emulated, too. Beside Python itself, from where Python finds its modules."""
    script = ROOT / "usr/bin/emulated-python"
    options = f"-cpu max -L '{ROOT}' -E LD_LIBRARY_PATH=/usr/lib/aarch64-linux-gnu"
    script.write_text(f'#!/bin/sh\nexec qemu-aarch64 {options} -0 "$0" \'{python()[0]}\' "$@"\n')
    script.chmod(0o755)
    return script


def compile_sets() -> list[str]:
    """The package with its modules into SOURCE; the names of the sets."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    shutil.copytree(HERE / "src", SOURCE, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    known = runpy.run_path(str(SOURCE / "draftwing/ops/cpu/isa.py"))
    sets, interface = known["known_sets"]("aarch64"), known["INTERFACE"]
    include, version = ROOT / "usr/include", python()[1]
    flags = ["-shared", "-fPIC", "-O3", "-ffp-contract=off", "-pthread", "-Wno-psabi", f"-I{include}/python{version}"]
    files = sorted((SOURCE / "draftwing/ops/cpu/csrc").glob("*.c"))
    for isa in sets:
        module = SOURCE / f"draftwing/ops/cpu/_{isa.name}.abi3.so"
        own = [f"-I{include}", f"-DISA={isa.name}", f"-DINTERFACE={interface}", *isa.flags]
        run("aarch64-linux-gnu-gcc", *flags, *own, *files, "-o", module)
    return [isa.name for isa in sets]


def cases(program: tuple[str, ...], isa: str, emulated: bool) -> dict[str, Any]:
    """What the program prints with one instruction set."""
    command = [HERE / program[0], *program[1:]]
    environ = {**os.environ, "DRAFTWING_CPU_ISA": isa, "OMP_NUM_THREADS": "1"}
    if not emulated:
        return json.loads(run(sys.executable, *command, env={**environ, "PYTHONPATH": str(HERE / "src")}))
    import numpy

    # Packages without code of a machine are those that are installed here.
    environ["PYTHONPATH"] = f"{SITE}:{SOURCE}:{Path(numpy.__file__).parent.parent}"
    return json.loads(run(emulated_python(), *command, env=environ))


def compare(program: tuple[str, ...]) -> list[str]:
    """What differs between this machine's plain set and aarch64's sets, one line each."""
    names, expected = compile_sets(), cases(program, "plain", False)
    different = []
    for name in names:
        found = cases(program, name, True)
        different += [f"{name}: {case}" for case in expected if expected[case] != found.get(case)]
        print(f"aarch64, {name}: {len(found)} cases")
    return different


def main() -> None:
    if missing():
        sys.exit(f"make neon needs more tools; on Debian and Ubuntu: apt install {' '.join(missing())}")
    if not ready():
        FOLDER.mkdir(parents=True, exist_ok=True)
        fetch_python()
        fetch_wheels()
        (FOLDER / "complete").touch()
    different = compare(TEXT if "--text" in sys.argv[1:] else KERNELS)
    sys.exit("\n".join(["not the same as on this machine:", *different]) if different else None)


if __name__ == "__main__":
    main()
