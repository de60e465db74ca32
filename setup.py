"""The optional C extension; everything else is in pyproject.toml.

Without a C compiler (or Python's headers) the install goes on without it, and torch does the same work more slowly. It
is compiled for the machine that it is built on, for that is where an install from source runs.
"""

import platform
from pathlib import Path

from setuptools import Extension, setup

CSRC = Path("src/draftwing/ops/cpu/csrc")
native = ["-mcpu=native"] if platform.machine() in ("aarch64", "arm64") else ["-march=native"]


setup(
    ext_modules=[
        Extension(
            "draftwing.ops.cpu._C",
            sorted(str(path) for path in CSRC.glob("*.c")),
            depends=[str(CSRC / "cpu.h")],
            optional=True,
            extra_compile_args=["-O3", "-pthread", "-Wno-psabi", "-Wno-unused-parameter", *native],
            extra_link_args=["-pthread"],
        )
    ]
)
