"""The C extension, where the install could build it; DRAFTWING_NATIVE=0 leaves it out."""

from __future__ import annotations

import functools
import importlib
import os

import torch  # before the extension, which looks for torch's threads

from draftwing.ops.cpu.tape import Notable

DTYPES = (torch.bfloat16, torch.float32)  # of values that the kernels compute with
MOST = 16  # candidates or tokens of a row that the kernels for sampling and drafts find


@functools.cache
def load_extension() -> Notable | None:
    """The module `_C`, described in the C files; None where it was not built or is not wanted."""
    if os.environ.get("DRAFTWING_NATIVE") == "0":
        return None
    try:
        return Notable(importlib.import_module("draftwing.ops.cpu._C"))
    except ImportError:
        return None
