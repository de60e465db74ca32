"""The models that one server has: a list in its config file, and those of a folder. No torch.

Each is `ServedModel`: its names, and the options of the server that runs it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftwing.config.adapters import adapter_paths
from draftwing.config.options import Options
from draftwing.errors import ConfigError

_OF_ALL = ("models_dir", "models_cache", "models_max", "models_memory", "batches_dir")
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)", re.ASCII)
_LATER_PART = re.compile(r"-(?!00001-)\d{5}-of-\d{5}$", re.ASCII)  # of a GGUF file in several, but the first
_FIRST_PART = re.compile(r"-00001-of-\d{5}$", re.ASCII)
# Files that are read with a model: what reads images, prediction layers, heads.
_BESIDE_MODEL = re.compile(r"^(mmproj|mtp-)|[-_.](dflash2?|dspark)[-_.]", re.IGNORECASE)


@dataclass(frozen=True)
class ServedModel:
    """names: by which requests ask for it, the main one first.  keep_alive: seconds without a request after which it is
    stopped.  arguments: by `Options.from_kwargs`, of the server that runs it."""

    names: tuple[str, ...]
    keep_alive: float
    arguments: Mapping[str, Any] = field(repr=False)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def model(self) -> str:
        """Returns the file, folder, alias or hub id."""
        return str(self.arguments.get("model", Options.model))

    @property
    def asked(self) -> tuple[str, ...]:
        """Returns all names that a request may have: its own and those of its adapters."""
        return (*self.names, *(one.name for one in adapter_paths(self.arguments.get("lora_modules", ()), self.names)))


def seconds(value: Any, name: str = "keep_alive") -> float:
    """Returns the seconds of Ollama's `keep_alive`: a number of them, or a text such as 5m, 1h30m or 300; a negative
    one is for ever. Raises ConfigError."""
    text = str(value).strip()
    sign, rest = (-1, text[1:]) if text.startswith("-") else (1, text)
    found = None
    if not isinstance(value, bool):
        if re.fullmatch(r"\d+(\.\d+)?", rest, re.ASCII):
            found = float(rest)
        elif re.fullmatch(f"({_DURATION.pattern})+", rest, re.ASCII):
            found = sum(float(number) * _UNITS[unit] for number, unit in _DURATION.findall(rest))
    if found is None:
        raise ConfigError(f"{name} must be seconds, or a time such as 5m or 1h30m, -1 for ever; found {text[:40]!r}")
    return math.inf if sign < 0 and found else found


def read_models(arguments: Mapping[str, Any], tables: Sequence[Mapping[str, Any]]) -> list[ServedModel]:
    """Returns the models that are named: that of the arguments, if they have one, and those of a config file.

    arguments: of the server; each model has them where its table does not say otherwise. Raises ConfigError.
    """
    found = []
    shared = {name: value for name, value in arguments.items() if name != "model"}
    if "model" in arguments:
        names = arguments.get("served_model_name") or (arguments["model"],)
        found.append(served(names, shared | {"model": arguments["model"]}))
    for table in tables:
        own = {name: value for name, value in table.items() if name not in ("name", "aliases")}
        named = (table.get("name", own["model"]), *table.get("aliases", ()))
        found.append(served(named, shared | own))
    return _distinct(found)


def in_folder(arguments: Mapping[str, Any], folder: Path, taken: Sequence[ServedModel]) -> list[ServedModel]:
    """Returns the models in a folder, by name: `.gguf` files, and folders with a config.json or such files. Those that
    are `taken`, by their names or as they lie there, are left out."""
    shared = {name: value for name, value in arguments.items() if name not in ("model", "served_model_name")}
    names = {name for one in taken for name in one.asked}
    places = {Path(one.model).expanduser().absolute() for one in taken}
    found: dict[str, ServedModel] = {}
    for name, path in _entries(folder):
        if name not in names | found.keys() and not {path.absolute(), path.parent.absolute()} & places - {folder}:
            found[name] = served((name,), shared | {"model": str(path)})
    return list(found.values())


def _entries(folder: Path) -> Iterator[tuple[str, Path]]:
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"models_dir {str(folder)!r} cannot be read: {error.strerror}") from None
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.suffix == ".gguf" and entry.is_file():
            if _is_model(entry):
                yield _FIRST_PART.sub("", entry.stem), entry
        elif (entry / "config.json").is_file():
            yield entry.name, entry
        elif entry.is_dir():
            files = [file for file in sorted(entry.glob("*.gguf")) if _is_model(file)]
            for file in files:
                stem = _FIRST_PART.sub("", file.stem)
                yield entry.name if len(files) == 1 else f"{entry.name}/{stem}", file


def _is_model(file: Path) -> bool:
    return not _LATER_PART.search(file.stem) and not _BESIDE_MODEL.search(file.name)


def served(names: Sequence[str], arguments: Mapping[str, Any]) -> ServedModel:
    """Returns a model with these names and the options that it has of these. Raises ConfigError."""
    own = dict(arguments) | {"served_model_name": tuple(names)}
    keep_alive = seconds(own.pop("keep_alive", Options.keep_alive))
    for name in _OF_ALL:
        own.pop(name, None)
    return ServedModel(tuple(names), keep_alive, own)


def _distinct(models: list[ServedModel]) -> list[ServedModel]:
    owners: dict[str, ServedModel] = {}
    for one in models:
        for name in one.asked:
            if name in owners:
                raise ConfigError(f"two models have the name {name!r}; give one of them another one, with name")
            owners[name] = one
    return models
