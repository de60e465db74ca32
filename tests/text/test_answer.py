"""What JSON has of a log probability."""

from __future__ import annotations

import math

from draftwing.text.answer import finite


def test_minus_infinity_is_a_number_that_json_has() -> None:
    """The one that vLLM's clients know."""
    assert [finite(value) for value in (-math.inf, -20000.0, -9998.5, 0.0)] == [-9999.0, -9999.0, -9998.5, 0.0]
