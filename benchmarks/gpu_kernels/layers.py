"""Norms, gate and inputs of draft heads at the sizes of an 8B Llama: microseconds per launch inside a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from timing import replayed

HIDDEN, FFN, VOCAB, EPS = 4096, 14336, 128256, 1e-5


def bench() -> list[tuple[str, float]]:
    from draftwing.ops.elementwise import triton as layers
    from draftwing.ops.norms import triton as norms

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda").bfloat16()

    found = []
    weight, table = made(HIDDEN), made(VOCAB, HIDDEN)
    for rows in (1, 16, 32, 64, 512):
        x, delta, gate_up = made(rows, HIDDEN), made(rows, HIDDEN), made(rows, 2 * FFN)
        ids = torch.randint(VOCAB, (rows,), device="cuda")
        down, act = made(HIDDEN, FFN), made(rows, FFN)
        timed: list[tuple[str, Callable[[], object]]] = [
            ("rms_norm", lambda x=x: norms.rms_norm(x, weight, EPS)),
            ("rms_norm, torch", lambda x=x: F.rms_norm(x, (HIDDEN,), weight, EPS)),
            ("add_rms_norm", lambda x=x, delta=delta: norms.add_rms_norm(x, delta, weight, EPS)),
            ("add_rms_norm, torch", lambda x=x, delta=delta: F.rms_norm(x + delta, (HIDDEN,), weight, EPS)),
            ("silu_mul", lambda y=gate_up: layers.silu_mul(y)),
            ("silu_mul, torch", lambda y=gate_up: F.silu(y[:, :FFN]) * y[:, FFN:]),
            ("fuse_inputs", lambda x=x, i=ids: norms.fuse_inputs(i, table, x, (weight, weight), EPS)),
            ("fuse_inputs without norms", lambda x=x, i=ids: norms.fuse_inputs(i, table, x)),
            # Whether the residual of a product is free: in the product, or as an addition behind it.
            ("down + residual in place", lambda x=x, a=act, w=down: x.addmm_(a, w.t())),
            ("down + residual, torch", lambda x=x, a=act, w=down: F.linear(a, w) + x),
            ("down alone", lambda a=act, w=down: F.linear(a, w)),
        ]
        found += [(f"{name}, {rows} rows", replayed(call)) for name, call in timed]
    return found


if __name__ == "__main__":
    for label, micros in bench():
        print(f"{label:40} {micros:8.2f} us")
