"""The optional C extension; everything else is in pyproject.toml.

The same sources are compiled once for each instruction set of `src/draftwing/ops/cpu/isa.py`, and Python picks one when
it is imported: so a wheel runs on every CPU of its kind. They use Python's stable ABI, so it runs with every Python
from 3.11 on, too. Without a C compiler (or Python's headers) the install goes on without them, and torch does the same
work more slowly; a set that the compiler does not know is left out alone.
DRAFTWING_BUILD_ISA names the sets to build, separated by commas, for those who wait for the compiler often.
"""

import copy
import os
import runpy
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CSRC = Path("src/draftwing/ops/cpu/csrc")
SETS = runpy.run_path("src/draftwing/ops/cpu/isa.py")
INTERFACE = SETS["INTERFACE"]
# A product and a sum are rounded one by one on every CPU, so a row has the same bits whatever the CPU can fuse.
FLAGS = ["-O3", "-ffp-contract=off", "-pthread", "-Wno-psabi", "-Wno-unused-parameter"]
STABLE_ABI = not sysconfig.get_config_var("Py_GIL_DISABLED")  # which a free-threaded Python does not have
LIMITED_API = [("Py_LIMITED_API", "0x030b0000")] if STABLE_ABI else []


class BuildSets(build_ext):
    """Compiles the sets side by side, each in a folder of its own: their object files have the same names."""

    def finalize_options(self):
        super().finalize_options()
        self.parallel = self.parallel or True

    def build_extension(self, ext):
        own = copy.copy(self)
        own.build_temp = str(Path(self.build_temp, ext.name))
        super(BuildSets, own).build_extension(ext)

    def copy_extensions_to_source(self):
        """Removes what was built for one version of Python: it would be imported in place of these."""
        super().copy_extensions_to_source()
        for older in CSRC.parent.glob("_*.cpython-*.so") if STABLE_ABI else ():
            older.unlink()


def wanted_sets():
    known = SETS["known_sets"](sysconfig.get_platform().rpartition("-")[2])  # not of this machine in a cross build
    names = os.environ.get("DRAFTWING_BUILD_ISA")
    wanted = [name.strip() for name in names.split(",")] if names else [isa.name for isa in known]
    if unknown := set(wanted) - {isa.name for isa in known}:
        raise SystemExit(
            f"DRAFTWING_BUILD_ISA: expected some of {', '.join(isa.name for isa in known)}; found {', '.join(unknown)}"
        )
    return [isa for isa in known if isa.name in wanted]


setup(
    cmdclass={"build_ext": BuildSets},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE_ABI else {},
    ext_modules=[
        Extension(
            isa.module_name,
            sorted(str(path) for path in CSRC.glob("*.c")),
            depends=[*sorted(str(path) for path in CSRC.glob("*.h")), "src/draftwing/ops/cpu/isa.py"],
            define_macros=[("ISA", isa.name), ("INTERFACE", str(INTERFACE)), *LIMITED_API],
            libraries=["m"],
            py_limited_api=STABLE_ABI,
            optional=True,
            extra_compile_args=[*FLAGS, *isa.flags],
            extra_link_args=["-pthread"],
        )
        for isa in wanted_sets()
    ],
)
