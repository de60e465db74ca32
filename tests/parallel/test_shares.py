"""Heads, groups of heads, widths and experts that are no multiple of the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from block_ops import BlockGemmOps, BlockTorchOps
from family_files import written
from hybrid_models import on_ranks, reference, saved, tokens, whole_logits
from reference.checkpoints import Checkpoint, llama_target, qwen2_target
from torch import Tensor

from draftwing.errors import ConfigError
from draftwing.layers.linear_ops.blocks import BlockFormat, block_sizes
from draftwing.layers.linear_ops.parallel import NormedSum
from draftwing.models.loader import load_config, load_model
from draftwing.ops import make_ops
from draftwing.ops.attention.batch import ImageRows
from draftwing.parallel.ranks import Absent, NextNorm, Ranks
from draftwing.parallel.shares import own_heads, width_share

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_heads_go_to_ranks_with_what_they_read(size: int) -> None:
    """Each head is on one rank, which has what it reads; of that no rank has more than one more than another, and as
    many heads read each."""
    for groups in range(1, 10):
        for each in range(1, 9):
            heads = groups * each
            if heads < size:
                with pytest.raises(
                    ConfigError, match=f"--tp-size {size}: expected at most {heads}, a rank for each of"
                ):
                    own_heads(Absent(size), heads, groups, "heads")
                continue
            found = [own_heads(Absent(size, rank), heads, groups, "heads") for rank in range(size)]
            assert [head for own, _ in found for head in own] == list(range(heads))
            assert {group for _, read in found for group in read} == set(range(groups))
            for own, read in found:
                readers = len(own) // len(read)
                assert readers and [head // each for head in own] == [group for group in read for _ in range(readers)]
            counts = [len(read) for _, read in found]
            assert max(counts) - min(counts) <= 1 and (groups < size or sum(counts) == groups)
            if heads % size == 0 and (groups % size == 0 or size % groups == 0):
                assert {len(own) for own, _ in found} == {heads // size}


@pytest.mark.parametrize(
    ("whole", "size", "expected"),
    [
        (2880, 4, [768, 704, 704, 704]),  # 45 blocks of 64
        (2080, 4, [544, 512, 512, 512]),  # 65 of 32
        (11008, 3, [3712, 3648, 3648]),
        (11008, 8, [1376] * 8),  # 172 blocks of 64, but even ones of 32
        (2880, 2, [1440] * 2),
        (1536, 4, [384] * 4),
        (96, 4, [24] * 4),  # too few blocks
        (0, 4, [0] * 4),
    ],
)
def test_widths_are_shared_in_whole_blocks(whole: int, size: int, expected: list[int]) -> None:
    shares = [width_share(Absent(size, rank), whole) for rank in range(size)]
    assert [share.size for share in shares] == expected
    assert [share.start for share in shares] == [sum(expected[:rank]) for rank in range(size)]


@pytest.mark.parametrize(
    ("whole", "size", "expected"),
    [
        (11008, 2, [5632, 5376]),  # 43 blocks of 256
        (11008, 8, [1536, 1536, 1280, 1280, 1536, 1280, 1280, 1280]),
        (768, 2, [512, 256]),
        (4096, 4, [1024] * 4),
        (2880, 2, [1440] * 2),  # whose blocks are smaller
        (512, 4, [128] * 4),  # too few blocks
    ],
)
def test_blocks_of_columns_stay_whole(whole: int, size: int, expected: list[int]) -> None:
    shares = [width_share(Absent(size, rank), whole, 256) for rank in range(size)]
    assert sorted(share.size for share in shares) == sorted(expected)
    assert [share.start for share in shares] == [sum(share.size for share in shares[:rank]) for rank in range(size)]


@pytest.mark.slow
@pytest.mark.further(family="glm4-moe")  # as the other family
@pytest.mark.parametrize(("family", "ranks"), [("glm4-moe", 2), ("glm4-moe", 3), ("nemotron-h-moe", 2)])
@torch.inference_mode()
def test_widths_of_k_quants_that_ranks_do_not_divide(tmp_path: Path, family: str, ranks: int) -> None:
    """Blocks of 256 stay as they are stored; logits are those of one rank."""
    if "Q4_K" not in make_ops(CPU).block_kinds:
        pytest.skip("the gguf package writes no such blocks")
    wide = 3 * 256 if ranks == 2 else 4 * 256
    sizes = {"hidden_size": 256, "intermediate_size": wide, "moe_intermediate_size": wide}
    _, path = written(tmp_path, family, "Q4_K", **sizes)
    ops, ids = BlockTorchOps(CPU, BlockGemmOps.block_kinds | {"Q4_K"}), tokens(24)
    form = BlockFormat("Q8_0", ops)
    whole = load_model(path, torch.float32, CPU, weight_format=form)
    whole.pack(ops)
    found = on_ranks(path, ops, ids, size=ranks, weight_format=form)
    torch.testing.assert_close(found, whole_logits(whole, ids), atol=2e-5, rtol=1e-5)


def test_widths_that_are_quantised_to_k_quants(tmp_path: Path) -> None:
    """No rank falls back to larger blocks of 32."""
    ops = make_ops(CPU)
    if "Q4_K" not in ops.block_kinds:
        pytest.skip("no such blocks without the C extension")
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    folder, form = llama_target(1, intermediate_size=768, **sizes).write(tmp_path), BlockFormat("Q4_K", ops)
    for rank in range(2):
        layer = load_model(folder, torch.float32, CPU, weight_format=form, ranks=Absent(2, rank)).layers[0]
        assert {*block_sizes(layer)} == {"Q4_K"} and layer.mlp.down.in_features == 512 - 256 * rank


def sized(make: Any, heads: int, kv_heads: int, **more: Any) -> Checkpoint:
    sizes = {"hidden_size": 8 * heads, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    target: Checkpoint = make(3, vocab_size=101, **sizes, **more)
    return target


DENSE = {
    "12 heads of 6": lambda: sized(llama_target, 12, 6),
    "6 heads of 3": lambda: sized(qwen2_target, 6, 3),
    "6 heads of 2": lambda: sized(llama_target, 6, 2),
    "a width of 65 blocks": lambda: sized(qwen2_target, 4, 1, intermediate_size=2080),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(one, marks=pytest.mark.exhaustive) if "6 heads" in one else one for one in DENSE]
)
def test_dense_models_on_four_ranks(tmp_path: Path, case: str) -> None:
    folder, ids, ops = DENSE[case]().write(tmp_path), tokens(12), make_ops(CPU)
    whole = load_model(folder, torch.float32, CPU)
    whole.pack(ops)
    torch.testing.assert_close(on_ranks(folder, ops, ids, size=4), whole_logits(whole, ids), atol=2e-5, rtol=1e-5)


def test_sums_are_made_under_the_norms_that_come_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of each layer; the logits are those of two operations."""
    folder, ids, ops = DENSE["6 heads of 3"]().write(tmp_path), tokens(12), make_ops(CPU)
    made: list[tuple[int, Tensor]] = []
    together = Ranks.sum_under

    def noted(self: Ranks, norm: NextNorm, *rest: Any) -> Any:
        made.append((self.rank, norm.weight))
        return together(self, norm, *rest)

    monkeypatch.setattr(Ranks, "sum_under", noted)
    found = on_ranks(folder, ops, ids, size=2)
    model = load_model(folder, torch.float32, CPU)
    norms = [norm.weight for layer in model.layers for norm in (layer.attn_norm, layer.mlp_norm)] + [model.norm.weight]
    for rank in range(2):
        own = [weight for of, weight in made if of == rank]
        assert len(own) == len(norms[1:]) and all(map(torch.equal, own, norms[1:]))
    monkeypatch.setattr(NormedSum, "lead_to", lambda *_: None)
    assert torch.equal(on_ranks(folder, ops, ids, size=2), found)


@pytest.mark.parametrize("deep", [0, 1, 2])
def test_norms_of_sums_are_read_beside_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deep: int) -> None:
    """But behind layers whose results images change, which have a norm of their own; the logits are those of two
    operations."""
    folder, ids, ops = DENSE["6 heads of 3"]().write(tmp_path), tokens(12), make_ops(CPU)
    config = load_config(folder)
    rows = torch.randn(12, (1 + deep) * config.hidden_size, generator=torch.Generator().manual_seed(2))
    images = ImageRows(torch.arange(12) % 3 > 0, rows, deep)
    norm, made = ops.rms_norm, list[int]()

    def counted(*args: Any) -> Any:
        made.append(1)
        return norm(*args)

    monkeypatch.setattr(ops, "rms_norm", counted)
    found = on_ranks(folder, ops, ids, size=2, images=images)
    assert len(made) == 2 * (2 * config.num_layers + 1 + deep)
    monkeypatch.setattr(NormedSum, "lead_to", lambda *_: None)
    assert torch.equal(on_ranks(folder, ops, ids, size=2, images=images), found)
    assert not torch.equal(on_ranks(folder, ops, ids, size=2), found)


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "one group, which has a norm, of 8 heads": ("granite4", {}),
    "2 groups and 6 experts": ("nemotron-h-moe", {}),
    "a group of 6 heads without a norm": ("falcon-h1", {}),
    "2 groups of 4 heads and norms": ("falcon-h1-behind", {}),
    "2 groups, attention beside": ("bamba", {}),
    "6 key heads": ("qwen3-next", {"linear_num_key_heads": 6, "linear_num_value_heads": 12}),
    "6 heads with latents": (
        "kimi-linear", {"linear_num_heads": 6, "num_attention_heads": 6, "num_key_value_heads": 6},
    ),
    "a window and convolutions": ("lfm3", {"num_attention_heads": 6}),
    "indexed": ("qwen4", {"linear_num_key_heads": 5, "linear_num_value_heads": 10}),
    "channels with a state each": ("jamba", {}),
    "heads that fade each by itself": ("minimax", {"num_attention_heads": 8}),
    "norms in front of nets and behind attention": (
        "olmo-hybrid", {"linear_num_key_heads": 5, "linear_num_value_heads": 5},
    ),
}  # fmt: skip
FIRST, *OTHERS = KINDS


@pytest.mark.slow
@pytest.mark.further(kind=OTHERS)
@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_other_kinds_on_four_ranks(tmp_path: Path, kind: str) -> None:
    """The logits are transformers'; experts are whole on a rank, too."""
    name, sizes = KINDS[kind]
    theirs, ids, ops = reference(name, **sizes), tokens(12), make_ops(CPU)
    folder = saved(tmp_path, theirs)
    with torch.inference_mode():
        expected = theirs(ids[None]).logits[0]
    for whole_experts in (False, True) if load_config(folder).experts is not None else (False,):
        found = on_ranks(folder, ops, ids, whole_experts, 4)
        torch.testing.assert_close(found, expected, atol=3e-4, rtol=1e-4)


def test_what_cannot_be_spread(tmp_path: Path) -> None:
    for kind, sentence in (
        ("qwen3.5", "expected at most 2, a rank for each of the model's delta nets' key heads; found 4"),
        ("falcon-h1-normed", "expected at most 2, a rank for each group of the model's state-space layers, which have"),
    ):
        with pytest.raises(ConfigError, match=f"--tp-size 4: {sentence}"):
            load_config(saved(tmp_path / kind, reference(kind))).spread(Absent(4))
