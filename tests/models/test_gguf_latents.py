"""Matrices of latents in GGUF files, which have them whole, in two parts, or both."""

from __future__ import annotations

import pytest

from draftwing.models.gguf_latents import is_copy

WHOLE, KEYS, VALUES = (f"blk.1.attn_{part}.weight" for part in ("kv_b", "k_b", "v_b"))


@pytest.mark.parametrize(
    ("names", "copied"), [((KEYS, VALUES), True), ((KEYS,), False), ((VALUES,), False), ((), False)]
)
def test_the_whole_matrix_is_left_out_where_both_parts_are(names: tuple[str, ...], copied: bool) -> None:
    file = {WHOLE, *names}
    assert [name for name in sorted(file) if is_copy(name, file)] == [WHOLE] * copied
