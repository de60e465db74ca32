"""Rotary position embeddings (Su et al. 2021, arXiv 2104.09864) in the half-rotation layout of Llama checkpoints.

Element i of a head is paired with element i + head_dim / 2, and the pair is turned by position * inv_freq[i].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base and how the inverse frequencies are scaled.

    divisors: one factor per inverse frequency (head_dim / 2 of them) that it is divided by; a GGUF file stores the
    llama3 scaling in this form.
    """

    theta: float = 10000.0
    kind: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    divisors: tuple[float, ...] = ()


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim / 2] float32 on the CPU: radians per position of each pair.

    The llama3 rule keeps short wavelengths, divides long ones by `factor` and interpolates between
    `original_max_positions / high_freq_factor` and `original_max_positions / low_freq_factor`.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    freq = 1.0 / config.theta**exponent  # [head_dim / 2]
    if config.kind == "linear":
        freq = freq / config.factor
    elif config.kind == "llama3":
        turns = config.original_max_positions * freq / (2 * math.pi)  # full turns within the original context
        keep = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
        keep = keep.clamp(0.0, 1.0)
        freq = keep * freq + (1.0 - keep) * freq / config.factor
    if config.divisors:
        freq = freq / torch.tensor(config.divisors, dtype=torch.float32, device="cpu")
    return freq


def rope_table(
    config: RopeConfig, head_dim: int, positions: int, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """[positions, 2, head_dim]: the factors that `rotate` takes, computed in float32 and stored in `dtype`."""
    freq = inverse_frequencies(config, head_dim)
    angle = torch.arange(positions, dtype=torch.float32, device="cpu")[:, None] * freq  # [positions, head_dim / 2]
    cos, sin = angle.cos(), angle.sin()
    # The sign of the half-rotation is folded into the sine, so that `rotate` needs a roll instead of a negation.
    table = torch.cat((cos, cos, -sin, sin), -1).view(positions, 2, head_dim)
    return table.to(device, dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [M, heads, head_dim]; cos, sin [M, 1, head_dim] from `rope_table`, the sine with its sign. Out of place."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
