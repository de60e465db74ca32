"""`Adapter`: the low-rank factors (LoRA) that change a model, by the names of its matrices; and where they go."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from draftwing.errors import CheckpointError, listed
from draftwing.layers.experts import ExpertLinear
from draftwing.layers.hybrid import HybridConfig
from draftwing.layers.latent import HeadLinear, LatentAttentionConfig
from draftwing.layers.linear import Linear
from draftwing.layers.linear_ops.base import ParamSlice
from draftwing.layers.linear_ops.dense import DENSE
from draftwing.machine import free_memory
from draftwing.models.adapters.groups import (
    is_transposed,
    kind_of,
    of_experts,
    of_heads,
    of_queries,
    parted,
    stored_name,
)
from draftwing.models.adapters.image import SlotLayout, SpareMemory, all_finite, call_for_all
from draftwing.models.apart import of_state_space
from draftwing.models.config import ModelConfig
from draftwing.models.decoder import EXPERTS, DecoderModel
from draftwing.models.weight_map import OTHER_SENSES, checkpoint_names
from draftwing.ops.adapters.spec import SIZES, AdapterWeights
from draftwing.ops.table import LayerOps
from draftwing.parallel.ranks import ALONE, Ranks

MAX_RANK = 256
_LEFT = 1 << 30  # bytes of host memory that images leave to others, as much as sleep does
_TIMES = 4  # of an image's bytes: it and the next one, each in twice as many at most


class Factors(NamedTuple):
    """What is added to one matrix: scale * up @ down."""

    down: Tensor  # [r, inputs]
    up: Tensor  # [outputs, r]
    scale: float


def checked_factors(down: Tensor, up: Tensor, where: str, finite: bool = False) -> None:
    """Raises CheckpointError for what are no factors of one matrix. where: for messages.  finite: whether it is known
    that all numbers are."""
    shapes = f"{list(down.shape)} and {list(up.shape)}"
    if down.dim() != 2 or up.dim() != 2 or up.shape[1] != down.shape[0]:
        raise CheckpointError(f"{where}: expected factors [r, inputs] and [outputs, r]; found {shapes}")
    if not 1 <= len(down) <= MAX_RANK:
        raise CheckpointError(f"{where}: expected a rank from 1 to {MAX_RANK}, found factors {shapes}")
    for part in (down, up):
        if part.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            raise CheckpointError(f"{where}: expected floating point of 16 bits or more, found {part.dtype}")
        if not finite and not all_finite([part]):
            raise CheckpointError(f"{where}: expected numbers that are finite; found some that are not")


@dataclass(frozen=True)
class Adapter:
    """factors: by the name of the matrix in a checkpoint of its model, without `.weight`.  digest: of all that it is,
    its files' bytes: another one where they change.  base: what it says it was trained on, for messages."""

    factors: Mapping[str, Factors]
    digest: str
    base: str = ""
    image: Sequence[Tensor] = field(default=(), compare=False, repr=False)  # as `AdapterSlots.imaged` makes it
    head: Adapter | None = field(default=None, compare=False, repr=False)  # of the draft head, for its rows

    @property
    def rank(self) -> int:
        return max((len(one.down) for one in self.factors.values()), default=1)

    @property
    def nbytes(self) -> int:
        return sum(one.down.nbytes + one.up.nbytes for one in self.factors.values())


def digest_of(parts: Sequence[tuple[str, float]]) -> str:
    """Returns the digest of a `mixture` of adapters with these digests."""
    if len(parts) == 1 and parts[0][1] == 1:
        return parts[0][0]
    return "+".join(f"{times!r}*{digest}" for digest, times in parts)


def mixture(parts: Sequence[tuple[Adapter, float]], digest: str) -> Adapter:
    """Returns one adapter that adds what all of these do, each times a number."""
    if len(parts) == 1:
        ((adapter, times),) = parts
        scaled = {name: one._replace(scale=one.scale * times) for name, one in adapter.factors.items()}
        return Adapter(scaled, digest)
    factors: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for adapter, times in parts:
        for name, (down, up, scale) in adapter.factors.items():
            factors.setdefault(name, []).append((down.float(), up.float() * (scale * times)))
    joined = {name: tuple(zip(*pairs, strict=True)) for name, pairs in factors.items()}
    return Adapter({name: Factors(torch.cat(d), torch.cat(u, 1), 1.0) for name, (d, u) in joined.items()}, digest)


class Target(NamedTuple):
    """Where the factors of a stored matrix go: a slice of a `Linear`, -1: another rank has it. outputs, inputs: as it
    is stored."""

    linear: str
    slice: int
    part: ParamSlice
    outputs: int
    inputs: int

    def of(self, factors: Factors) -> Factors:
        """Returns this rank's share of the factors, in the order in which its rows and columns are held."""
        part, (down, up, scale) = self.part, factors
        cut = part.order or part.cut
        if cut is not None:
            moved = cut.of(self.linear, up if cut.axis == 0 else down)
            assert isinstance(moved, Tensor)
            down, up = (down, moved) if cut.axis == 0 else (moved, up)
        return Factors(down, up, scale * part.times)


class Targets:
    """The matrices that factors may be added to, by their names in checkpoints. what: these are of, for messages."""

    what = "model"

    def __init__(self) -> None:
        self.ends: dict[str, list[int]] = {}  # of slices, by `Linear`
        self.groups: dict[str, int] = {}  # of as many slices
        self.targets: dict[str, Target] = {}

    def _add(self, name: str, part: ParamSlice, inputs: int) -> None:
        """Has a matrix that lies behind those that were added before, in a `Linear` of so many inputs."""
        ends = self.ends.setdefault(part.param, [])
        self.groups.setdefault(part.param, 1)
        assert part.start == (ends[-1] if ends else 0), "matrices lie one behind the other"
        ends.append(part.start + part.size)
        sizes = [part.size, inputs]
        if part.order is not None:
            sizes[part.order.axis] = part.order.whole
        elif part.cut is not None:
            sizes[part.cut.axis] = part.cut.share.whole
        self.targets[name] = Target(part.param, len(ends) - 1, part, *sizes)

    def check(self, adapter: Adapter) -> None:
        """Raises CheckpointError for an adapter of other matrices."""
        for name, (down, up, _) in adapter.factors.items():
            target = self.targets.get(name)
            if target is None:
                raise CheckpointError(self._why_not(name, adapter))
            found = [len(up), down.shape[1]]
            if found != [target.outputs, target.inputs]:
                base = f", which is {adapter.base!r}" if adapter.base else ""
                raise CheckpointError(
                    f"{name}: the adapter is of a matrix {found}, the {self.what}'s is "
                    f"{[target.outputs, target.inputs]}: expected an adapter of this {self.what}; found one of "
                    f"another{base}"
                )

    def most_bytes(self, rank: int) -> int:
        """Returns bytes that no file of an adapter of this rank has more of, names and float64 included."""
        values = sum(target.outputs + target.inputs for target in self.targets.values())
        return 8 * max(rank, MAX_RANK) * values + 1024 * len(self.targets) + (1 << 20)

    def _why_not(self, name: str, adapter: Adapter) -> str:
        base = f" (base_model_name_or_path is {adapter.base!r})" if adapter.base else ""
        return (
            f"{name}: the {self.what} has no such matrix: expected an adapter of this {self.what}; found one of "
            f"another{base}"
        )


class AdapterTargets(Targets):
    """The matrices of a model that adapters may change, by their names in its checkpoints."""

    def __init__(self, model: DecoderModel, wide: Collection[str] = ()) -> None:
        """wide: which of `WIDE` may have adapters, too."""
        super().__init__()
        dense = replace(model.config, weight_format=DENSE, vocab_format=DENSE, quantization=None)
        config, ranks = parted(dense), model.ranks
        hybrid = next((one.mixer for one in config.layers if isinstance(one.mixer, HybridConfig)), None)
        self._net = hybrid.net if hybrid is not None and hybrid.net.in_parts else None
        self.config = config
        latents = (one.mixer for one in config.layers if isinstance(one.mixer, LatentAttentionConfig))
        self._latents, self._wide = next(latents, None), wide
        own, linears, merged = _matrices(config, ranks), model.adaptable(wide), model.merged()
        every = _matrices(config, ALONE)
        self._every = every.keys()
        for name, part in own.items():
            if part.param in merged:
                into, first = merged[part.param]
                own[name] = part._replace(param=into, start=first + part.start)
        self.groups = {name: _groups(linear) for name, linear in linears.items()}
        for name, part in sorted(own.items(), key=lambda one: one[1].start):
            if part.param not in linears:
                continue
            add = self._add_heads if isinstance(linears[part.param], HeadLinear) else self._add
            add(name, part, linears[part.param].in_features)
        if ranks.expert_parallel and EXPERTS in wide:  # those of other ranks, each of one matrix
            for name, part in every.items():
                if name in own:
                    continue
                self.targets[name] = Target(part.param, -1, part, part.size, linears[part.param].in_features)

    def _add_heads(self, name: str, part: ParamSlice, inputs: int) -> None:
        """Has a matrix for each head of all ranks."""
        ends = self.ends.setdefault(part.param, [])
        heads, one = self.groups[part.param], part._replace(cut=None, order=None)
        each = part.size // heads
        start, _, whole = (0, 0, part.size) if part.cut is None else part.cut.share
        first = start // each
        ends += range(each, part.size + 1, each)
        for head in range(whole // each):
            at = head - first if head - first in range(heads) else -1
            self.targets[f"{name}.{head}"] = Target(part.param, at, one, each, inputs)

    def fit(self, adapter: Adapter) -> Adapter:
        """Returns the adapter by the names of `targets`, where its model is stored under others, or in other parts.
        Raises CheckpointError for one of another model, or of matrices that take none."""
        factors: dict[str, Factors] = {}
        transposed = any(
            is_transposed(self.config, module, one.down, one.up) for module, one in adapter.factors.items()
        )
        for module, one in adapter.factors.items():
            if module.startswith(OTHER_SENSES) and not one.up.any():
                continue  # was made with all others, and not trained
            for name, own in self._apart(module, one, transposed):
                stored = stored_name(self.config.family, name)
                name = name if name in self.targets or stored not in self.targets else stored
                if name in factors:
                    raise CheckpointError(f"{name}: expected one pair of factors for each matrix, found two")
                factors[name] = own
        fitted = replace(adapter, factors=factors)
        self.check(fitted)
        return fitted

    def _apart(self, module: str, factors: Factors, transposed: bool) -> Iterator[tuple[str, Factors]]:
        """Yields what the loader makes of the matrix: parts of its outputs. transposed: as `of_experts` has it."""
        for own, (down, up) in of_experts(self.config, module, factors.down, factors.up, transposed):
            for part, ups in self._parts(f"{own}.weight", up):
                name = part.removesuffix(".weight")
                if self._latents is None:
                    pairs = of_queries(self.config, name, down, ups)
                else:
                    pairs = of_heads(self._latents, name, down, ups)
                yield from ((matrix, Factors(*pair, factors.scale)) for matrix, pair in pairs)

    def _parts(self, name: str, up: Tensor) -> Iterator[tuple[str, Tensor]]:
        apart = self.config.family.apart
        for own, part in ((name, up),) if apart is None else apart(name, up):
            if self._net is None:
                yield own, part
            else:
                yield from of_state_space(self._net, own, part)

    def _why_not(self, name: str, adapter: Adapter) -> str:
        kind = kind_of(name)
        if kind is not None and kind not in self._wide and (name in self._every or name.rpartition(".")[2].isdigit()):
            return (
                f"{name}: slots have no room for adapters of {kind}: it is set aside where one of --lora-modules has "
                "such matrices; expected this adapter there, or one without them"
            )
        if name.startswith(OTHER_SENSES):
            return (
                f"{name}: adapters of what reads images or sound are not served, unless they add nothing; expected "
                "target_modules of the language model alone"
            )
        if name in self._every:
            return (
                f"{name}: adapters of embeddings, heads and routers are not served; expected target_modules among "
                f"{listed(self.kinds)}"
            )
        return super()._why_not(name, adapter)

    @property
    def kinds(self) -> list[str]:
        """Returns the last parts of names."""
        names = (name.split(".") for name in self.targets)
        return list(dict.fromkeys(f"kv{one[-2][1:]}" if one[-1].isdigit() else one[-1] for one in names))


def _groups(linear: Linear) -> int:
    return linear.groups if isinstance(linear, ExpertLinear) else 1


def _matrices(config: ModelConfig, ranks: Ranks) -> dict[str, ParamSlice]:
    """Returns what has a weight, by its name in a checkpoint."""
    parts = checkpoint_names(config, ranks).items()
    return {
        name.removesuffix(".weight"): part._replace(param=part.param.removesuffix(".weight"))
        for name, part in parts
        if name.endswith(".weight") and part.param.endswith(".weight")
    }


class Slots:
    """Factors on one rank, by slot, from 1 on, beside the matrices of `targets`."""

    def __init__(
        self, targets: Targets, linears: Mapping[str, Linear], count: int, rank: int, model: DecoderModel, ops: LayerOps
    ) -> None:
        """linears: packed, by name.  rank: the most of any adapter.  model: whose type activations are of."""
        self.targets, self._dtype, self._device = targets, model.dtype, model.norm.weight.device
        self.weights = {name: self._empty(linears[name], ends, count, rank, ops) for name, ends in targets.ends.items()}

    def _empty(self, linear: Linear, ends: list[int], count: int, rank: int, ops: LayerOps) -> AdapterWeights:
        groups = _groups(linear)
        own, small = ends[: len(ends) // groups], bool(linear.op.sizes)
        return ops.empty_adapters(count * groups, rank, linear.in_features, own, self._dtype, self._device, small)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for one in self.weights.values() for part in (one.down, one.up))

    def warm_up(self, ops: LayerOps) -> None:
        """Runs each kind of products with few rows and with many, so that their kernels are there."""
        kinds = {(one.down.shape, one.up.shape): one for one in self.weights.values()}
        for weights in kinds.values():
            for rows in SIZES:
                x, y = (weights.scales.new_zeros(rows, n, dtype=self._dtype) for n in (weights.inputs, weights.outputs))
                slots = weights.ranks.new_zeros(rows)
                ops.adapt(y, x, weights, slots, ops.adapter_plan(slots))

    def put(self, slot: int, adapter: Adapter) -> None:
        """Fills a slot. adapter: that was checked, of a rank that slots have room for."""
        groups = self.targets.groups
        for name, weights in self.weights.items():
            weights.clear((slot - 1) * groups[name] + 1, groups[name])
        for name, factors in adapter.factors.items():
            target = self.targets.targets[name]
            if target.slice < 0:
                continue
            weights = self.weights[target.linear]
            group, place = divmod(target.slice, len(weights.bounds) - 1)
            weights.set((slot - 1) * groups[target.linear] + group + 1, place, *target.of(factors))


class AdapterSlots(Slots):
    """The adapters that a model has at hand on one rank."""

    targets: AdapterTargets

    def __init__(self, model: DecoderModel, count: int, rank: int, wide: Collection[str] = ()) -> None:
        """model: packed; from now on its products are with adapters.  rank: the most of any adapter.  wide: as
        `AdapterTargets` has it."""
        super().__init__(AdapterTargets(model, wide), model.adaptable(wide), count, rank, model, model.ops)
        self.layout, self._ranks = SlotLayout(self.weights, self.targets.groups), model.ranks
        self.spare = SpareMemory(self.layout.sizes)
        model.take_adapters(self.weights)

    def imaged(self, adapter: Adapter, memory: Callable[[int], Tensor]) -> Adapter:
        """Returns the adapter with an image of a slot that has it, in memory of the host, which is asked for by bytes.
        Without one where that has no room, or where there are several ranks, to which factors are sent, each in memory
        of its own."""
        if self._ranks.size > 1:
            own = {name: Factors(one.down.clone(), one.up.clone(), one.scale) for name, one in adapter.factors.items()}
            return replace(adapter, factors=own)
        if any(type(one) is not AdapterWeights for one in self.weights.values()) or not self._has_room():
            return adapter
        try:
            image = self.spare.take(memory)
        except RuntimeError:
            return adapter
        into, by_linear = self.layout.numbers_in(image), dict[str, list[str]]()
        kept = dict(adapter.factors)
        for name in adapter.factors:
            by_linear.setdefault(self.targets.targets[name].linear, []).append(name)

        def write(linear: str) -> None:
            weights, mine, names = self.weights[linear], into[linear], by_linear.get(linear, ())
            slices = len(weights.bounds) - 1
            if sum(len(adapter.factors[name].down) == weights.rank for name in names) < mine.ranks.size:
                mine.clear()
            for name in names:
                target = self.targets.targets[name]
                group, place = divmod(target.slice, slices)
                down, up, scale = target.of(adapter.factors[name])
                outputs, own = slice(*weights.bounds[place : place + 2]), down.dtype == weights.down.dtype
                if not own or up.dtype != down.dtype:
                    down, up = down.to(weights.down.dtype), up.to(weights.down.dtype)
                mine.write(group, place, outputs, down, up, scale)
                if own and target.part.order is None and target.part.cut is None:  # not twice in memory
                    kept[name] = Factors(*mine.views(group, place, outputs, down), adapter.factors[name].scale)

        call_for_all([*into], write)
        return replace(adapter, factors=kept, image=image)

    def _has_room(self) -> bool:
        """Returns whether the host has memory for an image and the next one: each takes as much as a slot, however
        small its adapter is, and up to twice of that where page-locked memory comes in powers of two."""
        free = free_memory()
        return free is None or _TIMES * sum(self.layout.sizes) <= free - _LEFT

    def fill(self, slot: int, arrived: Tensor) -> None:
        """Does as `put` with an image, which has arrived at the device, all of it in one."""
        self.layout.fill(slot, arrived)
