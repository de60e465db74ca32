"""What configs and file names tell of an engine that cannot be, before any weight is read: that may take minutes. And
what an engine runs on, for the log and /server_info."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from torch import Tensor

from draftwing.config.drafters import TOKEN_MAP
from draftwing.config.options import Options
from draftwing.engine.devices.base import Device
from draftwing.errors import CheckpointError, ConfigError
from draftwing.gguf_file import open_gguf
from draftwing.models.config import ModelConfig
from draftwing.models.folder import weight_files
from draftwing.models.heads.config import read_config, same
from draftwing.models.loader import load_config
from draftwing.parallel.ranks import Ranks
from draftwing.spec.token_map import check_topk

logger = logging.getLogger(__name__)


def check_target(options: Options, path: Path, config: ModelConfig) -> None:
    """Raises ConfigError for a context that the model does not have, CheckpointError for weights that are not there."""
    wanted = options.context_length
    if wanted and wanted > config.max_positions:
        raise ConfigError(f"--context-length {wanted} exceeds the {config.max_positions} positions of the model")
    if path.is_dir() and not options.dummy:
        weight_files(path)
    asked = options.quantization
    stored = () if asked in ("auto", "none") else _stored_as(path, config)
    if stored and asked not in stored:
        logger.warning(
            "--quantization %s: the checkpoint is quantised already (%s) and stays so; only its other matrices change",
            asked, ", ".join(stored),
        )  # fmt: skip


def _stored_as(path: Path, config: ModelConfig) -> tuple[str, ...]:
    """In which formats a checkpoint is quantised, in lower case; empty where it is not."""
    if config.quantization is not None:
        return (config.quantization.method,)
    if path.suffix != ".gguf":
        return ()
    file = open_gguf(path)
    return tuple(sorted({file.kind(name).lower() for name in file.tensors} - {"f32", "f16", "bf16"}))


def check_draft_files(options: Options, path: Path, target: ModelConfig) -> None:
    """Checks files of a draft model as those of the target. options: `for_engine`; path: of the draft model. Not for a
    user's own drafter, whose files may be anything."""
    spec = options.drafter_spec
    if spec.same_tokenizer:
        vocab = min(load_config(path).vocab_size, target.vocab_size)
    elif path.suffix == ".gguf" and "mtp" in spec.heads:
        vocab = target.vocab_size  # the loader reads of it what there is to check
    elif spec.heads:
        if not path.is_dir():
            raise CheckpointError(f"draft model: expected a folder, found none at {path}")
        try:
            raw = read_config(path)
            same("vocab_size", target.vocab_size, raw.get("vocab_size", target.vocab_size))
            if raw.get("target_hidden_size") != target.hidden_size:  # for which an EAGLE-3 head may be smaller
                hidden = raw.get("hidden_size", target.hidden_size)
                same("hidden_size of the target it was trained for", target.hidden_size, hidden)
        except CheckpointError as error:
            raise CheckpointError(f"draft model {path}: {error}") from None
        vocab = raw.get("draft_vocab_size") or target.vocab_size
    else:
        return
    if path.is_dir() and not options.dummy:
        weight_files(path)
    check_topk(options.speculative_shape.topk, vocab, str(path))


def check_token_map(options: Options, token_ids: Tensor) -> None:
    """Raises ConfigError for a token map that a drafter heeds, with too few tokens. options: `for_engine`."""
    if TOKEN_MAP in options.drafter_spec.options:
        check_topk(options.speculative_shape.topk, len(token_ids), f"the token map {options.speculative_token_map}")


def capability(device: Device, ranks: Ranks) -> dict[str, Any]:
    """Returns what drives the model. ranks: how many; devices: that of each rank; kernels: what computes there; links:
    between them; sums: how partial sums are taken, and why."""
    devices = device.names(ranks.size)
    found: dict[str, Any] = {"ranks": ranks.size, "devices": devices, "kernels": device.ops.title}
    if ranks.size == 1:
        return found | {"why": "--tp-size 1: the model is on one device"}
    why = f"--tp-size {ranks.size}: every rank has a share of each layer's heads, of its MLP and of the vocabulary"
    return found | {"links": device.links(ranks.size), "sums": ranks.title, "why": why}


def in_words(found: dict[str, Any]) -> str:
    """Returns one line for the log."""
    devices = ", ".join(sorted(set(found["devices"])))
    return f"{found['ranks']} ranks on {devices}; links {found['links']}; sums: {found['sums']}"
