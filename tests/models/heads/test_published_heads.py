"""Heads with the configs that they were published with, sizes shrunk: what is served has the logits of a float64
reference, and all others are refused with a sentence that names what is missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_cache import DenseCache
from reference.block_heads import block_pass
from reference.checkpoints import Checkpoint
from reference.draft_heads import DraftPass, eagle2, eagle3, flat_config
from reference.published_heads import Row, rows, written
from torch import Tensor

from draftwing.config.drafters import DRAFTERS
from draftwing.errors import CheckpointError
from draftwing.models.decoder import DecoderModel
from draftwing.models.heads.block import BlockHead
from draftwing.models.heads.loader import load_draft_head
from draftwing.models.loader import load_model
from draftwing.ops import make_ops

TEXT = [4, 11, 3, 9, 8, 10, 7, 2, 6]
QUICK = "eagle3-llama-3.1-8b", "deepspec-eagle3-qwen3-8b", "speculators-dspark"
CLOSE = {"atol": 1e-4, "rtol": 1e-5}  # rotary tables are made in float32


NESTED = "eagle_config", "transformer_layer_config", "target_layer_ids", "dflash_config", "fc_norm", "norm_output"


def form(row: Row) -> set[object]:
    """What a config has in common with those that differ from it in sizes alone."""
    flat = flat_config(row.config)
    rope = flat.get("rope_parameters") or flat.get("rope_scaling") or {}
    turned = rope.get("rope_type", rope.get("type")), "mscale" in rope, rope.get("truncate")
    keys = (key for key in NESTED if flat.get(key))
    return {(row.kind, *row.parts), turned, (row.kind, len(row.streams)), (row.kind, *keys)}


def served() -> Iterator[Any]:
    """Rows; those without anything that none before has are exhaustive."""
    seen: set[object] = set()
    for row in sorted(rows().values(), key=lambda row: row.name not in QUICK):
        if not row.refused:
            new = form(row) - seen
            seen |= new
            marks = () if row.name in QUICK else pytest.mark.slow if new else pytest.mark.exhaustive
            yield pytest.param(row, id=row.name, marks=marks)


def load(
    row: Row, folder: Path, dtype: torch.dtype = torch.float64
) -> tuple[Checkpoint, Checkpoint, DecoderModel, Any]:
    target, head = written(row)
    model = load_model(target.write(folder / "target"), dtype, "cpu")
    kind = {"domino": "dflash"}.get(row.kind, row.kind)
    name = next((spec.name for spec in DRAFTERS if kind in spec.heads), "EAGLE3")
    found = load_draft_head(head.write(folder / "head"), model, name, dtype, "cpu")
    found.set_max_positions(64)
    return target, head, model, found


@pytest.mark.parametrize("row", list(served()))
@torch.inference_mode()
def test_its_logits_are_those_of_the_formula(row: Row, tmp_path: Path) -> None:
    """After a text, and after two tokens that it drafts itself."""
    target, stored, model, head = load(row, tmp_path)
    ids = torch.tensor(TEXT)
    _, aux_hidden = model(ids[:-1], torch.arange(len(ids) - 1), DenseCache(), head.aux_layers)
    features = head.features(aux_hidden)
    if isinstance(head, BlockHead):
        block_logits(row, head, features, ids, reference_of_block(row, target, stored, head))
        return
    if row.kind == "eagle":
        config = stored.config.get("model") or stored.config
        draft = eagle2(*target, stored.tensors, config, TEXT)
    else:
        draft = eagle3(*target, *stored, TEXT, streams=row.streams)
    cache, path = DenseCache(), ()
    hidden = head.run(ids[1:], torch.arange(len(ids) - 1), features, 0, cache)[-1:]
    for level in range(3):
        logits = head.logits(hidden)[0]
        torch.testing.assert_close(logits, draft.logits(path), **CLOSE)
        token = logits.argmax()
        token = token if head.target_ids is None else head.target_ids[token]
        path = (*path, int(token))
        if row.kind == "eagle3" and head.eagle.mask is not None:
            token, hidden = torch.tensor(head.eagle.mask), head.mask_feature()
        hidden = head.run(token[None], torch.tensor([len(ids) - 1 + level]), hidden, level + 1, cache)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["default", "proportional"])
@torch.inference_mode()
def test_a_part_of_each_head_is_turned_by_a_packed_head_too(tmp_path: Path, kind: str) -> None:
    row, ids = rows()["speculators-partial-rotary"], torch.tensor(TEXT)
    inner = row.config["transformer_layer_config"]
    inner = {**inner, "rope_parameters": {**inner["rope_parameters"], "rope_type": kind}}
    row = row._replace(config={**row.config, "transformer_layer_config": inner})
    target, stored, model, head = load(row, tmp_path, torch.float32)
    draft = eagle3(*target, *stored, TEXT, streams=row.streams)
    _, aux_hidden = model(ids[:-1], torch.arange(len(ids) - 1), DenseCache(), head.aux_layers)
    for part in (model, head):
        part.pack(make_ops(torch.device("cpu")))
    hidden = head.run(ids[1:], torch.arange(len(ids) - 1), head.features(aux_hidden), 0, DenseCache())
    torch.testing.assert_close(head.logits(hidden)[-1].double(), draft.logits(()), atol=1e-3, rtol=1e-3)


def reference_of_block(row: Row, target: Checkpoint, stored: Checkpoint, head: BlockHead) -> DraftPass:
    flat = flat_config(stored.config) | stored.config.get("dflash_config", {})
    sliding = flat.get("layer_types") or []
    windows = [flat["sliding_window"] if kind == "sliding_attention" else 0 for kind in sliding]
    causal = row.causal or [False] * flat["num_hidden_layers"]
    assert head.config_of_block.from_anchor == row.anchor
    assert list(head.aux_layers) == list(row.streams or [i + 1 for i in flat["target_layer_ids"]])
    return block_pass(target, stored, TEXT, flat["block_size"], row.anchor, windows, causal)


class BlockCache(DenseCache):
    """Attention of a block to what stands before it, of which it sees some, and to itself."""

    def __init__(self, window: int, causal: bool) -> None:
        super().__init__()
        self.window, self.causal = window, causal

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.kv[layer] = k, v

    def read(self, layer: int, q: Tensor, kind: Any = None) -> Tensor:
        k, v = self.kv[layer]
        before, group = len(k) - len(q), q.shape[1] // k.shape[1]
        scores = torch.einsum("mhd,thd->hmt", q, k.repeat_interleave(group, 1)) * q.shape[-1] ** -0.5
        block = torch.ones(len(q), len(q), dtype=torch.bool)
        text = torch.arange(before) > (before - self.window if self.window else -1)
        seen = torch.cat((text.expand(len(q), -1), block.tril() if self.causal else block), 1)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hmt,thd->mhd", weights, v.repeat_interleave(group, 1)).flatten(1)


def block_logits(row: Row, head: BlockHead, features: Tensor, ids: Tensor, draft: DraftPass) -> None:
    block, known = head.config_of_block, len(ids) - 1
    caches = [BlockCache(*how) for how in zip(block.windows, block.causal, strict=True)]
    for cache in caches:
        head.write_text(features, torch.arange(known), cache)
    tokens = torch.cat((ids[-1:], torch.full((block.rows - 1,), block.mask)))
    hidden = head.block(tokens, torch.arange(known, known + block.rows), *caches)[block.rows - block.steps :]
    state, path = hidden.new_zeros(1, head.state_width), (int(ids[-1]),)
    for level in range(3):
        at, above = hidden[level : level + 1], torch.tensor(path[-1:])
        logits, state = head.given(head.logits(at), at, above, state, newest=not level)
        torch.testing.assert_close(logits[0], draft.logits(path[1:]), **CLOSE)
        if head.selector is not None:
            expected = draft.choose(path[1:], draft.logits(path[1:]))
            gate = head.selector.before[above[0]] * head.selector(at)[0]
            likely = logits[0].log_softmax(-1)
            places = likely.topk(head.selector.count).indices
            named = places if head.target_ids is None else head.target_ids[places]
            scores = likely[places] + head.selector.after[named] @ gate
            torch.testing.assert_close(
                scores.log_softmax(-1) + likely[places].logsumexp(-1), expected[places].to(scores.dtype), **CLOSE
            )
        token = logits[0].argmax()
        path = (*path, int(token if head.target_ids is None else head.target_ids[token]))


@pytest.mark.slow
@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in rows().values() if row.refused])
def test_what_is_not_served_is_named(row: Row, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as refusal:
        load(row, tmp_path)
    assert row.refused in str(refusal.value) and "\n" not in str(refusal.value)


def test_there_are_many() -> None:
    assert len(rows()) > 90 and set(QUICK) <= set(rows())
