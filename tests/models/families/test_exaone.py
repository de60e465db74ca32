"""What a config of K-EXAONE says of windows, of its layers and of its prediction layer."""

from __future__ import annotations

from typing import Any

import pytest
from published import published

from draftwing.errors import CheckpointError
from draftwing.layers.attention import AttentionConfig
from draftwing.layers.rope import NOPE
from draftwing.models.config import from_hf

FULL, SLIDING = "full_attention", "sliding_attention"
CONFIG = published("k-exaone-236b-a23b")
WINDOW = CONFIG["sliding_window"]
LISTED = {"sliding_windows": [WINDOW, WINDOW, WINDOW, 0], "mtp_layer_types": [FULL], "mtp_sliding_windows": [0]}


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({}, 0),
        (LISTED, 0),
        ({**LISTED, "sliding_window": ...}, 0),  # without the key
        ({**LISTED, "sliding_windows": [WINDOW] * 3 + [None]}, 0),
        ({"mtp_layer_types": [SLIDING]}, WINDOW),
        ({"mtp_layer_types": [SLIDING], "mtp_sliding_windows": [7]}, 7),
    ],
)
def test_windows(changes: dict[str, Any], window: int) -> None:
    config = from_hf({key: value for key, value in (CONFIG | changes).items() if value is not ...})
    mixers = [layer.mixer for layer in (*config.layers, *config.ahead)]
    for mixer, expected in zip(mixers, (WINDOW, WINDOW, WINDOW, 0, window), strict=True):
        assert isinstance(mixer, AttentionConfig) and mixer.window == expected
        assert (config.ropes[mixer.rope] == NOPE) == (expected == 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_windows": [WINDOW] * 4}, f"sliding_windows: expected by layer_types {WINDOW} for layers with"),
        ({"sliding_windows": [WINDOW, 1, WINDOW, 0]}, "sliding_windows: expected"),
        ({"sliding_windows": WINDOW}, "sliding_windows: expected"),
        ({**LISTED, "sliding_window": None}, "sliding_windows: expected"),
        ({**LISTED, "sliding_windows": [7, 7, 7, 0]}, "sliding_windows: expected"),
        ({"mtp_layer_types": ["linear_attention"]}, "mtp_layer_types = .* is not supported"),
        ({**LISTED, "mtp_sliding_windows": [7]}, "mtp_sliding_windows: expected one window, of a layer of full_att"),
        ({**LISTED, "mtp_layer_types": [SLIDING]}, "mtp_sliding_windows: expected one window, of a layer of sliding"),
        ({**LISTED, "mtp_sliding_windows": "0"}, "mtp_sliding_windows: expected one window"),
    ],
)
def test_windows_that_contradict_each_other(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        from_hf({**CONFIG, **changes})
