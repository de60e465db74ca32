"""Scales of keys and values are found under the names that writers give them."""

from __future__ import annotations

import pytest
import torch

from draftwing.errors import CheckpointError
from draftwing.models.quantised.kv_scales import KVScales


def scale(value: float) -> torch.Tensor:
    return torch.tensor([value])


def test_names_of_writers() -> None:
    scales, at = KVScales(), "model.layers.{}.self_attn."
    tensors = {
        at.format(0) + "k_scale": scale(0.5),
        at.format(0) + "v_scale": torch.tensor(0.25, dtype=torch.bfloat16),
        at.format(1) + "kv_scale": scale(2.0),
        at.format(2) + "k_proj.k_scale": scale(3.0),
        at.format(2) + "v_proj.v_scale": scale(4.0),
        at.format(3) + "k_proj.output_scale": scale(5.0),
        at.format(3) + "v_proj.output_scale": scale(6.0),
        at.format(5) + "attn.v_scale": scale(7.0),
    }
    others = {
        at.format(0) + "q_proj.output_scale": scale(9.0),
        at.format(0) + "k_proj.weight": scale(9.0),
        at.format(0) + "k_proj.v_scale": scale(9.0),
        "model.norm.weight": scale(9.0),
    }
    assert not scales
    assert dict(scales.taken({**tensors, **others}.items())) == others
    assert scales
    assert scales.of(range(6)) == [(0.5, 0.25), (2.0, 2.0), (3.0, 4.0), (5.0, 6.0), (1.0, 1.0), (1.0, 7.0)]
    assert KVScales().of(range(2)) == [(1.0, 1.0)] * 2


@pytest.mark.parametrize(
    ("value", "found"), [(scale(0.0), "found 0"), (scale(-1.0), "-1"), (torch.ones(8), r"shape \[8\]"),
                         (scale(torch.inf), "inf"), (scale(torch.nan), "nan")]
)  # fmt: skip
def test_what_is_no_scale(value: torch.Tensor, found: str) -> None:
    """It is an error only for whoever wants it."""
    scales = KVScales()
    assert not list(scales.taken([("model.layers.0.self_attn.k_scale", value)]))
    with pytest.raises(CheckpointError, match=rf"layers.0.self_attn.k_scale: expected one positive number.*{found}"):
        scales.of(range(1))
