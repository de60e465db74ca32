"""Features for training equal what the engine computes while it serves; stores survive kills; counted vocabularies."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference.checkpoints import eagle2_head, eagle3_head, llama_target, qwen2_target
from safetensors.torch import load_file
from tiny_checkpoint import write_checkpoint, write_tokenizer

from draftwing import LLM
from draftwing import files as files_module
from draftwing.errors import ConfigError
from draftwing.models.decoder import DecoderModel
from draftwing.ops.attention.batch import AttentionKind
from draftwing.train import capture as capture_module
from draftwing.train import store as store_module
from draftwing.train.capture import Causal, FeatureModel, batches, capture, eagle3_aux_layers, target_aux_layers
from draftwing.train.draft_vocabulary import covered, draft_vocabulary
from draftwing.train.store import FeatureStore, OnlineSource, Sample, SourceMeta, Tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny", layers=6)


@pytest.fixture(scope="module")
def target(model: Path) -> FeatureModel:
    return FeatureModel.load(model, "EAGLE3", "cpu", "float32")


def sequences(lengths: list[int], seed: int = 0) -> list[Tokens]:
    draw = random.Random(seed)
    return [
        Tokens(np.array([draw.randrange(256) for _ in range(n)], np.int32), np.arange(n) >= n // 2, f"key {i}")
        for i, n in enumerate(lengths)
    ]


# ---- features --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["EAGLE3", "EAGLE"])
def test_features_are_those_that_serving_feeds_a_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    """What the engine's target gives its drafter for a prompt, in chunks and from the paged pool, packed weights."""
    checkpoint = llama_target(vocab_size=258, num_hidden_layers=6)
    folder = checkpoint.write(tmp_path / "target")
    write_tokenizer(folder)
    make = eagle3_head if algorithm == "EAGLE3" else eagle2_head
    head = make(checkpoint, vocab_size=258).write(tmp_path / "head")
    given: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    forward = DecoderModel.forward

    def spy(self: DecoderModel, *args: Any, **kw: Any) -> Any:
        out = forward(self, *args, **kw)
        given.append((out[0].clone(), out[1].clone()))  # type: ignore[union-attr]
        return out

    options = {
        "dtype": "float32", "max_total_tokens": 2000, "chunked_prefill_size": 16, "speculative_algorithm": algorithm,
        "speculative_draft_model_path": str(head), "device": "cpu",
    }  # fmt: skip
    ids = sequences([41])[0].ids.tolist()
    with LLM(str(folder), **options) as llm, monkeypatch.context() as patch:
        patch.setattr(DecoderModel, "forward", spy)
        llm.generate([ids], {"temperature": 0, "max_new_tokens": 1})
    served_final, served_aux = (torch.cat([out[i] for out in given])[:41] for i in (0, 1))  # type: ignore[misc]

    model = FeatureModel.load(folder, algorithm, "cpu", "float32")
    ((aux_hidden, final),) = model.batch([torch.tensor(ids)])
    assert len(given) > 2 and aux_hidden.shape == (41, (3 if algorithm == "EAGLE3" else 1) * 32)
    torch.testing.assert_close(final, served_final, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(aux_hidden, served_aux, rtol=1e-5, atol=1e-5)
    # In a batch, padded, they are the same again.
    for one, (taps_too, final_too) in zip(
        (ids, ids[:7]), model.batch([torch.tensor(ids), torch.tensor(ids[:7])]), strict=True
    ):
        torch.testing.assert_close(final_too, served_final[: len(one)], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(taps_too, served_aux[: len(one)], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("window", "chunk"), [(0, 0), (1, 0), (5, 0), (0, 5)])
@pytest.mark.parametrize(("sinks", "cap"), [(False, 0.0), (True, 0.0), (True, 1.5)])
def test_targets_with_windows_chunks_sinks_and_caps(window: int, chunk: int, sinks: bool, cap: float) -> None:
    """What they attend to while they are captured, by brute force in float64."""
    rng, count, length = torch.Generator().manual_seed(1), 2, 12
    q, k, v = (torch.randn(count * length, heads, 8, generator=rng) for heads in (4, 2, 2))
    kind = AttentionKind(window, torch.randn(4, generator=rng) if sinks else None, 20, cap, chunk=chunk)
    found = Causal(count, length)(0, q, k, v, kind)
    for row in range(count * length):
        start = row // length * length
        first = row - (row - start) % chunk if chunk else row + 1 - window if window else start
        seen = slice(max(start, first), row + 1)
        for head in range(4):
            scores = k[seen, head // 2].double() @ q[row, head].double() * 20**-0.5
            scores = cap * (scores / cap).tanh() if cap else scores
            every = torch.cat((scores, kind.sinks[head, None].double())) if kind.sinks is not None else scores
            expected = every.softmax(0)[: len(scores)] @ v[seen, head // 2].double()
            torch.testing.assert_close(found.view(-1, 4, 8)[row, head].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_features_by_the_kernels_of_a_gpu(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mended_interpreter: None
) -> None:
    """Which do norms, rotations and activations."""
    triton_ops = pytest.importorskip("draftwing.ops.triton.ops")
    if torch.cuda.is_available():
        pytest.skip("Triton is not interpreted where there is a GPU")
    checkpoint = {"llama": llama_target, "qwen2": qwen2_target}[family](0, num_hidden_layers=3)
    folder = checkpoint.write(tmp_path / "tiny")
    expected = FeatureModel.load(folder, "EAGLE3", "cpu", "float32")
    monkeypatch.setattr(capture_module, "kernels_take", lambda x: True)
    monkeypatch.setattr(capture_module, "make_ops", triton_ops.TritonOps)
    found = FeatureModel.load(folder, "EAGLE3", "cpu", "float32")
    texts = [torch.from_numpy(one.ids) for one in sequences([9, 5])]
    texts = [ids % 60 for ids in texts]
    for one, other in zip(found.batch(texts), expected.batch(texts), strict=True):
        for mine, theirs in zip(one, other, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_final_gives_the_target_s_own_choices(model: Path, target: FeatureModel) -> None:
    ids = sequences([12])[0].ids.tolist()
    with LLM(str(model), dtype="float32", max_total_tokens=500) as llm:
        (answer,) = llm.generate([ids], {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True})
    ((_, final),) = target.batch([torch.tensor(ids + answer.token_ids)])
    chosen = target.model.logits(final).argmax(-1)
    assert chosen[len(ids) - 1 : -1].tolist() == answer.token_ids


def test_which_streams(target: FeatureModel) -> None:
    assert eagle3_aux_layers(32) == (2, 16, 29) and eagle3_aux_layers(30) == (2, 15, 27)
    for layers in range(1, 40):
        aux_layers = eagle3_aux_layers(layers)
        assert (
            len(aux_layers) == 3
            and list(aux_layers) == sorted(aux_layers)
            and aux_layers[0] >= 0
            and aux_layers[-1] <= layers
        )
    assert target_aux_layers("EAGLE", 30) == target_aux_layers("MTP", 30) == (31,)
    assert target_aux_layers("EAGLE3", 30, [1, 15, 30]) == (1, 15, 30)
    with pytest.raises(ConfigError, match="expected 0 to 30"):
        target_aux_layers("EAGLE3", 30, [1, 15, 31])


# ---- capture ---------------------------------------------------------------------------------------------------------


def content(store: FeatureStore) -> dict[str, Sample]:
    found = [store.read(i) for i in range(len(store))]
    assert [len(sample.ids) for sample in found] == store.lengths
    return {sample.key: sample for sample in found}


LENGTHS = [30, 3, 17, 60, 5, 44, 9, 21, 2, 33]


@pytest.mark.parametrize("algorithm", ["EAGLE3", "MTP"])
def test_a_store_has_what_the_target_gives(model: Path, tmp_path: Path, algorithm: str) -> None:
    target = FeatureModel.load(model, algorithm, "cpu", "float32")
    tokens = sequences(LENGTHS)
    store = FeatureStore.create(tmp_path / "f", target.meta("tiny", algorithm))
    assert capture(target, store, tokens, batch_tokens=64, shard_bytes=8000) == len(tokens)
    assert len(list((tmp_path / "f").glob("*.safetensors"))) > 2
    store = FeatureStore(tmp_path / "f")
    found = content(store)
    source = OnlineSource(target.meta("tiny", algorithm), tokens, target.batch)
    assert source.meta == store.meta and sorted(source.lengths) == sorted(store.lengths) == sorted(LENGTHS)
    for i, one in enumerate(tokens):
        stored, direct = found[one.key], source.read_many([i])[0]
        assert stored.ids.dtype == torch.int32 and stored.ids.tolist() == one.ids.tolist() == direct.ids.tolist()
        assert stored.loss_mask.tolist() == one.loss_mask.tolist() == direct.loss_mask.tolist()
        torch.testing.assert_close(stored.aux_hidden, direct.aux_hidden, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(stored.final, direct.final, rtol=1e-5, atol=1e-5)
    assert stored.aux_hidden.shape[1] == (3 if algorithm == "EAGLE3" else 1) * 32
    if algorithm == "MTP":
        assert store.bytes < 1.2 * sum(LENGTHS) * 32 * 4 + 2000 * len(store), "the one tap is not stored twice"
    assert capture(target, store, tokens) == 0, "nothing is computed again"


class Killed(BaseException):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(9))
def test_killed_at_any_moment_it_goes_on(
    target: FeatureModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """The kill comes at the n-th of: a file written, about to be renamed, renamed, for shards and the index."""
    tokens, folder = sequences(LENGTHS), tmp_path / "f"
    kills = iter(range(100))

    def maybe() -> None:
        if next(kills) == moment:
            raise Killed

    save, sync = store_module.save_file, files_module.replace_file

    def torn_save(tensors: Any, path: Path) -> None:
        save(tensors, path)
        with open(path, "r+b") as file:
            size = os.path.getsize(path)
            file.truncate(size // 2)
            maybe()
            file.truncate(0)
        save(tensors, path)

    def torn_rename(partial: Path, path: Path) -> None:
        maybe()
        sync(partial, path)
        maybe()

    store = FeatureStore.create(folder, target.meta("tiny", "EAGLE3"))
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "save_file", torn_save)
        for module in (store_module, files_module):
            patch.setattr(module, "replace_file", torn_rename)
        with pytest.raises(Killed):
            capture(target, store, tokens, 64, 20000)
    again = FeatureStore.create(folder, target.meta("tiny", "EAGLE3"))
    before = len(again)
    assert before < len(tokens)
    assert capture(target, again, tokens, 64, 20000) == len(tokens) - before
    found = content(FeatureStore(folder))
    assert set(found) == {one.key for one in tokens} and len(again) == len(tokens)
    for one in tokens:
        ((aux_hidden, final),) = target.batch([torch.from_numpy(one.ids)])
        torch.testing.assert_close(found[one.key].aux_hidden, aux_hidden, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found[one.key].final, final, rtol=1e-5, atol=1e-5)


def test_stores_of_the_first_version_stay_readable(target: FeatureModel, tmp_path: Path) -> None:
    """They take hours to make, so names in files do not follow those in code."""
    capture(target, FeatureStore.create(tmp_path / "f", target.meta("tiny", "EAGLE3")), sequences([9, 8]))
    index = json.loads((tmp_path / "f" / "index.json").read_text())
    assert index["version"] == 1 and index["meta"].keys() == {"model", "algorithm", "taps", "hidden", "vocab", "dtype"}
    (shard,) = (tmp_path / "f").glob("*.safetensors")
    assert load_file(shard).keys() == {"ids", "loss_mask", "taps", "final"}


def test_a_store_refuses_what_is_not_its_own(target: FeatureModel, tmp_path: Path) -> None:
    meta = target.meta("tiny", "EAGLE3")
    store = FeatureStore.create(tmp_path / "f", meta)
    capture(target, store, sequences([9, 8]))
    with pytest.raises(ConfigError, match=r"aux_layers: expected .*, found"):
        FeatureStore.create(tmp_path / "f", SourceMeta(**{**meta.__dict__, "aux_layers": (1, 2, 3)}))
    with pytest.raises(ConfigError, match="expected features from"):
        FeatureStore(tmp_path)
    with pytest.raises(IndexError):
        store.read(2)
    (shard,) = (tmp_path / "f").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"expected \d+ bytes, found \d+"):
        FeatureStore(tmp_path / "f")


def test_batches_hold_all_within_their_limit() -> None:
    draw = random.Random(4)
    tokens = sequences([draw.randrange(1, 90) for _ in range(300)] + [500])
    found = list(batches(tokens, 128))
    assert sorted(one.key for batch in found for one in batch) == sorted(one.key for one in tokens)
    padded = [len(batch) * max(len(one.ids) for one in batch) for batch in found]
    assert all(size <= 128 or len(batch) == 1 for size, batch in zip(padded, found, strict=True))
    assert sum(padded) < 1.3 * sum(len(one.ids) for one in tokens), "little padding"
    assert not list(batches([], 128))


# ---- vocabulary ------------------------------------------------------------------------------------------------------


def tokens(ids: list[int], mask: list[bool]) -> Tokens:
    return Tokens(np.array(ids, np.int32), np.array(mask), "a")


def test_the_most_frequent_answer_tokens() -> None:
    draw = random.Random(5)
    ids = [min(int(draw.expovariate(0.02)), 299) for _ in range(20000)]
    mask = [i % 2 == 0 for i in range(len(ids))]
    found = draft_vocabulary([tokens(ids, mask)], 100, 300, ending=[298])
    counts = [0] * 300
    for token, counted in zip(ids, mask, strict=True):
        counts[token] += counted
    assert len(found.ids) == 128 and list(found.ids) == sorted(set(found.ids)) and 298 in found.ids
    others = set(range(300)) - set(found.ids)
    assert min(counts[i] for i in found.ids if i != 298) >= max(counts[i] for i in others)
    assert found.counted == 10000 and abs(found.coverage - sum(counts[i] for i in found.ids) / 10000) < 1e-12
    assert 0.8 < found.coverage < 1


def test_few_tokens_are_filled_up_and_many_are_all() -> None:
    one = tokens([7, 7, 200, 9], [True, True, True, False])
    found = draft_vocabulary([one], 64, 300, ending=[2])
    assert len(found.ids) == 64 and {2, 7, 200} < set(found.ids) and found.coverage == 1
    assert draft_vocabulary([one], 300, 300, ending=[]).ids == tuple(range(300))
    assert covered([one], found.ids, 300) == found
    with pytest.raises(ConfigError, match="no answer"):
        draft_vocabulary([tokens([1, 2], [False, False])], 64, 300, ending=[])
