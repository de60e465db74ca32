"""With speculation on, sampled tokens follow the target's distribution: frequencies against exact probabilities from a
dense float64 forward, by chi-square. Trees are whole, parts, or whatever the policy learns from drafts that were drawn,
too."""

import math

import pytest
import torch
from made_up_costs import OnMadeUpMachine
from plain_attention import FunctionAttend

from draftwing.config.trees import PLAIN, TreeShape
from draftwing.models.heads.base import DraftLM
from draftwing.ops import make_ops
from draftwing.ops.types import SamplingGroups
from draftwing.requests.sampling_params import SamplingParams
from draftwing.spec.model_drafter import ModelDrafter

DRAWS = 3000
WHOLE = TreeShape(3, 3, 8)
MENU = (WHOLE, WHOLE._replace(verified=4), WHOLE._replace(verified=2), TreeShape(1, 3, 4, 2), PLAIN)


def sampling_drafter(harness):
    """A small model whose distributions are flatter than the target's, and which draws as that does."""
    ops, draft = make_ops(torch.device(harness.device)), harness.tiny_model(sharpen=1.7)
    return ModelDrafter(DraftLM(draft, harness.VOCAB), 33, WHOLE.topk, torch.float32, ops)


def dense_logits(model, tokens):
    """tokens [S, T] -> logits [S, V] after the last token, attention written out in full."""
    device = model.embed.weight.device
    tokens = tokens.to(device)
    batch, length = tokens.shape
    config = model.config
    group = config.attention.heads // config.attention.kv_heads
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()

    def attend(layer, q, k, v):
        q, k, v = (t.double().view(batch, length, -1, config.attention.head_dim).transpose(1, 2) for t in (q, k, v))
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = (q @ k.transpose(2, 3) / config.attention.head_dim**0.5).masked_fill(~causal, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch * length, -1).float()

    with torch.inference_mode():
        hidden, _ = model(tokens.flatten(), torch.arange(length, device=device).repeat(batch), FunctionAttend(attend))
        return model.logits(hidden.view(batch, length, -1)[:, -1]).double().cpu()


def chi_square(counts, probs):
    """(statistic, critical value): cells expected fewer than 5 times are pooled. The critical value is the 1 - 1e-4
    quantile in Wilson and Hilferty's approximation."""
    expected = probs * counts.sum()
    rare = expected < 5
    pooled = [(counts[~rare], expected[~rare])]
    if rare.any():
        pooled.append((counts[rare].sum()[None], expected[rare].sum()[None]))
    observed, wanted = (torch.cat(parts) for parts in zip(*pooled, strict=True))
    degrees = len(observed) - 1
    critical = degrees * (1 - 2 / (9 * degrees) + 3.719 * math.sqrt(2 / (9 * degrees))) ** 3
    return float(((observed - wanted) ** 2 / wanted).sum()), critical


def draw_by_row(rig, monkeypatch):
    """Lets rows with a temperature, which all have here, verify parts of trees, as on a GPU. Returns a list that grows
    with each step that does."""
    ops, steps = rig.executor.ops, []
    draw, assign = ops.draw, ops.assign

    def drawn(nodes, table, drawing, *rest):
        every = torch.arange(len(nodes.rows), device=nodes.rows.device)
        return draw(nodes, table, SamplingGroups(every, every[:0], every[:0]), *rest)

    def assigned(*args):
        steps.append(1)
        return assign(*args)

    for name, value in (("draws_by_row", True), ("draw", drawn), ("assign", assigned)):
        monkeypatch.setattr(ops, name, value)
    return steps


@pytest.mark.further(verified=[0, 3])
@pytest.mark.slow
@pytest.mark.parametrize("verified", [0, 3, "learnt"])
def test_frequencies_of_the_tokens_of_a_tree_step(harness, verified, monkeypatch):
    model = harness.tiny_model(sharpen=2.5)
    prompt = [1, 17, 30, 5]
    vocab = harness.VOCAB
    # The draft is the most probable continuation among decoys; it is accepted now and then.
    answers = harness.plain_answers(model, [prompt], [harness.greedy(8)])
    whole = torch.tensor([*prompt, *answers.tokens["0"]])
    book = torch.zeros(vocab, harness.CONTEXT + 64, dtype=torch.int64)
    book[1, : len(whole)] = whole
    if verified == "learnt":
        policy, drafter = OnMadeUpMachine(MENU, 32, 0.015), sampling_drafter(harness)
        rig = harness.Rig(model, policy=policy, drafter=drafter, rows=32)
    else:
        rig = harness.Rig(model, shapes=(TreeShape(3, 3, 8, verified),), drafter="oracle", book=book, rows=32)
    parts = draw_by_row(rig, monkeypatch) if verified else []
    for seed in range(DRAWS):
        rig.submit(str(seed), prompt, SamplingParams(max_new_tokens=3, temperature=1.0, sampling_seed=seed))
    got = rig.run()
    drawn = torch.tensor([got.tokens[str(seed)] for seed in range(DRAWS)])  # [DRAWS, 3]
    assert (len(parts) > 50) == (verified != 0)
    if verified == "learnt":
        often = [steps for steps in policy.chosen.values() if steps > 10]
        assert len(policy.chosen) > 2 and len(often) > 1, f"too few shapes ran: {policy.chosen}"
    assert rig.accept_length > (1.05 if verified else 1.15), "too few drafts were accepted to test what follows them"

    first = dense_logits(model, torch.tensor([prompt])).softmax(-1)[0]
    pairs = torch.tensor([[*prompt, a] for a in range(vocab)])
    second = dense_logits(model, pairs).softmax(-1)  # [V, V] given the first
    triples = torch.tensor([[*prompt, a, b] for a in range(vocab) for b in range(vocab)])
    third = dense_logits(model, triples).softmax(-1).view(vocab, vocab, vocab)
    joint = first[:, None] * second
    marginals = [first, joint.sum(0), (joint[:, :, None] * third).sum((0, 1))]
    for place, probs in enumerate(marginals):
        statistic, critical = chi_square(torch.bincount(drawn[:, place], minlength=vocab).double(), probs)
        assert statistic < critical, f"token {place}"
    # a wrong distribution would be noticed: the second token's law does not fit the third
    assert chi_square(torch.bincount(drawn[:, 2], minlength=vocab).double(), marginals[1])[0] > critical
    # and what follows an accepted draft has the right law as well
    after = drawn[(drawn[:, 0] == whole[4]) & (drawn[:, 1] == whole[5])][:, 2]
    assert len(after) > 60
    statistic, critical = chi_square(torch.bincount(after, minlength=vocab).double(), third[whole[4], whole[5]])
    assert statistic < critical
