"""`draftwing train` from prompts to a measured head, on a target of 258 tokens; kills, single stages, and refusals.

The target says mostly the successor of each token in a fixed permutation, with a little of everything before mixed in,
so a head learns a good part of it in two seconds, and none of it before that.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from reference import exact_heads
from safetensors.torch import load_file
from tiny_adapters import write_adapter
from tiny_checkpoint import write_tokenizer

from draftwing import LLM
from draftwing.cli.main import main
from draftwing.config.trees import TreeShape
from draftwing.sched.own_heads import OwnHeads
from draftwing.train import stages
from draftwing.train.evaluate import Trial, evaluate
from draftwing.train.settings import open_run

pytestmark = pytest.mark.slow

UNTRAINED, TRAINED = 1.25, 2.5  # accept lengths at (3, 1, 4), greedy: at most, at least
LEARN = ("--steps", "60", "--batch-tokens", "256", "--lr", "0.02", "--ttt-steps", "3")
BLOCKS = ("--block-steps", "4", "--draft-layers", "2", "--markov-rank", "32")
LEARN_BLOCKS = ("--steps", "50", "--batch-tokens", "256", "--lr", "0.015", "--block-loss", "lk_hybrid",
                "--anchors", "0.5", "--draft-vocab-size", "128")  # fmt: skip
ENGINE = ("--device", "cpu", "--dtype", "float32", "--max-total-tokens", "4000", "--max-running-requests", "16",
          "--num-threads", "1")  # fmt: skip


class Bench(NamedTuple):
    folder: Path
    target: str

    def args(self, out: str, *more: str, algorithm: str = "EAGLE3", stage: str | None = None) -> list[str]:
        vocabulary = ("--draft-vocab-size", "256") if algorithm == "EAGLE3" else ()
        learn = LEARN if not algorithm.startswith("D") else LEARN_BLOCKS + (() if "--init-head" in more else BLOCKS)
        return [
            "train", *([stage] if stage else []), "--model", self.target, "--algorithm", algorithm,
            "--prompts", str(self.folder / "p.jsonl"), "--eval-prompts", str(self.folder / "e.jsonl"),
            "--out", str(self.folder / out), "--max-tokens", "48", "--max-length", "128", *ENGINE, *vocabulary,
            *learn,
            "--shapes", "3,1,4", "4,3,9", "--eval-tokens", "24", "--licence", "made here: CC0-1.0", *more,
        ]  # fmt: skip

    def train(self, out: str, *more: str, algorithm: str = "EAGLE3", stage: str | None = None) -> Path:
        assert main(self.args(out, *more, algorithm=algorithm, stage=stage)) == 0
        return self.folder / out


def write_prompts(path: Path, field: str, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("train")
    exact = exact_heads.exact_eagle3(vocab_size=258)
    write_tokenizer(exact_heads.disturbed(exact.target, 0.4).write(folder / "target"))
    write_prompts(folder / "p.jsonl", "prompt", [f"{i} prompt {i * i}" for i in range(80)])
    write_prompts(folder / "few.jsonl", "prompt", [f"{i} prompt {i * i}" for i in range(24)])
    write_prompts(folder / "e.jsonl", "question", [f"ask {i} {i**3}" for i in range(6)])
    return Bench(folder, str(folder / "target"))


@pytest.fixture(scope="module")
def run(bench: Bench) -> Path:
    """A whole run of EAGLE-3, whose answers and features other tests use."""
    return bench.train("run")


@pytest.fixture(scope="module")
def short(bench: Bench) -> list[str]:
    """Options of a run that learns little, soon."""
    return ["--prompts", str(bench.folder / "few.jsonl"), "--steps", "6", "--shapes", "3,1,4"]


@pytest.fixture(scope="module")
def short_run(bench: Bench, short: list[str]) -> Path:
    return bench.train("short", *short)


def accept(out: Path, shape: tuple[int, int, int] = (3, 1, 4), temperature: float = 0.0) -> float:
    records = json.loads((out / "eval.json").read_text())["records"]
    (record,) = [r for r in records if r["shape"] == list(shape) and r["temperature"] == temperature]
    return float(record["accept_length"])


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "head" / "model.safetensors")


def refused(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(args) == 2
    return capsys.readouterr().err


# ---- it learns -------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_a_head_for_an_adapter(bench: Bench, run: Path) -> None:
    """It learns what the model says with the adapter, for which the model's own head drafts less well. Served beside
    the adapter, as in https://github.com/vllm-project/vllm/issues/26679, it changes no text."""
    adapter = write_adapter(bench.folder / "adapter", Path(bench.target), 1, strength=0.3)
    more = ("--adapter", f"own={adapter}", "--steps", "200", "--shapes", "3,1,4", "--eval-temperatures", "0")
    out = bench.train("adapted", *more)
    texts = [
        {one["key"]: one for one in map(json.loads, (folder / "responses.jsonl").read_text().splitlines())}
        for folder in (run, out)
    ]
    assert texts[0].keys() == texts[1].keys() and sum(texts[0][key] != texts[1][key] for key in texts[0]) > 40
    options = {
        "model": bench.target, "device": "cpu", "dtype": "float32", "max_total_tokens": 4000, "num_threads": 1,
        "lora_modules": [f"own={adapter}"], "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": str(run / "head"),
    }  # fmt: skip
    sets = {"e": [f"ask {i} {i**3}" for i in range(6)]}
    trial = Trial([TreeShape(3, 1, 4)], [0.0], 24, 8, "own")
    (before,) = evaluate(options, sets, trial, bench.folder / "before.json")
    assert accept(out) > max(1.3 * before["accept_length"], 1.6), before
    assert "--lora-modules own=" in (out / "head" / "README.md").read_text()
    params = [{"temperature": float(i % 2), "sampling_seed": i, "max_new_tokens": 30} for i in range(6)]
    with LLM(**options | {"speculative_algorithm": "none", "speculative_draft_model_path": None}) as llm:
        expected = [one.token_ids for one in llm.generate(sets["e"], params, adapter="own")]
    own = {"speculative_draft_model_path": str(out / "head"), "speculative_fixed_shape": True}
    with LLM(**options | own) as llm:
        found = llm.generate(sets["e"], params, adapter="own")
        assert [one.token_ids for one in found] == expected and llm.engine.reporter.accept_length > 1.6


@pytest.mark.exhaustive
def test_factors_for_an_adapter(bench: Bench, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are a head of the adapter's own beside the one that drafts for all others, whose rows keep their drafts."""
    monkeypatch.setattr(OwnHeads, "next", lambda self, key: True)  # none drafts with the model's head, as by chance
    plain = write_adapter(bench.folder / "plain adapter", Path(bench.target), 1, strength=0.3)
    more = ("--adapter", f"own={plain}", "--steps", "200", "--shapes", "3,1,4", "--eval-temperatures", "0")
    out = bench.train("factors", *more, "--head-rank", "8", "--init-head", str(run / "head"))
    own = bench.folder / "own adapter"
    shutil.copytree(plain, own)
    shutil.copytree(out / "draft_head", own / "draft_head")
    options = {
        "model": bench.target, "device": "cpu", "dtype": "float32", "max_total_tokens": 4000, "num_threads": 1,
        "speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(run / "head"),
    }  # fmt: skip
    found, names = {}, ["own", None, "own", None, "own", None]
    texts = [f"ask {i} {i**3}" for i in range(6)]
    for adapter in (plain, own):
        serving = options | {"lora_modules": [f"own={adapter}"]}
        for name in ("own", None):
            trial, report = Trial([TreeShape(3, 1, 4)], [0.0], 24, 8, name), bench.folder / f"{adapter.name} {name}"
            (found[adapter, name],) = evaluate(serving, {"e": texts}, trial, report)
        with LLM(**serving) as llm:
            answers = llm.generate(texts, {"temperature": 0, "max_new_tokens": 30}, adapter=names)
            found[adapter, "texts"] = {"tokens": [one.token_ids for one in answers]}
    length = {key: record.get("accept_length", 0.0) for key, record in found.items()}
    assert length[own, "own"] > max(1.3 * length[plain, "own"], 1.6), length
    assert length[own, None] == length[plain, None] and found[own, "texts"] == found[plain, "texts"]
    assert length[own, "own"] == pytest.approx(accept(out), abs=0.03), (
        "the same prompts, by the head with the factors added"
    )


def test_a_head_is_judged_without_the_adapters_own(bench: Bench, short: list[str], short_run: Path) -> None:
    """Which may be beside a head of another kind, and else would draft for the adapter's rows."""
    target, adapter = Path(bench.target), write_adapter(bench.folder / "again", Path(bench.target), 1, strength=0.3)
    more = [*short, "--adapter", f"own={adapter}", "--init-head", str(short_run / "head")]
    folder, judged = adapter / "draft_head", []
    for shapes in ({"layers.9.self_attn.q_proj": (8, 8)}, {"fc": tuple(weights(short_run)["fc.weight"].shape)}, None):
        shutil.rmtree(folder, ignore_errors=True)
        if shapes is not None:
            write_adapter(folder, target, 3, 4, [name.rpartition(".")[2] for name in shapes], 9.0, shapes=shapes)
        out = bench.train("judged", *more)
        judged.append((accept(out), accept(out, temperature=1.0)))
        (out / "eval.json").unlink()
    assert judged[0] == judged[1] == judged[2] and judged[0][0] > 1, judged


@pytest.mark.further(algorithm=["EAGLE", "MTP"])
@pytest.mark.parametrize("algorithm", ["EAGLE3", "EAGLE", "MTP"])
def test_acceptance_rises(bench: Bench, run: Path, algorithm: str) -> None:
    short = ("--data", str(run), "--shapes", "3,1,4", "--eval-temperatures", "0")
    other = ("--optimizer", "muon", "--steps", "60", "--lr", "0.02") if algorithm == "MTP" else ()
    trained = run if algorithm == "EAGLE3" else bench.train(algorithm, *short, *other, algorithm=algorithm)
    untrained = bench.train(f"{algorithm} 0", *short, "--steps", "1", "--lr", "1e-9", algorithm=algorithm)
    assert accept(untrained) < UNTRAINED and accept(trained) > TRAINED
    if trained == run:
        assert accept(trained, (4, 3, 9)) > accept(trained) and accept(trained, (4, 3, 9), 1.0) > TRAINED
    assert (run / "responses.jsonl").exists() and not (untrained / "responses.jsonl").exists()


def test_the_head_serves_and_its_card_says_how_it_was_made(bench: Bench, run: Path) -> None:
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_total_tokens": 2000}
    asked = [json.loads(line) for line in (run / "responses.jsonl").read_text().splitlines()]
    prompts = [one["ids"][: one["spans"][0][0]] for one in asked[:4]]
    params = {"temperature": 0, "max_new_tokens": 30}
    with LLM(bench.target, **options) as llm:
        expected = [completion.token_ids for completion in llm.generate(prompts, params)]
    tree = {"speculative_num_steps": 5, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8}
    tree |= {"speculative_fixed_shape": True}
    spec = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(run / "head"), **tree}
    with LLM(bench.target, **options, **spec) as llm:
        found = llm.generate(prompts, params)
        assert [completion.token_ids for completion in found] == expected
        assert llm.engine.reporter.accept_length > TRAINED
    card = (run / "head" / "README.md").read_text()
    for part in (
        "EAGLE-3 head", "made here: CC0-1.0", "Seed 0", "60 steps", "p.jsonl", "--lr 0.02", f"| {accept(run):.2f} ± ",
        "80 prompts", "256 tokens", "--speculative-algorithm EAGLE3",
    ):  # fmt: skip
        assert part in card, part
    drawn = [one["temperature"] for one in asked]
    greedy = drawn.count(0)
    assert 0 < greedy < len(drawn) == 80
    assert f"80 answers, {greedy} of them ({greedy / 80:.0%}) at temperature 0, the others at 0.6 to 1." in card
    used = {"prompts": 80, "answers": 80, "greedy": greedy, "conversations": 0}
    assert json.loads((run / "fit.json").read_text())["used"] == used


@pytest.mark.exhaustive  # test_blocks.py has its losses
def test_a_head_that_selects_pairs(bench: Bench, run: Path) -> None:
    """A tree of its pairs accepts more than its chain."""
    out = bench.train("pairs", "--data", str(run), "--online", "--eval-temperatures", "0", algorithm="DFLASH2")
    assert accept(out) > 2.0 and accept(out, (4, 3, 9)) > accept(out)
    config = json.loads((out / "head" / "config.json").read_text())
    assert config["architectures"] == ["DFlash2DraftModel"]
    inner = config["dflash_config"]
    assert (inner["conv_kernel_size"], inner["selector_rank"], inner["selector_top_k"]) == (2, 32, 16)


def test_a_head_that_drafts_blocks(bench: Bench, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the same answers, trained with features that are not kept; a tree accepts more than a chain."""
    out = bench.train("spark", "--data", str(run), "--online", "--eval-temperatures", "0", algorithm="DSPARK")
    assert accept(out) > 2.0 and accept(out, (4, 3, 9)) > accept(out)
    config = json.loads((out / "head" / "config.json").read_text())
    assert (config["block_size"], config["markov_rank"], config["draft_vocab_size"]) == (4, 32, 128)
    used = {i for line in (run / "responses.jsonl").read_text().splitlines() for i in json.loads(line)["ids"]}
    assert config["mask_token_id"] == max(set(range(258)) - used)
    card = (out / "head" / "README.md").read_text()
    assert "DSpark head" in card and "128 tokens" in card and "--block-loss lk_hybrid" in card
    more = ("--data", str(run), "--init-head", str(out / "head"), "--online", "--steps", "1", "--lr", "1e-9")
    again = bench.train("spark again", *more, algorithm="DSPARK", stage="fit")
    for name, tensor in weights(again).items():
        torch.testing.assert_close(tensor, weights(out)[name])
    args = ["train", "--model", bench.target, "--prompts", str(bench.folder / "p.jsonl"), "--out", str(out) + "x"]
    assert "--mask-token: expected a token id below 258, found 258" in refused(
        [*args, "--algorithm", "DSPARK", "--mask-token", "258"], capsys
    )


def test_fine_tuning_starts_from_the_head(bench: Bench, run: Path) -> None:
    again = ("--data", str(run), "--init-head", str(run / "head"), "--steps", "1", "--lr", "1e-9")
    tuned = bench.train("tuned", *again, stage="fit")
    vocabulary = json.loads((tuned / "vocabulary.json").read_text())
    ids = torch.tensor(vocabulary["ids"])  # the head's own, wherever those of the answers would be others
    assert torch.equal(ids - torch.arange(256), weights(run)["d2t"])
    for name, tensor in weights(tuned).items():
        torch.testing.assert_close(tensor, weights(run)[name])


def test_the_mean_of_heads(bench: Bench, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As it is, without any training; heads that have none are refused."""
    untrained = ("--steps", "0", "--epochs", "0")
    more = ("--data", str(run), "--init-head", str(run / "head"))
    other = bench.train("other", *more, "--steps", "9", "--lr", "3e-3", stage="fit")
    heads = [str(folder / "head") for folder in (run, other)]
    mean = bench.train("mean", "--data", str(run), "--init-head", *heads, *untrained, stage="fit")
    assert not (mean / "fit").exists()
    moved = False
    for name, tensor in weights(mean).items():
        a, b = weights(run)[name], weights(other)[name]
        moved |= not torch.equal(a, b)
        torch.testing.assert_close(tensor, (a + b) / 2 if a.is_floating_point() else a)
    assert moved
    again = open_run(mean, {"eval_tokens": 64}, {}).settings  # goes on: it is the same run still
    assert again.init_head == tuple(heads) and again.max_tokens == 48 and again.eval_tokens == 64 and not again.trains
    assert "training was begun" in refused(["train", "--out", str(other), *untrained], capsys)
    fresh = bench.train("narrow", "--data", str(run), "--steps", "1", "--ffn-size", "64", stage="fit")
    args = bench.args("none", "--data", str(run), *untrained, stage="fit")
    assert "only for --init-head" in refused(args, capsys)
    assert "differ in ffn: 48, 64" in refused([*args, "--init-head", heads[0], str(fresh / "head")], capsys)


def test_the_mean_needs_no_data(
    bench: Bench, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor answers, features and processes; what is measured does need prompts."""

    def never(*args: Any, **kw: Any) -> None:
        raise AssertionError

    for name in ("generate", "capture", "Fit"):
        monkeypatch.setattr(stages, name, never)
    monkeypatch.setattr(stages.Stages, "_target", never)
    monkeypatch.setattr(subprocess, "run", never)
    head, out = str(bench.folder / "copied head"), bench.folder / "no data"
    shutil.copytree(run / "head", head)
    args = ["train", "--model", bench.target, "--init-head", head, head, "--epochs", "0", *ENGINE, "--out", str(out)]
    more = ("--gpus", "2", "--online", "--shapes", "3,1,4", "--eval-tokens", "8", "--eval-temperatures", "0")
    assert "give --eval-prompts" in refused([*args, *more], capsys)
    assert sorted(path.name for path in out.iterdir()) == ["fit.json", "head", "train.json"]
    for name, tensor in weights(out).items():
        assert torch.equal(tensor, weights(run)[name])
    shutil.rmtree(head)  # it is not needed any more
    measured = ["--out", str(out), "--eval-prompts", str(bench.folder / "e.jsonl")]
    assert main(["train", *measured]) == 0 and accept(out) > 1.5
    assert main(["train", "eval", *measured]) == 0
    assert f"the mean of {head}, {head}." in (out / "head" / "README.md").read_text()


def test_features_from_the_disk_or_while_training(bench: Bench, run: Path) -> None:
    short = ("--data", str(run), "--steps", "5")
    stored = bench.train("stored", *short, stage="fit")
    direct = bench.train("direct", *short, "--online", stage="fit")
    for name, tensor in weights(stored).items():
        torch.testing.assert_close(weights(direct)[name], tensor, rtol=1e-3, atol=1e-4)


def test_conversations_as_they_are(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    path = bench.folder / "talks.jsonl"
    talks = [
        {"conversations": [{"from": "human", "value": f"q {i}"}, {"from": "gpt", "value": f"answer {i * i}"}]}
        for i in range(20)
    ]
    bad = [{"conversations": [{"from": "human", "value": "q"}]}, {"conversations": "no"}]
    path.write_text("".join(json.dumps(talk) + "\n" for talk in [*talks, *bad]) + "{broken\n")
    out = bench.folder / "talks"
    args = ["train", "--model", bench.target, "--conversations", str(path), "--out", str(out), "--held-out", "0.2"]
    brief = ("--steps", "2", "--shapes", "3,1,4", "--eval-tokens", "8", "--eval-temperatures", "0")
    assert main([*args, *ENGINE, *brief]) == 0
    data = json.loads((out / "data.json").read_text())
    assert data["read"] == 23 and data["prompts"] == 0 and 10 < data["conversations"] < 20
    assert data["examples"] == {
        "no assistant turn": ["talks.jsonl:21"],
        "neither messages nor conversations": ["talks.jsonl:22"],
        "a broken line": ["talks.jsonl:23"],
    }
    assert not (out / "responses.jsonl").exists()
    (found,) = {record["set"] for record in json.loads((out / "eval.json").read_text())["records"]}
    assert found == "held out"


# ---- it goes on ------------------------------------------------------------------------------------------------------


def test_stage_after_stage_is_the_whole(bench: Bench, short: list[str], short_run: Path) -> None:
    out = bench.folder / "stages"
    first = bench.args("stages", *short, stage="generate")
    assert main(first) == 0 and not (out / "head").exists()
    for stage in ("capture", "fit", "eval"):  # what is not said again is remembered
        assert main(["train", stage, "--out", str(out)]) == 0
    same_run(out, short_run)


def same_run(out: Path, expected: Path) -> None:
    def answers(folder: Path) -> dict[str, Any]:
        return {json.loads(line)["key"]: line for line in (folder / "responses.jsonl").read_text().splitlines()}

    assert answers(out) == answers(expected)
    assert weights(out).keys() == weights(expected).keys()
    for name, tensor in weights(out).items():
        assert torch.equal(tensor, weights(expected)[name]), name
    for temperature in (0.0, 1.0):
        assert accept(out, (3, 1, 4), temperature) == accept(expected, (3, 1, 4), temperature)


@pytest.mark.exhaustive  # the tests of generate, resume and evaluate kill each stage
def test_killed_again_and_again_it_is_the_same(bench: Bench, short: list[str], short_run: Path) -> None:
    """SIGKILL while answers are written, while the head is trained, and while it is measured."""
    out = bench.folder / "killed"
    words = [
        sys.executable,
        "-m",
        "draftwing",
        *bench.args("killed", *short, "--shapes", "3,1,4", "4,3,9", "--save-every", "3"),
    ]

    def lines() -> int:
        file = out / "responses.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def records() -> int:
        file = out / "eval.json"
        return len(json.loads(file.read_text())["records"]) if file.exists() else 0

    moments: list[Callable[[], bool]] = [
        lambda: lines() > 5,
        lambda: (out / "fit" / "state.pt").exists(),
        lambda: records() > 0,
    ]
    for reached in moments:
        process = subprocess.Popen(words, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        while not reached() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it was done before it could be killed"
    assert (out / "fit" / "state.pt").exists() and records() < 4
    assert main(["train", "--out", str(out)]) == 0
    same_run(out, short_run)


def test_nothing_is_done_twice(bench: Bench, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kw: Any) -> None:
        raise AssertionError

    before = {path: path.stat().st_mtime_ns for path in (run / "responses.jsonl", run / "eval.json")}
    monkeypatch.setattr(stages, "generate", never)
    monkeypatch.setattr(stages, "capture", never)
    monkeypatch.setattr("draftwing.train.evaluate.timed_run", never)
    bench.train("run")
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_a_folder_knows_its_command(tmp_path: Path) -> None:
    open_run(tmp_path, {"init_head": ["a", "b"], "prompts": ["p.jsonl"]}, {"model": "m"}).save()
    found = open_run(tmp_path, {}, {})
    assert found.settings.init_head == ("a", "b") and found.settings.prompts == ("p.jsonl",)
    assert found.command() == f"draftwing train --out {tmp_path} --model m --prompts p.jsonl --init-head a b"


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kw: Any) -> None:
        raise AssertionError("a model was loaded")

    for name in ("draftwing.models.loader.load_model", "draftwing.engine.startup.models.load_model",
                 "draftwing.train.capture.load_model", "draftwing.train.heads.load_target_ends"):  # fmt: skip
        monkeypatch.setattr(name, never)


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "no prompt or conversation is left of 0 read: the files are empty"),
        ('{"prompt": ""}\n{"question": 5}\n', "of 2 read: 1 empty (such as bad.jsonl:1); 1 a text that is no string"),
        ('{"prompt": "%s"}\n' % ("x" * 200), "of 1 read: 1 longer than 112 tokens (such as bad.jsonl:1)"),
        ('{"prompt": "ask 3 27"}\n', "of 1 read: 1 an evaluation prompt or 13 words of one"),
        (None, "cannot be read: No such file"),
    ],
)
def test_nothing_to_train_on(
    bench: Bench, tmp_path: Path, no_model: None, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    path = tmp_path / "bad.jsonl"
    if content is not None:
        path.write_text(content)
    args = bench.args(str(tmp_path / "out"))
    args[args.index("--prompts") + 1] = str(path)
    assert message in refused(args, capsys)


def test_what_cannot_work_is_refused_at_once(
    bench: Bench, run: Path, tmp_path: Path, no_model: None, capsys: pytest.CaptureFixture[str]
) -> None:
    out, data = str(tmp_path / "out"), ("--data", str(run))
    for more, message in (
        (
            ["--algorithm", "EAGLE9"],
            "algorithm must be one of EAGLE, EAGLE3, DFLASH, DSPARK, DFLASH2, MTP; found 'EAGLE9'",
        ),
        (
            ["--aux-layers", "1", "2", "40"],
            "--aux-layers: expected 0 to 7 for a target of 7 layers, found [1, 2, 40]",
        ),
        (["--data", str(tmp_path)], "holds no run of `draftwing train`"),
        ([*data, "--seed", "5"], "was made with --seed 0, not 5"),
        ([*data, "--max-tokens", "50"], "was made with --max-tokens 48, not 50"),
        (["--init-head", str(run / "head"), "fit"], "--init-head: 'fit' does not exist"),
    ):
        assert message in refused(bench.args(out, *more), capsys), more
        assert not Path(out).exists()
    words = [str(tmp_path / "none") if word == bench.target else word for word in bench.args(out)]
    assert "does not exist" in refused(words, capsys)
    for stage, message in (
        ("capture", "run `draftwing train generate` first"),
        ("fit", "run `draftwing train generate` first"),
        ("eval", "run `draftwing train fit --out"),
    ):
        assert message in refused(bench.args(out, stage=stage), capsys)
    assert "expected features" in refused(bench.args(out, *data, "--aux-layers", "1", "2", "5", stage="fit"), capsys)
    assert "nothing to train on: give --prompts" in refused(
        ["train", "--model", bench.target, "--out", str(tmp_path / "new")], capsys
    )
    assert "was made with --model" in refused(["train", "--out", str(run), "--model", "smollm2"], capsys)
    assert "was made with --algorithm EAGLE3, not MTP" in refused(bench.args("run", algorithm="MTP"), capsys)


def test_a_full_disk_is_seen_before_it_is_full(
    bench: Bench, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    space = shutil.disk_usage(run)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: space._replace(free=1000))
    args = bench.args("full", "--data", str(run), "--aux-layers", "1", "3", "5", stage="capture")
    assert "give --online" in refused(args, capsys)


def test_processes_share_the_prompts(
    bench: Bench, short: list[str], short_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torchrun would start them, one after the other."""
    for name in ("TQDM_DISABLE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
    for rank in ("1", "0"):
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "2")):
            monkeypatch.setenv(name, value)
        out = bench.train("shared", *short, "--gpus", "2", stage="generate")
        assert os.environ["CUDA_VISIBLE_DEVICES"] == rank
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    parts = [(out / f"responses-{rank}.jsonl").read_text().splitlines() for rank in range(2)]
    assert all(len(part) > 5 for part in parts)
    assert sorted(parts[0] + parts[1]) == sorted((short_run / "responses.jsonl").read_text().splitlines())


def test_torchrun_starts_the_processes(
    bench: Bench, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And where one of them fails, so does the run."""
    started: list[list[str]] = []
    failed = SimpleNamespace(returncode=1)
    monkeypatch.setattr(subprocess, "run", lambda words, check: started.append(words) or failed)
    args = bench.args("none started", "--data", str(run), "--gpus", "2", stage="fit")
    assert "fit with 2 processes failed" in refused(args, capsys)
    ((python, *words),) = started
    assert python == sys.executable
    assert words[:4] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert words[4:] == ["-m", "draftwing", "train", "fit", "--out", str(bench.folder / "none started")]


def trained_by_two(out: Path) -> None:
    """What torchrun's processes do, by two that are forked: they need not import torch anew. As with torchrun they meet
    at a store of the process that starts them, so that nobody else can take its port."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    children = []
    for rank in range(2):
        child = os.fork()
        if not child:
            world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2}
            os.environ.update({name: str(value) for name, value in (world | meet).items()})
            code = 1
            try:
                signal.alarm(60)
                code = main(["train", "fit", "--out", str(out)])
            except BaseException:
                traceback.print_exc()  # `_exit` says nothing
                raise
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]


@pytest.mark.further(torchrun=True)
@pytest.mark.further(algorithm="DSPARK")
@pytest.mark.parametrize("algorithm", ["EAGLE3", "DSPARK"])
@pytest.mark.parametrize("torchrun", [False, True])
def test_two_processes_train_together(
    bench: Bench, run: Path, monkeypatch: pytest.MonkeyPatch, torchrun: bool, algorithm: str
) -> None:
    """They know what to do from the folder alone, and are as one that takes turns."""
    more, name = ("--data", str(run), "--steps", "3", "--lr", "1e-4"), f"{algorithm} {torchrun}"
    if algorithm == "DSPARK":
        more += ("--online",)
    if not torchrun:
        monkeypatch.setattr(stages.Stages, "_spawn", lambda self, stage: trained_by_two(self.run.out))
    two = bench.train(f"two {name}", *more, "--gpus", "2", algorithm=algorithm, stage="fit")
    alone = bench.train(f"alone {name}", *more, "--accumulate", "2", algorithm=algorithm, stage="fit")
    assert json.loads((two / "fit.json").read_text())["steps"] == 3
    for key, tensor in weights(alone).items():
        torch.testing.assert_close(weights(two)[key], tensor, rtol=1e-3, atol=1e-4, msg=key)
    rows = [list(csv.DictReader((out / "fit" / "metrics.csv").open())) for out in (two, alone)]
    for one, other in zip(*rows, strict=True):
        for column in ("loss", "accept_1", *(["gradient_norm"] if one["split"] == "train" else [])):
            assert float(one[column]) == pytest.approx(float(other[column]), rel=1e-3), column
