"""What block heads' checkpoints may say, and what is refused by name. (`tests/spec/test_block_drafter.py` has their
arithmetic.)"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from group_ops import GroupTorchOps
from reference.block_heads import dflash2_head, dflash_head, domino_head, dspark_head, speculators_head
from reference.checkpoints import Checkpoint, llama_target
from torch import Tensor

from draftwing.config.trees import BLOCK, BRANCHED_BLOCK, TreeShape, carried_shape, grown_shape
from draftwing.errors import CheckpointError
from draftwing.layers.linear_ops.dense import DENSE
from draftwing.layers.linear_ops.groups import GroupFormat
from draftwing.models.decoder import DecoderModel
from draftwing.models.heads.block import BlockHead, DominoHead
from draftwing.models.heads.loader import load_draft_head
from draftwing.models.loader import load_model

TARGET = llama_target(4, num_hidden_layers=5, vocab_size=12)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    return load_model(TARGET.write(tmp_path_factory.mktemp("target")), torch.float32, "cpu")


def load(
    folder: Path, head: Checkpoint, target: DecoderModel, algorithm: str = "DSPARK", dummy: bool = False
) -> BlockHead:
    found = load_draft_head(head.write(folder), target, algorithm, torch.float32, "cpu", dummy=dummy)
    assert isinstance(found, BlockHead)
    return found


def test_what_is_the_targets(target: DecoderModel, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The frozen copies in DeepSpec's files are random here; either algorithm takes either head."""
    head = load(tmp_path, dspark_head(TARGET), target, "DFLASH")
    assert head.lm_head is None and head.target_ids is None and head.vocab == 12
    assert not any("embed" in name or "lm_head" in name for name in head.names())
    assert head.aux_layers == (2, 4) and head.lookahead == 0 and len(head.kv_layers) == 2


def test_a_vocabulary_of_its_own(target: DecoderModel, tmp_path: Path) -> None:
    stored = speculators_head(TARGET, rows=8)
    head = load(tmp_path, stored, target)
    assert head.vocab == 8 and torch.equal(head.target_ids, torch.arange(8) + stored.tensors["d2t"])
    assert head.aux_layers == (2, 4), "its ids count boundaries"


def test_rows_of_the_targets_lm_head(target: DecoderModel, tmp_path: Path) -> None:
    stored = speculators_head(TARGET, rows=8, tied=True)
    head = load(tmp_path, stored, target)
    ids = torch.arange(8) + stored.tensors["d2t"]
    assert head.vocab == 8 and torch.equal(head.target_ids, ids) and head.config_of_block.tied
    hidden = torch.randn(3, head.width, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(head.logits(hidden), hidden @ TARGET.tensors["lm_head.weight"][ids].t())


@pytest.mark.parametrize(
    ("algorithm", "make"), [("DFLASH", dflash_head), ("DSPARK", dspark_head), ("DFLASH2", dflash2_head)]
)
@pytest.mark.parametrize("scheme", ["int8", "fp8", "w4a16"])
def test_in_fewer_bits(algorithm: str, make: Callable[[Checkpoint], Checkpoint], scheme: str, tmp_path: Path) -> None:
    """As beside a quantised target on a GPU, whose head is quantised when it is loaded."""
    stored = llama_target(4, num_hidden_layers=5, vocab_size=64, hidden_size=128, head_dim=32, intermediate_size=128)
    target = load_model(stored.write(tmp_path / "target"), torch.bfloat16, "cpu")
    folder, ops = make(stored).write(tmp_path / "head"), GroupTorchOps(torch.device("cpu"))
    dense, found = (
        load_draft_head(folder, target, algorithm, torch.bfloat16, "cpu", weight_format=form)
        for form in (DENSE, GroupFormat(scheme, ops))
    )
    for head in (dense, found):
        head.pack(ops)
    features = torch.randn(7, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert isinstance(dense, BlockHead) and isinstance(found, BlockHead) and dense.text_kv and found.text_kv
    expected, values = dense.text_kv(features), found.text_kv(features)
    assert found.text_kv.op.sizes and not dense.text_kv.op.sizes, "one is quantised"
    assert 0 < (values - expected).norm() / expected.norm() < {"int8": 0.02, "fp8": 0.06, "w4a16": 0.2}[scheme]


def test_layers_where_the_config_names_none(target: DecoderModel, tmp_path: Path) -> None:
    head = load(tmp_path, dflash_head(TARGET, dflash_config={"target_layer_ids": None}, read=3), target)
    assert head.aux_layers == (2, 3, 3), "outputs of 1, round(1.5) and 2"


def test_random_weights_from_a_config(target: DecoderModel, tmp_path: Path) -> None:
    head = load(tmp_path, dspark_head(TARGET), target, dummy=True)
    assert head.markov is not None and head.config_of_block.rank == 8 and head.config_of_block.steps == 5
    head = load(tmp_path, dspark_head(TARGET, draft_vocab_size=6), target, dummy=True)
    assert head.vocab == 6 and head.target_ids is not None and head.target_ids.tolist() == [0, 2, 4, 6, 8, 10]
    head = load(tmp_path, dflash2_head(TARGET), target, "DFLASH2", dummy=True)
    block = head.config_of_block
    assert (block.taps, block.group, block.candidates, block.rank) == (2, 8, 5, 6) and head.selector is not None
    head = load(tmp_path, domino_head(TARGET), target, dummy=True)
    assert (head.config_of_block.markov, head.config_of_block.rank, head.state_width) == ("domino", 8, 10)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: dflash_head(TARGET, dflash_config={"mask_token_id": None}), r"mask_token_id: expected an integer"),
        (lambda: dflash_head(TARGET, dflash_config={"mask_token_id": 12}), r"mask_token_id: .* 0 to 11, found 12"),
        (lambda: dflash_head(TARGET, block_size=1), r"block_size: expected an integer from 2"),
        (lambda: dflash_head(TARGET, dflash_config={"target_layer_ids": [1, 5]}), r"target_layer_ids: .* 0 to 4"),
        (lambda: dflash_head(TARGET, dflash_config={"target_layer_ids": [1]}, read=2), r"for 2 hidden states"),
        (lambda: dflash_head(TARGET, layer_types=["full_attention"]), r"layer_types: expected one for each of 2"),
        (lambda: dflash_head(TARGET, dflash_config={"use_swa": True}), r"sliding_window: expected an integer"),
        (lambda: dflash_head(TARGET, dflash_config={"attention_value_scale": 2}), r"value_scale = 2 is not supported"),
        (lambda: dflash_head(TARGET, dflash_config={"output_multiplier": "2"}), r"multiplier: expected a number"),
        (
            lambda: with_tensor(dflash_head(TARGET), "candidate_selector.successor_codebook"),
            r"not served: candidate_selector.successor_codebook",
        ),
        (lambda: dflash2_head(TARGET, dflash_config={"conv_group_size": 5}), r"conv_group_size: expected a divisor of"),
        (lambda: dflash2_head(TARGET, conv_kernel_size=3), r"conv_kernel_size: expected 2, found 3"),
        (lambda: dflash2_head(TARGET, selector_rank=9), r"selector_rank: expected 6, found 9"),
        (lambda: dflash2_head(TARGET, dflash_config={"selector_top_k": 13}), r"selector_top_k: .* 2 to 12, found 13"),
        (lambda: dflash2_head(TARGET, selector_vocab_size=8), r"selector_vocab_size = 8 is not supported"),
        (
            lambda: with_tensor(dflash2_head(TARGET), "layers.0.attention_conv.base_kernel", (2, 7, 32)),
            r"base_kernel: expected \[2, 1 to 6 taps, 32\], found the shape \[2, 7, 32\]",
        ),
        (
            lambda: without_tensor(dflash2_head(TARGET), "layers.1.mlp_conv.kernel_projection.weight"),
            r"missing from the checkpoint: layers.1.mlp_conv.kernel_projection.weight",
        ),
        (
            lambda: with_tensor(dflash2_head(TARGET), "markov_head.markov_w1.weight", (12, 3)),
            r"beside another correction of the same logits is not supported",
        ),
        (lambda: dflash_head(TARGET, dflash_config={"projector_type": "domino"}), r"missing .* embed_proj.0.weight"),
        (lambda: domino_head(TARGET, dflash_config={"pure_draft_prefix_len": 2}), r"prefix_len: expected 1, found 2"),
        (
            lambda: with_tensor(domino_head(TARGET), "prefix_gru.weight_hh_l0", (3,)),
            r"prefix_gru.weight_hh_l0: expected a matrix, found the shape \[3\]",
        ),
        (
            lambda: with_tensor(domino_head(TARGET), "prefix_gru.weight_hh_l0", (0, 0)),
            r"weight_hh_l0: expected three times as many rows as columns, found the shape \[0, 0\]",
        ),
        (
            lambda: with_tensor(domino_head(TARGET), "prefix_gru.bias_hh_l0", (30,)),
            r"not served: prefix_gru.bias_hh_l0",
        ),
        (lambda: dspark_head(TARGET, markov_head_type="lstm"), r"expected vanilla, gated, rnn, found 'lstm'"),
        (lambda: dflash_head(TARGET, draft_vocab_size=8), r"missing from the checkpoint: lm_head.weight, or d2t, the"),
        (lambda: dflash_head(llama_target(1, hidden_size=48, vocab_size=12)), r"hidden_size of the target"),
    ],
)  # fmt: skip
def test_what_is_refused(target: DecoderModel, tmp_path: Path, make: Callable[[], Checkpoint], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        load(tmp_path, make(), target)


@pytest.mark.parametrize("name", ["gru_hidden_dim", "emb_dim"])
@pytest.mark.parametrize("value", [0, -1, 2.5, "x"])
def test_sizes_that_random_weights_cannot_have(target: DecoderModel, tmp_path: Path, name: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=f"{name}: expected an integer from 1 to [0-9]+, found {value!r}"):
        load(tmp_path, domino_head(TARGET, dflash_config={name: value}), target, dummy=True)


def test_what_follows_the_newest_token_costs_no_correction(target: DecoderModel, tmp_path: Path) -> None:
    head = load(tmp_path, domino_head(TARGET), target)
    assert isinstance(head.markov, DominoHead)
    logits, hidden, above = torch.randn(2, 12), torch.randn(2, head.width), torch.tensor([3, 4])
    start = torch.zeros(2, head.state_width)
    _, state = head.markov.mix(hidden, above, start)
    head.markov.joint = None  # type: ignore[assignment]
    same, found = head.given(logits, hidden, above, start, newest=True)
    assert same is logits and torch.equal(found, state)


def with_tensor(head: Checkpoint, name: str, shape: tuple[int, ...] = (3, 3)) -> Checkpoint:
    more: dict[str, Tensor] = {**head.tensors, name: torch.zeros(shape)}
    return Checkpoint(more, head.config)


def without_tensor(head: Checkpoint, name: str) -> Checkpoint:
    return Checkpoint({key: value for key, value in head.tensors.items() if key != name}, head.config)


def test_a_tree_that_fits_into_the_block(tmp_path: Path) -> None:
    """Where nobody asks for one: the drafter's own, cut where the block is shorter."""
    spark, flash = dspark_head(TARGET).write(tmp_path / "a"), dflash_head(TARGET).write(tmp_path / "b")
    assert carried_shape(spark, "cpu") == carried_shape(flash, "cpu") == TreeShape(5, 1, 6)
    assert carried_shape(spark, "cpu", BRANCHED_BLOCK) == TreeShape(5, 4, 16)
    assert carried_shape(spark, "cuda", TreeShape(7, 2, 60)) == TreeShape(5, 2, 19)
    assert carried_shape(flash, "cpu", BRANCHED_BLOCK) == TreeShape(5, 1, 6), "siblings would have the same children"
    assert carried_shape(domino_head(TARGET).write(tmp_path / "e"), "cpu", BRANCHED_BLOCK) == TreeShape(5, 4, 16)
    two = dflash2_head(TARGET).write(tmp_path / "f")
    assert carried_shape(two, "cpu") == TreeShape(5, 1, 6) and carried_shape(two, "cpu", BRANCHED_BLOCK) == TreeShape(
        5, 4, 16
    )
    long = dflash_head(TARGET, block_size=BLOCK.depth + 4).write(tmp_path / "d")
    assert carried_shape(long, "cpu", BRANCHED_BLOCK) == BLOCK
    assert carried_shape(dflash_head(TARGET, block_size=BLOCK.depth + 1).write(tmp_path / "c"), "cpu") is None


@pytest.mark.parametrize(("nodes", "steps"), [(2, 1), (4, 3), (8, 7), (24, 7)])
def test_so_many_draft_tokens_and_nothing_else(nodes: int, steps: int) -> None:
    """As `num_speculative_tokens` of other engines: fewer than the default tree has levels, too."""
    assert grown_shape((None, None, nodes), BRANCHED_BLOCK) == TreeShape(steps, 4, nodes)
