"""What adapters add to a product, left to the kernels that read it next: the same hidden states, without a kernel for
each matrix."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from decoder_configs import decoder_config
from engine_rig import model_of
from torch import Tensor

from draftwing.kv.pool import KVPool
from draftwing.ops.adapters.spec import AdapterWeights
from draftwing.ops.attention.batch import Batch
from draftwing.ops.table import TorchOps


def hidden_states(ops: TorchOps, late: int, slots: list[int], called: Counter[str], **changes: Any) -> list[Tensor]:
    """Returns those of two forwards of a token a row, the last and some between layers. late: rows of `adds_late`."""
    shape = {"hidden_size": 1024, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "ffn_size": 64, "vocab_size": 48}
    model = model_of(decoder_config(3, max_positions=16, **shape | changes), device=ops.device.type)
    model.pack(ops, deterministic=True)
    model.set_max_positions(16)
    generator, weights = torch.Generator().manual_seed(1), {}
    for name, linear in model.adaptable().items():
        ends = [64, 128] if name.endswith("gate_up") else [128, 192, 256] if name.endswith("qkv") else [1024]
        own = AdapterWeights.empty(2, 4, linear.in_features, ends, torch.float32, ops.device)
        for part in (own.down, own.up):
            part.copy_(torch.randn(part.shape, generator=generator) / part.shape[-1] ** 0.5)
        own.ranks.fill_(4)
        own.scales.fill_(2.0)
        weights[name] = own
    model.take_adapters(weights, deterministic=True)
    count, found = len(slots), list[Tensor]()
    pool = KVPool(model.kv_layers, 2 * count, torch.float32, ops.device)
    table = torch.arange(1, 2 * count + 1, device=ops.device).view(count, 2)
    at, ones = torch.arange(count, device=ops.device), torch.ones(count, 1, dtype=torch.int64, device=ops.device)
    up, ops.adds_late = ops.adapter_up, late
    ops.adapter_up = lambda *given: (called.update(["up"]), up(*given))[1]
    for step in range(2):
        where, path = at * 0 + step, at.view(count, 1, 1) * 0
        batch = Batch(at, at, where, table[:, step].contiguous(), table, where, path, ones, window=1, bound=2)
        attend = ops.attention(pool, True).bind(batch, 0)
        adapted = torch.tensor(slots, device=ops.device)
        found += [one for one in model(at + 1, where, attend, (1, 4), adapted=adapted) if one is not None]
    ops.adapter_up = up
    return found


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, pytest.param({"qk_norm": True}, marks=pytest.mark.exhaustive)])
def test_hidden_states_are_the_same(changes: dict[str, Any], triton_ops: TorchOps) -> None:
    slots, called = [1, 0, 2], Counter[str]()
    expected = hidden_states(triton_ops, 0, slots, called, **changes)
    assert called.pop("up") == 2 * 3 * 4  # steps, layers, matrices
    found = hidden_states(triton_ops, 64, slots, called, **changes)
    # What the last layer gives, and the first, whose result is wanted, is complete behind the layer.
    assert called["up"] == 2 * 2
    assert all(map(torch.equal, found, expected))
    without = hidden_states(triton_ops, 64, [0, 0, 0], called, **changes)
    assert torch.equal(found[0][1], without[0][1]) and not torch.equal(found[0][0], without[0][0])
