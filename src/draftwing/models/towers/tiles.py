"""A tower of plain layers with learned positions on a square, for tiles of a picture or for images of any size, and a
projector that makes one row of each block of patches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from draftwing.errors import CheckpointError
from draftwing.images.processing import FixedProcessor, ImageProcessor
from draftwing.images.tiles import GridProcessor, SplitProcessor
from draftwing.layers.linear_ops.base import WeightFormat
from draftwing.models.fields import Fields
from draftwing.models.towers.base import Heads, TowerConfig, TowerLayer, TowerModule, normed
from draftwing.text.tokenizer import Tokenizer

_PREPARED = ("do_resize", "do_rescale", "do_normalize", "do_image_splitting")
_LANCZOS, _BILINEAR = 1, 2


@dataclass(frozen=True)
class TilesConfig(TowerConfig):
    """factor: patches of a token's side.  side: of the square of positions.  projector: hidden size of the two layers
    of the projector, 0: it is one matrix without a bias.  joined_norm: whether blocks are normed before.  mean, std: of
    pixels by channel."""

    factor: int = 2
    side: int = 16
    projector: int = 0
    joined_norm: bool = False
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    @property
    def least_side(self) -> int:
        return self.patch * self.side

    @property
    def token_side(self) -> int:
        return self.patch * self.factor

    def shades(self, files: Fields) -> dict[str, Any]:
        """Returns `mean` and `std` of what a folder says. Raises CheckpointError for what is not served."""
        for key in _PREPARED:
            files.check(key, (True,))
        found = {key: files.numbers(key, -1e3, 1e3) for key in ("image_mean", "image_std") if files.has(key)}
        mean, std = found.get("image_mean", self.mean), found.get("image_std", self.std)
        if len(mean) != 3 or len(std) != 3 or not all(std):
            raise files.unlike("image_std", "three numbers that are not 0, and image_mean three")
        return {"mean": mean, "std": std}

    def build(self, dtype: torch.dtype, device: torch.device, weight_format: WeightFormat) -> TowerModule:
        return TilesTower(self, dtype, device, weight_format)

    def positions(self, table: Tensor, rows: int, columns: int) -> Tensor:
        """table [side, side, hidden] -> positions of a grid [rows, columns, hidden]"""
        raise NotImplementedError

    def tensors(self, stored: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, value in stored:
            if name == "embeddings.patch_embedding.weight" and value.dim() == 4:  # [hidden, 3, patch, patch]
                value = value.permute(0, 2, 3, 1).flatten(1)
            if not name.startswith("head."):  # which makes one row of an image, for other tasks
                yield name, value

    def named(self, tokenizer: Tokenizer, token: int | None = None) -> str:
        """Returns how a token is written, None: that of images. Raises CheckpointError."""
        token = self.token if token is None else token
        text = tokenizer.backend.id_to_token(token)
        if text is None:
            raise CheckpointError(f"image_token_id: expected an id of the tokenizer, found {token}")
        return text


@dataclass(frozen=True)
class SplitConfig(TilesConfig):
    """Tiles of one size, as large as the square of positions. longest: the longer side that a picture is resized to."""

    longest: int = 2048

    prefixes = ("model.vision_model.", "model.connector.modality_")

    def prepared(self, files: Fields) -> TowerConfig:
        files.check("resample", (_LANCZOS,))
        tile = files.inner("max_image_size").whole("longest_edge", default=self.side * self.patch)
        if tile != self.side * self.patch:
            raise files.unlike("max_image_size", f"a longest_edge of {self.side * self.patch}, the tower's size")
        longest = files.inner("size").whole("longest_edge", high=4096, default=4 * tile)
        return replace(self, **self.shades(files), longest=longest)

    def processor(self, tokenizer: Tokenizer) -> ImageProcessor:
        text, tile = self.named(tokenizer), self.side * self.patch
        return SplitProcessor(self.token, text, text, tile, self.patch * self.factor, self.longest, _LANCZOS)

    def positions(self, table: Tensor, rows: int, columns: int) -> Tensor:
        """Places of a fraction of the side, as transformers rounds them."""
        bounds = torch.arange(1 / self.side, 1.0, 1 / self.side)
        places = []
        for count in (rows, columns):
            step = 1.0 / torch.tensor([count])
            at = (torch.arange(count, dtype=torch.float32) * step).clamp(max=1.0 - 1e-6)
            places.append(torch.bucketize(at, bounds, right=True).tolist())
        down, across = places  # as views: a list of indices would be copied to a GPU, and waited for
        table = torch.stack([table[i] for i in down])
        return torch.stack([table[:, i] for i in across], 1)


@dataclass(frozen=True)
class GridConfig(TilesConfig):
    """Images of a size of their own, or a grid of tiles and a small image of the whole. least, most: tokens of an
    image.  tile: pixels of a tile's side.  fewest, many: tiles.  tolerance: of `most`, from which a picture becomes
    tiles.  thumbnail: whether there is an image of the whole."""

    least: int = 64
    most: int = 256
    tile: int = 512
    fewest: int = 2
    many: int = 10
    tolerance: float = 2.0
    thumbnail: bool = True

    def largest_side(self, tokens: int) -> int:
        return max(math.isqrt(self.most) * self.patch * self.factor, self.tile)

    prefixes = ("model.vision_tower.vision_model.", "model.vision_tower.", "model.multi_modal_projector.")

    def prepared(self, files: Fields) -> TowerConfig:
        files.check("resample", (_BILINEAR,))
        files.check("encoder_patch_size", (self.patch,))
        files.check("downsample_factor", (self.factor,))
        return replace(
            self,
            **self.shades(files),
            least=files.whole("min_image_tokens", default=self.least),
            most=files.whole("max_image_tokens", high=4096, default=self.most),
            tile=files.whole("tile_size", high=4096, default=self.tile),
            fewest=files.whole("min_tiles", high=64, default=self.fewest),
            many=files.whole("max_tiles", high=64, default=self.many),
            tolerance=files.number("max_pixels_tolerance", 0, 100, self.tolerance),
            thumbnail=files.flag("use_thumbnail", True),
        )

    def processor(self, tokenizer: Tokenizer) -> ImageProcessor:
        text, block = self.named(tokenizer), self.patch * self.factor
        return GridProcessor(
            self.token, text, text, block, self.least * block**2, self.most * block**2, self.tile, self.fewest,
            self.many, self.tolerance, self.thumbnail, _BILINEAR,
        )  # fmt: skip

    def positions(self, table: Tensor, rows: int, columns: int) -> Tensor:
        """Weighted means of the places that a patch covers."""
        down, across = (_resampling(count, self.side, table.device) for count in (rows, columns))
        return torch.einsum("ir,jc,rch->ijh", down, across, table.float()).to(table.dtype)


@dataclass(frozen=True)
class MeanConfig(TilesConfig):
    """One image of the size of the square of positions, whatever a picture's is. around: the ids before and after its
    tokens."""

    around: tuple[int, int] = (0, 0)

    prefixes = ("model.vision_tower.vision_model.", "model.vision_tower.", "model.multi_modal_projector.")

    def prepared(self, files: Fields) -> TowerConfig:
        files.check("resample", (_BILINEAR,))
        files.check("do_pan_and_scan", (False,))
        sides = [files.inner("size").whole(key, default=self.side * self.patch) for key in ("height", "width")]
        if set(sides) != {self.side * self.patch}:
            raise files.unlike("size", f"{self.side * self.patch} x {self.side * self.patch}, the tower's size")
        return replace(self, **self.shades(files))

    def processor(self, tokenizer: Tokenizer) -> ImageProcessor:
        before, after = (self.named(tokenizer, token) for token in self.around)
        return FixedProcessor(
            self.token, self.named(tokenizer), before, self.side * self.patch, self.patch * self.factor,
            f"\n\n{before}", f"{after}\n\n", _BILINEAR, mutual=bool(self.mutual),
        )  # fmt: skip

    def build(self, dtype: torch.dtype, device: torch.device, weight_format: WeightFormat) -> TowerModule:
        return MeanTower(self, dtype, device, weight_format)

    def positions(self, table: Tensor, rows: int, columns: int) -> Tensor:
        assert table.shape[:2] == (rows, columns)
        return table

    def tensors(self, stored: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, value in super().tensors(stored):
            if name == "mm_input_projection_weight":  # [hidden, width]
                yield "mm_input_projection.weight", value.T
            else:
                yield name, value


def _resampling(count: int, side: int, device: torch.device) -> Tensor:
    """Returns weights of `side` places for each of `count`, [count, side], as a bilinear filter with antialias has
    them."""
    scale = side / count
    centre = (torch.arange(count, dtype=torch.float32, device=device) + 0.5) * scale - 0.5
    apart = (torch.arange(side, dtype=torch.float32, device=device) - centre[:, None]).abs()
    weights = (1 - apart / max(scale, 1.0)).clamp(min=0)
    return weights / weights.sum(1, keepdim=True)


class TilesTower(TowerModule):
    def __init__(
        self, config: TilesConfig, dtype: torch.dtype, device: torch.device, weight_format: WeightFormat
    ) -> None:
        super().__init__()
        self.config, self.place = config, (dtype, device, weight_format)
        self.mean, self.std = torch.tensor(config.mean), torch.tensor(config.std)
        hidden = config.hidden
        table = nn.Embedding(config.side**2, hidden, dtype=dtype, device=device)
        patches = self.linear(3 * config.patch**2, hidden)
        self.embeddings = nn.ModuleDict({"patch_embedding": patches, "position_embedding": table})
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(_Layer(self) for _ in range(config.depth))})
        self.post_layernorm = normed(hidden, config.eps, dtype, device)
        self.add_projector(config)

    def add_projector(self, config: TilesConfig) -> None:
        """Adds what `project` needs."""
        joined = config.hidden * config.factor**2
        if not config.projector:
            self.projection = nn.ModuleDict({"proj": self.linear(joined, config.width, False)})
            return
        if config.joined_norm:
            self.layer_norm = normed(joined, 1e-5, *self.place[:2])
        self.linear_1 = self.linear(joined, config.projector)
        self.linear_2 = self.linear(config.projector, config.width)

    def parts(self, pixels: Tensor) -> Iterator[int | Tensor]:
        config, table = self.config, cast(nn.Embedding, self.embeddings["position_embedding"]).weight
        pixels = (pixels - self.mean) / self.std
        rows, columns = (length // config.patch for length in pixels.shape[:2])
        patches = pixels.unflatten(0, (rows, -1)).unflatten(2, (columns, -1)).transpose(1, 2)  # [R, C, patch, patch, 3]
        at = config.positions(table.unflatten(0, (config.side, config.side)), rows, columns)
        x = self.embeddings["patch_embedding"](patches.flatten(2).flatten(0, 1).to(table.dtype)) + at.flatten(0, 1)
        del pixels, patches, at  # what is left is kept while others' steps run
        for layer in cast(nn.ModuleList, self.encoder["layers"]):
            x = yield from self.through(cast(_Layer, layer), x, None)
        x, factor = self.post_layernorm(x), config.factor
        blocks = x.view(rows // factor, factor, columns // factor, factor, -1).transpose(1, 2)  # [R, C, f, f, hidden]
        yield self.project(blocks.flatten(2, 3).flatten(0, 1))

    def project(self, blocks: Tensor) -> Tensor:
        """blocks [N, patches, hidden] -> [N, width]"""
        config, joined = self.config, blocks.flatten(1)
        if not config.projector:
            return self.projection["proj"](joined)
        joined = self.layer_norm(joined) if config.joined_norm else joined
        return self.linear_2(self.ops.gelu(self.linear_1(joined), True))


class MeanTower(TilesTower):
    """One with means of blocks, normed and projected."""

    def add_projector(self, config: TilesConfig) -> None:
        dtype, device, _ = self.place
        weight = nn.Parameter(torch.empty(config.hidden, dtype=dtype, device=device))  # 0 stands for 1
        self.mm_soft_emb_norm = nn.ParameterDict({"weight": weight})
        self.mm_input_projection = self.linear(config.hidden, config.width, False)

    def project(self, blocks: Tensor) -> Tensor:
        mean = blocks.float().mean(1).to(blocks.dtype).float()
        scaled = mean * torch.rsqrt(mean.square().mean(-1, keepdim=True) + self.config.eps)
        weight = 1 + self.mm_soft_emb_norm["weight"].float()
        return self.mm_input_projection((scaled * weight).to(blocks.dtype))


class _Layer(TowerLayer[None]):
    def __init__(self, tower: TilesTower) -> None:
        super().__init__()
        config = tower.config
        hidden, self._heads = config.hidden, config.heads
        self.layer_norm1, self.layer_norm2 = (normed(hidden, config.eps, *tower.place[:2]) for _ in range(2))
        names = ("q_proj", "k_proj", "v_proj", "out_proj")
        self.self_attn = nn.ModuleDict({name: tower.linear(hidden, hidden) for name in names})
        self.mlp = nn.ModuleDict({"fc1": tower.linear(hidden, config.ffn), "fc2": tower.linear(config.ffn, hidden)})

    def heads(self, x: Tensor, turn: None, at: slice) -> Heads:
        normed = self.layer_norm1(x)
        q, k, v = (self.self_attn[f"{name}_proj"](normed).unflatten(1, (self._heads, -1)) for name in "qkv")
        return q, k, v

    def rest(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.self_attn["out_proj"](attended)
        return x + self.mlp["fc2"](self.ops.gelu(self.mlp["fc1"](self.layer_norm2(x)), False))
