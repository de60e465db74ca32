"""Models whose layers differ: where their entries lie in the pool, their tensors' names, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layer_kinds import ATTENTION, HIDDEN, KINDS, MIXED, READS_0, SHARED, RecurrenceConfig, config_of, dense_logits

from draftwing.engine.devices import pick_device
from draftwing.errors import CheckpointError, ConfigError
from draftwing.kv.pool import KVPool, KVSpec, StateSpec
from draftwing.layers.attention import AttentionConfig
from draftwing.layers.rope import RopeConfig
from draftwing.models.config import pool_layers
from draftwing.models.decoder import DecoderModel
from draftwing.models.loader import fill_parameters
from draftwing.models.weight_map import checkpoint_names, stored_tensors
from draftwing.parallel.ranks import Absent
from draftwing.train.capture import FeatureModel

CPU = torch.device("cpu")


def test_where_entries_lie() -> None:
    nothing = replace(RecurrenceConfig(32))
    object.__setattr__(nothing, "keeps", lambda: None)
    layers = config_of((ATTENTION, nothing, MIXED[1], READS_0, ATTENTION)).layers
    assert pool_layers(layers) == [0, None, 1, 0, 2]
    model = DecoderModel(config_of(SHARED), torch.float32, "meta")
    assert model.kv_layers == [KVSpec(2, 16), KVSpec(4, 32), KVSpec(1, 32)] and model.pool_owners == [0, 1, 3]


@pytest.mark.parametrize(
    "mixers",
    [
        (READS_0,), (ATTENTION, replace(READS_0, kv_from=1)), (ATTENTION, replace(READS_0, kv_from=2), ATTENTION),
        (ATTENTION, replace(READS_0, kv_heads=4)), (ATTENTION, READS_0, replace(READS_0, kv_from=1)),
        (RecurrenceConfig(32), READS_0),
    ],
    ids=["nothing before", "itself", "a later one", "of another size", "one that has none", "another kind"],
)  # fmt: skip
def test_only_what_there_is_can_be_read(mixers: tuple[AttentionConfig, ...]) -> None:
    with pytest.raises(CheckpointError, match="reads what layer"):
        config_of(mixers)


def test_sizes_of_every_layer_are_checked() -> None:
    for odd in (replace(ATTENTION, heads=3), replace(ATTENTION, head_dim=15), replace(ATTENTION, kv_heads=0)):
        with pytest.raises(CheckpointError):
            config_of((ATTENTION, odd))
    divided = RopeConfig(divisors=(1.0,) * 8)  # of heads of 16
    with pytest.raises(CheckpointError, match="expected 16 rope frequency factors, found 8"):
        replace(config_of((ATTENTION, replace(MIXED[3], rope=0))), ropes=(divided,))


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_go_out_and_come_back(kind: str) -> None:
    config = config_of(KINDS[kind])
    model, other = DecoderModel(config, torch.float32, "cpu"), DecoderModel(config, torch.float32, "meta")
    for i, param in enumerate(model.parameters()):
        param.data.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(i)))
    stored = {name: tensor.clone() for name, tensor in stored_tensors(model, checkpoint_names(config))}
    fill_parameters(other, checkpoint_names(config), stored.items(), "cpu")
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    matrices = sum(tensor.numel() for name, tensor in stored.items() if tensor.dim() == 2)
    assert config.matrix_weights == matrices
    if kind == "shared":
        assert not any(f"model.layers.2.self_attn.{x}_proj.weight" in stored for x in "kv")
        assert stored["model.layers.4.self_attn.q_proj.weight"].shape == (4 * 32, HIDDEN)
    if kind == "recurrent":
        assert stored["model.layers.3.recurrence.in_proj.weight"].shape == (64, HIDDEN)


def test_the_pool_holds_states_beside_keys() -> None:
    specs = [KVSpec(2, 16), StateSpec((3, 5), torch.float32), StateSpec((7,), torch.int64)]
    pool = KVPool(specs, 9, torch.bfloat16, CPU)
    assert [(kv.shape, kv.dtype) for kv in pool.kv[1:]] == [((10, 3, 5), torch.float32), ((10, 7), torch.int64)]
    assert KVPool.bytes_per_slot(specs, torch.bfloat16) == 2 * 2 * 16 * 2 + 15 * 4 + 7 * 8
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        pool = KVPool(specs, 9, dtype, CPU)
        for kv in pool.kv[1:]:
            kv.fill_(3)
        pool.clear(torch.tensor([4, 8]))
        assert all(kv[[4, 8]].eq(0).all() and kv[[1, 9]].eq(3).all() for kv in pool.kv[1:])


def test_what_cannot_be_spread_is_refused() -> None:
    with pytest.raises(ConfigError, match="--tp-size 2"):
        config_of(KINDS["recurrent"]).spread(Absent(2))
    halves = config_of(MIXED[:2]).spread(Absent(2))
    assert [layer.mixer.keeps() for layer in halves] == [KVSpec(1, 16), KVSpec(2, 32)]


@pytest.mark.parametrize("kind", ["mixed", "shared"])
@torch.no_grad()
def test_training_sees_the_same_layers(kind: str) -> None:
    """Over whole sequences, without a pool."""
    model, generator = DecoderModel(config_of(KINDS[kind]), torch.float64, "cpu"), torch.Generator().manual_seed(2)
    for param in model.parameters():
        param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64) * 0.2 + (param.dim() == 1))
    features, ids = FeatureModel(model, (model.final_aux_layer,), pick_device("cpu")), torch.arange(11) * 7 % 48
    model.set_max_positions(16)
    found = model.logits(features.batch([ids])[0][1])
    torch.testing.assert_close(found, dense_logits(model, ids.tolist()), rtol=1e-9, atol=1e-9)
