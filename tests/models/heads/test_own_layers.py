"""Who drafts where nothing is asked for: the prediction layers that a model's files hold."""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import moe_models
import pytest
import tiny_quantised
import torch
from hybrid_gguf import write
from hybrid_models import layer_weights, reference, saved, with_layer
from torch import Tensor

from draftwing.config.options import Options
from draftwing.models.heads import own_layers
from draftwing.models.heads.own_layers import with_own_layers
from draftwing.models.library import describe
from draftwing.models.loader import load_config, load_model


def chosen(path: Path, **given: Any) -> tuple[str, str | None]:
    """The drafter, and the name of the file with its layers where that is not the model's."""
    options = with_own_layers(Options(model=str(path), **given).resolve(), path, load_config(path))
    draft = options.speculative_draft_model_path
    assert options.resolve() == options and (draft is None or Path(draft).parent == path.parent)
    return options.drafter, None if draft is None else Path(draft).name


@pytest.mark.slower(kind="qwen3.5")
@pytest.mark.parametrize("kind", ["qwen3.5", "qwen3-next"])
def test_the_layers_of_a_folder(tmp_path: Path, kind: str) -> None:
    theirs = reference(kind)
    said = {} if kind == "qwen3.5" else {"mtp_num_hidden_layers": None}  # Qwen3-Next has no such key
    folder = with_layer(tmp_path / "with", theirs, layer_weights(theirs), **said)
    assert chosen(folder) == ("NEXTN", None)
    assert describe("x", folder)["drafter"] == "NEXTN"
    assert chosen(saved(tmp_path / "without", theirs)) == ("none", None)


def test_the_layer_that_is_numbered_behind_the_models_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs = moe_models.reference("glm4-moe")
    weights = moe_models.published(theirs, moe_models.predicting(theirs))
    assert chosen(moe_models.with_layer(tmp_path / "with", theirs, weights)) == ("NEXTN", None)
    tensors = {**theirs.state_dict(), **weights}
    assert chosen(moe_models.write_gguf(tmp_path / "m.gguf", theirs.config, tensors)) == ("NEXTN", None)
    with caplog.at_level(logging.WARNING):
        assert chosen(moe_models.with_layer(tmp_path / "without", theirs, {})) == ("none", None)
    assert "num_nextn_predict_layers is 1, but there are no such layers" in caplog.text


def test_what_is_asked_for_wins(tmp_path: Path) -> None:
    theirs = reference("qwen3.5")
    folder = with_layer(tmp_path, theirs, layer_weights(theirs))
    for algorithm, drafter in (("none", "none"), ("ngram", "NGRAM"), ("NEXTN+SUFFIX", "NEXTN+SUFFIX")):
        assert chosen(folder, speculative_algorithm=algorithm) == (drafter, None)
    assert chosen(folder, load_format="dummy") == ("none", None)


def test_layers_of_a_model_that_is_not_served_with_any_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody asks whether they are quantised as others are."""
    theirs = moe_models.reference("minimax-m2")
    weights = {"mtp.fc.weight": torch.ones(64, 128).to(torch.float8_e4m3fn)}
    folder = moe_models.with_layer(tmp_path, theirs, weights, num_mtp_modules=3)
    config, write = tiny_quantised.FORMATS["fp8 block"]
    tiny_quantised.quantise(folder, config, lambda _: write)
    with caplog.at_level(logging.WARNING):
        assert chosen(folder) == ("none", None)
        load_model(folder, torch.float32, "cpu")
    assert "num_mtp_modules is 3, but there are no such layers that are served" in caplog.text
    assert "1 tensors of prediction layers are not loaded" in caplog.text


@pytest.mark.parametrize(("stored", "other"), [("mtp.fc.", "mtp.eh_proj."), (".input_layernorm.", ".norm1.")])
def test_layers_with_names_of_others_do_not_draft(
    tmp_path: Path, stored: str, other: str, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = reference("qwen3.5")
    weights = {name.replace(stored, other): value for name, value in layer_weights(theirs).items()}
    folder = with_layer(tmp_path, theirs, weights)
    with caplog.at_level(logging.WARNING):
        assert chosen(folder) == ("none", None)
    (said,) = [record.message for record in caplog.records if "cannot be loaded" in record.message]
    assert "nothing is drafted" in said and f"{stored}weight" in said
    assert chosen(folder, speculative_algorithm="NEXTN") == ("NEXTN", None)


def test_layers_of_other_sizes_do_not_draft(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs = reference("qwen3.5")
    weights = layer_weights(theirs)
    folder = with_layer(tmp_path, theirs, weights | {"mtp.fc.weight": weights["mtp.fc.weight"].repeat(2, 1)})
    with caplog.at_level(logging.WARNING):
        assert chosen(folder) == ("none", None)
    assert "cannot be loaded, so nothing is drafted: " in caplog.text
    assert "mtp.fc.weight: expected shape [64, 128], found [128, 128]" in caplog.text


def test_layers_are_looked_at_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices that are put together, as those of experts in 4 bits are, would take much memory all at once."""
    theirs, there, most = reference("qwen3.5"), 0, 0

    def gone() -> None:
        nonlocal there
        there -= 1

    def copied(quantization: Any, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        nonlocal there, most
        for name, value in tensors:
            made = value.clone()
            weakref.finalize(made, gone)
            there += 1
            most = max(most, there)
            yield name, made
            del made

    monkeypatch.setattr(own_layers, "assembled", copied)
    assert chosen(with_layer(tmp_path, theirs, layer_weights(theirs))) == ("NEXTN", None)
    assert 1 <= most <= 2 and there == 0


@pytest.mark.parametrize("gguf", [False, True])
def test_layers_that_are_said_to_be_there_and_are_not(
    tmp_path: Path, gguf: bool, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = reference("qwen3.5")
    if gguf:
        state = {**theirs.state_dict(), "mtp.norm.weight": theirs.state_dict()["model.norm.weight"]}
        path = write(tmp_path / "m.gguf", theirs.config, state)
    else:
        path = saved(tmp_path, theirs)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "mtp_num_hidden_layers": 1}))
    with caplog.at_level(logging.WARNING):
        assert chosen(path) == ("none", None)
    assert ("nextn_predict_layers is 1" if gguf else "mtp_num_hidden_layers is 1") in caplog.text


def test_the_layers_of_a_gguf_file_or_of_the_one_next_to_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs, wider = reference("qwen3.5"), reference("qwen3.5", hidden_size=32)
    model, layers = dict(theirs.state_dict()), layer_weights(theirs)
    whole = write(tmp_path / "Qwen-4B-Q8_0.gguf", theirs.config, {**model, **layers})
    bare = write(tmp_path / "Qwen-4B-Chat-Q4_K_M.gguf", theirs.config, model)
    assert chosen(whole) == ("NEXTN", None) and chosen(bare) == ("none", None)
    both = {**model, **layers}
    write(tmp_path / "mtp-Other-Q8_0.gguf", theirs.config, both, only_mtp=True)
    other = {**wider.state_dict(), **layer_weights(wider)}
    write(tmp_path / "mtp-Qwen-4B-Chat-F32.gguf", wider.config, other, only_mtp=True)
    (tmp_path / "mtp-Qwen-4B-F16.gguf").write_bytes(b"GGUF")
    with caplog.at_level(logging.WARNING):
        assert chosen(bare) == ("none", None), "of another name, of other sizes, broken"
    assert "mtp-Qwen-4B-F16.gguf does not draft" in caplog.text
    write(tmp_path / "mtp-Qwen-4B-Q8_0.gguf", theirs.config, both, only_mtp=True)
    assert chosen(bare) == ("NEXTN", "mtp-Qwen-4B-Q8_0.gguf") and chosen(whole) == ("NEXTN", None)
    write(tmp_path / "mtp-Qwen-4B-Chat-Q8_0.gguf", theirs.config, both, only_mtp=True)
    assert chosen(bare) == ("NEXTN", "mtp-Qwen-4B-Chat-Q8_0.gguf")
    assert chosen(bare, speculative_algorithm="none") == ("none", None)
    for algorithm in ("NEXTN", "NEXTN+SUFFIX", "EAGLE"):  # whoever drafts with such layers finds the file
        assert chosen(bare, speculative_algorithm=algorithm) == (algorithm, "mtp-Qwen-4B-Chat-Q8_0.gguf")
        assert chosen(whole, speculative_algorithm=algorithm) == (algorithm, None)
    given = str(tmp_path / "mtp-Qwen-4B-Q8_0.gguf")
    assert chosen(bare, speculative_algorithm="NEXTN", speculative_draft_model_path=given)[1] == Path(given).name
    assert chosen(bare, speculative_algorithm="SUFFIX") == ("SUFFIX", None)
