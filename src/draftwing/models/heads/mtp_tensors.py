"""The tensors of multi-token prediction layers, which are stored with a model, mostly the target itself."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from draftwing.errors import CheckpointError
from draftwing.gguf_file import open_gguf
from draftwing.layers.latent import LatentAttentionConfig
from draftwing.models import gguf
from draftwing.models.config import ModelConfig
from draftwing.models.decoder import DecoderModel
from draftwing.models.dummy import mtp_weights
from draftwing.models.fields import MAX_LAYERS, Fields
from draftwing.models.folder import folder_tensors, read_json
from draftwing.models.fused_experts import taken_apart
from draftwing.models.heads.config import same
from draftwing.models.heads.mtp import QWENS
from draftwing.models.heads.own_layers import named_layers, predicts
from draftwing.models.language_model import language_model
from draftwing.models.latents import apart
from draftwing.models.loader import Stored, load_config
from draftwing.models.quantised.read import assembled
from draftwing.models.weight_map import (
    MTP_PREFIX,
    MTP_PREFIXES,
    NEXTN_MODELS,
    QWEN_MTP_PREFIX,
    canonical,
    nextn_layer,
    nextn_name,
)
from draftwing.requests.refusals import show

# Multi-token prediction layers as DeepSeek and GLM (eh_proj) and others than Qwen's (mtp.) name them.
UNSERVED = re.compile(r"(^|\.)(eh_proj|shared_head)\.|^(model\.)?mtp\.")


def mtp_tensors(path: Path, target: DecoderModel, dummy: bool, in_blocks: bool) -> dict[str, Stored]:
    """Returns them by the names that the layers have here, of a folder or a `.gguf` file; dummy: of meta data alone.
    in_blocks: of a file as it stores them. Raises CheckpointError where there are none that can be served."""
    own: dict[str, Stored] = (
        _of_gguf(path, target, dummy, in_blocks) if path.suffix == ".gguf" else _of_folder(path, target, dummy)
    )
    if not own:
        raise CheckpointError(
            f"{path} has no multi-token prediction layers ({_prefix(target)}*){_dropped(path)}: give a draft model "
            "with --speculative-draft-model-path"
        )
    return own


def of_prediction_layer(name: str, target: ModelConfig) -> bool:
    """Returns whether it is of a prediction layer of some model that is served."""
    return name.startswith(MTP_PREFIXES) or nextn_layer(name, target) is not None


def unserved(path: Path, name: str) -> CheckpointError:
    """Returns the error for a folder with such a tensor of a target that is not served."""
    return CheckpointError(
        f"{path} holds multi-token prediction layers ({name}) of a target that is not served yet; expected MiMo's "
        f"({MTP_PREFIX}*)"
    )


def _prefix(target: DecoderModel) -> str:
    """Of the names of prediction layers that the target's checkpoint might have."""
    config = target.config
    if config.architecture in NEXTN_MODELS:
        return f"model.layers.{config.num_layers}."
    return QWEN_MTP_PREFIX.removeprefix("model.") if config.architecture in QWENS else MTP_PREFIX


def _of_folder(path: Path, target: DecoderModel, dummy: bool) -> dict[str, Stored]:
    """Returns the tensors of prediction layers in a folder, put together; names with the `model.` prefix. Raises
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
        return {}
    config = load_config(path)
    for name in ("hidden_size", "vocab_size"):
        same(f"draft model {path}: {name}", getattr(target.config, name), getattr(config, name))
    values = assembled(config.quantization, own.items())
    experts = target.config.experts
    each = values if dummy or experts is None else taken_apart(values, experts.count, {}, halves=True)
    latent = target.config.layers[-1].mixer
    if isinstance(latent, LatentAttentionConfig):
        each = apart(each, latent, {})
    renamed = ((nextn_name(name, target.config), value) for name, value in each)
    return {name: value for name, value in renamed if name is not None}


def _of_gguf(path: Path, target: DecoderModel, dummy: bool, in_blocks: bool) -> dict[str, Stored]:
    """Returns the same of a file. Its own layers may be missing."""
    file, config = open_gguf(path), target.config
    arch = file.metadata.get("general.architecture")
    if not isinstance(arch, str) or gguf.ARCHITECTURES.get(arch) != config.architecture:
        raise CheckpointError(f"{path}: expected layers of a {config.architecture}, found architecture {show(arch)}")
    fields = Fields(file.metadata, str(path), f"{arch}.")
    fields.whole("embedding_length", config.hidden_size, config.hidden_size)
    if "token_embd.weight" in file.tensors:
        same(f"draft model {path}: vocab_size", config.vocab_size, file.tensors["token_embd.weight"].shape[0])
    if dummy:
        predicts = fields.whole("block_count", high=MAX_LAYERS) - gguf.own_layers(fields)
        return {f"{QWEN_MTP_PREFIX}fc.weight": torch.empty(1, device="meta")} if predicts else {}
    return dict(gguf.tensors(file, config, None, in_blocks, predicting=True))


def _dropped(path: Path) -> str:
    """Returns what a config says of layers that are not there: quantisers leave them out."""
    if path.suffix == ".gguf":
        return ""
    named = named_layers(path)
    if named is None or language_model(read_json(path / "config.json")).get("quantization_config") is None:
        return ""
    return f", though {named[0]} is {show(named[1])}: whoever quantised it left them out; take them from the original"
