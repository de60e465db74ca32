"""The weight formats that are served."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from draftwing.layers.linear_ops.base import WeightFormat
from draftwing.layers.linear_ops.dense import DenseFormat

DENSE = DenseFormat()

# `quant_method` of a checkpoint's `quantization_config` -> the format that it describes; raises CheckpointError for
# settings that are not served. A new format is a line here.
FORMATS: dict[str, Callable[[Mapping[str, Any]], WeightFormat]] = {}
