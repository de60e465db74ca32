"""Loads assistants: draft models whose layers attend to keys and values of the target."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from draftwing.errors import CheckpointError, ConfigError
from draftwing.gguf_file import GGUFFile, open_gguf
from draftwing.layers.decoder_layer import DecoderLayer
from draftwing.layers.linear_ops.base import WeightFormat
from draftwing.layers.linear_ops.blocks import log_blocks
from draftwing.layers.linear_ops.dense import DENSE
from draftwing.layers.linear_ops.groups import log_groups
from draftwing.models.config import ModelConfig, from_hf
from draftwing.models.decoder import DecoderModel
from draftwing.models.families import FAMILIES
from draftwing.models.fields import WIDEST, Fields
from draftwing.models.folder import folder_tensors
from draftwing.models.gguf_config import model_config
from draftwing.models.gguf_tensors import tensors
from draftwing.models.heads.assistant import AssistantHead, ClusterConfig, of_keys
from draftwing.models.heads.config import same
from draftwing.models.heads.loader import fill_head
from draftwing.models.loader import Tensors
from draftwing.models.quantised.read import assembled
from draftwing.models.weight_files import read_json
from draftwing.models.weight_map import layer_names
from draftwing.requests.refusals import show

logger = logging.getLogger(__name__)

_MOST_CLUSTERS = 1 << 16


def load_assistant(
    path: str | Path,
    target: DecoderModel,
    dtype: torch.dtype,
    device: torch.device | str,
    dummy: bool = False,
    weight_format: WeightFormat = DENSE,
) -> AssistantHead:
    """Loads the assistant in the folder or `.gguf` file `path` for `target`.  dummy: random weights from the config
    alone.  weight_format: of its matrices.  Raises CheckpointError for another model, for one of another target, and
    for missing tensors, and ConfigError for one that cannot be spread over the target's ranks."""
    started, path = time.perf_counter(), Path(path)
    in_file = path.suffix == ".gguf"
    if not in_file and not path.is_dir():
        raise CheckpointError(f"draft model: expected a folder or a .gguf file, found neither at {path}")
    try:
        file = _with_keys(open_gguf(path), target) if in_file else None
        raw = {} if in_file else read_json(path / "config.json")
        config = _assistant_config(raw, target) if file is None else model_config(file)
        same("vocab_size", target.config.vocab_size, config.vocab_size)
        if config.experts is not None or config.weight_format != DENSE:
            raise CheckpointError("expected an assistant without experts, in a format of this package")
        head = AssistantHead(config, target, dtype, weight_format, _clusters(raw, target))
        stored = assembled(config.quantization, folder_tensors(path)) if file is None else _of_file(file, head)
        fill_head(head, stored, device, dummy, {"lm_head.weight", *filter(of_keys, layer_tensors(config))})
        if head.clusters is not None and not dummy:
            head.clusters.check()
    except (CheckpointError, ConfigError) as error:
        raise type(error)(f"draft model {path}: {error}") from None
    logger.info(
        "assistant %s: %.2f s; %d layers, which read pool layers %s of the target",
        "made of random weights (load_format dummy)" if dummy else "loaded", time.perf_counter() - started,
        head.config.num_layers, ", ".join(str(cast(DecoderLayer, one).mixer.pool_layer) for one in head.layers),
    )  # fmt: skip
    log_blocks(head)
    log_groups(head)
    return head.requires_grad_(False)


def layer_tensors(config: ModelConfig) -> list[str]:
    """Returns the names of tensors of all layers, as if they had keys and values."""
    return [name for i in range(config.num_layers) for name in layer_names(config, f"model.layers.{i}", "", index=i)]


def _assistant_config(raw: Mapping[str, Any], target: DecoderModel) -> ModelConfig:
    """Of its layers. raw: config.json."""
    fields = Fields(raw, "config")
    kind, kinds = fields.get("model_type"), {one: name for name in FAMILIES for one in FAMILIES[name].assistants}
    if not isinstance(kind, str) or kind not in kinds:
        raise CheckpointError(f"expected model_type {' or '.join(kinds)}, found {show(kind)}")
    hidden = target.config.hidden_size
    fields.whole("backbone_hidden_size", hidden, hidden)
    own = fields.inner("text_config")
    own.whole("hidden_size", high=WIDEST)
    return from_hf(
        {
            "max_position_embeddings": target.config.max_positions,
            "vocab_size": 262144,
            "quantization_config": raw.get("quantization_config"),
            **dict(own.items()),
            "architectures": [kinds[kind]],
            "num_kv_shared_layers": 0,  # what they read is the target's
            "use_double_wide_mlp": False,
            "hidden_size_per_layer_input": 0,
        },
        head=True,
    )


def _clusters(raw: Mapping[str, Any], target: DecoderModel) -> ClusterConfig | None:
    fields, vocab = Fields(raw, "config"), target.config.vocab_size
    if not fields.flag("use_ordered_embeddings"):
        return None
    count = fields.whole("num_centroids", 1, min(vocab, _MOST_CLUSTERS), 2048)
    if vocab % count:
        raise CheckpointError(f"config: num_centroids: expected a number that divides {vocab} tokens, found {count}")
    return ClusterConfig(count, fields.whole("centroid_intermediate_top_k", 1, count, 32))


def _with_keys(file: GGUFFile, target: DecoderModel) -> GGUFFile:
    """Returns the file, which has no clusters, as if its layers had keys and values. Raises CheckpointError for another
    model's."""
    found = file.metadata.get("general.architecture")
    forms = (family.gguf for family in FAMILIES.values())
    known = {form.assistant: form.architecture for form in forms if form is not None and form.assistant}
    if not isinstance(found, str) or found not in known:
        raise CheckpointError(f"expected general.architecture {' or '.join(known)}, found {show(found)}")
    arch = known[found]
    hidden = target.config.hidden_size
    Fields(file.metadata, "metadata", f"{found}.").whole("embedding_length_out", hidden, hidden)
    own = {
        f"{arch}.{name}": value
        for prefix, _, name, value in ((*key.partition("."), value) for key, value in file.metadata.items())
        if prefix == found and name not in ("attention.shared_kv_layers", "nextn_predict_layers")
    }
    return replace(file, metadata=file.metadata | own | {"general.architecture": arch})


def _of_file(file: GGUFFile, head: AssistantHead) -> Tensors:
    stored = tensors(file, head.config, in_blocks=head.config.weight_format.takes_blocks)
    return ((name.removeprefix("nextn."), value) for name, value in stored)
