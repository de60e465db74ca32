"""A head next to a model's `.gguf` file drafts unless something else is asked for, as prediction layers do."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path

import torch

from draftwing.config.options import Options
from draftwing.errors import CheckpointError
from draftwing.gguf_file import open_gguf
from draftwing.models.config import ModelConfig
from draftwing.models.decoder import DecoderModel
from draftwing.models.heads.gguf_heads import MARKOV, SELECTOR
from draftwing.models.heads.loader import load_draft_head
from draftwing.models.heads.own_layers import with_own_layers

logger = logging.getLogger(__name__)

_NAME = re.compile(r"(.+?)[-_.](?:dflash2?|dspark)(?:[-_.].*)?", re.IGNORECASE)
_PLAIN, _KINDS = "DFLASH", {SELECTOR: "DFLASH2", MARKOV: "DSPARK"}  # by a tensor that others do not have


def with_found_drafter(options: Options, path: Path, config: ModelConfig) -> Options:
    """Returns resolved options whose drafter is known: `with_own_layers`, but with a DFlash2 or DSpark head next to the
    file of the model where nothing is asked for, and with a DFlash head where the model has no prediction layers.
    path: of the model. Raises what `with_own_layers` raises."""
    found = with_own_layers(options, path, config)
    if options.speculative_algorithm is not None or path.suffix != ".gguf":
        return found
    drafter, file = _beside(path, config)
    if file is None or (found.drafts and drafter == _PLAIN):
        return found
    return replace(options, speculative_algorithm=drafter, speculative_draft_model_path=str(file)).resolve()


def _beside(path: Path, config: ModelConfig) -> tuple[str, Path | None]:
    """Returns who drafts, and the head in the same folder whose name begins with the model's, up to `DFlash` or
    `DSpark`, and whose tensors fit it; of several one whose drafts see each other, then that of the longest name. Says
    why one does not draft."""
    found: list[tuple[bool, int, Path, str]] = []
    for file in sorted(path.parent.glob("*.gguf")):
        named = _NAME.fullmatch(file.stem)
        if named is None or file == path or not path.stem.lower().startswith(named[1].lower()):
            continue
        try:
            target = DecoderModel(config, torch.bfloat16, "meta")
            stored = open_gguf(file).tensors
            drafter = next((kind for name, kind in _KINDS.items() if name in stored), _PLAIN)
            load_draft_head(file, target, drafter, torch.bfloat16, "meta")  # its names and sizes
        except (CheckpointError, OSError) as error:
            logger.warning("%s does not draft: %s", file, error)
        else:
            found.append((drafter != _PLAIN, len(named[1]), file, drafter))
    *_, best, drafter = max(found, default=(False, 0, None, ""))
    return drafter, best
