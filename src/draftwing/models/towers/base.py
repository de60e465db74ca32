"""What reads images: a `Tower` makes rows of features of an image's pixels, which stand in a prompt in place of the
embeddings of its tokens.

A tower sees one image at a time, whatever others wait for it, so that the bits of an image's features are the same
each time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from draftwing.images.processing import ImageProcessor
from draftwing.layers.linear import Linear
from draftwing.layers.linear_ops.base import PackMode, ParamSlice, WeightFormat
from draftwing.layers.norm import ByOps, LayerNorm, RMSNorm
from draftwing.models.fields import Fields
from draftwing.ops.attention.batch import Mutual
from draftwing.ops.table import PLAIN, LayerOps

if TYPE_CHECKING:
    from draftwing.text.tokenizer import Tokenizer

_QUERIES = 192  # whose attention is a part, where an image has several
Heads = tuple[Tensor, Tensor, Tensor]  # queries, keys and values
Turn = TypeVar("Turn")  # what layers of a kind turn queries and keys with


@dataclass(frozen=True)
class TowerConfig:
    """token: the id that stands for positions of images in prompts.  width: of a row of features, which is that of the
    language model's embeddings, and of what some of its layers add, one after the other (`deep`).
    blank: the id whose own embeddings by layer, where a model has them, those of images have.
    mutual: in which layers of the language model tokens of an image see each other.
    hidden, ffn, heads, depth, eps: of its layers.  patch: pixels of a patch's side."""

    token: int
    width: int
    deep: int = 0
    blank: int = 0
    mutual: Mutual = ""
    hidden: int = 768
    ffn: int = 3072
    heads: int = 12
    depth: int = 12
    eps: float = 1e-6
    patch: int = 16

    prefixes: ClassVar[tuple[str, ...]] = ("model.visual.",)  # of its tensors in checkpoints

    @property
    def row_size(self) -> int:
        """Returns the values of a row of features, those of `deep` layers included."""
        return self.width * (1 + self.deep)

    @property
    def least_side(self) -> int:
        """Returns pixels of the side of a square that it reads, a small one."""
        raise NotImplementedError

    @property
    def token_side(self) -> int:
        """Returns pixels of the side of what a token stands for."""
        return self.least_side

    def largest_side(self, tokens: int) -> int:
        """Returns pixels of the side of the largest square that it reads, of at most so many tokens."""
        return self.least_side

    def rows_bytes(self, side: int, itemsize: int) -> int:
        """Returns bytes of rows of features of a square with such a side. itemsize: bytes of a value."""
        return (side // self.token_side) ** 2 * self.row_size * itemsize

    def begun_bytes(self, side: int, itemsize: int) -> int:
        """Returns about how many bytes a square with such a side takes at most while others' steps run between layers:
        pixels, what went into a layer and came out, what turns heads, and rows of features as they come. itemsize:
        bytes of a value."""
        turns = 8 * self.hidden // self.heads  # two of a head, float32
        of_patch = 2 * self.hidden * itemsize + turns
        return 3 * side**2 + (side // self.patch) ** 2 * of_patch + self.rows_bytes(side, itemsize)

    def products(self, height: int, width: int) -> int:
        """Returns about how many products one of its layers takes of an image of so many pixels."""
        patches = height * width // self.patch**2
        return patches * sum(self.products_of_patch(patches))

    def products_of_patch(self, patches: int) -> tuple[int, int, int]:
        """Returns about how many products one of its layers takes for a patch of so many: for queries, keys and values,
        for attention, and for the rest."""
        return 3 * self.hidden**2, 2 * self.hidden * patches, self.hidden * (self.hidden + 2 * self.ffn)

    def prepared(self, files: Fields) -> TowerConfig:
        """Returns the config with what a folder says of how pictures are prepared (`preprocessor_config.json`). Raises
        CheckpointError."""
        return self

    def processor(self, tokenizer: Tokenizer) -> ImageProcessor:
        """Returns how pictures are prepared. Raises CheckpointError where the tokenizer lacks its tokens."""
        raise NotImplementedError

    def build(self, dtype: torch.dtype, device: torch.device, weight_format: WeightFormat) -> TowerModule:
        """Returns the module, with weights that are not filled."""
        raise NotImplementedError

    def tensors(self, stored: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Yields parameters of the module by name, of tensors of a checkpoint, without the prefix."""
        return stored


class TowerLayer(ByOps, Generic[Turn]):
    """A layer of a tower, in two halves, between which patches see each other."""

    scalar = 0  # scores of attention are divided by its square root; 0: the heads' size

    def heads(self, x: Tensor, turn: Turn, at: slice) -> Heads:
        """x [n, hidden] -> queries, keys and values [n, heads, size]. at: which of an image's patches these are.
        turn: turns queries and keys."""
        raise NotImplementedError

    def rest(self, x: Tensor, attended: Tensor) -> Tensor:
        """x [n, hidden], attended [n, heads * size] -> [n, hidden]"""
        raise NotImplementedError


class TowerModule(nn.Module):
    """pixels [height, width, 3] float32, 0 .. 1 -> [tokens, (1 + deep) * width]"""

    def parts(self, pixels: Tensor) -> Iterator[int | Tensor]:
        """Yields behind each part of the work about how many products it took, and the rows at last. Something else
        may be done meanwhile; the bits are always the same."""
        raise NotImplementedError

    def forward(self, pixels: Tensor) -> Tensor:
        *_, rows = self.parts(pixels)
        assert isinstance(rows, Tensor)
        return rows

    def through(self, layer: TowerLayer[Turn], x: Tensor, turn: Turn) -> Generator[int, None, Tensor]:
        """Returns a layer's output of an image [N, hidden], by some of its patches at a time."""
        first, attention, rest = self.config.products_of_patch(len(x))
        blocks, made, out = self._blocks(len(x), self.at_once), list[Heads](), list[Tensor]()
        for block in blocks:
            made.append(layer.heads(x[block], turn, block))
            if len(blocks) > 1:
                yield first * len(made[-1][0])
        keys, values = (joined([each[i] for each in made]) for i in (1, 2))
        attend, work = self.ops.whole_attention(keys, values, layer.scalar), 0
        for block in blocks:
            if out:
                yield work
            queries, attended = made[len(out)][0], list[Tensor]()
            for some in self._blocks(len(queries), _QUERIES if len(blocks) > 1 else 0):
                attended.append(attend(queries[some]))
                if len(blocks) > 1:
                    yield attention * len(attended[-1])
            out.append(layer.rest(x[block], joined(attended)))
            work = (rest if len(blocks) > 1 else first + attention + rest) * len(queries)
        rows = joined(out)
        del made, keys, values, attend, queries, attended, out  # what is left is kept while others' steps run
        yield work
        return rows

    def by_rows(
        self, function: Callable[[Tensor], Tensor], x: Tensor, products: int, patches: int = 1
    ) -> Generator[int, None, Tensor]:  # fmt: skip
        """Returns a function of x [N, ...] whose rows do not depend on each other, by some at a time. products: of a
        row.  patches: of a row."""
        out = list[Tensor]()
        for block in self._blocks(len(x), self.at_once // patches):
            if out:
                yield products * len(out[-1])
            out.append(function(x[block]))
        return joined(out)

    def pause(self, patches: int) -> Iterator[int]:
        """Yields behind work that has no products, and reads and writes much, where an image of so many patches is read
        in parts of layers."""
        if 0 < self.at_once < patches:
            yield 0

    @staticmethod
    def _blocks(count: int, size: int) -> list[slice]:
        """Returns the parts of so many rows, which do not depend on how long anybody may wait, as bits might. size: of
        one, 0: all."""
        size = size or count
        return [slice(at, min(at + size, count)) for at in range(0, count, size)]

    def linear(self, into: int, out: int, bias: bool = True) -> Linear:
        """Returns a matrix in the tower's format. To be called in constructors, which set `place` first."""
        return Linear(into, out, bias, *self.place)

    config: Any  # of its own kind
    place: tuple[torch.dtype, torch.device, WeightFormat]
    ops: LayerOps = PLAIN  # what it was packed with
    at_once: int = 0  # rows of a part; 0: all

    def warm(self) -> None:
        """Runs once what a GPU compiles at its first call, so that no client waits for it. To be called when packed."""
        side = self.config.least_side
        self(torch.zeros(side, side, 3, device=next(self.parameters()).device))

    def table(self) -> Iterator[tuple[str, ParamSlice]]:
        """Yields where tensors of a checkpoint go, by their names without the prefix."""
        for name, param in self.named_parameters():
            yield name, ParamSlice(name, 0, len(param))

    def settle(self, device: torch.device) -> None:
        """Brings what is no parameter to the device: small tensors in attributes of modules."""
        for part in self.modules():
            for name, value in list(vars(part).items()):
                if isinstance(value, Tensor):
                    setattr(part, name, value.to(device))

    def pack(self, ops: LayerOps) -> None:
        """Prepares all parts for inference."""
        self.ops, self.at_once = ops, ops.patches_at_once
        for name, part in self.named_modules():
            if isinstance(part, Linear):
                part.pack(ops, PackMode(name=f"tower.{name}"))
            elif isinstance(part, ByOps | RMSNorm):
                part.pack(ops)


class Tower:
    """A loaded tower. No module itself: it is no part of the decoder beside which it stands."""

    def __init__(self, config: TowerConfig, module: TowerModule, dtype: torch.dtype) -> None:
        self.config, self.module, self._dtype = config, module, dtype

    def parts(self, pixels: Tensor, tokens: int) -> Iterator[int | Tensor]:
        """Yields what `TowerModule.parts` does, of an image with so many tokens: at last [tokens, row_size], in the
        model's dtype. pixels: [height, width, 3] uint8."""
        for made in self.module.parts(pixels.float().div_(255)):
            if isinstance(made, int):
                yield made
                continue
            assert made.shape == (tokens, self.config.row_size)
            yield made.to(self._dtype)

    def features(self, pixels: Tensor, tokens: int) -> Tensor:
        """Returns the rows that `parts` yields."""
        *_, rows = self.parts(pixels, tokens)
        assert isinstance(rows, Tensor)
        return rows


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Returns all parts, one behind the other, without a copy where there is one."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def normed(size: int, eps: float, dtype: torch.dtype, device: torch.device) -> LayerNorm:
    """Returns a LayerNorm with a bias."""
    return LayerNorm(size, eps, dtype, device, bias=True)
