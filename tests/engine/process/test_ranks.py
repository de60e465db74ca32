"""Two ranks as processes, joined by gloo: the same texts as one, whoever drafts, and what becomes of a rank that dies,
hangs or cannot start."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_adapters import write_adapter
from tiny_checkpoint import VOCAB, write_checkpoint

from draftwing import LLM
from draftwing.config.options import Options
from draftwing.engine.devices.cpu import CpuDevice
from draftwing.engine.process import ranks as processes_of_ranks
from draftwing.engine.process.link import EngineLink, Listener
from draftwing.engine.process.ranks import RankDied, RankProcesses
from draftwing.engine.process.spawn import Failed
from draftwing.engine.rank_broadcast import COMPARED_EVERY, Digest
from draftwing.errors import CheckpointError, ConfigError, DraftwingError
from draftwing.ops.types import Draft
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.spec.drafter import DraftContext, Drafter, DraftStep
from draftwing.spec.lookup_drafter import NGramDrafter

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 2000, "num_threads": 1, "random_seed": 1}
PROMPTS = ["hello there", "ab" * 30, "x", [7, 8, 9, 7, 8, 9, 7]]


def with_experts(folder: Path) -> Path:
    """A checkpoint of two layers with six experts each."""
    folder = write_checkpoint(folder, hidden=64, heads=4)
    config, generator = json.loads((folder / "config.json").read_text()), torch.Generator().manual_seed(2)
    config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 6}
    (folder / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 2}))
    tensors = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in tensors.items() if ".mlp." not in name and not name.endswith(".bias")}
    for layer in range(2):
        moe = f"model.layers.{layer}.block_sparse_moe"
        shapes = {"gate": (6, 64)}
        for expert in range(6):
            shapes |= {f"experts.{expert}.{name}": (128, 64) for name in ("w1", "w3")}
            shapes[f"experts.{expert}.w2"] = 64, 128
        kept |= {f"{moe}.{name}.weight": torch.randn(*shape, generator=generator) / 8 for name, shape in shapes.items()}
    save_file(kept, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_experts(tmp_path_factory.mktemp("ranks") / "model")


def texts(llm: LLM) -> list[Any]:
    """Of requests that ask for much: seeds, filters, grammars, log probabilities."""
    params: list[dict[str, Any]] = [
        {"max_new_tokens": 30, "temperature": 0.0},
        {"max_new_tokens": 30, "temperature": 0.9, "sampling_seed": 5, "top_p": 0.8},
        {"max_new_tokens": 20, "temperature": 0.7, "sampling_seed": 6, "regex": "[a-f]{4}( [0-9]{2})*", "top_k": 20},
        {"max_new_tokens": 30, "temperature": 0.0, "frequency_penalty": 0.5, "logit_bias": {"65": 2.0}},
    ]
    answers = llm.generate(PROMPTS, params, return_logprob=True, top_logprobs_num=2)
    found = [(answer.token_ids, answer.finish_reason) for answer in answers]
    values = [[token[0] for token in answer.meta_info["output_token_logprobs"]] for answer in answers]
    return [found, values]


@pytest.mark.exhaustive  # tests/parallel/test_shares.py and tests/engine/test_ranks.py have the parts of it
@pytest.mark.parametrize("heads", [(12, 6), (12, 3), (6, 2)])
def test_four_ranks_that_heads_cannot_be_divided_by(tmp_path: Path, heads: tuple[int, int]) -> None:
    """Whoever drafts: texts are those of one rank without drafts."""
    from reference.block_heads import dflash_head  # which ranks that import this module for a drafter need not wait for
    from reference.checkpoints import eagle3_head, llama_target
    from reference.learnable import write_target

    sizes = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": 8, "vocab_size": VOCAB}
    model, of = write_target(tmp_path / "model", **sizes), llama_target(3, num_hidden_layers=6, **sizes)
    made = {
        "EAGLE3": eagle3_head(of, vocab_size=VOCAB).write(tmp_path / "eagle3"),
        "DFLASH": dflash_head(of, vocab_size=VOCAB).write(tmp_path / "dflash"),
    }
    expected: Any = None
    for algorithm in (None, "none", "NGRAM", *made):
        more: dict[str, Any] = {"speculative_algorithm": algorithm or "none", "tp_size": 1 if algorithm is None else 4}
        if algorithm in made:
            more |= {"speculative_draft_model_path": str(made[algorithm]), "speculative_num_steps": 3}
        if algorithm in (*made, "NGRAM"):
            more["speculative_fixed_shape"] = True
        with LLM(str(model), **more, **SETTINGS) as llm:
            found, _ = texts(llm)
        expected = expected or found
        assert found == expected, algorithm
    assert len({token for ids, _ in expected for token in ids}) > 8


@pytest.mark.exhaustive  # tests/parallel/test_invariance.py has the parts of it
@pytest.mark.parametrize("experts", [False, True])
def test_the_same_bits_on_one_two_and_four_ranks(tmp_path: Path, experts: bool) -> None:
    """Texts and log probabilities, whoever drafts, with adapters, too."""
    from reference.checkpoints import eagle3_head, llama_target
    from reference.learnable import write_target

    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "vocab_size": VOCAB}
    model = with_experts(tmp_path / "model") if experts else write_target(tmp_path / "model", **sizes)
    head = eagle3_head(llama_target(3, num_hidden_layers=6, **sizes), vocab_size=VOCAB).write(tmp_path / "eagle3")
    shapes = {
        f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}": shape
        for layer in range(2) for expert in range(6) for name, shape in (("w1", (128, 64)), ("w2", (64, 128)))
    } if experts else None  # fmt: skip
    adapter = write_adapter(
        tmp_path / "a", model, targets=("w1", "w2", "o_proj", "q_proj", "up_proj", "down_proj"), shapes=shapes
    )
    expected: Any = None
    for tp_size, algorithm in ((1, "none"), (2, "NGRAM" if experts else "EAGLE3"), (4, "none"), (4, "NGRAM")):
        more: dict[str, Any] = {"tp_size": tp_size, "enable_tp_invariance": True, "lora_modules": [f"a={adapter}"]}
        more |= {"speculative_algorithm": algorithm, "speculative_fixed_shape": algorithm != "none"}
        if algorithm == "EAGLE3":
            more |= {"speculative_draft_model_path": str(head), "speculative_num_steps": 3}
        with LLM(str(model), **more, **SETTINGS) as llm:
            found = texts(llm)
            for answer in llm.generate(PROMPTS, {"max_new_tokens": 20}, adapter="a", return_logprob=True):
                found.append((answer.token_ids, [token[0] for token in answer.meta_info["output_token_logprobs"]]))
        expected = expected or found
        assert found == expected, (tp_size, algorithm)


class Swappable(NGramDrafter):
    """Its head is a folder, in which a file says what rank 1 is to do with it. When it is taken there is a file beside
    it."""

    rank = 0

    @classmethod
    def build(cls, context: DraftContext) -> Swappable:
        made = cls(context.rows, context.ops, capacity=4096)
        made.rank = context.target.ranks.rank
        return made

    def read_head(self, folder: Path | None) -> Any:
        assert folder is not None
        todo, until = folder / "rank 1", time.monotonic() + 60
        if self.rank:
            (folder / "begun").touch()
            while todo.read_text() == "wait" and time.monotonic() < until:
                time.sleep(0.01)
            if todo.read_text() == "fail":
                raise ConfigError("no head here")
        return folder

    def take_head(self, head: Any) -> None:
        head.with_name(f"{head.name} taken by {self.rank}").touch()


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Any]:
    with LLM(str(folder), **SETTINGS) as llm:
        return texts(llm)


@pytest.mark.exhaustive  # as in tests/engine/test_exact_adapters.py, whose ranks are threads
@pytest.mark.parametrize("whole", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_adapters_of_experts(folder: Path, tmp_path: Path, whole: bool) -> None:
    """Of which each rank has its own experts', or a share of each."""
    shapes = {
        f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}": shape
        for layer in range(2) for expert in range(6) for name, shape in (("w1", (128, 64)), ("w2", (64, 128)))
    }  # fmt: skip
    adapter = write_adapter(tmp_path / "a", folder, targets=("w1", "w2"), shapes=shapes, strength=3.0)
    kind = {**SETTINGS, "lora_modules": [f"a={adapter}"]}
    params = [{"max_new_tokens": 20, "temperature": float(i % 2), "sampling_seed": i} for i in range(4)]
    with LLM(str(folder), **kind, speculative_algorithm="none") as llm:
        alone, plain = ([one.token_ids for one in llm.generate(PROMPTS, params, adapter=a)] for a in ("a", None))
    more = {"speculative_algorithm": "NGRAM", "speculative_fixed_shape": True, "enable_expert_parallel": whole}
    with LLM(str(folder), **kind, **more, tp_size=2) as llm:
        found = llm.generate(PROMPTS * 2, params * 2, adapter=["a"] * 4 + [None] * 4)
    assert [one.token_ids for one in found] == alone + plain and sum(
        a != b for a, b in zip(alone, plain, strict=True)
    ) > 1


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[LLM]:
    """Of a fixed shape: whether anything is drafted would else depend on what steps cost here."""
    drafts = {"speculative_algorithm": f"{__name__}:Swappable", "speculative_fixed_shape": True}
    more: dict[str, Any] = {"chunked_prefill_size": 16, "enable_expert_parallel": True}
    with LLM(str(folder), tp_size=2, **more, **drafts, **SETTINGS) as llm:
        (pid,) = (process.pid for process in processes(llm)._processes)
        yield llm
    assert gone(pid), "a process is left behind"


def test_texts_and_log_probabilities_are_those_of_one_rank(pair: LLM, expected: list[Any]) -> None:
    for _ in range(2):  # then from the radix cache, with drafts of what was answered
        (found, values), (wanted, known) = texts(pair), expected
        assert found == wanted
        assert all(one == pytest.approx(other, rel=1e-4, abs=1e-5) for one, other in zip(values, known, strict=True))
    assert pair.engine.reporter.accept_length > 1.0 and processes(pair).ranks.expert_parallel


def test_a_rank_that_fails_while_it_serves_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = RankProcesses.__new__(RankProcesses)
    here, there = Pipe()
    ranks._plans, ranks._over, ranks._reading, ranks._why = [here], threading.Event(), threading.Lock(), None
    ranks._failure, ranks.digest = "rank 1 of the engine ended: exit code 1", Digest()
    ranks.digest.due.extend([(64, 1), (128, 2)])
    there.send(Failed("bug", "OutOfMemoryError: CUDA out of memory"))
    with pytest.raises(RankDied, match="rank 1: OutOfMemoryError"):
        ranks.check()
    there.send(Failed("config", "--tp-size: a sentence"))
    assert ranks._said() is ranks._said()  # who watches may have read it before
    there.close()
    ranks._over.set()
    ranks.digest.due.extend([(192, 3), (256, 4)])
    with pytest.raises(ConfigError, match="--tp-size: a sentence"):
        ranks.check()
    ranks._why = None
    with pytest.raises(RankDied, match="rank 1 of the engine ended: exit code 1"):
        ranks._compare((192, 3))
    monkeypatch.setattr(processes_of_ranks, "LOOK", 0.0)
    assert str(ranks.blame(RuntimeError("closed"))) == "rank 1 of the engine ended: exit code 1"
    ranks._over.clear()
    assert str(ranks.blame(torch.OutOfMemoryError("no room"))) == "rank 0: OutOfMemoryError: no room"


def test_heads_are_loaded_beside_the_steps_of_every_rank(pair: LLM, tmp_path: Path) -> None:
    def head(name: str, todo: str) -> Path:
        made = tmp_path / name
        made.mkdir()
        (made / "rank 1").write_text(todo)
        return made

    def taken() -> set[str]:
        return {path.name for path in tmp_path.glob("* taken by *")}

    def answer() -> list[int]:
        return pair.generate("hello there", {"max_new_tokens": 20, "temperature": 0.0})[0].token_ids

    engine, expected, late = pair.engine, answer(), head("late", "wait")
    loading = threading.Thread(target=engine.swap_draft, args=(late,), daemon=True)
    loading.start()
    until = time.monotonic() + 30
    while not (late / "begun").exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert answer() == expected and loading.is_alive() and not taken(), "a step does not wait for it"
    (late / "rank 1").write_text("load")
    loading.join(30)
    shutil.rmtree(late)
    assert answer() == expected and taken() == {"late taken by 0", "late taken by 1"}
    with pytest.raises(ConfigError, match="no head here"):
        engine.swap_draft(head("bad", "fail"))
    with pytest.raises(DraftwingError, match="rank 1: FileNotFoundError"):
        engine.swap_draft(tmp_path / "nowhere")
    engine.swap_draft(head("replaced", "load"))
    engine.swap_draft(head("newest", "load"))
    assert answer() == expected
    assert taken() == {f"{name} taken by {rank}" for name in ("late", "newest") for rank in (0, 1)}


def test_ranks_that_draw_other_tokens_are_noticed_on_the_way(pair: LLM) -> None:
    digest = processes(pair).digest
    assert digest is not None
    digest.value += 1
    begun = digest.steps
    with pytest.raises(RankDied, match="rank 1 of the engine drew other tokens than rank 0"):
        pair.generate("b", {"max_new_tokens": 900, "ignore_eos": True, "temperature": 4.0, "sampling_seed": 1})
    assert digest.steps - begun < 4 * COMPARED_EVERY


def processes(llm: LLM) -> RankProcesses:
    broadcast = llm.engine.parts.executor.broadcast
    assert isinstance(broadcast, RankProcesses)
    return broadcast


def gone(pid: int, seconds: float = 30.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.exhaustive  # the tests below show the same of an engine in a process of its own
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_hangs(folder: Path, number: signal.Signals) -> None:
    llm = LLM(str(folder), tp_size=2, **SETTINGS)
    (pid,) = (process.pid for process in processes(llm)._processes)
    assert llm.generate("a", {"max_new_tokens": 2})
    os.kill(pid, number)
    begun = time.monotonic()
    with pytest.raises(RankDied, match=r"rank 1 of the engine (ended: killed by SIGKILL|hangs: nothing was heard)"):
        llm.generate("hello", {"max_new_tokens": 500, "ignore_eos": True})
    took = time.monotonic() - begun
    llm.close()
    assert gone(pid) and took < 120, took  # on a quiet machine less than 5 s, see docs/scaling.md


def children(pid: int) -> list[int]:
    """Those of a process that are ranks."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [child for child in map(int, found) if b"process.rank" in Path(f"/proc/{child}/cmdline").read_bytes()]


class Heard:
    """What an engine's process says."""

    def __init__(self, folder: Path, size: int = 2, **more: Any) -> None:
        self.link = EngineLink(Options.from_kwargs(model=str(folder), tp_size=size, **SETTINGS, **more).resolve())
        self.info = self.link.wait_ready()
        self.outputs, self.over, self.why = threading.Event(), threading.Event(), ""
        self.link.listen(Listener(lambda outputs: self.outputs.set(), lambda reply: None, self._died))
        self.ranks = children(self.link.process.pid)

    def _died(self, why: str) -> None:
        self.why = why
        self.over.set()

    def ask(self) -> None:
        params = SamplingParams(max_new_tokens=900, ignore_eos=True)
        self.link.send([self.info.admit(GenerationRequest("a", [1, 2, 3], params))])
        assert self.outputs.wait(60)


@pytest.fixture
def heard(folder: Path, request: pytest.FixtureRequest) -> Iterator[Heard]:
    """Of two ranks, or as the test's `size` and `fault` say."""
    known = getattr(request, "param", (2, signal.SIGKILL))
    size, fault = known
    drafts = {"speculative_algorithm": f"{__name__}:RunsOut", "speculative_fixed_shape": True}
    found = Heard(folder, size, **(drafts if fault == OUT_OF_MEMORY else {}))
    yield found
    found.link.close(0)
    assert all(gone(pid) for pid in found.ranks)


class RunsOut(Drafter):
    """Has no memory on the last rank, after some steps."""

    rank = left = 0

    @classmethod
    def build(cls, context: DraftContext) -> RunsOut:
        made, ranks = cls(), context.target.ranks
        made.left = 20 if ranks.rank == ranks.size - 1 else 1 << 30
        return made

    def propose(self, step: DraftStep) -> Draft:
        self.left -= 1
        if not self.left:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return self.chain(step, step.table.last.index_select(0, step.rows).unsqueeze(1).expand(-1, step.shape.depth))


OUT_OF_MEMORY = "out of memory"
SAID = {
    signal.SIGKILL: "rank {} of the engine ended: killed by SIGKILL (out of memory?)",
    signal.SIGSTOP: "rank {} of the engine hangs: nothing was heard of it for 3 s",
    OUT_OF_MEMORY: "rank {}: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
}


@pytest.mark.parametrize(
    ("heard", "fault"),
    [
        pytest.param((size, fault), fault, marks=[pytest.mark.exhaustive] * ((size, fault) != (2, OUT_OF_MEMORY)))
        for size in (2, 4)
        for fault in SAID
    ],
    indirect=["heard"],
)
def test_an_engine_without_one_of_its_ranks_says_so_and_ends(heard: Heard, fault: signal.Signals | str) -> None:
    """Of the last rank."""
    last = len(heard.ranks)
    assert heard.info.capability["ranks"] == last + 1
    heard.ask()
    begun = time.monotonic()
    if not isinstance(fault, str):
        os.kill(heard.ranks[-1], fault)
    assert heard.over.wait(60)  # on a quiet machine 5 s
    print(f"{last + 1} ranks, {fault!r}: {time.monotonic() - begun:.2f} s")
    assert heard.why == SAID[fault].format(last)
    assert heard.link.process.wait(60) == 1


@pytest.mark.exhaustive  # test_spawn.py shows it of any process
def test_a_stopped_rank_does_not_outlive_a_killed_engine(heard: Heard) -> None:
    heard.ask()
    os.kill(heard.ranks[0], signal.SIGSTOP)
    os.kill(heard.link.process.pid, signal.SIGKILL)
    assert heard.over.wait(60)
    assert "SIGKILL" in heard.why


class FailsElsewhere(Drafter):
    """Cannot be made on ranks from 1 on, when all have loaded."""

    @classmethod
    def build(cls, context: DraftContext) -> FailsElsewhere:
        if context.target.ranks.rank:
            raise ConfigError("no drafter here")
        return cls()

    def propose(self, step: DraftStep) -> Draft:
        return self.chain(step, step.table.last.index_select(0, step.rows).unsqueeze(1))


def test_a_rank_that_fails_when_all_have_loaded(folder: Path) -> None:
    begun, others = time.monotonic(), children(os.getpid())  # of a fixture
    with pytest.raises(ConfigError, match="no drafter here"):
        LLM(str(folder), tp_size=2, speculative_algorithm=f"{__name__}:FailsElsewhere", **SETTINGS)
    assert children(os.getpid()) == others and time.monotonic() - begun < 60


RANK_THAT_LOADS = """
import os, signal, sys
from draftwing.engine.process.spawn import Failed, joined
plans, heads, pulse = joined(sys.argv)
words = plans.recv()
if "rank 2" in words:
    if "says why" in words:
        plans.send(Failed("checkpoint", "the second file cannot be read"))
    if "hangs" not in words:
        os._exit(1)
if "hangs" in words:
    plans.send("loaded")
while not pulse.poll(0.05):
    pulse.send_bytes(b".")
    if "rank 2 hangs" in words:
        os.kill(os.getpid(), signal.SIGSTOP)
"""


class Named:
    """A setup that a process reads without importing what is in one."""

    def __init__(self, words: str) -> None:
        self.options, self.words = Options(tp_size=3), words

    def _replace(self, rank: int, port: int) -> str:
        return f"rank {rank} {self.words}"


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RankProcesses]:
    """Two ranks that compute nothing. words: what becomes of the second."""
    (tmp_path / "rank_that_loads.py").write_text(RANK_THAT_LOADS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(processes_of_ranks, "RANK", "rank_that_loads")
    monkeypatch.setattr(processes_of_ranks, "LOOK", 0.3)
    alone = SimpleNamespace(release=lambda: None, close=lambda: None)
    monkeypatch.setattr(processes_of_ranks, "Rendezvous", lambda: SimpleNamespace(port=0, join=lambda *_: alone))
    return lambda words, failed=None: RankProcesses(cast(Any, Named(words)), CpuDevice(), failed)


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        ("says why", CheckpointError, "the second file"),
        ("", RankDied, "rank 2 of the engine ended: exit code 1"),
    ],
)
def test_a_rank_that_ends_while_one_before_it_loads_is_the_one_that_is_named(
    stand_ins: Callable[..., RankProcesses], words: str, error: type[Exception], said: str
) -> None:
    """Those that load yet are killed then, which is nothing to tell of."""
    others = stand_ins(words)
    with pytest.raises(error, match=said):
        others.wait_loaded()
    others.close()


def test_a_rank_that_hangs_is_noticed_and_all_are_killed(stand_ins: Callable[..., RankProcesses]) -> None:
    found, noticed = list[BaseException](), threading.Event()
    others = stand_ins("hangs", lambda error: (found.append(error), noticed.set()))
    others.wait_loaded()
    others.watch()
    assert noticed.wait(60) and "rank 2 of the engine hangs" in str(found[0])
    assert [process.wait(60) for process in others._processes] == [-signal.SIGKILL] * 2
    with pytest.raises(RankDied, match="hangs"):
        others.send("anything")
    others.close()


def test_ranks_end_with_an_engine_that_fails_when_it_is_built(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ConfigError("no tokens to stop at")

    others = children(os.getpid())
    monkeypatch.setattr("draftwing.engine.startup.info.stop_ids", fail)
    with pytest.raises(ConfigError, match="no tokens to stop at"):
        LLM(str(folder), tp_size=2, **SETTINGS)
    assert children(os.getpid()) == others


def test_what_cannot_be_spread_is_said_before_anything_is_loaded(folder: Path) -> None:
    with pytest.raises(ConfigError, match="at most 4, a rank for each of the model's attention heads; found 5"):
        LLM(str(folder), tp_size=5, **SETTINGS)


@pytest.mark.exhaustive  # a reader of files says it, in whatever rank
def test_weights_that_cannot_be_read(tmp_path: Path) -> None:
    broken = write_checkpoint(tmp_path / "model", hidden=64, heads=4)
    (broken / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="cannot be read"):
        LLM(str(broken), tp_size=2, **SETTINGS)
