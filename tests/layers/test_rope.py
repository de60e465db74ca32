from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftwing.layers.rope import Rope, RopeConfig, cos_sin, inverse_frequencies, rope_table
from draftwing.ops import make_ops
from draftwing.ops.rope.spec import rotate


def test_rotate_turns_each_pair_by_its_angle() -> None:
    torch.manual_seed(0)
    config = RopeConfig(theta=10000.0)
    x = torch.randn(6, 3, 8, dtype=torch.float64)
    positions = torch.tensor([0, 1, 2, 17, 100, 511])
    cos, sin = rope_table(config, 8, 512, torch.float64, "cpu")[positions].unsqueeze(2).unbind(1)
    found = rotate(x, cos, sin)
    pairs = torch.complex(x[..., :4], x[..., 4:])
    angles = torch.tensor([[p * 10000.0 ** (-2 * i / 8) for i in range(4)] for p in positions.tolist()])
    turned = pairs * torch.polar(torch.ones_like(angles), angles).to(torch.complex128)[:, None]
    torch.testing.assert_close(found, torch.cat((turned.real, turned.imag), -1), atol=1e-4, rtol=1e-5)


def test_scores_depend_on_the_distance_only() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 16), torch.randn(1, 1, 16)
    cos, sin = rope_table(RopeConfig(), 16, 64, torch.float32, "cpu").unsqueeze(2).unbind(1)

    def score(i: int, j: int) -> float:
        return (rotate(q, cos[i, None], sin[i, None]) * rotate(k, cos[j, None], sin[j, None])).sum().item()

    assert math.isclose(score(9, 4), score(55, 50), abs_tol=1e-4)
    assert not math.isclose(score(9, 4), score(9, 5), abs_tol=1e-4)


def test_llama3_keeps_short_and_divides_long_wavelengths() -> None:
    config = RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)
    plain, scaled = inverse_frequencies(RopeConfig(500000.0), 128), inverse_frequencies(config, 128)
    wavelength = 2 * math.pi / plain
    short, long = wavelength < 8192 / 4, wavelength > 8192
    assert (plain[short] == scaled[short]).all()
    np.testing.assert_allclose(plain[long] / 8, scaled[long], rtol=1e-6)
    between = ~short & ~long
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()


def test_divisors_divide_each_frequency() -> None:
    config = RopeConfig(divisors=(1.0, 2.0, 4.0, 8.0))
    np.testing.assert_allclose(inverse_frequencies(RopeConfig(), 8) / inverse_frequencies(config, 8), [1, 2, 4, 8])


def test_cosine_and_sine_are_rounded_once() -> None:
    rng = np.random.default_rng(0)
    angle = np.concatenate((np.arange(4096), rng.uniform(0, 1 << 20, 4096), rng.uniform(0, 4, 4096))).astype(np.float32)
    for found, function in zip(cos_sin(angle), (np.cos, np.sin), strict=True):
        exact = function(angle.astype(np.float64))
        assert (np.abs(found - exact) <= 0.5001 * np.spacing(np.abs(found))).all()


def test_tables_have_the_bits_that_they_have_on_other_machines() -> None:
    """On every one: of a model that decodes as before, these stay."""
    config = RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)
    table = rope_table(config, 128, 3000, torch.float32, "cpu")
    assert (
        hashlib.sha256(table.numpy().tobytes()).hexdigest()
        == "a66ac8baee81212ae88cc763a5aa49131932c630d8b576bba1ed47ed5087a2bd"
    )


@pytest.mark.parametrize("scaled", [{}, {"query_beta": 0.1, "query_shift": 3, "original_max_positions": 100}])
@pytest.mark.parametrize("positions", [1, 256, 3000])
def test_without_data_no_angle_is_computed(
    scaled: dict[str, float], positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a shorter table is the beginning of a longer one."""
    config = RopeConfig(**scaled)  # type: ignore[arg-type]
    table, longer = (rope_table(config, 32, count, torch.bfloat16, "cpu") for count in (positions, 3001))
    assert torch.equal(table, longer[:positions])
    monkeypatch.setattr("draftwing.layers.rope.cos_sin", None)
    empty = rope_table(config, 32, positions, torch.bfloat16, "meta")
    assert empty.is_meta and empty.shape == table.shape and empty.dtype == table.dtype


@pytest.mark.slow
@pytest.mark.parametrize(("fast", "slow"), [(32.0, 1.0), (400.0, 1.0), (32.0, 1e-4)])
def test_yarn_equals_transformers_where_its_ramp_leaves_the_pairs(fast: float, slow: float) -> None:
    given = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": fast, "beta_slow": slow}
    config = transformers.LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=2048,
        rope_parameters={**given, "original_max_position_embeddings": 512},
    )  # fmt: skip
    expected, _ = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    ours = RopeConfig(1e4, "yarn", 4.0, original_max_positions=512, beta_fast=fast, beta_slow=slow)
    torch.testing.assert_close(torch.from_numpy(inverse_frequencies(ours, 64)), expected, rtol=1e-5, atol=0)


def test_positions_in_three_axes_that_are_alike_are_those_of_text() -> None:
    """To the bit; else each pair has the position of its axis, the pairs in turn as long as a section has some."""
    rope, ops = Rope(RopeConfig(dims=8, sections=(2, 1, 1)), 16, torch.bfloat16), make_ops(torch.device("cpu"))
    rope.make(64, torch.bfloat16, "cpu")
    axes = torch.tensor([[3, 9, 63], [3, 9, 11], [3, 9, 50]])
    plain, found = rope(axes[0], ops), rope(axes, ops)
    for part, whole in zip(found, plain, strict=True):
        assert part.shape == whole.shape == (3, 1, 16) and torch.equal(part[:2], whole[:2])
        chosen = torch.cat(
            [rope.table[place, :, [i, i + 8]] for i, place in enumerate([63, 11, 50, 63, 63, 63, 63, 63])], 1
        )
    cos, sin = chosen[:, [*range(0, 16, 2), *range(1, 16, 2)]]
    assert torch.equal(found[0][2, 0], cos) and torch.equal(found[1][2, 0], sin)
