"""The instruction sets that the C extension is compiled for: one module each, from the same sources.

The one table of them. `setup.py` runs this file to build them, before anything is installed, so it imports nothing but
Python's own; `extension.py` picks one of them when it is imported.
"""

from __future__ import annotations

import platform
from collections.abc import Collection
from typing import NamedTuple

INTERFACE = (
    46  # of the extension; one more where a function of it takes or gives something else, so that none of before runs
)


class Isa(NamedTuple):
    """name: of the set; the module is `module_name`. flags: the compiler's. needs: what a CPU must have to run it, in
    the words of `csrc/features.c`: no flag may allow an instruction that is not among them."""

    name: str
    flags: tuple[str, ...] = ()
    needs: frozenset[str] = frozenset()

    @property
    def module_name(self) -> str:
        return f"draftwing.ops.cpu._{self.name}"


PLAIN = Isa("plain")  # runs on every CPU of its kind, and tells what the one at hand has

_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "lzcnt", "movbe", "popcnt", "sse4_2"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
# Vectors of 64 bytes go through memory. GCC 12 moves them by 16 bytes unless it is told that, as on these CPUs, 32 are
# fast, and what is loaded by 32 then waits for each.
_AVX2 = "-march=x86-64-v3", "-mtune=skylake-avx512"
_WIDE = "-march=x86-64-v4", "-mprefer-vector-width=512", "-mavx512vnni"
_BF16 = *_WIDE, "-mavx512bf16", "-mavx512vbmi"
_DOTPROD = frozenset({"asimddp", "atomics", "asimdrdm", "crc32"})

# From the plainest to the best.
_SETS = {
    "x86_64": (
        PLAIN,
        Isa("avx2", _AVX2, _V3),
        Isa("avx_vnni", (*_AVX2, "-mavxvnni"), _V3 | {"avx_vnni"}),
        Isa("avx512", _WIDE, _V4 | {"avx512_vnni"}),
        # What Zen 4 and Sapphire Rapids share, as far as kernels ask for it. None for AMX: its tiles gained nothing.
        Isa("avx512_bf16", _BF16, _V4 | {"avx512_vnni", "avx512_bf16", "avx512_vbmi"}),
    ),
    "aarch64": (
        PLAIN,
        Isa("dotprod", ("-march=armv8.2-a+dotprod",), _DOTPROD),
        Isa("i8mm", ("-march=armv8.2-a+dotprod+i8mm",), _DOTPROD | {"i8mm"}),
    ),
}
_SETS["AMD64"] = _SETS["x86_64"]
_SETS["arm64"] = _SETS["aarch64"]


def known_sets(machine: str | None = None) -> tuple[Isa, ...]:
    """Returns the sets of a machine (`platform.machine()`; None: this one), from the plainest to the best."""
    return _SETS.get(machine or platform.machine(), (PLAIN,))


def runnable_sets(features: Collection[str], machine: str | None = None) -> tuple[Isa, ...]:
    """Those that a CPU with these features runs, in the same order."""
    return tuple(isa for isa in known_sets(machine) if isa.needs <= frozenset(features))
