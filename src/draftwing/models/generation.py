"""What a checkpoint says about generating text: which token ids end an answer, and how to sample where a request does
not say. Checkpoints spread stop ids over several files, and each alone is often incomplete."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from draftwing.errors import RequestError
from draftwing.models.config import ModelConfig
from draftwing.models.fields import Fields
from draftwing.models.folder import read_json
from draftwing.requests.sampling_params import SamplingParams

logger = logging.getLogger(__name__)
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def stop_ids(path: str | Path, config: ModelConfig, others: Iterable[int | None] = ()) -> tuple[int, ...]:
    """Sorted union of `generation_config.json` (when there is one), the config, and `others`.

    others: the tokenizer's end of text and the chat template's end of turn; None entries are skipped.
    """
    ids = set(config.stop_ids) | {i for i in others if i is not None}
    ids.update(Fields(_generation_config(path), "generation_config.json").ids("eos_token_id"))
    return tuple(sorted(ids))


def sampling_defaults(path: str | Path) -> dict[str, Any]:
    """Sampling parameters by the names of `SamplingParams` that `generation_config.json` recommends. With
    `do_sample: false` that is greedy decoding; what is out of range is left out, with a warning."""
    config = _generation_config(path)
    if config.get("do_sample") is False:
        return {"temperature": 0.0}
    defaults = {}
    for name in _SAMPLING:
        if config.get(name) is None:
            continue
        try:
            SamplingParams.read({name: config[name]})
        except RequestError as error:
            logger.warning("generation_config.json is not followed: %s", error)
        else:
            defaults[name] = config[name]
    return defaults


def _generation_config(path: str | Path) -> dict[str, Any]:
    file = Path(path) / "generation_config.json"
    return read_json(file) if file.is_file() else {}
