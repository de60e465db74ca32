"""The training-time test against serving, token by token: every chain of every position run on its own, each row
attending through an explicit list of keys and values, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plain_attention import FunctionAttend
from reference.checkpoints import Checkpoint, eagle2_head, eagle3_head, llama_target, mimo, qwen2_target
from torch import Tensor

from draftwing.errors import ConfigError
from draftwing.models.heads.loader import load_draft_head
from draftwing.models.loader import load_model
from draftwing.ops.attention.batch import FULL, AttentionKind
from draftwing.train import losses, ttt
from draftwing.train.heads import TargetHead, trainable
from draftwing.train.store import Sample, collate
from draftwing.train.ttt import STATS, Batch, Loss, Objective

LENGTHS = (9, 13, 4)


def with_window(head: Checkpoint, tokens: int) -> Checkpoint:
    keys = {"layer_types": ["sliding_attention"], "sliding_window": tokens}
    return Checkpoint(head.tensors, head.config | keys)


def make_head(kind: str, folder: Any) -> Any:
    """A head with random weights, all of them far from what a fresh one has, in float64."""
    if kind == "MTP":
        path = mimo(1).write(folder / "mimo")
        target = load_model(path, torch.float64, "cpu")
        head = load_draft_head(path, target, "NEXTN", torch.float64, "cpu")
    else:
        plain = qwen2_target(1) if kind == "EAGLE" else llama_target(1, num_hidden_layers=7)
        made = {
            "EAGLE": lambda: eagle2_head(plain),
            "EAGLE3": lambda: eagle3_head(plain),
            "EAGLE3 variant": lambda: eagle3_head(plain, fc_norm=True, norm_output=True, norm_before_residual=True),
            "EAGLE3 two layers": lambda: eagle3_head(plain, rows=64, layers=2),
            "EAGLE3 with a window": lambda: with_window(eagle3_head(plain), 5),
        }[kind]()
        target = load_model(plain.write(folder / "target"), torch.float64, "cpu")
        algorithm = "EAGLE" if kind == "EAGLE" else "EAGLE3"
        head = load_draft_head(made.write(folder / "head"), target, algorithm, torch.float64, "cpu")
    head.set_max_positions(64)
    return trainable(head)


def make_samples(head: Any, seed: int = 0) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    config, samples = head.target.config, []
    for length in LENGTHS:
        ids = torch.randint(config.vocab_size, (length,), generator=generator, dtype=torch.int32)
        # a prompt, an answer, a second turn: chains must stop being counted where a turn ends; and a long prompt, of
        # which most rows draft nothing that is learnt
        mask = torch.arange(length) >= (2 if length < 13 else 7)
        mask[5:6] = False
        aux_hidden = torch.randn(
            length, len(head.aux_layers) * config.hidden_size, generator=generator, dtype=torch.float64
        )
        final = torch.randn(length, config.hidden_size, generator=generator, dtype=torch.float64)
        samples.append(Sample(ids, mask, aux_hidden, aux_hidden if len(head.aux_layers) == 1 else final))
    return samples


class Served:
    """Attention of one row at a time over what was kept of the rows before it."""

    def __init__(self, rows: tuple[tuple[int, Tensor, Tensor], ...] = ()) -> None:
        self.rows = rows

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind = FULL) -> Tensor:
        assert q.shape[0] == 1 and kind._replace(window=0) == FULL
        self.rows = (*self.rows, (layer, k[0], v[0]))
        keys, values = (torch.stack([row[i] for row in self.rows if row[0] == layer]) for i in (1, 2))
        keys, values = keys[-kind.window :], values[-kind.window :]  # 0: all
        group = q.shape[1] // k.shape[1]
        out = []
        for head in range(q.shape[1]):
            scores = keys[:, head // group] @ q[0, head] / q.shape[2] ** 0.5
            out.append(scores.softmax(0) @ values[:, head // group])
        return torch.cat(out).unsqueeze(0)


def served_loss(head: Any, samples: list[Sample], loss: Loss) -> tuple[Tensor, Tensor]:
    """Loss and counts by running every chain as the engine would: committed rows, then drafts, one row at a time."""
    total = torch.zeros((), dtype=torch.float64)
    stats = torch.zeros(loss.steps, len(STATS), dtype=torch.float64)
    kept = torch.arange(head.vocab) if head.target_ids is None else head.target_ids
    teacher = TargetHead(head.target)
    for sample in samples:
        ids, length = sample.ids.long(), len(sample.ids)
        features = head.features(sample.aux_hidden)
        committed = Served()
        for t in range(length - 2):
            hidden, cache, whole, right = features[t : t + 1], committed, True, True
            for k in range(loss.steps):
                j = t + 1 + k  # the target's state whose distribution this draft predicts
                if j + 1 >= length:
                    break
                cache = Served(cache.rows)
                token, position = ids[t + 1 + k].view(1), torch.tensor([t + k])
                hidden = head.run(token, position, hidden, k, FunctionAttend(cache.attend))
                if k == 0:
                    committed = cache
                if not sample.loss_mask[j + 1]:
                    whole = False
                    continue
                says = teacher(sample.final[j : j + 1])[0]
                log_q = head.logits(hidden)[0].log_softmax(-1)
                inside = bool((kept == says.argmax()).any())
                wanted, said = (says[kept] / loss.temperature).softmax(-1), (kept == ids[j + 1]).double()
                if said.any():
                    wanted = (1 - loss.text) * wanted + loss.text * said
                cross = -(wanted * log_q).sum() * inside
                near = F.smooth_l1_loss(hidden[0], sample.final[j]) if loss.features else torch.zeros(())
                total = total + loss.decay**k * (loss.tokens * cross + loss.features * near)
                hit = bool(kept[log_q.argmax()] == says.argmax())
                right = right and hit
                counted = (1, cross.item(), near.item(), hit, whole, whole and right)
                stats[k] += torch.tensor(counted, dtype=torch.float64)
    return total, stats


CASES = {
    "EAGLE3": Loss(steps=7),
    "EAGLE3 variant": Loss(steps=4, decay=0.5, temperature=0.5, text=0.3),
    "EAGLE3 two layers": Loss(steps=3),
    "EAGLE3 with a window": Loss(steps=4),
    "EAGLE": Loss(steps=1, tokens=0.1, features=1.0),
    "EAGLE in several steps": Loss(steps=3, tokens=0.1, features=1.0),
    "MTP": Loss(steps=4, text=0.3),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_all_chains_at_once_are_each_chain_as_served(case, tmp_path, monkeypatch):
    head, loss = make_head(case.removesuffix(" in several steps"), tmp_path), CASES[case]
    samples = make_samples(head)
    params = dict(head.named_parameters())
    expected, counts = served_loss(head, samples, loss)
    expected_grads = torch.autograd.grad(expected, list(params.values()))
    monkeypatch.setattr(losses, "_CPU_ELEMENTS", 5 * head.vocab)  # several chunks, the last one short
    found, stats = Objective(head, TargetHead(head.target), loss)(collate(samples, 64))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
    torch.testing.assert_close(stats, counts, rtol=1e-10, atol=1e-12)
    assert counts[0, 0] == 14 and counts[0, 3] < counts[0, 0]  # places; not all of them are hits
    grads = torch.autograd.grad(found, list(params.values()))
    for name, grad, expected_grad in zip(params, grads, expected_grads, strict=True):
        assert expected_grad.abs().max() > 1e-6, f"{name} is not exercised"
        torch.testing.assert_close(grad, expected_grad, rtol=1e-8, atol=1e-10, msg=name)


def test_hits_are_counted_along_chains(tmp_path):
    """A head that is right in two places of three, other ones in each step: chains hit where all their steps do."""
    head = make_head("EAGLE3", tmp_path)
    samples, steps = make_samples(head), 4
    batch = collate(samples, 64)
    width, called = batch.ids.shape[1], []

    def right(k: int, sequence: int, j: int) -> bool:
        return (7 * k + 5 * sequence + 3 * j * j) % 11 > 3

    def guess(hidden: Tensor, counts: Tensor, teacher: Any) -> tuple[Tensor, Tensor]:
        hits = [right(len(called), *divmod(position, width)) for position in batch.position.tolist()]
        called.append(hidden)
        return hidden.new_zeros(()), torch.where(torch.tensor(hits), teacher.best, -2)

    objective = Objective(head, TargetHead(head.target), Loss(steps=steps))
    objective._token_loss = guess
    _, stats = objective(batch)
    expected = torch.zeros(steps, len(STATS), dtype=torch.float64)
    for i, sample in enumerate(samples):
        learnt = [*sample.loss_mask.tolist(), *[False] * 2 * steps]
        for t in range(len(sample.ids)):
            for k in range(steps):
                whole = all(learnt[t + 2 : t + 3 + k])
                hits = [right(n, i, t + 1 + n) for n in range(k + 1)]
                row = (learnt[t + 2 + k], 0, 0, learnt[t + 2 + k] and hits[-1], whole, whole and all(hits))
                expected[k] += torch.tensor(row, dtype=torch.float64)
    assert torch.equal(stats, expected)
    rows, *_, chains, chain_hits = expected[2].tolist()
    assert 0 < chain_hits < chains < rows


@pytest.mark.parametrize(("kernel", "near"), [("cpu", 0), ("dense", 0), ("cpu", 4)])
def test_attention_is_a_softmax_under_an_explicit_mask(kernel, near, monkeypatch):
    monkeypatch.setattr(ttt, "_kernel", lambda q: kernel)
    generator = torch.Generator().manual_seed(0)
    shape, steps, length = (2, 3, 11, 8), 4, 11

    def tensors() -> list[Tensor]:
        return [
            torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(steps)
        ]  # fmt: skip

    q, k, v = tensors(), tensors(), tensors()
    weights = [x.detach() for x in tensors()]
    found, expected = [], []
    for i in range(steps):
        found.append(ttt.attend_chains(q[i], list(zip(k[: i + 1], v[: i + 1], strict=True)), near))
        keys, values = torch.cat(k[: i + 1], 2), torch.cat(v[: i + 1], 2)
        text = torch.ones(length, length).tril().triu(1 - near if near else -length)
        mask = torch.cat([text] + [torch.eye(length)] * i, 1).bool()
        scores = (q[i] @ keys.transpose(-1, -2) / shape[-1] ** 0.5).masked_fill(~mask, float("-inf"))
        expected.append(scores.softmax(-1) @ values)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    losses = [sum((o * w).sum() for o, w in zip(out, weights, strict=True)) for out in (found, expected)]
    grads, expected_grads = (torch.autograd.grad(loss, q + k + v) for loss in losses)
    torch.testing.assert_close(grads, expected_grads, rtol=1e-11, atol=1e-11)


def attended_chains(kinds: list[list[Tensor]], dtype: torch.dtype, shape: tuple[int, int]) -> list[Tensor]:
    """Outputs of each step of one layer, and gradients; kinds: q, k, v and weights of the outputs, of each step"""
    q, k, v, weights = ([x.to(dtype).requires_grad_() for x in xs] for xs in kinds)
    attention = ttt.ChainAttention(*shape, k[0].shape[1])
    outs = [attention(0, *step) for step in zip(q, k, v, strict=True)]
    loss = sum((o * w).sum() for o, w in zip(outs, weights, strict=True))
    return [*outs, *torch.autograd.grad(loss, [*q, *k, *v])]


def random_rows(device: str, shape: tuple[int, int], heads: int, kv_heads: int, steps: int = 4) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows, dim = shape[0] * shape[1], 64
    sizes = ((rows, heads, dim), (rows, kv_heads, dim), (rows, kv_heads, dim), (rows, heads * dim))
    return [[torch.randn(size, generator=generator).to(device).bfloat16() for _ in range(steps)] for size in sizes]


class SharedKeys:
    """A causal part that takes fewer heads of keys than of queries, as the GPU's flash kernel does, made of one that
    does not; `keys` are the shapes that it was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys: list[torch.Size] = []
        self._forward, self._backward = ttt._causal, ttt._causal_backward
        monkeypatch.setattr(ttt, "_causal", self.forward)
        monkeypatch.setattr(ttt, "_causal_backward", self.backward)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        self.keys.append(k.shape)
        group = q.shape[1] // k.shape[1]
        return self._forward(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), *rest)

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        group = q.shape[1] // k.shape[1]
        wide = (x.repeat_interleave(group, 1) for x in (k, v))
        grad_q, *others = self._backward(grad, q, *wide, *rest)
        return grad_q, *(x.unflatten(1, (-1, group)).sum(2) for x in others)


@pytest.mark.slow  # in Triton's interpreter
@pytest.mark.parametrize("heads", [pytest.param(2, marks=pytest.mark.exhaustive), 6])
def test_heads_that_share_a_key_are_attended_where_it_is(heads, monkeypatch):
    """What `ChainAttention` does where the kernels take shared keys: the same as with a copy for each head."""
    kernels = pytest.importorskip("draftwing.train.kernels.attention")
    if torch.cuda.is_available():
        pytest.skip("there Triton is not interpreted")
    shape, steps, given = (2, 11), 4, []
    kinds = random_rows("cpu", shape, heads, 2, steps)
    expected = attended_chains(kinds, torch.float64, shape)
    for name in ("join_own", "own_gradients"):
        monkeypatch.setattr(kernels, name, watched(getattr(kernels, name), given))
    monkeypatch.setattr(ttt, "_kernel", lambda q: "dense")
    monkeypatch.setattr(ttt, "_own_kernels", lambda q: kernels)
    causal = SharedKeys(monkeypatch)
    found = attended_chains(kinds, torch.float32, shape)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)
    assert causal.keys == [(2, 2, 11, 64)] * steps
    # In order forth, in reverse back: keys and values of steps 1 .. k, one for all heads that share it.
    assert [keys for keys, _ in given] == [(k, 2, 2, 11, 64) for k in (1, 2, 3, 3, 2, 1)]
    assert all(keys == values for keys, values in given)


def watched(kernel: Any, given: list[tuple[torch.Size, torch.Size]]) -> Any:
    """A kernel of own rows that notes the shapes of the keys and values it is given."""

    def run(*args: Any) -> Any:
        given.append((args[-2].shape, args[-1].shape))
        return kernel(*args)

    return run


def test_q_and_k_are_turned_by_the_kernel_as_by_torch(monkeypatch, mended_interpreter):
    pytest.importorskip("draftwing.train.kernels.layer_ops")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(22, 8, 16, generator=generator).to(device).requires_grad_()  # 4 heads, 2 of keys
    cos, sin = torch.randn(2, 22, 1, 16, generator=generator).to(device)
    weight = torch.randn(22, 64, generator=generator).to(device)
    results = []
    for kernel in (False, True):
        monkeypatch.setattr(ttt, "kernels_take", lambda x, kernel=kernel: kernel)
        out = ttt.ChainAttention(2, 11, 2).fused(0, qkv, cos, sin, None)
        results.append((out, *torch.autograd.grad(out, qkv, weight)))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_a_layer_without_keys_of_its_own_is_refused() -> None:
    cos, sin = torch.ones(2, 6, 1, 16)
    with pytest.raises(AssertionError, match="keys of their own"):
        ttt.ChainAttention(2, 3, 2).fused(0, torch.randn(6, 8, 16), cos, sin, None, AttentionKind(reads=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("heads", [3, 9])
def test_heads_that_share_a_key_on_a_gpu(heads):
    """Flash attention against what is dense."""
    shape = (2, 150)
    kinds = random_rows("cuda", shape, heads, 3)
    assert [ttt._kernel(x) for x in (kinds[0][0], kinds[0][0].double())] == ["flash", "dense"]
    found, expected = (attended_chains(kinds, dtype, shape) for dtype in (torch.bfloat16, torch.float64))
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one.double(), other, rtol=0.05, atol=0.06)


def test_half_precision_is_close_and_gives_gradients_in_float32(tmp_path):
    head = make_head("EAGLE3", tmp_path).float()
    head.target.float()
    head.set_max_positions(64)
    samples = [s._replace(aux_hidden=s.aux_hidden.bfloat16(), final=s.final.bfloat16()) for s in make_samples(head)]
    objective = Objective(head, TargetHead(head.target), Loss())
    with torch.autocast("cpu", torch.bfloat16):
        half, _ = objective(collate(samples, 64))
    half.backward()
    assert {param.grad.dtype for param in head.parameters()} == {torch.float32}
    whole, _ = objective(
        collate([s._replace(aux_hidden=s.aux_hidden.float(), final=s.final.float()) for s in samples], 64)
    )
    torch.testing.assert_close(half, whole, rtol=0.02, atol=0)


def test_chains_that_leave_a_window_are_refused(tmp_path):
    head = make_head("EAGLE3 with a window", tmp_path)
    objective = Objective(head, TargetHead(head.target), Loss(steps=5))
    assert objective(collate(make_samples(head), 64))[0] > 0
    with pytest.raises(ConfigError, match="--ttt-steps: expected at most 5, the head's window; found 6"):
        Objective(head, TargetHead(head.target), Loss(steps=6))


def test_scores_in_a_window_are_not_rounded_in_half_precision():
    """No more than those of the kernels, which see all."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (2 * torch.randn((1, 4, 256, 64), generator=generator).bfloat16() for _ in range(3))

    def error(near: int) -> float:
        with torch.autocast("cpu", torch.bfloat16):
            found = ttt.attend_chains(q, [(k, v)], near)
        exact = ttt.attend_chains(q.double(), [(k.double(), v.double())], near)
        return (found.double() - exact).square().mean().sqrt().item()

    assert 0 < error(64) < 2 * error(0)


def test_noise_is_uniform_and_falls_with_the_length_of_the_text():
    batch = Batch(*[torch.zeros(2, 1000, dtype=torch.int64)] * 5, lengths=torch.tensor([1000, 256]), max_positions=999)
    noise = ttt._noise(torch.zeros(2000, 16), batch, 0.2, torch.Generator().manual_seed(0)).view(2, -1)
    for row, width in zip(noise, (0.2 * 512 / 1000, 0.2 * 512 / 256), strict=True):
        assert row.abs().max() <= width / 2
        torch.testing.assert_close(row.std(), torch.tensor(width / 12**0.5), rtol=0.05, atol=0)
        assert abs(row.mean()) < width / 50


def test_a_batch_with_nothing_to_learn_counts_nothing(tmp_path):
    head = make_head("EAGLE3", tmp_path)
    samples = [s._replace(loss_mask=torch.zeros_like(s.loss_mask)) for s in make_samples(head)]
    loss, stats = Objective(head, TargetHead(head.target), Loss())(collate(samples, 64))
    assert loss == 0 and not stats.any()
    loss.backward()
    assert all(param.grad is not None and not param.grad.any() for param in head.parameters())
