"""Draft heads, loaded from published layouts, against their arithmetic in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dense_cache import DenseCache
from reference import checkpoints, draft_heads
from reference.draft_cases import CASES, VOCAB, Case, eagle2, eagle3, load_head, token_map

from draftwing.models.decoder import DecoderModel
from draftwing.models.heads.loader import load_draft_head
from draftwing.models.loader import load_model
from draftwing.ops import make_ops


def llama() -> checkpoints.Checkpoint:
    return checkpoints.llama_target(1, vocab_size=VOCAB)


def two_layers() -> Case:
    case = eagle2(llama(), num_hidden_layers=2)
    assert case.head is not None
    case.head.tensors.update(checkpoints.Maker(9).layer("layers.1", case.head.config))
    return case


def stored_otherwise(case: Case, suffix: str = "", unsaid: str = "") -> Case:
    """With norms whose names do not end so, and without a key of its config."""
    assert case.head is not None
    tensors, config = case.head
    named = {name.removesuffix(suffix) if "aux_norm" in name else name: part for name, part in tensors.items()}
    said = {key: value for key, value in config.items() if key != unsaid}
    return case._replace(head=checkpoints.Checkpoint(named, said))


def mtp(layers: int) -> Case:
    """Of which every layer sees the rows of the first, as in training."""
    target = checkpoints.mimo(5, layers, vocab_size=VOCAB)
    return Case(target, None, "NEXTN", lambda tokens: draft_heads.mtp_of_first_rows(*target, tokens))


HEADS: dict[str, Callable[[], Case]] = {
    **{name: make for name, make in CASES.items() if name.startswith("eagle")},
    "eagle2 bias promised but not in the file": lambda: eagle2(llama(), bias=True),
    "eagle2 rope_theta": lambda: eagle2(llama(), rope_theta=5e5),
    "eagle2 two layers": two_layers,
    "eagle2 tokens of a tied head": lambda: token_map(tie_word_embeddings=True),
    "eagle3 no key/value heads given": lambda: eagle3(num_key_value_heads=None),
    "eagle3 own head over every token": lambda: eagle3(rows=VOCAB),
    "eagle3 aux norm bare": lambda: stored_otherwise(eagle3(use_aux_norm=True), suffix=".weight"),
    "eagle3 norm before fc without a key": lambda: stored_otherwise(
        eagle3(norm_before_fc=True), unsaid="norm_before_fc"
    ),
    "eagle3 speculators, rope_theta": lambda: eagle3(style="speculators", rope_theta=77.0),
    "mtp": lambda: mtp(1),
    "mtp 3 layers": lambda: mtp(3),
}


def load(name: str, folder: Path, dtype: torch.dtype) -> tuple[Case, DecoderModel, Any]:
    case = HEADS[name]()
    target = load_model(case.target.write(folder / "target"), dtype, "cpu")
    head = load_head(case.head, case.algorithm, folder, target, dtype, **case.options)
    head.set_max_positions(64)
    return case, target, head


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
@torch.inference_mode()
def test_committed_text_and_growth(name: str, tmp_path: Path) -> None:
    """Five committed tokens, and five levels of what the head itself says."""
    case, target, head = load(name, tmp_path, torch.float64)
    tokens = [4, 11, 3, 9, 8, 10]
    ids, cache, path = torch.tensor(tokens), DenseCache(), ()
    _, aux_hidden = target(ids[:5], torch.arange(5), DenseCache(), head.aux_layers)
    draft = case.reference(tokens)
    assert [(spec.kv_heads, spec.head_dim) for spec in head.kv_layers] == [tuple(k.shape[1:]) for k, _ in draft.kv]
    hidden = head.run(ids[1:], torch.arange(5), head.features(aux_hidden), 0, cache)
    assert hidden.shape == (5, head.width)
    torch.testing.assert_close(hidden[-1], draft.hidden, atol=1e-5, rtol=1e-5)
    for level in range(1, 6):
        logits = head.logits(hidden[-1:])
        assert logits.shape == (1, head.vocab)
        torch.testing.assert_close(logits[0], draft.logits(path), atol=1e-5, rtol=1e-5)
        token = logits.argmax(-1)
        token = token if head.target_ids is None else head.target_ids[token]
        path = (*path, int(token))
        hidden = head.run(token, torch.tensor([4 + level]), hidden[-1:], level, cache)


def test_final_tap_is_the_output(drafts: SimpleNamespace) -> None:
    target = drafts.make_target()
    with torch.inference_mode():
        ids = torch.tensor([1, 2, 3])
        hidden, aux_hidden = target(ids, torch.arange(3), DenseCache(), (8, target.final_aux_layer))
    assert aux_hidden is not None
    assert torch.equal(aux_hidden[:, 32:], hidden)
    assert torch.equal(target.norm(aux_hidden[:, :32]), hidden)


@torch.inference_mode()
def test_token_map_of_a_packed_target(drafts: SimpleNamespace, tmp_path: Path) -> None:
    target = drafts.make_target(torch.float32)
    expected = target.lm_head.weight[[1, 40]].clone()
    target.pack(make_ops(torch.device("cpu")))
    folder = drafts.write(tmp_path, drafts.eagle_weights())
    head = load_draft_head(folder, target, "NEXTN", torch.float32, "cpu", token_ids=torch.tensor([1, 40]))
    head.set_max_positions(64)
    x = torch.randn(3, 32)
    torch.testing.assert_close(head.logits(x), x @ expected.T)
    head.pack(make_ops(torch.device("cpu")))
    torch.testing.assert_close(head.logits(x), x @ expected.T)
    assert head.run(torch.tensor([1, 2, 3]), torch.arange(3), x, 0, DenseCache()).shape == (3, 32)


TRAINED = pytest.mark.parametrize("name", ["eagle2 fc bias", "eagle3 official", "mtp 3 layers"])


@pytest.mark.slow
@TRAINED
def test_every_parameter_gets_a_gradient_and_the_target_none(name: str, tmp_path: Path) -> None:
    _, target, head = load(name, tmp_path, torch.float32)
    head.requires_grad_()
    ids = torch.tensor([4, 11, 3, 9])
    with torch.no_grad():
        _, aux_hidden = target(ids, torch.arange(4), DenseCache(), head.aux_layers)
    cache = DenseCache()
    hidden = head.run(ids, torch.arange(4), head.features(aux_hidden), 0, cache)
    for level in (1, 2):
        hidden = head.run(ids, torch.arange(level, level + 4), hidden, level, cache)
    F.cross_entropy(head.logits(hidden), torch.tensor([1, 2, 3, 4]) % head.vocab).backward()
    for part, param in head.named_parameters():
        assert param.grad is not None and param.grad.abs().max() > 0, part
    assert all(param.grad is None for param in target.parameters())
