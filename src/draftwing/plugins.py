"""Imports what a user names as `module:attribute`, a logits processor, a drafter or a device, and checks classes; and
what an installed package names as an entry point."""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from draftwing.errors import ConfigError


def import_attribute(name: str, option: str) -> Any:
    """Returns the attribute of a module, which is looked for in the working folder, too.

    Raises ConfigError, naming the option, for a name of another form and for what cannot be imported.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ConfigError(f"{option}: expected module:attribute, found {name!r}")
    here = str(Path.cwd())
    added = here not in sys.path and "" not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        value: Any = importlib.import_module(module)
        for part in attribute.split("."):
            value = getattr(value, part)
    except Exception as error:  # whatever importing somebody's module raises
        file, hint = module.partition(".")[0], ""
        if isinstance(error, ModuleNotFoundError) and error.name == file:
            hint = f". Put {file}.py into the working folder, or its folder on PYTHONPATH"
        raise ConfigError(f"{option} {name}: cannot be loaded: {type(error).__name__}: {error}{hint}") from error
    finally:
        if added:
            sys.path.remove(here)
    return value


def import_installed(group: str, name: str) -> None:
    """Imports what installed packages name so in this group of entry points. Raises ConfigError for what cannot be."""
    for point in entry_points(group=group, name=name):
        try:
            point.load()
        except Exception as error:  # whatever importing somebody's module raises
            found = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{group} {name}: {point.value} cannot be loaded: {found}") from error


def check_class(found: Any, base: str, marks: tuple[str, str], option: str) -> None:
    """Raises ConfigError for what is no class derived from draftwing's `base`, which has the attributes `marks` and is
    not imported for this, and for a class that does not define all it has to. option: with the name that was asked."""
    if not (isinstance(found, type) and all(hasattr(found, mark) for mark in marks)):
        what = f"the class {found.__name__}, which is not" if isinstance(found, type) else f"a {type(found).__name__}"
        raise ConfigError(f"{option}: expected a class derived from draftwing.{base}, found {what}")
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise ConfigError(f"{option}: the class has to define {' and '.join(missing)}")
