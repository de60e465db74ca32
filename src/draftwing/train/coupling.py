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


def noise_of_text(
    logits: Tensor, said: Tensor, temperature: Tensor, seed: Tensor, position: Tensor, ids: Tensor | None
) -> Tensor:
    """Draws the noise that has made a target say what it said, at n positions of texts.

    logits [n, V] float32 or wider; said [n] int64: the token that was drawn; temperature [n] above 0; seed, position
    [n] int64: what is drawn follows from them alone; ids [Vd] int64: the tokens whose noise is asked for, None for all
    -> [n, Vd] in the units of logits / temperature.
    """
    vocab = logits.shape[1]
    scaled = logits / temperature.unsqueeze(1)
    ids = torch.arange(vocab, device=logits.device) if ids is None else ids
    key = seed, position.unsqueeze(1)
    beyond = torch.tensor([vocab], device=logits.device)  # no token's: the noise of the largest sum
    top = scaled.logsumexp(1, keepdim=True) + gumbel_at(*key, beyond).squeeze(1)  # [n, 1]
    own = scaled[:, ids]
    below = -torch.logaddexp(-top, -(own + gumbel_at(*key, ids).squeeze(1)))
    return torch.where(ids == said.unsqueeze(1), top, below) - own
