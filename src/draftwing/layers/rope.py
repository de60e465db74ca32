"""Rotary position embeddings (Su et al. 2021, arXiv 2104.09864) in the half-rotation layout of Llama checkpoints.

Element i of a head is paired with element i + head_dim / 2, and the pair is turned by position * inv_freq[i].
"""

from __future__ import annotations

import decimal
import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from draftwing.ops.rope.spec import rotate as rotate
from draftwing.ops.table import LayerOps

MAX_POSITIONS = 1 << 20  # angles up to this many radians are exact


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base and how the inverse frequencies are scaled.

    divisors: one factor per inverse frequency (head_dim / 2 of them) that it is divided by; a GGUF file stores the
    llama3 scaling in this form.  beta_fast, beta_slow, truncate: of YaRN (`inverse_frequencies`).  attention_factor:
    what cosines and sines of elements that are turned are multiplied with.  dims: elements of a head that are turned,
    paired among themselves as `AttentionConfig.rotary` puts them; 0: all of them.  share: of pairs that are turned, of
    a proportional one; the others are the last of the head's.  long_divisors: of longrope (Ding et al. 2024, arXiv
    2402.13753), in place of `divisors` where the context is longer than `original_max_positions`.  query_beta:
    queries at position p are multiplied with 1 + query_beta * ln(1 + floor((p + query_shift) /
    original_max_positions)); apart: whether what is said of them is that factor alone, not the factors of both.
    sections: pairs that are turned by time, height and width where positions have these three axes (M-RoPE); pairs take
    turns, and those that are left are turned by time.
    """

    theta: float = 10000.0
    kind: Literal["none", "linear", "llama3", "yarn", "proportional", "longrope", "nope"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    divisors: tuple[float, ...] = ()
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    dims: int = 0
    share: float = 1.0
    long_divisors: tuple[float, ...] = ()
    query_beta: float = 0.0
    query_shift: int = 0
    apart: bool = False
    sections: tuple[int, ...] = ()

    def for_context(self, positions: int) -> RopeConfig:
        """Returns that of a context of so many positions."""
        if self.kind == "longrope" and positions > self.original_max_positions:
            return replace(self, divisors=self.long_divisors)
        beyond = positions + self.query_shift > self.original_max_positions
        return self if beyond else replace(self, query_beta=0.0)


NOPE = RopeConfig(kind="nope")  # of layers that turn nothing


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """Returns the factor of queries and keys together that YaRN recommends for a context `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * mscale * _log(factor) + 1.0


def longrope_attention_factor(factor: float, original_max_positions: int) -> float:
    """Returns the same for longrope."""
    return 1.0 if factor <= 1 else math.sqrt(1 + _log(factor) / _log(original_max_positions))


def _log(x: float) -> float:
    """The same bits on every machine, which math.log does not promise."""
    with decimal.localcontext(prec=40):
        return float(decimal.Decimal(x).ln())


def inverse_frequencies(config: RopeConfig, head_dim: int) -> NDArray[np.float32]:
    """Returns [head_dim / 2]: radians per position of each pair, 0 of those that stay; the same bits on every machine.

    The llama3 rule keeps short wavelengths, divides long ones by `factor` and interpolates between
    `original_max_positions / high_freq_factor` and `original_max_positions / low_freq_factor`. YaRN (Peng et al. 2023,
    arXiv 2309.00071) interpolates between the pairs that turn `beta_fast` and `beta_slow` times over the original
    context, by the number of the pair, which `truncate` makes an integer at both ends.
    """
    if 0 < config.dims < head_dim:
        turned = inverse_frequencies(replace(config, dims=0), config.dims)
        return np.pad(turned, (0, (head_dim - config.dims) // 2))
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    with decimal.localcontext(prec=40):
        powers = [float(decimal.Decimal(config.theta) ** decimal.Decimal(float(x))) for x in exponent]
    freq = 1 / np.array(powers, np.float32)  # [head_dim / 2]
    if config.kind in ("linear", "proportional"):
        freq = freq / np.float32(config.factor)
    if config.kind == "nope":
        freq[:] = 0
    if config.kind == "proportional":
        freq[int(config.share * head_dim // 2) :] = 0
    if config.kind == "llama3":
        turns = np.float32(config.original_max_positions) * freq / np.float32(2 * math.pi)
        low, high = np.float32(config.low_freq_factor), np.float32(config.high_freq_factor)
        keep = ((turns - low) / (high - low)).clip(0, 1) if low < high else (turns >= low).astype(np.float32)
        freq = keep * freq + (1 - keep) * freq / np.float32(config.factor)
    elif config.kind == "yarn":
        slowed = _yarn_share(config, head_dim)
        divided = 1 / (np.float32(config.factor) * np.array(powers, np.float32))
        freq = divided * slowed + freq * (1 - slowed)
    if config.divisors:
        freq = freq / np.array(config.divisors, np.float32)
    return np.asarray(freq, np.float32)


def _yarn_share(config: RopeConfig, head_dim: int) -> NDArray[np.float32]:
    """[head_dim / 2]: how much of each pair's frequency is the divided one, from 0 to 1."""

    def pair_of(turns: float) -> float:
        """Returns the pair that turns so often over the original context."""
        return head_dim * _log(config.original_max_positions / (turns * 2 * math.pi)) / (2 * _log(config.theta))

    low, high = pair_of(config.beta_fast), pair_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high += 0.001 if low == high else 0.0
    pair = np.arange(head_dim // 2, dtype=np.float32)
    return np.asarray(((pair - np.float32(low)) / np.float32(high - low)).clip(0, 1), np.float32)


def rope_table(
    config: RopeConfig, head_dim: int, positions: int, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """Returns [positions, 2, head_dim]: the factors that `rotate` takes, of angles in float32, rounded to float32 and
    stored in `dtype`; the same bits on every machine. [positions, 4, head_dim] where some queries have other ones than
    keys, which come first. positions: at most `MAX_POSITIONS`."""
    where = "meta" if torch.device(device).type == "meta" else "cpu"
    table = torch.empty(positions, 4 if config.query_beta else 2, head_dim, dtype=dtype, device=where)
    if table.is_meta:
        return table
    freq, turned = inverse_frequencies(config, head_dim), (config.dims or head_dim) // 2
    for start in range(0, positions, _BLOCK):
        place = np.arange(start, min(start + _BLOCK, positions), dtype=np.int64)[:, None]
        cos, sin = cos_sin(place.astype(np.float32) * freq)
        for part in (cos, sin):
            part[:, :turned] *= np.float32(config.attention_factor)  # others stay as they are
        # The sign of the half-rotation is folded into the sine, so that `rotate` needs a roll instead of a negation.
        block = np.concatenate((cos, cos, -sin, sin), -1).reshape(len(place), 2, head_dim)
        if config.query_beta:
            turns, each = np.unique((place + config.query_shift) // config.original_max_positions, return_inverse=True)
            scales = np.array([1 + config.query_beta * _log(1 + turn) for turn in turns.tolist()], np.float32)
            plain = np.broadcast_to(np.array([[[1], [0]]], np.float32), block.shape) if config.apart else block
            block = np.concatenate((block, plain * scales[each].reshape(-1, 1, 1)), 1)
        table[start : start + len(place)] = torch.from_numpy(block)
    return table.to(device)


class Rope(nn.Module):
    """The table of layers that turn heads of one size by one rotary embedding."""

    table: Tensor  # [positions, 2 or 4, head_dim], in the model's dtype from the start

    def __init__(self, config: RopeConfig, head_dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.head_dim = config, head_dim
        self.register_buffer("table", torch.empty(0, dtype=dtype), persistent=False)
        self._axis = torch.empty(0, dtype=torch.int64)  # [head_dim]: of each element, where positions have three axes

    def make(self, positions: int, dtype: torch.dtype, device: torch.device, context: int = 0) -> None:
        """Makes the table; every position of a later call must be below `positions`. context: that texts have at most,
        0: so many positions."""
        config = self.config.for_context(context or positions)
        self.table = rope_table(config, self.head_dim, positions, dtype, device)
        axis = torch.zeros(self.head_dim // 2, dtype=torch.int64)
        for i, count in enumerate(config.sections[1:], 1):
            axis[i : 3 * count : 3] = i
        self._axis = axis.repeat(2).to(device)

    def forward(self, positions: Tensor, ops: LayerOps) -> tuple[Tensor, Tensor]:
        """positions [M] int64, or [3, M] in three axes -> cos, sin [M, 1, head_dim], or [M, 2, head_dim], of keys and
        of queries"""
        assert self.table.numel(), "call set_max_positions first"
        if positions.dim() == 2:
            return self._of_axes(positions)
        cos, sin = ops.take_rows(self.table, positions).unflatten(1, (-1, 2)).unbind(2)
        return cos, sin

    __call__ = forward  # Module's own call looks for hooks: see RMSNorm

    def _of_axes(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [3, M] -> cos, sin [M, 1, head_dim]: each pair has those of its axis."""
        places = positions.T[:, self._axis]  # [M, head_dim]
        chosen = self.table.gather(0, places.unsqueeze(1).expand(-1, 2, -1))
        return chosen[:, :1], chosen[:, 1:]


_BLOCK = 256  # positions, whose angles stay in a cache
# pi / 2 in three parts: multiples up to 2^20 of the first two are exact in float64 (33 significant bits each).
_HALF_PI = 1.5707963267341256, 6.077100506303966e-11, 2.0222662487959506e-21
_SIN = [(-1.0) ** k / math.factorial(2 * k + 1) for k in range(9)]  # Taylor's series: enough up to pi / 4
_COS = [(-1.0) ** k / math.factorial(2 * k) for k in range(9)]


def cos_sin(angle: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Returns cosine and sine of angles in [0, 2^20] radians, in float64 and rounded to float32.

    torch and numpy have other code for each instruction set, which rounds in other ways; sums and products have one
    result everywhere.
    """
    x = angle.astype(np.float64)
    quarter = np.rint(x * (2 / math.pi))
    for part in _HALF_PI:
        x = x - quarter * part
    square = x * x
    sin, cos = (_horner(series, square) for series in (_SIN, _COS))
    sin *= x
    turn = quarter.astype(np.int64)
    swapped = turn & 1 == 1
    cos, sin = np.where(swapped, sin, cos), np.where(swapped, cos, sin)
    np.negative(cos, out=cos, where=(turn + 1) & 2 == 2)
    np.negative(sin, out=sin, where=turn & 2 == 2)
    return cos.astype(np.float32), sin.astype(np.float32)


def _horner(series: list[float], x: NDArray[np.float64]) -> NDArray[np.float64]:
    total = np.full_like(x, series[-1])
    for factor in reversed(series[:-1]):
        total *= x
        total += factor
    return total
