"""`draftwing train --from` where a model's own prediction layer drafts: it is the first parent, and what it becomes is
a head of its own that takes its place in a running engine."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import gemma4_models
import moe_models
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hybrid_gguf import write
from hybrid_models import layer_weights, reference, with_layer
from reference import learnable
from reference.checkpoints import mimo
from reference.exact_heads import cycles, make_codes, readout
from tiny_checkpoint import VOCAB, write_tokenizer

from draftwing import LLM
from draftwing.cli.main import main
from draftwing.config.options import Options
from draftwing.errors import ConfigError
from draftwing.learn.history import HeadHistory
from draftwing.learn.traffic import Exchange, TrafficStore
from draftwing.models.heads.mtp import check_trainable
from draftwing.models.heads.own_layers import layers_to_learn
from draftwing.models.loader import load_config, load_model
from draftwing.train.checkpoint import save_head
from draftwing.train.heads import load_head

CHAIN = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4,
         "speculative_fixed_shape": True}  # fmt: skip


def qwen() -> Any:
    """A Qwen3.5 whose text is mostly a permutation of its tokens, as of `learnable.write_target`."""
    theirs = reference("qwen3.5", vocab_size=VOCAB, num_hidden_layers=8, eos_token_id=256, max_position_embeddings=512)
    codes, successor = make_codes(VOCAB, 64, 16, 4), cycles(VOCAB, list(range(VOCAB)), 5)
    with torch.no_grad():
        for name, value in theirs.named_parameters():
            if any(part in name for part in ("o_proj", "out_proj", "down_proj")):
                value.mul_(0.15)
        theirs.model.embed_tokens.weight.copy_(codes.embedding)
        norm = 1 + theirs.model.norm.weight.double()
        theirs.lm_head.weight.copy_(readout(codes, norm, successor.argsort()))
    return theirs


def written(folder: Path, kind: str) -> Path:
    if kind == "mimo":
        plain = mimo(3, vocab_size=VOCAB, num_hidden_layers=6, eos_token_id=256, max_position_embeddings=512)
        return learnable.write_target(folder, plain=plain)
    theirs = qwen()
    path = with_layer(folder, theirs, layer_weights(theirs))
    write_tokenizer(path)
    return path


def files(path: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in path.iterdir()}


def learnt(folder: Path, target: Path, *more: str) -> HeadHistory:
    store = TrafficStore(folder / "traffic", clock=lambda: 0.0)
    for at, text in enumerate(learnable.texts(target, 120, 1), 1):
        ids = text.ids.tolist()
        store.add(Exchange(float(at), "team", None, ids[: learnable.PROMPT], ids[learnable.PROMPT :], 0.0))
    store.close()
    arguments = [
        "train", "--model", str(target), "--from", str(folder / "traffic"), "--out", str(folder / "run"),
        "--algorithm", "MTP", "--general-share", "0", "--max-length", "128", "--batch-tokens", "512", "--optimizer",
        "adamw", "--lr", "0.01", "--ttt-steps", "3", "--epochs", "20", "--device", "cpu", "--dtype", "float32",
        "--num-threads", "1", *more,
    ]  # fmt: skip
    assert main(arguments) == 0
    return HeadHistory(folder / "traffic" / "heads")


def answered(llm: LLM) -> tuple[list[list[int]], float]:
    """Texts, greedy and drawn, and the acceptance length."""
    params = [{"temperature": 0.9 * (i % 2), "max_new_tokens": 24, "sampling_seed": i} for i in range(16)]
    found = llm.generate(learnable.prompts(16, 5), params)
    metas = [one.meta_info for one in found]
    accepted, steps = (sum(meta[name] for meta in metas) for name in ("spec_num_correct_drafts", "spec_verify_ct"))
    return [list(one.token_ids) for one in found], 1 + accepted / steps


@pytest.mark.slow
@pytest.mark.further(kind="qwen3.5")
@pytest.mark.further(kind="qwen3.5")
@pytest.mark.parametrize("kind", ["qwen3.5", "mimo"])
def test_it_learns_and_is_replaced_in_a_running_engine(tmp_path: Path, kind: str) -> None:
    target = written(tmp_path / "target", kind)
    before = files(target)
    history = learnt(tmp_path, target)
    (record,) = history.list()
    assert files(target) == before, "the checkpoint stays as it is"
    assert record.figures["taken"] and history.current() == record.number
    assert record.algorithm == "MTP" and record.parent is None
    with LLM(str(target), **learnable.ENGINE, **CHAIN, speculative_algorithm="NEXTN") as llm:
        texts, old = answered(llm)
        llm.engine.swap_draft(record.folder)
        found, new = answered(llm)
        assert found == texts and new > 1.3 * old
        llm.engine.swap_draft(None)
        assert answered(llm) == (texts, old)
    # The next run begins with what was learnt.
    again = learnt(tmp_path, target, "--out", str(tmp_path / "second"), "--epochs", "1").list()
    assert [one.parent for one in again] == [None, record.number]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_it_learns_on_a_gpu(tmp_path: Path) -> None:
    history = learnt(tmp_path, written(tmp_path / "target", "qwen3.5"), "--device", "cuda", "--dtype", "bfloat16")
    (record,) = history.list()
    assert record.figures["taken"] and record.figures["traffic"]["gain"] > 1.3


@pytest.mark.slow
@pytest.mark.parametrize("beside", [False, True])
def test_the_layer_of_a_file_is_replaced_too(tmp_path: Path, beside: bool) -> None:
    """Whose own layer is in blocks of another kind than those of a trained one."""
    theirs, kind = qwen(), Type.Q4_0
    model, both = dict(theirs.state_dict()), {**theirs.state_dict(), **layer_weights(theirs)}
    path = write(tmp_path / "Qwen-4B-Q4_0.gguf", theirs.config, model if beside else both, kind)
    side = tmp_path / "mtp-Qwen-4B-Q4_0.gguf"
    source = write(side, theirs.config, both, kind, only_mtp=True) if beside else path
    assert layers_to_learn(Options.from_kwargs(model=str(path)).resolve()) == str(source)
    head = load_head(source, load_model(path, torch.float32, "cpu"), "MTP")
    with torch.no_grad():
        for value in head.parameters():
            value.mul_(1.1)
    other = save_head(head, tmp_path / "head")
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    write_tokenizer(tokenizer)
    (tokenizer / "config.json").write_text("{}")
    options = {**learnable.ENGINE, **CHAIN, "dtype": "auto", "tokenizer_path": str(tokenizer)}
    with LLM(str(path), **options, learn=str(tmp_path / "traffic")) as llm:
        assert llm.engine.options.drafter == "NEXTN"
        texts, _ = answered(llm)
        llm.engine.swap_draft(other)
        assert answered(llm)[0] == texts
        llm.engine.swap_draft(None)
        assert answered(llm)[0] == texts


def test_layers_of_other_kinds_are_refused_by_name(tmp_path: Path) -> None:
    theirs = moe_models.reference("glm4-moe")
    weights = moe_models.published(theirs, moe_models.predicting(theirs))
    folder = moe_models.with_layer(tmp_path / "glm", theirs, weights)
    options = Options.from_kwargs(model=str(folder)).resolve()
    with pytest.raises(ConfigError, match=r"layers of Glm4MoeForCausalLM cannot be trained: .* found experts"):
        layers_to_learn(options)
    with pytest.raises(ConfigError, match="Glm4MoeForCausalLM cannot be trained"):
        load_head(folder, load_model(folder, torch.float32, "cpu"), "MTP")
    two = mimo(3, layers=2).write(tmp_path / "two")
    with pytest.raises(ConfigError, match="takes one prediction layer, MiMoForCausalLM has 2"):
        layers_to_learn(Options.from_kwargs(model=str(two)).resolve())
    gemma4_models.reference("dense").save_pretrained(tmp_path / "windows")
    with pytest.raises(ConfigError, match="found attention with a window"):
        check_trainable(load_config(tmp_path / "windows"), 1)
    theirs = reference("qwen3.5")
    theirs.save_pretrained(tmp_path / "plain")
    assert layers_to_learn(Options.from_kwargs(model=str(tmp_path / "plain")).resolve()) is None
