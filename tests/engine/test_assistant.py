"""Gemma 4 with its assistant: the text is the same as without, and what is drafted is what transformers' would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine.test_hybrid_models import texts
from engine.test_no_host_reads import SHAPES, FakeDevice, plans
from gemma4_models import ON_GPU, assistant_for, drafted, reference
from reference.learnable import ENGINE
from tiny_checkpoint import VOCAB, write_tokenizer
from torch import Tensor

from draftwing import LLM, SamplingParams
from draftwing.core import TreeShape
from draftwing.models.config import from_hf
from draftwing.models.heads.assistant_loader import load_assistant
from draftwing.ops.types import Draft
from draftwing.spec.assistant_drafter import AssistantDrafter
from draftwing.spec.drafter import DraftStep

pytestmark = pytest.mark.slow
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


@pytest.mark.further(kind="dense")
@pytest.mark.further(kind="per-layer", dtype="float32")
@pytest.mark.further(kind="clusters", dtype=["float32", "auto"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "auto"])
@pytest.mark.parametrize("kind", ["dense", "per-layer", "clusters"])
def test_drafts_change_no_token(tmp_path: Path, kind: str, dtype: str) -> None:
    written(tmp_path, kind)
    plain = texts(tmp_path / "target", "none", dtype)
    own = {"speculative_draft_model_path": str(tmp_path / "assistant"), "speculative_fixed_shape": True}
    tree = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
    for algorithm in ("FROZEN_KV_MTP", "FROZEN_KV_MTP+SUFFIX"):
        for shape in ({}, tree):
            assert texts(tmp_path / "target", algorithm, dtype, **own, **shape) == plain, (algorithm, shape)


@pytest.mark.parametrize("kind", ["dense", "per-layer", "clusters"])
def test_drafts_are_those_of_transformers(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, helper = written(tmp_path, kind)
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
        "speculative_draft_model_path": str(tmp_path / "assistant"), "speculative_fixed_shape": True,
        "speculative_num_steps": 3,
    }  # fmt: skip
    prompt = torch.randint(0, 256, (70,), generator=torch.Generator().manual_seed(3)).tolist()
    with LLM(str(tmp_path / "target"), **options) as llm:
        monkeypatch.setattr(AssistantDrafter, "propose", noted)
        llm.generate([prompt], SamplingParams(temperature=0.0, max_new_tokens=9, ignore_eos=True))
    assert len(found) > 3
    for ids, tokens in found:
        assert tokens.tolist() == [int(logits.argmax()) for logits in drafted(theirs, helper, ids, 3)]


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
    plain = texts(tmp_path / "target", "none", "bfloat16", **gpu)
    # Of prompts that are not replayed from graphs the last layers see few queries, but not where an assistant drafts.
    assert texts(tmp_path / "target", "none", "bfloat16", disable_cuda_graph=True, **gpu) == plain
    own = {"speculative_draft_model_path": str(tmp_path / "assistant"), "speculative_fixed_shape": True}
    tree = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
    for shape in ({}, tree):
        assert texts(tmp_path / "target", "FROZEN_KV_MTP", "bfloat16", **gpu, **own, **shape) == plain, shape
