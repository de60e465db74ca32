"""Adapters with a draft head of their own: factors beside the model's head, for the rows of the adapter alone."""

from __future__ import annotations

import random
import re
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from engine_rig import BLOCKS, adapters_for, tiny_model
from reference.draft_cases import load_head
from reference.exact_heads import MAKERS, disturbed
from reference.learnable import ENGINE
from safetensors.torch import load_file, save_file
from thread_ranks import shares_of
from tiny_adapters import merged, write_adapter
from tiny_checkpoint import VOCAB, write_tokenizer

from draftwing import LLM
from draftwing.config.trees import PLAIN, TreeShape
from draftwing.core import DraftDeferral
from draftwing.engine.graphs import RecordedStages
from draftwing.engine.startup.adapters import AdapterFiles
from draftwing.errors import CheckpointError, ConfigError
from draftwing.layers.linear_ops.blocks import BlockFormat
from draftwing.models.adapters.adapter import Adapter, Factors
from draftwing.models.adapters.heads import HeadTargets
from draftwing.models.adapters.stored import stored_digest
from draftwing.models.heads import base
from draftwing.models.heads.eagle import Eagle3Head
from draftwing.models.loader import fill_parameters, load_model
from draftwing.ops import make_ops
from draftwing.sched.own_heads import OwnHeads
from draftwing.sched.policy.shape_policy import FixedShape
from draftwing.spec.build import make_model_drafter
from draftwing.train.heads import new_eagle3_head, new_eagle_head, new_mtp_head

NAMES = [None, "own", "plain", "own", None, "own"]
SHAPE = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
Counts = list[tuple[int, int]]  # of each request: drafts that were right, and steps


class Bench(NamedTuple):
    """own, plain: adapters, the first with a draft head of its own. worse: a head that its factors make right."""

    target: Path
    drafts: dict[str, Any]
    own: Path
    plain: Path
    worse: dict[str, Any]
    prompts: list[list[int]]


def matrices(checkpoint: Path, kind: str) -> dict[str, tuple[int, int]]:
    """The matrices of a head that factors may be beside, by name."""
    found = {}
    for name, value in load_file(checkpoint / "model.safetensors").items():
        beside = "mtp_layers" in name if kind == "NEXTN" else not name.startswith(("lm_head", "embed_tokens"))
        if value.dim() == 2 and beside:
            found[name.removesuffix(".weight")] = (value.shape[0], value.shape[1])
    return found


def negated(adapter: Path, folder: Path) -> Path:
    shutil.copytree(adapter, folder)
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({k: -v if ".lora_B." in k else v for k, v in tensors.items()}, folder / "adapter_model.safetensors")
    return folder


def make_bench(kind: str, folder: Path, rank: int = 5) -> Bench:
    make, scale = MAKERS[kind]
    exact = make(vocab_size=VOCAB, **({"rows": 192} if kind == "EAGLE3" else {}))
    target = disturbed(exact.target, scale).write(folder / "target")
    write_tokenizer(target)
    head = target if exact.head is None else exact.head.write(folder / "head")
    own, plain = (write_adapter(folder / name, target, i, strength=0.1) for i, name in enumerate(("own", "plain")))
    shapes = matrices(head, kind)
    kinds = {name.rpartition(".")[2] for name in shapes}
    factors = write_adapter(
        own / "draft_head", target, 7, rank, [*kinds], 2.0, shapes=shapes, rank_pattern={"q_proj": 3}
    )
    worse = merged(head, negated(factors, folder / "minus"), folder / "worse")
    prompts = [[*((7 * i + j) % 250 for j in range(12)), exact.starts[i]] for i in range(len(NAMES))]
    if kind == "NEXTN":
        write_tokenizer(worse)
        return Bench(target, {}, own, plain, {}, prompts)._replace(worse={"model": str(worse)})
    drafts = {"speculative_draft_model_path": str(head)}
    return Bench(target, drafts, own, plain, {"speculative_draft_model_path": str(worse)}, prompts)


def run(
    bench: Bench, kind: str, names: Sequence[str | None], head: dict[str, Any], own: Path, rounds: int = 1, **more: Any
) -> tuple[list[list[int]], Counts, dict[str, Any]]:
    """own: the folder of the adapter `own`."""
    options = {"model": str(bench.target), **ENGINE, "lora_modules": [f"own={own}", f"plain={bench.plain}"],
               "speculative_algorithm": kind, "speculative_fixed_shape": True, **head, **more}  # fmt: skip
    params = [{"max_new_tokens": 24, "ignore_eos": True, "temperature": float(i % 2), "sampling_seed": i}
              for i in range(len(names))]  # fmt: skip
    with LLM(**options) as llm:
        for _ in range(rounds):
            found = llm.generate(bench.prompts, params, adapter=list(names))
        stats = llm.engine.stats()
    counts = [(m["spec_num_correct_drafts"], m["spec_verify_ct"]) for m in (one.meta_info for one in found)]
    return [one.token_ids for one in found], counts, stats


def steps(counts: Counts, which: list[int]) -> int:
    return sum(counts[i][1] for i in which)


@pytest.fixture(autouse=True)
def none_is_on_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OwnHeads, "next", lambda self, key: True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["EAGLE3", "EAGLE", "NEXTN"])
@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_its_rows_draft_as_with_the_merged_head_and_others_as_before(tmp_path: Path, kind: str, dtype: str) -> None:
    bench = make_bench(kind, tmp_path)
    without = tmp_path / "without"
    shutil.copytree(bench.own, without, ignore=lambda *_: ["draft_head"])
    for rounds in (1, 3):
        same = {"rounds": rounds, "dtype": dtype, **SHAPE}
        texts, found, _ = run(bench, kind, NAMES, bench.worse, bench.own, **same)
        expected, good, _ = run(bench, kind, NAMES, bench.drafts, without, **same)
        _, bad, _ = run(bench, kind, NAMES, bench.worse, without, **same)
        assert texts == expected
        mine = [i for i, name in enumerate(NAMES) if name == "own"]
        if dtype == "float32":  # else weights and factors are rounded, and not what they make together
            assert [found[i] for i in mine] == [good[i] for i in mine]
        others = [i for i, name in enumerate(NAMES) if name != "own"]
        assert [found[i] for i in others] == [bad[i] for i in others]
        assert steps(found, mine) < 1.1 * steps(good, mine) < 0.9 * steps(bad, mine)


# ---- in all kinds of steps -------------------------------------------------------------------------------------------

TREE, CHAIN = TreeShape(4, 3, 11), TreeShape(3, 1, 4)


def factors_for(head: Any, seed: int = 0, rank: int = 6, strength: float = 2.0) -> Adapter:
    generator, found = torch.Generator().manual_seed(seed), {}
    for name, target in HeadTargets(head).targets.items():
        down = torch.randn(rank, target.inputs, generator=generator) / target.inputs**0.5
        found[name] = Factors(down, torch.randn(target.outputs, rank, generator=generator) * strength, 0.5)
    return Adapter(found, f"head {seed}")


@torch.no_grad()
def spoil(head: Any, factors: Adapter) -> None:
    """Takes away from a head that is not packed what the factors add."""
    found = HeadTargets(head)
    for name, whole in factors.factors.items():
        target = found.targets[name]
        down, up, scale = target.of(whole)
        ends, weight = found.ends[target.linear], found.linears[target.linear].weight
        rows = weight[ends[target.slice - 1] if target.slice else 0 : ends[target.slice]]
        rows -= (scale * up.double() @ down.double()).to(weight)


class Steps:
    """Rows without an adapter, with one, and with another that has a draft head of its own."""

    def __init__(self, harness: Any, kind: str, folder: Path) -> None:
        self.h, self.kind, self.folder = harness, kind, folder
        make, scale = MAKERS[kind]
        exact = make()
        self.head = exact.head
        target = disturbed(exact.target, scale).write(folder / "target")
        self.model = load_model(target, torch.float32, harness.device)
        self.adapters = adapters_for(self.model, (4, 3), strength=0.1)
        self.prompts, self.which = harness.prompts_for(9, seed=3), [0, 1, 2, 2, 0, 2, 1, 2, 2]
        self.params = [harness.greedy(24) if i % 3 else harness.seeded(24, seed=i) for i in range(9)]

    def rig(self, policy: Any, own: bool = True, merged: bool = False, **more: Any) -> Any:
        """own: whether the second adapter drafts with a head of its own.  merged: whether all rows draft with that."""
        head = load_head(self.head, self.kind, self.folder, self.model, device=self.h.device)
        factors = factors_for(head)
        if not merged:
            spoil(head, factors)
        ops = self.model.ops if self.h.device == "cpu" else make_ops(torch.device(self.h.device))
        drafter = make_model_drafter(head, more.get("rows", 6) + 1, 3, torch.float32, ops)
        heads = [Adapter({}, "none"), factors] if own else ()
        return self.h.Rig(self.model, drafter=drafter, policy=policy, adapters=self.adapters, heads=heads, **more)

    def counts(self, rig: Any) -> tuple[dict[str, list[int]], list[tuple[int, int]]]:
        """The texts, and of each request how many drafts were right, in how many steps."""
        for i, (prompt, param, slot) in enumerate(zip(self.prompts, self.params, self.which, strict=True)):
            head = slot if slot == 2 and rig.executor.head_slots is not None else 0
            rig.submit(str(i), prompt, param, adapter=slot, head=head, salt=slot)
        found = rig.run()
        metas = [found.final[str(i)].meta for i in range(len(self.prompts))]
        return found.tokens, [(m["spec_num_correct_drafts"], m["spec_verify_ct"]) for m in metas]


@pytest.fixture(scope="module", params=["EAGLE3", "EAGLE", "NEXTN"])
def steps_of(request: Any, harness: Any, tmp_path_factory: pytest.TempPathFactory) -> Steps:
    return Steps(harness, request.param, tmp_path_factory.mktemp(request.param))


HOW: dict[str, dict[str, Any]] = {
    "as written": {"lag": 1, "radix": False},
    "few slots, small chunks": {"lag": 1, "slots": 120, "chunk": 5},
    "graphs": {"lag": 1, "radix": False, "graph_size": 8, "ahead": 24, "rows": 8},
    "graphs beside prompts": {"lag": 1, "graph_size": 8, "ahead": 24, "rows": 8, "mixed": True},
}


EXACT = "as written", "graphs"


@pytest.mark.parametrize("how", HOW)
def test_each_row_drafts_by_its_own_head_in_all_kinds_of_steps(harness: Any, steps_of: Steps, how: str) -> None:
    policy, more = FixedShape(CHAIN) if how in EXACT else harness.Cycle(TREE, CHAIN), HOW[how]
    texts, found = steps_of.counts(steps_of.rig(policy, **more))
    expected, good = steps_of.counts(steps_of.rig(policy, own=False, merged=True, **more))
    again, bad = steps_of.counts(steps_of.rig(policy, own=False, **more))
    assert texts == expected == again
    mine = [i for i, slot in enumerate(steps_of.which) if slot == 2]
    others = [i for i, slot in enumerate(steps_of.which) if slot != 2]
    if how in EXACT:  # else what a request's steps are like depends on what the others need
        assert [found[i] for i in mine] == [good[i] for i in mine]
        assert [found[i] for i in others] == [bad[i] for i in others]
    assert steps(found, mine) < 1.1 * steps(good, mine) < steps(bad, mine)
    assert steps(found, others) > 0.9 * steps(bad, others)


@pytest.mark.parametrize("harness", [BLOCKS], indirect=True)
def test_steps_with_heads_of_adapters_are_recorded_on_a_cpu(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They give what they give as they are written."""
    prompts, found = harness.prompts_for(6), []
    params = [harness.greedy(24) if i % 2 else harness.seeded(24, seed=i) for i in range(6)]
    for recorded in (True, False):
        model = harness.tiny_model(seed=2)
        if "BlockedGemm" not in str(type(model.lm_head.op.first_gemm)):
            pytest.skip("where steps are calls of C kernels alone")
        made = new_eagle3_head(tiny_model(seed=2), None, (1, 2), seed=3)
        factors = factors_for(made)
        spoil(made, factors)
        form = BlockFormat("Q8_0", model.ops)
        config = replace(made.config, weight_format=form, vocab_format=form)
        head = Eagle3Head(config, made.eagle, model, torch.float32, "cpu").eval().requires_grad_(False)
        fill_parameters(head, head.names(), made.stored_tensors(), "cpu")
        head.pack(model.ops)
        drafter = make_model_drafter(head, 4, CHAIN.topk, model.dtype, model.ops)
        more = {"adapters": adapters_for(model, (4, 3), strength=0.1), "heads": [Adapter({}, "none"), factors]}
        rig = harness.Rig(model, shapes=(CHAIN,), drafter=drafter, rows=3, radix=False, **more)
        stages = rig.executor.graphs
        assert isinstance(stages, RecordedStages)
        if not recorded:
            monkeypatch.setattr(stages, "key", lambda shape, size: None)
        for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            rig.submit(str(i), prompt, param, adapter=i % 3, head=i % 3, salt=i % 3)
        answer = rig.run()
        metas = [answer.final[str(i)].meta for i in range(6)]
        found.append((answer.tokens, [(m["spec_num_correct_drafts"], m["spec_verify_ct"]) for m in metas]))
        assert not recorded or (not stages.refused and stages.replays > 30), stages.refused
    assert found[0] == found[1]


@pytest.mark.exhaustive  # as the next one, whose ranks are threads
@pytest.mark.slow
def test_on_two_ranks(tmp_path: Path) -> None:
    bench = make_bench("EAGLE3", tmp_path)
    texts, found, _ = run(bench, "EAGLE3", NAMES, bench.worse, bench.own, rounds=2, **SHAPE)
    assert (texts, found) == run(bench, "EAGLE3", NAMES, bench.worse, bench.own, rounds=2, tp_size=2, **SHAPE)[:2]


@pytest.mark.slow
@pytest.mark.parametrize("harness", ["ranks"], indirect=True)
@pytest.mark.parametrize("kind", ["EAGLE3", pytest.param("EAGLE", marks=pytest.mark.exhaustive)])
def test_a_head_that_is_spread_over_ranks(
    harness: Any, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has its rows or columns of the factors."""
    monkeypatch.setattr(base, "SPREAD", 0)
    exact, cpu = MAKERS[kind][0](), torch.device("cpu")
    whole = load_model(disturbed(exact.target, 0.65).write(tmp_path / "target"), torch.float32, cpu)
    first, *others = shares_of(whole, make_ops(cpu), 2)
    first.others, first.whole = others, (whole,)
    factors = factors_for(load_head(exact.head, kind, tmp_path, whole))
    counts = []
    for merged_head in (False, True):

        def drafter(target: Any, merged_head: bool = merged_head) -> Any:
            head = load_head(exact.head, kind, tmp_path, target)
            assert head.ranks.size == 2
            if not merged_head:
                spoil(head, factors)
            head.pack(make_ops(cpu))
            return make_model_drafter(head, 6, CHAIN.topk, torch.float32, make_ops(cpu))

        heads = () if merged_head else (factors,)
        more = {"adapters": adapters_for(whole, (3,), strength=0.1), "heads": heads, "rows": 5, "radix": False}
        rig = harness.Rig(first, shapes=(CHAIN,), drafter=drafter, **more)
        for i, prompt in enumerate(harness.prompts_for(5, seed=3)):
            rig.submit(str(i), prompt, harness.greedy(24), adapter=1, head=len(heads), salt=1)
        answer = rig.run()
        metas = [answer.final[str(i)].meta for i in range(5)]
        counts.append((answer.tokens, [(m["spec_num_correct_drafts"], m["spec_verify_ct"]) for m in metas]))
    assert counts[0] == counts[1] and sum(right for right, _ in counts[1][1]) > 40


# ---- files that come and go ------------------------------------------------------------------------------------------


def options(bench: Bench, **more: Any) -> dict[str, Any]:
    return {"model": str(bench.target), **ENGINE, "speculative_algorithm": "EAGLE3", "speculative_fixed_shape": True,
            **SHAPE, **bench.worse, **more}  # fmt: skip


def counted(llm: LLM, bench: Bench, name: str) -> Counts:
    params = {"max_new_tokens": 24, "ignore_eos": True, "temperature": 0.0}
    metas = [one.meta_info for one in llm.generate(bench.prompts, params, adapter=name)]
    return [(m["spec_num_correct_drafts"], m["spec_verify_ct"]) for m in metas]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make_bench("EAGLE3", tmp_path_factory.mktemp("bench"))


def test_heads_come_and_go_with_their_adapters(bench: Bench, tmp_path: Path) -> None:
    """Also while serving: with the same adapter under another name, or in its place, and without a head."""
    folder = tmp_path / "own"
    shutil.copytree(bench.own, folder)
    without = tmp_path / "without"
    shutil.copytree(bench.own, without, ignore=lambda *_: ["draft_head"])
    with LLM(**options(bench, lora_modules=[f"without={without}"], max_lora_head_rank=5, max_loras=1)) as llm:
        bad = counted(llm, bench, "without")
        llm.unload_adapter("without")
        llm.load_adapter("own", folder)
        good = counted(llm, bench, "own")
        assert steps(good, [0, 1, 2, 3, 4, 5]) < 0.9 * steps(bad, [0, 1, 2, 3, 4, 5])
        shutil.rmtree(folder / "draft_head")
        assert counted(llm, bench, "own") == good, "what is in memory is what was loaded"
        llm.load_adapter("own", folder)  # the same adapter, to which its slot belongs
        assert counted(llm, bench, "own") == bad
        shutil.copytree(bench.own / "draft_head", folder / "draft_head")
        llm.load_adapter("own", folder)
        assert counted(llm, bench, "own") == good
        llm.load_adapter("plain", bench.plain)
        counted(llm, bench, "plain")  # which has the one slot now
        assert counted(llm, bench, "own") == good


def test_a_head_that_is_learnt_is_swapped_in_while_requests_run(bench: Bench, tmp_path: Path) -> None:
    """Texts are those without drafts, whatever is swapped when; the adapter's requests to come have the head, others
    what they had, and the adapter that was loaded again has it, too."""
    without, negative = tmp_path / "without", negated(bench.own / "draft_head", tmp_path / "negated")
    shutil.copytree(bench.own, without, ignore=lambda *_: ["draft_head"])
    digest, heads = stored_digest(without), [bench.own / "draft_head", negative, None]
    prompts = [[*prompt[i % 5 :], *prompt] for i in range(6) for prompt in bench.prompts]
    names = [("own", "plain", None)[i % 3] for i in range(len(prompts))]
    params = [{"max_new_tokens": 20, "ignore_eos": True, "temperature": float(i % 2), "sampling_seed": i}
              for i in range(len(prompts))]  # fmt: skip
    given = {"lora_modules": [f"own={without}", f"plain={bench.plain}"], "max_lora_head_rank": 5, "max_loras": 2}
    with LLM(
        **options(bench, **given) | {"speculative_algorithm": "none", "speculative_draft_model_path": None}
    ) as llm:
        expected = [one.token_ids for one in llm.generate(prompts, params, adapter=names)]
    with LLM(**options(bench, **given)) as llm:
        bad = counted(llm, bench, "own")
        base = counted(llm, bench, "plain")
        stopped, failed = threading.Event(), list[BaseException]()

        def swap() -> None:
            draw = random.Random(0)
            try:
                while not stopped.is_set():
                    llm.engine.swap_draft(draw.choice(heads), digest)
                    time.sleep(0.003)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=swap)
        thread.start()
        try:
            for _ in range(2):
                assert [one.token_ids for one in llm.generate(prompts, params, adapter=names)] == expected
        finally:
            stopped.set()
            thread.join()
        assert not failed
        llm.engine.swap_draft(heads[0], digest)
        good = counted(llm, bench, "own")
        every = [*range(len(good))]
        assert steps(good, every) < 0.9 * steps(bad, every) and counted(llm, bench, "plain") == base
        llm.load_adapter("second", without)
        llm.unload_adapter("own")
        assert counted(llm, bench, "second") == good
        llm.engine.swap_draft(None, digest)
        assert counted(llm, bench, "second") == bad
        with pytest.raises(CheckpointError):
            llm.engine.swap_draft(without, digest)
        assert counted(llm, bench, "second") == bad
    with (
        LLM(**options(bench, **given) | {"max_lora_head_rank": 0}) as llm,
        pytest.raises(ConfigError, match="of its rank"),
    ):
        llm.engine.swap_draft(heads[0], digest)


@pytest.mark.parametrize("slots", [1, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_names_of_one_adapter_have_each_its_own_head(bench: Bench, tmp_path: Path, slots: int) -> None:
    """Whichever was loaded last, and with one slot for all of them."""
    folders = {name: tmp_path / name for name in ("good", "bad", "none")}
    for name, folder in folders.items():
        shutil.copytree(bench.own, folder, ignore=None if name == "good" else lambda *_: ["draft_head"])
    negated(bench.own / "draft_head", folders["bad"] / "draft_head")
    expected = {}
    for name, folder in folders.items():
        with LLM(**options(bench, lora_modules=[f"{name}={folder}"], max_lora_head_rank=5)) as llm:
            expected[name] = counted(llm, bench, name)
    every = [*range(len(bench.prompts))]
    assert steps(expected["good"], every) < 0.9 * steps(expected["none"], every) < steps(expected["bad"], every)
    with LLM(**options(bench, lora_modules=[f"none={folders['none']}"], max_lora_head_rank=5, max_loras=slots)) as llm:
        for name in ("good", "bad"):
            llm.load_adapter(name, folders[name])
        for name in ("good", "none", "bad", "good", "none"):
            assert counted(llm, bench, name) == expected[name], name
        assert llm.engine.stats()["adapter_loads"] == 1, "the adapter itself is one"


@pytest.mark.further(learnt=True)  # read by the same code, from another folder
@pytest.mark.parametrize("learnt", [False, True])
def test_heads_are_read_again_from_their_files(
    bench: Bench, tmp_path: Path, learnt: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """With one of them in memory. Where the file is another one by then, the adapter is served without it."""
    folders = {name: Path(shutil.copytree(bench.own, tmp_path / name)) for name in ("good", "bad")}
    write_adapter(folders["bad"] / "other", bench.target, 5, strength=0.1)  # so that each has a slot of its own
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(folders["bad"] / "other" / file, folders["bad"] / file)
    heads = {name: folder / "draft_head" for name, folder in folders.items()}
    shutil.rmtree(heads["bad"])
    negated(bench.own / "draft_head", heads["bad"])
    given = [f"{name}={folder}" for name, folder in folders.items()]
    if learnt:
        for name, head in heads.items():
            heads[name] = head.rename(tmp_path / f"{name}_head")

    def learn(llm: LLM) -> None:
        for name, head in heads.items() if learnt else ():
            llm.engine.swap_draft(head, stored_digest(folders[name]))

    every = [*range(len(bench.prompts))]
    with LLM(**options(bench, lora_modules=given, max_lora_head_rank=5)) as llm:
        without = {name: counted(llm, bench, name) for name in folders} if learnt else {}
        learn(llm)
        expected = {name: counted(llm, bench, name) for name in folders}
        texts = [one.token_ids for one in llm.generate(bench.prompts, {"temperature": 0}, adapter="good")]
    with LLM(**options(bench, lora_modules=given, max_lora_head_rank=5, max_loras=1, max_cpu_loras=1)) as llm:
        learn(llm)
        for name in ("good", "bad", "good", "good", "bad"):
            assert counted(llm, bench, name) == expected[name], name
        negated(heads["good"], tmp_path / "changed")
        shutil.rmtree(heads["good"])
        (tmp_path / "changed").rename(heads["good"])
        for _ in range(2):
            found = counted(llm, bench, "good")
            assert steps(found, every) > 1.1 * steps(expected["good"], every)
            assert found == without.get("good", found)
            assert counted(llm, bench, "bad") == expected["bad"]
        assert [one.token_ids for one in llm.generate(bench.prompts, {"temperature": 0}, adapter="good")] == texts
        assert str(heads["good"]) in caplog.text
        assert llm.engine.idle()


def test_a_head_that_could_not_be_read_for_a_while_drafts_again(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was no fault of its files takes it away from one request; a head that is judged worse is not read at all."""
    folders = {name: Path(shutil.copytree(bench.own, tmp_path / name)) for name in ("first", "second")}
    write_adapter(tmp_path / "other", bench.target, 5, strength=0.1)  # so that each has a slot of its own
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(tmp_path / "other" / file, folders["second"] / file)
    shutil.rmtree(folders["second"] / "draft_head")
    negated(bench.own / "draft_head", folders["second"] / "draft_head")
    given, read, asked = [f"{name}={folder}" for name, folder in folders.items()], AdapterFiles.head_again, []
    wrong: list[Exception] = [OSError(24, "Too many open files")]

    def sometimes(self: AdapterFiles, folder: Path, digest: str) -> Adapter:
        asked.append(folder)
        if wrong:
            raise wrong.pop()
        return read(self, folder, digest)

    with LLM(**options(bench, lora_modules=given, max_lora_head_rank=5, max_loras=1, max_cpu_loras=1)) as llm:
        expected = {name: counted(llm, bench, name) for name in folders}
        monkeypatch.setattr(AdapterFiles, "head_again", sometimes)
        assert len(counted(llm, bench, "first")) == len(bench.prompts) and not wrong
        assert [counted(llm, bench, name) for name in ("second", "first")] == [expected["second"], expected["first"]]
        monkeypatch.setattr(OwnHeads, "is_worse", lambda self, key: True)
        monkeypatch.setattr(OwnHeads, "next", lambda self, key: False)
        asked.clear()
        for name in ("second", "first"):
            counted(llm, bench, name)
        assert not asked and llm.engine.idle()


def test_no_head_reads_what_another_has_cached(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """While both are tried, and behind it: a request finds its prompt cached as its own head left it."""
    prompts = [[*prompt, *prompt[:5], *prompt] for prompt in bench.prompts]
    params = {"max_new_tokens": 24, "ignore_eos": True, "temperature": 0.0}

    def right(llm: LLM, own: bool) -> Counts:
        monkeypatch.setattr(OwnHeads, "next", lambda self, key: own)
        metas = [one.meta_info for one in llm.generate(prompts, params, adapter="own")]
        return [(m["spec_num_correct_drafts"], m["spec_verify_ct"]) for m in metas]

    expected = {}
    for own in (True, False):
        with LLM(**options(bench, lora_modules=[f"own={bench.own}"])) as llm:
            expected[own] = right(llm, own)
    assert expected[True] != expected[False]
    for first in (True, False):
        with LLM(**options(bench, lora_modules=[f"own={bench.own}"])) as llm:
            for own in (first, not first, first, not first):
                assert right(llm, own) == expected[own], (first, own)
            hits = llm.generate(prompts[:1], params, adapter="own")[0].meta_info["cached_tokens"]
            assert hits > len(prompts[0]) // 2


def test_a_wrong_head_is_refused_in_words(bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "own"
    shutil.copytree(bench.own, folder)
    with LLM(**options(bench, lora_modules=[f"plain={bench.plain}"], max_lora_head_rank=5)) as llm:
        for rank, shapes, expected in (
            (
                6,
                {"midlayer.self_attn.q_proj": (32, 64)},
                "draft_head: the rank is 6; slots have room for 5: start with",
            ),
            (4, {"midlayer.self_attn.q_proj": (64, 64)}, "the draft head's is [32, 64]: expected an adapter of this"),
            (4, {"layers.3.self_attn.q_proj": (32, 64)}, "the draft head has no such matrix"),
            (4, {"lm_head": (192, 32)}, "lm_head: the draft head has no such matrix"),
        ):
            shutil.rmtree(folder / "draft_head")
            kinds = [name.rpartition(".")[2] for name in shapes]
            write_adapter(folder / "draft_head", bench.target, 0, rank, kinds, shapes=shapes)
            with pytest.raises(CheckpointError, match=re.escape(expected)) as error:
                llm.load_adapter("own", folder)
            assert str(folder / "draft_head") in str(error.value)
        (folder / "draft_head" / "adapter_model.safetensors").unlink()
        with pytest.raises(CheckpointError, match="is missing in"):
            llm.load_adapter("own", folder)
    for more in ({"max_lora_head_rank": 0}, {"speculative_algorithm": "NGRAM", "speculative_draft_model_path": None}):
        caplog.clear()
        with LLM(**options(bench, lora_modules=[f"own={bench.own}"], **more)) as llm:  # texts need no draft head
            counted(llm, bench, "own")
        assert "draft head of the adapter 'own' is not used" in caplog.text


def test_a_head_that_is_worse_than_the_models_drafts_no_more(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.undo()
    folder, without = tmp_path / "own", tmp_path / "without"
    shutil.copytree(bench.own, without, ignore=lambda *_: ["draft_head"])
    shutil.copytree(without, folder)
    shapes = matrices(Path(bench.worse["speculative_draft_model_path"]), "EAGLE3")
    write_adapter(folder / "draft_head", bench.target, 3, 4, [name.rpartition(".")[2] for name in shapes], 9.0,
                  shapes=shapes)  # fmt: skip
    with LLM(**options(bench, lora_modules=[f"without={without}"], **bench.drafts)) as llm:
        expected = counted(llm, bench, "without")
    with LLM(**options(bench, lora_modules=[f"own={folder}"], **bench.drafts)) as llm:
        first = counted(llm, bench, "own")
        for _ in range(14):
            counted(llm, bench, "own")
        found = counted(llm, bench, "own")
    every = [*range(len(first))]  # of each four requests one has the model's head
    assert steps(first, every) > 1.1 * steps(expected, every)
    assert found == expected and "is accepted less often" in caplog.text


def test_a_swap_of_the_models_head_begins_a_new_trial(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An adapter's own head that was better than the model's may be worse than the new one."""
    monkeypatch.undo()
    without = tmp_path / "without"
    shutil.copytree(bench.own, without, ignore=lambda *_: ["draft_head"])
    with LLM(**options(bench, lora_modules=[f"without={without}"], **bench.drafts)) as llm:
        expected = counted(llm, bench, "without")
    with LLM(**options(bench, lora_modules=[f"own={bench.own}"])) as llm:
        for _ in range(14):
            counted(llm, bench, "own")
        assert "is accepted less often" not in caplog.text
        llm.engine.swap_draft(Path(bench.drafts["speculative_draft_model_path"]))
        for _ in range(14):
            counted(llm, bench, "own")
        assert llm.engine.flush_cache()
        assert counted(llm, bench, "own") == expected and "is accepted less often" in caplog.text


def test_the_models_head_is_swapped_beneath_them(bench: Bench) -> None:
    """As `--learn` does: rows of other adapters draft with the new one, and an adapter's own adds to that."""
    adapters = [f"own={bench.own}", f"plain={bench.plain}"]
    worse, right = (Path(one["speculative_draft_model_path"]) for one in (bench.worse, bench.drafts))
    with LLM(**options(bench, lora_modules=adapters)) as llm:
        before = {name: counted(llm, bench, name) for name in ("own", "plain")}
        llm.engine.swap_draft(right)
        counted(llm, bench, "own")
        llm.engine.swap_draft(worse)
        assert llm.engine.flush_cache()
        assert {name: counted(llm, bench, name) for name in ("own", "plain")} == before
        llm.engine.swap_draft(right)
        assert llm.engine.flush_cache()
        swapped = {name: counted(llm, bench, name) for name in ("own", "plain")}
    with LLM(**options(bench, lora_modules=adapters, **bench.drafts)) as llm:
        assert swapped == {name: counted(llm, bench, name) for name in ("own", "plain")}
    assert swapped != before


WAYS: dict[str, dict[str, Any]] = {
    "chunks": {"chunk": 5, "lag": 1},
    "steps that do not draft": {"policy": (CHAIN, PLAIN, PLAIN), "lag": 1},
    "prompts that are seen later": {"policy": (CHAIN, PLAIN), "chunk": 7, "deferral": DraftDeferral(48, 12)},
    "cached prefixes": {"radix": True},
}


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("kind", ["EAGLE3", pytest.param("EAGLE", marks=pytest.mark.exhaustive),
                                  pytest.param("MTP", marks=pytest.mark.exhaustive)])  # fmt: skip
def test_drafts_are_those_of_the_merged_head(on_cpu: Any, kind: str, how: str) -> None:
    """Of heads that attend to all of the text: keys and values of prompts, of accepted paths and of what was seen later
    are made with the factors."""
    found = []
    for spoilt in (True, False):
        model, device = tiny_model(seed=2), torch.device("cpu")
        make = {"EAGLE3": lambda one: new_eagle3_head(one, None, (1, 2), seed=3),
                "EAGLE": lambda one: new_eagle_head(one, seed=3), "MTP": lambda one: new_mtp_head(one, 3)}  # fmt: skip
        head = make[kind](model).eval().requires_grad_(False)
        factors = factors_for(head, strength=0.5)
        if spoilt:
            spoil(head, factors)
        drafter: Any = make_model_drafter(head, 5, CHAIN.topk, torch.float32, make_ops(device))
        more = {"radix": False, "rows": 4, **WAYS[how]}
        more["policy"] = on_cpu.Cycle(*more["policy"]) if "policy" in more else FixedShape(CHAIN)
        heads = (factors,) if spoilt else ()
        rig = on_cpu.Rig(model, drafter=drafter, adapters=adapters_for(model, (3,)), heads=heads, **more)
        drafts: dict[tuple[int, ...], list[int]] = {}  # by the text that they go on
        propose = drafter.propose

        def noted(step: Any, propose: Any = propose, drafts: Any = drafts) -> Any:
            draft, table = propose(step), step.table
            for row, tokens in zip(step.rows.tolist(), draft.tokens.tolist(), strict=True):
                drafts[tuple(table.tokens[row, : table.kv_len[row] + 1].tolist())] = tokens
            return draft

        drafter.propose = noted
        prompts = on_cpu.prompts_for(5, seed=3, longest=20)
        for prompt in (*prompts, prompts[0] + [5], prompts[1] + [6]):
            rig.submit(str(len(drafts)) + str(prompt), prompt, on_cpu.greedy(16), adapter=1, head=len(heads), salt=1)
            rig.run() if how == "cached prefixes" else None
        rig.run()
        found.append(drafts)
    both = found[0].keys() & found[1].keys()  # the clock has a say in who is in a step that drafts
    assert len(both) > 10 and all(found[0][text] == found[1][text] for text in both)
