"""`TorchOps`: every operation in torch. The device's own classes derive from it and override what they have."""

from __future__ import annotations

import torch

from draftwing.ops.torch.layer_ops import LayerOps


class TorchOps(LayerOps):
    """The operations of one device, made once; see docs/architecture.md."""

    name = "torch"

    def __init__(self, device: torch.device) -> None:
        self.device = device
