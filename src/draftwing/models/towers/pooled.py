"""A tower of gated layers with norms before and after each part, as its language model has them, and positions of two
tables and of a rotary embedding; its patches are pooled to tokens. Matrices may clip what goes in and comes out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from draftwing.errors import CheckpointError
from draftwing.images.processing import BudgetProcessor, ImageProcessor
from draftwing.layers.linear_ops.base import ParamSlice, WeightFormat
from draftwing.models.fields import Fields
from draftwing.models.towers.base import Heads, TowerConfig, TowerLayer, TowerModule
from draftwing.text.tokenizer import Tokenizer

_BICUBIC = 3
_CLIPS = "input_min", "input_max", "output_min", "output_max"


@dataclass(frozen=True)
class PooledConfig(TowerConfig):
    """pool: patches of a token's side.  positions: rows of the tables of columns and rows.  theta: of the rotary
    embedding.  clipped: whether matrices clip.  standardised: whether pooled rows are shifted and scaled.  budget: most
    tokens of an image.  around: the ids before and after its tokens."""

    depth: int = 16
    head_dim: int = 64
    pool: int = 3
    positions: int = 10240
    theta: float = 100.0
    clipped: bool = False
    standardised: bool = False
    budget: int = 280
    around: tuple[int, int] = (0, 0)

    prefixes = ("model.vision_tower.", "model.embed_vision.")

    @property
    def least_side(self) -> int:
        return self.patch * self.pool

    def largest_side(self, tokens: int) -> int:
        return max(math.isqrt(min(self.budget, tokens)), 1) * self.patch * self.pool

    def prepared(self, files: Fields) -> TowerConfig:
        for key in ("do_resize", "do_rescale", "do_convert_rgb"):
            files.check(key, (True,))
        files.check("do_normalize", (False,))
        files.check("resample", (_BICUBIC,))
        files.check("patch_size", (self.patch,))
        files.check("pooling_kernel_size", (self.pool,))
        return replace(self, budget=files.whole("max_soft_tokens", high=1120, default=self.budget))

    def processor(self, tokenizer: Tokenizer) -> ImageProcessor:
        texts = [tokenizer.backend.id_to_token(token) for token in (self.token, *self.around)]
        if None in texts:
            raise CheckpointError(f"image_token_id: expected ids of the tokenizer, found {self.token}, {self.around}")
        text, before, after = map(str, texts)
        return BudgetProcessor(
            self.token, text, text, self.patch * self.pool, self.budget, before, after, _BICUBIC,
            mutual=bool(self.mutual),
        )  # fmt: skip

    def build(self, dtype: torch.dtype, device: torch.device, weight_format: WeightFormat) -> TowerModule:
        return PooledTower(self, dtype, device, weight_format)


class PooledTower(TowerModule):
    def __init__(
        self, config: PooledConfig, dtype: torch.dtype, device: torch.device, weight_format: WeightFormat
    ) -> None:
        super().__init__()
        self.config, self.place = config, (dtype, device, weight_format)
        hidden = config.hidden
        self.patch_embedder = _Patches(self)
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(_Layer(self) for _ in range(config.depth))})
        if config.standardised:
            self.std_bias, self.std_scale = (nn.Parameter(torch.empty(hidden, device=device)) for _ in range(2))
        self.embedding_projection = self.linear(hidden, config.width, False)

    def table(self) -> Iterator[tuple[str, ParamSlice]]:
        for name, part in super().table():
            if name.endswith(".clip"):
                owner = name.removesuffix(".clip")
                yield from ((f"{owner}.{clip}", ParamSlice(name, i, 0)) for i, clip in enumerate(_CLIPS))
            else:
                yield name, part

    def parts(self, pixels: Tensor) -> Iterator[int | Tensor]:
        config = self.config
        rows, columns = (side // config.patch for side in pixels.shape[:2])
        patches = pixels.unflatten(0, (rows, -1)).unflatten(2, (columns, -1)).transpose(1, 2)  # [R, C, patch, patch, 3]
        patches = 2 * (patches.flatten(2).flatten(0, 1) - 0.5)
        x = self.patch_embedder(patches, rows, columns)
        del pixels, patches  # what is left is kept while others' steps run
        turn = _Turn.of(rows, columns, config, x)
        for layer in cast(nn.ModuleList, self.encoder["layers"]):
            x = yield from self.through(cast(_Layer, layer), x, turn)
        blocks = x.float().view(rows // config.pool, config.pool, columns // config.pool, config.pool, -1)
        pooled = blocks.mean((1, 3)).flatten(0, 1).to(x.dtype).float() * config.hidden**0.5
        if config.standardised:
            pooled = (pooled - self.std_bias) * self.std_scale
        yield self.embedding_projection(_rms(pooled.to(x.dtype), config.eps))


class _Patches(nn.Module):
    def __init__(self, tower: PooledTower) -> None:
        super().__init__()
        config, (dtype, device, _) = tower.config, tower.place
        self.input_proj = tower.linear(3 * config.patch**2, config.hidden, False)
        table = torch.empty(2, config.positions, config.hidden, dtype=dtype, device=device)
        self.position_embedding_table = nn.Parameter(table)

    def forward(self, patches: Tensor, rows: int, columns: int) -> Tensor:
        """patches [N, 3 * patch * patch] -> [N, hidden]"""
        across, down = self.position_embedding_table
        at = (across[:columns] + down[:rows, None]).flatten(0, 1)
        return self.input_proj(patches.to(at.dtype)) + at


def _rms(x: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


class _Norm(nn.Module):
    def __init__(self, size: int, tower: PooledTower) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(size, device=tower.place[1])), tower.config.eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


class _Turn:
    """Rotary embedding of one half of a head by columns, of the other by rows: cos, sin [N, 1, 2, size / 2]."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self._cos, self._sin = cos, sin

    @classmethod
    def of(cls, rows: int, columns: int, config: PooledConfig, like: Tensor) -> _Turn:
        pairs = config.head_dim // 4
        freq = 1 / config.theta ** (torch.arange(pairs, dtype=torch.float32, device=like.device) / pairs)
        wide, high = (torch.arange(n, dtype=torch.float32, device=like.device)[:, None] * freq for n in (columns, rows))
        angles = torch.stack((wide[None].expand(rows, -1, -1), high[:, None].expand(-1, columns, -1)), 2).flatten(0, 1)
        angles = angles.repeat(1, 1, 2)[:, None]  # [N, 1, 2, size / 2]
        return cls(angles.cos().to(like.dtype), angles.sin().to(like.dtype))

    def __call__(self, x: Tensor, at: slice) -> Tensor:
        halves = x.unflatten(-1, (2, -1))
        first, second = halves.chunk(2, -1)
        return (halves * self._cos[at] + torch.cat((-second, first), -1) * self._sin[at]).flatten(-2)


class _Clipped(nn.Module):
    """A matrix that may clip what goes in and comes out."""

    def __init__(self, tower: PooledTower, into: int, out: int) -> None:
        super().__init__()
        self.linear = tower.linear(into, out, False)
        self.clip = nn.Parameter(torch.empty(4, device=tower.place[1])) if tower.config.clipped else None

    def forward(self, x: Tensor) -> Tensor:
        if self.clip is None:
            return self.linear(x)
        least, most, lowest, highest = self.clip.to(x.dtype)
        return self.linear(x.clamp(least, most)).clamp(lowest, highest)


class _Layer(TowerLayer[_Turn]):
    scalar = 1

    def __init__(self, tower: PooledTower) -> None:
        super().__init__()
        config = tower.config
        hidden, heads = config.hidden, config.heads * config.head_dim
        self._head_dim, self._eps = config.head_dim, config.eps
        attn: dict[str, nn.Module] = {name: _Clipped(tower, hidden, heads) for name in ("q_proj", "k_proj", "v_proj")}
        attn |= {name: _Norm(config.head_dim, tower) for name in ("q_norm", "k_norm")}
        self.self_attn = nn.ModuleDict({**attn, "o_proj": _Clipped(tower, heads, hidden)})
        mlp = {name: _Clipped(tower, hidden, config.ffn) for name in ("gate_proj", "up_proj")}
        self.mlp = nn.ModuleDict({**mlp, "down_proj": _Clipped(tower, config.ffn, hidden)})
        self.input_layernorm, self.post_attention_layernorm = (_Norm(hidden, tower) for _ in range(2))
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = (_Norm(hidden, tower) for _ in range(2))

    def heads(self, x: Tensor, turn: _Turn, at: slice) -> Heads:
        attn, normed = self.self_attn, self.input_layernorm(x)
        q, k, v = (attn[f"{name}_proj"](normed).unflatten(1, (-1, self._head_dim)) for name in "qkv")
        return turn(attn["q_norm"](q), at), turn(attn["k_norm"](k), at), _rms(v, self._eps)

    def rest(self, x: Tensor, attended: Tensor) -> Tensor:
        mlp = self.mlp
        x = x + self.post_attention_layernorm(self.self_attn["o_proj"](attended))
        normed = self.pre_feedforward_layernorm(x)
        up = self.ops.gelu(mlp["gate_proj"](normed), False) * mlp["up_proj"](normed)
        return x + self.post_feedforward_layernorm(mlp["down_proj"](up))
