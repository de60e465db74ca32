"""What an engine runs on, and why so: devices, the links between them, how ranks sum. For the log and /server_info."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

from draftwing.engine.devices.base import Device
from draftwing.parallel.ranks import Ranks


def capability(device: Device, ranks: Ranks) -> dict[str, Any]:
    """ranks: how many; devices: that of each rank; links: between them; sums: how partial sums are taken, and why."""
    found: dict[str, Any] = {"ranks": ranks.size, "devices": device.names(ranks.size)}
    if ranks.size == 1:
        return found | {"why": "--tp-size 1: the model is on one device"}
    why = f"--tp-size {ranks.size}: every rank has a share of each layer's heads, of its MLP and of the vocabulary"
    return found | {"links": device.links(ranks.size) or nvlink(ranks.size), "sums": ranks.title, "why": why}


def nvlink(size: int) -> str:
    """The links between the ranks' GPUs in the words of nvidia-smi, such as NV18 or PIX; "unknown" without it."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return "unknown"
    try:
        done = subprocess.run([command, "topo", "-m"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return links_of(done.stdout, range(size))
    numbers = visible.split(",")[:size]
    return links_of(done.stdout, list(map(int, numbers))) if all(map(str.isdecimal, numbers)) else "unknown"


def links_of(table: str, gpus: Sequence[int]) -> str:
    """table: of `nvidia-smi topo -m`.  gpus: as it counts them."""
    lines = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", table).splitlines()]
    rows = {line[0]: line[1:] for line in lines if line and "X" in line}  # "X" is what a GPU has with itself
    known = [gpu for gpu in gpus if f"GPU{gpu}" in rows]
    kinds = {rows[f"GPU{one}"][other] for one in known for other in known if one != other}
    return ", ".join(sorted(kinds)) or "unknown"


def in_words(found: dict[str, Any]) -> str:
    """One line for the log."""
    devices = ", ".join(sorted(set(found["devices"])))
    return f"{found['ranks']} ranks on {devices}; links {found['links']}; sums: {found['sums']}"
