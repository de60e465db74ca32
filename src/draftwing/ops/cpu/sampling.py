"""The sampler in C (ops/cpu/csrc/sampling.c), for all batches of the process: its noise differs from torch's in the
last bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftwing.ops.cpu.extension import DTYPES, MAX_TOPK
from draftwing.ops.cpu.workers import Workers
from draftwing.ops.torch.sampling import CANDIDATES, Exact, SamplingOps, without_banned
from draftwing.ops.types import SamplingRows


class CpuSamplingOps(SamplingOps):
    """Overrides all of `SamplingOps`."""

    raw: Any
    workers: Workers

    def gumbel(self, seed: Tensor, position: Tensor, vocab: int) -> Tensor:
        return self._gumbel(seed, position, None, vocab)

    def gumbel_at(self, seed: Tensor, position: Tensor, token_ids: Tensor) -> Tensor:
        return self._gumbel(seed, position, token_ids, token_ids.shape[-1])

    def sample(
        self,
        logits: Tensor,
        positions: Tensor,
        depth: Tensor,
        depth_max: int,
        params: SamplingRows | None,
        noisy: Tensor,
        filtered: Tensor,
        banning: Tensor,
        exact: Exact | None = None,
    ) -> Tensor:
        assert params is not None or (not noisy.shape[0] and not banning.shape[0])
        if params is not None and banning.shape[0]:
            logits = without_banned(logits, positions, params, banning)
        x = logits if logits.dtype in DTYPES else logits.float()
        count = 1 if exact is None else min(CANDIDATES, x.shape[-1])
        ids, noise = self.candidates(x, positions, depth, params if noisy.shape[0] else None, filtered, count)
        if exact is None:
            return ids.squeeze(-1)
        return self.best_candidate(ids, noise, exact(ids, None))  # the noise of what was removed is -inf

    def candidates(
        self,
        logits: Tensor,
        positions: Tensor,
        depth: Tensor,
        params: SamplingRows | None,
        filtered: Tensor,
        count: int,
    ) -> tuple[Tensor, Tensor]:
        """The best candidates of each node, bans aside.

        logits [B, N, V] float32 or bfloat16; positions, depth [B, N] int64; params: fields [B], None where all rows are
        greedy; filtered [Bf] int64: batch indices of rows with filters; count: at most `MAX_TOPK` and V. Returns ids
        [B, N, count] int64, in ascending order, and what the noise adds to their logits [B, N, count] float32, -inf
        where a token cannot be chosen. Of equally good tokens those with the lowest ids.
        """
        batch, nodes, vocab = logits.shape
        assert count <= min(MAX_TOPK, vocab) and positions.dtype == depth.dtype == torch.int64
        read = [logits.contiguous(), positions.contiguous(), depth.contiguous()]
        fields = [0] * 6  # seed, temperature, filtered, top_k, top_p, min_p
        scratch = torch.empty(0, dtype=torch.int32)
        if params is not None:
            chosen = [params.seed, params.temperature]
            if filtered.shape[0]:
                chosen.append(torch.zeros_like(params.seed).index_fill_(0, filtered, 1))
                chosen += [params.top_k, params.top_p, params.min_p]
                scratch = torch.empty(self.workers.most, 2, vocab + 15, dtype=torch.int32)
            own = [field.contiguous() for field in chosen]
            read += own
            fields[: len(own)] = [field.data_ptr() for field in own]
        ids = torch.empty(batch, nodes, count, dtype=torch.int64)
        noise = torch.empty(batch, nodes, count, dtype=torch.float32)
        self.raw.draw(
            ids.data_ptr(), noise.data_ptr(), count, read[0].data_ptr(), logits.dtype == torch.bfloat16,
            batch * nodes, nodes, vocab, read[1].data_ptr(), read[2].data_ptr(), *fields, scratch.data_ptr(),
            self.workers.address,
        )  # fmt: skip
        return ids, noise

    def best_candidate(self, ids: Tensor, noise: Tensor, logits: Tensor) -> Tensor:
        """ids [B, N, K] int64, noise, logits [B, N, K] float32 -> of each node the id with the largest noise + logit,
        the first of equals, [B, N]. In torch it is five operations, all of which start slowly."""
        batch, nodes, count = ids.shape
        assert ids.dtype == torch.int64 and noise.dtype == logits.dtype == torch.float32
        assert noise.shape == logits.shape == ids.shape and count
        ids, noise, logits = ids.contiguous(), noise.contiguous(), logits.contiguous()
        tokens = ids.new_empty(batch, nodes)
        self.raw.heaviest(tokens.data_ptr(), ids.data_ptr(), noise.data_ptr(), logits.data_ptr(), batch * nodes, count)
        return tokens

    def _gumbel(self, seed: Tensor, position: Tensor, token_ids: Tensor | None, size: int) -> Tensor:
        """token_ids None: 0 .. size - 1."""
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
            batch * nodes, nodes, size, stride, self.workers.address,
        )  # fmt: skip
        return out
