"""What an engine runs on, and why so: devices, the links between them, how ranks sum. For the log and /server_info."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Any

from draftwing.engine.device import Device
from draftwing.parallel.ranks import Ranks


def capability(device: Device, ranks: Ranks) -> dict[str, Any]:
    """ranks: how many; devices: that of each rank; links: between them; sums: how partial sums are taken, and why."""
    found: dict[str, Any] = {"ranks": ranks.size, "devices": device.names(ranks.size)}
    if ranks.size == 1:
        return found | {"why": "--tp-size 1: the model is on one device"}
    why = f"--tp-size {ranks.size}: every rank has a share of each layer's heads, of its MLP and of the vocabulary"
    return found | {"links": device.links(ranks.size) or nvlink(ranks.size), "sums": ranks.title, "why": why}


def nvlink(size: int) -> str:
    """The links between the first GPUs in the words of nvidia-smi, such as NV18 or PIX; "unknown" without it."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return "unknown"
    try:
        done = subprocess.run([command, "topo", "-m"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return links_of(done.stdout, size)


def links_of(table: str, size: int) -> str:
    """table: of `nvidia-smi topo -m`."""
    rows = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", table).splitlines()]
    gpus = [row[1 : size + 1] for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) and len(row) > size]
    kinds = {kind for row in gpus[:size] for kind in row if kind != "X" and not kind.startswith("GPU")}
    return ", ".join(sorted(kinds)) or "unknown"


def in_words(found: dict[str, Any]) -> str:
    """One line for the log."""
    devices = ", ".join(sorted(set(found["devices"])))
    return f"{found['ranks']} ranks on {devices}; links {found['links']}; sums: {found['sums']}"
