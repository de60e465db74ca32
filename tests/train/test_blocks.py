"""Blocks in training against serving, block by block: every anchor's block run on its own, and its losses by autograd
through dense softmaxes, in float64 and from the formulas alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from reference.block_heads import (
    IDS,
    block_rows,
    corrected,
    dflash2_head,
    dflash_head,
    domino_head,
    dspark_head,
    paired,
    speculators_head,
)
from reference.checkpoints import Checkpoint, llama_target
from reference.draft_heads import cast
from torch import Tensor

from draftwing.errors import ConfigError
from draftwing.models.heads.loader import load_draft_head
from draftwing.models.loader import load_model
from draftwing.train import blocks, fit, losses
from draftwing.train.blocks import STATS, BlockObjective
from draftwing.train.draft_vocabulary import unused_token
from draftwing.train.fit import make_objective
from draftwing.train.heads import TargetHead, trainable
from draftwing.train.judge import along
from draftwing.train.losses import BlockLoss, teach
from draftwing.train.store import Part, Sample, Tokens, collate, to_device

TARGET = llama_target(4, num_hidden_layers=5, vocab_size=12)
LENGTHS = (9, 14, 4)
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}


class Case(NamedTuple):
    """A head, what its config is expected to say, and what it is trained for."""

    make: Callable[[], Checkpoint]
    rows: int
    from_anchor: bool
    loss: BlockLoss
    windows: tuple[int, int] = (0, 0)
    causal: tuple[bool, bool] = (False, False)


CASES = {
    "dflash, kl": Case(lambda: dflash_head(TARGET), 6, False, BlockLoss("kl", anchors=1.0)),
    "dflash, causal": Case(
        lambda: dflash_head(TARGET, causal_head=True), 6, False, BlockLoss("kl", anchors=1.0), causal=(True, True)
    ),
    "dflash, text, windows": Case(
        lambda: dflash_head(TARGET, **SLIDING), 6, False, BlockLoss("text", anchors=1.0), (4, 0), (True, False)
    ),
    "dflash, d_pace": Case(lambda: dflash_head(TARGET), 6, False, BlockLoss("d_pace", anchors=1.0)),
    "dflash2, kl": Case(lambda: dflash2_head(TARGET), 6, False, BlockLoss("kl", anchors=1.0, decay=0.7)),
    "dflash2, text, three taps": Case(
        lambda: dflash2_head(TARGET, 503, dflash_config={"conv_kernel_size": 3}), 6, False,
        BlockLoss("text", anchors=1.0),
    ),
    "dflash2, own vocabulary": Case(
        lambda: speculators_head(TARGET, "dflash2", seed=506), 5, False,
        BlockLoss("lk_hybrid", anchors=1.0, temperature=0.8),
    ),
    "dspark, tv": Case(lambda: dspark_head(TARGET), 5, True, BlockLoss("tv", anchors=1.0)),
    "dspark, gated, lk_hybrid": Case(
        lambda: dspark_head(TARGET, markov_head_type="gated"), 5, True,
        BlockLoss("lk_hybrid", decay=0.7, confidence=0.5, anchors=1.0),
    ),
    "dspark, rows of the target's lm_head": Case(
        lambda: speculators_head(TARGET, sample_from_anchor=True, tied=True), 5, True, BlockLoss("kl", anchors=1.0)
    ),
    "dspark, d_pace, own vocabulary": Case(
        lambda: speculators_head(TARGET, sample_from_anchor=True), 5, True, BlockLoss("d_pace", anchors=1.0)
    ),
    "dspark, own vocabulary, confidence": Case(
        lambda: confident(speculators_head(TARGET, sample_from_anchor=True)), 5, True,
        BlockLoss("lk_hybrid", anchors=1.0, temperature=0.8),
    ),
    "dspark, recurrent, own vocabulary": Case(
        lambda: recurrent(speculators_head(TARGET, sample_from_anchor=True)), 5, True,
        BlockLoss("tv", anchors=1.0, temperature=0.5),
    ),
    "domino": Case(lambda: domino_head(TARGET), 6, False, BlockLoss("lk_hybrid", anchors=1.0)),
}  # fmt: skip


def confident(head: Checkpoint) -> Checkpoint:
    """A head with a vocabulary of its own, and a confidence head."""
    g, hidden = torch.Generator().manual_seed(4), TARGET.config["hidden_size"]
    more = {
        "confidence_head.proj.weight": torch.randn(1, hidden + 8, generator=g) * 0.3,
        "confidence_head.proj.bias": torch.randn(1, generator=g) * 0.3,
    }
    keys = {"enable_confidence_head": True, "confidence_head_with_markov": True}
    return Checkpoint(head.tensors | more, head.config | keys)


def recurrent(head: Checkpoint) -> Checkpoint:
    """A head with a vocabulary of its own and a recurrent Markov head."""
    g, hidden = torch.Generator().manual_seed(3), TARGET.config["hidden_size"]
    more = {
        "markov_head.joint_proj.weight": torch.randn(24, 16 + hidden, generator=g) * 0.3,
        "markov_head.joint_proj.bias": torch.randn(24, generator=g) * 0.3,
    }
    return Checkpoint(head.tensors | more, head.config | {"markov_head_type": "rnn"})


def samples() -> list[Sample]:
    generator, size = torch.Generator().manual_seed(0), TARGET.config["hidden_size"]
    found = []
    for length in LENGTHS:
        ids = torch.randint(12, (length,), generator=generator, dtype=torch.int32)
        # a prompt, an answer, a second turn: blocks must end where a turn does
        mask = torch.arange(length) >= 2
        mask[6:7] = False
        aux_hidden = torch.randn(length, len(IDS) * size, generator=generator, dtype=torch.float64)
        final = torch.randn(length, size, generator=generator, dtype=torch.float64)
        found.append(Sample(ids, mask, aux_hidden, final))
    return found


class Reference:
    """A head's weights by their names, and the loss of blocks one by one."""

    def __init__(self, case: Case) -> None:
        self.case, self.checkpoint = case, case.make()
        self.w = {
            name: value.requires_grad_() if value.is_floating_point() else value
            for name, value in cast(self.checkpoint.tensors, torch.float64).items()
        }
        t = cast(TARGET.tensors, torch.float64)
        self.embed, self.target_head = t["model.embed_tokens.weight"], t["lm_head.weight"]
        own = "d2t" in self.w
        self.kept = torch.arange(len(self.w["d2t"])) + self.w["d2t"] if own else torch.arange(len(self.target_head))
        trained = own and "lm_head.weight" in self.w
        self.lm_head = self.w["lm_head.weight"] if trained else self.target_head[self.kept]
        self.stats = torch.zeros(case.rows - (not case.from_anchor), len(STATS), dtype=torch.float64)

    def of(self, found: list[Sample]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for sample in found:
            for anchor in range(1, len(sample.ids) - 1):
                if sample.loss_mask[anchor] and sample.loss_mask[anchor + 1]:
                    total = total + self._block(sample, anchor)
        return total

    def rows(self, sample: Sample, anchor: int) -> Tensor:
        """States of the rows that predict."""
        case = self.case
        block = self.embed[torch.tensor([int(sample.ids[anchor])] + [5] * (case.rows - 1))]
        y, _ = block_rows(self.checkpoint, self.w, block, sample.aux_hidden[:anchor], case.windows, case.causal)
        return y[0 if case.from_anchor else 1 :]

    def _block(self, sample: Sample, anchor: int) -> Tensor:
        ids, loss = sample.ids.tolist(), self.case.loss
        y = self.rows(sample, anchor)
        texts: list[Tensor] = []
        sayable: list[bool] = []
        rest: list[Tensor] = []  # of each draft: what is weighted by its place alone
        unsure = second = torch.zeros((), dtype=torch.float64)
        right = True
        for s in range(len(y)):
            j = anchor + s
            if j + 1 >= len(ids) or not sample.loss_mask[j + 1]:
                break
            log_q = corrected(self.w, self.lm_head, y, ids[anchor : j + 1], self.embed).log_softmax(0)
            says = self.target_head @ sample.final[j]
            p, q = (says[self.kept] / loss.temperature).softmax(0), log_q.exp()
            known = float((self.kept == says.argmax()).any())
            place = (self.kept == ids[j + 1]).nonzero().flatten()
            text = -log_q[place].sum()  # 0 of a token that the head cannot say
            accepted = torch.minimum(p, q).sum()
            cross, far = -(p * log_q).sum() * known, (q - p).abs().sum() * known
            texts.append(text)
            sayable.append(len(place) > 0)
            blend = torch.exp(-3 * accepted.detach())
            rest.append({
                "text": text, "kl": cross, "tv": 0.1 * text + 0.9 * far, "d_pace": text,
                "lk_hybrid": blend * cross + (1 - blend) * known * (1 - accepted),
            }[loss.kind])  # fmt: skip
            if "confidence_head.proj.weight" in self.w:
                fed = torch.cat((y[s], self.w["markov_head.markov_w1.weight"][ids[j]]))
                odds = self.w["confidence_head.proj.weight"][0] @ fed + self.w["confidence_head.proj.bias"][0]
                share = (says / loss.temperature).softmax(0)[self.kept].sum()
                error = F.binary_cross_entropy_with_logits(odds, torch.minimum(accepted, share).detach())
                unsure = unsure + loss.decay**s * error
                self.stats[s, 3] += loss.decay**s * error.item()
            best = log_q.argmax()
            if "candidate_selector.predecessor_codebook" in self.w:
                scores = self._paired(y[s].detach(), log_q.detach(), ids[j])
                chosen, best = scores.isfinite(), scores.argmax()
                share = p * known
                if loss.kind == "text":
                    share = torch.zeros_like(p).index_fill(0, place, 1.0)
                value = -(share[chosen] * scores[chosen].log_softmax(0)).sum() * loss.decay**s
                second = second + value
                self.stats[s, 3] += value.item()
            hit = bool(self.kept[best] == says.argmax())
            right = right and hit
            self.stats[s, [0, 2, 4, 5, 6]] += torch.tensor([1, accepted.item(), hit, 1, right], dtype=torch.float64)
        weights = [loss.decay**s for s in range(len(rest))]
        if loss.kind == "d_pace":
            sure = [0.5 * math.exp(-text.item()) * can + 0.5 for text, can in zip(texts, sayable, strict=True)]
            reached = [math.prod(sure[: m + 1]) for m in range(len(sure))]
            weights = [sum(reached[s:]) for s in range(len(sure))]
        for s, (weight, value) in enumerate(zip(weights, rest, strict=True)):
            self.stats[s, 1] += weight * value.item()
        return (
            sum(weight * value for weight, value in zip(weights, rest, strict=True)) + loss.confidence * unsure + second
        )

    def _paired(self, row: Tensor, logits: Tensor, above: int) -> Tensor:
        """Scores of the tokens that the head drafts, of which those that are no candidates have none."""
        every = logits.new_full((len(self.target_head),), -math.inf).scatter(0, self.kept, logits)
        count = (self.checkpoint.config | self.checkpoint.config.get("dflash_config", {}))["selector_top_k"]
        return paired(self.w, count, every, row, above)[self.kept]


def load(case: Case, folder: Path) -> Any:
    target = load_model(TARGET.write(folder / "target"), torch.float64, "cpu")
    head = load_draft_head(case.make().write(folder / "head"), target, "DSPARK", torch.float64, "cpu")
    return trainable(head)


@pytest.mark.slow
@pytest.mark.further(name=["dflash2, text, three taps", "dflash2, own vocabulary"])  # half a minute each
@pytest.mark.parametrize("name", CASES)
def test_all_blocks_at_once_are_each_block_as_served(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    case, reference = CASES[name], Reference(CASES[name])
    head, found = load(case, tmp_path), samples()
    monkeypatch.setattr(losses, "_CPU_ELEMENTS", 3 * head.vocab * case.rows)  # several pieces, the last one short
    expected = reference.of(found)
    expected.backward()
    objective = BlockObjective(head, TargetHead(head.target), case.loss, max(LENGTHS))
    total, stats = objective(collate(found, 64))
    torch.testing.assert_close(total, expected, rtol=1e-7, atol=0)  # angles are rounded to float32
    torch.testing.assert_close(stats, reference.stats, rtol=1e-7, atol=1e-9)
    rows, hits = stats[:, 0].tolist(), stats[:, 4].sum().item()
    assert rows[0] > rows[-1] > 0 and 0 < hits < sum(rows)
    total.backward()
    params = dict(head.named_parameters())
    for stored, part in head.names().items():
        grad = params[part.param].grad
        assert grad is not None and reference.w[stored].grad.abs().max() > 1e-7, f"{stored} is not exercised"
        torch.testing.assert_close(part.of(grad), reference.w[stored].grad, rtol=1e-5, atol=2e-6, msg=stored)
    metrics = objective.metrics(stats)
    share = reference.stats[:, 6] / reference.stats[:, 5]
    assert metrics["accept_length"] == pytest.approx(1 + share.sum().item())
    assert metrics["overlap"] == pytest.approx((reference.stats[:, 2].sum() / sum(rows)).item())


class Given:
    """Samples as a source has them."""

    def __init__(self, found: list[Sample]) -> None:
        self.read_many = lambda numbers: [found[i] for i in numbers]
        self.lengths, self.meta = [len(one.ids) for one in found], None


@pytest.mark.slow
@pytest.mark.further(
    name=[
        "dflash, kl",
        "dflash, d_pace",
        "dspark, tv",
        "dspark, d_pace, own vocabulary",
        "dflash2, text, three taps",
        "dflash2, own vocabulary",
    ]
)  # same heads
@pytest.mark.parametrize("name", CASES)
def test_drafts_along_a_text_are_those_of_each_block(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(blocks, "_AT_ONCE", 3)  # several turns, the last one short
    reference, head, found = Reference(CASES[name]), load(CASES[name], tmp_path), samples()
    none = torch.zeros(LENGTHS[0], dtype=torch.bool)
    found.insert(1, found[0]._replace(loss_mask=none, aux_hidden=found[0].aux_hidden.flip(0)))  # without an answer
    depth, ids_of = CASES[name].rows - 2, [one.ids.tolist() for one in found]
    made, looked_up = {}, list[int]()
    source: Any = Given(found)
    for numbers, batch, drafts, uncalled in along(head, Part(source, range(len(found))), depth, 64):
        length = batch.ids.shape[1]
        for k, products in enumerate(drafts):
            logits: Any = sum(x @ layer.dense_weight().t() for x, layer in products)
            for place, row in zip(batch.position.tolist(), logits, strict=True):
                made[numbers[place // length], place % length + 1, k] = row
        looked_up += [token for x, _ in uncalled if x.dim() == 1 for token in x.tolist()]
    above = []
    for number, (sample, ids) in enumerate(zip(found, ids_of, strict=True)):
        for anchor in (at for at in range(1, len(ids)) if sample.loss_mask[at]):
            y = reference.rows(sample, anchor)
            for k in range(depth):
                above.append(ids[anchor + k] if anchor + k < len(ids) else 0)
                if anchor + k < len(ids):
                    tokens = ids[anchor : anchor + k + 1]
                    expected = corrected(reference.w, reference.lm_head, y, tokens, reference.embed)
                    if "candidate_selector.successor_codebook" in reference.w:
                        w, name = reference.w, "candidate_selector"
                        gate = w[f"{name}.predecessor_codebook"][tokens[-1]] * (
                            w[f"{name}.hidden_projection.weight"] @ y[k]
                        )
                        expected = expected + w[f"{name}.successor_codebook"][reference.kept] @ gate
                    torch.testing.assert_close(made[number, anchor, k], expected.detach(), rtol=1e-6, atol=1e-6)
    if "markov_head.markov_w1.weight" in reference.w:
        assert sorted(looked_up) == sorted(above)


def test_kernels_do_what_torch_does(tmp_path: Path, monkeypatch: Any, mended_interpreter: None) -> None:
    """All of a training step in half precision, with the GPU's kernels in their interpreter and without: the same loss,
    and gradients in the same direction."""
    pytest.importorskip("draftwing.train.kernels.layer_ops")
    case, device = CASES["dspark, gated, lk_hybrid"], "cuda" if torch.cuda.is_available() else "cpu"
    target = load_model(TARGET.write(tmp_path / "target"), torch.bfloat16, device)
    folder = case.make().write(tmp_path / "head")
    found = [one._replace(aux_hidden=one.aux_hidden.bfloat16(), final=one.final.bfloat16()) for one in samples()[:1]]
    results = []
    for kernels in (False, True):
        head = trainable(load_draft_head(folder, target, "DSPARK", torch.float32, device))
        for module in (blocks, losses, fit):
            monkeypatch.setattr(module, "kernels_take", lambda x, kernels=kernels: kernels and x.dtype != torch.float64)
        objective = make_objective(head, TargetHead(target), case.loss, max(LENGTHS))
        with torch.autocast(device, torch.bfloat16):
            total, stats = objective(to_device(collate(found, 64), torch.device(device), None))
        total.backward()
        results.append((total.detach(), stats, {name: one.grad for name, one in head.named_parameters()}))
    (loss, counts, grads), (by_kernels, counted, made) = results
    torch.testing.assert_close(by_kernels, loss, rtol=0.02, atol=0)
    assert torch.equal(counted[:, 0], counts[:, 0])
    for name, grad in grads.items():
        assert F.cosine_similarity(grad.flatten(), made[name].flatten(), 0) > 0.98, name
        assert made[name].norm().item() == pytest.approx(grad.norm().item(), rel=0.1), name


@pytest.mark.slow
def test_some_anchors_stand_for_all(tmp_path: Path) -> None:
    """Drawn by the generator and the same for the same seed; each counts for those that are not looked at; without a
    generator always the same ones."""
    case = CASES["dspark, tv"]
    head, found = load(case, tmp_path), collate(samples(), 64)
    some = BlockObjective(head, TargetHead(head.target), BlockLoss("tv", anchors=0.2), max(LENGTHS))
    whole = BlockObjective(head, TargetHead(head.target), case.loss, max(LENGTHS))
    draw = [some(found, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(draw[0][1], draw[1][1]) and not torch.equal(draw[0][1], draw[2][1])
    assert draw[0][1][0, 0] <= 3 * round(0.2 * 14) < whole(found)[1][0, 0]
    assert torch.equal(some(found)[1], some(found)[1])
    taught = teach(head, TargetHead(head.target), found.final, 1.0)
    assert whole._blocks(found, taught, None).anchors.shape == (3, 11), "of 14 tokens, 3 of which are a prompt's"
    with torch.no_grad():
        mean = sum(some(found, torch.Generator().manual_seed(seed))[0] for seed in range(80)) / 80
        # The shortest text is a fifth of the longest and has fewer anchors than are drawn of each.
        assert float(mean) == pytest.approx(float(whole(found)[0]), rel=0.25)


def test_a_mask_is_a_token_that_no_text_has() -> None:
    used = Tokens(torch.arange(4).int().numpy(), torch.ones(4).bool().numpy(), "a")
    assert unused_token([used], 6) == 5
    with pytest.raises(ConfigError, match="name one as --mask-token"):
        unused_token([used], 4)
