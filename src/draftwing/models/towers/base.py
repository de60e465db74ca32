"""What reads images: a `Tower` makes rows of features of an image's pixels, which stand in a prompt in place of the
embeddings of its tokens.

A tower sees one image at a time, whatever others wait for it, so that the bits of an image's features are the same
each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.images.processing import ImageProcessor
from draftwing.layers.linear import Linear
from draftwing.layers.linear_ops.base import PackMode, ParamSlice, WeightFormat
from draftwing.models.fields import Fields
from draftwing.ops.attention.batch import Mutual
from draftwing.ops.table import PLAIN, LayerOps

if TYPE_CHECKING:
    from draftwing.text.tokenizer import Tokenizer


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

    def products(self, height: int, width: int) -> int:
        """Returns about how many products one of its layers takes of an image of so many pixels."""
        patches = height * width // self.patch**2
        return patches * self.hidden * (4 * self.hidden + 2 * self.ffn + 2 * patches)

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


class TowerModule(nn.Module):
    """pixels [height, width, 3] float32, 0 .. 1 -> [tokens, (1 + deep) * width]"""

    def layers(self, pixels: Tensor) -> Iterator[Tensor | None]:
        """Yields None behind each layer, and the rows at last. Something else may be done meanwhile."""
        raise NotImplementedError

    def forward(self, pixels: Tensor) -> Tensor:
        *_, rows = self.layers(pixels)
        assert rows is not None
        return rows

    def linear(self, into: int, out: int, bias: bool = True) -> Linear:
        """Returns a matrix in the tower's format. To be called in constructors, which set `place` first."""
        return Linear(into, out, bias, *self.place)

    place: tuple[torch.dtype, torch.device, WeightFormat]
    ops: LayerOps = PLAIN  # what it was packed with

    def warm(self) -> None:
        """Runs once what a GPU compiles at its first call, so that no client waits for it. To be called when packed."""

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
        """Prepares all matrices for inference."""
        self.ops = ops
        for name, part in self.named_modules():
            if isinstance(part, Linear):
                part.pack(ops, PackMode(name=f"tower.{name}"))


class Tower:
    """A loaded tower. No module itself: it is no part of the decoder beside which it stands."""

    def __init__(self, config: TowerConfig, module: TowerModule, dtype: torch.dtype) -> None:
        self.config, self.module, self._dtype = config, module, dtype

    def layers(self, pixels: Tensor, tokens: int) -> Iterator[Tensor | None]:
        """Yields None behind each layer, and the rows of an image at last, [tokens, row_size], in the model's
        dtype. pixels: [height, width, 3] uint8."""
        for rows in self.module.layers(pixels.float() / 255):
            assert rows is None or rows.shape == (tokens, self.config.row_size)
            yield None if rows is None else rows.to(self._dtype)

    def features(self, pixels: Tensor, tokens: int) -> Tensor:
        """Returns the rows that `layers` yields."""
        *_, rows = self.layers(pixels, tokens)
        assert rows is not None
        return rows


class Attention(NamedTuple):
    """Full attention within an image. turn: turns queries and keys [N, heads, size]."""

    heads: int
    turn: Callable[[Tensor], Tensor] | None = None
    scale: float | None = None  # None: one over the root of the heads' size

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v [N, heads * size] -> [N, heads * size]"""
        q, k, v = (x.unflatten(1, (self.heads, -1)) for x in (q, k, v))
        if self.turn is not None:
            q, k = self.turn(q), self.turn(k)
        return attend(q, k, v, self.scale)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Full attention within an image. q, k, v [N, heads, size] -> [N, heads * size]. scale: as of `Attention`."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, N, size]
    out = F.scaled_dot_product_attention(q, k, v, scale=scale)
    return out[0].transpose(0, 1).flatten(1)


def normed(size: int, eps: float, dtype: torch.dtype, device: torch.device) -> nn.LayerNorm:
    """Returns a LayerNorm with a bias."""
    return nn.LayerNorm(size, eps=eps, dtype=dtype, device=device)
