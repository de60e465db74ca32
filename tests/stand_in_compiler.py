"""A compiler that only notes what it is asked for."""

from __future__ import annotations

from pathlib import Path

COMPILER = """#!/bin/sh
case " $* " in *" {refused} "*) exit 1 ;; esac
asked="$*"
while [ "$1" != -o ]; do shift; done
echo "$asked" > "$2"
"""


def stand_in_compiler(folder: Path, refused: str = "-none") -> dict[str, str]:
    """Writes one into a folder -> the environment that has it used. refused: a flag that it does not know."""
    compiler = folder / "cc"
    compiler.write_text(COMPILER.format(refused=refused))
    compiler.chmod(0o755)
    return {"CC": str(compiler), "LDSHARED": f"{compiler} -shared"}
