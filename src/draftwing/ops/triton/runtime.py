"""A GPU with Triton's kernels and those of CUDA, or the meta device, where kernels to compile are found."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from draftwing.ops.attention.triton_decode import partial_bytes
from draftwing.ops.cuda import host_rows
from draftwing.ops.peer_sums import triton as peers
from draftwing.ops.peer_sums.memory import Exchange, NoPeers
from draftwing.ops.runtime import PeerSums, Runtime
from draftwing.ops.triton.common import launch_options
from draftwing.ops.triton.hashes import hash_all
from draftwing.ops.upload import even

_FP8 = (8, 9)  # compute capability from which on Triton reads float8_e4m3fn


class TritonRuntime(Runtime):
    """Made on CUDA from compute capability 8.0 on, and on the meta device (`engine.startup.precompile`)."""

    name = "triton"
    reads_half_pool_in_fp32 = False
    batch_invariant = True
    exact_by_design = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.compute_capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        self.attention_bytes = 2 * partial_bytes(device)
        self.reads_fp8_pool = (self.compute_capability or _FP8) >= _FP8

    def peer_sums(self, rank: int, ranks: int, exchange: Exchange) -> PeerSums | str:
        try:
            return peers.PeerSums(rank, ranks, exchange, self.device)
        except NoPeers as error:
            return str(error)

    def host_matrix(self, rows: Callable[[Tensor], Tensor], count: int, ranks: int, alike: int) -> Tensor | None:
        return host_rows.host_matrix(rows, count, self.device, ranks, alike) if self.device.type == "cuda" else None

    def round_up_rows(self, count: int) -> int:
        return even(count)

    def empty_cache(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def probe_device(self) -> None:
        launch_options(self.device)

    def hash_kernels(self) -> None:
        hash_all()
