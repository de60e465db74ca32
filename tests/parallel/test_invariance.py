"""With `Ranks.invariant` any number of ranks gives the bits of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_quantised as tiny
import torch
from gguf import GGMLQuantizationType as Type
from group_ops import Fp8TorchOps, GroupTorchOps
from hybrid_models import on_ranks, reference, saved, tokens, whole_logits
from moe_models import reference as of_experts
from moe_models import write_gguf
from reference.checkpoints import llama_target
from torch import Tensor

from draftwing.errors import CheckpointError, ConfigError
from draftwing.layers.linear_ops.base import WeightFormat
from draftwing.layers.linear_ops.blocks import BlockFormat
from draftwing.layers.linear_ops.dense import DENSE
from draftwing.layers.linear_ops.groups import GroupFormat
from draftwing.models.loader import load_config, load_model
from draftwing.ops import make_ops
from draftwing.parallel.columns import Columns, places
from draftwing.parallel.ranks import Absent, Alone

CPU = torch.device("cpu")
Sizes = dict[str, Any]


def one_alone(folder: Path, ops: Any, ids: Tensor, dtype: torch.dtype, form: WeightFormat = DENSE) -> Tensor:
    model = load_model(folder, dtype, CPU, ranks=Alone(True), weight_format=form)
    model.pack(ops)
    return whole_logits(model, ids)


def uneven(folder: Path) -> Path:
    """12 heads of 6 for keys and values, and three blocks of 32 hidden values, which four ranks cannot share evenly."""
    sizes = {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 6}
    return llama_target(3, vocab_size=101, **sizes).write(folder)


@pytest.mark.further(dtype=torch.bfloat16)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_number_of_ranks_has_the_bits_of_one(tmp_path: Path, dtype: torch.dtype) -> None:
    """Which sums over ranks have not."""
    folder, ids, ops = uneven(tmp_path), tokens(12), make_ops(CPU)
    expected = one_alone(folder, ops, ids, dtype)
    plain = load_model(folder, dtype, CPU)
    plain.pack(ops)
    assert torch.equal(whole_logits(plain, ids), expected)
    for size in (2, 3, 4):
        assert torch.equal(on_ranks(folder, ops, ids, size=size, invariant=True, dtype=dtype), expected)
    assert not torch.equal(on_ranks(folder, ops, ids, size=4, dtype=dtype), expected)


LAYERS: dict[str, tuple[str, Sizes, tuple[int, ...]]] = {
    "key heads in tiles": ("qwen3-next", {"linear_num_key_heads": 6, "linear_num_value_heads": 12}, (2, 4)),
    "two groups of experts beside state space": ("nemotron-h-moe", {}, (2,)),
    "attention beside a state space": ("falcon-h1", {}, (2, 3, 4)),
    "latents": ("kimi-linear", {"linear_num_heads": 6, "num_attention_heads": 6, "num_key_value_heads": 6}, (2, 4)),
    "convolutions": ("lfm3", {"num_attention_heads": 6}, (2, 4)),
    "streams": ("qwen4", {"linear_num_key_heads": 5, "linear_num_value_heads": 10}, (2, 4)),
    "groups": ("bamba", {}, (2,)),
    "channels with a state each": ("jamba", {}, (2, 4)),
}
FIRST, *OTHERS = LAYERS


@pytest.mark.slow
@pytest.mark.further(kind=OTHERS)
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_of_other_kinds(tmp_path: Path, kind: str) -> None:
    name, sizes, counts = LAYERS[kind]
    folder, ids, ops = saved(tmp_path, reference(name, **sizes)), tokens(12), make_ops(CPU)
    expected = one_alone(folder, ops, ids, torch.float32)
    for size in counts:
        assert torch.equal(on_ranks(folder, ops, ids, size=size, invariant=True), expected), size


@pytest.mark.slow
@pytest.mark.further(kind=["glm4-moe", "deepseek-v2"])
@pytest.mark.parametrize("kind", ["minimax-m2", "deepseek-v3", "glm4-moe", "deepseek-v2"])
def test_experts(tmp_path: Path, kind: str) -> None:
    """Beside latent attention and beside norms over all heads, with an expert of all rows."""
    folder, ids, ops = saved(tmp_path, of_experts(kind)), tokens(12), make_ops(CPU)
    expected = one_alone(folder, ops, ids, torch.float32)
    for size in (2, 4):
        assert torch.equal(on_ranks(folder, ops, ids, size=size, invariant=True), expected), size


INT4 = {**tiny.INT4, "group_size": 64}
FORMATS: dict[str, tuple[dict[str, Any], tiny.Writer]] = {
    "fp8": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        tiny.float8(128, 128, "weight_scale_inv"),
    ),
    "int4": (tiny.compressed(INT4, "pack-quantized"), tiny.packed(wide=64)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}, tiny.awq(64)),
    "gptq": ({**tiny.GPTQ, "group_size": 64}, tiny.gptq(wide=64)),
    "gptq in another order": tiny.FORMATS["gptq row"],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.further(kind=["int4", "awq", "gptq"])
@pytest.mark.parametrize("kind", FORMATS)
def test_quantised_matrices(tmp_path: Path, kind: str) -> None:
    """Which are cut between rows: no group of columns has to be."""
    config, writer = FORMATS[kind]
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = llama_target(3, vocab_size=101, **sizes).write(tmp_path)
    tiny.quantise(folder, config, lambda _: writer)
    for ops in (GroupTorchOps(CPU), *([Fp8TorchOps(CPU)] if kind == "fp8" else [])):
        form = GroupFormat(None, ops, fp8_from=ops.fp8_from)
        expected = one_alone(folder, ops, tokens(12), torch.bfloat16, form)
        for size in (2, 4):
            more: dict[str, Any] = {"size": size, "dtype": torch.bfloat16, "weight_format": form}
            assert torch.equal(on_ranks(folder, ops, tokens(12), invariant=True, **more), expected), size


@pytest.mark.slow
def test_blocks_that_a_share_of_the_inputs_would_cut(tmp_path: Path) -> None:
    theirs, ids, ops = of_experts("minimax-m2"), tokens(12), make_ops(CPU)
    if "Q8_0" not in ops.block_kinds:
        pytest.skip("there is no GEMM for blocks")
    form = BlockFormat("Q8_0", ops)
    path = write_gguf(tmp_path / "q.gguf", theirs.config, theirs.state_dict(), Type.Q8_0)
    with pytest.raises(CheckpointError, match="16 of its 32 columns in Q8_0"):
        load_model(path, torch.float32, CPU, weight_format=form, ranks=Absent(2))
    expected = one_alone(path, ops, ids, torch.float32, form)
    for size in (2, 4):
        assert torch.equal(on_ranks(path, ops, ids, size=size, invariant=True, weight_format=form), expected), size


def test_columns_of_ranks() -> None:
    """In tiles, of different numbers, and some on two ranks."""
    tiles = Columns.of([[(0, 2), (6, 2)], [(2, 2), (8, 2)], [(4, 2), (10, 2)]], 12)
    assert tiles.most == 4 and places(tiles, CPU).tolist() == [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]  # type: ignore[union-attr]
    assert places(Columns.of([[(0, 3)], [(3, 2)]], 5), CPU) is None  # what is behind is left out
    assert places(Columns.of([[(0, 2)], [(2, 3)]], 5), CPU).tolist() == [0, 1, 3, 4, 5]  # type: ignore[union-attr]
    assert places(Columns.of([[(0, 2)], [(0, 2)], [(2, 2)], [(2, 2)]], 4), CPU).tolist() == [0, 1, 4, 5]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("whole", "size", "expected"),
    [(8192, 4, 2048), (2880, 4, 720), (5120, 3, 1728), (2880, 7, 448), (96, 4, 32), (100, 3, 34), (64, 4, 16)],
)
def test_outputs_are_shared_in_units_of_kernels(whole: int, size: int, expected: int) -> None:
    shares = [Absent(size, rank, invariant=True).output_share(whole) for rank in range(size)]
    assert shares[0].size == expected and sum(share.size for share in shares) == whole
    assert [share.start for share in shares] == [sum(share.size for share in shares[:rank]) for rank in range(size)]


@pytest.mark.parametrize("whole", [2100, 2600, 3100, 4096, 32003])
def test_each_rank_has_some_of_a_vocabulary(whole: int) -> None:
    for size in range(1, 9):
        shares = [Absent(size, rank, invariant=True).share(whole) for rank in range(size)]
        assert sum(share.size for share in shares) == whole and min(share.size for share in shares) > 0
        assert whole < 8000 or all(share.start % 64 == 0 for share in shares)


def test_norms_over_a_group_that_ranks_share_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, reference("granite4"))
    load_config(folder).spread(Absent(2))
    with pytest.raises(ConfigError, match="--enable-tp-invariance: expected a --tp-size of at most 1, a rank for each"):
        load_config(folder).spread(Absent(2, invariant=True))
