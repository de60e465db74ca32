"""Gemma 4 with its assistant: the text is the same as without, and what is drafted is what transformers' would."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_quantised as tiny
import torch
from engine.test_hybrid_models import plain, texts
from engine.test_no_host_reads import SHAPES, FakeDevice, plans
from gemma4_models import ON_GPU, assistant_for, drafted, reference, write_gguf
from gguf import GGMLQuantizationType as Type
from reference.learnable import ENGINE
from thread_ranks import meet
from tiny_checkpoint import VOCAB, write_tokenizer
from torch import Tensor

from draftwing import LLM, SamplingParams
from draftwing.config.trees import LOOKUP_ALONE, PLAIN, TreeShape
from draftwing.engine.graphs import RecordedStages
from draftwing.models.config import from_hf
from draftwing.models.heads.assistant_loader import load_assistant
from draftwing.models.loader import load_model
from draftwing.ops import make_ops
from draftwing.ops.types import Draft
from draftwing.sched.policy.shape_policy import StepContext, TreePolicy
from draftwing.spec.assistant_drafter import AssistantDrafter
from draftwing.spec.drafter import DraftStep

pytestmark = pytest.mark.slow
FEW = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
OTHERS: list[tuple[str, dict[str, int]]] = [("dense", FEW), ("clusters", {})]
TARGET = {"vocab_size": VOCAB, "max_position_embeddings": 512, "tie_word_embeddings": False}


def written(folder: Path, kind: str, sizes: dict[str, Any] = TARGET) -> tuple[Any, Any]:
    """A target and its assistant."""
    theirs = reference("dense" if kind == "clusters" else kind, **sizes)
    divisor = next(count for count in (43, 40) if theirs.config.vocab_size % count == 0)
    helper = assistant_for(theirs, divisor if kind == "clusters" else 0)
    theirs.save_pretrained(folder / "target")
    write_tokenizer(folder / "target")
    helper.save_pretrained(folder / "assistant")
    return theirs, helper


Made = Callable[[str], tuple[Path, Any, Any]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A folder with `written`, and the models, once of each kind."""

    def write(kind: str) -> tuple[Path, Any, Any]:
        folder = tmp_path_factory.mktemp("assistant")
        return folder, *written(folder, kind)

    return cache(write)


@pytest.mark.further(kind="dense")
@pytest.mark.further(dtype="float32")
@pytest.mark.further(kind="per-layer", dtype="auto")  # of files that are quantised the text is compared, too
@pytest.mark.further(kind="clusters", dtype="auto")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "auto"])
@pytest.mark.parametrize("kind", ["dense", "per-layer", "clusters"])
def test_drafts_change_no_token(made: Made, kind: str, dtype: str) -> None:
    folder, *_ = made(kind)
    own = {"speculative_draft_model_path": str(folder / "assistant"), "speculative_fixed_shape": True}
    for algorithm, shape in (("FROZEN_KV_MTP", {}), ("FROZEN_KV_MTP+SUFFIX", FEW)):
        found = texts(folder / "target", algorithm, dtype, **own, **shape)
        assert found == plain(folder / "target", dtype), (algorithm, shape)


@pytest.mark.parametrize("algorithm", ["FROZEN_KV_MTP", "FROZEN_KV_MTP+SUFFIX"])
def test_shapes_that_take_turns(made: Made, algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a policy may choose: trees of both, of the lookup alone, and no drafts. An assistant has no backlog."""
    folder, *_ = made("dense")
    expected, chosen = plain(folder / "target", "float32"), []

    def choose(self: TreePolicy, context: StepContext) -> TreeShape:
        chosen.append(self.menu[len(chosen) % len(self.menu)])
        return chosen[-1]

    monkeypatch.setattr(TreePolicy, "choose", choose)
    own = {"speculative_draft_model_path": str(folder / "assistant")}
    assert texts(folder / "target", algorithm, "float32", **own, **FEW) == expected
    alone = {shape for shape in chosen if shape.proposer == LOOKUP_ALONE}
    assert bool(alone) == ("SUFFIX" in algorithm) and PLAIN in chosen and len(set(chosen)) > 2


@pytest.mark.parametrize("kind", ["dense", "per-layer", "clusters"])
def test_drafts_are_those_of_transformers(made: Made, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, theirs, helper = made(kind)
    found: list[tuple[Tensor, Tensor]] = []
    propose = AssistantDrafter.propose

    def noted(self: AssistantDrafter, step: DraftStep) -> Draft:
        draft = propose(self, step)
        for row, tokens in zip(step.rows.tolist(), draft.tokens, strict=True):
            length = int(step.table.kv_len[row]) + 1
            if length > 5:  # a request, and no trial at the start
                found.append((step.table.tokens[row, :length].clone(), tokens[1:].clone()))
        return draft

    options: dict[str, Any] = {
        **ENGINE, "dtype": "float32", "chunked_prefill_size": 40, "speculative_algorithm": "FROZEN_KV_MTP",
        "speculative_draft_model_path": str(folder / "assistant"), "speculative_fixed_shape": True,
        "speculative_num_steps": 3,
    }  # fmt: skip
    prompt = torch.randint(0, 256, (70,), generator=torch.Generator().manual_seed(3)).tolist()
    with LLM(str(folder / "target"), **options) as llm:
        monkeypatch.setattr(AssistantDrafter, "propose", noted)
        llm.generate([prompt], SamplingParams(temperature=0.0, max_new_tokens=9, ignore_eos=True))
    assert len(found) > 3
    for ids, tokens in found:
        assert tokens.tolist() == [int(logits.argmax()) for logits in drafted(theirs, helper, ids, 3)]


@pytest.mark.further(form=["fp8 block", "gptq", "compressed int4"])
@pytest.mark.parametrize("form", ["Q8_0", "fp8 block", "awq", "gptq", "compressed int4"])
def test_of_files_that_are_quantised(tmp_path: Path, form: str) -> None:
    """Target and assistant, a folder each or a GGUF file."""
    theirs, helper = written(tmp_path, "dense")
    names = ["target", "assistant"]
    if form == "Q8_0":
        for name, one in zip(names, (theirs, helper), strict=True):
            write_gguf(tmp_path / f"{name}.gguf", one, Type.Q8_0)
        names = [f"{name}.gguf" for name in names]
    else:
        config, write = tiny.FORMATS[form]
        for name in names:
            tiny.quantise(tmp_path / name, config, lambda _: write)
    target, assistant = (tmp_path / name for name in names)
    own: dict[str, Any] = {"tokenizer_path": str(tmp_path / "target")}
    expected = texts(target, "none", "auto", **own)
    own |= {"speculative_draft_model_path": str(assistant), "speculative_fixed_shape": True}
    assert texts(target, "FROZEN_KV_MTP", "auto", **own, **FEW) == expected


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("dense", {}), ("clusters", FEW), *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in OTHERS)],
)
def test_steps_are_recorded(made: Made, kind: str, shape: dict[str, int]) -> None:
    folder, *_ = made(kind)
    params = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
    own = {"speculative_draft_model_path": str(folder / "assistant"), "speculative_fixed_shape": True}
    options = {**ENGINE, "speculative_algorithm": "FROZEN_KV_MTP", "quantization": "q8_0", **own, **shape}
    with LLM(str(folder / "target"), **options) as llm:
        stages = llm.engine.parts.executor.graphs
        if not isinstance(stages, RecordedStages):
            pytest.skip("nothing is recorded here")
        llm.generate([[5, 6, 7, 8, 9, 5, 6, 7]], params)
        assert stages.replays > 5 and not stages.refused


@pytest.mark.further(kind=["per-layer", "clusters"])
@pytest.mark.parametrize("harness", ["ranks"], indirect=True, scope="session")
@pytest.mark.parametrize("kind", ["dense", "per-layer", "clusters"])
def test_on_two_ranks(harness: Any, made: Made, kind: str) -> None:
    """The same text as on one rank without drafts, of as many steps as with them."""
    folder, *_ = made(kind)
    whole = load_model(folder / "target", torch.float32, "cpu")
    ops, shape = make_ops(torch.device("cpu")), TreeShape(3, 2, 6)
    model, *others = (load_model(folder / "target", torch.float32, "cpu", ranks=ranks) for ranks in meet())
    for share in (model, *others):
        share.pack(ops)
    model.others, model.whole = others, (whole,)  # type: ignore[assignment]
    prompts = harness.prompts_for(4, seed=3)
    params = [harness.greedy(24) if i % 2 else harness.seeded(24, seed=i) for i in range(4)]
    expected = harness.plain_answers(model, prompts, params)

    def drafter(target: Any) -> AssistantDrafter:
        head = load_assistant(folder / "assistant", target, torch.float32, "cpu")
        head.pack(ops)
        return AssistantDrafter(head, 6, shape.topk, torch.float32, ops)

    whole_prompts: dict[str, Any] = {"chunk": 128, "rows": 5, "lag": 1}  # in one prefill, which no clock cuts
    spread = harness.Rig(model, shapes=(shape,), drafter=drafter, **whole_prompts)
    assert spread.answer(prompts, params).tokens == expected.tokens
    alone = harness.one_rank(whole, shapes=(shape,), drafter=drafter(whole), **whole_prompts)
    assert alone.answer(prompts, params).tokens == expected.tokens
    assert spread.accept_length == alone.accept_length > 1


@pytest.mark.further(shape=SHAPES[:2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_step_needs_no_data(on_cpu: Any, tmp_path: Path, shape: TreeShape) -> None:
    """Neither of the target's, with embeddings and keys of its own kind, nor of the assistant's."""
    theirs = reference("per-layer", vocab_size=on_cpu.VOCAB, max_position_embeddings=on_cpu.CONTEXT)
    assistant_for(theirs).save_pretrained(tmp_path)
    target = on_cpu.model_of(from_hf({**theirs.config.to_dict(), "architectures": ["Gemma4ForCausalLM"]}))
    head = load_assistant(tmp_path, target, torch.float32, "cpu").to("meta")
    target.to("meta")
    device = FakeDevice()
    with device.device:
        drafter = AssistantDrafter(head, 7, shape.topk, torch.float32, device.ops)
        rig = on_cpu.Rig(target, shapes=(shape,), drafter=drafter, fake_device=device)
        for plan in plans(shape, SamplingParams(temperature=0.8)):
            packed = rig.executor.commit(rig.executor.launch(plan)).download.wait()
            assert tuple(packed.shape) == (len(plan.rows), 2 + plan.shape.max_commit + 2 * plan.shape.nodes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["dense", "per-layer", "clusters"])
def test_on_a_gpu(tmp_path: Path, kind: str) -> None:
    written(tmp_path, kind, ON_GPU)
    gpu = {"device": "cuda", "enable_deterministic_inference": True}
    expected = texts(tmp_path / "target", "none", "bfloat16", **gpu)
    # Of prompts that are not replayed from graphs the last layers see few queries, but not where an assistant drafts.
    assert texts(tmp_path / "target", "none", "bfloat16", disable_cuda_graph=True, **gpu) == expected
    own = {"speculative_draft_model_path": str(tmp_path / "assistant"), "speculative_fixed_shape": True}
    for shape in ({}, FEW):
        assert texts(tmp_path / "target", "FROZEN_KV_MTP", "bfloat16", **gpu, **own, **shape) == expected, shape
