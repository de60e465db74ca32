"""Requests with adapters beside every drafter, in models with recurrent states and with pictures: each text is that of
its adapter alone without drafts."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import hybrid_models
import image_models
import pytest
import torch
from engine.test_adapters import serving
from engine.test_assistant import written as with_assistant
from engine.test_hybrid_models import written as hybrid
from engine_rig import Cycle, Rig, greedy
from reference.block_heads import dflash2_head
from reference.exact_heads import MAKERS, disturbed, exact_masks
from reference.learnable import ENGINE
from safetensors.torch import load_file
from scripted import launched
from tiny_adapters import ATTENTION, MLP, write_adapter
from tiny_checkpoint import VOCAB, write_tokenizer

from draftwing import LLM
from draftwing.config.trees import TreeShape
from draftwing.models.adapters.files import WEIGHTS
from draftwing.models.adapters.peft import read_folder
from draftwing.text.tokenizer import load_tokenizer

NAMES = [None, "one", "two", "three", "one", None, "three", "two"]
TREE = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}


def three_adapters(
    folder: Path, target: Path, strength: float, targets: tuple[str, ...] = ATTENTION + MLP
) -> dict[str, Path]:
    return {
        name: write_adapter(folder / name, target, i, 2 + 3 * i, targets, strength)
        for i, name in enumerate(("one", "two", "three"))
    }


def check(target: Path, adapters: dict[str, Path], prompts: list[list[int]], dtype: str, **drafts: Any) -> list[Any]:
    """Three rounds of one batch in an engine with two slots, the later ones from cached prefixes; returns the last."""
    params = [
        {"max_new_tokens": 24, "ignore_eos": True, "temperature": float(i % 3 == 0), "sampling_seed": i}
        for i in range(len(prompts))
    ]
    kind, alone = {**ENGINE, "dtype": dtype, **serving(adapters)}, []
    with LLM(str(target), **kind, speculative_algorithm="none", disable_radix_cache=True) as llm:
        for i, name in enumerate(NAMES):
            alone += [one.token_ids for one in llm.generate(prompts[i], params[i], adapter=name)]
    with LLM(str(target), **kind, **drafts) as llm:
        for _ in range(3):
            together = llm.generate(prompts, params, adapter=NAMES)
            assert [one.token_ids for one in together] == alone
        assert llm.engine.stats()["adapter_loads"] >= 4
    assert len({tuple(text) for text in alone}) > 5
    return together


# ---- drafters --------------------------------------------------------------------------------------------------------

# Who drafts, by its name, and which head of a target's it has.
SOURCES: dict[str, tuple[str, Any]] = {
    "DFLASH2": ("DFLASH2", MAKERS["DFLASH2"][0]),
    "DSPARK": ("DSPARK", MAKERS["DSPARK"][0]),
    "P-EAGLE": ("EAGLE3", exact_masks),
    "two layers": ("NEXTN", MAKERS["NEXTN 2 layers"][0]),
    "EAGLE3+SUFFIX": ("EAGLE3+SUFFIX", MAKERS["EAGLE3"][0]),
    "NEXTN+NGRAM": ("NEXTN+NGRAM", MAKERS["NEXTN"][0]),
    "EAGLE3+DFLASH2+SUFFIX": ("EAGLE3+DFLASH2+SUFFIX", MAKERS["EAGLE3"][0]),
}


@pytest.mark.slow
@pytest.mark.further(source=[one for one in SOURCES if one != "DSPARK"], dtype="float32")
@pytest.mark.parametrize("dtype", ["float32", "auto"])
@pytest.mark.parametrize("source", SOURCES)
def test_every_drafter_beside_adapters(tmp_path: Path, source: str, dtype: str) -> None:
    """Heads that know nothing of adapters, and of the model most."""
    algorithm, make = SOURCES[source]
    exact = make(vocab_size=VOCAB, **({"rows": 192} if "EAGLE" in source else {}))
    target = disturbed(exact.target, 0.8 if "NEXTN" in algorithm else 0.65).write(tmp_path / "target")
    write_tokenizer(target)
    drafts: dict[str, Any] = {"speculative_algorithm": algorithm, "speculative_fixed_shape": True}
    if exact.head is not None:
        drafts["speculative_draft_model_path"] = str(exact.head.write(tmp_path / "head"))
    if "+DFLASH2" in algorithm:
        block = dflash2_head(exact.target).write(tmp_path / "block")
        drafts["speculative_second_draft_model_path"] = str(block)
    prompts = [[*((7 * i + j) % 250 for j in range(12)), exact.starts[i]] for i in range(len(NAMES))]
    together = check(target, three_adapters(tmp_path, target, 0.3), prompts, dtype, **drafts)
    assert sum(one.meta_info["spec_num_correct_drafts"] for one in together) > 25


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm", ["FROZEN_KV_MTP", pytest.param("FROZEN_KV_MTP+SUFFIX", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("kind", ["dense", pytest.param("per-layer", marks=pytest.mark.exhaustive)])
def test_an_assistant_that_reads_keys_of_adapted_layers(tmp_path: Path, kind: str, algorithm: str) -> None:
    with_assistant(tmp_path, kind)
    target = tmp_path / "target"
    drafts = {"speculative_draft_model_path": str(tmp_path / "assistant"), "speculative_algorithm": algorithm, **TREE}
    prompts = [[(5 * i + j) % 250 for j in range(9)] * 2 for i in range(len(NAMES))]
    together = check(
        target, three_adapters(tmp_path, target, 0.5), prompts, "float32", speculative_fixed_shape=True, **drafts
    )
    assert sum(one.meta_info["spec_num_proposed_drafts"] for one in together) > 100


# ---- recurrent states ------------------------------------------------------------------------------------------------


def linears(model: torch.nn.Module, *without: str) -> dict[str, torch.nn.Linear]:
    """Returns the matrices of layers that adapters are served of, by module. without: parts of names."""
    return {
        name: one
        for name, one in model.named_modules()
        if type(one) is torch.nn.Linear and ".layers." in name and not any(part in name for part in without)
    }


def adapters_of(model: torch.nn.Module, folder: Path, count: int, strength: float, *without: str) -> dict[str, Path]:
    """Writes adapters of all of a model's matrices, "1" of them and so on."""
    shapes = {name: (one.weight.shape[0], one.weight.shape[1]) for name, one in linears(model, *without).items()}
    kinds = sorted({name.rpartition(".")[2] for name in shapes})
    return {
        str(i): write_adapter(folder / str(i), folder, i, 2 + i, kinds, strength, shapes=shapes)
        for i in range(1, count + 1)
    }


@pytest.mark.slow
@pytest.mark.further(kind=["lfm2", "granite4-dense", "falcon-h1", "nemotron-h", "jamba"])
@pytest.mark.parametrize("kind", ["qwen3.5", "lfm2", "granite4-dense", "falcon-h1", "nemotron-h", "jamba"])
def test_snapshots_of_states_are_an_adapters_own(tmp_path: Path, kind: str) -> None:
    """One prompt with two adapters and with none: each goes on from the states that itself has left, with drafts as
    without, and as where nothing is cached."""
    target, drafters = hybrid(tmp_path / "target", kind)
    theirs = hybrid_models.reference(kind, vocab_size=VOCAB, max_position_embeddings=512)
    adapters = adapters_of(theirs, tmp_path, 2, 0.3, ".experts", "router", "mlp.gate.", "x_proj", "dt_proj")
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, 256, (150,), generator=generator).tolist()
    prompts = [prompt, [*prompt, 5], [*prompt, 5, 6, 7], [*prompt[:100], *prompt[:30]]]
    names = [None, "1", "2"]
    params = [
        {"max_new_tokens": 16, "ignore_eos": True, "temperature": float(i == 2), "sampling_seed": i} for i in range(4)
    ]
    kinds = {**ENGINE, "chunked_prefill_size": 64, **serving(adapters)}
    with LLM(str(target), **kinds, speculative_algorithm="none", disable_radix_cache=True) as llm:
        alone = {
            name: [llm.generate(*one, adapter=name)[0].token_ids for one in zip(prompts, params, strict=True)]
            for name in names
        }
    assert len({str(texts) for texts in alone.values()}) == 3
    for algorithm in ("none", *drafters):
        with LLM(str(target), **kinds, speculative_algorithm=algorithm) as llm:
            cached = {}
            for name in names:  # one after the other, of which the first of each finds nothing
                found = [llm.generate(*one, adapter=name)[0] for one in zip(prompts, params, strict=True)]
                assert [one.token_ids for one in found] == alone[name], (algorithm, name)
                cached[name] = [one.meta_info["cached_tokens"] for one in found]
            assert all(one[0] == 0 and min(one[1:3]) >= 64 for one in cached.values()), cached
            for turn in range(2):
                asked = [(name, i) for i in range(4) for name in (names[turn:] + names[:turn])]
                found = llm.generate(
                    [prompts[i] for _, i in asked], [params[i] for _, i in asked], adapter=[name for name, _ in asked]
                )
                assert [one.token_ids for one in found] == [alone[name][i] for name, i in asked], algorithm
                hits = [one.meta_info["cached_tokens"] >= 64 for one in found]  # some states had to go
                assert any(hits)


# ---- pictures --------------------------------------------------------------------------------------------------------

# Sizes of the pictures of each prompt, with a seed: with each adapter and without are the first one's, and one text.
SHOWN: list[list[tuple[int, int, int]]] = [
    [(40, 30, 0)],
    [(40, 30, 0)],
    [],
    [(30, 40, 1), (64, 16, 2)],
    [(40, 30, 0)],
    [(8, 8, 4)],
]
WHICH = [0, 1, 2, 1, 2, 0]


@contextmanager
def merged(model: torch.nn.Module, adapter: Path | None) -> Iterator[None]:
    """Has the factors added to the matrices of transformers' model, in float64; their alpha is twice their rank."""
    factors = {} if adapter is None else load_file(adapter / WEIGHTS)
    matrices, before = dict(model.named_modules()), list[tuple[torch.Tensor, torch.Tensor]]()
    for name, down in factors.items():
        if ".lora_A." in name:
            up = factors[name.replace("lora_A", "lora_B")]
            weight = matrices[name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")].weight.data
            before.append((weight, weight.clone()))
            weight.copy_(weight.double() + 2 * up.double() @ down.double())
    try:
        yield
    finally:
        for weight, old in before:
            weight.copy_(old)


@pytest.mark.slow
@pytest.mark.further(kind=[one for one in image_models.KINDS if one != "qwen3.5"])
@pytest.mark.parametrize("kind", image_models.KINDS)
def test_a_picture_and_an_adapter_in_one_request(tmp_path: Path, kind: str) -> None:
    """Each text is that of transformers with the adapter merged: with drafts, in chunks that begin inside pictures,
    from cached prefixes, whoever shows the same picture beside it."""
    folder, theirs = image_models.write_model(tmp_path, kind), image_models.reference(kind)
    adapters = adapters_of(theirs, folder, 2, 0.3, "vision", "visual", "per_layer")
    prompts = [
        image_models.prompt_of(folder, number, shown) for number, shown in zip((7, 7, 2, 3, 7, 5), SHOWN, strict=True)
    ]
    expected = {}
    for i, (slot, (ids, _), shown) in enumerate(zip(WHICH, prompts, SHOWN, strict=True)):
        with merged(theirs, adapters.get(str(slot))):
            images = [image_models.picture(*size) for size in shown]
            expected[str(i)] = image_models.greedy(kind, ids, images, 16)
    assert len({str(expected[i]) for i in "014"}) == 3, "one text and picture"
    model, given = image_models.loaded(folder)[0], [read_folder(path, 1 << 24) for path in adapters.values()]
    for chunk, shapes in ((64, [TreeShape(7, 4, 8)]), (7, [TreeShape(4, 3, 11), TreeShape(7, 4, 8)])):
        rig = Rig(model, drafter="ngram", policy=Cycle(*shapes), chunk=chunk, adapters=given, lag=1)
        for turn in range(2):
            for i, (slot, (ids, images)) in enumerate(zip(WHICH, prompts, strict=True)):
                rig.submit(f"{i} {turn}", ids, greedy(16), images=images, adapter=slot, salt=slot)
            found = rig.run()
            assert {i: found.tokens[f"{i} {turn}"] for i in expected} == expected, (chunk, turn)
            hits = [found.final[f"{i} {turn}"].meta["cached_tokens"] > 0 for i in (0, 1, 4)]
            assert hits == [turn > 0] * 3


@pytest.mark.exhaustive  # as above, through a server's front
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3.5", "qwen3-vl"])
def test_a_picture_and_an_adapter_over_http(tmp_path: Path, kind: str) -> None:
    folder, theirs = image_models.write_model(tmp_path / kind, kind), image_models.reference(kind)
    adapters = adapters_of(theirs, folder, 2, 0.3, "vision", "visual", "per_layer")
    image, expected = image_models.picture(40, 30, 0), {}
    text, (_, processor) = "ab<|image_pad|>say", image_models.loaded(folder)
    pieces = image_models.read(image_models.Picture(image_models.encoded(image), "x"), processor)
    ids, _ = image_models.placed(
        load_tokenizer(folder, None).encode(text), image_models.Prompt("", [pieces]), processor
    )
    for name in (None, *adapters):
        with merged(theirs, adapters.get(name or "")):
            expected[name] = image_models.greedy(kind, ids, [image], 16)
    url = "data:image/png;base64," + base64.b64encode(image_models.encoded(image)).decode()
    modules = " ".join(f"{name}={path}" for name, path in adapters.items())
    how = f"--model {folder} --lora-modules {modules} --max-loras 1 --speculative-algorithm NGRAM --dtype float32"
    params = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    shown = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "say"}]
    with launched(f"{how} --max-total-tokens 4096") as (_, server):
        for _ in range(2):  # again from cached prefixes, in the one slot
            for name, tokens in expected.items():
                body = {"text": text, "image_data": url, "sampling_params": params, "lora_path": name}
                found = httpx.post(f"{server}/generate", json=body, timeout=60).json()
                assert found.get("output_ids") == tokens, (name, found)
        chat = {
            "messages": [{"role": "user", "content": shown}],
            "temperature": 0,
            "max_tokens": 16,
            "ignore_eos": True,
        }
        said = [
            httpx.post(f"{server}/v1/chat/completions", json=chat | {"model": model}, timeout=60).json()["choices"][0]
            for model in (str(folder), "1", "2")
        ]
    assert len({one["message"]["content"] for one in said}) == 3
