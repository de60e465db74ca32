"""Which parts of the tensors of a quantised matrix are what one rank has of it, so that nothing else is read."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor

from draftwing.models.quantised.config import WHOLE, Scheme
from draftwing.models.quantised.read import SCALES
from draftwing.parallel.cut import Cut
from draftwing.parallel.ranks import Share

# By layout and suffix: the axis that a matrix's rows, and its columns, lie along. `Scheme.scale` is "scale".
_AXES = {
    "awq": {"qweight": (1, 0), "qzeros": (1, 0), "scale": (1, 0)},
    "gptq": {"qweight": (1, 0), "qzeros": (1, 0), "scale": (1, 0)},
    "packed": {"weight_packed": (0, 1), "scale": (0, 1), "weight_zero_point": (0, 1)},
    "plain": {"weight": (0, 1), "scale": (0, 1), "weight_zero_point": (0, 1)},
    "fp4": {"weight_packed": (0, 1), "scale": (0, 1)},
}
# Of rows and of columns: which tensors have codes that lie side by side in words, or bytes, along them.
_WORDS = {
    "awq": ({"qweight", "qzeros"}, set[str]()),
    "gptq": ({"qzeros"}, {"qweight"}),
    "packed": ({"weight_zero_point"}, {"weight_packed"}),
    "plain": (set[str](), set[str]()),
    "fp4": (set[str](), {"weight_packed"}),
}


class SizesCut(Cut):
    """Of a tensor that says how many rows and columns there are: says it of the part."""

    def read(self, name: str, stored: Any) -> Tensor:
        return self.of_tensor(name, stored[:])

    def of_tensor(self, name: str, value: Tensor) -> Tensor:
        value = value.clone()
        if value.shape == (2,):
            self._check(name, value.tolist())
            value[self.axis] = self.share.size
        return value


class DenseCut(Cut):
    """Of a matrix that is not quantised after all; of one that is, all comes."""

    def read(self, name: str, stored: Any) -> Tensor:
        whole: Tensor = (
            stored[:] if stored.get_dtype() not in ("BF16", "F16", "F32", "F64") else super().read(name, stored)
        )
        return whole

    def of_tensor(self, name: str, value: Tensor) -> Tensor:
        dense = value.is_floating_point() and value.itemsize > 1
        return super().of_tensor(name, value) if dense else value


@cache
def stored_cuts(scheme: Scheme, cut: Cut) -> dict[str, Cut] | None:
    """Returns by suffix which part of each tensor makes this part of a matrix; others come whole. None where the part
    does not begin and end with a group, or a word: then the matrix is put together first."""
    axes, along = _AXES.get(scheme.layout, {}), cut.axis
    if scheme.parts[0] not in axes or (scheme.act_order and along == 1) or (scheme.tall == WHOLE < scheme.wide):
        return None
    found: dict[str, Cut] = {"weight": cut}  # of a matrix that is not quantised after all
    group = (1 if scheme.layout in ("awq", "gptq") else scheme.tall, scheme.wide)[along]
    for suffix in scheme.parts:
        own = "scale" if suffix == scheme.scale else suffix
        if own == "weight_shape":
            found[suffix] = SizesCut(along, cut.share)
        if own not in axes:
            continue
        unit = 1 if suffix == scheme.parts[0] else group
        if unit == WHOLE:  # of one group, which all have
            continue
        bits, word = 1, 1
        if own in _WORDS[scheme.layout][along]:
            bits, word = (scheme.bits, 32) if scheme.layout != "fp4" else (4, 8)
        part = _part(axes[own][along], cut.share, bits, word * unit)
        if part is None:
            return None
        names = SCALES if suffix in SCALES and scheme.real else (suffix,)
        found |= dict.fromkeys(names, part)
    return found


def _part(axis: int, share: Share, bits: int, word: int) -> Cut | None:
    """Returns the part of an axis on which `word / bits` rows or columns are one."""
    start, size, whole = share
    if start * bits % word or (size * bits % word and start + size < whole):
        return None
    first, end, count = (-(-at * bits // word) for at in (start, start + size, whole))
    return Cut(axis, Share(first, end - first, count))
