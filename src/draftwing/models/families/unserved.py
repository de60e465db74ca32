"""Architectures and values of config keys that have no code here, to be refused by name."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

_TABLES = tomllib.loads((Path(__file__).parent / "unserved.toml").read_text(encoding="utf8"))
# Of each architecture its model_type, and what it has that has no code here.
UNSERVED = {name: (kind, part) for part, names in _TABLES["missing"].items() for name, kind in names.items()}
IN_GGUF: dict[str, str] = _TABLES["in_gguf"]  # `general.architecture` of GGUF files, where that is not the model_type
# Ends of architectures that write no text.
_NO_TEXT = {
    "ForMaskedLM": "an encoder", "ForSequenceClassification": "scores in place of text",
    "ForTokenClassification": "scores in place of text", "RewardModel": "scores in place of text",
    "Model": "vectors in place of text",
}  # fmt: skip

# Keys that say that there is another model.
_BESIDE = {
    "is_encoder_decoder": "an encoder", "vision_config": "a model for images around a language model",
    "audio_config": "a model for sound around a language model",
}  # fmt: skip
_EMPTY: Mapping[str, Any] = {}


def named_part(architectures: Sequence[str], model_type: object) -> str | None:
    """Returns what a relative that people ask for has and this package has not, None for all other models."""
    for name, (known_type, missing) in UNSERVED.items():
        if name in architectures or (not architectures and known_type == model_type):
            return missing
    return None


def unserved_part(architectures: Sequence[str], model_type: object, config: Mapping[str, Any] = _EMPTY) -> str | None:
    """Returns the same of any model, also where the kind of it alone is known. config: the rest of what it says."""
    named = named_part(architectures, model_type)
    ends = (part for end, part in _NO_TEXT.items() if any(name.endswith(end) for name in architectures))
    said = (part for key, part in _BESIDE.items() if config.get(key) not in (None, False))
    return named or next(ends, None) or next(said, None)


def unserved_in_gguf(architecture: object) -> str | None:
    """Returns the same of a GGUF file's `general.architecture`."""
    if not isinstance(architecture, str):
        return None
    kind = UNSERVED[IN_GGUF[architecture]][0] if architecture in IN_GGUF else architecture
    return next((part for known, part in UNSERVED.values() if _bare(known) == _bare(kind)), None)


def refused_head(name: str) -> str:
    """Returns the sentence for a head in place of a model."""
    return (
        f"{name} is the architecture of a draft head: expected a model, with the head as "
        "--speculative-draft-model-path and the --speculative-algorithm of its kind"
    )


def _bare(model_type: str) -> str:
    """Returns it without what libraries write differently."""
    return model_type.replace("-", "").replace("_", "")


def _letters(name: str) -> str:
    """Returns what a family's names begin with, before the first digit."""
    return re.sub(r"For[A-Z]\w*|Model$|[^A-Za-z].*", "", name)


def nearest(name: str, served: Iterable[str]) -> str:
    """Returns which of those that are served have names like this one, and where all of them are listed."""
    letters = _letters(name)
    related = [one for one in served if letters.startswith(_letters(one)) or _letters(one).startswith(letters)]
    close = difflib.get_close_matches(name, related, 3, 0.0) if letters else []
    hint = f"the nearest that are served: {', '.join(close)}; " if close else ""
    return f"{hint}docs/models.md lists all that are"
