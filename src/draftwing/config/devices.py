"""The devices that `--device` names. Nothing else knows their names.

No torch: a device's class is named here as `module:Class` and imported when a model is loaded.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

from draftwing.errors import ConfigError
from draftwing.plugins import check_class, import_attribute

AUTO = "auto"
DEVICES = {  # `auto` takes the first that is there
    "cuda": "draftwing.engine.devices.cuda:CudaDevice",
    "cpu": "draftwing.engine.devices.cpu:CpuDevice",
}
_ON_HOST = frozenset({"cpu"})  # of these, those that compute in the host's memory
ENTRY_POINTS = "draftwing.devices"  # the group in which installed packages name further ones
_OPTION = "device"


class Defaults(NamedTuple):
    """What options have on a device where they are not given."""

    max_running_requests: int
    chunked_prefill_size: int
    overlap: bool = False  # whether a step is planned while the one before runs
    graph_size: int = 0  # largest batch that graphs are captured of; 0: the device has none
    mixed: bool = False  # whether parts of prompts and requests that decode share a forward


def check_device(asked: str | type[Any]) -> None:
    """Raises ConfigError for a name that no device has. Imports nothing of the device."""
    if isinstance(asked, str) and asked != AUTO and ":" not in asked:
        _path_of(asked)


def on_host(asked: str | type[Any]) -> bool:
    """Returns whether a device computes in the host's memory, as far as files say it; torch is not asked."""
    return asked in _ON_HOST or (asked == AUTO and not Path("/dev/nvidiactl").exists())


def find_device(asked: str | type[Any]) -> type[Any]:
    """Returns the class of the device of this name, not `auto`, or the user's own: `module:Class`, or the class itself.

    Raises ConfigError for a name that no device has, for what cannot be imported, and for a class that is no device.
    """
    found: Any = asked
    if isinstance(asked, str):
        found = import_attribute(asked if ":" in asked else _path_of(asked), _OPTION)
    check_class(found, "Device", ("download", "defaults"), f"{_OPTION} {asked}")
    return found


def _path_of(name: str) -> str:
    if name in DEVICES:  # to look at what is installed takes 15 ms
        return DEVICES[name]
    further = {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}
    if name not in further:
        names = ", ".join((AUTO, *reversed(DEVICES), *sorted(further.keys() - DEVICES)))
        raise ConfigError(f"{_OPTION} must be one of {names}, or module:Class of a device of your own; found {name!r}")
    return further[name]
