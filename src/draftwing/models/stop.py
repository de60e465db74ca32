"""Which token ids end an answer. Checkpoints spread them over several files, and each alone is often incomplete."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from draftwing.models.config import ModelConfig, id_tuple
from draftwing.models.loader import read_json


def stop_ids(path: str | Path, config: ModelConfig, others: Iterable[int | None] = ()) -> tuple[int, ...]:
    """Sorted union of `generation_config.json` (when there is one), the config, and `others`.

    others: the tokenizer's end of text and the chat template's end of turn; None entries are skipped.
    """
    ids = set(config.stop_ids) | {i for i in others if i is not None}
    generation = Path(path) / "generation_config.json"
    if generation.is_file():
        ids.update(id_tuple(read_json(generation).get("eos_token_id")))
    return tuple(sorted(ids))
