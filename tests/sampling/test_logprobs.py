"""Log probabilities against log softmax in float64 and sorted Python lists."""

import pickle
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftwing.core import TokenLogprobs
from draftwing.engine.request_features import with_hidden
from draftwing.requests.request import LogprobParams
from draftwing.sampling.logprobs import PROMPT_SLICE, path_logprobs, prompt_logprobs, unpack, width


def test_what_is_held_is_hardly_more_than_the_numbers() -> None:
    """Of a position's 129 log probabilities some 12 bytes each, not the 255 of Python's objects."""
    top, positions = 128, 200
    packed = np.random.default_rng(0).normal(size=(positions, width(top, 1)))
    packed[:, 1 + top : 1 + 2 * top] = np.arange(top)
    tracemalloc.start()
    try:
        found = unpack(packed, top, LogprobParams(top=top, token_ids=(7,)))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 16 * positions * (top + 2)
    assert found[3].value == packed[3, 0] and found[3].wanted[0] == packed[3, -1]
    assert found[3].top == list(zip(packed[3, 1 : 1 + top].tolist(), range(top), strict=True))
    assert pickle.loads(pickle.dumps(found)) == found


def expected(logits: Tensor, token: int, top: int, wanted: list[int]) -> TokenLogprobs:
    logp = logits.double().log_softmax(-1).tolist()
    order = sorted(range(len(logp)), key=lambda i: (-logits[i].item(), i))[:top]
    return TokenLogprobs.of(logp[token], [(logp[i], i) for i in order], [logp[i] for i in wanted])


def check(got: TokenLogprobs, want: TokenLogprobs, tolerance: float) -> None:
    assert [i for _, i in got.top] == [i for _, i in want.top]
    for a, b in zip(
        [got.value, *(v for v, _ in got.top), *got.wanted],
        [want.value, *(v for v, _ in want.top), *want.wanted],
        strict=True,
    ):
        assert a == pytest.approx(b, abs=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [50, 1000, 4096])
@pytest.mark.parametrize(("top", "wanted"), [(0, 0), (5, 0), (20, 3), (0, 2), (1, 1)])
def test_float32(vocab: int, top: int, wanted: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(3, 4, vocab, generator=generator) * 4
    logits[1] = torch.randint(-3, 3, (4, vocab), generator=generator).float()  # ties wherever one looks
    logits[1, 0] *= 0.0  # both zeros
    tokens = torch.randint(0, vocab, (3, 4), generator=generator)
    ids = torch.randint(0, vocab, (3, wanted), generator=generator)
    before = logits.clone()
    packed = path_logprobs(logits, tokens, top, ids if wanted else None)
    assert torch.equal(logits, before)
    assert packed.shape == (3, 4, width(top, wanted)) and packed.dtype == torch.float64
    for b in range(3):
        got = unpack(packed[b].numpy(), top, LogprobParams(top, tuple(ids[b].tolist())))
        for p in range(4):
            check(got[p], expected(logits[b, p], int(tokens[b, p]), top, ids[b].tolist()), 2e-6 * 16)


def test_rows_that_ask_for_less() -> None:
    logits = torch.randn(2, 1, 300, generator=torch.Generator().manual_seed(0))
    tokens, ids = torch.tensor([[4], [5]]), torch.tensor([[7, 0], [1, 2]])
    packed = path_logprobs(logits, tokens, 6, ids)
    check(unpack(packed[0].numpy(), 6, LogprobParams(2, (7,)))[0], expected(logits[0, 0], 4, 2, [7]), 1e-5)
    check(unpack(packed[1].numpy(), 6, LogprobParams(0, (1, 2)))[0], expected(logits[1, 0], 5, 0, [1, 2]), 1e-5)
    through = packed.view(torch.int64).view(torch.float64)  # as an int64 download carries it
    assert torch.equal(through, packed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("top", [0, 8])
def test_exact_logits_of_half_precision(dtype: torch.dtype, top: int) -> None:
    """Rounded logits around 25 lie up to 0.06 off and tie; what is reported does not."""
    generator = torch.Generator().manual_seed(1)
    true = torch.randn(4, 3, 2048, generator=generator) + 25
    true[..., :300:50] += 6 + torch.arange(6) * 0.02  # near ties that hold nearly all of the mass
    rounded = true.to(dtype)
    tokens = torch.full((4, 3), 50)
    ids = torch.tensor([[1999, 100]] * 4)
    rescored = path_logprobs(rounded, tokens, top, ids, lambda i: true.gather(-1, i))
    blurred = path_logprobs(rounded, tokens, top, ids)
    worst = {"rescored": 0.0, "blurred": 0.0}
    for b in range(4):
        params = LogprobParams(top, (1999, 100))
        for p in range(3):
            want = expected(true[b, p], 50, top, [1999, 100])
            got = unpack(rescored[b].numpy(), top, params)[p]
            check(got, want, 4e-3)  # a few percent of the mass keep roundings of 0.06
            worst["rescored"] = max(worst["rescored"], abs(got.value - want.value))
            worst["blurred"] = max(worst["blurred"], abs(unpack(blurred[b].numpy(), top, params)[p].value - want.value))
    assert worst["rescored"] * 5 < worst["blurred"]


@pytest.mark.parametrize("most", [0, 5, 24, 25, 100])
def test_what_other_rows_ask_for_changes_nothing(most: int) -> None:
    """Most candidates are computed for the row that asks for most."""
    generator = torch.Generator().manual_seed(3)
    true = torch.randn(2, 3, 257, generator=generator) + 25  # flat: each candidate counts in the normaliser
    tokens, ids = torch.randint(0, 257, (2, 3), generator=generator), torch.tensor([[7, 8], [9, 10]])

    def found(top: int, wanted: Tensor | None) -> list[TokenLogprobs]:
        packed = path_logprobs(true.bfloat16(), tokens, top, wanted, lambda i: true.gather(-1, i))
        return unpack(packed[0].numpy(), top, LogprobParams(2, ()))

    assert found(max(most, 2), ids) == found(2, None)


@pytest.mark.slow
def test_one_position_alone_has_the_bits_of_many() -> None:
    """Torch splits the sum of a single row of so many values among threads."""
    logits = torch.randn(1, 8, 49153, generator=torch.Generator().manual_seed(4)) - 12
    logits[..., 7] = 0.0  # the log of the sum is small, and shows the sum's last bit
    tokens, threads = torch.full((1, 8), 7), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        alone = torch.cat([path_logprobs(logits[:, i : i + 1], tokens[:, i : i + 1], 1) for i in range(8)], 1)
        assert torch.equal(alone, path_logprobs(logits, tokens, 1))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("length", [1, PROMPT_SLICE, 2 * PROMPT_SLICE + 5])
@pytest.mark.parametrize("half", [False, True])
def test_prompts_in_slices(length: int, half: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    hidden, weight = torch.randn(length, 16, generator=generator), torch.randn(256, 16, generator=generator)
    next_ids = torch.randint(0, 256, (length,), generator=generator)
    most = 0

    def logits(part: Tensor) -> Tensor:
        nonlocal most
        most = max(most, part.shape[0])
        out = part @ weight.T
        return out.bfloat16() if half else out

    def exact(part: Tensor, ids: Tensor) -> Tensor:
        return (weight[ids] * part.unsqueeze(-2)).sum(-1)

    packed = prompt_logprobs(hidden, logits, next_ids, 3, torch.tensor([9, 8]), exact if half else None)
    assert most <= PROMPT_SLICE
    got = unpack(packed.numpy(), 3, LogprobParams(3, (9, 8), 0))
    assert len(got) == length
    for m in range(length):
        check(got[m], expected(hidden[m] @ weight.T, int(next_ids[m]), 3, [9, 8]), 2e-2 if half else 1e-4)


@pytest.mark.parametrize("size", [1, 4, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_behind_them(size: int, dtype: torch.dtype) -> None:
    """Of a row that wants them beside one that does not."""
    hidden = torch.randn(2, 3, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    asked = [LogprobParams(hidden=size), LogprobParams(top=1)]
    packed = torch.zeros(2, 3, width(1, 0), dtype=torch.float64)
    both = with_hidden(packed, hidden, asked).view(torch.int64).numpy().view(np.float64)
    one, other = (unpack(row, 1, params) for row, params in zip(both, asked, strict=True))
    assert [list(place.hidden or ()) for place in one] == hidden[0].float().tolist()
    assert all(place.hidden is None for place in other)
    assert with_hidden(packed, hidden, asked[1:]) is packed


class Allocations(TorchDispatchMode):
    """Sums the bytes of all new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.known, self.bytes = list[Any](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {one.untyped_storage().data_ptr() for one in args if isinstance(one, torch.Tensor)}
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.untyped_storage().data_ptr() not in given:
            self.known.append(found)  # so that its address is not used again
            self.bytes += found.untyped_storage().nbytes()
        return found


@pytest.mark.parametrize(("rows", "size"), [(64, 256), (33, 129), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_are_copied_once(rows: int, size: int, dtype: torch.dtype) -> None:
    """A chunk's are hundreds of megabytes of a device's memory."""
    packed, hidden = torch.zeros(rows, width(2, 1), dtype=torch.float64), torch.ones(rows, size, dtype=dtype)
    with Allocations() as made:
        with_hidden(packed, hidden, [LogprobParams(2, (1,), hidden=size)])
    assert made.bytes == 8 * rows * (width(2, 1) + -(-size // 2))
