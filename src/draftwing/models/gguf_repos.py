"""The GGUF files of a repository: which of them are models, as what they are quantised, and which one is meant."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from draftwing.errors import CheckpointError

DEFAULTS = ("Q4_K_M", "Q8_0")  # that are taken where a name does not say which, as llama.cpp does; else the first
_PART = re.compile(r"-(\d{5})-of-(\d{5})$")
_TAG = re.compile(r"(?:UD-)?(?:I?Q\d\w*|TQ\d_\d|MXFP4\w*|NVFP4|BF16|FP?16|FP?32)", re.IGNORECASE)
_NO_MODEL = re.compile(r"(?:^|[-_./])(?:mmproj|imatrix|mtp)(?=[-_.])", re.IGNORECASE)  # parts that are read with one


class Quantised(NamedTuple):
    """A model of a repository. tag: its quantisation, or its name where that does not tell.  files: its parts."""

    tag: str
    files: tuple[str, ...]


def models_in(names: Iterable[str]) -> list[Quantised]:
    """Returns the models whose parts are all among these files of a repository, by their names."""
    parts: dict[tuple[str, int], list[str]] = {}
    for name in sorted(name for name in names if name.endswith(".gguf")):
        stem = name.removesuffix(".gguf")
        part = _PART.search(stem)
        parts.setdefault((_PART.sub("", stem), int(part[2]) if part else 1), []).append(name)
    found = [Quantised(_tag(stem), tuple(files)) for (stem, count), files in parts.items() if len(files) == count]
    return [one for one in found if not _NO_MODEL.search(one.files[0])] or found


def chosen(repo: str, models: list[Quantised], asked: str | None) -> Quantised:
    """Returns the model that `asked` means: a quantisation or a file's name, in any case; None: the default one. Raises
    CheckpointError."""
    for wanted in DEFAULTS if asked is None else (asked,):
        for matches in (_is, _ends):
            for one in models:
                if matches(one, wanted.lower()):
                    return one
    if asked is None and models:
        return models[0]
    has = ", ".join(one.tag for one in models)
    raise CheckpointError(f"{repo} has no {asked!r}; " + (f"it has {has}" if has else "it holds no GGUF files"))


def _is(one: Quantised, wanted: str) -> bool:
    path = one.files[0].lower()
    return wanted in (one.tag.lower(), path, path.rpartition("/")[2], path.removesuffix(".gguf"))


def _ends(one: Quantised, wanted: str) -> bool:
    """As UD-Q4_K_XL is meant by Q4_K_XL."""
    return one.tag.lower().endswith(f"-{wanted}")


def _tag(stem: str) -> str:
    words = [word for word in re.split(r"(?<!UD)[-./]", stem, flags=re.IGNORECASE) if _TAG.fullmatch(word)]
    return words[-1].upper() if words else stem.rpartition("/")[2]
