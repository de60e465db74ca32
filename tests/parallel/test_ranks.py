"""What passes between ranks, and which part of a checkpoint each of them reads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from plain_attention import FunctionAttend
from reference.checkpoints import llama_target, qwen2_target
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from thread_ranks import meet
from tiny_gguf import causal
from tiny_gguf import write as write_gguf
from torch import Tensor

from draftwing.errors import CheckpointError, ConfigError, DraftwingError
from draftwing.layers.attention import AttentionConfig
from draftwing.layers.config import LayerConfig
from draftwing.layers.linear_ops.blocks import BlockFormat
from draftwing.layers.linear_ops.parallel import joined
from draftwing.models.config import ModelConfig
from draftwing.models.loader import load_model
from draftwing.ops import make_ops
from draftwing.ops.gemm.stored import BlockRows, QuantizedRows
from draftwing.ops.peer_sums.memory import NoPeers, PeerMemory
from draftwing.ops.table import PLAIN
from draftwing.parallel import group
from draftwing.parallel.columns import Columns, every_rank
from draftwing.parallel.cut import Cut
from draftwing.parallel.group import Group, Rendezvous
from draftwing.parallel.ranks import ALONE, Absent, Ranks, Share

CPU = torch.device("cpu")


def on_all(function: Callable[[Ranks], Any], size: int = 2) -> list[Any]:
    """What a function gives on each rank, each in a thread of its own."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(function, meet(size)))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_taken_in_the_order_of_the_ranks_and_rounded_once(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    parts = torch.randn(size, 5, 8, generator=generator).to(dtype)
    bias, residual = torch.randn(8, generator=generator).to(dtype), torch.randn(5, 8, generator=generator).to(dtype)
    found = on_all(lambda ranks: ranks.sum_rows(parts[ranks.rank], bias, residual), size)
    found += on_all(lambda ranks: ranks.sum_in_shares(parts[ranks.rank], bias, residual, PLAIN), size)
    expected = parts[0].float()
    for part in parts[1:]:
        expected = expected + part.float()
    expected = (expected + bias.float() + residual.float()).to(dtype)
    assert all(torch.equal(one, expected) for one in found)


@pytest.mark.parametrize(("whole", "size"), [(12, 3), (13, 4), (5, 4), (7, 2)])
def test_columns_are_joined_whatever_their_number(whole: int, size: int) -> None:
    x = torch.arange(3 * whole).view(3, whole)

    def join(ranks: Ranks) -> Tensor:
        share, columns = ranks.share(whole), Columns.of_shares([each.share(whole) for each in every_rank(ranks)])
        return joined(ranks, x[:, share.start : share.start + share.size], columns, PLAIN)

    assert all(torch.equal(found, x) for found in on_all(join, size))


def test_the_least_of_all_and_the_first() -> None:
    assert on_all(lambda ranks: ranks.least(10 - ranks.rank), 3) == [8, 8, 8]
    assert on_all(lambda ranks: ranks.first(2**62 + ranks.rank), 3) == [2**62] * 3
    assert ALONE.least(5) == ALONE.first(5) == Absent(4).first(5) == 5 and Absent(4).gather(torch.ones(2, 3)).shape == (
        4, 2, 3,
    )  # fmt: skip


def test_ranks_meet_where_no_other_machine_can_reach_them() -> None:
    tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    if not all(table.exists() for table in tables):
        pytest.skip("Linux tells by which addresses a port is reached")
    meeting = Rendezvous()
    port = f":{meeting.port:04X}"
    listening = [
        words[1]
        for table in tables
        for words in map(str.split, table.read_text().splitlines())
        if words[1].endswith(port) and words[3] == "0A"
    ]
    assert listening == [f"0100007F{port}"]


def test_no_port_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(*args: Any) -> None:
        raise OSError("Address already in use")

    monkeypatch.setattr("socket.create_server", taken)
    with pytest.raises(ConfigError, match=r"no port of 127\.0\.0\.1 is free .*: Address already in use"):
        Rendezvous()


def late(limit: timedelta, monkeypatch: pytest.MonkeyPatch) -> Group:
    """Rank 0 of two, of which the other never comes."""
    monkeypatch.setattr(group, "PATIENCE", limit)
    return Rendezvous().join(2, CPU)


def test_a_rank_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DraftwingError, match=r"expected all 2 ranks .* found none of 1: loading takes longer there"):
        late(timedelta(0), monkeypatch).exchange(b"")


def test_a_device_that_is_lost_does_not_keep_a_rank_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = late(timedelta(minutes=1), monkeypatch)

    class Lost:
        def release(self) -> None:
            raise RuntimeError("an illegal memory access")

    aborted = threading.Event()
    ranks._peers, ranks._backend = cast(Any, Lost()), "NCCL"
    ranks.__dict__["_group"] = SimpleNamespace(abort=aborted.set)
    ranks.release()
    assert aborted.is_set()


def test_ranks_without_a_driver_do_without_peer_memory() -> None:
    missing = patch("ctypes.CDLL", side_effect=OSError("libcuda.so.1: no such file"))
    with missing, pytest.raises(NoPeers, match="the driver's library cannot be loaded: libcuda"):
        PeerMemory(64, 0, 2, lambda mine: [mine, b""], CPU)


def test_variables_are_set_for_nccl_while_there_is_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in group.NCCL_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    found: dict[str, str] = {}
    monkeypatch.setattr(group, "make_group", lambda *args: found.update(os.environ) or SimpleNamespace(shutdown=int))
    ranks = Rendezvous().join(1, CPU)
    ranks._backend = "NCCL"
    assert ranks._group and found["NCCL_SOCKET_IFNAME"] == "lo" and found["NCCL_NVLS_ENABLE"] == "1"
    ranks.close()
    assert "NCCL_SOCKET_IFNAME" not in os.environ and os.environ["NCCL_NVLS_ENABLE"] == "1"


def test_what_cannot_be_spread() -> None:
    attention = AttentionConfig(heads=6, kv_heads=2, head_dim=8)
    layer = LayerConfig(64, attention, ffn=96)
    assert layer.spread(ALONE) is layer
    half = layer.spread(Absent(2))
    assert half.mixer == AttentionConfig(3, 1, 8) and half.ffn == 48
    assert replace(attention, heads=8).spread(Absent(4)).kv_heads == 1  # a head on two ranks
    with pytest.raises(ConfigError, match="--tp-size 8: expected at most 6, a rank for each of the model"):
        layer.spread(Absent(8))
    with pytest.raises(ConfigError, match=r"6 attention heads, over all of which it has norms, .* key/value heads"):
        replace(attention, qk_norm=True, whole_norms=True).spread(Absent(4))
    with pytest.raises(ConfigError, match=r"--tp-size 3: .*intermediate size of 98"):
        LayerConfig(64, replace(attention, kv_heads=3), ffn=98).spread(Absent(3))
    odd = LayerConfig(64, attention, ffn=95)
    with pytest.raises(ConfigError, match="intermediate size of 95"):  # whichever layer it is of
        ModelConfig("", 64, 8, 8, (layer, odd)).spread(Absent(2))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("make", [llama_target, qwen2_target])
def test_logits_of_shares_are_those_of_the_whole(make: Any, size: int, tmp_path: Path) -> None:
    """With biases, a vocabulary that is no multiple of the ranks, and key/value heads on several of them."""
    folder = make(3, vocab_size=61).write(tmp_path)
    whole, ops = load_model(folder, torch.float32, CPU), make_ops(CPU)
    whole.pack(ops)
    ids, positions = torch.randint(0, 61, (9,)), torch.arange(9)

    @torch.inference_mode()
    def run(model: Any) -> Tensor:
        hidden, _ = model(ids, positions, FunctionAttend(causal))
        chosen = torch.tensor([[0, 60, 31]]).expand(9, 3)
        return torch.cat((model.logits(hidden), model.exact_logits(hidden, chosen)), 1)

    expected = run(whole)

    def share(ranks: Ranks) -> Tensor:
        model = load_model(folder, torch.float32, CPU, ranks=ranks)
        model.pack(ops)
        return run(model)

    found = on_all(share, size)
    assert all(torch.equal(one, found[0]) for one in found[1:])
    torch.testing.assert_close(found[0], expected, atol=1e-5, rtol=1e-5)


def test_a_rank_reads_its_share_of_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = llama_target(1).write(tmp_path)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    read = []
    real = Cut.read

    def spy(self: Cut, name: str, stored: Any) -> Tensor:
        read.append(real(self, name, stored))
        return read[-1]

    monkeypatch.setattr(Cut, "read", spy)
    model = load_model(folder, torch.float32, CPU, ranks=Absent(4, 1))
    assert sum(part.nbytes for part in read) < 0.3 * size  # one of two key/value heads is half of them
    with safe_open(str(folder / "model.safetensors"), "pt") as file:
        o = file.get_tensor("model.layers.1.self_attn.o_proj.weight")
        k = file.get_tensor("model.layers.1.self_attn.k_proj.weight")
    assert torch.equal(model.layers[1].mixer.o.weight, o[:, 8:16])
    assert torch.equal(model.layers[1].mixer.qkv.weight[8:16], k[:8])  # the first head, of ranks 0 and 1


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_a_gguf_file_is_spread(arch: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", arch)
    whole = load_model(file, torch.float32, CPU)
    lower, upper = (load_model(file, torch.float32, CPU, ranks=Absent(2, rank)) for rank in range(2))
    for part in ("mixer.o", "mlp.down"):
        shares = [model.get_submodule(f"layers.0.{part}").weight for model in (lower, upper)]
        assert torch.equal(torch.cat(shares, 1), whole.get_submodule(f"layers.0.{part}").weight)
    q, k, v = whole.layers[0].mixer.qkv.weight.split([64, 32, 32])
    assert torch.equal(upper.layers[0].mixer.qkv.weight, torch.cat((q[32:], k[16:], v[16:])))
    assert torch.equal(torch.cat((lower.lm_head.weight, upper.lm_head.weight)), whole.lm_head.weight)


def test_a_gguf_file_in_blocks_that_are_too_large(tmp_path: Path) -> None:
    ops = make_ops(CPU)
    if "Q8_0" not in ops.block_kinds:
        pytest.skip("there is no GEMM for blocks")
    file, form = write_gguf(tmp_path / "model.gguf", "llama", Type.Q8_0), BlockFormat("Q8_0", ops)
    shares = [load_model(file, torch.float32, CPU, weight_format=form, ranks=Absent(2, rank)) for rank in range(2)]
    assert [share.layers[0].mlp.down.in_features for share in shares] == [64, 32]  # three blocks
    with pytest.raises(CheckpointError, match="columns in Q8_0 is no whole number of blocks of 32"):
        load_model(file, torch.float32, CPU, weight_format=form, ranks=Absent(4))


# Groups of 32 and 24 columns of 96, of which a rank's share of 48 begins inside one; blocks of fp8, and one scale.
@pytest.mark.parametrize(
    ("tall", "wide", "zeros"), [(1, 32, True), (1, 24, False), (1, 96, False), (16, 16, False), (64, 96, False)]
)
def test_quantised_matrices_are_cut_to_the_bit(tall: int, wide: int, zeros: bool) -> None:
    generator = torch.Generator().manual_seed(wide)
    shape = -(-64 // tall), -(-96 // wide)
    codes = torch.randint(-8, 8, (64, 96), dtype=torch.int8, generator=generator)
    points = torch.randint(-8, 8, shape, dtype=torch.int16, generator=generator) if zeros else None
    rows = QuantizedRows(codes, 4, torch.rand(shape, generator=generator), points, tall, wide, None)
    whole = rows.dense(torch.float32)
    for rank in range(2):
        for axis, size in ((0, 64), (1, 96)):
            share = Share(rank * size // 2, size // 2, size)
            part = Cut(axis, share).of("x", rows)
            assert isinstance(part, QuantizedRows)
            assert torch.equal(part.dense(torch.float32), whole.narrow(axis, share.start, share.size))
    ordered = rows._replace(group_of=torch.randperm(96, generator=generator) // wide)
    part = Cut(1, Share(48, 48, 96)).of("x", ordered)
    assert isinstance(part, QuantizedRows)
    assert torch.equal(part.dense(torch.float32), ordered.dense(torch.float32)[:, 48:])


def test_quantised_checkpoints_are_spread(tmp_path: Path) -> None:
    quantised = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
    folder = llama_target(1, quantization_config=quantised).write(tmp_path)
    tensors = {}
    for name, value in load_file(folder / "model.safetensors").items():
        tensors[name] = value
        if name.endswith("proj.weight"):
            tensors[name] = value.to(torch.float8_e4m3fn)
            down, across = (-(-size // 16) for size in value.shape)
            tensors[f"{name}_scale_inv"] = torch.linspace(0.5, 2.0, down * across).view(down, across)
    save_file(tensors, folder / "model.safetensors")
    whole = load_model(folder, torch.float32, CPU)
    shares = [load_model(folder, torch.float32, CPU, ranks=Absent(2, rank)) for rank in range(2)]
    layer = whole.layers[0]
    halves = [share.layers[0].mixer.o.weight for share in shares]
    assert torch.equal(torch.cat(halves, 1), layer.mixer.o.weight)
    halves = [share.layers[0].mlp.gate_up.weight.chunk(2) for share in shares]
    assert torch.equal(torch.cat([half[0] for half in halves] + [half[1] for half in halves]), layer.mlp.gate_up.weight)


def test_blocks_are_cut_where_they_end() -> None:
    data = torch.arange(4 * 2 * 34, dtype=torch.int64).to(torch.uint8).view(4, 68)  # 64 columns in Q8_0
    rows = BlockRows("Q8_0", data, 64)
    right = Cut(1, Share(32, 32, 64)).of("x", rows)
    assert isinstance(right, BlockRows) and right.columns == 32 and torch.equal(right.data, data[:, 34:])
    lower = Cut(0, Share(2, 2, 4)).of("x", rows)
    assert isinstance(lower, BlockRows) and torch.equal(lower.data, data[2:])
    with pytest.raises(CheckpointError, match="no whole number of blocks of 32"):
        Cut(1, Share(0, 16, 64)).of("x", rows)
    with pytest.raises(CheckpointError, match=r"x: expected 8 in axis 0, found shape \[4, 64\]"):
        Cut(0, Share(0, 4, 8)).of("x", rows)
