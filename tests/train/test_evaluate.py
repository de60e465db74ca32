"""Accept lengths of a head, by the engine: bench's figures, per position, resumed after a kill."""

from __future__ import annotations

import json
import logging
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from reference import exact_heads
from tiny_checkpoint import write_tokenizer

from draftwing.cli.main import main
from draftwing.config.trees import TreeShape
from draftwing.engine.benchmark import Sample
from draftwing.errors import ConfigError
from draftwing.train import evaluate as module
from draftwing.train.evaluate import MIN_SET, Trial, card, evaluate, fingerprint, positions, standard_error, summary
from draftwing.train.settings import Run, Settings

pytestmark = pytest.mark.slow

PROMPTS = {"one": [f"prompt {i}" for i in range(3)], "two": ["another", "and more"]}
CHAIN, TREE = TreeShape(4, 1, 5), TreeShape(3, 3, 9)
TRIAL = Trial((CHAIN, TREE), (0.0, 1.0), max_tokens=16, concurrency=3)


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A target, and a head that would be perfect if the target's layers did nothing; they do a little."""
    folder = tmp_path_factory.mktemp("models")
    exact = exact_heads.exact_eagle3(vocab_size=258)
    target = exact_heads.disturbed(exact.target, 0.65).write(folder / "target")
    write_tokenizer(target)
    head = exact.head.write(folder / "head")
    return {
        "model": str(target), "speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(head),
        "dtype": "float32", "device": "cpu", "max_total_tokens": 4000, "max_running_requests": 4, "random_seed": 3,
    }  # fmt: skip


@pytest.fixture(scope="module")
def records(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return evaluate(options, PROMPTS, TRIAL, tmp_path_factory.mktemp("eval") / "eval.json")


def test_every_shape_temperature_and_set(records: list[dict[str, Any]]) -> None:
    runs = [(tuple(r["shape"]), r["temperature"], r["set"]) for r in records]
    assert runs == [(shape.tree, t, name) for shape in (CHAIN, TREE) for t in (0.0, 1.0) for name in PROMPTS]
    for record in records:
        assert 1 <= record["accept_length"] < record["shape"][0] + 1
        # The mean of how far steps got, from the shares that went on at each position.
        length, reached = 1.0, 1.0
        for share in record["positions"]:
            reached *= share
            length += reached
        assert len(record["positions"]) == record["shape"][0]
        assert abs(length - record["accept_length"]) < 1e-9
    assert statistics.mean(record["accept_length"] for record in records) > 1.05


def per_round(record: dict[str, Any], names: Sequence[str]) -> dict[str, float]:
    """bench asks every prompt in each of its rounds."""
    return {name: record[name] / (record["rounds"] if name.endswith("_tokens") else 1) for name in names}


def test_the_same_numbers_as_bench(
    options: dict[str, Any], records: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"turns": [prompt]}) + "\n" for prompt in PROMPTS["one"]))
    flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    flags += ["--speculative-num-steps", "4", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "5"]
    flags += ["--speculative-fixed-shape"]
    own = ["--prompts", str(file), "--num-prompts", "3", "--max-tokens", "16", "--concurrency", "3", "--json"]
    assert main(["bench", *flags, *own]) == 0
    found = json.loads(capsys.readouterr().out)
    (ours,) = [r for r in records if (tuple(r["shape"]), r["temperature"], r["set"]) == (CHAIN.tree, 0.0, "one")]
    names = ("accept_length", "accept_rate", "completion_tokens", "prompt_tokens")
    assert per_round(found, names) == pytest.approx({name: ours[name] for name in names}, abs=1e-4)


def test_resumed_it_measures_what_is_missing(
    options: dict[str, Any], records: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, measured, measure = tmp_path / "eval.json", [], module.timed_run

    def counted(*args: Any) -> Any:
        if len(measured) == 6:
            raise KeyboardInterrupt
        measured.append(args)
        return measure(*args)

    with monkeypatch.context() as patch:
        patch.setattr(module, "timed_run", counted)
        with pytest.raises(KeyboardInterrupt):
            evaluate(options, PROMPTS, TRIAL, report)
    assert len(json.loads(report.read_text())["records"]) == 6
    calls = []
    monkeypatch.setattr(module, "timed_run", lambda *args: calls.append(args) or measure(*args))
    again = evaluate(options, PROMPTS, TRIAL, report)
    assert len(calls) == len(records) - 4, "shapes are measured whole"
    assert json.loads(report.read_text())["records"] == again
    for a, b in zip(records, again, strict=True):
        assert all(a[name] == b[name] for name in ("set", "shape", "temperature", "accept_length", "positions"))
    calls.clear()
    evaluate(options, PROMPTS, TRIAL, report)
    assert not calls


OTHERS = [
    ("dtype", "bfloat16"), ("quantization", "q8_0"), ("kv_cache_dtype", "fp8_e4m3"), ("context_length", 500),
    ("random_seed", 4), ("chat_template", "{{ messages }}"), ("revision", "other"), ("load_format", "dummy"),
    ("speculative_token_map", "map.json"), ("speculative_aux_layer_ids", "outputs"), ("simulate_accept_length", 2.0),
]  # fmt: skip


def test_figures_of_other_options_are_not_kept(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, measured = tmp_path / "eval.json", []

    def measure_shape(options: Any, shape: TreeShape, runs: Any, *_: Any) -> Any:
        measured.append(options)
        return [{"set": name, "shape": list(shape.tree), "temperature": t} for t, name in runs]

    def again(trial: Trial = TRIAL, **changes: Any) -> int:
        measured.clear()
        evaluate({**options, **changes}, PROMPTS, trial, report)
        return len(measured)

    monkeypatch.setattr(module, "_measure_shape", measure_shape)
    assert again() == 2 and again() == 0
    for name, value in OTHERS:
        assert again(**{name: value}) == 2, name
        assert again(**{name: value}) == 0, name
        assert again() == 2
    speed = {"max_total_tokens": 5000, "max_running_requests": 8, "num_threads": 1, "log_level": "error"}
    assert again(**speed) == 0, "what changes the pace alone"
    shorter = Trial((CHAIN, TREE), (0.0, 1.0), max_tokens=10, concurrency=3)
    assert again(shorter) == 2 and again() == 2, "figures of other answers"
    tree = {"speculative_num_steps": 2, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 3}
    assert again(**tree) == 0, "shapes are those of the trial"
    content = json.loads(report.read_text())
    del content["options"]
    report.write_text(json.dumps(content))
    assert again() == 2, "of an older version, which did not say"


def test_shares_of_positions() -> None:
    samples = [Sample(0.0, meta={"spec_correct_drafts_histogram": h}) for h in ([4, 2, 0, 2], [1], [])]
    assert positions(samples, 4) == [4 / 9, 2 / 4, 2 / 2, 0.0]
    assert positions([], 2) == [0.0, 0.0]


def test_the_table(records: list[dict[str, Any]]) -> None:
    lines = summary(records).splitlines()
    assert lines[0] == "| prompts | temperature | (4, 1, 5) | (3, 3, 9) |" and len(lines) == 6
    cells = [f"{r['accept_length']:.2f} ± {r['accept_length_error']:.2f}" for r in (records[0], records[4])]
    assert lines[2] == f"| one | 0 | {cells[0]} | {cells[1]} |"


def test_the_standard_error_is_that_of_other_draws_of_prompts() -> None:
    draw, lengths, errors = random.Random(0), [], []
    for _ in range(400):
        samples = []
        for _ in range(40):
            steps, rate = draw.randint(10, 60), draw.choice((0.5, 1.0, 2.5))
            samples.append(Sample(0.0, meta={"spec_verify_ct": steps, "spec_num_correct_drafts": rate * steps}))
        correct, steps = (sum(s.meta[k] for s in samples) for k in ("spec_num_correct_drafts", "spec_verify_ct"))
        lengths.append(correct / steps)
        found = standard_error(samples)
        assert found is not None
        errors.append(found)
    assert statistics.mean(errors) == pytest.approx(statistics.stdev(lengths), rel=0.1)
    assert standard_error(samples[:1]) is None


@pytest.mark.parametrize("count", [MIN_SET - 1, MIN_SET])
def test_few_prompts_are_warned_of(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_measure_shape", lambda *args: iter(()))
    options = {"speculative_algorithm": "EAGLE3"}
    with caplog.at_level(logging.WARNING):
        evaluate(options, {"one": [f"prompt {i}" for i in range(count)]}, TRIAL, tmp_path / "eval.json")
    assert [str(count) in record.getMessage() for record in caplog.records] == [True] * (count < MIN_SET)


def test_a_fingerprint_is_of_what_is_loaded(options: dict[str, Any], tmp_path: Path) -> None:
    head = Path(options["speculative_draft_model_path"])
    copy = tmp_path / "head"
    copy.mkdir()
    for file in head.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "README.md").write_text("a card")
    assert fingerprint(copy) == fingerprint(head) and fingerprint(None) is None
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert fingerprint(copy) != fingerprint(head)


def test_no_prompts(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--eval-prompts"):
        evaluate(options, {"one": []}, TRIAL, tmp_path / "eval.json")


REPORT: dict[str, Any] = {"steps": 3, "seconds": 1.0, "tokens": 90}


def said(folder: Path, used: dict[str, int] | None, **settings: Any) -> str:
    more = {} if used is None else {"used": used}
    (folder / "fit.json").write_text(json.dumps(REPORT | more))
    target: Any = None  # which only the cards of MTP layers speak of
    text = card(Run(folder, Settings(prompts=("p.jsonl",), **settings), {}), target, [])
    return text.partition("## Data")[2].partition("Sources")[0]


@pytest.mark.parametrize(
    "answers, greedy, default, expected",
    [
        (80, 9, 0.0, ": 80 answers, 9 of them (11%) at temperature 0, the others at 0.6 to 1."),
        (80, 0, 0.0, ": 80 answers at temperature 0.6 to 1."),
        (80, 0, 0.5, ": 80 answers at temperature 0.6 to 1, 50% of these by the model's own default sampling."),
    ],
)
def test_answers_are_counted(tmp_path: Path, answers: int, greedy: int, default: float, expected: str) -> None:
    (tmp_path / "data.json").write_text(json.dumps({"prompts": 84, "conversations": 5, "skipped": {"empty": 2}}))
    used = {"prompts": 20, "answers": answers, "greedy": greedy, "conversations": 5}
    text = said(tmp_path, used, answers=4, default_share=default)
    assert (
        f"answered by the target itself{expected} 20 prompts and 5 conversations were used. Left out: 2 empty." in text
    )


def test_of_another_run_s_data_it_says_its_own(tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    for folder, count in ((out, 7), (other, 9)):
        folder.mkdir()
        (folder / "data.json").write_text(json.dumps({"prompts": 9, "skipped": {"empty": count}}))
    assert "Left out: 7 empty." in said(out, None, data=str(other))
    (out / "data.json").unlink()  # it only ran its fit
    assert "Left out: 9 empty." in said(out, None, data=str(other))
