"""Sums over ranks on several GPUs: by reading the other GPUs' memory, and by NCCL.

    python benchmarks/gpu_kernels/sums.py [--ranks 2] [--sizes 4096,8192] [--rows 1,4,16,64] [--calls N]

Each line is one sum with a residual, from a graph of 100: as the engine takes it (more rows than are read from
other GPUs' memory are one of those by NCCL), with the norm behind it in the same kernel and in its own, of what
NCCL gathers, in shares by NCCL, and NCCL's own. Before, so many sums and norms of changing sizes and values are
compared with those of what NCCL gathers, to the bit. --seconds: after which all processes say where they stand, and
end.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions

from draftwing.engine.devices import pick_device
from draftwing.engine.devices.base import Device
from draftwing.ops.fp8.spec import WIDE, Fp8Rows
from draftwing.parallel.group import Group, Rendezvous, join
from draftwing.parallel.ranks import NextNorm, Ranks

CALLS, TIMES = 100, 5
RUNS: list[Callable[[], None]] = []  # a pool of memory lasts as long as one of its graphs


def all_reduce(group: Group, x: Tensor, residual: Tensor) -> Tensor:
    """NCCL's own, whose order of sums is not known, and without the residual."""
    options = AllreduceOptions()
    options.asyncOp = False
    work = group._group.allreduce([x], options)
    if work is not None:
        work.wait()
    return x


@torch.inference_mode()
def microseconds(device: Device, fn: Callable[[], object]) -> str:
    """Returns what one of many calls takes, or "-" where they fail, which standard error tells then."""

    def many() -> Any:
        for _ in range(CALLS):
            out = fn()
        return out

    try:
        RUNS.append(device.record(many)[0])
        RUNS[-1]()
        return f"{min(device.timed(RUNS[-1], TIMES)) / CALLS * 1e6:.1f}"
    except RuntimeError as error:
        print(f"{fn}: {error}", file=sys.stderr, flush=True)
        return "-"


def parts_of(normed: Tensor | Fp8Rows) -> list[Tensor]:
    if isinstance(normed, Tensor):
        return [normed]
    assert normed.x is not None
    codes, scales = normed.plain()
    return [normed.x, codes.float(), scales]


@torch.inference_mode()
def compare(group: Group, device: Device, calls: int) -> int:
    """-> how many of the sums were other than they should be"""
    wrong = torch.zeros((), dtype=torch.int64, device=device.device)
    generator, same = (torch.Generator(device.device).manual_seed(seed) for seed in (group.rank, 100))
    shapes = [(1, 4096), (64, 8192), (3, 576), (65, 8192), (16, 8192), (300, 8192), (33, 4096), (1024, 8192), (2, 8)]
    ways = group.sum_rows, partial(Ranks.sum_rows, group)
    for call in range(calls):
        x = torch.randn(*shapes[call % len(shapes)], generator=generator, device=device.device).bfloat16()
        residual = torch.full_like(x, call % 7)
        ours, theirs = (way(x, None, residual, device.ops) for way in ways)
        wrong += (ours != theirs).any()
        weight = torch.randn(x.shape[1], generator=same, device=device.device).bfloat16()
        norm = NextNorm(weight, 1e-5, x.shape[1] % WIDE == 0)
        total, under = group.sum_under(norm, x, None, residual, device.ops)
        apart = (device.ops.rms_norm_fp8 if norm.quantises else device.ops.rms_norm)(theirs, weight, norm.eps)
        pairs = [(total, theirs), *zip(parts_of(under), parts_of(apart), strict=True)]
        wrong += torch.stack([(one != other).any() for one, other in pairs]).any()
    return int(wrong)


def work(group: Group, device: Device, args: argparse.Namespace) -> None:
    def say(words: str, end: str = "\n") -> None:
        if group.rank == 0:
            print(words, end=end, flush=True)

    wrong = compare(group, device, args.calls)
    say(group.title)
    found = group.exchange(str(wrong).encode())
    say(f"{args.calls} sums, other than gathered on each rank: {', '.join(one.decode() for one in found)}")
    names = "engine", "and norm", "norm apart", "gathered", "in shares", "all-reduce"
    say(f"{'rows':>5} {'columns':>8}" + "".join(f"{'us ' + name:>14}" for name in names))
    for size in map(int, args.sizes.split(",")):
        for rows in map(int, args.rows.split(",")):
            x = torch.ones(rows, size, dtype=torch.bfloat16, device=device.device)
            residual = torch.zeros_like(x)
            norm = NextNorm(torch.ones_like(x[0]), 1e-5, True)
            ways = (
                partial(group.sum_rows, x, None, residual, device.ops),
                partial(group.sum_under, norm, x, None, residual, device.ops),
                partial(Ranks.sum_under, group, norm, x, None, residual, device.ops),
                partial(Ranks.sum_rows, group, x, None, residual, device.ops),
                partial(group.sum_in_shares, x, None, residual, device.ops),
                partial(all_reduce, group, torch.zeros_like(x), residual),
            )
            say(f"{rows:5} {size:8}", end="")
            for way in ways:
                say(f"{microseconds(device, way):>14}", end="")
            say("")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", default="4096,8192")
    parser.add_argument("--rows", default="1,4,16,64")
    parser.add_argument("--calls", type=int, default=600)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.seconds, exit=True)
    device = pick_device("cuda", args.rank)
    if args.rank:
        work(join(args.port, args.ranks, args.rank, device.device, device.collectives), device, args)
        os._exit(0)  # NCCL would wait for the graphs
    meeting = Rendezvous()
    others = [
        subprocess.Popen([sys.executable, *sys.argv, "--rank", str(rank), "--port", str(meeting.port)])
        for rank in range(1, args.ranks)
    ]
    try:
        work(meeting.join(args.ranks, device.device, device.collectives), device, args)
        for other in others:
            other.wait()
        os._exit(0)
    finally:
        for other in others:
            other.kill()


if __name__ == "__main__":
    main()
