"""Prediction layers that come with a model, in its checkpoint or in a file next to it: they draft unless something else
is asked for."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from draftwing.config.drafters import NO_DRAFTER, OWN_LAYERS, head_drafter
from draftwing.config.options import Options
from draftwing.errors import CheckpointError
from draftwing.gguf_file import GGUFFile, open_gguf
from draftwing.models import gguf
from draftwing.models.config import ModelConfig
from draftwing.models.fields import Fields
from draftwing.models.folder import folder_tensors, read_json
from draftwing.models.heads.mtp import QWENS, check_trainable
from draftwing.models.hub import resolve_model
from draftwing.models.language_model import language_model
from draftwing.models.loader import load_config
from draftwing.models.weight_map import MTP_PREFIX, MTP_PREFIXES, canonical, nextn_layer

logger = logging.getLogger(__name__)

KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # of a config.json
SIDE_FILE = "mtp-"  # what the name of a GGUF file with nothing but such layers begins with


def with_own_layers(options: Options, path: Path, config: ModelConfig) -> Options:
    """Returns resolved options whose drafter is known: where `Options.resolve` leaves it to the files of the model,
    NEXTN if they hold prediction layers that are served, else nobody. Where such layers are asked for and lie in a file
    next to the model's, that is the draft model. path: of the model. Raises ConfigError, and CheckpointError for files
    that cannot be read."""
    asked = options.speculative_algorithm is not None
    left = OWN_LAYERS in options.drafter_spec.heads and options.speculative_draft_model_path is None
    if asked and not (left and path.suffix == ".gguf"):
        return options
    own, side = _in_files(path, config)
    if not asked:
        drafter = head_drafter(OWN_LAYERS) if own or side else NO_DRAFTER
        options = replace(options, speculative_algorithm=drafter.name)
    return replace(options, speculative_draft_model_path=None if side is None else str(side)).resolve()


def _in_files(path: Path, config: ModelConfig) -> tuple[bool, Path | None]:
    """Returns whether a model's files hold prediction layers, and else the file next to them that does, if any."""
    if path.suffix != ".gguf":
        return _in_folder(path, config), None
    if _in_file(path, config):
        return True, None
    side = _side_file(path, config)
    named = _fields(open_gguf(path))
    if side is None and (predicting := named.get("nextn_predict_layers")):
        _warn(path, f"{named.prefix}nextn_predict_layers", predicting)
    return False, side


def layers_to_learn(options: Options) -> str | None:
    """Returns the folder or file that holds the prediction layers of the model that options name, as a head to train
    on from; None where it has none. Raises CheckpointError, and ConfigError for layers that cannot be trained."""
    path = resolve_model(options.model, options.revision)
    config = load_config(path)
    own, side = _in_files(path, config)
    if not own and side is None:
        return None
    named = named_layers(path) if path.is_dir() else None
    check_trainable(config, 1 if named is None else named[1])
    return str(path if own else side)


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
    return config.architecture in QWENS and _holds_layer(open_gguf(path))


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
