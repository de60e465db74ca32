"""What a checkpoint says about generating text: which token ids end an answer, which are never drawn, and how to
sample where a request does not say. Checkpoints spread stop ids over several files, and each alone is often
incomplete."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from draftwing.config.aliases import ALIASES
from draftwing.errors import RequestError
from draftwing.gguf_file import open_gguf
from draftwing.models.config import ModelConfig
from draftwing.models.fields import Fields
from draftwing.models.weight_files import read_json
from draftwing.requests.sampling_params import SamplingParams

logger = logging.getLogger(__name__)
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# What they are called in a .gguf file, after `general.sampling.`
_GGUF_SAMPLING = {name: name for name in _SAMPLING} | {"temperature": "temp", "repetition_penalty": "penalty_repeat"}


def stop_ids(path: str | Path, config: ModelConfig, others: Iterable[int | None] = ()) -> tuple[int, ...]:
    """Returns the sorted union of `generation_config.json` (when there is one), the config, and `others`.

    others: the tokenizer's end of text and the chat template's end of turn; None entries are skipped.
    """
    ids = set(config.stop_ids) | {i for i in others if i is not None}
    ids.update(Fields(_generation_config(path), "generation_config.json").ids("eos_token_id"))
    return tuple(sorted(ids))


def suppressed(path: Path) -> tuple[int, ...]:
    """Returns the ids that a folder's `generation_config.json` wants never drawn (`suppress_tokens`), mostly none."""
    return Fields(_generation_config(path), "generation_config.json").ids("suppress_tokens")


def sampling_defaults(path: str | Path, model: str = "") -> dict[str, Any]:
    """Returns sampling parameters by the names of `SamplingParams`, for fields that a request does not set: those of
    the alias, if `model` is one, before those of `generation_config.json` or of a `.gguf` file's metadata.

    `do_sample: false` means greedy decoding. What is out of range is left out, with a warning. `max_new_tokens` is only
    there when the alias has it, for requests that nothing else limits.
    """
    path = Path(path)
    source, given = path.name, _gguf_sampling(path)
    if path.is_dir():
        source, given = "generation_config.json", _generation_config(path)
        if given.get("do_sample") is False:
            given = {"temperature": 0.0}
    defaults: dict[str, Any] = {}
    for name in _SAMPLING:
        if given.get(name) is None:
            continue
        try:
            defaults[name] = getattr(SamplingParams.read({name: given[name]}), name)
        except RequestError as error:
            logger.warning("a sampling default of %s is not used: %s", source, error)
    return defaults | dict(ALIASES[model].sampling if model in ALIASES else {})


def _gguf_sampling(path: Path) -> dict[str, Any]:
    """Returns the recommended sampling parameters in the metadata of a `.gguf` file, as llama.cpp reads them."""
    if path.suffix != ".gguf":
        return {}
    metadata = open_gguf(path).metadata
    return {name: metadata.get(f"general.sampling.{theirs}") for name, theirs in _GGUF_SAMPLING.items()}


def _generation_config(path: str | Path) -> dict[str, Any]:
    file = Path(path) / "generation_config.json"
    return read_json(file) if file.is_file() else {}
