"""`draftwing train --from`: from what a server was asked to a head that drafts it better, on a target whose text is
mostly a permutation of its tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import learnable
from safetensors.torch import load_file

from draftwing import LLM
from draftwing.cli.main import main
from draftwing.learn.history import HeadHistory
from draftwing.learn.traffic import Exchange, TrafficStore
from draftwing.models.heads.block_config import BlockConfig
from draftwing.models.heads.loader import load_draft_head
from draftwing.models.loader import load_model
from draftwing.train import traffic_stages
from draftwing.train.checkpoint import save_head
from draftwing.train.general_prompts import general_prompts
from draftwing.train.heads import load_head, new_block_head, new_eagle3_head, renew_vocabulary
from draftwing.train.judge import Comparison, Judgement
from draftwing.train.store import Tokens
from draftwing.train.vocabulary import RENEWED, renewed

pytestmark = pytest.mark.slow


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
        self.add("traffic", learnable.texts(self.target, 120, 1))

    def _kept(self, head: Any, name: str) -> Path:
        folder = save_head(head, self.folder / name, torch.float32)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "draftwing": {"shapes": {"cpu": [3, 1, 4]}}}))
        return folder

    def add(self, name: str, texts: Sequence[Tokens], client: str = "team") -> None:
        store = TrafficStore(self.folder / name, clock=lambda: 0.0)
        for at, text in enumerate(texts, 1):
            ids = text.ids.tolist()
            store.add(Exchange(float(at), client, None, ids[: learnable.PROMPT], ids[learnable.PROMPT :], 0.0))
        store.close()

    def train(self, name: str, *more: str, head: Path | None = None) -> HeadHistory:
        arguments = [
            "train", "--model", str(self.target), "--from", str(self.folder / name), "--out",
            str(self.folder / f"{name} run"), "--init-head", str(head or self.head), "--general-share", "0",
            "--max-length", "128", "--batch-tokens", "512", "--optimizer", "adamw", "--lr", "0.01", "--device", "cpu",
            "--dtype", "float32", "--num-threads", "1", *(() if head else ("--ttt-steps", "3")), *more,
        ]  # fmt: skip
        assert main(arguments) == 0
        return HeadHistory(self.folder / name / "heads")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("served"))


def test_a_head_that_drafts_later_traffic_better_is_to_be_served(served: Served) -> None:
    history = served.train("traffic", "--epochs", "20")
    (record,) = history.list()
    assert history.current() == record.number and record.parent is None and record.algorithm == "EAGLE3"
    figures = record.figures
    assert figures["taken"] and figures["traffic"]["texts"] == 24
    before, after = (learnable.accept_length(served.target, path, "EAGLE3", 3) for path in (served.head, record.folder))
    assert figures["traffic"]["length_before"] == pytest.approx(before, abs=0.25)
    assert figures["traffic"]["length_after"] == pytest.approx(after, abs=0.4)
    assert after > 1.3 * before and figures["traffic"]["gain"] > 1.3
    assert record.data["clients"] == {"team": 96}
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


@pytest.mark.further(name="all tokens")
@pytest.mark.further(name="the target's rows")
@pytest.mark.parametrize("name", ["own rows", "the target's rows", "all tokens"])
def test_a_head_that_drafts_blocks_learns_as_others(
    served: Served, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    algorithm, parent, folder = "DFLASH" if name == "all tokens" else "DSPARK", served.blocks[name], f"of {name}"
    served.add(folder, learnable.texts(served.target, 120, 1))
    words = ("--algorithm", algorithm, "--epochs", "20", "--lr", "0.02", "--anchors", "1")
    (record,) = served.train(folder, *words, head=parent).list()
    figures = record.figures
    assert figures["taken"] and record.algorithm == algorithm and record.data["clients"] == {"team": 96}
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
    served.add("blocks on a gpu", learnable.texts(served.target, 120, 7))
    words = ("--algorithm", "DSPARK", "--epochs", "20", "--lr", "0.02", "--anchors", "1", "--device", "cuda")
    (record,) = served.train("blocks on a gpu", *words, head=served.blocks["own rows"]).list()
    assert record.figures["taken"] and record.figures["traffic"]["gain"] > 1.15


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_learns_judges_and_merges(served: Served) -> None:
    served.add("on a gpu", learnable.texts(served.target, 120, 7))
    (record,) = served.train("on a gpu", "--epochs", "20", "--device", "cuda").list()
    assert record.figures["taken"] and record.figures["traffic"]["gain"] > 1.3


def test_a_head_that_learnt_nothing_is_kept_and_not_served(served: Served) -> None:
    served.add("same", learnable.texts(served.target, 60, 2))
    history = served.train("same", "--epochs", "0.1", "--lr", "1e-9")
    (record,) = history.list()
    assert history.current() is None and not record.figures["taken"]
    assert record.figures["reason"] == "not better by more than noise"


def test_a_run_of_an_older_version_begins_anew_where_nobody_looks(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    served.add("older", learnable.texts(served.target, 60, 6))

    def train(out: Path) -> int:
        history = served.train("older", "--epochs", "2", "--out", str(out))
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
    served.add("little", learnable.texts(served.target, 20, 3))
    words = ["train", "generate", "--model", str(served.target), "--from", str(served.folder / "little"), "--out",
             str(served.folder / "no run"), "--init-head", str(served.head), "--general-share", "0"]  # fmt: skip
    assert main(words) == 2
    assert "has 16 exchanges to learn from: expected 32" in capsys.readouterr().err
    assert not (served.folder / "no run" / "traffic.json").exists()  # or a later try would see no more
    served.add("little", learnable.texts(served.target, 60, 5))
    assert main([*words, "--max-length", "100"]) == 0
    assert (served.folder / "no run" / "traffic.json").exists()


def test_general_text_is_the_models_own_and_serves_later_runs(served: Served) -> None:
    texts = learnable.texts(served.target, 60, 4)
    served.add("mixed", texts)
    general = served.folder / "mixed" / "general"
    general.mkdir()
    prompts = [json.dumps({"turns": [f"prompt {i}"]}) for i in range(80)]  # that an earlier run has let it write
    (general / "prompts-000.jsonl").write_text("\n".join(prompts))
    served.train("mixed", "--general-share", "0.2", "--epochs", "1", "--max-tokens", "16")
    answers = [json.loads(line) for line in (general / "responses.jsonl").read_bytes().splitlines()]
    fixed = {prompt.key for prompt in general_prompts()}  # that heads are judged by, never trained on
    assert len(fixed) == len(general_prompts()), "some are the same"
    lengths = [end - start for line in answers if line["key"] not in fixed for start, end in line["spans"]]
    learnt = sum(int(text.loss_mask.sum()) for text in texts[:48])
    (record,) = HeadHistory(served.folder / "mixed" / "heads").list()
    assert record.figures["general"]["texts"] == len(answers) - len(lengths) >= 10
    assert sum(lengths) / (sum(lengths) + learnt) == pytest.approx(0.2, abs=0.05)
    assert record.data["general"] == len(lengths)


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
    served.add("forgetful", learnable.texts(served.target, 60, 5))
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
