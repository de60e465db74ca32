"""Computes log probabilities of tokens under the model's own distribution: log softmax of the logits, before edits and
temperature, computed in float32.

They leave the device packed as float64, in which values and token ids are both exact; `view(torch.int64)` takes them
through a packed int64 download.

Half-precision logits are rounded, by up to 0.06 at a logit of 25 in bfloat16. With `exact` the logits of the reported
ids and of the best candidates are computed again in float32 and replace the rounded ones; those of the token and of the
best `NORMALISED` in the normaliser, too, which are as many whatever this row or others ask for. What is left of the
error is at most 1 - m of one rounding, m their mass.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftwing.core import TokenLogprobs
from draftwing.ops.sampling.spec import CANDIDATES, top_candidates
from draftwing.requests.request import LogprobParams

NORMALISED: Final = 32  # candidates whose logits are exact in the normaliser
PROMPT_SLICE: Final = 64  # prompt positions whose logits exist at once; 40 MB of float32 for a vocabulary of 152k


def width(top: int, wanted: int) -> int:
    """Counts the packed numbers of a position: the token's own, `top` values and ids, `wanted` further tokens. A hidden
    state, two float32 in a number, follows them where one is wanted."""
    return 1 + 2 * top + wanted


def path_logprobs(
    logits: Tensor,
    tokens: Tensor,
    top: int,
    token_ids: Tensor | None = None,
    exact: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Returns log probabilities at positions of a path, for decoding the accepted one.

    logits [b, P, V] of any float type, not changed, at the nodes; tokens [b, P] int64, what was committed after them
    (any valid id past a row's count); top: the most that a row asked for; token_ids [b, T] int64: further tokens
    (padded with any valid id) or None for none; exact: ids [b, P, K] -> their logits [b, P, K] float32, for half
    types. Returns [b, P, width(top, T)] float64: value; the `top` best values, best first, the lower id first where
    equal; their ids; the further tokens' values.
    """
    vocab = logits.shape[-1]
    assert top <= vocab
    ids = tokens[..., None]  # [b, P, 1 + T]
    if token_ids is not None:
        ids = torch.cat((ids, token_ids[:, None].expand(-1, tokens.shape[1], -1)), -1)
    x = logits.float()
    if exact is None:
        candidates = top_candidates(_ordered(x), top) if top else ids[..., :0]
        found, weighed = x.gather(-1, ids), x.gather(-1, candidates)  # [b, P, 1 + T], [b, P, K]
    else:
        # More than are reported: rounding may have put the best in another order.
        best = top_candidates(logits, min(NORMALISED, vocab))
        few = top + CANDIDATES <= NORMALISED
        candidates = best if few else top_candidates(logits, min(top + CANDIDATES, vocab))
        weighed, found = exact(torch.cat((candidates, ids), -1)).tensor_split((candidates.shape[-1],), -1)
        x = x.scatter(-1, best, weighed if few else exact(best)).scatter(-1, ids[..., :1], found[..., :1])
    most = x.amax(-1, keepdim=True)  # [b, P, 1]
    logsumexp = most + _row_sums((x - most).exp_()).log()  # [b, P, 1]
    value = found - logsumexp
    place = _ordered(weighed, candidates).sort(-1, descending=True).indices[..., :top]
    best, best_ids = weighed.gather(-1, place) - logsumexp, candidates.gather(-1, place)
    return torch.cat((value[..., :1].double(), best.double(), best_ids.double(), value[..., 1:].double()), -1)


def prompt_logprobs(
    hidden: Tensor,
    logits: Callable[[Tensor], Tensor],
    next_ids: Tensor,
    top: int,
    token_ids: Tensor | None = None,
    exact: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Returns log probabilities of a prompt's tokens, of one request's chunk, `PROMPT_SLICE` positions at a time.

    hidden [M, H] after the final norm; logits: `model.logits`, [m, H] -> [m, V]; next_ids [M] int64: the token that
    follows each query (position t's hidden state gives the log probability of token t + 1; position 0 has none);
    token_ids [T] int64 or None; exact: `model.exact_logits` for half-precision logits, ([m, 1, H], [m, 1, K]) ->
    [m, 1, K] float32. Returns [M, width(top, T)] float64 as `path_logprobs` packs it.
    """
    parts = []
    for part, following in zip(hidden.split(PROMPT_SLICE), next_ids.split(PROMPT_SLICE), strict=True):
        wanted = None if token_ids is None else token_ids.expand(part.shape[0], -1)
        rescore = None if exact is None else partial(exact, part[:, None])
        packed = path_logprobs(logits(part)[:, None], following[:, None], top, wanted, rescore)
        parts.append(packed.squeeze(1))
    return torch.cat(parts)


def unpack(packed: npt.NDArray[np.float64], top: int, params: LogprobParams) -> list[TokenLogprobs]:
    """Returns the log probabilities of one request's positions, as many top and further tokens as `params` asks for.

    packed [P, width(top, T) + S] float64 on the host; `top` and T are those of the whole batch and may be larger. S: of
    the hidden state, (H + 1) // 2, or 0 where no row of the batch wants one."""
    states = (params.hidden + 1) // 2
    assert params.top <= top and width(top, len(params.token_ids)) + states <= packed.shape[-1]
    first_id, first_wanted = 1 + top, 1 + 2 * top
    best = _rows("d", packed[:, 1 : 1 + params.top])
    ids = _rows("i", packed[:, first_id : first_id + params.top].astype(np.int32))
    wanted = _rows("d", packed[:, first_wanted : first_wanted + len(params.token_ids)])
    hidden: Iterable[Any] = itertools.repeat(None)
    if params.hidden:
        hidden = _rows("f", np.ascontiguousarray(packed[:, -states:]).view(np.float32)[:, : params.hidden])
    return list(map(TokenLogprobs, packed[:, 0].tolist(), best, ids, wanted, hidden))


def _rows(kind: str, values: npt.NDArray[Any]) -> Iterable[array[Any]]:
    """Returns an array for each row, of its own memory; one for all of them where rows are empty."""
    if not values.shape[1]:
        return itertools.repeat(array(kind), len(values))
    return [array(kind, row.tobytes()) for row in values]


def _row_sums(x: Tensor) -> Tensor:
    """Sums rows in an order that K alone decides: x [..., K], which is overwritten -> [..., 1]. Torch splits the sum of
    a single row among threads; so plain decoding would report other bits than a verified draft."""
    while (size := x.shape[-1]) > 1:
        half = (size + 1) // 2
        x[..., : size - half] += x[..., half:]
        x = x[..., :half]
    return x


def _ordered(x: Tensor, ids: Tensor | None = None) -> Tensor:
    """Returns distinct int64 keys: the larger value first, of equal ones the lower id.

    x [..., K] float32, ids its token ids [..., K], None for 0 .. K - 1.
    """
    bits = (x + 0.0).view(torch.int32)  # -0.0 becomes 0.0, its equal
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # a negative float's pattern falls as its value rises
    if ids is None:
        ids = torch.arange(x.shape[-1], device=x.device)
    return rising.to(torch.int64).bitwise_left_shift_(32).sub_(ids)
