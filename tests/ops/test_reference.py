"""What stands in `ops/reference` only serves as a reference where there are kernels."""

from __future__ import annotations

import inspect
import pkgutil

import pytest

from draftwing.ops import reference
from draftwing.ops.cpu.ops import CpuOps
from draftwing.ops.torch.ops import TorchOps


def operations() -> list[type]:
    """The classes of the folder that `TorchOps` is made of."""
    names = [f"{reference.__name__}.{one.name}" for one in pkgutil.iter_modules(reference.__path__)]
    assert len(names) > 5
    return [kind for kind in TorchOps.__mro__ if kind.__module__ in names]


def by_torch(ops: type) -> set[tuple[str, str]]:
    """The operations of the folder that this device leaves to torch."""
    return {
        (ops.__name__, f"{kind.__name__}.{name}")
        for kind in operations()
        for name, own in vars(kind).items()
        if (inspect.isfunction(own) or inspect.isclass(own)) and getattr(ops, name) is own
    }


def test_the_folder_has_the_bookkeeping_of_drafts() -> None:
    assert {kind.__name__ for kind in operations()} == {"TreeOps", "AssignOps", "MergeOps", "NGramOps", "SuffixOps"}
    assert ("TorchOps", "TreeOps.commit") in by_torch(TorchOps)


def test_c_has_all_of_it() -> None:
    assert not by_torch(CpuOps)


def test_triton_has_all_of_it() -> None:
    pytest.importorskip("triton")
    from draftwing.ops.triton.ops import TritonOps

    assert not by_torch(TritonOps)
