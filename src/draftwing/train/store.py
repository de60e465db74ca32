"""Stores what a draft head is trained on, token sequences with the target's features, on disk or computed when asked
for, and makes batches of it.

A `FeatureStore` is a folder: `index.json` and safetensors shards. A shard counts once the index names it, and both are
renamed into place when they are complete, so that a run which is killed at any moment goes on where the index ends.
Batches are a function of the seed and the number of the step, so that a run which goes on reads what it would have
read."""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftwing.config.drafters import training
from draftwing.errors import ConfigError
from draftwing.files import load_json, replace_file, write_json

_VERSION = 1
_AUX = "taps"  # what files of this version call auxiliary hidden states, and the layers they are of
_OPEN_SHARDS = 64  # each open one holds a file handle


class Sample(NamedTuple):
    """One sequence of T tokens. ids and loss_mask are on the CPU, features where their source has them.

    ids [T] int32.  loss_mask [T] bool: the token at t is the assistant's, so that predicting it counts.
    aux_hidden [T, len(meta.aux_layers) * hidden]: what `DecoderModel.forward` gives for `meta.aux_layers` at each
    position. final [T, hidden]: after the final norm; the frozen head makes the target's logits for position t + 1 of
    it.
    key: names the sequence, so that it is not captured twice.
    """

    ids: Tensor
    loss_mask: Tensor
    aux_hidden: Tensor
    final: Tensor
    key: str = ""


class Tokens(NamedTuple):
    """A sequence before its features are known: ids [T] int32, which of them are the assistant's [T] bool, its name."""

    ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    key: str


@dataclass(frozen=True)
class SourceMeta:
    """Describes features: what they were computed by and for.

    model: as the user named it.  algorithm: of `draftwing train`.  aux_layers: as for `DecoderModel.forward`.
    hidden, vocab: of the target.  dtype: of auxiliary hidden states and final, such as "bfloat16".
    """

    model: str
    algorithm: str
    aux_layers: tuple[int, ...]
    hidden: int
    vocab: int
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype


@dataclass(frozen=True)
class _Shard:
    file: str
    bytes: int
    keys: tuple[str, ...]
    lengths: tuple[int, ...]


class FeatureStore:
    """Samples on disk, appended a shard at a time.

    Raises ConfigError for a folder that is no store, or whose shards are not what its index says.
    """

    def __init__(self, folder: str | Path) -> None:
        """Opens a store that is there."""
        self.folder = Path(folder)
        self.meta, self._shards = _read_index(self.folder)
        self._file = lru_cache(_OPEN_SHARDS)(self._opened)
        self._places: list[tuple[str, int]] = []  # of each sample, its shard's file and where it begins there
        self.lengths: list[int] = []
        self.order: list[str] = []  # keys, by number
        self.keys: set[str] = set()
        for shard in self._shards:
            self._add(shard)

    @classmethod
    def create(cls, folder: str | Path, meta: SourceMeta) -> FeatureStore:
        """Returns a new store, or the one that is there; ConfigError if that holds features of something else."""
        folder = Path(folder)
        if not (folder / "index.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            _write_index(folder, meta, ())
        store = cls(folder)
        if store.meta != meta:
            expected, found = dataclasses.asdict(meta), dataclasses.asdict(store.meta)
            differ = [f"{key}: expected {expected[key]}, found {found[key]}" for key in expected
                      if expected[key] != found[key]]  # fmt: skip
            raise ConfigError(
                f"{folder} holds features of something else ({'; '.join(differ)}): remove it or name another folder"
            )
        return store

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def bytes(self) -> int:
        """On disk, without the index."""
        return sum(shard.bytes for shard in self._shards)

    def append(self, samples: Iterable[Sample]) -> None:
        """Writes one shard. When this returns, the samples are on the disk; if it raises, none of them is."""
        samples = list(samples)
        if not samples:
            return
        name = f"shard-{len(self._shards):05d}.safetensors"
        path = self.folder / name
        dtype = self.meta.torch_dtype
        tensors = {
            "ids": torch.cat([s.ids for s in samples]).to("cpu", torch.int32),
            "loss_mask": torch.cat([s.loss_mask for s in samples]).to("cpu", torch.bool),
            "final": torch.cat([s.final for s in samples]).to("cpu", dtype),
        }
        if not self._final_only:
            tensors[_AUX] = torch.cat([s.aux_hidden for s in samples]).to("cpu", dtype)
        total = len(tensors["ids"])
        assert all(len(tensor) == total for tensor in tensors.values()), "all of a sample's tensors have T rows"
        partial = path.with_suffix(".partial")
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, partial)
        replace_file(partial, path)
        shard = _Shard(
            name, path.stat().st_size, tuple(s.key for s in samples), tuple(len(s.ids) for s in samples)
        )  # fmt: skip
        _write_index(self.folder, self.meta, (*self._shards, shard))
        self._shards.append(shard)
        self._add(shard)

    def read(self, i: int) -> Sample:
        name, start = self._places[i]
        end, file = start + self.lengths[i], self._file(name)
        ids, mask, final = (file.get_slice(name)[start:end] for name in ("ids", "loss_mask", "final"))
        aux_hidden = final if self._final_only else file.get_slice(_AUX)[start:end]
        return Sample(ids, mask, aux_hidden, final, self.order[i])

    @property
    def _final_only(self) -> bool:
        """Tells whether the only hidden states are those after the final norm, which are not stored twice."""
        return not training(self.meta.algorithm).aux_hidden_states

    def _add(self, shard: _Shard) -> None:
        self._places += [
            (shard.file, end - length) for end, length in zip(accumulate(shard.lengths), shard.lengths, strict=True)
        ]
        self.lengths += shard.lengths
        self.order += shard.keys
        self.keys |= set(shard.keys)

    def read_many(self, numbers: Sequence[int]) -> list[Sample]:
        return [self.read(i) for i in numbers]

    def _opened(self, name: str) -> Any:
        path = self.folder / name
        try:
            return safe_open(path, framework="pt", device="cpu")
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path} cannot be read: {error}; remove {self.folder} and capture again") from None


Features = Callable[[Sequence[Tensor]], list[tuple[Tensor, Tensor]]]


class OnlineSource:
    """Features computed when samples are read, by the model: no disk, but a forward pass of the target each time.

    features: sequences of ids [T] int32 -> (aux_hidden [T, len(aux_layers) * hidden], final [T, hidden]) of each, on
    the target's device (`capture.FeatureModel.batch`).
    """

    def __init__(self, meta: SourceMeta, tokens: Sequence[Tokens], features: Features) -> None:
        self.meta, self._tokens, self._features = meta, tokens, features
        self.lengths = [len(one.ids) for one in tokens]
        self.order = [one.key for one in tokens]

    def __len__(self) -> int:
        return len(self._tokens)

    def read_many(self, numbers: Sequence[int]) -> list[Sample]:
        """Reads several samples, by one forward."""
        chosen = [self._tokens[i] for i in numbers]
        ids = [torch.from_numpy(one.ids) for one in chosen]
        return [
            Sample(row, torch.from_numpy(one.loss_mask), *features, one.key)
            for one, row, features in zip(chosen, ids, self._features(ids), strict=True)
        ]


class Part:
    """Some samples of a source."""

    def __init__(self, source: FeatureStore | OnlineSource, numbers: Sequence[int]) -> None:
        self.source, self.numbers, self.meta = source, list(numbers), source.meta
        self.lengths = [source.lengths[i] for i in self.numbers]

    def __len__(self) -> int:
        return len(self.numbers)


FeatureSource = FeatureStore | OnlineSource | Part  # what training reads


def _read_index(folder: Path) -> tuple[SourceMeta, list[_Shard]]:
    path = folder / "index.json"
    try:
        index = load_json(path)
        if index["version"] != _VERSION:
            raise ConfigError(f"{path}: expected version {_VERSION}, found {index['version']}: capture again")
        meta = SourceMeta(aux_layers=tuple(index["meta"].pop(_AUX)), **index["meta"])
        shards = [_Shard(s["file"], s["bytes"], tuple(s["keys"]), tuple(s["lengths"])) for s in index["shards"]]
    except FileNotFoundError:
        raise ConfigError(f"{folder} has no index.json: expected features from `draftwing train capture`") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): remove {folder} and capture again") from None
    for shard in shards:
        file = folder / shard.file
        found = file.stat().st_size if file.is_file() else 0
        if found != shard.bytes:
            raise ConfigError(f"{file}: expected {shard.bytes} bytes, found {found}: remove {folder} and capture again")
    return meta, shards


def _write_index(folder: Path, meta: SourceMeta, shards: Sequence[_Shard]) -> None:
    own = dataclasses.asdict(meta)
    own[_AUX] = own.pop("aux_layers")
    index = {"version": _VERSION, "meta": own, "shards": [dataclasses.asdict(shard) for shard in shards]}
    write_json(folder / "index.json", index, None)


SHORTEST = 3  # tokens: one for the feature, one drafted from, one predicted
READERS = 4  # threads that read ahead
_POOL = 64  # batches whose sequences are sorted by length together: little padding, and still at random


def usable_lengths(source: FeatureSource, max_length: int) -> dict[int, int]:
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


def load_batches(source: FeatureSource, numbers: Iterable[list[int]], max_length: int) -> Generator[Batch, None, None]:
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


class Batch(NamedTuple):
    """B sequences, padded at their ends to the length T of the longest, and the n loss positions."""

    ids: Tensor  # [B, T] int64
    aux_hidden: Tensor  # [B, T, len(aux_layers) * hidden]
    final: Tensor  # [n, hidden]: the target's state after its final norm at each loss position
    position: Tensor  # [n] int64: index into the flat [B * T]
    depth: Tensor  # [n] int64: index within the sequence
    lengths: Tensor  # [B] int64
    max_positions: int  # loss positions of the sequence that has the most
