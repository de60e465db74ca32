"""What adapters add, in C: ops/cpu/csrc/adapters.c. A row has the same bits in any batch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from draftwing.ops.adapters.spec import AdapterOps, AdapterWeights
from draftwing.ops.cpu.arguments import addresses, with_rows
from draftwing.ops.cpu.extension import DTYPES, load_extension
from draftwing.ops.cpu.runtime import InC

_DOWN, _UP = 1, 2
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}  # of factors, as C numbers them
_Q8_0 = 8  # GGML's number
_BLOCK = 32  # inputs with a scale of their own
_PANEL = 16  # outputs, and factors, that lie together
_UP_BYTES = _PANEL * _PANEL + 2 * _PANEL
_LARGEST = 1024.0  # near which the largest value of a slice's factors is brought: float16 has scales for 2**-24 of it


class RoundedWeights(AdapterWeights):
    """Factors in 8 bits: whole numbers up to 127, and a scale for each 32 inputs of a row of `down`, and for each 16
    factors of an output of `up`. Of a value that is at most 1/254 of the largest beside it, or half of what float16
    makes of their scale; `adapters_8.c` has how they lie."""

    @classmethod
    def of_blocks(cls, slots: int, rank: int, inputs: int, ends: list[int]) -> RoundedWeights:
        """Returns weights of slots that add nothing."""
        slices, blocks = len(ends), -(-rank // _PANEL)
        size: int = load_extension().panel_bytes(_Q8_0, inputs)  # type: ignore[union-attr]
        return cls(
            torch.zeros(slots, slices, blocks, size, dtype=torch.uint8),
            torch.zeros(slots, ends[-1] // _PANEL, blocks, _UP_BYTES, dtype=torch.uint8),
            torch.zeros(slots, slices, dtype=torch.int64),
            torch.zeros(slots, slices, dtype=torch.float32),
            torch.tensor(ends),
            (0, *ends),
        )

    @property
    def inputs(self) -> int:
        return self.down.shape[3] // (_PANEL * _BLOCK + 2 * _PANEL) * _BLOCK

    @property
    def rank(self) -> int:
        return _PANEL * self.down.shape[2]

    def set(self, slot: int, place: int, down: Tensor, up: Tensor, scale: float) -> None:
        """Fills a slice of a slot with what is nearest to the factors."""
        rank, begin, end = len(down), *self.bounds[place : place + 2]
        down, up = down.float(), up.float()
        times = _power_for(down), _power_for(up)
        blocks = -(-rank // _PANEL)
        wide = torch.zeros(_PANEL * blocks, self.inputs)
        wide[:rank] = down * times[0]
        raw = load_extension()
        assert raw is not None
        stored = torch.empty(len(wide), self.inputs // _BLOCK * 34, dtype=torch.uint8)
        raw.block_quantize(stored, wide, _Q8_0, wide.numel() // _BLOCK, 0)
        raw.block_pack(self.down[slot - 1, place], stored, _Q8_0, len(wide), self.inputs, 0)
        wide = torch.zeros(end - begin, _PANEL * blocks)
        wide[:, :rank] = up * times[1]
        self.up[slot - 1, begin // _PANEL : end // _PANEL, :blocks] = _packed_up(wide)
        self.ranks[slot - 1, place] = rank
        most = torch.finfo(torch.float32).max  # of factors that no sum is finite with
        self.scales[slot - 1, place] = min(most, max(-most, scale / (times[0] * times[1])))


def _power_for(factors: Tensor) -> float:
    """Returns the power of 2 that brings their largest value near `_LARGEST`; of none that is below 2**-90."""
    most = max(float(factors.abs().max()), 2.0**-90)
    return 2.0 ** (math.frexp(_LARGEST)[1] - math.frexp(most)[1])


def _packed_up(up: Tensor) -> Tensor:
    """up [outputs, factors], multiples of 16 -> [outputs / 16, factors / 16, bytes]"""
    each = up.unflatten(0, (-1, _PANEL)).unflatten(2, (-1, _PANEL)).transpose(1, 2)  # [.., outputs, factors]
    scales = (each.abs().amax(3) / 127).half()
    inverse = torch.where(scales == 0, 0, 1 / scales.float())
    whole = (each * inverse.unsqueeze(3)).round().clamp(-127, 127) + 128
    groups = whole.to(torch.uint8).unflatten(3, (-1, 4)).transpose(2, 3)  # by 4 factors, outputs beside each other
    return torch.cat([groups.flatten(2), scales.contiguous().view(torch.uint8)], 2)


class CpuAdapterOps(InC, AdapterOps):
    """Takes real tensors in float32 or bfloat16; others go to torch."""

    def empty_adapters(
        self, slots: int, rank: int, inputs: int, ends: list[int], dtype: torch.dtype, device: torch.device,
        in_blocks: bool,
    ) -> AdapterWeights:  # fmt: skip
        fits = inputs % _BLOCK == 0 and all(end % _PANEL == 0 for end in ends)
        if in_blocks and fits and dtype in DTYPES and device.type == "cpu":
            return RoundedWeights.of_blocks(slots, rank, inputs, ends)
        return super().empty_adapters(slots, rank, inputs, ends, dtype, device, in_blocks)

    def adapt(self, y: Tensor, x: Tensor, weights: AdapterWeights, slots: Tensor, plan: Tensor | None = None) -> None:
        if not _takes(y, x, weights):
            super().adapt(y, x, weights, slots)
            return
        between = x.new_empty(len(x) * _floats(weights), dtype=torch.float32)
        self._call(y, x, weights, slots, between, _DOWN | _UP)

    def adapter_down(self, x: Tensor, weights: AdapterWeights, slots: Tensor, plan: Tensor | None = None) -> Tensor:
        if not _takes(x, x, weights):
            return super().adapter_down(x, weights, slots)
        made = torch.zeros(len(x), _floats(weights))  # ranks sum all of it
        self._call(None, x, weights, slots, made, _DOWN)
        return made

    def adapter_up(
        self, y: Tensor, made: Tensor, weights: AdapterWeights, slots: Tensor, plan: Tensor | None = None
    ) -> None:
        if not _takes(y, y, weights) or made.dtype != torch.float32:
            super().adapter_up(y, made, weights, slots)
            return
        self._call(y, None, weights, slots, made.contiguous(), _UP)

    def _call(
        self, y: Tensor | None, x: Tensor | None, weights: AdapterWeights, slots: Tensor, between: Tensor, parts: int
    ) -> None:
        x = None if x is None else with_rows(x)
        assert y is None or y.stride(1) == 1
        some = y if x is None else x
        assert some is not None and slots.is_contiguous() and len(slots) == len(some)
        spare = between.new_empty(len(some) * _rounded(weights), dtype=torch.uint8)
        self.raw.adapters(
            y, 0 if y is None else y.stride(0), x, 0 if x is None else x.stride(0), slots, len(some),
            some.dtype == torch.bfloat16, between, parts, self.workers.address, spare, *_numbers(weights),
        )  # fmt: skip


def _floats(weights: AdapterWeights) -> int:
    """Returns how many lie between the products, of a row."""
    return weights.down.shape[1] * weights.rank


def _rounded(weights: AdapterWeights) -> int:
    """Returns bytes of a row in 8 bits, of x and between the products: C's `adapter_bytes` and `rounded_size`."""
    if weights.down.dtype != torch.uint8:
        return 0
    return 2 * _floats(weights) + weights.inputs + weights.inputs // _BLOCK * 20


def _numbers(weights: AdapterWeights) -> tuple[int, ...]:
    """Returns what C is told of a matrix (`adapted_of`)."""
    kind = _TYPES[weights.down.dtype]
    return *addresses(weights[:5]), weights.down.shape[1], weights.rank, kind, weights.inputs, weights.outputs


def numbers_of_adapters(weights: AdapterWeights) -> Tensor:
    """Returns the same where C reads it."""
    return torch.tensor(_numbers(weights))


def takes(dtype: torch.dtype, weights: AdapterWeights) -> bool:
    """Returns whether C does for rows of this type: those in bfloat16 have no factors in float32."""
    known = dtype in DTYPES and weights.down.dtype in _TYPES
    return known and (weights.down.dtype != torch.float32 or dtype == torch.float32)


def _takes(y: Tensor, x: Tensor, weights: AdapterWeights) -> bool:
    return x.dtype == y.dtype and takes(y.dtype, weights)
