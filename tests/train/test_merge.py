"""Merged matrices against least squares, and moments of inputs against inputs made one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference.exact_heads import exact_dspark, exact_eagle3

from draftwing.engine.devices import pick_device
from draftwing.models.heads.block import BlockHead
from draftwing.models.loader import load_model
from draftwing.train import merge as merging
from draftwing.train.capture import FeatureModel
from draftwing.train.heads import load_head
from draftwing.train.merge import RIDGE, input_moments, merge, moments_bytes
from draftwing.train.store import OnlineSource, Part, Tokens
from draftwing.train.ttt import unroll


@pytest.fixture(name="load")
def head_loader(tmp_path: Path) -> Any:
    """Returns what loads the same head each time."""
    exact = exact_eagle3()
    assert exact.head is not None
    target = load_model(exact.target.write(tmp_path / "target"), torch.float32, "cpu")
    folder = exact.head.write(tmp_path / "head")
    return lambda: load_head(folder, target, "EAGLE3")


@pytest.mark.parametrize(("weight", "block"), [(0.5, 4096), (4.0, 4096), (4.0, 16)])
def test_a_merged_matrix_does_as_both_do_in_the_mean_square(
    load: Any, weight: float, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several blocks of inputs each as if it were a matrix of its own, but for the ridge."""
    monkeypatch.setattr(merging, "BLOCK", block)
    head, parent = load(), load()
    draw, inputs = torch.Generator().manual_seed(0), {}
    with torch.no_grad():
        for param in head.parameters():
            param += 0.1 * torch.randn(param.shape, generator=draw)
    for name, param in head.named_parameters():
        if param.requires_grad and param.dim() == 2:  # of general text fewer than there are directions
            width = param.shape[1]
            inputs[name] = [torch.randn(count, width, generator=draw) for count in (2 * width, width // 2)]
    assert len(inputs) >= 5
    trained = {name: param.detach().clone() for name, param in head.named_parameters()}
    moments = [{name: blocks(x[i], block) for name, x in inputs.items()} for i in (0, 1)]
    merge(head, parent, moments[0], moments[1], weight)
    before = dict(parent.named_parameters())
    for name, param in head.named_parameters():
        mine, theirs = (x[name].detach().double().numpy() for x in (trained, before))
        if name not in inputs:
            share = weight / (1 + weight) if param.requires_grad else 0.0
            expected = theirs + share * (mine - theirs) if param.requires_grad else mine
        else:
            seen, other = (x.double().numpy() for x in inputs[name])
            ridge = RIDGE * (weight * (seen**2).mean() + (other**2).mean())
            parts = []
            for at in np.split(np.arange(seen.shape[1]), moments[0][name].shape[0]):
                rows = [(weight / len(seen)) ** 0.5 * seen[:, at], len(other) ** -0.5 * other[:, at]]
                rows.append(ridge**0.5 * np.eye(len(at)))
                wanted = [rows[0] @ mine[:, at].T, rows[1] @ theirs[:, at].T, rows[2] @ theirs[:, at].T]
                parts.append(np.linalg.lstsq(np.concatenate(rows), np.concatenate(wanted), rcond=None)[0].T)
            expected = np.concatenate(parts, 1)
        np.testing.assert_allclose(param.detach().numpy(), expected, rtol=1e-4, atol=1e-5, err_msg=name)


def blocks(x: torch.Tensor, most: int) -> torch.Tensor:
    """x [n, in] -> its moments, in blocks of one size of at most so many inputs."""
    size = next(size for size in range(min(most, x.shape[1]), 0, -1) if x.shape[1] % size == 0)
    return torch.stack([part.t() @ part / len(x) for part in x.split(size, 1)])


def test_moments_that_rounding_has_made_indefinite_are_solved_all_the_same(load: Any) -> None:
    head, parent, name = load(), load(), "fc.weight"
    with torch.no_grad():
        head.get_parameter(name).add_(1.0)
    trained, width = head.get_parameter(name).detach().clone(), head.get_parameter(name).shape[1]
    moments = torch.eye(width)
    moments[0, 0] = -0.5
    merge(head, parent, {name: moments[None]}, {name: torch.eye(width)[None]}, 1.0)
    found, before = head.get_parameter(name), parent.get_parameter(name)
    torch.testing.assert_close(found[:, 1:], (trained + before)[:, 1:] / 2, rtol=0, atol=1e-3)
    torch.testing.assert_close(found[:, :1], 2 * before[:, :1] - trained[:, :1], rtol=0, atol=1e-2)


def test_a_row_of_a_table_goes_by_how_often_its_token_is_there(tmp_path: Path) -> None:
    """Of a head that drafts blocks. How sure it is goes with all that is no matrix."""
    exact = exact_dspark()
    assert exact.head is not None
    target = load_model(exact.target.write(tmp_path / "target"), torch.float32, "cpu")
    folder = exact.head.write(tmp_path / "head")
    head, parent = (load_head(folder, target, "DSPARK") for _ in range(2))
    assert isinstance(head, BlockHead)
    draw = np.random.default_rng(1)
    vocab, weight, steps = target.config.vocab_size, 4.0, 3
    features = FeatureModel(target, head.aux_layers, pick_device("cpu"))
    moments, shares = [], []
    for seed in range(2):
        ids = draw.integers(seed, vocab // 2, size=20 + seed).astype(np.int32)
        text = Tokens(ids, np.arange(len(ids)) >= 8, "text")
        source = OnlineSource(features.meta("tiny", "DSPARK"), [text], features.batch)
        moments.append(input_moments(head, Part(source, [0]), steps, 64))
        above = [[*ids.tolist(), 0, 0][at + k] for at in range(8, len(ids)) for k in range(steps)]
        shares.append(np.bincount(above, minlength=vocab) / len(above))
    name = "markov.above.table.weight"
    assert moments_bytes(head) == sum(moment.nbytes for moment in moments[0].values())
    np.testing.assert_allclose(moments[0][name], shares[0], atol=1e-6)
    with torch.no_grad():
        for param in head.parameters():
            param += 1.0
    merge(head, parent, *moments, weight)
    ridge = RIDGE * (weight * shares[0].mean() + shares[1].mean())
    expected = weight * shares[0] / (weight * shares[0] + shares[1] + ridge)
    moved = head.get_parameter(name) - parent.get_parameter(name)
    np.testing.assert_allclose(moved.detach(), np.broadcast_to(expected[:, None], moved.shape), atol=1e-5)
    moved = head.get_parameter("confidence.proj.weight") - parent.get_parameter("confidence.proj.weight")
    np.testing.assert_allclose(moved.detach(), weight / (1 + weight), atol=1e-5)


def test_a_matrix_that_no_text_reaches_is_the_parents(load: Any) -> None:
    head, parent = load(), load()
    name = "fc.weight"
    with torch.no_grad():
        head.get_parameter(name).add_(1.0)
    none = {name: torch.zeros(1, *2 * head.get_parameter(name).shape[1:])}
    merge(head, parent, none, none, 1.0)
    assert torch.equal(head.get_parameter(name), parent.get_parameter(name))


@pytest.mark.parametrize("block", [4096, 16])
def test_moments_are_those_of_what_goes_into_each_matrix(
    load: Any, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "BLOCK", block)
    head, steps = load(), 3
    draw = np.random.default_rng(1)
    ids = draw.integers(head.target.config.vocab_size, size=20).astype(np.int32)
    text = Tokens(ids, np.arange(20) >= 8, "text")
    features = FeatureModel(head.target, head.aux_layers, pick_device("cpu"))
    source = OnlineSource(features.meta("tiny", "EAGLE3"), [text], features.batch)
    found = input_moments(head, Part(source, [0]), steps, 64)
    (sample,) = source.read_many([0])
    aux = sample.aux_hidden.float()
    torch.testing.assert_close(found["fc.weight"], blocks(aux, block), rtol=1e-4, atol=1e-5)
    states = []
    norm, _ = head.output_layer()
    with torch.no_grad():
        for hidden in unroll(head, torch.from_numpy(ids).long()[None], head.features(aux), steps):
            states.append(norm(hidden[7:19]))  # before each token of the answer
    joined = torch.cat(states)
    torch.testing.assert_close(found["lm_head.weight"], blocks(joined, block), rtol=1e-4, atol=1e-5)
    assert all(torch.allclose(moment, moment.mT) for moment in found.values())
    assert moments_bytes(head) == sum(moment.nbytes for moment in found.values())
    again = input_moments(head, Part(source, [0]), steps, 64)
    assert all(torch.equal(found[name], moment) for name, moment in again.items())
