"""Which of a server's processes is its engine."""

from __future__ import annotations

from pathlib import Path


def engines(pid: int) -> list[int]:
    """The engine's processes of a server, the oldest first; others render its chat template."""
    found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [child for child in found if b"template_sandbox" not in Path(f"/proc/{child}/cmdline").read_bytes()]
