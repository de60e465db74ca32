"""Memory that begins as zeros and is taken from the system as it is written."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def zeros_as_written(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns zeros that, on the CPU, take memory only as it is written (numpy asks the system for zeroed pages), begin
    with a cache line, and have one behind their end: kernels read whole vectors."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = torch.from_numpy(np.zeros(size + 127, np.uint8))
    first = -memory.data_ptr() % 64
    return memory[first : first + size].view(dtype).view(shape)
