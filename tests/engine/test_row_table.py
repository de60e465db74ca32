"""What the row table brings to the device for a step: what its rows ask for, on a device that is told by the host."""

from __future__ import annotations

import torch
from engine_rig import Rig, greedy, seeded, tiny_model

from draftwing.engine.devices.cpu import CpuDevice
from draftwing.ops.table import TorchOps


def test_who_has_a_row_next_is_sampled_as_it_asks() -> None:
    """One row, whose requests are greedy, sampled, filtered and kept from ending, one after the other: each has the
    text that it has alone."""
    model, device = tiny_model(seed=4), CpuDevice(ops=TorchOps(torch.device("cpu")))
    assert not device.ops.draws_by_row, "there is nothing to be told"
    prompt = [3, 1, 4, 1, 5]

    def texts(*kinds: str) -> dict[str, list[int]]:
        rig = Rig(model, rows=1, lag=1, radix=False, fake_device=device)
        for kind in kinds:
            rig.submit(kind, prompt, asked[kind])
        return rig.run().tokens

    asked = {"greedy": greedy(12), "sampled": seeded(12), "filtered": seeded(12, top_k=2)}
    stop = texts("greedy")["greedy"][3]
    asked |= {
        "ends": greedy(12, stop_token_ids=(stop,)),
        "may not end": greedy(12, stop_token_ids=(stop,), min_new_tokens=9),
    }
    alone = {kind: texts(kind)[kind] for kind in asked}
    assert len(set(map(tuple, alone.values()))) == len(asked) and len(alone["ends"]) == 4 < len(alone["may not end"])
    for order in (list(asked), list(asked)[::-1]):
        assert texts(*order) == alone
