"""The device that a step runs on. `base` says what a device is; each of the other files is one."""

from __future__ import annotations

from typing import Any

from draftwing.config.devices import AUTO, DEVICES, find_device
from draftwing.engine.devices.base import Device
from draftwing.errors import ConfigError
from draftwing.ops.table import TorchOps


def pick_device(asked: str | type[Any], rank: int = 0, ops: TorchOps | None = None) -> Device:
    """Makes the device that the option `device` names.

    rank: which one, where there are several ranks; ops: other operations than the device's own. Raises ConfigError
    where there is no such device.
    """
    if asked == AUTO:
        asked = next(name for name in DEVICES if not find_device(name).missing())
    kind = find_device(asked)
    missing = kind.missing()
    if missing:
        raise ConfigError(f"--device {asked}: {missing}; use --device cpu or auto")
    return kind(rank, ops)
