"""Makes batches of samples: which sequences go together, in which order, and as which tensors.

Everything here is a function of the seed and the number of the step, so that a run which goes on after a kill reads
what it would have read.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from draftwing.train.store import FeatureSource, FeatureStore, Part, Sample
from draftwing.train.teacher import Batch

SHORTEST = 3  # tokens: one for the feature, one drafted from, one predicted
READERS = 4  # threads that read ahead
_POOL = 64  # batches whose sequences are sorted by length together: little padding, and still at random


def usable(source: FeatureSource, max_length: int) -> dict[int, int]:
    """Returns the number of each sample that has anything to learn from, with its length, cut at max_length."""
    return {i: min(length, max_length) for i, length in enumerate(source.lengths) if length >= SHORTEST}


def epoch_batches(lengths: dict[int, int], tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Returns all samples, each once, in batches that padded have at most `tokens` tokens (or one sample), in random
    order."""
    generator = np.random.default_rng((seed, epoch))
    samples = np.array(sorted(lengths))
    order = samples[generator.permutation(len(samples))].tolist()
    pool = _POOL * max(1, tokens // max(lengths.values()))
    batches: list[list[int]] = []
    for start in range(0, len(order), pool):
        batches += _packed(sorted(order[start : start + pool], key=lambda i: (-lengths[i], i)), lengths, tokens)
    return [batches[i] for i in generator.permutation(len(batches))]


def in_order(lengths: dict[int, int], tokens: int) -> list[list[int]]:
    """Returns all samples in batches, for evaluation."""
    return _packed(sorted(lengths, key=lambda i: (-lengths[i], i)), lengths, tokens)


def stream(lengths: dict[int, int], tokens: int, seed: int, start: int = 0) -> Iterator[list[int]]:
    """Gives the batches of all epochs, one after the other, without end, from number `start` on."""
    epoch = 0
    while True:
        batches = epoch_batches(lengths, tokens, seed, epoch)
        yield from batches[start:]
        start, epoch = max(0, start - len(batches)), epoch + 1


def _packed(order: Sequence[int], lengths: dict[int, int], tokens: int) -> list[list[int]]:
    """order: longest first, so that the first of a batch says what the others are padded to."""
    batches: list[list[int]] = []
    for i in order:
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def collate(samples: Sequence[Sample], max_length: int) -> Batch:
    """Features where the samples have them, everything else on the CPU; page-locked there on a machine with a GPU, so
    that nothing waits for the copies."""
    lengths = [min(len(sample.ids), max_length) for sample in samples]
    count, length, first = len(samples), max(lengths), samples[0]
    device = first.aux_hidden.device
    ids = torch.zeros(count, length, dtype=torch.int64)
    width, dtype = first.aux_hidden.shape[1], first.aux_hidden.dtype
    lock = device.type == "cpu" and torch.cuda.is_available()
    aux_hidden = torch.zeros(count, length, width, dtype=dtype, device=device, pin_memory=lock)
    position, depth = [], []
    for row, (sample, end) in enumerate(zip(samples, lengths, strict=True)):
        ids[row, :end] = sample.ids[:end]
        aux_hidden[row, :end] = sample.aux_hidden[:end]
        at = sample.loss_mask[1:end].nonzero().flatten()  # the target's position before each token to be learnt
        position.append(row * length + at)
        depth.append(at)
    if not sum(len(at) for at in depth):  # nothing to learn: a position that no row predicts keeps shapes as they are
        position[0] = depth[0] = torch.zeros(1, dtype=torch.int64)
    chosen = _locked(torch.cat(depth)).to(device, non_blocking=True).split([len(at) for at in depth])
    final = torch.cat([sample.final.index_select(0, at) for sample, at in zip(samples, chosen, strict=True)])
    if lock:
        final = final.pin_memory()
    places, depths, ends = map(_locked, (torch.cat(position), torch.cat(depth), torch.tensor(lengths)))
    return Batch(_locked(ids), aux_hidden, final, places, depths, ends, max(len(at) for at in depth))


def _same_device() -> Callable[[], None] | None:
    """Gives a thread this one's GPU, of which each thread has its own idea."""
    if not torch.cuda.is_available():
        return None
    return functools.partial(torch.cuda.set_device, torch.cuda.current_device())


def _locked(x: Tensor) -> Tensor:
    return x.pin_memory() if torch.cuda.is_available() else x


def to_device(batch: Batch, device: torch.device, dtype: torch.dtype | None) -> Batch:
    """dtype: of the features, None for as they are."""

    def move(x: Tensor) -> Tensor:
        return x.to(device, dtype if x.is_floating_point() else None, non_blocking=True)

    tensors = {name: move(x) for name, x in batch._asdict().items() if isinstance(x, Tensor)}
    return Batch(**tensors, max_positions=batch.max_positions)


def load(source: FeatureSource, numbers: Iterable[list[int]], max_length: int) -> Generator[Batch, None, None]:
    """Gives the batches of samples `numbers`, read ahead by threads. A source that computes is read by one thread only:
    two would run one model at once."""
    whole, own = (source.source, source.numbers) if isinstance(source, Part) else (source, range(len(source)))

    def make(batch: list[int]) -> Batch:
        # Without gradients, and copied from what computed the features: these are to be saved for a backward pass.
        with torch.no_grad():
            return collate(whole.read_many([own[i] for i in batch]), max_length)

    readers = READERS if isinstance(whole, FeatureStore) else 1
    todo = iter(numbers)
    with ThreadPoolExecutor(readers, "features", initializer=_same_device()) as pool:
        waiting: deque[Future[Batch]] = deque(pool.submit(make, batch) for batch in islice(todo, 2 * readers))
        try:
            while waiting:
                batch = waiting.popleft().result()
                waiting.extend(pool.submit(make, following) for following in islice(todo, 1))
                yield batch
        finally:
            for future in waiting:
                future.cancel()
