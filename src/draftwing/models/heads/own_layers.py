"""Prediction layers that come with a model, in its checkpoint or in a file next to it: they draft unless something else
is asked for."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from draftwing.config.drafters import NO_DRAFTER, head_drafter
from draftwing.config.options import Options
from draftwing.errors import CheckpointError
from draftwing.gguf_file import GGUFFile, open_gguf
from draftwing.models import gguf
from draftwing.models.config import ModelConfig
from draftwing.models.fields import Fields
from draftwing.models.folder import folder_tensors, read_json
from draftwing.models.heads.mtp import QWENS
from draftwing.models.language_model import language_model
from draftwing.models.weight_map import MTP_PREFIX, MTP_PREFIXES, canonical, nextn_layer

logger = logging.getLogger(__name__)

KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # of a config.json
SIDE_FILE = "mtp-"  # what the name of a GGUF file with nothing but such layers begins with


def with_own_layers(options: Options, path: Path, config: ModelConfig) -> Options:
    """Returns resolved options whose drafter is known: where `Options.resolve` leaves it to the files of the model,
    NEXTN if they hold prediction layers that are served, else nobody. path: of the model. Raises ConfigError, and
    CheckpointError for files that cannot be read."""
    if options.speculative_algorithm is not None:
        return options
    own = _in_file(path, config) if path.suffix == ".gguf" else _in_folder(path, config)
    side = _side_file(path, config) if path.suffix == ".gguf" and not own else None
    drafter = head_drafter("mtp") if own or side else NO_DRAFTER
    draft = None if side is None else str(side)
    return replace(options, speculative_algorithm=drafter.name, speculative_draft_model_path=draft).resolve()


def predicts(name: str, config: ModelConfig) -> bool:
    """Returns whether a canonical name is of a prediction layer that is served with such a model."""
    prefixes = MTP_PREFIXES if config.architecture in QWENS else (MTP_PREFIX,)
    return name.startswith(prefixes) or nextn_layer(name, config) is not None


def named_layers(path: Path) -> tuple[str, int] | None:
    """Returns the key by which a folder's config.json says that there are prediction layers, and how many."""
    raw = language_model(read_json(path / "config.json"))
    return next(((key, raw[key]) for key in KEYS if raw.get(key)), None)


def _in_folder(path: Path, config: ModelConfig) -> bool:
    named = named_layers(path)
    if named is None and config.architecture not in QWENS:  # of which Qwen3-Next says nothing in its config
        return False
    found = any(predicts(canonical(name), config) for name, _ in folder_tensors(path))
    if named is not None and not found:
        _warn(path / "config.json", *named)
    return found


def _in_file(path: Path, config: ModelConfig) -> bool:
    file = open_gguf(path)
    fields, found = _fields(file), config.architecture in QWENS and _holds_layer(file)
    predicting = fields.get("nextn_predict_layers")
    if predicting and not found:
        _warn(path, f"{fields.prefix}nextn_predict_layers", predicting)
    return found


def _warn(file: Path, key: str, count: object) -> None:
    logger.warning("%s: %s is %s, but there are no such layers that are served; nothing is drafted", file, key, count)


def _fields(file: GGUFFile) -> Fields:
    return Fields(file.metadata, str(file.path), f"{file.metadata.get('general.architecture')}.")


def _holds_layer(file: GGUFFile) -> bool:
    return f"blk.{gguf.own_layers(_fields(file))}.nextn.eh_proj.weight" in file.tensors


def _side_file(path: Path, config: ModelConfig) -> Path | None:
    """Returns the `mtp-*.gguf` for a GGUF file in the same folder: of the same name, but for what follows the last
    hyphen (how values are stored), and of the same sizes. Of several the one with the longest common name."""
    if config.architecture not in QWENS:
        return None
    found = [file for file in sorted(path.parent.glob(f"{SIDE_FILE}*.gguf")) if _is_of(file, path)]
    return max(found, key=lambda file: len(_name(file)), default=None)


def _name(side: Path) -> str:
    """Returns the name of the model in a side file's, without how values are stored."""
    whole = side.stem.removeprefix(SIDE_FILE)
    return whole.rpartition("-")[0] or whole


def _is_of(side: Path, path: Path) -> bool:
    """Returns whether the layers in a side file are those of the model at `path`, by names and sizes."""
    if not path.stem.startswith(_name(side)):
        return False
    try:
        ours, file = _fields(open_gguf(path)), open_gguf(side)
        theirs = _fields(file)
        alike = (gguf.own_layers(ours), ours.prefix) == (gguf.own_layers(theirs), theirs.prefix) and _holds_layer(file)
    except CheckpointError as error:
        logger.warning("%s does not draft: %s", side, error)
        return False
    return alike and ours.get("embedding_length") == theirs.get("embedding_length")
