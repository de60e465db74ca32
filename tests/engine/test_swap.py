"""Draft heads that are swapped while requests run: no text changes, and afterwards drafts are those of an engine that
started with the other head."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch
from reference.checkpoints import Checkpoint, draft_vocabulary
from reference.exact_heads import disturbed, exact_domino, exact_dspark, exact_eagle3
from tiny_checkpoint import write_tokenizer

from draftwing.config.options import Options
from draftwing.engine import draft_window
from draftwing.engine.engine import IDLE_SECONDS, Engine
from draftwing.engine.executor import Executor
from draftwing.engine.startup import warm_up
from draftwing.errors import CheckpointError, ConfigError
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams

TOKENS, REQUESTS = 24, 6
CHAIN: dict[str, Any] = {
    "speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4,
    "speculative_fixed_shape": True,
}  # fmt: skip


class Heads:
    """A target, a head that is mostly right, and others."""

    def __init__(self, folder: Path) -> None:
        exact = exact_eagle3(rows=192, vocab_size=258)
        assert exact.head is not None
        self.target = disturbed(exact.target, 0.4).write(folder / "target")
        write_tokenizer(self.target)
        self.good, self.folder = exact.head.write(folder / "good"), folder
        tensors, config = dict(exact.head.tensors), exact.head.config
        noise = torch.Generator().manual_seed(5)
        for name, value in tensors.items():
            if value.is_floating_point():
                tensors[name] = value + 0.3 * value.std(correction=0) * torch.randn(value.shape, generator=noise)
        tensors["d2t"], tensors["t2d"] = draft_vocabulary(258, config["draft_vocab_size"], seed=9)
        self.bad = Checkpoint(tensors, config).write(folder / "bad")
        self.prompts = [[3 + i, 40 + 7 * i, exact.starts[5 * i]][i % 2 :] for i in range(REQUESTS)]

    def engine(self, head: Path | None, **options: Any) -> Engine:
        draft = {"speculative_algorithm": "none"}
        if head is not None:
            draft = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(head)}
        fixed = {"device": "cpu", "num_threads": 1, "max_total_tokens": 2000, "max_running_requests": 4}
        return Engine(Options.from_kwargs(**{"model": str(self.target), **fixed, **draft, **options}))


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Heads:
    return Heads(tmp_path_factory.mktemp("heads"))


def answers(engine: Engine, prompts: Sequence[list[int]], swaps: dict[int, Path] | None = None) -> list[list[int]]:
    """Greedy ones and seeded ones. swaps: heads by the step before which they are swapped in."""
    found: list[list[int]] = [[] for _ in prompts]
    for i, prompt in enumerate(prompts):
        temperature = 0.0 if i % 2 else 0.8
        params = SamplingParams(max_new_tokens=TOKENS, temperature=temperature, sampling_seed=i, ignore_eos=True)
        engine.submit(GenerationRequest(str(i), prompt, params))
    step, left = 0, len(prompts)
    while left:
        if swaps and step in swaps:
            engine.swap_draft(swaps[step])
        for output in engine.step():
            found[int(output.uid)] += output.token_ids
            left -= output.finish_reason is not None
        step += 1
    return found


def run(engine: Engine, prompts: Sequence[list[int]]) -> tuple[list[list[int]], float]:
    """Texts, and tokens of a step of one request."""
    rows, tokens = engine.reporter.total_rows, engine.reporter.total_tokens
    texts = answers(engine, prompts)
    return texts, (engine.reporter.total_tokens - tokens) / (engine.reporter.total_rows - rows)


@pytest.mark.further(dtype="float32", overlap=False)
@pytest.mark.further(dtype="bfloat16")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_swaps_change_no_text(heads: Heads, dtype: str, overlap: bool) -> None:
    with closing(heads.engine(None, dtype=dtype)) as plain:
        expected = answers(plain, heads.prompts)
    with closing(heads.engine(heads.good, dtype=dtype, enable_overlap=overlap, **CHAIN)) as engine:
        swaps = {step: (heads.good, heads.bad)[step % 2] for step in (0, 3, 5, 9, 12, 19)}
        assert answers(engine, heads.prompts, swaps) == expected
        assert engine.reporter.total_tokens > engine.reporter.total_rows, "nothing was drafted"


@pytest.mark.slow
@pytest.mark.further(dtype="bfloat16")  # heads are in blocks, too; those in float32 are oneDNN's
@pytest.mark.further(algorithm="EAGLE3+NGRAM")
@pytest.mark.parametrize("algorithm", ["EAGLE3", "EAGLE3+NGRAM"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "in blocks"])
def test_drafts_are_those_of_the_other_head(heads: Heads, dtype: str, algorithm: str) -> None:
    form = {"quantization": "q8_0"} if dtype == "in blocks" else {"dtype": dtype}
    options: dict[str, Any] = {**form, "speculative_algorithm": algorithm}
    if algorithm == "EAGLE3":
        options |= {**CHAIN, "disable_radix_cache": True}
    expected = {}
    for head in (heads.good, heads.bad) if algorithm == "EAGLE3" else ():
        with closing(heads.engine(head, **options)) as engine:
            run(engine, heads.prompts)  # recorded stages replay from the second time on
            expected[head] = run(engine, heads.prompts)
    if algorithm == "EAGLE3":
        assert expected[heads.good][1] > 1.2 * expected[heads.bad][1]
    with closing(heads.engine(heads.good, **options)) as engine:
        run(engine, heads.prompts)
        for other in (heads.bad, heads.good, None):
            engine.swap_draft(other)
            found = run(engine, heads.prompts)
            assert algorithm != "EAGLE3" or found == expected[other or heads.good]


class Windows:
    """Remembers to what a head is kept by trials (`engine.draft_window`), and how many outputs had come then. Trials
    are of few drafts and all texts, begin whatever is right, and end as better."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked, self.outputs, see = list[tuple[int | None, int]](), 0, Executor.see_at_most

        def noted(executor: Executor, positions: int | None) -> None:
            self.asked.append((positions, self.outputs))
            see(executor, positions)

        patch.setattr(Executor, "see_at_most", noted)
        for name, value in {"LONG": 1, "WINDOW": 4, "ENOUGH": 30, "FALL": 1e9, "GAIN": 0.0}.items():
            patch.setattr(draft_window, name, value)

    def run(self, engine: Engine, prompts: Sequence[list[int]]) -> list[list[int]]:
        """As a server does, with a pause behind it."""
        found, left = [list[int]() for _ in prompts], len(prompts)
        for i, prompt in enumerate(prompts):
            params = SamplingParams(
                max_new_tokens=TOKENS, temperature=0.8 * (1 - i % 2), sampling_seed=i, ignore_eos=True
            )
            engine.submit(GenerationRequest(str(i), prompt, params))
        while left:
            for output in engine.step(block=True):
                found[int(output.uid)] += output.token_ids
                left -= output.finish_reason is not None
                self.outputs += 1
        timer = Timer(3 * IDLE_SECONDS, engine.wake)
        timer.start()
        engine.step(block=True)
        timer.join()
        return found


@pytest.mark.slow
def test_trials_of_windows(heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    """They begin and end when all outputs have come, each is of one head, and no text changes."""
    with closing(heads.engine(None)) as plain:
        expected = answers(plain, heads.prompts)
    windows = Windows(monkeypatch)
    with closing(heads.engine(heads.good, **CHAIN)) as engine:
        ends = []
        for head in (heads.bad, None, None, None):
            assert windows.run(engine, heads.prompts) == expected
            ends.append(windows.outputs)
            if head is not None:
                engine.swap_draft(head)
    assert windows.asked == [(4, ends[0]), (None, ends[1]), (4, ends[2])]


def of_fewer_tokens(head: Checkpoint, seed: int) -> Checkpoint:
    """A DSpark head that can draft three quarters of its tokens."""
    rows = 3 * head.config["vocab_size"] // 4
    d2t, t2d = draft_vocabulary(head.config["vocab_size"], rows, seed)
    kept = torch.arange(rows) + d2t
    own = {name: head.tensors[name][kept].clone() for name in ("lm_head.weight", "markov_head.markov_w2.weight")}
    return Checkpoint(head.tensors | own | {"d2t": d2t, "t2d": t2d}, head.config | {"draft_vocab_size": rows})


@pytest.mark.slow
@pytest.mark.further(kind="domino")
@pytest.mark.further(kind="dspark", dtype="float32")
@pytest.mark.further(kind="of fewer tokens", dtype="bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["dspark", "of fewer tokens", "domino"])
def test_heads_that_draft_blocks_are_swapped(heads: Heads, kind: str, dtype: str, tmp_path: Path) -> None:
    exact = exact_domino(vocab_size=258) if kind == "domino" else exact_dspark(vocab_size=258)
    assert exact.head is not None
    noise, folders = torch.Generator().manual_seed(5), []
    for number, scale in enumerate((0.1, 0.6)):
        tensors = {
            name: value + scale * value.std(correction=0) * torch.randn(value.shape, generator=noise)
            for name, value in exact.head.tensors.items()
        }
        if kind != "domino":  # which of a node's siblings are drafted follows from it
            tensors["confidence_head.proj.bias"] = torch.tensor([3.0 - 6 * number])
        head = Checkpoint(tensors, exact.head.config)
        head = of_fewer_tokens(head, number) if kind == "of fewer tokens" else head
        folders.append(head.write(tmp_path / str(number)))
    good, bad = folders
    target = disturbed(exact.target, 0.4).write(tmp_path / "target")
    write_tokenizer(target)
    tree = {"speculative_num_steps": 4, "speculative_eagle_topk": 3, "speculative_num_draft_tokens": 8}
    options: dict[str, Any] = {
        "model": str(target), "dtype": dtype, "disable_radix_cache": True, "speculative_fixed_shape": True, **tree,
        "speculative_algorithm": "DFLASH" if kind == "domino" else "DSPARK",
    }  # fmt: skip

    expected = {}
    for folder in folders:
        with closing(heads.engine(folder, **options)) as engine:
            run(engine, heads.prompts)
            expected[folder] = run(engine, heads.prompts)
    assert expected[good][0] == expected[bad][0] and expected[good][1] > 1.05 * expected[bad][1]
    with closing(heads.engine(good, **options)) as engine:
        run(engine, heads.prompts)
        for other in (bad, None):
            engine.swap_draft(other)
            assert run(engine, heads.prompts) == expected[other or good]
        swaps = {5: bad, 11: good, 17: bad}
        assert answers(engine, heads.prompts, swaps) == expected[good][0]


def test_heads_that_do_not_fit_are_refused_and_nothing_changes(heads: Heads, tmp_path: Path) -> None:
    other = exact_eagle3(vocab_size=258, rows=64).head
    assert other is not None
    larger = other.write(tmp_path / "larger")
    with closing(heads.engine(heads.good, dtype="float32")) as engine:
        expected = answers(engine, heads.prompts[:2])
        with pytest.raises(ConfigError, match="restart with it"):
            engine.swap_draft(larger)
        with pytest.raises(CheckpointError):
            engine.swap_draft(tmp_path / "nowhere")
        assert answers(engine, heads.prompts[:2]) == expected
    with closing(heads.engine(None)) as engine, pytest.raises(ConfigError, match="nothing is drafted"):
        engine.swap_draft(heads.good)
    with (
        closing(heads.engine(None, speculative_algorithm="NGRAM")) as engine,
        pytest.raises(ConfigError, match="no head"),
    ):
        engine.swap_draft(heads.good)


@pytest.mark.slow
def test_what_chains_of_a_head_cost_beside_a_lookup(heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "SECONDS", 600.0)  # a busy machine would leave some unmeasured
    options = {**CHAIN, "speculative_algorithm": "EAGLE3+SUFFIX", "speculative_fixed_shape": False}
    with closing(heads.engine(heads.good, **options)) as engine:
        seconds = engine.stats()["chain_seconds"]
    assert len(seconds) == CHAIN["speculative_num_steps"] and min(seconds) > 0 and seconds == sorted(seconds)
