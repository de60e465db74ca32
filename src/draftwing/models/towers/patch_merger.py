"""A tower with an image's own grid of patches: learned positions that are resampled to it, a rotary embedding in two
axes, and a merger that makes one row of each block of 2 x 2 patches. Some layers of it may give rows of their own,
which the first layers of the language model add (deepstack)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from draftwing.errors import CheckpointError
from draftwing.images.processing import ImageProcessor, PatchProcessor
from draftwing.layers.linear_ops.base import WeightFormat
from draftwing.layers.norm import ByOps
from draftwing.models.fields import Fields
from draftwing.models.towers.base import Heads, TowerConfig, TowerLayer, TowerModule, normed
from draftwing.text.tokenizer import Tokenizer

_BICUBIC = 3

Turn = Callable[[Tensor, slice], Heads]  # `LayerOps.turn_heads` of an image's grid


@dataclass(frozen=True)
class PatchMergerConfig(TowerConfig):
    """merge: patches of a token's side.  side: of the square table of learned positions.  taps: layers whose outputs
    the language model adds, too.  theta: of the rotary embedding.  mean, std: of pixels by channel.  least, most:
    pixels of an image."""

    hidden: int = 1152
    ffn: int = 4304
    heads: int = 16
    depth: int = 27
    merge: int = 2
    side: int = 48
    taps: tuple[int, ...] = ()
    theta: float = 10000.0
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    least: int = 65536
    most: int = 16777216

    @property
    def least_side(self) -> int:
        return self.patch * self.merge

    def largest_side(self, tokens: int) -> int:
        block = self.patch * self.merge
        return max(math.isqrt(min(self.most, tokens * block**2)) // block, 1) * block

    def prepared(self, files: Fields) -> TowerConfig:
        for key in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
            files.check(key, (True,))
        files.check("resample", (_BICUBIC,))
        files.check("patch_size", (self.patch,))
        files.check("merge_size", (self.merge,))
        size = files.inner("size") if files.has("size") else Fields({}, files.where)
        least = files.whole(
            "min_pixels", high=1 << 40, default=size.whole("shortest_edge", high=1 << 40, default=self.least)
        )
        most = files.whole(
            "max_pixels", high=1 << 40, default=size.whole("longest_edge", high=1 << 40, default=self.most)
        )
        found = {key: files.numbers(key, -1e3, 1e3) for key in ("image_mean", "image_std") if files.has(key)}
        mean, std = found.get("image_mean", self.mean), found.get("image_std", self.std)
        if len(mean) != 3 or len(std) != 3 or not all(std):
            raise files.unlike("image_std", "three numbers that are not 0, and image_mean three")
        return replace(self, mean=mean, std=std, least=least, most=most)

    def processor(self, tokenizer: Tokenizer) -> ImageProcessor:
        text = tokenizer.backend.id_to_token(self.token)
        if text is None:
            raise CheckpointError(f"image_token_id: expected an id of the tokenizer, found {self.token}")
        return PatchProcessor(self.token, text, text, self.patch * self.merge, self.least, self.most, _BICUBIC)

    def build(self, dtype: torch.dtype, device: torch.device, weight_format: WeightFormat) -> TowerModule:
        return PatchMergerTower(self, dtype, device, weight_format)

    def tensors(self, stored: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, value in stored:
            if name == "patch_embed.proj.weight":  # [hidden, 3, 2, patch, patch]: both of its times see the same pixels
                yield "patch_embed.weight", value.float().sum(2).flatten(1)
                continue
            yield name.replace("patch_embed.proj.", "patch_embed."), value


class PatchMergerTower(TowerModule):
    def __init__(
        self, config: PatchMergerConfig, dtype: torch.dtype, device: torch.device, weight_format: WeightFormat
    ) -> None:
        super().__init__()
        self.config, self.place = config, (dtype, device, weight_format)
        self.mean, self.std = torch.tensor(config.mean), torch.tensor(config.std)
        hidden = config.hidden
        self.patch_embed = self.linear(3 * config.patch**2, hidden)
        self.pos_embed = nn.Embedding(config.side**2, hidden, dtype=dtype, device=device)
        self.blocks = nn.ModuleList(_Block(self) for _ in range(config.depth))
        self.merger = _Merger(self, after=False)
        self.deepstack_merger_list = nn.ModuleList(_Merger(self, after=True) for _ in config.taps)

    def parts(self, pixels: Tensor) -> Iterator[int | Tensor]:
        config = self.config
        pixels = (pixels - self.mean).div_(self.std)
        rows, columns = (side // config.patch for side in pixels.shape[:2])
        patches = pixels.unflatten(0, (rows, -1)).unflatten(2, (columns, -1))  # [rows, patch, columns, patch, 3]
        patches = self._in_blocks(patches.permute(0, 2, 4, 1, 3).flatten(2))  # [N, 3 * patch * patch]
        dtype = self.pos_embed.weight.dtype
        patches = patches.to(dtype)
        del pixels  # what is left is kept while others' steps run
        yield from self.pause(len(patches))
        x = yield from self.by_rows(self.patch_embed, patches, config.hidden * patches.shape[1])
        del patches
        yield from self.pause(len(x))
        x = x + self._positions(rows, columns).to(dtype)
        yield from self.pause(len(x))
        cos, sin = self._turn(rows, columns)

        def turn(qkv: Tensor, at: slice) -> Heads:
            return self.ops.turn_heads(qkv, config.heads, cos[at], sin[at])

        size = config.hidden * config.merge**2  # of what is merged
        merging, deep = size * (size + config.width), {}
        for i, block in enumerate(self.blocks):
            x = yield from self.through(cast(_Block, block), x, turn)
            if i in config.taps:
                merger = self.deepstack_merger_list[config.taps.index(i)]
                deep[i] = yield from self.by_rows(merger, x.view(-1, size), merging, config.merge**2)
        merged = yield from self.by_rows(self.merger, x.view(-1, size), merging, config.merge**2)
        yield torch.cat([merged, *(deep[i] for i in config.taps)], 1)

    def _in_blocks(self, x: Tensor) -> Tensor:
        """x [rows, columns, n] -> [rows * columns, n]: blocks by rows, and in each its patches by rows."""
        merge = self.config.merge
        blocks = x.unflatten(1, (-1, merge)).unflatten(0, (-1, merge))  # [R, merge, C, merge, n]
        return blocks.transpose(1, 2).flatten(0, 3)

    def _positions(self, rows: int, columns: int) -> Tensor:
        """Returns the learned positions of a grid, between four of the table each, [N, hidden] float32."""
        side, table = self.config.side, self.pos_embed.weight.float()
        (low, high, part), (left, right, across) = (_between(n, side, table.device) for n in (rows, columns))
        part, across = part[:, None, None], across[None, :, None]
        at = table.unflatten(0, (side, side))
        wide = at[:, left] * (1 - across) + at[:, right] * across  # [side, columns, hidden]
        return self._in_blocks(wide[low].mul_(1 - part).add_(wide[high].mul_(part)))

    def _turn(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Returns cosine and sine of a grid's rotary embedding, [N, size / 2] float32: of rows, and then of columns."""
        pairs = self.config.hidden // self.config.heads // 4  # of each axis
        device = self.pos_embed.weight.device
        freq = 1 / self.config.theta ** (torch.arange(pairs, dtype=torch.float32, device=device) / pairs)
        high, wide = (torch.arange(n, dtype=torch.float32, device=device)[:, None] * freq for n in (rows, columns))
        angles = torch.cat((high[:, None].expand(-1, columns, -1), wide[None].expand(rows, -1, -1)), 2)
        angles = self._in_blocks(angles)
        return angles.cos(), angles.sin()


def _between(count: int, side: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the entries below and above each of `count` places that are spread over `side` entries, and how far
    from the first, float32."""
    place = torch.arange(count, dtype=torch.float32, device=device) * (side - 1) / max(count - 1, 1)
    low = place.floor().long()
    return low, (low + 1).clamp(max=side - 1), place - low


class _Block(TowerLayer[Turn]):
    def __init__(self, tower: PatchMergerTower) -> None:
        super().__init__()
        hidden, ffn = tower.config.hidden, tower.config.ffn
        self.norm1, self.norm2 = (normed(hidden, tower.config.eps, *tower.place[:2]) for _ in range(2))
        self.attn = nn.ModuleDict({"qkv": tower.linear(hidden, 3 * hidden), "proj": tower.linear(hidden, hidden)})
        self.mlp = nn.ModuleDict({"linear_fc1": tower.linear(hidden, ffn), "linear_fc2": tower.linear(ffn, hidden)})

    def heads(self, x: Tensor, turn: Turn, at: slice) -> Heads:
        return turn(self.attn["qkv"](self.norm1(x)), at)

    def rest(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.attn["proj"](attended)
        up = self.ops.gelu(self.mlp["linear_fc1"](self.norm2(x)), False)
        return x + self.mlp["linear_fc2"](up)


class _Merger(ByOps):
    """Makes one row of each block of patches. after: norms the rows of a block together."""

    def __init__(self, tower: PatchMergerTower, after: bool) -> None:
        super().__init__()
        config = tower.config
        self.after, self.merge = after, config.merge**2
        joined = config.hidden * self.merge
        self.norm = normed(joined if after else config.hidden, tower.config.eps, *tower.place[:2])
        self.linear_fc1 = tower.linear(joined, joined)
        self.linear_fc2 = tower.linear(joined, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """x [N, merge * merge * hidden] -> [N, width]"""
        x = self.norm(x if self.after else x.unflatten(1, (self.merge, -1))).flatten(1)
        return self.linear_fc2(self.ops.gelu(self.linear_fc1(x), True))
