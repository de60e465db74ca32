"""Which state slots rows have on the device, and what of them takes memory."""

from __future__ import annotations

import torch

from draftwing.kv.pool import DeltaSpec, KVSpec, RowStates, record_bytes, state_bytes

LAYERS = (KVSpec(2, 16), DeltaSpec(2, 4, 16, 8, 4), DeltaSpec(1, 1, 32, 16, 3))
CPU = torch.device("cpu")


def made(slots: int = 6, rows: int = 2, nodes: int = 3) -> RowStates:
    states = RowStates.of(LAYERS, slots, rows, nodes, torch.bfloat16, CPU)
    assert states is not None
    return states


def test_there_are_none_without_recurrent_layers() -> None:
    assert RowStates.of(LAYERS[:1], 6, 2, 3, torch.bfloat16, CPU) is None
    assert state_bytes(LAYERS[:1], torch.bfloat16) == 0 == record_bytes(LAYERS[:1], 2, 3, torch.bfloat16)


def test_sizes_are_those_of_the_tensors() -> None:
    states = made()
    assert list(states.layers) == [1, 2]
    kept = sum(layer.state.nbytes + layer.conv.nbytes for layer in states.layers.values())
    records = sum(layer.inputs.nbytes + layer.gates.nbytes for layer in states.layers.values())
    assert kept == (6 + 2) * state_bytes(LAYERS, torch.bfloat16)
    assert records == record_bytes(LAYERS, 2, 3, torch.bfloat16)


def test_a_node_at_the_sizes_of_27b_takes_less_than_1_1_mb() -> None:
    layers = [DeltaSpec(16, 48, 128, 128, 4)] * 48
    assert record_bytes(layers, 0, 1, torch.bfloat16) / 2 < 1.1e6 < state_bytes(layers, torch.bfloat16) / 100


def test_what_a_row_is_given_and_what_it_makes_of_it() -> None:
    states = made()
    assert states.read.tolist() == states.write.tolist() == [7, 7, 7], "rows without slots have the dummy's"
    states.set(torch.tensor([[1, 0, 4, 0]]))
    states.node_slots[:] = 9
    states.advance(torch.tensor([1, 2]), torch.tensor([5, 1]))
    states.set(torch.tensor([[1, -1, 3, -1]]))
    assert states.read.tolist() == [7, 4, 7] and states.write.tolist() == [7, 3, 7]
    assert states.length.tolist() == [0, 5, 1] and states.page.tolist() == [0, 1, 1]
    cleared = (states.node_slots == 0).all(2).tolist()
    assert cleared == [[False, False], [False, True], [False, True]], "the page that is written next"
    states.advance(torch.tensor([1]), torch.tensor([6]))
    assert (int(states.read[1]), int(states.write[1]), int(states.page[1])) == (3, 4, 0)
