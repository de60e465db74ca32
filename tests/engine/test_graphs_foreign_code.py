"""Drafters from outside that read tensors on the host, on a CPU whose steps are recorded: they run in every step, and
not what they did when it was recorded."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference.learnable import ENGINE, prompts, write_target
from torch import Tensor

from draftwing import LLM, Draft, Drafter
from draftwing.config.trees import PLAIN, TreeShape
from draftwing.engine.devices import pick_device
from draftwing.engine.graphs import RecordedStages
from draftwing.ops.cpu.extension import load_extension
from draftwing.spec.drafter import DraftStep, SeenTokens
from draftwing.spec.lookup_drafter import NGramDrafter

pytestmark = pytest.mark.slow

needs_kernels = pytest.mark.skipif(load_extension() is None, reason="the C kernels were not built")
BLOCKS = ENGINE | {"dtype": "auto", "quantization": "q8_0"}  # all of a small step is calls of the kernels
PARAMS = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
Texts = list[list[int]]
Found = list[tuple[int, list[int]]]  # of each row the index of its newest token, and its tokens
Read = Callable[[Any, Any, Tensor], Found]


class KnownTexts(Drafter):
    """Proposes what follows in texts that it knows, and finds its place in them by what `read` finds."""

    num_steps = 3
    texts: Texts
    read: Read
    calls = learned = 0

    def propose(self, step: DraftStep) -> Draft:
        table, rows, shape, *_ = step
        tokens, alive = np.zeros((len(rows), shape.nodes), np.int64), np.zeros((len(rows), shape.nodes), bool)
        for i, (newest, text) in enumerate(self.read(table, rows)):
            text = list(text[: newest + 1])
            known = next((one[newest : newest + shape.nodes] for one in self.texts if one[: newest + 1] == text), [0])
            tokens[i, : len(known)], alive[i, : len(known)] = known, True
        self.calls += 1
        parent = np.tile(np.arange(-1, shape.nodes - 1).clip(0), (len(rows), 1))
        return Draft(*map(torch.from_numpy, (tokens, parent, alive)))


class Learning(KnownTexts):
    """Counts what was committed, in plain steps, too."""

    def extend(self, seen: SeenTokens) -> None:
        self.learned += 0 if seen.count is None else sum(seen.count.tolist())


def by_lists(drafter: Any, table: Any, rows: Tensor) -> Found:
    newest, texts = table.kv_len.tolist(), table.tokens.tolist()
    return [(newest[row], texts[row]) for row in rows.tolist()]


def by_arrays(drafter: Any, table: Any, rows: Tensor) -> Found:
    newest, texts = table.kv_len.numpy(), np.asarray(table.tokens)
    return [(int(newest[row]), texts[row].tolist()) for row in rows.numpy()]


def by_kept_arrays(drafter: Any, table: Any, rows: Tensor) -> Found:
    """Which nobody can see: memory that it knows since its first call."""
    if not hasattr(drafter, "kept") or drafter.calls == 1:  # the first call is to another table, to try it
        drafter.kept = table.kv_len.numpy(), table.tokens.numpy()
    newest, texts = drafter.kept
    return [(int(newest[row]), texts[row].tolist()) for row in rows.tolist()]


def by_exchange(drafter: Any, table: Any, rows: Tensor) -> Found:
    newest, texts, places = map(np.from_dlpack, (table.kv_len, table.tokens, rows))
    return [(int(newest[row]), texts[row].tolist()) for row in places]


def by_addresses(drafter: Any, table: Any, rows: Tensor) -> Found:
    def values(tensor: Tensor) -> Any:
        return ctypes.cast(tensor.data_ptr(), ctypes.POINTER(ctypes.c_int64))

    width = table.tokens.shape[1]
    newest, texts, places = map(values, (table.kv_len, table.tokens, rows))
    return [(newest[row], texts[row * width : (row + 1) * width]) for row in places[: len(rows)]]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Texts, Texts]:
    """Model, prompts, and their texts without drafts."""
    model = write_target(tmp_path_factory.mktemp("models") / "tiny", intermediate_size=64)  # so that all is in blocks
    asked = prompts(5, seed=2)
    with LLM(str(model), **BLOCKS, speculative_algorithm="none") as llm:
        answers = llm.generate(asked, PARAMS)
        assert llm.engine.stats()["graph_replays"] > 20
    texts = [[*prompt, *answer.token_ids] for prompt, answer in zip(asked, answers, strict=True)]
    assert all(len(set(text)) > 20 for text in texts)
    return model, asked, texts


VISIBLE = [by_lists, by_arrays, by_exchange]  # as calls of torch; the others are not


@needs_kernels
@pytest.mark.further(kind=Learning, read=VISIBLE)
@pytest.mark.further(at_once=2, read=VISIBLE)
@pytest.mark.further(at_once=2, kind=KnownTexts)
@pytest.mark.further(at_once=1, kind=Learning)
@pytest.mark.parametrize("read", [by_lists, by_arrays, by_kept_arrays, by_exchange, by_addresses])
@pytest.mark.parametrize("kind", [KnownTexts, Learning])
@pytest.mark.parametrize("at_once", [1, 2])
def test_reads_are_done_again_in_every_step(
    case: tuple[Path, Texts, Texts], read: Read, kind: type[KnownTexts], at_once: int
) -> None:
    model, asked, texts = case
    own = type("Own", (kind,), {"texts": texts, "read": read})
    options = BLOCKS | {"max_running_requests": at_once, "speculative_fixed_shape": True}
    with LLM(str(model), **options, speculative_algorithm=own) as llm:
        answers = llm.generate(asked, PARAMS)
        drafter = llm.engine.parts.executor.drafter
    assert [[*prompt, *answer.token_ids] for prompt, answer in zip(asked, answers, strict=True)] == texts
    steps = sum(answer.meta_info["spec_verify_ct"] for answer in answers)
    assert sum(answer.meta_info["spec_num_correct_drafts"] for answer in answers) > 2.5 * steps  # all but the last ones
    assert isinstance(drafter, KnownTexts) and drafter.calls > steps / at_once
    if kind is Learning:
        assert drafter.learned >= sum(map(len, texts)) - sum(map(len, asked)) - len(asked)


class Derived(NGramDrafter):
    pass


def test_what_runs_code_from_outside() -> None:
    device, tree = pick_device("cpu"), TreeShape(3, 1, 4)
    ops = device.ops
    for drafter, drafts, plain in (
        (None, True, True),
        (NGramDrafter(3, ops, capacity=64), True, True),
        (Derived(3, ops, capacity=64), False, False),  # its methods may call what it overrides
        (KnownTexts(), False, True),
        (Learning(), False, False),
    ):
        stages = RecordedStages(device, 2, drafter)
        assert [stages.key(shape, 1) is not None for shape in (tree, PLAIN)] == [drafts, plain], drafter
