"""Models with recurrent layers against transformers on small random checkpoints, one per family and switch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hybrid_models import KINDS, Pooled, reference, saved, tokens

from draftwing.models.decoder import DecoderModel
from draftwing.models.loader import load_model
from draftwing.train.capture import causal


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, DecoderModel]:
    theirs = reference(request.param)
    return theirs, load_model(saved(tmp_path_factory.mktemp("model"), theirs), torch.float32, "cpu")


@torch.inference_mode()
def test_whole_sequences_equal_transformers(pair: tuple[Any, DecoderModel]) -> None:
    theirs, model = pair
    ids = torch.stack([tokens(70, seed) for seed in (1, 2)])
    expected = theirs(ids).logits
    hidden, _ = model(ids.flatten(), torch.arange(70).repeat(2), causal(2, 70))
    torch.testing.assert_close(model.logits(hidden).view_as(expected), expected, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_chunks_tokens_and_trees_equal_transformers(pair: tuple[Any, DecoderModel]) -> None:
    """And one another, to the bit, in what is no GEMM of torch's."""
    theirs, model = pair
    ids, pooled = tokens(40), Pooled(model)
    expected = theirs(ids[None]).logits[0]
    found = [pooled.chunk(ids[:3], 0), pooled.chunk(ids[3:20], 3), pooled.tree(ids[20:21], [-1], 20)]
    # The right tokens are nodes 0, 2 and 4; then two steps of one node follow.
    drafted = ids[torch.tensor([21, 5, 22, 9, 23])]
    logits = pooled.tree(drafted, [-1, 0, 0, 2, 2], 21)
    found.append(logits[torch.tensor([0, 2, 4])])
    pooled.accept(21, [0, 2, 4])
    found += [pooled.tree(ids[24:25], [-1], 24), pooled.tree(ids[25:26], [-1], 25), pooled.chunk(ids[26:], 26)]
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-4, rtol=1e-4)
