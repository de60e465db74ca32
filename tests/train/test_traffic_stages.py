"""`draftwing train --from`: from what a server was asked to a head that drafts it better, on a target whose text is
mostly a permutation of its tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
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
from safetensors.torch import load_file
from tiny_adapters import write_adapter
from tiny_checkpoint import VOCAB, write_tokenizer

from draftwing import LLM
from draftwing.cli.main import main
from draftwing.config.options import Options
from draftwing.errors import ConfigError
from draftwing.learn.history import HeadHistory
from draftwing.learn.traffic import Exchange, TrafficStore
from draftwing.models.adapters.stored import stored_digest
from draftwing.models.heads.config import BlockConfig
from draftwing.models.heads.loader import load_draft_head
from draftwing.models.heads.mtp import check_trainable
from draftwing.models.heads.own_layers import layers_to_learn
from draftwing.models.loader import load_config, load_model
from draftwing.sched.own_heads import OwnHeads
from draftwing.train import traffic_stages
from draftwing.train.checkpoint import save_head
from draftwing.train.draft_vocabulary import RENEWED, renewed
from draftwing.train.heads import load_head, new_block_head, new_eagle3_head, renew_vocabulary
from draftwing.train.judge import Comparison, Judgement
from draftwing.train.store import Tokens
from draftwing.train.traffic import general_prompts

pytestmark = pytest.mark.slow


def add(folder: Path, texts: Sequence[Tokens]) -> None:
    """Adds exchanges with a client to a folder of traffic."""
    store = TrafficStore(folder, clock=lambda: 0.0)
    for at, text in enumerate(texts, 1):
        ids = text.ids.tolist()
        store.add(Exchange(float(at), "team", None, ids[: learnable.PROMPT], ids[learnable.PROMPT :], 0.0))
    store.close()


class Served:
    """A target, the head it is served with, and a folder of traffic."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.target = folder, learnable.write_target(folder / "target", max_position_embeddings=512)
        model = load_model(self.target, torch.float32, "cpu")
        kept = torch.arange(0, 258, 2)  # half of the tokens
        self.head = self._kept(new_eagle3_head(model, kept), "head")
        self.blocks = {}
        for name, tied in (("own rows", False), ("the target's rows", True)):
            block = BlockConfig(
                (1, 3, 5), 4, 255, True, (), (), markov="vanilla", rank=64, confidence="markov", tied=tied
            )
            self.blocks[name] = self._kept(new_block_head(model, block, kept, 1), name)
        block = BlockConfig((1, 3, 5), 4, 255, False, (), ())
        self.blocks["all tokens"] = self._kept(new_block_head(model, block, None, 1), "all tokens")
        self.texts = learnable.texts(self.target, 100, 1)
        self.add("traffic", 80)

    def _kept(self, head: Any, name: str) -> Path:
        folder = save_head(head, self.folder / name, torch.float32)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "draftwing": {"shapes": {"cpu": [3, 1, 4]}}}))
        return folder

    def add(self, name: str, count: int, first: int = 0) -> None:
        """Adds so many of its texts to a folder of traffic."""
        add(self.folder / name, self.texts[first : first + count])

    def train(self, name: str, *more: str, head: Path | None = None) -> HeadHistory:
        arguments = [
            "train", "--model", str(self.target), "--from", str(self.folder / name), "--out",
            str(self.folder / f"{name} run"), "--init-head", str(head or self.head), "--general-share", "0",
            "--max-length", "128", "--batch-tokens", "256", "--optimizer", "adamw", "--lr", "0.01", "--device", "cpu",
            "--dtype", "float32", "--num-threads", "1", *(() if head else ("--ttt-steps", "3")), *more,
        ]  # fmt: skip
        assert main(arguments) == 0
        return HeadHistory(self.folder / name / "heads")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("served"))


@pytest.fixture
def few_general_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic_stages, "general_prompts", lambda: general_prompts()[:20])
    monkeypatch.setattr(traffic_stages, "PROMPTS", 8)


def test_a_head_that_drafts_later_traffic_better_is_to_be_served(served: Served) -> None:
    history = served.train("traffic", "--epochs", "8", "--lr", "0.02", "--batch-tokens", "128")
    (record,) = history.list()
    assert history.current() == record.number and record.parent is None and record.algorithm == "EAGLE3"
    figures = record.figures
    assert figures["taken"] and figures["traffic"]["texts"] == 16
    before, after = (learnable.accept_length(served.target, path, "EAGLE3", 3) for path in (served.head, record.folder))
    assert figures["traffic"]["length_before"] == pytest.approx(before, abs=0.25)
    assert figures["traffic"]["length_after"] == pytest.approx(after, abs=0.4)
    assert after > 1.2 * before and figures["traffic"]["gain"] > 1.2
    assert record.data["clients"] == {"team": 64}
    assert json.loads((record.folder / "config.json").read_text())["draftwing"]["shapes"] == {"cpu": [3, 1, 4]}
    # What traffic has and the head could not say has taken the place of tokens that nobody says.
    old, new = (load_file(path / "model.safetensors")["t2d"] for path in (served.head, record.folder))
    assert 0 < (new & ~old).sum() <= RENEWED * old.sum() and old.sum() == new.sum()
    # Judged once more, as a second run of the same parent would be: by now the parent is not served.
    served.train("traffic", "eval")
    assert len(history.list()) == 2 and history.list()[1].figures["taken"] and history.current() == record.number
    # A head that was named before the run began and that the server could not take: it had trained the one it had.
    begun = served.folder / "traffic run" / "traffic.json"
    begun.write_text(json.dumps(json.loads(begun.read_text()) | {"served": record.number}))
    served.train("traffic", "eval")
    assert history.list()[2].parent is None and history.current() == history.list()[2].number


def texts_of(served: Served, head: Path, algorithm: str) -> list[list[int]]:
    """Of an engine with this head, greedy and drawn."""
    params = [{"temperature": 0.9 * (i % 2), "max_new_tokens": 24, "sampling_seed": i} for i in range(8)]
    with LLM(str(served.target), **learnable.ENGINE, **learnable.drafting(algorithm, head, 3)) as llm:
        return [list(answer.token_ids) for answer in llm.generate(learnable.prompts(8, 5), params)]


@pytest.mark.exhaustive  # as in test_command.py
@pytest.mark.further(name="all tokens")
@pytest.mark.further(name="the target's rows")
@pytest.mark.parametrize("name", ["own rows", "the target's rows", "all tokens"])
def test_a_head_that_drafts_blocks_learns_as_others(
    served: Served, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    algorithm, parent, folder = "DFLASH" if name == "all tokens" else "DSPARK", served.blocks[name], f"of {name}"
    served.add(folder, 100)
    words = ("--algorithm", algorithm, "--epochs", "8", "--lr", "0.02", "--anchors", "1")
    (record,) = served.train(folder, *words, head=parent).list()
    figures = record.figures
    assert figures["taken"] and record.algorithm == algorithm and record.data["clients"] == {"team": 80}
    before, after = (learnable.accept_length(served.target, path, algorithm, 3) for path in (parent, record.folder))
    assert figures["traffic"]["length_before"] == pytest.approx(before, abs=0.25)
    assert figures["traffic"]["length_after"] == pytest.approx(after, abs=0.4)
    assert after > 1.15 * before and figures["traffic"]["gain"] > 1.15
    assert texts_of(served, parent, algorithm) == texts_of(served, record.folder, algorithm)
    if name == "all tokens":
        assert "draft vocabulary: that of the target, which does not change" in capsys.readouterr().err
    else:
        old, new = (load_file(path / "model.safetensors")["t2d"] for path in (parent, record.folder))
        assert 0 < (new & ~old).sum() <= RENEWED * old.sum() and old.sum() == new.sum()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_learns_with_a_head_that_drafts_blocks(served: Served) -> None:
    served.add("blocks on a gpu", 100)
    words = ("--algorithm", "DSPARK", "--epochs", "20", "--lr", "0.02", "--anchors", "1", "--device", "cuda")
    (record,) = served.train("blocks on a gpu", *words, head=served.blocks["own rows"]).list()
    assert record.figures["taken"] and record.figures["traffic"]["gain"] > 1.15


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_learns_judges_and_merges(served: Served) -> None:
    served.add("on a gpu", 100)
    (record,) = served.train("on a gpu", "--epochs", "20", "--device", "cuda").list()
    assert record.figures["taken"] and record.figures["traffic"]["gain"] > 1.3


def test_a_head_that_learnt_nothing_is_kept_and_not_served(served: Served) -> None:
    served.add("same", 60)
    history = served.train("same", "--epochs", "0.1", "--lr", "1e-9")
    (record,) = history.list()
    assert history.current() is None and not record.figures["taken"]
    assert record.figures["reason"] == "not better by more than noise"


def test_a_run_of_an_older_version_begins_anew_where_nobody_looks(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    served.add("older", 44)

    def train(out: Path) -> int:
        history = served.train("older", "--epochs", "1", "--out", str(out))
        state = out / "fit" / "state.pt"
        found = torch.load(state, weights_only=True)
        found["identity"]["config.lr"] = 0.02
        torch.save(found, state)
        return len(history.list())

    own = served.folder / "older" / "training"  # of a server
    assert [train(own), train(own)] == [1, 2]
    first, second = HeadHistory(served.folder / "older" / "heads").list()
    assert first.sha256 == second.sha256
    assert train(served.folder / "a user's") == 3
    with pytest.raises(AssertionError):
        train(served.folder / "a user's")
    assert "config.lr: 0.02, now 0.01" in capsys.readouterr().err


def test_too_little_traffic_is_refused(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.add("little", 20)
    words = ["train", "generate", "--model", str(served.target), "--from", str(served.folder / "little"), "--out",
             str(served.folder / "no run"), "--init-head", str(served.head), "--general-share", "0"]  # fmt: skip
    assert main(words) == 2
    assert "has 16 exchanges to learn from: expected 32" in capsys.readouterr().err
    assert not (served.folder / "no run" / "traffic.json").exists()  # or a later try would see no more
    served.add("little", 60, 20)
    assert main([*words, "--max-length", "100"]) == 0
    assert (served.folder / "no run" / "traffic.json").exists()


RANK = 16  # of hidden states of 32


class Adapted:
    """An adapter of the target, a head of the target's that knows nothing of it, and its answers in the traffic."""

    def __init__(self, served: Served, name: str, seed: int = 5) -> None:
        self.served, self.name = served, name
        fresh = served._kept(new_eagle3_head(load_model(served.target, torch.float32, "cpu"), None), f"{name} fresh")
        words = "--epochs", "8", "--lr", "0.02", "--batch-tokens", "128", "--ttt-steps", "3"
        served.add(name, 80)
        self.head = served.train(name, *words, "--out", str(served.folder / f"{name} first"), head=fresh).get(1).folder
        self.path = write_adapter(served.folder / f"{name} adapter", served.target, seed, rank=4, strength=0.1)
        self.digest, self.given = stored_digest(self.path), f"{name}={self.path}"
        starts = learnable.prompts(100, 7)
        store = TrafficStore(served.folder / name, clock=lambda: 0.0)
        for at, (start, (answer, _)) in enumerate(zip(starts, self.answers(starts), strict=True), 1):
            assert store.add(Exchange(float(at), "team", None, start, answer, 0.0, self.digest))
        store.close()

    def answers(self, starts: list[list[int]], head: Path | None = None) -> list[tuple[list[int], tuple[int, int]]]:
        """Of each start: token ids, and how many drafts were right in how many steps. head: of the adapter's own."""
        params = {"temperature": 0, "max_new_tokens": learnable.ANSWER, "ignore_eos": True}
        options = {**learnable.ENGINE, **learnable.drafting("EAGLE3", self.head, 3), "max_lora_head_rank": RANK}
        with LLM(str(self.served.target), **options, lora_modules=[self.given]) as llm:
            if head is not None:
                llm.engine.swap_draft(head, self.digest)
            found = llm.generate(starts, params, adapter=self.name)
        metas = [one.meta_info for one in found]
        counts = [(meta["spec_num_correct_drafts"], meta["spec_verify_ct"]) for meta in metas]
        return [(one.token_ids, count) for one, count in zip(found, counts, strict=True)]

    def train(self, *more: str) -> HeadHistory:
        words = "--adapter", self.given, "--head-rank", str(RANK), "--epochs", "8", "--batch-tokens", "128"
        return self.served.train(self.name, *words, "--lr", "0.02", "--ttt-steps", "3", *more, head=self.head)


def length(found: list[tuple[list[int], tuple[int, int]]]) -> float:
    return 1 + sum(right for _, (right, _) in found) / sum(steps for _, (_, steps) in found)


def test_an_adapters_own_head_learns_from_its_traffic_alone(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It begins with nothing, then with what is served; what is judged is what an engine then accepts."""
    monkeypatch.setattr(OwnHeads, "next", lambda self, key: True)
    adapted = Adapted(served, "sql")
    history = adapted.train()
    first, record = history.list()
    assert record.adapter == adapted.digest and history.current(adapted.digest) == record.number
    assert (history.current(), first.adapter) == (first.number, ""), "the model's own is what it was"
    assert record.parent is None and record.data["clients"] == {"team": 80} and record.data["adapter"] == "sql"
    later = learnable.prompts(24, 99)
    before, after = adapted.answers(later), adapted.answers(later, record.folder)
    assert [text for text, _ in before] == [text for text, _ in after]
    assert length(after) > 1.2 * length(before)
    traffic = record.figures["traffic"]
    assert traffic["length_before"] == pytest.approx(length(before), abs=0.25)
    assert traffic["length_after"] == pytest.approx(length(after), abs=0.4)
    # The next one begins with these factors, of which it keeps some where little is learnt.
    adapted.train("--out", str(served.folder / "sql again"), "--epochs", "1", "--lr", "1e-9")
    second = history.list()[2]
    assert second.parent == record.number and not second.figures["taken"]
    for figure in ("length_before", "length_after"):
        assert second.figures["traffic"][figure] == pytest.approx(traffic["length_after"], abs=0.02)
    assert length(adapted.answers(later, second.folder)) == pytest.approx(length(after), abs=0.02)
    (adapted.path / "adapter_config.json").write_text((adapted.path / "adapter_config.json").read_text() + " ")
    with pytest.raises(AssertionError):
        adapted.train("--out", str(served.folder / "sql other"))
    assert "has 0 exchanges of this adapter, as its files are now" in capsys.readouterr().err


@pytest.mark.usefixtures("few_general_prompts")
def test_general_text_is_the_models_own_and_serves_later_runs(served: Served) -> None:
    served.add("mixed", 60)
    general = served.folder / "mixed" / "general"
    general.mkdir()
    prompts = [json.dumps({"turns": [f"prompt {i}"]}) for i in range(80)]  # that an earlier run has let it write
    (general / "prompts-000.jsonl").write_text("\n".join(prompts))
    served.train("mixed", "--general-share", "0.2", "--epochs", "1", "--max-tokens", "16")
    answers = [json.loads(line) for line in (general / "responses.jsonl").read_bytes().splitlines()]
    fixed = {prompt.key for prompt in general_prompts()}  # that heads are judged by, never trained on
    assert len(fixed) == len(general_prompts()), "some are the same"
    lengths = [end - start for line in answers if line["key"] not in fixed for start, end in line["spans"]]
    learnt = sum(int(text.loss_mask.sum()) for text in served.texts[:48])
    (record,) = HeadHistory(served.folder / "mixed" / "heads").list()
    assert record.figures["general"]["texts"] == len(answers) - len(lengths) >= 8
    assert sum(lengths) / (sum(lengths) + learnt) == pytest.approx(0.2, abs=0.05)
    assert record.data["general"] == len(lengths)


@pytest.mark.usefixtures("few_general_prompts")
def test_general_text_of_an_adapter_is_what_it_answers(served: Served) -> None:
    """To prompts that all share; its answers are its own."""
    adapted, general = Adapted(served, "talks"), served.folder / "talks" / "general"
    general.mkdir()
    prompts = [json.dumps({"turns": [f"prompt {i}"]}) for i in range(80)]
    (general / "prompts-000.jsonl").write_text("\n".join(prompts))
    record = adapted.train("--general-share", "0.2", "--epochs", "1", "--max-tokens", "16").list()[-1]
    assert {path.name for path in general.iterdir()} == {"prompts-000.jsonl", adapted.digest}
    answers = [json.loads(line) for line in (general / adapted.digest / "responses.jsonl").read_bytes().splitlines()]
    assert record.figures["general"]["texts"] >= 8 and record.data["general"] >= 4
    spans = [(one["ids"], *one["spans"][0]) for one in answers if one["temperature"] == 0]
    given, params = [ids[:start] for ids, start, _ in spans], {"temperature": 0, "max_new_tokens": 16}
    with LLM(str(served.target), **learnable.ENGINE, lora_modules=[adapted.given]) as llm:
        own, other = ([one.token_ids for one in llm.generate(given, params, adapter=name)]
                      for name in (adapted.name, None))  # fmt: skip
    assert [ids[start:end] for ids, start, end in spans] == own != other and len(own) > 4


def test_a_new_token_begins_as_others_of_the_target_would(served: Served) -> None:
    target = load_model(served.target, torch.float32, "cpu")
    head = load_head(served.head, target, "EAGLE3")
    assert head.target_ids is not None and head.lm_head is not None
    before = dict(zip(head.target_ids.tolist(), head.lm_head.weight.detach().clone(), strict=True))
    text = Tokens(torch.tensor([1, 3, 3, 5, 5, 5, 8, 9]).int().numpy(), (torch.arange(8) > 0).numpy(), "a")
    ids = renewed(list(before), [text, text], 258, (256,))
    assert set(ids) - set(before) == {3, 5, 9} and set(before) - set(ids) == {250, 252, 254}
    renew_vocabulary(head, ids)
    assert head.target_ids.tolist() == ids == sorted(ids)
    for token, row in zip(ids, head.lm_head.weight, strict=True):
        # A fresh head's rows are the target's, so the map between them changes nothing, but for what keeps it small.
        if token in before:
            assert torch.equal(row, before[token])
        else:
            torch.testing.assert_close(row, target.lm_head.dense_weight()[token], rtol=0.1, atol=0.05)
    again = load_draft_head(save_head(head, served.folder / "renewed", torch.float32), target, "EAGLE3",
                            torch.float32, "cpu")  # fmt: skip
    assert again.target_ids is not None and again.target_ids.tolist() == ids


@pytest.mark.usefixtures("few_general_prompts")
def test_a_head_that_forgets_is_merged_with_less_of_what_was_trained(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is found for each weight. Where less of it ends all gain, the weight before stays.
    least_of_it = [(1.1, 0.975), (1.05, 0.975), (1.04, 0.985)]
    gains = iter([*least_of_it, (1.1, 0.975), (1.0, 0.99), *least_of_it, (1.1, 1.0)])
    kept = []

    def judged(*given: Any) -> Judgement:
        kept.append(given[-1])
        traffic, general = (Comparison(40, 2.0, 2.0 * gain, gain, 0.001) for gain in next(gains))
        return Judgement(traffic, {}, general)

    monkeypatch.setattr(traffic_stages, "judge", judged)
    general = served.folder / "forgetful" / "general"
    served.add("forgetful", 44)
    general.mkdir()
    (general / "prompts-000.jsonl").write_text(json.dumps({"turns": ["prompt"]}))
    (record,) = served.train("forgetful", "--general-share", "0.05", "--epochs", "1", "--max-tokens", "16").list()
    target = load_model(served.target, torch.float32, "cpu")
    trained = torch.load(served.folder / "forgetful run" / "fit" / "state.pt", weights_only=True)["head"]
    parent, found = (load_head(path, target, "EAGLE3") for path in (served.head, record.folder))
    assert parent.target_ids is not None and found.target_ids is not None
    renew_vocabulary(parent, found.target_ids.tolist())
    before = dict(parent.named_parameters())
    for name, mine in found.named_parameters():
        if mine.dim() == 1:  # what is no matrix goes the last weight's share of the way
            torch.testing.assert_close(mine, 0.8 * before[name] + 0.2 * trained[name], rtol=1e-5, atol=1e-6, msg=name)
        elif mine.requires_grad:  # `tests/train/test_merge.py` has what a matrix is to be
            assert not any(torch.allclose(mine, other[name], atol=1e-6) for other in (before, trained)), name
    # Judged again, as by a run that was stopped.
    most, least = (served.train("forgetful", "--general-share", "0.05", "eval").list()[-1] for _ in range(2))
    assert most.figures["taken"] and most.figures["general"]["gain"] == 0.975
    found = load_head(most.folder, target, "EAGLE3")
    torch.testing.assert_close(found.norm.weight, 0.2 * before["norm.weight"] + 0.8 * trained["norm.weight"])
    assert least.figures["taken"] and least.sha256 == record.sha256
    # What is trained from it has to make up for what it has forgotten.
    out, rest = (
        str(served.folder / "forgetful next"),
        ("--general-share", "0.05", "--epochs", "0.1", "--max-tokens", "16"),
    )
    served.train("forgetful", "--out", out, *rest, head=record.folder)
    assert kept[:-1] == [1.0] * 8 and kept[-1] == record.figures["kept"] == 0.985


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


def asked(folder: Path, target: Path) -> None:
    add(folder / "traffic", learnable.texts(target, 60, 1))


def learnt(folder: Path, target: Path, *more: str) -> HeadHistory:
    arguments = [
        "train", "--model", str(target), "--from", str(folder / "traffic"), "--out", str(folder / "run"),
        "--algorithm", "MTP", "--general-share", "0", "--max-length", "128", "--batch-tokens", "256", "--optimizer",
        "adamw", "--lr", "0.01", "--ttt-steps", "3", "--epochs", "4", "--device", "cpu", "--dtype", "float32",
        "--num-threads", "1", *more,
    ]  # fmt: skip
    assert main(arguments) == 0
    return HeadHistory(folder / "traffic" / "heads")


def answered(llm: LLM) -> tuple[list[list[int]], float]:
    """Texts, greedy and drawn, and the acceptance length."""
    params = [{"temperature": 0.9 * (i % 2), "max_new_tokens": 20, "sampling_seed": i} for i in range(8)]
    found = llm.generate(learnable.prompts(8, 5), params)
    metas = [one.meta_info for one in found]
    accepted, steps = (sum(meta[name] for meta in metas) for name in ("spec_num_correct_drafts", "spec_verify_ct"))
    return [list(one.token_ids) for one in found], 1 + accepted / steps


@pytest.mark.further(kind="qwen3.5")
@pytest.mark.parametrize("kind", ["qwen3.5", "mimo"])
def test_it_learns_and_is_replaced_in_a_running_engine(tmp_path: Path, kind: str) -> None:
    target = written(tmp_path / "target", kind)
    before = files(target)
    asked(tmp_path, target)
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
    target = written(tmp_path / "target", "qwen3.5")
    asked(tmp_path, target)
    history = learnt(tmp_path, target, "--device", "cuda", "--dtype", "bfloat16")
    (record,) = history.list()
    assert record.figures["taken"] and record.figures["traffic"]["gain"] > 1.3


@pytest.mark.further(beside=False)
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
