"""Token maps of FR-Spec (Zhao et al. 2025, arXiv 2502.14856): the frequent tokens that a draft head is restricted to.

A smaller head makes drafting cheaper; the target still verifies over its whole vocabulary, so text does not change.
"""

from __future__ import annotations

import json
import logging
import pickle
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwing.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

ALL = "all"  # the name of no map
# On a CPU, whose draft steps mostly read the head: how many tokens are drafted by default where there are more than
# `LARGE`. Of English text and of code 93 to 95% is among the first 32,768 of Qwen's.
LARGE, FIRST = 100_000, 32_768
_HUB_FILE = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)/([\w.-]+(?:/[\w.-]+)*)")
_EXPECTED = (
    "expected a .pt file with a list of token ids, a JSON or text list, org/repo/file on the hub, a number of tokens, "
    f"or {ALL}"
)


def load_token_map(name: str, vocab: int, added: Collection[int] = ()) -> Tensor | None:
    """Returns the token ids of `--speculative-token-map name`, distinct and ascending: [n] int64 on the CPU; None for
    all.

    name: a file, or `org/repo/file` on the hub; a number: as many of the tokens with the lowest ids, which a tokenizer
    merges first and so are mostly the frequent ones, and those `added`, of which chat templates are made; or `ALL`.
    Lists come in descending frequency and may repeat tokens; neither matters here, and ascending ids make equal scores
    fall to the lower id, as in the target's own vocabulary.
    vocab: of the target.  Raises CheckpointError for a list that cannot be read, is empty or names other ids.
    """
    if name == ALL:
        return None
    if name.isdecimal() and int(name):
        ids = [*range(min(int(name), vocab)), *(i for i in added if i < vocab)]
    else:
        path = _find(name)
        ids = _ids(_read(path), path)
    outside = [i for i in ids if not 0 <= i < vocab]
    if outside:
        raise CheckpointError(
            f"token map {name}: expected ids of the target's vocabulary, 0 to {vocab - 1}; found {len(outside)} that "
            f"are not, such as {outside[0]}: it was made for another tokenizer"
        )
    kept = sorted(set(ids))
    logger.info("token map: %d of %d tokens, %d repeated ones dropped", len(kept), vocab, len(ids) - len(kept))
    return torch.tensor(kept, dtype=torch.int64)


def check_topk(topk: int, vocab: int, whose: str) -> None:
    """Raises ConfigError where a tree has more branches than there are tokens."""
    if topk > vocab:
        raise ConfigError(
            f"--speculative-eagle-topk: expected at most {vocab}, as many tokens as {whose} has, found {topk}"
        )


def _find(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_file():
        return path
    match = _HUB_FILE.fullmatch(name)
    if match is None or path.is_dir():
        raise CheckpointError(f"token map: there is no file {name!r}; {_EXPECTED}")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(match[1], match[2]))
    # No such repository or file, no consent, offline: each version of the client has its own exceptions for them.
    except Exception as error:
        raise CheckpointError(
            f"token map: there is no file {name!r}, and {match[2]} of the hub's {match[1]} cannot be had "
            f"({type(error).__name__}: {error})"
        ) from error


def _read(path: Path) -> Any:
    try:
        if path.suffix in (".pt", ".pth", ".bin"):
            return torch.load(path, map_location="cpu", weights_only=True)
        text = path.read_text(encoding="utf-8-sig")
        return json.loads(text) if text.lstrip().startswith("[") else [int(word) for word in text.split()]
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise CheckpointError(f"token map {path} cannot be read: {error}; {_EXPECTED}") from error


def _ids(content: Any, path: Path) -> list[int]:
    if isinstance(content, Tensor) and content.dim() == 1 and not content.is_floating_point():
        content = content.to(torch.int64).tolist()
    if not isinstance(content, (list, tuple)) or not all(type(i) is int for i in content):
        raise CheckpointError(f"token map {path}: expected a list of integers, found {type(content).__name__}")
    if not content:
        raise CheckpointError(f"token map {path} is empty")
    return list(content)
