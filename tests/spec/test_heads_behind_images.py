"""What a head that reads a target's features keeps of a prompt with pictures, against float64: rows of features in
place of the placeholder's embedding, and positions in three axes, whenever it sees the prompt."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from engine_rig import Cycle, Rig, greedy
from image_models import (
    PAD,
    encoded,
    features,
    inputs_of,
    loaded,
    picture,
    prompt_of,
    reference,
    with_prediction_layer,
    write_model,
)
from reference.qwen_mtp import Reference
from torch import Tensor

from draftwing.config.trees import TreeShape
from draftwing.core import NO_DEFERRAL, DraftDeferral
from draftwing.images.processing import Tile
from draftwing.images.reader import Picture, Prompt, placed, read
from draftwing.models.dummy import fill_random
from draftwing.models.heads.loader import load_mtp_head
from draftwing.models.heads.mtp import MTPHead
from draftwing.ops import make_ops
from draftwing.requests.images import axes_of
from draftwing.spec.build import make_model_drafter
from draftwing.train.heads import new_eagle3_head, new_eagle_head

SHOWN = [(40, 30, 0), (64, 16, 1)]
CHAIN = TreeShape(2, 1, 3)
DEFERRALS = {"at once": NO_DEFERRAL, "by slot": DraftDeferral(0, 40, by_slot=True), "later": DraftDeferral(200, 200)}


# In which the pool has a head's elements: those that are turned, 8 of 32, are paired over its halves.
ORDER = [*range(4), *range(8, 20), *range(4, 8), *range(20, 32)]


class Asked(NamedTuple):
    kind: str
    drafter: Any
    model: Any
    weights: dict[str, Tensor]
    ids: list[int]
    images: Any


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Asked:
    folder: Path = write_model(tmp_path_factory.mktemp("images") / "model", "qwen3.5")
    weights = with_prediction_layer(folder, "qwen3.5")
    model, _ = loaded(folder)
    head = load_mtp_head(folder, model, torch.float32, "cpu")
    ops = make_ops(torch.device("cpu"))
    head.pack(ops)
    drafter = make_model_drafter(head, 5, 2, torch.float32, ops)
    return Asked("qwen3.5", drafter, model, weights, *shown_in(folder))


def shown_in(folder: Path) -> tuple[list[int], Any]:
    """A prompt with pictures."""
    _, processor = loaded(folder)
    pieces = [read(Picture(encoded(picture(*one)), "x"), processor) for one in SHOWN]
    counts = [sum(isinstance(piece, Tile) for piece in every) for every in pieces]
    places = [one for count in counts for one in (90, *[PAD] * count, 91)]
    return placed([7, 60, 61, *places, 70, 33], Prompt("", pieces), processor)


def merged(asked: Asked, text: list[int], layers: tuple[int, ...] = (-1,)) -> tuple[Tensor, Tensor]:
    """What the target reads of a text, [T, hidden], and its hidden states behind so many layers, [T, layers * hidden],
    by transformers. -1: the last, normed."""
    model, inputs = inputs_of(asked.kind, text, [picture(*one) for one in SHOWN])
    found = model.model(**inputs, output_hidden_states=True).hidden_states
    states = torch.cat([found[layer][0].double() for layer in layers], 1)
    shown = torch.cat([features(asked.kind, picture(*one))[0] for one in SHOWN]).double()
    embeddings = model.model.language_model.embed_tokens(torch.tensor(text)).double()
    for image in asked.images:
        embeddings[image.start : image.end], shown = shown[: image.tokens], shown[image.tokens :]
    return embeddings, states


@torch.inference_mode()
def expected(asked: Asked, text: list[int]) -> tuple[Tensor, Tensor]:
    """Keys and values [T - 1, heads, size] of the prediction layer of a whole text."""
    theirs = reference("qwen3.5")
    inner = SimpleNamespace(
        config=theirs.config.get_text_config(), model=theirs.model.language_model, lm_head=theirs.lm_head
    )
    written, (embeddings, states) = Reference(inner, asked.weights), merged(asked, text)
    axes, _ = axes_of(asked.images, len(text))  # which tests/models/towers compare with transformers
    for i in range(len(text) - 1):
        written.row(embeddings[i + 1], states[i], axes[:, i].tolist())
    return torch.stack([torch.stack(one)[:, ORDER] for one in written.past[0]]), torch.stack(written.past[1])


def seen(asked: Asked, drafter: Any, deferral: str, chunk: int) -> list[tuple[list[int], Tensor]]:
    """Texts for which there were drafts, and what was kept of them by then, [T - 1, heads, 2, size]."""
    rig = Rig(asked.model, policy=Cycle(CHAIN), drafter=drafter, chunk=chunk, rows=4, deferral=DEFERRALS[deferral])
    propose, found = drafter.propose, list[tuple[list[int], Tensor]]()

    def look(step: Any) -> Any:
        table, row = step.table, int(step.rows[0])
        length = int(table.kv_len[row])
        stored = rig.pool.kv[len(asked.model.kv_layers)][table.page_table[row, :length]].clone()
        found.append((table.tokens[row, : length + 1].tolist(), stored))
        return propose(step)

    drafter.propose = look
    for first, tokens in ((5, 8), (7, 12), (7, 6)):  # another one before it, and it again, which is cached
        rig.submit(str(tokens), [first, *asked.ids[1:]], greedy(tokens), images=asked.images)
        rig.run()
    drafter.propose = propose
    assert len(found) > 6
    return [found[0], found[-5], found[-1]]


@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize("deferral", DEFERRALS)
def test_a_prediction_layer(asked: Asked, deferral: str, chunk: int) -> None:
    for text, stored in seen(asked, asked.drafter, deferral, chunk):
        for ours, theirs in zip(stored.double().unbind(2), expected(asked, text), strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)


@torch.inference_mode()
def test_an_eagle_head(asked: Asked) -> None:
    """Whose values are products of (embedding, feature)."""
    head = new_eagle_head(asked.model, 96, seed=3).float().eval().requires_grad_(False)
    named = {name: value.double().clone() for name, value in head.stored_tensors()}
    ops = make_ops(torch.device("cpu"))
    head.pack(ops)
    for text, stored in seen(asked, make_model_drafter(head, 5, 2, torch.float32, ops), "at once", 7):
        embeddings, states = merged(asked, text)
        joined = torch.cat((embeddings[1:], states[:-1]), 1) @ named["fc.weight"].T
        values = joined @ named["layers.0.self_attn.v_proj.weight"].T
        torch.testing.assert_close(stored[:, :, 1].double().flatten(1), values, atol=2e-4, rtol=1e-4)


def normed(x: Tensor, weight: Tensor, kind: str = "qwen3.5") -> Tensor:
    eps = reference(kind).config.get_text_config().rms_norm_eps
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


@torch.inference_mode()
@pytest.mark.further(deferral="by slot")
@pytest.mark.parametrize("deferral", DEFERRALS)
@pytest.mark.parametrize("layers", [(1, 2), pytest.param((2, 3), marks=pytest.mark.exhaustive)])
def test_an_eagle3_head(asked: Asked, layers: tuple[int, ...], deferral: str) -> None:
    """Whose values are products of the normed embedding and the normed feature, which is made of several layers'."""
    head = new_eagle3_head(asked.model, None, layers, 96, seed=3).float().eval().requires_grad_(False)
    for name, weight in head.named_parameters():
        if "norm" in name:
            weight.uniform_(0.5, 1.5)
    named = {name.replace("midlayer.", ""): value.double().clone() for name, value in head.stored_tensors()}
    ops = make_ops(torch.device("cpu"))
    head.pack(ops)
    for text, stored in seen(asked, make_model_drafter(head, 5, 2, torch.float32, ops), deferral, 7):
        embeddings, states = merged(asked, text, layers)
        parts = {"input_layernorm": embeddings[1:], "hidden_norm": states[:-1] @ named["fc.weight"].T}
        joined = torch.cat([normed(part, named[f"{name}.weight"]) for name, part in parts.items()], 1)
        values = joined @ named["self_attn.v_proj.weight"].T
        torch.testing.assert_close(stored[:, :, 1].double().flatten(1), values, atol=2e-4, rtol=1e-4)


@torch.inference_mode()
def test_a_prediction_layer_that_reads_features_first(tmp_path: Path, one_thread: None) -> None:
    """Whose first token's embedding is zero, where positions have three axes. The packed head's are the same in C."""
    model, _ = loaded(folder := write_model(tmp_path / "model", "qwen3-vl"))
    head = MTPHead(model, 1, torch.float32, "cpu", embedding_first=False)
    for weight in head.parameters():
        weight.requires_grad_(False).uniform_(0.5, 1.5) if weight.dim() == 1 else weight.normal_(0, 0.1)
    (layer,) = head.layers
    norms = {"hidden": layer.hidden_norm, "token": layer.token_norm, "attn": layer.layer.attn_norm}
    known = {name: norm.weight.double() for name, norm in norms.items()}
    size = 2 * 32  # heads of values
    matrices = layer.input_proj.weight.double(), layer.layer.mixer.qkv.weight[-size:].double()
    ops = make_ops(torch.device("cpu"))
    for packed in (False, True):
        if packed:
            head.pack(ops)
        drafter = make_model_drafter(head.eval(), 5, 2, torch.float32, ops)
        asked = Asked("qwen3-vl", drafter, model, {}, *shown_in(folder))
        for text, stored in seen(asked, drafter, "at once", 7):
            embeddings, states = merged(asked, text)
            tokens = embeddings[1:].clone()
            tokens[0] = 0
            parts = (states[:-1], "hidden"), (tokens, "token")
            joined = torch.cat([normed(part, known[name], "qwen3-vl") for part, name in parts], 1) @ matrices[0].T
            values = normed(joined, known["attn"], "qwen3-vl") @ matrices[1].T
            torch.testing.assert_close(stored[:, :, 1].double().flatten(1), values, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("layers", "chunk"), [(1, 7), (2, 7), (2, 64)])
def test_heads_of_several_layers_read_placeholders_and_wait_for_no_tower(
    layers: int, chunk: int, tmp_path: Path, one_thread: None
) -> None:
    """Text in front of an image is prefilled whole before the tower reads it."""
    model, _ = loaded(folder := write_model(tmp_path / "model", "gemma4"))
    head = MTPHead(model, layers, torch.float32, "cpu")
    fill_random(head, "cpu")
    drafter = make_model_drafter(head.eval(), 3, 2, torch.float32, make_ops(torch.device("cpu")))
    ids, images = prompt_of(folder, 3, [(40, 30, 0)])
    rig = Rig(model, shapes=(CHAIN,), drafter=drafter, rows=2, chunk=chunk, deferral=NO_DEFERRAL)
    shown, extend = list[bool](), drafter.extend
    features, ends = rig.executor._images, list[tuple[int, int]]()
    launch = rig.executor.launch

    def extended(seen: Any) -> None:
        shown.append(seen.batch.following is not None)
        extend(seen)

    def launched(plan: Any, *guidance: Any) -> Any:
        found = launch(plan, *guidance)
        ends.extend((chunk.start + chunk.length, features.runs) for chunk in plan.chunks)  # type: ignore[union-attr]
        return found

    drafter.extend, rig.executor.launch = extended, launched  # type: ignore[method-assign]
    rig.submit("0", ids, greedy(8), images=images)
    rig.run()
    assert any(shown) == (layers == 1)
    assert all(runs == (end > images[0].start - (layers == 1)) for end, runs in ends), ends
