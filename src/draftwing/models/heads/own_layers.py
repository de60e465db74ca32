"""Prediction layers that come with a model, in its checkpoint or in a file next to it: they draft unless something else
is asked for."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from draftwing.config.drafters import NO_DRAFTER, OWN_LAYERS, head_drafter
from draftwing.config.options import Options
from draftwing.errors import CheckpointError, listed
from draftwing.gguf_file import GGUFFile, open_gguf
from draftwing.layers.latent import LatentAttentionConfig
from draftwing.models.apart import each_expert, without_latents
from draftwing.models.config import ModelConfig
from draftwing.models.decoder import DecoderModel
from draftwing.models.dummy import mtp_weights
from draftwing.models.families import in_gguf, language_model
from draftwing.models.fields import MAX_LAYERS, Fields
from draftwing.models.folder import folder_tensors
from draftwing.models.gguf_tensors import own_layers, tensors
from draftwing.models.heads.config import same
from draftwing.models.heads.mtp import check_trainable, mtp_head_of, stored_layers
from draftwing.models.hub import resolve_model
from draftwing.models.loader import Stored, check_shape, load_config, stored_shape
from draftwing.models.quantised.read import assembled
from draftwing.models.weight_files import read_json
from draftwing.models.weight_map import (
    MTP,
    MTP_LAYERS,
    MTP_PREFIXES,
    canonical,
    nextn_layer,
    nextn_name,
    predicts,
)
from draftwing.requests.refusals import show

logger = logging.getLogger(__name__)

# Of a config.json.
KEYS = "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "num_mtp_modules"
SIDE_FILE = "mtp-"  # what the name of a GGUF file with nothing but such layers begins with


def with_own_layers(options: Options, path: Path, config: ModelConfig) -> Options:
    """Returns resolved options whose drafter is known: where `Options.resolve` leaves it to the files of the model,
    NEXTN if they hold prediction layers that are served and can be loaded, else nobody. Where such layers are asked for
    and lie in a file next to the model's, that is the draft model. path: of the model. Raises ConfigError, and
    CheckpointError for files that cannot be read."""
    asked = options.speculative_algorithm is not None
    left = OWN_LAYERS in options.drafter_spec.heads and options.speculative_draft_model_path is None
    if asked and not (left and path.suffix == ".gguf"):
        return options
    own, side = _in_files(path, config)
    if not asked:
        found = path if own else side
        drafter = NO_DRAFTER if found is None or not _loads(found, config) else head_drafter(OWN_LAYERS)
        side = None if drafter is NO_DRAFTER else side
        options = replace(options, speculative_algorithm=drafter.name)
    return replace(options, speculative_draft_model_path=None if side is None else str(side)).resolve()


def _loads(path: Path, config: ModelConfig) -> bool:
    """Returns whether prediction layers in a model's files, or in one next to them, are what is read here, by the names
    and shapes of their tensors; says why where they are not."""
    target, why = DecoderModel(config, torch.bfloat16, "meta"), ""
    try:  # without the values, for experts that are put together would take much memory
        own = {name: stored_shape(value) for name, value in _each_tensor(path, target, False, True)}
        head = mtp_head_of(own, target, torch.bfloat16, config.weight_format)
        table, params = head.names(), dict(head.named_parameters(remove_duplicate=False))
        if missing := set(table) - set(own):
            why = f"tensors are missing: {listed(sorted(missing))}"
        for name, part in table.items() if not missing else ():
            expected = list(part.of(params[part.param]).shape)
            if part.order is not None:
                expected[part.order.axis] = part.order.whole
            check_shape(name, own[name], expected)
    except CheckpointError as error:
        why = str(error)
    if why:
        logger.warning("the prediction layers of %s cannot be loaded, so nothing is drafted: %s", path, why)
    return not why


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


def named_layers(path: Path) -> tuple[str, int] | None:
    """Returns the key by which a folder's config.json says that there are prediction layers, and how many."""
    raw = language_model(read_json(path / "config.json"))
    return next(((key, raw[key]) for key in KEYS if raw.get(key)), None)


def _in_folder(path: Path, config: ModelConfig) -> bool:
    named = named_layers(path)
    if named is None and not config.family.one_predicts:  # some configs of which say nothing
        return False
    found = any(predicts(canonical(name), config) for name, _ in folder_tensors(path))
    if named is not None and not found:
        _warn(path / "config.json", *named)
    return found


def _in_file(path: Path, config: ModelConfig) -> bool:
    return _read_from_files(config) and _holds_layer(open_gguf(path))


def _read_from_files(config: ModelConfig) -> bool:
    """Returns whether prediction layers of such a model are read from GGUF files."""
    return config.family.one_predicts and config.streams is None


def _warn(file: Path, key: str, count: object) -> None:
    logger.warning("%s: %s is %s, but there are no such layers that are served; nothing is drafted", file, key, count)


def _fields(file: GGUFFile) -> Fields:
    return Fields(file.metadata, str(file.path), f"{file.metadata.get('general.architecture')}.")


def _holds_layer(file: GGUFFile) -> bool:
    return f"blk.{own_layers(_fields(file))}.nextn.eh_proj.weight" in file.tensors


def _side_file(path: Path, config: ModelConfig) -> Path | None:
    """Returns the `mtp-*.gguf` for a GGUF file in the same folder: of the same name, but for what follows the last
    hyphen (how values are stored), and of the same sizes. Of several the one with the longest common name."""
    if not _read_from_files(config):
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
        alike = (own_layers(ours), ours.prefix) == (own_layers(theirs), theirs.prefix) and _holds_layer(file)
    except CheckpointError as error:
        logger.warning("%s does not draft: %s", side, error)
        return False
    return alike and ours.get("embedding_length") == theirs.get("embedding_length")


# ---- their tensors ---------------------------------------------------------------------------------------------------

# Of prediction layers that are numbered behind a model's own, and of one below `mtp`.
UNSERVED = re.compile(r"(^|\.)(eh_proj|shared_head)\.|^(model\.)?mtp\.")


def mtp_tensors(path: Path, target: DecoderModel, dummy: bool, in_blocks: bool) -> dict[str, Stored]:
    """Returns them by the names that the layers have here, of a folder or a `.gguf` file; dummy: of meta data alone.
    in_blocks: of a file as it stores them. Raises CheckpointError where there are none that can be served."""
    return dict(_each_tensor(path, target, dummy, in_blocks))


def _each_tensor(path: Path, target: DecoderModel, dummy: bool, in_blocks: bool) -> Iterator[tuple[str, Stored]]:
    """Yields these."""
    found, of_file = False, path.suffix == ".gguf"
    for pair in _of_gguf(path, target, dummy, in_blocks) if of_file else _of_folder(path, target, dummy):
        found = True
        yield pair
    if not found:
        raise CheckpointError(
            f"{path} has no multi-token prediction layers ({_prefix(target)}*){_dropped(path)}: give a draft model "
            "with --speculative-draft-model-path"
        )


def of_prediction_layer(name: str, target: ModelConfig) -> bool:
    """Returns whether it is of a prediction layer of some model that is served."""
    return name.startswith(MTP_PREFIXES) or nextn_layer(name, target) is not None


def unserved(path: Path, name: str) -> CheckpointError:
    """Returns the error for a folder with such a tensor of a target that is not served."""
    return CheckpointError(
        f"{path} holds multi-token prediction layers ({name}) of a target that is not served yet; expected "
        f"{MTP_LAYERS}*"
    )


def _prefix(target: DecoderModel) -> str:
    """Of the names of prediction layers that the target's checkpoint might have."""
    config = target.config
    numbered, one = f"model.layers.{config.num_layers}.", MTP.removeprefix("model.")
    return {"numbered": numbered, "mtp": one}.get(config.family.predicts, MTP_LAYERS)


def _of_folder(path: Path, target: DecoderModel, dummy: bool) -> Iterator[tuple[str, Stored]]:
    """Yields the tensors of prediction layers in a folder, put together; names with the `model.` prefix. Raises
    CheckpointError for those of another model."""
    raw = read_json(path / "config.json")
    stored = mtp_weights(raw, path).items() if dummy else folder_tensors(path)
    own: dict[str, Tensor] = {}
    found = None
    for name, tensor in stored:
        if predicts(canonical(name), target.config):
            own[canonical(name)] = tensor
        elif UNSERVED.search(name):
            found = found or name
    if not own:
        if found is not None:
            raise unserved(path, found)
        return
    config = load_config(path)
    for name in ("hidden_size", "vocab_size"):
        same(f"draft model {path}: {name}", getattr(target.config, name), getattr(config, name))
    values = assembled(config.quantization, own.items())
    experts = target.config.experts
    each = values if dummy or experts is None else each_expert(values, experts.count, {})
    latent = stored_layers(target.config)[0].mixer
    if isinstance(latent, LatentAttentionConfig):
        each = without_latents(each, latent, {})
    renamed = ((nextn_name(name, target.config), value) for name, value in each)
    yield from ((name, value) for name, value in renamed if name is not None)


def _of_gguf(path: Path, target: DecoderModel, dummy: bool, in_blocks: bool) -> Iterator[tuple[str, Stored]]:
    """Yields the same of a file. Its own layers may be missing."""
    file, config = open_gguf(path), target.config
    arch = file.metadata.get("general.architecture")
    if not isinstance(arch, str) or in_gguf().get(arch) != config.architecture:
        raise CheckpointError(f"{path}: expected layers of a {config.architecture}, found architecture {show(arch)}")
    fields = Fields(file.metadata, str(path), f"{arch}.")
    fields.whole("embedding_length", config.hidden_size, config.hidden_size)
    if "token_embd.weight" in file.tensors:
        same(f"draft model {path}: vocab_size", config.vocab_size, file.tensors["token_embd.weight"].shape[0])
    if dummy:
        predicts = fields.whole("block_count", high=MAX_LAYERS) - own_layers(fields)
        if predicts:
            yield f"{MTP}fc.weight", torch.empty(1, device="meta")
        return
    yield from tensors(file, config, None, in_blocks, predicting=True)


def _dropped(path: Path) -> str:
    """Returns what a config says of layers that are not there: quantisers leave them out."""
    if path.suffix == ".gguf":
        return ""
    named = named_layers(path)
    if named is None or language_model(read_json(path / "config.json")).get("quantization_config") is None:
        return ""
    return f", though {named[0]} is {show(named[1])}: whoever quantised it left them out; take them from the original"
