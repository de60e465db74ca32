"""--enable-torch-compile: torch.compile for the forward passes of target and draft, attention left out.

Large forward passes are not worth the compiler's time: products and attention are all of their cost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from draftwing.models.decoder import DecoderModel
from draftwing.models.heads.base import DraftHead
from draftwing.ops.attention import Attend
from draftwing.ops.torch.ops import TorchOps

PARTS = tuple(name for name in vars(Attend) if callable(getattr(Attend, name)) and not name.startswith("_"))


class Opaque(Attend):
    """Attention, and what else layers keep, that the compiler does not look into."""

    def __init__(self, attend: Attend) -> None:
        # Not as a decorator: it imports the whole compiler, which takes a second.
        self._attend = torch.compiler.disable(attend)
        self.norms_heads = attend.norms_heads
        for part in PARTS:
            setattr(self, part, torch.compiler.disable(getattr(attend, part)))

    def __call__(self, *args: Any) -> Tensor:
        return self._attend(*args)


def compile_forwards(
    model: DecoderModel, head: DraftHead | None, max_tokens: int, ops: TorchOps, backend: str = "inductor"
) -> None:
    """Compiles forward passes of up to `max_tokens` tokens. Every layer is the same code to the compiler, and sizes
    are variables of it, so it works for a few times only, when graphs are captured."""
    for module in (model, head):
        for parameter in module.parameters() if isinstance(module, nn.Module) else ():
            torch._dynamo.mark_static(parameter)  # a kernel's tiles follow from the sizes of weights
    ops.probe_device()
    setattr(model, "forward", _limited(model.forward, max_tokens, backend))  # noqa: B010
    if head is not None:
        setattr(head, head.forward_name, _limited(getattr(head, head.forward_name), max_tokens, backend))


def _limited(forward: Callable[..., Any], max_tokens: int, backend: str) -> Callable[..., Any]:
    compiled = torch.compile(forward, dynamic=True, backend=backend)

    def run(ids: Tensor, *args: Any) -> Any:
        if ids.shape[0] > max_tokens:
            return forward(ids, *args)
        with torch._dynamo.config.patch(suppress_errors=True):  # what it cannot compile runs as it is, with a warning
            return compiled(ids, *(Opaque(arg) if isinstance(arg, Attend) else arg for arg in args))

    return run
