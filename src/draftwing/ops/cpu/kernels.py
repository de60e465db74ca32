"""The C kernels of cpu.c and its neighbours, where the install could build them; DRAFTWING_NATIVE=0 leaves them out.

They take addresses and sizes. Here are the functions that take tensors: real ones (no FakeTensors) on the CPU, values
in float32 or bfloat16, all of one dtype.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from draftwing.ops.cpu.extension import load_extension

if TYPE_CHECKING:
    from draftwing.ops.torch.sampling import SamplingRows

DTYPES = (torch.bfloat16, torch.float32)
MOST = 16  # candidates or tokens of a row that the kernels for sampling and drafts find


class Kernels:
    """`raw` is the extension module; its functions are described in the C files."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    @staticmethod
    def take(tensor: Tensor) -> bool:
        """Whether the kernels work on tensors like this."""
        return tensor.device.type == "cpu" and tensor.dtype in DTYPES

    def draw(
        self,
        logits: Tensor,
        positions: Tensor,
        depth: Tensor,
        params: SamplingRows | None,
        filtered: Tensor,
        count: int,
    ) -> tuple[Tensor, Tensor]:
        """The best candidates of each node for `ops.torch.sampling.sample`, bans aside.

        logits [B, N, V]; positions, depth [B, N] int64; params: fields [B], None where all rows are greedy; filtered
        [Bf] int64: batch indices of the rows with filters; count: at most `MOST` and V. Returns ids [B, N, count]
        int64, in ascending order, and what the noise adds to their logits [B, N, count] float32, -inf where a token
        cannot be chosen. Of equally good tokens those with the lowest ids.
        """
        batch, nodes, vocab = logits.shape
        assert count <= min(MOST, vocab) and positions.dtype == depth.dtype == torch.int64
        read = [logits.contiguous(), positions.contiguous(), depth.contiguous()]
        fields = [0] * 6  # seed, temperature, filtered, top_k, top_p, min_p
        threads, scratch = torch.get_num_threads(), torch.empty(0, dtype=torch.int32)
        if params is not None:
            chosen = [params.seed, params.temperature]
            if filtered.shape[0]:
                chosen.append(torch.zeros_like(params.seed).index_fill_(0, filtered, 1))
                chosen += [params.top_k, params.top_p, params.min_p]
                scratch = torch.empty(threads, 2, vocab + 15, dtype=torch.int32)
            own = [field.contiguous() for field in chosen]
            read += own
            fields[: len(own)] = [field.data_ptr() for field in own]
        ids = torch.empty(batch, nodes, count, dtype=torch.int64)
        noise = torch.empty(batch, nodes, count, dtype=torch.float32)
        self.raw.draw(
            ids.data_ptr(), noise.data_ptr(), count, read[0].data_ptr(), logits.dtype == torch.bfloat16,
            batch * nodes, nodes, vocab, read[1].data_ptr(), read[2].data_ptr(), *fields, scratch.data_ptr(), threads,
        )  # fmt: skip
        return ids, noise

    def heaviest(self, ids: Tensor, noise: Tensor, logits: Tensor) -> Tensor:
        """ids [B, N, K] int64, noise, logits [B, N, K] float32 -> of each node the id with the largest noise + logit,
        the first of equals, [B, N]. In torch it is five operations, all of which start slowly."""
        batch, nodes, count = ids.shape
        assert ids.dtype == torch.int64 and noise.dtype == logits.dtype == torch.float32
        assert noise.shape == logits.shape == ids.shape and count
        ids, noise, logits = ids.contiguous(), noise.contiguous(), logits.contiguous()
        tokens = ids.new_empty(batch, nodes)
        self.raw.heaviest(tokens.data_ptr(), ids.data_ptr(), noise.data_ptr(), logits.data_ptr(), batch * nodes, count)
        return tokens

    def gumbel(self, seed: Tensor, position: Tensor, token_ids: Tensor | None, size: int) -> Tensor:
        """`ops.torch.noise.gumbel_at`; token_ids None: 0 .. size - 1. Returns [B, P, size] float32."""
        batch, nodes = position.shape
        assert seed.dtype == position.dtype == torch.int64
        seed, position = seed.contiguous(), position.contiguous()
        stride = 0
        if token_ids is not None:
            token_ids = token_ids.to(torch.int32)
            if token_ids.dim() > 1:
                token_ids, stride = token_ids.expand(batch, nodes, size), size
            token_ids = token_ids.contiguous()
        out = torch.empty(batch, nodes, size, dtype=torch.float32)
        self.raw.gumbel(
            out.data_ptr(), seed.data_ptr(), position.data_ptr(), 0 if token_ids is None else token_ids.data_ptr(),
            batch * nodes, nodes, size, stride, torch.get_num_threads(),
        )  # fmt: skip
        return out

    def top_tokens(
        self, logits: Tensor, topk: int, key: tuple[Tensor, Tensor, Tensor] | None, target_ids: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """`ops.torch.growth.top_tokens` with the noise of sampling.

        logits [B, K, V]; topk: at most `MOST` and V; key: seed [B] int64, position [B] int64 and temperature [B]
        float32 of the rows' noise, which all K nodes share, None where all rows are greedy; target_ids [V]: what the
        noise takes the logits' tokens for, None for 0 .. V - 1. Returns indices (not target ids) [B, K, topk] int64 and
        log probabilities [B, K, topk] float32, best first, of equals the lower index.
        """
        batch, nodes, vocab = logits.shape
        assert topk <= min(MOST, vocab)
        assert key is None or [part.dtype for part in key] == [torch.int64, torch.int64, torch.float32]
        logits = logits.contiguous()
        own = [] if key is None else [part.contiguous() for part in key]
        if key is not None and target_ids is not None:
            own.append(target_ids.to(torch.int32).contiguous())
        fields = [part.data_ptr() for part in own] + [0] * (4 - len(own))
        threads = torch.get_num_threads()
        scratch = torch.empty(threads, 2, vocab + 15, dtype=torch.float32)
        ids = torch.empty(batch, nodes, topk, dtype=torch.int64)
        logp = torch.empty(batch, nodes, topk, dtype=torch.float32)
        self.raw.top_tokens(
            ids.data_ptr(), logp.data_ptr(), topk, logits.data_ptr(), logits.dtype == torch.bfloat16,
            batch, nodes, vocab, *fields, scratch.data_ptr(), threads,
        )  # fmt: skip
        return ids, logp


@functools.cache
def load() -> Kernels | None:
    """None where the extension was not built or is not wanted."""
    raw = load_extension()
    return None if raw is None else Kernels(raw)


def kernels_for(tensor: Tensor) -> Kernels | None:
    """The kernels, where there are any and `tensor` is a real one on the CPU, of any dtype."""
    return load() if tensor.device.type == "cpu" and type(tensor) is Tensor else None
