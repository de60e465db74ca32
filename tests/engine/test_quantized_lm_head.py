"""Drafts by a copy of the lm_head in fewer bits: no text changes, and there is one where there is room."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from group_ops import GroupTorchOps
from reference.checkpoints import Checkpoint
from reference.exact_heads import MAKERS, disturbed
from tiny_checkpoint import VOCAB, write_tokenizer
from torch import Tensor

from draftwing.config.options import Options
from draftwing.engine.devices.cpu import CpuDevice
from draftwing.engine.engine import Engine
from draftwing.errors import ConfigError
from draftwing.models.heads import base
from draftwing.ops.gemm.stored import QuantizedRows
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams

ENGINE: dict[str, Any] = {
    "device": "cpu", "num_threads": 1, "max_total_tokens": 2000, "max_running_requests": 4, "dtype": "bfloat16",
    "enable_deterministic_inference": True, "speculative_num_steps": 3, "speculative_fixed_shape": True,
}  # fmt: skip
SIZES = {"vocab_size": 272, "hidden_size": 64}  # multiples of 16 and 64
ON_GPU = {  # every matrix has a multiple of 64 columns
    "vocab_size": 272, "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32,
}  # fmt: skip
LM_HEAD = "speculative_lm_head_quantization"


class Ops(GroupTorchOps):
    quantized: ClassVar[list[tuple[int, str]]]  # rows and scheme of each matrix

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        quantize = self.quantize_groups

        def quantize_groups(weight: Tensor, scheme: str, dynamic: bool = False) -> QuantizedRows:
            self.quantized.append((len(weight), scheme))
            return quantize(weight, scheme, dynamic)

        self.quantize_groups = quantize_groups


@pytest.fixture(autouse=True)
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    monkeypatch.setattr(Ops, "quantized", [], raising=False)
    monkeypatch.setattr("draftwing.engine.build.keeps_bits", lambda executor: True)  # test_exactness.py has it
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr("draftwing.engine.devices.base.make_ops", Ops)
    return Ops.quantized


class Case:
    """A target and a head that is mostly right, in folders."""

    def __init__(self, kind: str, folder: Path, sizes: dict[str, int] = SIZES) -> None:
        make, scale = MAKERS[kind]
        exact = make(**sizes, **({"rows": 192} if kind == "EAGLE3" else {}))
        self.target = disturbed(exact.target, scale / 2).write(folder / "target")
        write_tokenizer(self.target)
        self.options: dict[str, Any] = {"model": str(self.target), "speculative_algorithm": kind, **ENGINE}
        self.head: Checkpoint | None = exact.head
        if exact.head is not None and kind != "NEXTN":
            self.options["speculative_draft_model_path"] = str(exact.head.write(folder / "head"))

    def engine(self, **options: Any) -> Engine:
        return Engine(Options.from_kwargs(**{**self.options, **options}))


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Each kind once."""
    return cache(lambda kind: Case(kind, tmp_path_factory.mktemp("lm_head")))


def answers(engine: Engine, count: int = 4) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(count)]
    for i in range(len(found)):
        params = SamplingParams(
            max_new_tokens=16, temperature=0.8 * (i % 2), sampling_seed=i, ignore_eos=True,
            allowed_token_ids=tuple(range(VOCAB)),
        )  # fmt: skip
        engine.submit(GenerationRequest(str(i), [3 + i, 40 + 7 * i], params))
    left = len(found)
    while left:
        for output in engine.step():
            found[int(output.uid)] += output.token_ids
            left -= output.finish_reason is not None
    return found


def accepted(engine: Engine) -> float:
    """Tokens of a step of one request."""
    rows, tokens = engine.reporter.total_rows, engine.reporter.total_tokens
    answers(engine, 2)
    return (engine.reporter.total_tokens - tokens) / (engine.reporter.total_rows - rows)


@pytest.mark.slow
@pytest.mark.further(kind=["EAGLE", "EAGLE3", "DSPARK"])
@pytest.mark.parametrize("scheme", ["int8", "w4a16"])
@pytest.mark.parametrize("kind", ["NEXTN", "EAGLE", "EAGLE3", "DSPARK"])
def test_drafts_change_no_text(
    case_of: Callable[[str], Case], kind: str, scheme: str, ops: list[tuple[int, str]]
) -> None:
    """int8 with chains, the other with trees."""
    case = case_of(kind)
    with closing(case.engine(speculative_algorithm="none", speculative_draft_model_path=None)) as plain:
        expected = answers(plain)
    assert not ops and len({tuple(text) for text in expected}) > 3
    topk, nodes = (1, 4) if scheme == "int8" else (3, 8)
    tree = {"speculative_eagle_topk": topk, "speculative_num_draft_tokens": nodes}
    with closing(case.engine(**{LM_HEAD: scheme}, **tree)) as engine:
        assert answers(engine) == expected
        assert engine.reporter.total_tokens > 1.2 * engine.reporter.total_rows, "little was accepted"
    assert {found for _, found in ops} == {scheme}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("scheme", ["int8", "w4a16"])
@pytest.mark.parametrize("kind", ["NEXTN", "EAGLE3", "DSPARK"])
def test_on_a_gpu(kind: str, scheme: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case, cuda = Case(kind, tmp_path, ON_GPU), {"device": "cuda", "num_threads": None}
    with closing(case.engine(speculative_algorithm="none", speculative_draft_model_path=None, **cuda)) as plain:
        expected = answers(plain)
    lengths = []
    for asked in ("none", scheme):
        tree = {LM_HEAD: asked, "speculative_eagle_topk": 3, "speculative_num_draft_tokens": 8}
        with caplog.at_level(logging.INFO), closing(case.engine(**tree, **cuda)) as engine:
            assert answers(engine) == expected
            lengths.append(engine.reporter.total_tokens / engine.reporter.total_rows)
    assert f"a copy of the lm_head in {scheme}" in caplog.text
    assert lengths[1] > 1.2 and 0.8 < lengths[1] / lengths[0] < 1.1


@pytest.mark.exhaustive
@pytest.mark.parametrize(("clusters", "made"), [(0, [(272, "int8")]), (17, [])])
def test_an_assistant(clusters: int, made: list[tuple[int, str]], tmp_path: Path, ops: list[tuple[int, str]]) -> None:
    """Of a head with clusters few rows are read as it is."""
    from gemma4_models import assistant_for, reference  # imports transformers

    theirs = reference("dense", vocab_size=272, max_position_embeddings=512, tie_word_embeddings=False)
    theirs.save_pretrained(tmp_path / "target")
    assistant_for(theirs, clusters).save_pretrained(tmp_path / "assistant")
    write_tokenizer(tmp_path / "target")
    options = {"model": str(tmp_path / "target"), **ENGINE, "speculative_algorithm": "FROZEN_KV_MTP"}
    options |= {"speculative_draft_model_path": str(tmp_path / "assistant"), LM_HEAD: "int8"}
    plain = {"speculative_algorithm": "none", "speculative_draft_model_path": None}
    with closing(Engine(Options.from_kwargs(**{**options, **plain}))) as engine:
        expected = answers(engine, 2)
    with closing(Engine(Options.from_kwargs(**options))) as engine:
        assert answers(engine, 2) == expected and ops == made


@pytest.mark.parametrize(
    ("large", "free", "share", "made"),
    [
        (True, 1 << 20, None, True), (True, 1 << 16, None, False), (False, 1 << 40, None, False),
        (True, 1 << 20, 0.6, True), (True, 1 << 20, 0.55, False),
    ],
)  # fmt: skip
def test_by_default_where_it_is_large_and_there_is_room(
    case_of: Callable[[str], Case], large: bool, free: int, share: float | None, made: bool,
    ops: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """272 x 64 values are 34,816 bytes in bfloat16; with a share of 0.6 of 2 MiB the engine has 0.2 MiB beside 1 MiB
    of weights."""
    monkeypatch.setattr(base, "_LARGE", 272 * 64 + (not large))
    monkeypatch.setattr(CpuDevice, "free_memory", lambda self: free)
    monkeypatch.setattr(CpuDevice, "total_memory", lambda self: 1 << 21)
    pool = {"mem_fraction_static": share, "max_total_tokens": None} if share else {}
    with closing(case_of("EAGLE").engine(**pool)):
        assert ops == [(272, "w4a16")] * made


def test_a_copy_that_is_asked_for_without_room_is_refused(
    case_of: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("draftwing.spec.build.quantized_copy", full)
    with pytest.raises(ConfigError, match="--speculative-lm-head-quantization"):
        case_of("EAGLE").engine(**{LM_HEAD: "int8"})


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rows"), [("EAGLE", []), ("EAGLE3", [(192, "int8")])])
def test_a_swapped_head(
    case_of: Callable[[str], Case], kind: str, rows: list[tuple[int, str]], tmp_path: Path, ops: list[tuple[int, str]]
) -> None:
    """What is the target's is quantised once, an lm_head of its own with each head; and drafts are the new head's."""
    case = case_of(kind)
    assert case.head is not None
    tensors = dict(case.head.tensors)
    name = "lm_head.weight" if rows else "fc.weight"
    tensors[name] = tensors[name].roll(1, 0)
    worse = Checkpoint(tensors, case.head.config).write(tmp_path / "worse")
    options = {LM_HEAD: "int8", "disable_radix_cache": True}
    with closing(case.engine(**options, speculative_draft_model_path=str(worse))) as engine:
        expected = accepted(engine)
    with closing(case.engine(**options)) as engine:
        good = accepted(engine)
        ops.clear()
        engine.swap_draft(worse)
        assert ops == rows
        assert accepted(engine) == expected < good
        engine.swap_draft(None)
        assert accepted(engine) == good


def test_options_that_cannot_be_had(case_of: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of("EAGLE")
    with pytest.raises(ConfigError, match=r"--speculative-lm-head-quantization int8: .* found one in float16"):
        case.engine(**{LM_HEAD: "int8"}, dtype="float16")
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"w4a16: expected a GPU .*: use auto"):
        case.engine(**{LM_HEAD: "w4a16"})
