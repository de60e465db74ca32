"""What `draftwing train` is asked for: what cannot work is refused before anything is begun, and what a run keeps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from draftwing.errors import CheckpointError, ConfigError, RequestError
from draftwing.learn.history import HeadHistory
from draftwing.models.adapters.stored import stored_digest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.train.generate import MIN_ANSWER
from draftwing.train.settings import Settings, open_run


@pytest.mark.parametrize(
    "given, message",
    [
        ({"algorithm": "DSPARK", "block_steps": 4}, "--shapes: expected trees of at most 4 steps"),
        ({"algorithm": "DFLASH", "shapes": ("3,1,4", "8,1,9")}, "at most 7 steps.*found 3,1,4 8,1,9"),
        ({"clip": 0.0}, "--clip: expected a norm above 0, found 0"),
        ({"clip": -1.0}, "clip must be at least 0; found -1"),
        ({"steps": 11, "minutes": 1.0}, "--steps and --minutes: expected one of them, found 11 and 1.0"),
        ({"minutes": float("inf")}, "minutes must be a finite number"),
        ({"held_out": 1.0}, "--held-out: expected less than 1, found 1"),
        ({"temperatures": (-0.5, 1.0)}, "temperatures must be at least 0; found -0.5"),
        ({"temperatures": (0.5, 101.0)}, "temperatures must be at most 100; found 101"),
        ({"temperatures": (float("nan"),)}, "temperatures must be a finite number"),
        ({"eval_temperatures": (0.0, -1.0)}, "eval_temperatures must be at least 0; found -1"),
        ({"eval_temperatures": (101.0,)}, "eval_temperatures must be at most 100; found 101"),
        ({"eval_temperatures": (float("nan"),)}, "eval_temperatures must be a finite number"),
        ({"max_tokens": MIN_ANSWER - 1}, "max_tokens must be at least 16; found 15"),
        ({"seed": 2**32}, "seed must be at most 4294967295"),
        ({"algorithm": "MTP", "ffn_size": 64}, "--ffn-size: for --algorithm EAGLE and EAGLE3 and .*, found MTP"),
        ({"init_head": ("h",), "ffn_size": 64}, "--ffn-size: for fresh heads"),
        ({"head_rank": 8, "init_head": ("h",)}, "--head-rank: expected --adapter"),
        ({"head_rank": 8, "adapter": "a=b"}, "--head-rank: expected .* and one --init-head"),
        ({"head_rank": 8, "adapter": "a=b", "init_head": ("h", "i")}, "--head-rank: expected .* and one --init-head"),
        ({"head_rank": 8, "adapter": "a=b", "init_head": ("h",), "epochs": 0.0}, "--head-rank: expected some training"),
        (
            {"adapter": "a=b", "traffic": "t"},
            "--adapter with --from trains the adapter's own head: expected --head-rank",
        ),
        ({"init_factors": "f"}, "--init-factors: expected --head-rank"),
        ({"head_rank": 257}, "head_rank must be at most 256"),
        ({"algorithm": "DFLASH", "head_rank": 8}, "--head-rank: for --algorithm EAGLE and EAGLE3 and MTP, found"),
        ({"markov_rank": 8}, "--markov-rank: for --algorithm DFLASH and DSPARK and DFLASH2, found EAGLE3"),
        ({"algorithm": "DFLASH", "markov_rank": 8}, "--markov-rank: for --algorithm DSPARK and DFLASH2, found DFLASH"),
        ({"algorithm": "DFLASH2", "markov_head": "rnn"}, "--markov-head: for --algorithm DSPARK, found DFLASH2"),
        ({"algorithm": "DFLASH", "ttt_steps": 3}, "--ttt-steps: for --algorithm"),
        ({"algorithm": "DSPARK", "init_head": ("h",), "block_steps": 3}, "--block-steps: for fresh heads"),
        ({"algorithm": "DFLASH", "init_head": ("h",), "causal_block": True}, "--causal-block: for fresh heads"),
        ({"causal_block": True}, "--causal-block: for --algorithm DFLASH and DSPARK and DFLASH2, found EAGLE3"),
        ({"shapes": ("3,1",)}, "--shapes: expected steps,topk,draft tokens such as 5,4,16; found '3,1'"),
        ({"shapes": ("3,2,99",)}, "--shapes: expected 4 to 11 draft tokens for 3 steps and topk 2, found 99"),
        ({"greedy_share": 1.5}, "greedy_share must be at most 1; found 1.5"),
        ({"temperatures": (1.0, 0.5)}, "--temperatures: expected the lowest and the highest"),
        ({"regenerate": True}, "--regenerate needs --conversations"),
    ],
)
def test_what_would_fail_hours_later_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Settings(**given).check()


@pytest.mark.parametrize(
    "given",
    [
        {"algorithm": "DSPARK", "block_steps": 4, "shapes": ("4,3,9",)},
        {"algorithm": "DSPARK", "init_head": ("h",), "shapes": ("9,1,10",)},  # whose block may be as deep
        {"clip": 1e-9, "temperatures": (0.0,), "max_tokens": MIN_ANSWER, "seed": 2**32 - 1, "ffn_size": 64},
    ],
)
def test_what_works_is_not(given: dict[str, Any]) -> None:
    Settings(**given).check()


def test_the_hottest_is_what_sampling_allows() -> None:
    assert SamplingParams(temperature=100).temperature == 100
    with pytest.raises(RequestError, match="from 0 to 100"):
        SamplingParams(temperature=100.1)


@pytest.mark.parametrize("name, other", [("held_out", 0.5), ("seed", 3)])
def test_what_is_held_out_stays_so(tmp_path: Path, name: str, other: float) -> None:
    """With another share, or other ones, it would be measured on what it was trained on."""
    before: dict[str, Any] = {"prompts": ["p.jsonl"], "held_out": 0.1}
    open_run(tmp_path, before, {}).save()
    assert getattr(open_run(tmp_path, {name: other}, {}).settings, name) == other, "nothing was begun"
    (tmp_path / "responses.jsonl").touch()
    flag = name.replace("_", "-")
    with pytest.raises(ConfigError, match=f"{tmp_path} was made with --{flag} .*, not {other}: leave it out to go on"):
        open_run(tmp_path, {name: other}, {})
    assert open_run(tmp_path, {"held_out": 0.1, "eval_count": 5}, {}).settings.held_out == 0.1


@pytest.mark.parametrize(("name", "other"), [("default_share", 0.5), ("greedy_share", 0.25), ("held_out", 0.3)])
def test_a_run_of_before_there_was_an_option_was_made_with_its_default(tmp_path: Path, name: str, other: float) -> None:
    open_run(tmp_path, {"prompts": ["p.jsonl"]}, {}).save()
    (tmp_path / "responses.jsonl").touch()
    kept = json.loads((tmp_path / "train.json").read_text())
    del kept["settings"][name]
    (tmp_path / "train.json").write_text(json.dumps(kept))
    open_run(tmp_path, {name: getattr(Settings(), name)}, {})
    with pytest.raises(ConfigError, match=f"was made with --{name.replace('_', '-')} "):
        open_run(tmp_path, {name: other}, {})


def test_an_adapters_run_begins_with_the_factors_that_are_served(tmp_path: Path) -> None:
    """Of its own and of no other, and what it has begun with stays when another one is served."""
    adapter, made, history = tmp_path / "adapter", tmp_path / "made", HeadHistory(tmp_path / "t" / "heads")
    for folder in (adapter, made):
        folder.mkdir()
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (folder / name).write_text("{}")
    digest = stored_digest(adapter)
    history.use(history.add(made, {"adapter": "another"}), "another")
    asked = {"traffic": str(tmp_path / "t"), "adapter": f"own={adapter}", "head_rank": 8, "init_head": ("h",)}

    def begins(name: str, **more: Any) -> str | None:
        return open_run(tmp_path / name, {**asked, **more}, {}).settings.init_factors

    assert begins("new") == "none"
    assert open_run(tmp_path / "few", asked, {}).settings.batch_tokens == 768
    shutil.copytree(made, adapter / "draft_head")
    assert begins("own files") == str(adapter / "draft_head")
    run = open_run(tmp_path / "out", asked, {})
    run.save()
    (tmp_path / "out" / "traffic.json").write_text("{}")
    history.use(history.add(made, {"adapter": digest}), digest)
    assert begins("learnt") == str(history.folder / "2") and begins("asked", init_factors="none") == "none"
    assert begins("out") == str(adapter / "draft_head") == open_run(tmp_path / "out", {}, {}).settings.init_factors
    with pytest.raises(ConfigError, match="was made with --init-factors"):
        begins("out", init_factors="none")
    without = {name: value for name, value in asked.items() if name not in ("adapter", "head_rank")}
    assert open_run(tmp_path / "model", without, {}).settings.init_factors is None


@pytest.mark.parametrize("changed", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_that_changed_is_another_one(tmp_path: Path, changed: str) -> None:
    """Answers, features and head would be of two adapters; also where another run's data are used."""
    adapter, out = tmp_path / "adapter", tmp_path / "out"
    adapter.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (adapter / name).write_text("{}")
    asked = {"prompts": ["p.jsonl"], "adapter": f"own={adapter}"}
    out.mkdir()
    open_run(out, asked, {}).save()
    (out / "responses.jsonl").touch()
    assert open_run(out, {}, {}).settings.adapter == asked["adapter"]
    (adapter / changed).write_text('{"r": 8}')
    for folder, given in ((out, {}), (tmp_path / "other", {"data": str(out)})):
        with pytest.raises(ConfigError, match=f"{out} was made with another adapter than {adapter} holds now"):
            open_run(folder, given, {})
    (out / "responses.jsonl").unlink()
    open_run(out, {}, {})  # nothing was begun
    (adapter / changed).unlink()
    with pytest.raises(CheckpointError, match=f"{changed} is missing"):
        open_run(out, {}, {})


def test_a_run_from_traffic_that_was_stopped_before_its_first_answer_goes_on(tmp_path: Path) -> None:
    asked = {"traffic": str(tmp_path / "traffic"), "algorithm": "DSPARK"}
    open_run(tmp_path, {**asked, "init_head": ["h"]}, {}).save()
    (tmp_path / "traffic.json").write_text("{}")
    assert open_run(tmp_path, asked, {}).settings.init_head == ("h",)  # as a server asks that trains in idle time
