"""Gemma 4's assistants against transformers: what they make of the target's keys and values, and of their states."""

from __future__ import annotations

import copy
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiny_quantised as tiny
import torch
from gemma4_models import assistant_for, drafted, reference, write_gguf
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize
from hybrid_models import Pooled, tokens
from thread_ranks import meet
from torch import Tensor

from draftwing.errors import CheckpointError, ConfigError
from draftwing.models.decoder import DecoderModel
from draftwing.models.heads.assistant_loader import load_assistant
from draftwing.models.heads.loader import load_draft_head
from draftwing.models.loader import load_model
from draftwing.ops import make_ops
from draftwing.ops.attention.batch import Batch
from draftwing.parallel.ranks import ALONE, Absent, Ranks

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["dense", "per-layer", "clusters"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    folder, clusters = tmp_path_factory.mktemp("models"), 13 * (request.param == "clusters")
    theirs = reference("dense", vocab_size=104) if clusters else reference(request.param)
    helper = assistant_for(theirs, clusters)
    theirs.save_pretrained(folder / "target")
    helper.save_pretrained(folder / "assistant")
    return theirs, helper, folder


@torch.inference_mode()
def logits_of(theirs: Any, folder: Path, helper: Path, ranks: Ranks = ALONE, native: bool = True) -> list[Tensor]:
    """Of a text longer than windows are, and of two tokens that are drafted. helper: the assistant's files."""
    target, ops = load_model(folder / "target", torch.float32, "cpu", ranks=ranks), make_ops(CPU)
    head = load_assistant(helper, target, torch.float32, "cpu")
    head.set_max_positions(64)
    target.pack(ops)
    head.pack(ops)
    ids = tokens(41)
    pooled = Pooled(target, ops if native else None)
    pooled.chunk(ids[:-1], 0)
    hidden = target_hidden(theirs, ids)
    newest = torch.tensor([39])
    zero = torch.zeros(1, 1, dtype=torch.int64)
    feature, token, found = head.features(hidden), ids[-1:], []
    for _ in range(3):
        batch = Batch(
            torch.tensor([0]), token, newest, torch.tensor([0]), pooled.table, newest, zero.unsqueeze(2), zero + 1,
            window=1, bound=41,
        )  # fmt: skip
        feature = head.run(token, newest + 1, feature, 0, pooled.attn.bind(batch, 0))
        found.append(head.logits(feature))
        token = found[-1].argmax(-1)
    return found


def check(theirs: Any, helper: Any, found: list[Tensor]) -> None:
    for logits, expected in zip(found, drafted(theirs, helper, tokens(41), 3), strict=True):
        torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slower(both=["dense", "per-layer"])
@pytest.mark.parametrize("native", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_logits_equal_transformers(both: tuple[Any, Any, Path], native: bool) -> None:
    theirs, helper, folder = both
    check(theirs, helper, logits_of(theirs, folder, folder / "assistant", native=native))


@pytest.mark.slow
def test_two_ranks_have_a_share_of_its_layers(both: tuple[Any, Any, Path]) -> None:
    """And of the target's keys, some heads of which both have."""
    theirs, helper, folder = both
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda ranks: logits_of(theirs, folder, folder / "assistant", ranks), meet())
    assert all(map(torch.equal, one, other))
    check(theirs, helper, one)


@pytest.mark.slow
@pytest.mark.further(name=["fp8 block", "gptq", "compressed int4"])
@pytest.mark.parametrize("name", ["fp8 block", "awq", "gptq", "compressed int4"])
def test_of_a_quantised_folder(tmp_path: Path, name: str) -> None:
    """On two ranks, each with a share of the codes."""
    theirs = reference("dense")
    theirs.save_pretrained(tmp_path / "target")
    helper = assistant_for(theirs)
    helper.save_pretrained(tmp_path / "assistant")
    config, write = tiny.FORMATS[name]
    helper.load_state_dict(tiny.quantise(tmp_path / "assistant", config, lambda _: write), strict=False)
    check(theirs, helper, logits_of(theirs, tmp_path, tmp_path / "assistant"))
    with ThreadPoolExecutor(2) as pool:
        both = pool.map(lambda ranks: logits_of(theirs, tmp_path, tmp_path / "assistant", ranks), meet())
        for found in both:
            check(theirs, helper, found)


@pytest.mark.slow
@pytest.mark.parametrize("clusters", [0, 13])
def test_of_a_gguf_file(tmp_path: Path, clusters: int, caplog: pytest.LogCaptureFixture) -> None:
    """Without clusters: logits of all tokens."""
    theirs = reference("dense", vocab_size=104)
    theirs.save_pretrained(tmp_path / "target")
    helper = assistant_for(theirs, clusters)
    for name, value in helper.state_dict().items():
        if value.dim() == 2 and not name.startswith(("model.embed", "masked", "lm_head")):
            stored = quantize(value.numpy(), Type.Q8_0)
            value.copy_(torch.from_numpy(dequantize(stored, Type.Q8_0)))
    file = write_gguf(tmp_path / "assistant.gguf", helper, Type.Q8_0)
    helper.config.use_ordered_embeddings = False
    check(theirs, helper, logits_of(theirs, tmp_path, file))
    assert "not used" not in caplog.text
    write_gguf(tmp_path / "target.gguf", theirs)
    target = load_model(tmp_path / "target", torch.float32, "cpu")
    with pytest.raises(CheckpointError, match=r"general\.architecture gemma4-assistant, found 'gemma4'"):
        load_assistant(tmp_path / "target.gguf", target, torch.float32, "cpu")


def target_hidden(theirs: Any, ids: torch.Tensor) -> torch.Tensor:
    return theirs.model(ids[None, :-1]).last_hidden_state[:, -1]


@pytest.mark.further(both=["dense", "per-layer"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted where there is a GPU")
@pytest.mark.usefixtures("mended_interpreter")
@torch.inference_mode()
def test_nodes_of_a_level_by_the_kernels_of_a_gpu(both: tuple[Any, Any, Path]) -> None:
    """All of them read the newest key as their own, and none of each other."""
    ops_of = pytest.importorskip("draftwing.ops.triton.ops")
    _, _, folder = both
    ids, newest = tokens(43), torch.tensor([39])
    made = []
    for ops in (ops_of.TritonOps(CPU), None):
        target = load_model(folder / "target", torch.float32, "cpu")
        head = load_assistant(folder / "assistant", target, torch.float32, "cpu")
        head.set_max_positions(64)
        pooled = Pooled(target, ops)
        pooled.chunk(ids[:40], 0)
        zero = torch.zeros(1, 3, dtype=torch.int64)
        batch = Batch(
            torch.tensor([0]), ids[40:], newest.expand(3), torch.zeros(3, dtype=torch.int64), pooled.table, newest,
            zero.unsqueeze(2), zero + 1, window=1, bound=41,
        )  # fmt: skip
        features = torch.randn(3, head.width, generator=torch.Generator().manual_seed(1))
        made.append(head.run(batch.ids, batch.positions + 1, features, 0, pooled.attn.bind(batch, 0)))
    torch.testing.assert_close(*made, atol=1e-4, rtol=1e-4)


@pytest.mark.slower(both=["dense", "per-layer"])
def test_layers_read_the_last_of_their_kind(both: tuple[Any, Any, Path]) -> None:
    theirs, _, folder = both
    target = load_model(folder / "target", torch.float32, "cpu")
    head = load_assistant(folder / "assistant", target, torch.float32, "cpu")
    own = [2, 2, 3] if theirs.config.num_kv_shared_layers == 0 else [2, 2, 1]
    assert [layer.mixer.pool_layer for layer in head.layers] == own and not head.kv_layers


@pytest.fixture(scope="module")
def clustered(tmp_path_factory: pytest.TempPathFactory) -> tuple[DecoderModel, Any, Path]:
    """A target, and an assistant with its folder."""
    folder, theirs = tmp_path_factory.mktemp("clustered"), reference("dense", vocab_size=104)
    theirs.save_pretrained(folder / "target")
    helper = assistant_for(theirs, 13)
    helper.save_pretrained(folder / "assistant")
    return load_model(folder / "target", torch.float32, "cpu"), helper, folder / "assistant"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"backbone_hidden_size": 32}, "backbone_hidden_size: expected 64, found 32"),
        ({"model_type": "gemma4"}, "expected model_type gemma4_assistant"),
        ({"text_config.vocab_size": 99}, "vocab_size: expected 104, found 99"),
        ({"num_centroids": 7}, "divides 104 tokens, found 7"),
        ({"num_centroids": 1}, "centroid_intermediate_top_k: expected 1, found 3"),
        ({"text_config.sliding_window": 9}, r"window of the target, \(2, 32, 20\), found \(2, 32, 9\)"),
    ],
)
def test_what_is_refused(
    clustered: tuple[DecoderModel, Any, Path], tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    target, _, folder = clustered
    changed(folder, tmp_path, changes)
    with pytest.raises(CheckpointError, match=expected):
        load_assistant(tmp_path, target, torch.float32, "cpu")


def changed(folder: Path, to: Path, changes: dict[str, Any]) -> None:
    """Writes an assistant's files with another config."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        inner, _, name = key.rpartition(".")
        (config[inner] if inner else config)[name] = value
    (to / "config.json").write_text(json.dumps(config))


def test_what_cannot_be_spread_is_said(clustered: tuple[DecoderModel, Any, Path], tmp_path: Path) -> None:
    folder = clustered[2]
    changed(folder, tmp_path / "assistant", {"text_config.intermediate_size": 63})
    target = load_model(folder.parent / "target", torch.float32, "cpu", ranks=Absent(2))
    with pytest.raises(ConfigError, match=r"draft model .*assistant: --tp-size 2: .* intermediate size of 63"):
        load_assistant(tmp_path / "assistant", target, torch.float32, "cpu")


@pytest.mark.parametrize("token", [104, -1])
def test_tokens_of_clusters_are_checked(clustered: tuple[DecoderModel, Any, Path], tmp_path: Path, token: int) -> None:
    target, helper, _ = clustered
    other = copy.deepcopy(helper)
    other.masked_embedding.token_ordering[5] = token
    other.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=f"expected tokens below 104, found {token}"):
        load_assistant(tmp_path, target, torch.float32, "cpu")


def test_clusters_from_the_config_alone(clustered: tuple[DecoderModel, Any, Path]) -> None:
    target, _, folder = clustered
    head = load_assistant(folder, target, torch.float32, "cpu", dummy=True)
    logits = head.logits(torch.randn(2, head.width))
    assert ((logits > logits.amin(1, keepdim=True)).sum(1) == 3 * 8).all()


@pytest.mark.slower(both=["dense", "per-layer"])
def test_other_drafters_say_what_it_is(both: tuple[Any, Any, Path]) -> None:
    _, _, folder = both
    target = load_model(folder / "target", torch.float32, "cpu")
    with pytest.raises(CheckpointError, match="expected --speculative-algorithm FROZEN_KV_MTP"):
        load_draft_head(folder / "assistant", target, "EAGLE3", torch.float32, "cpu")
