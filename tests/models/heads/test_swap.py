"""What a head in use has of another's values, against the other's checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from reference.block_heads import dspark_head, speculators_head
from reference.checkpoints import Checkpoint, llama_target

from draftwing.engine.devices import pick_device
from draftwing.models.heads.block import BlockHead
from draftwing.models.heads.loader import load_draft_head
from draftwing.models.heads.swap import check_alike, copy_head
from draftwing.models.loader import load_model

TARGET = llama_target(4, num_hidden_layers=5, vocab_size=12)


@pytest.mark.slower(kind="plain")
@pytest.mark.parametrize("kind", ["markov", "plain", "rows of the target's lm_head"])
def test_a_head_that_drafts_blocks_takes_all_of_anothers_values(kind: str, tmp_path: Path) -> None:
    target, ops = load_model(TARGET.write(tmp_path / "target"), torch.float32, "cpu"), pick_device("cpu").ops
    tied = kind == "rows of the target's lm_head"
    heads, stored = [], []
    for seed in (1, 2):
        head = speculators_head(TARGET, seed=seed, tied=True) if tied else dspark_head(TARGET, seed)
        tensors = dict(head.tensors)
        if kind == "plain":
            hidden = TARGET.config["hidden_size"]
            tensors["confidence_head.proj.weight"] = tensors["confidence_head.proj.weight"][:, :hidden]
        stored.append(tensors)
        folder = Checkpoint(tensors, head.config).write(tmp_path / str(seed))
        heads.append(load_draft_head(folder, target, "DSPARK", torch.float32, "cpu"))
    for head in heads:
        head.pack(ops)
    mine, other = heads
    assert isinstance(mine, BlockHead)
    kept = mine.packed_tensors()
    check_alike(mine, other)
    copy_head(other, mine)
    assert all(a is b for a, b in zip(mine.packed_tensors(), kept, strict=True)), "recorded calls know where they are"
    hidden = torch.randn(5, TARGET.config["hidden_size"])
    torch.testing.assert_close(mine.logits(hidden), other.logits(hidden), rtol=0, atol=0)
    if tied:
        vocab = torch.arange(len(stored[1]["d2t"])) + stored[1]["d2t"]
        assert torch.equal(mine.target_ids, vocab)
        return
    assert mine.confidence is not None and mine.confidence.weight is not None
    weight, bias = (stored[1][f"confidence_head.proj.{part}"].double() for part in ("weight", "bias"))
    above = stored[1]["markov_head.markov_w1.weight"].double()
    tokens = above @ weight[0, hidden.shape[1] :] if kind == "markov" else torch.zeros(len(above), dtype=torch.float64)
    torch.testing.assert_close(mine.confidence.weight.double(), weight[0, : hidden.shape[1]])
    torch.testing.assert_close(mine.confidence.token_odds.double(), tokens + bias)
