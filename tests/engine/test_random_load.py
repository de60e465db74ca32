"""Random load on models of each kind of layer, see `random_load`."""

from __future__ import annotations

from typing import Any

import pytest
import random_load
from engine_rig import BLOCKS, RANKS
from layer_kinds import INDEXED, KINDS, MAMBA1, PICKING, RECURRENT, config_of, streams_config

from draftwing.layers.attention import AttentionConfig
from draftwing.layers.latent import LatentAttentionConfig

LATENTS = (
    LatentAttentionConfig(4, 16, 8, 16, 32),
    LatentAttentionConfig(4, 16, 8, 16, 32, query_latent=32),
    LatentAttentionConfig(4, 16, 8, 16, 32, rope=2),  # whose queries are scaled by their position
)
WINDOWS = (AttentionConfig(4, 2, 16, window=6), AttentionConfig(4, 2, 16, window=24, sinks=True))
MIXERS = {
    **KINDS,
    **RECURRENT,
    "latents": LATENTS,
    "windows": WINDOWS,
    "indexed": INDEXED,
    "picking": PICKING,
    "streams": (),
    "mamba1": MAMBA1,
}
SPREAD = ("mixed", "shared", "latents", "indexed", "windows", "mamba1")  # which can be on several ranks


@pytest.mark.slow
@pytest.mark.further(seed=[*range(1, 12)])
@pytest.mark.further(harness=["blocks", "ranks"])
@pytest.mark.further(kind=["mixed", "shared", "recurrent", "convolutions", "indexed", "windows", "picking", "mamba1"])
@pytest.mark.parametrize("harness", ["cpu", BLOCKS, RANKS], indirect=True, scope="session")
@pytest.mark.parametrize("kind", MIXERS)
@pytest.mark.parametrize("seed", range(12))
def test_text_is_that_of_each_alone(
    harness: Any, one_thread: None, kind: str, seed: int, request: pytest.FixtureRequest
) -> None:
    if request.node.callspec.params["harness"] == "ranks" and kind not in SPREAD:
        pytest.skip("these layers are of one rank")
    config = config_of(MIXERS[kind], harness.CONTEXT) if MIXERS[kind] else streams_config(harness.CONTEXT)
    model = harness.model_of(config)
    random_load.check(harness, model, seed * 100 + [*MIXERS].index(kind))
