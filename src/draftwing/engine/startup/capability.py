"""What an engine runs on, and why so: devices, the links between them, how ranks sum. For the log and /server_info."""

from __future__ import annotations

from typing import Any

from draftwing.engine.devices.base import Device
from draftwing.parallel.ranks import Ranks


def capability(device: Device, ranks: Ranks) -> dict[str, Any]:
    """ranks: how many; devices: that of each rank; kernels: what computes there; links: between them; sums: how partial
    sums are taken, and why."""
    devices = device.names(ranks.size)
    found: dict[str, Any] = {"ranks": ranks.size, "devices": devices, "kernels": device.ops.title}
    if ranks.size == 1:
        return found | {"why": "--tp-size 1: the model is on one device"}
    why = f"--tp-size {ranks.size}: every rank has a share of each layer's heads, of its MLP and of the vocabulary"
    return found | {"links": device.links(ranks.size), "sums": ranks.title, "why": why}


def in_words(found: dict[str, Any]) -> str:
    """One line for the log."""
    devices = ", ".join(sorted(set(found["devices"])))
    return f"{found['ranks']} ranks on {devices}; links {found['links']}; sums: {found['sums']}"
