"""Scripts of the repository that are no part of the package, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def script(path: Path) -> ModuleType:
    """Imports a script under a name of its own."""
    spec = importlib.util.spec_from_file_location(f"script_{path.parent.name}_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses, and other processes, look for themselves
    with pytest.MonkeyPatch.context() as patch:  # scripts of one folder import each other
        patch.syspath_prepend(str(path.parents[1]))
        patch.syspath_prepend(str(path.parent))
        spec.loader.exec_module(module)
    return module
