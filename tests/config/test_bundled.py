"""Heads that come with the package, the trees that heads' configs ask for, and `draftwing bench` that writes and checks
what a head says of itself; on small heads in a temporary folder. The real ones: tests/models/heads/test_bundled.py."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.learnable import ENGINE, VOCAB, write_target
from safetensors.torch import load_file, save_file

from draftwing import LLM, ConfigError
from draftwing.cli.main import main
from draftwing.config.drafters import find_drafter, shipped_head
from draftwing.config.options import Options
from draftwing.config.trees import TREE, TreeShape, carried_shape, carried_window, save_shape
from draftwing.engine.build import _for_engine
from draftwing.engine.devices import pick_device
from draftwing.models.loader import load_config, load_model
from draftwing.train.checkpoint import save_head
from draftwing.train.heads import new_eagle3_head
from draftwing.train.settings import Run, Settings

GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture
def heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """smollm2 has all three, as far as options can tell; EAGLE's has a token map."""
    for name in ("eagle3", "eagle", "mtp"):
        (tmp_path / "smollm2" / name).mkdir(parents=True)
        (tmp_path / "smollm2" / name / "config.json").write_text("{}")
    (tmp_path / "smollm2/eagle/token_map.json").write_text("[1, 2]")
    monkeypatch.setattr("draftwing.config.drafters.HEADS", tmp_path)
    return tmp_path / "smollm2"


def drafting(**given: Any) -> tuple[str | None, str | None, str | None]:
    options = Options.from_kwargs(**given).resolve()
    assert options.resolve() == options
    return options.speculative_algorithm, options.speculative_draft_model_path, options.speculative_token_map


@pytest.mark.parametrize("given", [{}, {"model": "smollm2"}, {"speculative_algorithm": None}, {"dtype": "float32"}])
def test_the_default_model_is_drafted_for_by_its_head(heads: Path, given: dict[str, Any]) -> None:
    assert drafting(**given) == ("EAGLE3", str(heads / "eagle3"), None)


@pytest.mark.parametrize(
    "given",
    [
        {"speculative_algorithm": "none"}, {"speculative_algorithm": "None"}, {"load_format": "dummy"},
        {"model": "org/name", "load_format": "dummy"},
    ],
)  # fmt: skip
def test_nobody_else_is_drafted_for(heads: Path, given: dict[str, Any]) -> None:
    assert drafting(**given) == ("none", None, None)


@pytest.mark.parametrize("model", ["org/name", "/cache/SmolLM2-135M-Instruct.Q4_1.gguf"])
def test_who_drafts_for_other_models_is_left_to_their_files(heads: Path, model: str) -> None:
    assert drafting(model=model) == (None, None, None)


def test_an_algorithm_alone_takes_the_head_that_comes_with_the_model(heads: Path) -> None:
    assert drafting(speculative_algorithm="nextn") == ("NEXTN", str(heads / "mtp"), None)
    dummy = drafting(speculative_algorithm="EAGLE3", load_format="dummy")
    assert dummy == ("EAGLE3", str(heads / "eagle3"), None)
    own_map = str(heads / "eagle/token_map.json")
    assert drafting(speculative_algorithm="EAGLE") == ("EAGLE", str(heads / "eagle"), own_map)
    given = drafting(speculative_algorithm="EAGLE", speculative_token_map="mine.pt")
    assert given == ("EAGLE", str(heads / "eagle"), "mine.pt")


def test_what_is_given_is_taken(heads: Path) -> None:
    assert drafting(speculative_algorithm="NGRAM") == ("NGRAM", None, None)
    for algorithm in ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE"):
        own = {"speculative_algorithm": algorithm, "speculative_draft_model_path": "mine"}
        assert drafting(**own) == (algorithm, "mine", None)
    assert drafting(model="x", speculative_algorithm="EAGLE") == ("EAGLE", None, None)
    with pytest.raises(ConfigError, match="STANDALONE needs speculative_draft_model_path"):
        drafting(speculative_algorithm="STANDALONE")
    with pytest.raises(ConfigError, match="needs a speculative_algorithm"):
        drafting(speculative_draft_model_path="mine")


def test_without_heads_nobody_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwing.config.drafters.HEADS", tmp_path)
    (tmp_path / "smollm2/eagle3").mkdir(parents=True)  # one that is being written has no config yet
    assert shipped_head("smollm2", find_drafter("EAGLE3")) is None and drafting() == ("none", None, None)
    with pytest.raises(ConfigError, match="EAGLE3 needs speculative_draft_model_path"):
        drafting(speculative_algorithm="EAGLE3")


def test_training_answers_without_a_head(heads: Path, tmp_path: Path) -> None:
    assert drafting(**Run(tmp_path, Settings(), {}).engine_options()) == ("none", None, None)
    asked = Run(tmp_path, Settings(), {"speculative_algorithm": "NGRAM"})
    assert drafting(**asked.engine_options()) == ("NGRAM", None, None)


# ---- the tree in a config --------------------------------------------------------------------------------------------


def config_with(folder: Path, own: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8} | ({} if own is None else {"draftwing": own})))
    return folder


@pytest.mark.parametrize("own", [None, {}, {"shapes": {}}, {"note": 1}, {"shapes": {"cuda": [5, 4, 16]}}])
def test_a_config_need_not_ask_for_a_tree(tmp_path: Path, own: Any) -> None:
    assert carried_shape(config_with(tmp_path, own), "cpu") is None
    assert carried_shape(tmp_path / "missing", "cpu") is None


@pytest.mark.parametrize(
    ("own", "rule"),
    [
        ("fast", "draftwing: expected an object, found 'fast'"), (None, "draftwing: expected an object, found None"),
        ({"shapes": [3, 1, 4]}, r"draftwing.shapes: expected an object, found \[3, 1, 4\]"),
        ({"shapes": {"gpu": [3, 1, 4]}}, "expected shapes for cpu or cuda, found 'gpu'"),
        ({"shapes": {"cuda": [3, 1]}}, r"shapes.cuda: expected \[steps, topk, draft tokens\] .* found \[3, 1\]"),
        ({"shapes": {"cpu": "3,1,4"}}, "found '3,1,4'"), ({"shapes": {"cpu": [3, 1.0, 4]}}, r"found \[3, 1.0, 4\]"),
        ({"shapes": {"cpu": [3, True, 4]}}, r"found \[3, True, 4\]"),
        ({"shapes": {"cpu": [0, 1, 1]}}, r"found \[0, 1, 1\]"),
        ({"shapes": {"cpu": [3, 1, 5]}}, "expected 4 to 4 draft tokens for 3 steps and topk 1, found 5"),
        ({"shapes": {"cpu": [2, 4, 22]}}, "expected 3 to 21 draft tokens for 2 steps and topk 4, found 22"),
    ],
)  # fmt: skip
def test_a_tree_that_cannot_be_is_refused(tmp_path: Path, own: Any, rule: str) -> None:
    config_with(tmp_path, {})
    (tmp_path / "config.json").write_text(json.dumps({"draftwing": own}))
    with pytest.raises(ConfigError, match=rule) as info:
        carried_shape(tmp_path, "cpu")
    assert str(tmp_path / "config.json") in str(info.value)


@pytest.mark.parametrize(("own", "found"), [(None, None), ({"shapes": {}}, None), ({"window": 2}, 2)])
def test_a_config_may_say_how_far_back_a_head_sees(tmp_path: Path, own: Any, found: int | None) -> None:
    assert carried_window(config_with(tmp_path, own)) == found
    assert carried_window(tmp_path / "missing") is None


@pytest.mark.parametrize("window", [1, True, 4.0, "8"])
def test_a_window_that_cannot_be_is_refused(tmp_path: Path, window: Any) -> None:
    with pytest.raises(ConfigError, match=r"draftwing.window: expected tokens, 2 or more, found"):
        carried_window(config_with(tmp_path, {"window": window}))


def test_a_tree_is_written_beside_what_is_there(tmp_path: Path) -> None:
    config_with(tmp_path, {"note": 1, "shapes": {"cuda": [5, 4, 16]}})
    save_shape(tmp_path, "cpu", TreeShape(3, 1, 4))
    expected = {"note": 1, "shapes": {"cuda": [5, 4, 16], "cpu": [3, 1, 4]}}
    assert json.loads((tmp_path / "config.json").read_text()) == {"hidden_size": 8, "draftwing": expected}
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
    assert carried_shape(tmp_path, "cpu") == TreeShape(3, 1, 4)
    assert carried_shape(tmp_path, "cuda") == TreeShape(5, 4, 16)
    config_with(tmp_path, [])
    with pytest.raises(ConfigError, match="expected an object"):
        save_shape(tmp_path, "cpu", TreeShape(3, 1, 4))
    config_with(tmp_path, {})
    with pytest.raises(ConfigError, match="the tree to save"):
        save_shape(tmp_path, "cpu", TreeShape(0, 1, 1))
    with pytest.raises(ConfigError, match="none for xpu"):
        save_shape(tmp_path, "xpu", TreeShape(3, 1, 4))
    assert carried_shape(tmp_path, "cpu") is None


# ---- in the engine ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny, a target, and heads/tiny/eagle3, an untrained head that asks for a tree on this device."""
    folder = tmp_path_factory.mktemp("models")
    target = load_model(write_target(folder / "tiny"), torch.float32, "cpu")
    shapes = {"draftwing": {"shapes": {"cpu": [2, 2, 5], "cuda": [2, 2, 5]}}}
    save_head(new_eagle3_head(target, torch.arange(VOCAB)), folder / "heads/tiny/eagle3", torch.float32, extra=shapes)
    return folder


@pytest.fixture
def shipped(models: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As if the head came with the package, for the alias tiny."""
    monkeypatch.chdir(models)
    monkeypatch.setattr("draftwing.config.drafters.HEADS", models / "heads")
    monkeypatch.setattr("draftwing.config.drafters.MODELS", ("tiny",))
    return models / "heads/tiny/eagle3"


@pytest.mark.slow
def test_the_default_head_drafts_in_its_own_tree(shipped: Path, caplog: pytest.LogCaptureFixture) -> None:
    answers = {}
    with caplog.at_level(logging.INFO, "draftwing"):
        for asked in (None, "none"):
            with LLM("tiny", **ENGINE, speculative_algorithm=asked) as llm:
                assert llm.engine.info.shape.tree == ((2, 2, 5) if asked is None else (0, 1, 1))
                answers[asked] = llm.generate([[7, 130, 4], [9, 8]], GREEDY)
    assert [a.token_ids for a in answers[None]] == [a.token_ids for a in answers["none"]]
    assert answers[None][0].meta_info["spec_verify_ct"] > 0
    lines = [record.getMessage() for record in caplog.records if "turns it off" in record.getMessage()]
    assert lines == [
        "speculative decoding: EAGLE-3 (bundled head), at most 2 steps, topk 2, 5 draft tokens; "
        "--speculative-algorithm none turns it off"
    ]


def test_a_head_with_masks_drafts_in_the_tree_of_one_pass(shipped: Path, tmp_path: Path) -> None:
    """Which its file says, and not its config, where that asks for no tree."""
    path, trees = Path("tiny"), list[tuple[int | None, ...]]()
    for name, masks in (("plain", {}), ("masks", {"mask_hidden": torch.ones(8)})):
        folder = shutil.copytree(shipped, tmp_path / name)
        config = json.loads((folder / "config.json").read_text()) | {"mask_token_id": 5}
        del config["draftwing"]
        (folder / "config.json").write_text(json.dumps(config))
        save_file(load_file(folder / "model.safetensors") | masks, folder / "model.safetensors")
        given = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(folder)}
        options = Options.from_kwargs(model="tiny", **given).resolve()
        options, _ = _for_engine(options, path, load_config(path), pick_device("cpu"), None)
        trees.append(tuple(getattr(options, name) for name in TREE))
    assert trees[1] == (7, 4, 16) != trees[0]


@pytest.mark.slow
def test_a_sweep_saves_the_best_tree(shipped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (shipped / "config.json").read_text()
    argv = ["bench", "--sweep", "--save-shape", "--model", "tiny", "--device", "cpu", "--max-total-tokens", "2048",
            "--concurrency", "1,2", "--steps", "1,3", "--topk", "1", "--draft-tokens", "2,4", "--num-prompts", "2",
            "--max-tokens", "4", "--json"]  # fmt: skip
    try:
        assert main(argv) == 0
        lines = capsys.readouterr().out.splitlines()
        *records, _, _ = [json.loads(line) for line in lines if line.startswith("{")]
        best, saved = lines[len(records) + 2], lines[-1]
        assert [r["speculative_algorithm"] for r in records] == ["none"] * 2 + ["EAGLE3"] * 4
        rates = {(r["steps"], r["topk"], r["num_draft_tokens"]): 1.0 for r in records[2:]}
        for r in records[2:]:
            rates[r["steps"], r["topk"], r["num_draft_tokens"]] *= r["throughput"]
        asked = carried_shape(shipped, "cpu")
        assert rates.keys() == {(1, 1, 2), (3, 1, 4)} and asked.tree == max(rates, key=rates.__getitem__)
        assert saved == f"{shipped / 'config.json'} asks for {list(asked.tree)} on cpu from now on"
        # what comes with the model need not be typed
        assert best.startswith("best for 1 request at once: --speculative-algorithm ") and str(shipped) not in best
    finally:
        (shipped / "config.json").write_text(before)


# ---- the card --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_head_is_held_to_its_report(
    shipped: Path, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from draftwing.train.evaluate import Trial, evaluate

    prompts, options = ["abc", "de", "fgh"], {"model": "tiny", "device": "cpu", "max_total_tokens": 2048}
    head = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(shipped)}
    trial = Trial([TreeShape(3, 1, 4)], (0.0, 1.0), 8, 2)
    report = shipped.parent / "eval.json"
    evaluate(options | head, {"asked": prompts[:2]}, trial, report)
    file = tmp_path / "asked.jsonl"
    file.write_text("".join(json.dumps(text) + "\n" for text in prompts))  # the first two of them were measured
    argv = ["bench", "--check-card", str(shipped), "--prompts", str(file), "--model", "tiny", "--device", "cpu",
            "--max-total-tokens", "2048"]  # fmt: skip
    assert main(argv) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("within 3%")
    content = json.loads(report.read_text())
    content["records"][0]["accept_length"] *= 1.05
    report.write_text(json.dumps(content))
    assert main(argv) == 2 and "more than 3% away" in capsys.readouterr().err
    file.write_text('"other"\n"prompts"\n')
    assert main(argv) == 2 and "holds none of the sets asked" in capsys.readouterr().err
    assert main(["bench", "--check-card", str(shipped), "--model", "tiny"]) == 2
    assert "needs --prompts" in capsys.readouterr().err
    report.write_text("{}")
    assert main(argv) == 2 and "expected a report" in capsys.readouterr().err
    assert main([*argv, "--url", "http://127.0.0.1:1"]) == 2
    assert "--check-card starts engines of its own; it does not go with --url" in capsys.readouterr().err
    report.unlink()
    assert main(argv) == 2 and "has no eval.json" in capsys.readouterr().err
