"""The weight formats that are served."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from draftwing.layers.linear_ops.base import WeightFormat
from draftwing.layers.linear_ops.dense import DenseFormat

DENSE = DenseFormat()


def blocks_or_dense(form: WeightFormat) -> WeightFormat:
    """Returns the format of matrices that are small, or multiplied head by head, where that of others is `form`: blocks
    as these, or dense."""
    return form if form.takes_blocks else DENSE


# `quant_method` of a checkpoint's `quantization_config` -> the format that it describes; raises CheckpointError for
# settings that are not served. A new format is a line here.
FORMATS: dict[str, Callable[[Mapping[str, Any]], WeightFormat]] = {}
