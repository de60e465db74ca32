"""What a run of `draftwing train` was asked for, as its folder remembers it.

No torch here: see `train.settings`.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwing.config.drafters import NO_DRAFTER
from draftwing.config.fields import flag
from draftwing.config.options import Options
from draftwing.errors import ConfigError
from draftwing.files import load_json, write_json
from draftwing.learn.history import HeadHistory
from draftwing.train.settings import DATA, FIELDS, GENERATE, Settings

# What a run keeps for good: of a head that is trained, what may change is the saved state's matter.
_FIXED = (
    "seed", "regenerate", "max_length", "max_tokens", "answers", "greedy_share", "temperatures", "algorithm", "data",
    "held_out", "init_head", "traffic", "general_share",
)  # fmt: skip
TRAFFIC_FILE = "traffic.json"  # of a run from traffic: up to when, and which head was to be served when it began
# Engine options that say which model it is; the others may differ from run to run.
MODEL_OPTIONS = ("model", "revision", "tokenizer_path", "chat_template")
# What is taken with traffic where nothing is asked for: little text, gone over soon and often from a head that is
# good already, chains as long as those that are served, and short general answers: the amount of text is bounded.
_OF_TRAFFIC: dict[str, Any] = {
    "batch_tokens": 2048, "epochs": 4.0, "optimizer": "muon", "warmup": 0.1, "save_every": 20, "eval_every": 100,
    "max_tokens": 160,
}  # fmt: skip
_OF_CHAINS: dict[str, Any] = {"ttt_steps": 4}


@dataclass(frozen=True)
class Run:
    """Settings and engine options of a run, and its folder."""

    out: Path
    settings: Settings
    options: Mapping[str, Any]

    @property
    def data(self) -> Path:
        """Returns the folder of answers and features."""
        return Path(self.settings.data) if self.settings.data is not None else self.out

    def engine_options(self, **more: Any) -> dict[str, Any]:
        """Returns options for `Options.from_kwargs`, without a drafter unless one is asked for, whatever comes with the
        model, and with the weights that features are captured with."""
        defaults = {
            "random_seed": self.settings.seed, "speculative_algorithm": NO_DRAFTER.name, "quantization": "none"
        }  # fmt: skip
        return {**defaults, **self.options, **more}

    def command(self) -> str:
        """Returns what to type to make the same."""
        words = ["draftwing", "train", "--out", str(self.out)]
        changed = {name: value for name, value in vars(self.settings).items() if value != FIELDS[name]["default"]}
        for name, value in {**self.options, **changed}.items():
            words.append(flag(name))
            if value is not True:
                words += map(str, value) if isinstance(value, tuple) else [str(value)]
        return shlex.join(words)

    def save(self) -> None:
        """Writes the run to its folder."""
        content = {"settings": dataclasses.asdict(self.settings), "options": dict(self.options)}
        write_json(self.out / "train.json", content)


def open_run(out: Path, given: Mapping[str, Any], options: Mapping[str, Any]) -> Run:
    """Returns a new run, or the one in `out` going on: what is not given is as it was.

    given: fields of `Settings`; options: of the engine. With another run's data (`data`), what made that data is taken
    from there. Raises ConfigError for values that cannot work, and for those that would make the run another one.
    """
    given = _tuples(given)
    before = _load(out)
    source = given.get("data", before[0].get("data") if before else None)
    made = _load(Path(source)) if source is not None else None
    if source is not None and made is None:
        raise ConfigError(f"--data: {source} holds no run of `draftwing train`")
    settings: dict[str, Any] = {}
    asked: dict[str, Any] = {}
    for folder, found in ((source, made), (out, before)):
        if folder is None or found is None:
            continue
        if folder == out and given and not _begun(out):
            continue  # a new try
        kept, chosen = found
        if folder != out:  # only what its data is made by
            kept = {name: value for name, value in kept.items() if FIELDS[name]["group"] in (DATA, GENERATE)}
            chosen = {name: value for name, value in chosen.items() if name in MODEL_OPTIONS}
        _check_same(Path(folder), kept, chosen, given, options)
        settings, asked = settings | kept, asked | chosen
    settings, asked = {**settings, **given}, {**asked, **options}
    if settings.get("traffic") is not None:
        own = {} if Settings(**settings).training.block else _OF_CHAINS
        settings = _OF_TRAFFIC | own | settings
        if not settings.get("init_head"):
            settings["init_head"] = (_served_head(Settings(**settings), asked),)
    run = Run(out, Settings(**settings), asked)
    run.settings.check()
    Options.from_kwargs(**run.engine_options()).resolve()
    return run


def _served_head(settings: Settings, options: Mapping[str, Any]) -> str:
    """Returns the head that is served with a folder of traffic: the one that was learnt from it, else that of the
    engine's options or the model's own."""
    assert settings.traffic is not None
    history = HeadHistory(Path(settings.traffic).expanduser() / "heads")
    current = history.current()
    if current is not None:
        return str(history.folder / str(current))
    asked = {"speculative_algorithm": settings.drafter.name, **options}
    chosen = Options.from_kwargs(**asked).resolve()
    found = chosen.speculative_draft_model_path
    if found is None and "mtp" in settings.drafter.heads:
        from draftwing.models.heads.own_layers import layers_to_learn  # late: it imports torch

        found = layers_to_learn(chosen)
    if found is None:
        raise ConfigError("--from: expected a head to start from: name one as --init-head, or with --algorithm MTP a "
                          "model with prediction layers")  # fmt: skip
    return found


def _begun(out: Path) -> bool:
    """Tells whether there is something in the folder that settings have shaped. Of a run from traffic, whose answers
    lie elsewhere, that is which traffic it is."""
    return any(next(out.glob(name), None) for name in (TRAFFIC_FILE, "responses*", "features-*", "fit", "head"))


def _check_same(
    folder: Path,
    kept: Mapping[str, Any],
    chosen: Mapping[str, Any],
    given: Mapping[str, Any],
    options: Mapping[str, Any],
) -> None:
    """Raises ConfigError where a run in `folder`, made with settings `kept` and options `chosen`, is asked to be
    another one."""
    for name in _FIXED:
        if name in kept and given.get(name, kept[name]) != kept[name]:
            raise _changed(folder, name, kept[name], given[name])
    for name in MODEL_OPTIONS:
        before = chosen.get(name, getattr(Options, name))
        if options.get(name, before) != before:
            raise _changed(folder, name, before, options[name])


def _changed(folder: Path, name: str, found: Any, asked: Any) -> ConfigError:
    return ConfigError(
        f"{folder} was made with {flag(name)} {_shown(found)}, not {_shown(asked)}: leave it out to go "
        "on, or name another --out"
    )


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _load(folder: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    path = folder / "train.json"
    if not path.exists():
        return None
    known = {spec.name for spec in dataclasses.fields(Settings)}
    try:
        content = load_json(path)
        settings = {name: value for name, value in content["settings"].items() if name in known}
        return _tuples(settings), dict(content["options"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): name another --out") from None


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as they are typed, or read from JSON: where several values are allowed there are lists."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
