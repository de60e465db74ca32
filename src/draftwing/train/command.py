"""`draftwing train`: its arguments, and the stages that it runs."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwing.config.fields import add_fields
from draftwing.config.option_fields import LOG_LEVELS, REQUESTS, SERVER
from draftwing.config.sources import add_arguments
from draftwing.errors import ConfigError
from draftwing.train.settings import Run, Settings, open_run

if TYPE_CHECKING:
    from draftwing.train.stages import Stages

STAGES = ("generate", "capture", "fit", "eval")


def add_train(commands: Any) -> None:
    """Adds the parser to argparse's `commands`."""
    train = commands.add_parser(
        "train",
        usage="draftwing train [generate|capture|fit|eval] [MODEL] --prompts FILES... --out DIR [options]",
        help="train a draft for a model",
        description="Trains a draft head for a model: the model answers the prompts, its features are captured, the "
        "head is trained on them and measured by the engine. Without a stage all run, each going on where a run of "
        "the same --out was interrupted.",
        allow_abbrev=False,
    )
    train.add_argument("stage", nargs="?", metavar="STAGE", help=f"only this one: {', '.join(STAGES)}")
    train.add_argument("--out", required=True, metavar="DIR", help="folder of the run; the head is in DIR/head")
    add_fields(train, Settings, "train: {}")
    uncommon = [spec.name for spec in dataclasses.fields(Settings) if not spec.metadata["common"]]
    add_arguments(train, hidden=(SERVER, REQUESTS), uncommon=uncommon)


def run_train(arguments: dict[str, Any]) -> None:
    """Runs the command. Raises ConfigError and CheckpointError."""
    stage, out = _stage(arguments), Path(arguments.pop("out"))
    names = {spec.name for spec in dataclasses.fields(Settings)}
    given = {name: arguments.pop(name) for name in names & arguments.keys()}
    first = os.environ.get("RANK", "0") == "0"  # of the processes of a torchrun
    _log(arguments.pop("log_level", "info") if first else "warning")
    if not first:
        os.environ["TQDM_DISABLE"] = "1"
    if stage == "generate" and "LOCAL_RANK" in os.environ:
        _one_gpu(int(os.environ["LOCAL_RANK"]))
    run = open_run(out, given, arguments)
    stages = _stages(run)
    stages.check()
    if first:
        run.save()
    work = {"generate": stages.generate, "capture": stages.capture, "fit": stages.fit, "eval": stages.evaluate}
    for name in STAGES if stage is None else (stage,):
        work[name]()


def _stages(run: Run) -> Stages:
    if run.settings.traffic is not None:
        from draftwing.train.traffic_stages import TrafficStages  # late: it imports torch

        return TrafficStages(run)
    from draftwing.train.stages import Stages

    return Stages(run)


def _stage(arguments: dict[str, Any]) -> str | None:
    """Takes the stage out of the arguments. A model may stand in its place, as it does after another command."""
    word = arguments.pop("stage")
    if word is None or word in STAGES:
        return word
    if "model" in arguments:
        raise ConfigError(f"the stage must be one of {', '.join(STAGES)}; found {word!r}")
    if near := difflib.get_close_matches(word, STAGES, n=1):
        raise ConfigError(f"{word!r} is neither a stage nor a model; did you mean {near[0]}?")
    arguments["model"] = word
    return None


def _one_gpu(number: int) -> None:
    """Leaves this process one GPU of those it may use, as an engine has one; before torch looks for them."""
    allowed = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    os.environ["CUDA_VISIBLE_DEVICES"] = allowed[number % len(allowed)] if allowed else str(number)


def _log(level: str) -> None:
    """Sets log levels: the engine's own lines, of every few steps, would hide those of training."""
    if level not in LOG_LEVELS:
        raise ConfigError(f"--log-level: expected one of {', '.join(LOG_LEVELS)}, found {level!r}")
    logging.getLogger("draftwing.train").setLevel(level.upper())
    logging.getLogger("draftwing").setLevel("WARNING" if level == "info" else level.upper())
