"""Builds llama.cpp for `llama_cpp.py`, from the source package of llama-cpp-python, which has it whole."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

VERSION = "0.3.36"  # of llama-cpp-python: a fixed one, so that figures of two days compare
CACHE = Path("~/.cache/draftwing/llama.cpp").expanduser()
TARGETS = ("llama-server", "llama-bench", "llama-perplexity")
OPTIONS = (
    "CMAKE_BUILD_TYPE=Release", "CMAKE_BUILD_RPATH_USE_ORIGIN=ON", "LLAMA_OPENSSL=OFF", "LLAMA_BUILD_TESTS=OFF",
    "LLAMA_BUILD_UI=OFF", "LLAMA_USE_PREBUILT_UI=OFF", "LLAMA_BUILD_APP=OFF",
)  # fmt: skip
HAS = ("SSE42", "AVX", "AVX2", "FMA", "F16C", "BMI2")
LACKS = ("AVX_VNNI", "AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16")
ISAS = {
    "native": ("GGML_NATIVE=ON",),
    # Each by name: their defaults are what the tree was first made with.
    # As `native`, without AMX, which some virtual machines name and do not have, and without AVX-VNNI, which AVX-512
    # makes needless and Zen 4 lacks.
    "avx512": ("GGML_NATIVE=OFF", *(f"GGML_{name}=ON" for name in (*HAS, *LACKS[1:])), "GGML_AVX_VNNI=OFF"),
    "avx2": ("GGML_NATIVE=OFF", *(f"GGML_{name}=ON" for name in HAS), *(f"GGML_{name}=OFF" for name in LACKS)),
}


def build(isa: str, folder: Path = CACHE) -> Path:
    """The folder of llama.cpp's programs for the instruction set `isa`, built if they are not there: minutes.

    Only one library depends on the instruction set, so all sets share a build tree, and `folder` keeps a copy of the
    programs for each. It needs a C++ compiler and Python's package index. Raises subprocess.CalledProcessError.
    """
    programs = folder / VERSION / isa
    if not programs.exists():
        tools, tree = _tools(folder), folder / VERSION / "build"
        environ = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
        options = [f"-D{option}" for option in (*OPTIONS, *ISAS[isa])]
        run([tools / "cmake", "-S", _source(folder), "-B", tree, "-G", "Ninja", *options], environ)
        run([tools / "cmake", "--build", tree, "-j", os.cpu_count() or 1, "--target", *TARGETS], environ)
        half = programs.with_suffix(".half")
        shutil.rmtree(half, ignore_errors=True)
        shutil.copytree(tree / "bin", half, symlinks=True)
        half.rename(programs)
    return programs


def run(command: list[object], environ: dict[str, str] | None = None) -> None:
    """Runs a command whose output goes to standard error, where it does not mix with results."""
    subprocess.run([str(word) for word in command], env=environ, stdout=sys.stderr, check=True)


def _tools(folder: Path) -> Path:
    """The programs of an environment with cmake, ninja and what makes the metadata of the source package."""
    place = folder / "tools"
    if not (place / "bin" / "ninja").exists():
        venv.create(place, with_pip=True)
        packages = ("cmake", "ninja", "scikit-build-core")
        run([place / "bin" / "python", "-m", "pip", "install", "-q", *packages])
    return place / "bin"


def _source(folder: Path) -> Path:
    tree = folder / VERSION / f"llama_cpp_python-{VERSION}" / "vendor" / "llama.cpp"
    if not tree.exists():
        pip = [_tools(folder) / "python", "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation"]
        target = folder / VERSION
        run([*pip, "--no-binary", ":all:", "-d", target, f"llama-cpp-python=={VERSION}"])
        with tarfile.open(target / f"llama_cpp_python-{VERSION}.tar.gz") as archive:
            archive.extractall(target, filter="data")
    return tree
