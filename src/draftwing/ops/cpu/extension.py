"""The C extension, where the install could build it; DRAFTWING_NATIVE=0 leaves it out."""

from __future__ import annotations

import functools
import importlib
import os

from draftwing.ops.cpu.tape import Notable


@functools.cache
def load_extension() -> Notable | None:
    """The module `_C`, described in the C files; None where it was not built or is not wanted."""
    if os.environ.get("DRAFTWING_NATIVE") == "0":
        return None
    try:
        import torch  # noqa: F401 (before it: the extension looks for torch's threads)

        return Notable(importlib.import_module("draftwing.ops.cpu._C"))
    except ImportError:
        return None
