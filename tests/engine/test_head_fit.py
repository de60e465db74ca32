"""Heads that do not fit their target: the log names the likely cause in one sentence. Pairs are made wrong one by one
of the default model with the heads that come with it, and of tiny models whose heads are right by construction."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from image_models import with_prediction_layer, write_model
from reference.checkpoints import Checkpoint
from reference.exact_heads import exact_dflash2, exact_domino, exact_dspark
from safetensors.torch import load_file, save_file
from tiny_checkpoint import write_tokenizer
from torch import Tensor

from draftwing import LLM
from draftwing.config.drafters import HEADS
from draftwing.config.options import Options
from draftwing.engine.engine import Engine
from draftwing.errors import CheckpointError
from draftwing.models.hub import resolve_model

pytestmark = pytest.mark.slow

Edit = Callable[[dict[str, Any], dict[str, Tensor]], None]
ASKED = ["What is the capital of France? Tell me about its history.", "Write a story about a fox and a crow.",
         "Explain how a bicycle stays upright."]  # fmt: skip
SHAPE = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
SIZES = {"max_total_tokens": 4096, "max_running_requests": 4, "num_threads": 1}
OTHER_MODEL = "---\nlicense: mit\nbase_model: some-lab/Other-7B\n---\n# A head\n"


def keys(**changes: Any) -> Edit:
    return lambda config, tensors: config.update(changes)


def together(*edits: Edit) -> Edit:
    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for one in edits:
            one(config, tensors)

    return edit


def turned(name: str = "fc.weight") -> Edit:
    """As if trained on the hidden states of another model: they mean something else."""

    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        weight, hidden = tensors[name].float(), config["hidden_size"]
        turn, _ = torch.linalg.qr(torch.randn(hidden, hidden, generator=torch.Generator().manual_seed(1)))
        tensors[name] = torch.cat([part @ turn for part in weight.split(hidden, 1)], 1).to(tensors[name].dtype)

    return edit


def shuffled(name: str) -> Edit:
    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        order = torch.randperm(len(tensors[name]), generator=torch.Generator().manual_seed(2))
        tensors[name] = tensors[name][order]

    return edit


def without_map(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Draft tokens taken for the first of the target's."""
    tensors["d2t"].zero_()
    tensors["t2d"] = torch.arange(len(tensors["t2d"])) < len(tensors["d2t"])


def untrained(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    generator = torch.Generator().manual_seed(3)
    for name, value in tensors.items():
        if value.is_floating_point():
            drawn = torch.randn(value.shape, generator=generator) * value.shape[-1] ** -0.5
            tensors[name] = (torch.ones(value.shape) if value.dim() == 1 else drawn).to(value.dtype)


def with_embedding(made: Callable[[Tensor], Tensor]) -> Edit:
    """With a copy of an embedding, as many published heads have one; of the target's it is made."""

    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        from draftwing.models.loader import open_checkpoint

        _, stored = open_checkpoint(resolve_model("smollm2", None))
        embed = next(value for name, value in stored if name == "model.embed_tokens.weight")
        dense = embed if isinstance(embed, Tensor) else embed.dense(torch.float32)  # type: ignore[union-attr]
        tensors["embed_tokens.weight"] = made(dense.float())

    return edit


def noise(like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(4)) * like.std()


def order(count: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(5))


VERIFIER = {"verifier": {"name_or_path": "lab/Base-8B"}}
FITS = r"it fits hidden states of layers 2, 15, 27 of the target and is given those of {} \(\d\d% of a sample"
LAYERS = "eagle_aux_hidden_state_layer_ids"
BOUNDARY = {"speculative_aux_layer_ids": "boundary"}
FURTHER = pytest.mark.exhaustive

# Which head, what is done to it, options, a card in place of its own, and what is said.
WRONG = {
    "layers backwards": ("eagle3", keys(**{LAYERS: [27, 15, 2]}), BOUNDARY, None, FITS.format("27, 15, 2")),
    "layers in turn": ("eagle3", keys(**{LAYERS: [15, 27, 2]}), BOUNDARY, None, FITS.format("15, 27, 2")),
    "late layers": ("eagle3", keys(**{LAYERS: [28, 29, 30]}), BOUNDARY, None, FITS.format("28, 29, 30")),
    "embeddings": ("eagle3", keys(**{LAYERS: [0, 0, 0]}), BOUNDARY, None, FITS.format("0, 0, 0")),
    "residual": ("eagle3", keys(norm_before_residual=True), {}, None, "its norm_before_residual is the other way"),
    "no map": ("eagle3", without_map, {}, None, r"tokens by other ids: its map of draft tokens \(d2t\) is wrong, or"),
    "other ids": ("eagle3", shuffled("lm_head.weight"), {}, None, "by other ids: .* it is for another tokenizer"),
    "another model": ("eagle3", turned(), {}, None, "trained for another model, or for other weights of this one"),
    "card": ("eagle3", turned(), {}, OTHER_MODEL, "its card names some-lab/Other-7B as its target, and this one"),
    "verifier": ("eagle3", together(turned(), keys(speculators_config=VERIFIER)), {}, None, "names lab/Base-8B as its"),
    "end of text": ("eagle3", together(turned(), keys(eos_token_id=7)), {}, None, "which ends texts by 7"),
    "untrained": ("eagle3", untrained, {}, None, "its weights look untrained: all of its norms are 1"),
    "another embedding": (
        "eagle3", together(turned(), with_embedding(noise)), {}, None, "its copy of the embedding is not the target's",
    ),
    "fine-tuned": (
        "eagle3", together(turned(), with_embedding(lambda own: own + 0.5 * noise(own))), {}, None,
        "it was trained for other weights of this model: its copy of the embedding differs",
    ),
    "other order": (
        "eagle3", together(turned(), with_embedding(lambda own: own[order(len(own))])), {}, None,
        "another tokenizer: its copy of the embedding has the target's rows in another order",
    ),
    "EAGLE": ("eagle", turned(), {}, OTHER_MODEL, "its card names some-lab/Other-7B"),
    "MTP": ("mtp", turned("model.mtp_layers.0.input_proj.weight"), {}, OTHER_MODEL, "its card names some-lab/Other-7B"),
}  # fmt: skip
ALGORITHMS = {"eagle3": "EAGLE3", "eagle": "EAGLE", "mtp": "NEXTN"}


def made_wrong(folder: Path, kind: str, edit: Edit, card: str | None) -> Path:
    source = HEADS / "smollm2" / kind
    config, tensors = json.loads((source / "config.json").read_text()), dict[str, Tensor]()
    for file in source.glob("*.safetensors"):
        tensors |= load_file(file)
    edit(config, tensors)
    folder.mkdir()
    for name in ("eval.json", "token_map.json"):
        if (source / name).exists():
            (folder / name).write_bytes((source / name).read_bytes())
    (folder / "config.json").write_text(json.dumps(config))
    if card is not None:
        (folder / "README.md").write_text(card)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "does not fit this model" in record.getMessage()]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("layers backwards", "card") else FURTHER) for name in WRONG]
)
def test_what_is_wrong_is_said(name: str, smollm2_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kind, edit, options, card, expected = WRONG[name]
    head = made_wrong(tmp_path / "head", kind, edit, card)
    with LLM(
        "smollm2", device="cpu", speculative_algorithm=ALGORITHMS[kind], speculative_draft_model_path=str(head),
        speculative_fixed_shape=True, sampling_defaults="openai", **SHAPE, **SIZES, **options,
    ) as llm, caplog.at_level(logging.WARNING):  # fmt: skip
        llm.chat([[{"role": "user", "content": text}] for text in ASKED], {"temperature": 0, "max_new_tokens": 64})
    (sentence,) = said(caplog)
    assert re.search(
        rf"in {head} does not fit .*: [0-2]?\d% of its first drafts .* in 100 steps, its card says", sentence
    )
    assert re.search(expected, sentence), sentence


@pytest.mark.parametrize("kind", [pytest.param("eagle3"), pytest.param("eagle", marks=FURTHER),
                                  pytest.param("mtp", marks=FURTHER)])  # fmt: skip
def test_of_a_head_that_fits_nothing_is_said(kind: str, smollm2_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LLM(
        "smollm2", device="cpu", speculative_algorithm=ALGORITHMS[kind], speculative_fixed_shape=True,
        sampling_defaults="openai", **SHAPE, **SIZES,
    ) as llm, caplog.at_level(logging.WARNING):  # fmt: skip
        llm.chat([[{"role": "user", "content": text}] for text in ASKED], {"temperature": 0, "max_new_tokens": 100})
        assert llm.engine.reporter.drafters[ALGORITHMS[kind]].drafts > 100
    assert not said(caplog)


BLOCKS: dict[str, tuple[Callable[[], Any], str, Edit | None, str]] = {
    "right": (exact_dspark, "DSPARK", None, ""),
    "Markov head of another vocabulary": (
        exact_dspark, "DSPARK", shuffled("markov_head.markov_w2.weight"), "trained for another model",
    ),
    "pairs of another vocabulary": (
        exact_dflash2, "DFLASH2", shuffled("candidate_selector.successor_codebook"), "trained for another model",
    ),
    "which row predicts": (
        exact_domino, "DFLASH", lambda config, tensors: config["dflash_config"].update(shift_label=False),
        "it fits sample_from_anchor = true",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
def test_heads_that_draft_blocks(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make, algorithm, edit, expected = BLOCKS[name]
    exact = make()
    config, tensors = dict(exact.head.config), dict(exact.head.tensors)
    if edit is not None:
        edit(config, tensors)
    target = exact.target.write(tmp_path / "target")
    write_tokenizer(target)
    head = Checkpoint(tensors, config).write(tmp_path / "head")
    with LLM(
        str(target), device="cpu", dtype="float32", speculative_algorithm=algorithm,
        speculative_draft_model_path=str(head), speculative_fixed_shape=True, **SHAPE, **SIZES,
    ) as llm, caplog.at_level(logging.WARNING):  # fmt: skip
        prompts = [[start, start + 1, start + 2] for start in range(3, 43, 10)]
        llm.generate(prompts, {"temperature": 0, "max_new_tokens": 120, "ignore_eos": True})
    sentences = said(caplog)
    assert len(sentences) == (edit is not None)
    assert all(re.search(expected, one) for one in sentences), sentences


def test_what_cannot_be_loaded_says_so_at_once(smollm2_path: Path, tmp_path: Path) -> None:
    def loaded(name: str, edit: Edit, **options: Any) -> str:
        head = made_wrong(tmp_path / name, "eagle3", edit, None)
        with (
            pytest.raises(CheckpointError) as error,
            closing(Engine(engine_options(speculative_draft_model_path=str(head), **options))),
        ):
            pass
        return str(error.value)

    assert "vocab_size: expected 49152, found 32000" in loaded("vocabulary", keys(vocab_size=32000))
    assert "hidden_size of the target it was trained for: expected 576" in loaded("size", keys(target_hidden_size=640))
    assert f"{LAYERS}: expected 0 to 29 for a target of 30 layers" in loaded("depth", keys(**{LAYERS: [3, 20, 33]}))
    assert "expected --speculative-algorithm EAGLE3, found EAGLE" in loaded(
        "kind", keys(), speculative_algorithm="EAGLE"
    )


def engine_options(**changes: Any) -> Options:
    return Options.from_kwargs(
        **{"model": "smollm2", "device": "cpu", "speculative_algorithm": "EAGLE3", **SHAPE, **SIZES, **changes}
    )


@pytest.mark.slow
def test_a_target_on_two_ranks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whose embedding each has a part."""
    monkeypatch.setattr("draftwing.engine.head_fit.STEPS", 8)
    model = write_model(tmp_path / "model", "qwen3.5")
    with_prediction_layer(model, "qwen3.5")
    options = {"speculative_algorithm": "NEXTN", "speculative_fixed_shape": True, "disable_images": True}
    with LLM(
        str(model), tp_size=2, device="cpu", dtype="float32", num_threads=1, max_total_tokens=2048, **options
    ) as llm, caplog.at_level(logging.WARNING):  # fmt: skip
        llm.generate([[1, 2, 3], [4, 5]], {"max_new_tokens": 16, "temperature": 0.0, "ignore_eos": True})
    assert said(caplog)
