"""The C extension, where the install could build it, for the best instruction set that this CPU runs.

DRAFTWING_CPU_ISA names another set of `isa.py`; DRAFTWING_NATIVE=0 leaves the extension out.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
from types import ModuleType

import torch  # before the extension, which looks for torch's threads

from draftwing.errors import ConfigError
from draftwing.ops.cpu.isa import INTERFACE, PLAIN, Isa, known_sets, runnable_sets
from draftwing.ops.cpu.tape import Notable

logger = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float32)  # of values that the kernels compute with
MAX_TOPK = 16  # candidates or tokens of a row that the kernels for sampling and drafts find


@functools.cache
def load_extension() -> Notable | None:
    """Returns the module of `chosen_isa`, described in the C files; None where none was built or is wanted.
    Raises ConfigError for one of other sources."""
    isa = chosen_isa()
    if isa is None:
        if os.environ.get("DRAFTWING_NATIVE") != "0":
            logger.warning(
                "the C extension was not built, so torch does its work on the CPU, several times slower: install "
                "draftwing from a wheel, or again where a C compiler and Python's headers are"
            )
        return None
    return Notable(checked(importlib.import_module(isa.module_name)))


def checked(module: ModuleType) -> ModuleType:
    """Returns the module. Raises ConfigError where it was built from sources that this Python code does not go with."""
    found = getattr(module, "interface", 0)
    if found != INTERFACE:
        raise ConfigError(
            f"{module.__name__}: expected the C extension with interface {INTERFACE}, found {found}; build it again "
            "(pip install . or, in a checkout, python setup.py build_ext --inplace --force)"
        )
    return module


@functools.cache
def chosen_isa() -> Isa | None:
    """Returns the set that kernels run with: the one that DRAFTWING_CPU_ISA names, or the best that was built and that
    this CPU runs. None where none is there or wanted. Raises ConfigError for a name that cannot be had."""
    if os.environ.get("DRAFTWING_NATIVE") == "0":
        return None
    usable = usable_sets()
    name = os.environ.get("DRAFTWING_CPU_ISA")
    if not name:
        return usable[-1] if usable else None
    for isa in usable:
        if isa.name == name:
            return isa
    raise ConfigError(
        f"DRAFTWING_CPU_ISA: expected an instruction set that is built and that this CPU runs, found {name!r}. "
        f"Known: {_names(known_sets())}. Built: {_names(built_sets())}. Built and run by this CPU: {_names(usable)}"
    )


@functools.cache
def usable_sets() -> tuple[Isa, ...]:
    """Returns the sets that were built and that this CPU runs, from the plainest to the best. `plain` shows what the
    CPU has: if it is missing, there are none."""
    built = built_sets()
    if PLAIN not in built:
        return ()
    try:
        features = importlib.import_module(PLAIN.module_name).cpu_features()
    except ImportError:  # of another Python, or another libc
        return ()
    return tuple(isa for isa in runnable_sets(features) if isa in built)


def built_sets() -> tuple[Isa, ...]:
    """Returns the sets that were built, from the plainest to the best."""
    return tuple(isa for isa in known_sets() if importlib.util.find_spec(isa.module_name))


def _names(sets: tuple[Isa, ...]) -> str:
    return ", ".join(isa.name for isa in sets) or "none"
