"""The optional C extensions; everything else is in pyproject.toml.

Without a C compiler (or Python's headers) the install goes on without it, and torch does the same work more slowly. It
is compiled for the machine that it is built on, for that is where an install from source runs.
"""

import platform

from setuptools import Extension, setup

native = ["-mcpu=native"] if platform.machine() in ("aarch64", "arm64") else ["-march=native"]

setup(
    ext_modules=[
        Extension(
            "draftwing.kernels._cpu",
            [f"src/draftwing/kernels/{name}.c" for name in ("cpu", "cpu_layer", "cpu_product", "cpu_sampling")],
            depends=["src/draftwing/kernels/cpu.h"],
            optional=True,
            extra_compile_args=["-O3", "-pthread", "-Wno-psabi", "-Wno-unused-parameter", *native],
            extra_link_args=["-pthread"],
        ),
        Extension(
            "draftwing.kernels._cpu_tree",
            ["src/draftwing/kernels/cpu_tree.c"],
            depends=["src/draftwing/kernels/cpu.h"],
            optional=True,
            extra_compile_args=["-O3", "-Wno-psabi", "-Wno-unused-parameter", *native],
        ),
        Extension(
            "draftwing.kernels._cpu_ngram",
            ["src/draftwing/kernels/cpu_ngram.c"],
            optional=True,
            extra_compile_args=["-O3", "-Wno-unused-parameter", *native],
        ),
    ]
)
