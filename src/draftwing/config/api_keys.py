"""The keys of a server's clients: from `--api-key`, `--admin-api-key` and `--api-key-file`."""

from __future__ import annotations

import logging
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from draftwing.config.options import Options
from draftwing.errors import ConfigError

logger = logging.getLogger(__name__)
_OTHERS = 0o077  # permissions of everyone but a file's owner


@dataclass(frozen=True)
class ApiKey:
    """A client's key.

    name: by which logs know the client, and by which its requests take turns.  admin: whether it may use the
    endpoints that concern other clients' requests.  Limits are for each minute; None is no limit.  max_priority: the
    highest `priority` that its requests may have; None is no limit.  learn: whether `--learn` keeps its requests.
    """

    name: str
    key: str = field(repr=False)
    admin: bool = False
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_priority: int | None = None
    learn: bool = True


def read_keys(options: Options) -> tuple[ApiKey, ...]:
    """Returns all keys that clients may have; none where everyone may use the server. Raises ConfigError."""
    keys: list[ApiKey] = []
    if options.api_key_file is not None:
        if options.api_key is not None:
            raise ConfigError("api_key and api_key_file exclude each other; put the key into the file")
        keys = _from_file(Path(options.api_key_file).expanduser())
    elif options.api_key is not None:
        keys = [ApiKey("api_key", options.api_key, admin=options.admin_api_key is None)]
    if options.admin_api_key is not None:
        keys.append(ApiKey("admin_api_key", options.admin_api_key, admin=True))
    for i, one in enumerate(keys):
        twin = next((other for other in keys[:i] if other.key == one.key), None)
        if twin is not None:
            raise ConfigError(f"the keys of {twin.name!r} and {one.name!r} are the same; each needs its own")
    return tuple(keys)


def _from_file(path: Path) -> list[ApiKey]:
    try:
        others = path.stat().st_mode & _OTHERS
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"api_key_file {str(path)!r} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key_file {str(path)!r} is not valid TOML: {error}") from None
    if others:
        logger.warning("--api-key-file: %s is not its owner's alone: chmod 600 %s", path, path)
    if not tables:
        raise ConfigError(f"api_key_file {str(path)!r} has no key; expected a table for each, as [name] and key = ...")
    return [_from_table(f"api_key_file {str(path)!r}: [{name}]", name, table) for name, table in tables.items()]


def _from_table(where: str, name: str, table: Any) -> ApiKey:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} must be a table with a key; found {type(table).__name__}")
    known = [one.name for one in fields(ApiKey) if one.name != "name"]
    for setting, value in table.items():
        if setting not in known:
            raise ConfigError(f"{where} has an unknown setting {setting!r}; expected {', '.join(known)}")
        kind: Any = {"key": str, "admin": bool, "learn": bool}.get(setting, int)
        minimum = -math.inf if setting == "max_priority" else 1
        if type(value) is not kind or (kind is int and value < minimum):
            number = "a whole number" + (" of at least 1" if minimum == 1 else "")
            expected = {str: "a text", bool: "true or false", int: number}[kind]
            found = "another type" if setting == "key" else repr(value)  # a key is in no message
            raise ConfigError(f"{where} {setting} must be {expected}; found {found}")
    key = table.get("key", "")
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{where} key must be a text of visible ASCII characters, which a header can hold")
    return ApiKey(name, **{"max_priority": 0, **table})  # or every client would have the highest
