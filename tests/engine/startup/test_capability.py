"""What is said of the links between GPUs."""

from __future__ import annotations

from draftwing.engine.startup.capability import links_of

TABLE = """
\t\x1b[4mGPU0\tGPU1\tGPU2\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\tPIX\t0-31
GPU1\tNV18\t X \tNV4\t0-31
GPU2\tPIX\tNV4\t X \t0-31

Legend:

  X    = Self
"""


def test_links_are_those_of_the_ranks() -> None:
    assert links_of(TABLE, range(2)) == "NV18" and links_of(TABLE, [1, 2]) == "NV4"
    assert links_of(TABLE, range(3)) == "NV18, NV4, PIX"
    assert links_of(TABLE, [0, 3]) == "unknown" and links_of("", [0, 1]) == "unknown"
