"""AdamW and Muon as one optimizer: which takes what, and how far a step goes."""

import pytest
import torch
from torch import nn

from draftwing.train.optimizer import HeadOptimizer, StackedMuon


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
