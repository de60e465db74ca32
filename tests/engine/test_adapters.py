"""Requests with adapters: each text is that of a model with the adapter merged, whoever runs beside it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from reference.block_heads import dflash_head
from reference.checkpoints import Checkpoint, eagle2_head, eagle3_head, small_llama_draft
from reference.exact_heads import MAKERS, disturbed
from reference.learnable import ENGINE, write_target
from safetensors.torch import load_file
from tiny_adapters import merged, write_adapter
from tiny_checkpoint import VOCAB, write_tokenizer

from draftwing import LLM, SamplingParams
from draftwing.errors import RequestError
from draftwing.requests.request import GenerationRequest

GREEDY = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target") / "model", num_hidden_layers=4, intermediate_size=64)


@pytest.fixture(scope="module")
def adapters(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "one": write_adapter(folder / "one", target, 1, rank=4),
        "two": write_adapter(folder / "two", target, 2, rank=7, targets=("q_proj", "v_proj"), use_rslora=True),
        "three": write_adapter(
            folder / "three", target, 3, rank=2, targets=("k_proj", "o_proj", "down_proj", "up_proj"),
            rank_pattern={"k_proj": 5}, alpha_pattern={"down_proj": 3},
        ),
    }  # fmt: skip


PROMPTS = [[(7 * i + j) % 250 for j in range(12)] for i in range(6)]


def test_texts_are_those_of_merged_models(target: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    expected = {}
    for name, folder in adapters.items():
        with LLM(str(merged(target, folder, tmp_path / name)), **ENGINE) as llm:
            expected[name] = [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)]
    with LLM(str(target), **ENGINE) as llm:
        expected[None] = [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)]
    with LLM(str(target), **ENGINE, **serving(adapters)) as llm:
        found = {name: [one.token_ids for one in llm.generate(PROMPTS, GREEDY, adapter=name)] for name in expected}
    assert found == expected
    assert len(set(map(str, found.values()))) == 4


def serving(adapters: dict[str, Path], slots: int = 2) -> dict[str, Any]:
    return {"lora_modules": [f"{name}={path}" for name, path in adapters.items()], "max_loras": slots}


@pytest.mark.further(dtype="auto")
@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_ranks_from_1_to_256_in_one_engine(target: Path, tmp_path: Path, dtype: str) -> None:
    """With drafts, in one batch with two slots: in float32 as merged, in fewer bits as each alone without."""
    names = ["1", "256", None, "64", "256", "1"]
    every = {
        rank: write_adapter(tmp_path / f"rank {rank}", target, int(rank), int(rank)) for rank in ("1", "64", "256")
    }
    kind, alone = {**ENGINE, "dtype": dtype}, dict[str | None, list[list[int]]]()
    for name in {*names}:
        folder = target if dtype == "auto" or name is None else merged(target, every[name], tmp_path / name)
        more = serving(every) if folder == target else {}
        with LLM(str(folder), **kind, **more, speculative_algorithm="none") as llm:
            adapter = name if more else None
            alone[name] = [one.token_ids for one in llm.generate(PROMPTS, GREEDY, adapter=adapter)]
    with LLM(str(target), **kind, **serving(every), **DRAFTERS["ngram"]) as llm:
        for _ in range(2):
            found = [one.token_ids for one in llm.generate(PROMPTS, GREEDY, adapter=names)]
            assert found == [alone[name][i] for i, name in enumerate(names)]
        assert llm.engine.stats()["adapter_loads"] >= 4
    assert len({str(texts) for texts in alone.values()}) == 4


DRAFTERS = {
    "none": {"speculative_algorithm": "none"},
    "ngram": {"speculative_algorithm": "NGRAM", "speculative_fixed_shape": True},
    "suffix": {"speculative_algorithm": "SUFFIX", "speculative_fixed_shape": True},
}


@pytest.mark.further(drafter=["none", "ngram"], dtype="bfloat16")
@pytest.mark.further(drafter=["none", "suffix"], dtype="float32")
@pytest.mark.further(drafter=["ngram", "suffix"], dtype="auto")
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("dtype", ["float32", "auto", "bfloat16"])
def test_who_runs_beside_a_request_and_drafts_change_no_text(
    target: Path, adapters: dict[str, Path], drafter: str, dtype: str
) -> None:
    names = [None, "one", "two", "three", "one", None]
    params = [{**GREEDY, "temperature": 2.0 * (i % 2), "sampling_seed": i} for i in range(len(PROMPTS))]
    kind = {**ENGINE, "dtype": dtype}
    alone = []
    with LLM(str(target), **kind, **serving(adapters)) as llm:
        for i, name in enumerate(names):
            alone += llm.generate(PROMPTS[i], params[i], adapter=name)
    with LLM(str(target), **kind, **serving(adapters), **DRAFTERS[drafter]) as llm:
        for _ in range(3):  # again from cached prefixes, and from recordings
            together = llm.generate(PROMPTS, params, adapter=names)
            assert [one.token_ids for one in together] == [one.token_ids for one in alone]
        stats = llm.engine.stats()
    if drafter != "none":
        assert sum(one.meta_info["spec_num_correct_drafts"] for one in together) > 0
    assert stats["adapter_loads"] >= 3 and stats["adapters_on_device"] == 2


def drafting(kind: str, folder: Path) -> tuple[Path, dict[str, Any], list[int]]:
    """A target whose text its own head mostly knows, how that is served, and tokens that prompts may end in."""
    make, scale = MAKERS[kind]
    exact = make(vocab_size=VOCAB, **({"rows": 192} if kind == "EAGLE3" else {}))
    target = disturbed(exact.target, scale).write(folder / "target")
    write_tokenizer(target)
    path = {} if exact.head is None else {"speculative_draft_model_path": str(exact.head.write(folder / "head"))}
    return target, {"speculative_algorithm": kind, "speculative_fixed_shape": True, **path}, exact.starts


@pytest.mark.exhaustive  # as test_adapters_that_come_and_go_under_load, with more of them
@pytest.mark.slow
@pytest.mark.further(drafter=[*DRAFTERS, "NEXTN", "DFLASH"])
@pytest.mark.parametrize("drafter", [*DRAFTERS, "EAGLE3", "NEXTN", "DFLASH"])
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.exhaustive), "auto"])
def test_32_adapters_take_turns_in_a_few_slots(target: Path, tmp_path: Path, drafter: str, dtype: str) -> None:
    """Of one batch with all of them each text is that of its adapter alone: they are swapped in and out meanwhile,
    pairs of requests begin alike, and there is room for the KV of a few. Most drafts of heads are right."""
    drafts, ends = DRAFTERS.get(drafter), list(range(VOCAB - 2))
    if drafts is None:
        target, drafts, ends = drafting(drafter, tmp_path)
    strength = 1.0 if drafter in DRAFTERS else 0.3
    every = {
        f"a{i}": write_adapter(tmp_path / f"a{i}", target, i, rank=1 + i % 7, strength=strength) for i in range(32)
    }
    names = [f"a{i // 2}" for i in range(64)]
    prompts = [[*PROMPTS[i // 2 % 5], ends[i % 2]] for i in range(64)]
    params = [{**GREEDY, "max_new_tokens": 10, "temperature": float(i % 2), "sampling_seed": i} for i in range(64)]
    kind = {**ENGINE, "dtype": dtype, **serving(every, 5)}
    with LLM(str(target), **kind, speculative_algorithm="none") as llm:
        alone = [
            llm.generate(prompt, one, adapter=name)[0].token_ids
            for prompt, one, name in zip(prompts, params, names, strict=True)
        ]
    with LLM(str(target), **{**kind, "max_total_tokens": 160}, **drafts) as llm:
        together = [one for _ in range(2) for one in llm.generate(prompts, params, adapter=names)]
        stats = llm.engine.stats()
    assert [one.token_ids for one in together] == 2 * alone
    assert stats["adapters_on_device"] == 5 and stats["adapter_loads"] >= 64
    assert any(one.meta_info["cached_tokens"] for one in together)
    assert len(set(map(tuple, alone))) > 32
    correct = sum(one.meta_info["spec_num_correct_drafts"] for one in together)
    assert drafter in DRAFTERS or correct > 200, correct


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("drafter", ["EAGLE3", pytest.param("NEXTN", marks=pytest.mark.exhaustive),
                                     pytest.param("DFLASH", marks=pytest.mark.exhaustive)])  # fmt: skip
@pytest.mark.parametrize("most", [pytest.param(None, marks=pytest.mark.exhaustive), 1])
def test_adapters_that_come_and_go_under_load(tmp_path: Path, drafter: str, ranks: int, most: int | None) -> None:
    """Of eight files six have a name, two a slot, and `most` are in memory: a request has what its name meant when it
    came, whatever is loaded and unloaded until it ends."""
    target, drafts, ends = drafting(drafter, tmp_path)
    every = [write_adapter(tmp_path / f"a{i}", target, i, rank=1 + i % 5, strength=0.3) for i in range(8)]
    prompts = [[*PROMPTS[i], ends[i]] for i in range(4)]
    more = [{"max_new_tokens": 16, "temperature": float(i % 2), "sampling_seed": i} for i in range(4)]
    params = [SamplingParams(**GREEDY | one) for one in more]
    kind = {**ENGINE, "lora_dir": str(tmp_path), "max_loras": 2, "max_running_requests": 5}
    if ranks == 1:  # whose sums in another order would else move what is rounded to 8 bits
        kind["dtype"] = "auto"
    alone = []
    with LLM(str(target), **kind, speculative_algorithm="none") as llm:
        for path in every:
            llm.load_adapter("x", path, replace=True)
            alone.append([llm.generate(*one, adapter="x")[0].token_ids for one in zip(prompts, params, strict=True)])
    draw, named, asked, left = random.Random(ranks), dict[str, int](), list[tuple[int, int]](), 0
    with LLM(str(target), **kind, **drafts, tp_size=ranks, max_cpu_loras=most) as llm:
        engine, found = llm.engine, [list[int]() for _ in range(45)]
        while len(asked) < len(found) or left:
            name, what = draw.choice("uvwxyz"), draw.random()
            if what < 0.1 and name in named:
                engine.unload_adapter(name)
                del named[name]
            elif what < 0.3:
                named[name] = draw.randrange(len(every))
                engine.load_adapter(name, every[named[name]], replace=True)
            elif name in named and len(asked) < len(found):
                i = draw.randrange(len(prompts))
                asked.append((named[name], i))
                left += 1
                uid = str(len(asked) - 1)
                engine.submit(GenerationRequest(uid, prompts[i], params[i], adapters=((name, 1.0),)))
            for output in engine.step() if left else ():
                found[int(output.uid)] += output.token_ids
                left -= output.finish_reason is not None
        stats = engine.stats()
        assert engine.reporter.accept_length > 1.2 and stats["adapter_loads"] > 6, stats
        assert stats["adapters"] == len(named) and stats["adapters_on_device"] == 2
        assert (most == 1) == (stats["adapter_reads"] > 0)
    assert found == [alone[which][i] for which, i in asked]
    assert len({tuple(text) for text in found}) > 16


HEADS = {
    "EAGLE3": lambda target: eagle3_head(target, vocab_size=VOCAB, rows=64),
    "EAGLE": lambda target: eagle2_head(target, vocab_size=VOCAB),
    "DFLASH": dflash_head,
    "STANDALONE": lambda target: small_llama_draft(vocab_size=VOCAB),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.exhaustive), "auto"])
@pytest.mark.parametrize("algorithm", HEADS)
def test_heads_and_draft_models_change_no_text(
    target: Path, adapters: dict[str, Path], tmp_path: Path, algorithm: str, dtype: str
) -> None:
    """A head that knows nothing of adapters, as in https://github.com/vllm-project/vllm/issues/26679."""
    config = json.loads((target / "config.json").read_text())
    head = HEADS[algorithm](Checkpoint(load_file(target / "model.safetensors"), config)).write(tmp_path / "head")
    write_tokenizer(head)  # of a draft model
    drafting = {"speculative_algorithm": algorithm, "speculative_draft_model_path": str(head)}
    names = [None, "one", "two", "three", "one", None]
    params = [{**GREEDY, "temperature": 2.0 * (i % 2), "sampling_seed": i} for i in range(len(PROMPTS))]
    kind = {**ENGINE, **serving(adapters, 3), "dtype": dtype}
    with LLM(str(target), **kind, speculative_algorithm="none") as llm:
        alone = [
            llm.generate(prompt, one, adapter=name)[0].token_ids
            for prompt, one, name in zip(PROMPTS, params, names, strict=True)
        ]
    with LLM(str(target), **kind, **drafting, speculative_fixed_shape=True) as llm:
        for _ in range(2):
            together = llm.generate(PROMPTS, params, adapter=names)
            assert [one.token_ids for one in together] == alone
    assert sum(one.meta_info["spec_num_proposed_drafts"] for one in together) > 50


def test_several_adapters_together_are_the_merged_sum(target: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    both = merged(merged(target, adapters["one"], tmp_path / "one"), adapters["three"], tmp_path / "both")
    with LLM(str(both), **ENGINE) as llm:
        expected = [one.token_ids for one in llm.generate(PROMPTS, GREEDY)]
    with LLM(str(target), **ENGINE, **serving(adapters)) as llm:
        session = llm._session
        asked = [
            GenerationRequest("", prompt, SamplingParams(**GREEDY), adapters=(("one", 1.0), ("three", 1.0)))
            for prompt in PROMPTS
        ]
        answers = session.prepare(asked)
        for _ in session.stream(answers):
            pass
        assert [answer.token_ids for answer in answers] == expected
        more = asked[0]._replace(adapters=(("one", 0.5),) * 5)
        with pytest.raises(RequestError, match="max-lora-rank"):
            list(session.stream(session.prepare([more] * 1)))
        llm.unload_adapter("two")
        with pytest.raises(RequestError, match="'two' is not loaded"):
            llm.generate(PROMPTS, GREEDY, adapter="two")


def test_an_adapter_of_another_model_of_the_same_shapes_is_named(
    target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is served, and the log says what it was trained on; a name in other words, and a folder, say nothing."""
    model = tmp_path / "zephyr-7b-beta"
    model.symlink_to(target)
    bases = ["mistralai/Mistral-7B-v0.1", "HuggingFaceH4/zephyr-7b-beta", "unsloth/Zephyr-7B-beta-bnb-4bit", "./last"]
    paths = [write_adapter(tmp_path / str(i), target, i, base_model_name_or_path=base) for i, base in enumerate(bases)]
    with LLM(str(model), **ENGINE, lora_modules=[f"first={paths[0]}"], lora_dir=str(tmp_path)) as llm:
        for i, path in enumerate(paths):
            llm.load_adapter(f"a{i}", path)
        assert len(llm.generate(PROMPTS[:1], GREEDY, adapter="first")[0].token_ids) == 24
    found = [one.getMessage() for one in caplog.records if "was trained on" in one.getMessage()]
    assert [name in one for one, name in zip(found, ("'first'", "'a0'"), strict=True)] == [True, True]
    assert all(bases[0] in one and str(model) in one for one in found)
