"""The training loop: what it teaches, what it refuses, and its parts."""

from __future__ import annotations

import csv
import logging
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from reference.checkpoints import llama_target
from reference.fit_run import Random, config, run
from torch import nn

from draftwing import ConfigError
from draftwing.models.loader import load_model
from draftwing.train import fit as fit_module
from draftwing.train import progress
from draftwing.train.fit import STATE_FILE, Fit, StateError
from draftwing.train.fit_config import FitConfig, recipe
from draftwing.train.heads import TargetHead, new_eagle3_head, new_eagle_head, new_mtp_head
from draftwing.train.optimizer import HeadOptimizer, StackedMuon
from draftwing.train.store import (
    SourceMeta,
    collate,
    epoch_batches,
    in_order,
    load_batches,
    stream,
)
from draftwing.train.ttt import Loss

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return llama_target(0, num_hidden_layers=7).write(tmp_path_factory.mktemp("target"))


# ---- it teaches ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("algorithm", ["EAGLE3", "EAGLE", "MTP"])
def test_on_a_gpu_products_are_in_half_precision(algorithm, target, tmp_path):
    """The same losses as on the CPU, roughly, from float32 parameters."""
    rows = {}
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        body = load_model(target, dtype, device)
        make = {"EAGLE3": lambda b: new_eagle3_head(b, torch.arange(32)), "EAGLE": new_eagle_head, "MTP": new_mtp_head}
        head = make[algorithm](body)
        meta = SourceMeta("tiny", algorithm, head.aux_layers, 32, 64, "float32")
        loss = Loss(**{**vars(recipe(algorithm).loss), "noise": 0.0})  # which differs between devices
        precision = "auto" if device == "cuda" else "float32"
        settings = config(algorithm, loss=loss, steps=30, log_every=1, precision=precision)
        Fit(head, TargetHead(body), Random(meta, 23, 1), Random(meta, 5, 2), settings, tmp_path / device).run()
        assert {param.dtype for param in head.parameters()} == {torch.float32}
        rows[device] = [float(row["loss"]) for row in csv.DictReader((tmp_path / device / "metrics.csv").open())]
    assert rows["cuda"][:10] == pytest.approx(rows["cpu"][:10], rel=0.08)
    assert sum(rows["cuda"][-5:]) < sum(rows["cuda"][:5])


# ---- what it refuses -------------------------------------------------------------------------------------------------


def test_states_of_other_runs_are_refused(target, tmp_path):
    run(target, tmp_path / "out", config("EAGLE3"))
    with pytest.raises(ConfigError, match=r"config\.lr: 0\.01, now 0\.02"):
        run(target, tmp_path / "out", config("EAGLE3", lr=0.02))
    run(target, tmp_path / "out", config("EAGLE3", log_every=1, save_every=1))


@pytest.mark.parametrize("part", [0, 1, 100, 0.5, 0.99])
def test_a_state_that_was_cut_is_refused(target, tmp_path, part):
    run(target, tmp_path, config("EAGLE3", steps=1))
    state = tmp_path / STATE_FILE
    whole = state.read_bytes()
    state.write_bytes(whole[: part if isinstance(part, int) else int(part * len(whole))])
    with pytest.raises(ConfigError, match=rf"{state} cannot be read: .+\. To train from the start, remove it"):
        run(target, tmp_path, config("EAGLE3", steps=1))
    state.write_bytes(b"\0" * len(whole))  # as a machine that lost its power may leave it
    with pytest.raises(ConfigError, match=f"{state} cannot be read"):
        run(target, tmp_path, config("EAGLE3", steps=1))
    torch.save([1, 2], state)
    with pytest.raises(ConfigError, match="expected a dict, found list"):
        run(target, tmp_path, config("EAGLE3", steps=1))


def test_no_room_for_a_state_is_no_damage(target, tmp_path, monkeypatch):
    """Whoever trains when idle would begin anew. A damaged file may ask for more than it has: that is damage."""
    run(target, tmp_path, config("EAGLE3", steps=1))
    with pytest.raises(RuntimeError) as found:
        torch.empty(1 << 62, dtype=torch.uint8)
    for asked in (1000, 1 << 62):
        error = RuntimeError(str(found.value).replace(str(1 << 62), str(asked)))
        monkeypatch.setattr(torch, "load", Mock(side_effect=error))
        with pytest.raises(ConfigError) as refused:
            run(target, tmp_path, config("EAGLE3", steps=1))
        assert isinstance(refused.value, StateError) == (asked > 1000)


def test_what_does_not_fit_is_refused(target, tmp_path):
    body = load_model(target, torch.float32, "cpu")
    head = new_eagle3_head(body, None)

    def fails(match: str, head: Any = head, **changes: Any) -> None:
        meta = {
            "model": "m",
            "algorithm": "EAGLE3",
            "aux_layers": head.aux_layers,
            "hidden": 32,
            "vocab": 64,
            "dtype": "float32",
        }
        source = Random(SourceMeta(**{**meta, **changes}), 3, 1)
        source.lengths = changes.get("lengths", source.lengths)
        with pytest.raises(ConfigError, match=match):
            Fit(head, TargetHead(body), source, source, config("EAGLE3"), tmp_path / "out").run()

    fails(r"layers \[2, 3, 4\].*found those of \[1, 2, 3\]", aux_layers=(1, 2, 3))
    fails("another size", hidden=16)
    fails("no trainable parameters", new_eagle_head(body).requires_grad_(False))
    fails("float32 parameters", new_eagle_head(body).bfloat16())
    short = Random(SourceMeta("m", "EAGLE3", head.aux_layers, 32, 64, "float32"), 3, 1)
    short.lengths = [1, 2, 2]
    with pytest.raises(ConfigError, match="none of 3 samples"):
        Fit(head, TargetHead(body), short, short, config("EAGLE3"), tmp_path / "out").run()


def test_a_loss_that_is_no_number_ends_the_run(target, tmp_path):
    with pytest.raises(ConfigError, match="not finite"):
        run(target, tmp_path / "out", config("EAGLE3", lr=1e30, log_every=1))


# ---- its parts -------------------------------------------------------------------------------------------------------


def test_every_sample_once_an_epoch_in_batches_of_like_length():
    lengths = {i: 3 + (37 * i) % 200 for i in range(500) if i % 7}
    batches = epoch_batches(lengths, 1000, seed=3, epoch=0)
    assert sorted(i for batch in batches for i in batch) == sorted(lengths)
    padded = [len(batch) * max(lengths[i] for i in batch) for batch in batches]
    assert max(padded) <= 1000 and sum(padded) < 1.1 * sum(lengths.values())
    assert batches == epoch_batches(lengths, 1000, seed=3, epoch=0)
    assert batches != epoch_batches(lengths, 1000, seed=3, epoch=1) != epoch_batches(lengths, 1000, seed=4, epoch=1)
    longest = [max(lengths[i] for i in batch) for batch in batches]
    assert longest != sorted(longest, reverse=True)
    assert sorted(i for batch in in_order(lengths, 150) for i in batch) == sorted(lengths)  # some alone exceed it


def test_a_stream_is_entered_anywhere():
    lengths = {i: 4 + i % 5 for i in range(40)}
    start = stream(lengths, 24, seed=1)
    numbers = [next(start) for _ in range(60)]
    for n in (0, 1, 7, 30, 59):
        assert next(stream(lengths, 24, seed=1, start=n)) == numbers[n]


def test_batches_hold_what_samples_hold():
    meta = SourceMeta("tiny", "EAGLE", (5,), 4, 64, "float32")
    source = Random(meta, 4, 1)
    (batch,) = load_batches(source, [[0, 2, 3]], max_length=9)
    samples = [source.read(i) for i in (0, 2, 3)]
    assert source.lengths[:4] == [5, 12, 19, 10] and batch.lengths.tolist() == [5, 9, 9]
    for row, sample, end in zip(range(3), samples, (5, 9, 9), strict=True):
        assert torch.equal(batch.ids[row, :end], sample.ids[:end].long()) and not batch.ids[row, end:].any()
        assert (
            torch.equal(batch.aux_hidden[row, :end], sample.aux_hidden[:end]) and not batch.aux_hidden[row, end:].any()
        )
        at = (batch.position // 9 == row).nonzero().flatten()
        assert batch.depth[at].tolist() == list(range(1, end - 1)) == (batch.position[at] % 9).tolist()
        assert torch.equal(batch.final[at], sample.final[1 : end - 1])
    assert torch.equal(collate([samples[0]], 9).ids[0], samples[0].ids.long())


def test_reading_ahead_keeps_the_order_and_passes_errors_on():
    class Failing(Random):
        def read(self, i: int) -> Any:
            if i == 6:
                raise OSError("disk")
            return super().read(i)

    source = Failing(SourceMeta("tiny", "EAGLE", (5,), 4, 64, "float32"), 8, 1)
    batches = load_batches(source, ([i] for i in range(8)), 100)
    for i in range(6):
        assert next(batches).lengths.tolist() == [source.lengths[i]]
    with pytest.raises(OSError, match="disk"):
        next(batches)


def test_the_learning_rate_rises_and_falls():
    settings = FitConfig(lr=1.0, warmup=0.1)
    rates = [settings.learning_rate(i, 100, 64) for i in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 11 for i in range(10)]) and rates[10] == 1.0
    assert rates[55] == pytest.approx(0.525) and rates[99] == pytest.approx(0.05, abs=0.01)
    assert all(a > b for a, b in pairwise(rates[10:]))
    assert FitConfig(warmup=0).learning_rate(0, 10, 4096) == pytest.approx(0.4 / 4096)


def test_epochs_are_counted_in_steps(target, tmp_path):
    lengths = {i: min(length, 18) for i, length in enumerate(Random(None, 23, 1).lengths)}
    batches = [len(epoch_batches(lengths, 40, 0, epoch)) for epoch in range(2)]
    _, report = run(target, tmp_path / "out", config("EAGLE3", steps=0, epochs=1.5))
    assert report.steps == round(batches[0] + 0.5 * batches[1])


SELDOM = {"save_every": 20, "eval_every": 10**6}  # which take most of the time of steps so short


def test_a_run_by_the_clock(target, tmp_path, monkeypatch):
    """It ends in time with the lowest rate, also where it is slow at first; killed, it has the rest of its time."""
    seconds, seen = iter(range(1, 10**6)), []

    def clock():
        now = next(seconds)
        # Kernels are compiled; then a step takes 0.25 s, 0.5 s every 4th.
        return 2.0 * min(now, 500) + 0.25 * max(now - 500, 0)

    def rate(self, step, total, hidden):
        seen.append((step, found := learning_rate(self, step, total, hidden)))
        if len(seen) == stop:
            raise KeyboardInterrupt
        return found

    learning_rate, settings = FitConfig.learning_rate, config("EAGLE3", steps=0, minutes=0.25, warmup=0.1, **SELDOM)
    monkeypatch.setattr("draftwing.train.fit.time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(FitConfig, "learning_rate", rate)
    for name, stop, begin in (("whole", 0, 501), ("killed", 12, 501), ("slow at first", 0, 496)):
        seconds = iter(range(begin, 10**6))
        seen.clear()
        if stop:
            with pytest.raises(KeyboardInterrupt):
                run(target, tmp_path / name, settings)
            stop = 0
        _, report = run(target, tmp_path / name, settings)
        rates = dict(seen)
        assert report.seconds == pytest.approx(15, abs=1) and report.eval["step"] == report.steps, name
        assert rates[report.steps - 1] == pytest.approx(0.05e-2, rel=0.05), name
        assert max(rates.values()) > 0.95e-2, name
        assert report.steps > 12 and (name != "whole" or 36 < report.steps < 52), report.steps


@pytest.mark.parametrize(("step", "killed", "compiling"), [(5.0, 0, 0.0), (5.0, 3, 7.0), (0.6, 30, 5.0)])
def test_a_clock_that_few_steps_fit_into(target, tmp_path, monkeypatch, step, killed, compiling):
    """Half a minute at 5 s a step, with an estimate every 20 steps; and kernels are compiled again when it goes on."""
    now, done, learning_rate, stop = [0.0], [], FitConfig.learning_rate, killed

    def rate(self, at, total, hidden):
        if at not in done:
            done.append(at)
            now[0] += step + (compiling if len(done) == 1 else 0.0)
            if len(done) == stop:
                raise KeyboardInterrupt
        return learning_rate(self, at, total, hidden)

    monkeypatch.setattr("draftwing.train.fit.time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(FitConfig, "learning_rate", rate)
    often = SELDOM if step < 1 else SELDOM | {"save_every": 1}
    settings = config("EAGLE3", steps=0, minutes=0.5, log_every=20, **often)
    if stop:
        with pytest.raises(KeyboardInterrupt):
            run(target, tmp_path, settings)
        stop = 0
        done.clear()
    _, report = run(target, tmp_path, settings)
    assert report.seconds == pytest.approx(30, abs=1.1 * step)


def test_curves_are_drawn_where_they_can_be(tmp_path, caplog):
    row = {"step": 1, "loss": 2.0, "accept_length": 1.5, "accept_1": 0.4, "accept_2": 0.1, "accept_10": 0.0}
    rows = [{**row, "split": "train"}, {**row, "split": "eval"}]
    assert progress.summary({"token_loss": 1.5, **row}).startswith("token_loss 1.500, loss 2.000")
    assert progress.summary(row) == "loss 2.000, accept 0.40 0.10 0.00, length 1.50"
    with caplog.at_level(logging.INFO):
        drawn = progress.draw_curves(tmp_path / "curves.png", rows)
    if drawn:
        assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    else:
        assert "draftwing[train]" in caplog.text and not list(tmp_path.iterdir())


def head(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    parts = {"fc": nn.Linear(24, 16), "norm": nn.LayerNorm(16, bias=False), "lm_head": nn.Linear(16, 40, bias=False)}
    markov = {"out": nn.Linear(16, 40, bias=False), "joint": nn.Linear(16, 16, bias=False)}
    return nn.ModuleDict({**parts, "markov": nn.ModuleDict(markov)})


def give_gradients(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator)


def moved(name: str) -> dict[str, torch.Tensor]:
    """By one step at rate 0.01."""
    model = head()
    before = {key: param.detach().clone() for key, param in model.named_parameters()}
    give_gradients(model)
    HeadOptimizer(model, name).step(0.01)
    assert all(param.grad is None for param in model.parameters())
    return {key: param.detach() - before[key] for key, param in model.named_parameters()}


def test_adamw_is_torchs() -> None:
    model, ours = head(), moved("adamw")
    give_gradients(model)
    before = {key: param.detach().clone() for key, param in model.named_parameters()}
    torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.0).step()
    for key, param in model.named_parameters():
        torch.testing.assert_close(ours[key], param.detach() - before[key])


def test_muon_takes_the_matrices_of_the_layer() -> None:
    """It steps along the orthogonal factor of the gradient (here from a singular value decomposition in float64), whose
    singular values its iteration brings to about 1; the root of the mean square is 0.2 of the rate, as AdamW's."""
    muon, adamw = moved("muon"), moved("adamw")
    for key in ("fc.bias", "norm.weight", "lm_head.weight", "markov.out.weight"):
        assert torch.equal(muon[key], adamw[key])
    assert not torch.equal(muon["markov.joint.weight"], adamw["markov.joint.weight"])
    model = head()
    give_gradients(model)
    grad = model["fc"].weight.grad
    assert grad is not None
    u, _, v = torch.linalg.svd(grad.double(), full_matrices=False)
    step = -muon["fc.weight"].double() / (0.01 * 0.2 * 24**0.5)
    assert torch.nn.functional.cosine_similarity(step.flatten(), (u @ v).flatten(), dim=0) > 0.95
    values = torch.linalg.svdvals(step)
    assert values.min() > 0.5 and values.max() < 1.3
    assert step.mul(0.2 * 24**0.5).square().mean().sqrt().item() == pytest.approx(0.2, rel=0.25)


def test_matrices_of_one_shape_together_go_as_torch_takes_them_one_by_one() -> None:
    """Three of one shape, one of another and one that stands upright, one without a gradient; the momentum exactly and
    the steps to the iteration's bfloat16, of which sums may be taken in another order."""
    generator = torch.Generator().manual_seed(2)
    shapes = [(24, 40), (24, 40), (16, 16), (24, 40), (48, 20), (16, 16)]
    start = [torch.randn(shape, generator=generator) for shape in shapes]
    params = [[nn.Parameter(x.clone()) for x in start] for _ in range(2)]
    ours = StackedMuon(params[0], weight_decay=0.1)
    torchs = torch.optim.Muon(params[1], weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        for pair in list(zip(*params, strict=True))[:-1]:
            grad = torch.randn(pair[0].shape, generator=generator)
            for param in pair:
                param.grad = grad.clone()
        for optimizer in (ours, torchs):
            optimizer.param_groups[0]["lr"] = 0.02
            optimizer.step()
    for one, other, x in zip(*params, start, strict=True):
        moved, expected = one.detach() - x, other.detach() - x
        torch.testing.assert_close(moved, expected, rtol=0.02, atol=0.02 * expected.abs().max().item())
        state = ours.state[one], torchs.state[other]
        assert state[0].keys() == state[1].keys()
        assert all(torch.equal(state[0][key], state[1][key]) for key in state[0])


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_its_state_is_enough_to_go_on(name: str) -> None:
    def steps(model: nn.Module, optimizer: HeadOptimizer, count: int) -> None:
        for _ in range(count):
            give_gradients(model)
            for param in model.parameters():
                param.grad = param.grad * param.detach() if param.grad is not None else None
            optimizer.step(0.01)

    whole = head()
    steps(whole, HeadOptimizer(whole, name), 6)
    first = head()
    optimizer = HeadOptimizer(first, name)
    steps(first, optimizer, 3)
    second = head(seed=5)
    second.load_state_dict(first.state_dict())
    other = HeadOptimizer(second, name)
    other.load_state_dict(optimizer.state_dict())
    steps(second, other, 3)
    for a, b in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def same_run(one: Path, other: Path) -> None:
    """Rows of metrics are equal but for what the clock says."""
    rows = [list(csv.DictReader((out / "metrics.csv").open())) for out in (one, other)]
    for row in rows[0] + rows[1]:
        row.pop("tokens_per_second")
    assert rows[0] == rows[1] and len(rows[0]) > 3


def same_head(one: Any, other: Any) -> None:
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name


class Killed(BaseException):
    pass


@pytest.mark.further(accumulate=1)
@pytest.mark.further(algorithm="EAGLE3")  # the others draw more
@pytest.mark.parametrize("algorithm", ["EAGLE3", "EAGLE", "DSPARK"])  # EAGLE: with noise; DSPARK: with anchors
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_killed_run_goes_on_as_if_it_had_not_been(algorithm, accumulate, target, tmp_path, monkeypatch):
    """Killed in a step, before, in and after a save, and before the first: bit for bit the run that was not."""
    settings = config(algorithm, accumulate=accumulate)
    whole, report = run(target, tmp_path / "whole", settings, algorithm)
    step, save, replace = torch.optim.AdamW.step, torch.save, fit_module.replace_file
    moments = {"in step 2": (step, 2), "in step 8": (step, 8), "in a save": (save, 2), "after it": (replace, 3)}
    for moment, (killed, count) in moments.items():
        calls = Counter()

        def die(*args: Any, killed: Any = killed, count: int = count, calls: Any = calls, **kw: Any) -> Any:
            calls[killed] += 1
            if calls[killed] == count:
                if killed is save:
                    Path(args[1]).write_bytes(b"half a file")
                raise Killed
            return killed(*args, **kw)

        out = tmp_path / moment
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(torch.optim.AdamW, "step", die if killed is step else step)
            patch.setattr(torch, "save", die if killed is save else save)
            patch.setattr(fit_module, "replace_file", die if killed is replace else replace)
            run(target, out, settings, algorithm)
        assert (out / STATE_FILE).exists() == (moment != "in step 2")
        head, again = run(target, out, settings, algorithm)
        same_head(head, whole)
        same_run(out, tmp_path / "whole")
        assert (again.steps, again.tokens) == (report.steps, report.tokens)
    done, _ = run(target, out, settings, algorithm)  # one that has ended does nothing
    same_head(done, whole)
