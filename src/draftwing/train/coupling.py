"""The noise that a sampled text was drawn with, as far as the text tells it.

An engine adds Gumbel noise times the temperature to the target's logits and takes the largest sum, and a drafter adds
the same noise to its own (`ops.torch.noise`). So what it drafts along a text that is given depends on noise of which
the token that was drawn tells a part: the largest sum is a Gumbel variable around log sum exp of the logits, whichever
token has it, and all others are below (Maddison et al. 2014, arXiv 1411.0030). Where a request had penalties or filters
this is as if it had had none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from draftwing.ops.torch.noise import gumbel_at
from draftwing.train.heads import TargetHead


class Temperatures(NamedTuple):
    """At which texts were drawn, by their keys, and the target that drew them; others are greedy."""

    of: Mapping[str, float]
    target: TargetHead

    def rows(self, keys: Sequence[str]) -> tuple[list[float], list[int]]:
        """Returns the temperatures of texts, and seeds for their noise."""
        return [self.of.get(key, 0.0) for key in keys], [crc32(key.encode()) for key in keys]

    def noise(
        self, final: Tensor, said: Tensor, temperature: Tensor, seed: Tensor, position: Tensor, ids: Tensor | None
    ) -> Tensor:
        """Draws the noise of n positions, times the temperature. final [n, hidden]: of the target after its final norm;
        ids [Vd] int64: tokens whose noise is asked for, None: all; the others as of `noise_of_text` -> [n, Vd]."""
        heat = temperature.unsqueeze(1)
        if ids is None:
            scaled = self.target(final) / heat
            ids, total = torch.arange(scaled.shape[1], device=final.device), scaled.logsumexp(1)
        else:
            logits, _, share = self.target.of(ids, final, heat)
            scaled = logits / heat
            total = scaled.logsumexp(1) - share.log()
        return noise_of_text(scaled, total, said, seed, position, ids) * heat


def noise_of_text(scaled: Tensor, total: Tensor, said: Tensor, seed: Tensor, position: Tensor, ids: Tensor) -> Tensor:
    """Draws the noise that has made a target say what it said, at n positions of texts.

    scaled [n, Vd] float32 or wider: the target's logits of the tokens ids [Vd] int64, through the temperature; total
    [n]: log sum exp of those of all tokens; said [n] int64: the token that was drawn; seed, position [n] int64: what is
    drawn follows from them alone -> [n, Vd].
    """
    key = seed, position.unsqueeze(1)
    none = torch.tensor([-1], device=ids.device)  # no token's: the noise of the largest sum
    top = total.unsqueeze(1) + gumbel_at(*key, none).squeeze(1)  # [n, 1]
    below = -torch.logaddexp(-top, -(scaled + gumbel_at(*key, ids).squeeze(1)))
    return torch.where(ids == said.unsqueeze(1), top, below) - scaled
