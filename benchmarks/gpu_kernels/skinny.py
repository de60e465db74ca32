"""Products of few rows: gemm.cu against cuBLAS, alone and as the chain of a model's layers.

    python benchmarks/gpu_kernels/skinny.py

A chain is 32 layers of the 8B Llama shape without attention: norm, q.k.v, a copy in attention's place, o + residual,
norm, gate.up with silu, down + residual, in one CUDA graph, over the weights of 8 different layers. With programmatic
dependent launch a product begins to read its weights before the kernel in front of it has finished.
"""

from __future__ import annotations

import re
import sys

import torch
import torch.nn.functional as F
from timing import read_rate, replay_us
from torch import Tensor

HIDDEN, FFN, QKV, VOCAB = 4096, 14336, 6144, 128256
LAYERS, DISTINCT = 32, 8


def weights() -> list[dict[str, Tensor]]:
    shapes = {"qkv": (QKV, HIDDEN), "o": (HIDDEN, HIDDEN), "gate_up": (2 * FFN, HIDDEN), "down": (HIDDEN, FFN)}

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").mul_(0.02).bfloat16()

    return [{name: random(*shape) for name, shape in shapes.items()} for _ in range(DISTINCT)]


def bench() -> list[tuple[str, float]]:
    """(what, microseconds): every product alone and the chain, for 1 to 64 rows."""
    from draftwing.ops.gemm.cuda import small_m_gemm
    from draftwing.ops.norms.triton import rms_norm

    device = torch.device("cuda", torch.cuda.current_device())
    ours, layers = small_m_gemm(device, torch.bfloat16), weights()
    head = torch.randn(VOCAB, HIDDEN, device="cuda").mul_(0.02).bfloat16()
    norm = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)
    results = []
    for rows in (1, 4, 8, 16, 32, 64):
        x = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
        wide = torch.randn(rows, FFN, device="cuda").bfloat16()
        alone = {
            "qkv": (lambda w, x=x: ours.linear(x, w, None), x),
            "o": (lambda w, x=x: ours.linear(x, w, None, x), x),
            "gate_up": (lambda w, x=x: ours.gated(x, w, None), x),
            "down": (lambda w, x=x, wide=wide: ours.linear(wide, w, None, x), wide),
        }
        for name, (product, of) in alone.items():
            every = [layer[name] for layer in layers]
            bound = every[0].nbytes / read_rate()
            for label, fn in (("skinny", product), ("cuBLAS", lambda w, of=of: torch.mm(of, w.T))):
                took = replay_us(lambda fn=fn, every=every: [fn(w) for w in every]) / DISTINCT
                results.append((f"{rows} rows, {name}, {label} (floor {bound:.1f})", took))
        results.append((f"{rows} rows, lm_head, skinny", replay_us(lambda x=x: ours.linear(x, head, None))))
        results.append((f"{rows} rows, lm_head, cuBLAS", replay_us(lambda x=x: torch.mm(x, head.T))))

        def chain(x: Tensor = x) -> None:
            for i in range(LAYERS):
                w = layers[i % DISTINCT]
                qkv = ours.linear(rms_norm(x, norm, 1e-5), w["qkv"], None)
                y = ours.linear(qkv[:, :HIDDEN].contiguous(), w["o"], None, x)
                x = ours.linear(ours.gated(rms_norm(y, norm, 1e-5), w["gate_up"], None), w["down"], None, y)

        def plain(x: Tensor = x) -> None:
            for i in range(LAYERS):
                w = layers[i % DISTINCT]
                qkv = F.linear(F.rms_norm(x, (HIDDEN,), norm, 1e-5), w["qkv"])
                x = x + F.linear(qkv[:, :HIDDEN], w["o"])
                gate, up = F.linear(F.rms_norm(x, (HIDDEN,), norm, 1e-5), w["gate_up"]).chunk(2, -1)
                x = x + F.linear(F.silu(gate) * up, w["down"])

        bound = LAYERS * sum(w.nbytes for w in layers[0].values()) / read_rate()
        results.append((f"{rows} rows, chain of {LAYERS} layers, skinny (floor {bound:.0f})", replay_us(chain)))
        results.append((f"{rows} rows, chain of {LAYERS} layers, cuBLAS and torch", replay_us(plain)))
    return results


VARIANTS: dict[str, tuple[tuple[str, str], ...]] = {  # what is replaced in what ops/gemm/cuda.py compiles
    "as it is": (),
    "weights behind the wait (.nc)": (("ld.global.L1::no_allocate", "ld.global.nc.L1::no_allocate"),),
    "8 rows: 1 ahead, 3 blocks": ((r"(_8, 256, )2(, 1, gemm, 1, 2, )2, 2,", r"\g<1>3\g<2>1, 1,"),),
    "8 rows: 3 ahead, 1 block": ((r"(_8, 256, )2(, 1, gemm, 1, 2, )2, 2,", r"\g<1>1\g<2>3, 3,"),),
    "16 rows: 2 of x ahead, 2 blocks": ((r"(_16, 256, )3(, 1, gemm, 2, 1, )2, 1,", r"\g<1>2\g<2>2, 2,"),),
    "16 rows: 4 ahead, 2 blocks": ((r"(_16, 256, )3(, 1, gemm, 2, 1, )2, 1,", r"\g<1>2\g<2>4, 2,"),),
    "32 rows: q.k.v 2 ahead, 1 block": ((r"(plain_32, 256, )2(, 1, gemm, 4, 2, )1,", r"\g<1>1\g<2>2,"),),
}


def variants() -> list[tuple[str, float]]:
    """Microseconds of the chain of layers, by variant of the kernels."""
    from draftwing.ops.gemm.cuda import SmallMGemm, read_source, shapes_for
    from draftwing.ops.norms.triton import add_rms_norm, rms_norm

    device, results, every = torch.device("cuda", torch.cuda.current_device()), [], weights()
    norm = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)
    for name, changes in VARIANTS.items():
        source = read_source(shapes_for(torch.cuda.get_device_capability(device)))
        for old, new in changes:
            changed = re.sub(old, new, source)
            assert changed != source, f"{old} is not in the source"
            source = changed
        ours = SmallMGemm(device, torch.bfloat16, source)
        for rows in (1, 8, 16, 32):
            start = torch.randn(rows, HIDDEN, device="cuda").bfloat16()

            def chain(start: Tensor = start, ours: SmallMGemm = ours) -> None:
                x = start
                for i in range(LAYERS):
                    w = every[i % DISTINCT]
                    qkv = ours.linear(rms_norm(x, norm, 1e-5), w["qkv"], None)
                    o = ours.linear(qkv[:, :HIDDEN].contiguous(), w["o"], None)
                    y, normed = add_rms_norm(x, o, norm, 1e-5)
                    x = ours.linear(ours.gated(normed, w["gate_up"], None), w["down"], None, y)

            results.append((f"{rows} rows, chain of {LAYERS} layers, {name}", replay_us(chain)))
    return results


if __name__ == "__main__":
    for what, took in variants() if "variants" in sys.argv else bench():
        print(f"{what:60s} {took:9.1f} us")
