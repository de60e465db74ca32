"""Factors of low rank beside a head that stays as it is: what is trained for the rows of one adapter.

The head computes with whole weights, `W + up @ down`, so objectives and kernels know nothing of factors: the gradient
of a weight gives those of its factors, and the weight is written anew after each step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from draftwing.errors import ConfigError
from draftwing.files import replace_file, write_json
from draftwing.models.adapters.files import CONFIG, WEIGHTS
from draftwing.models.adapters.heads import HeadTargets
from draftwing.models.adapters.peft import read_folder
from draftwing.models.heads.base import FeatureHead

RATE = 10.0  # times the learning rate of whole weights: a step of factors moves a weight by about a tenth of its own


class HeadFactors(nn.Module):
    """down [r, inputs] and up [outputs, r] for each matrix of a trainable head that may have some."""

    def __init__(self, head: FeatureHead, rank: int, seed: int) -> None:
        """Of the head nothing else is trained from now on. The factors add nothing at first."""
        super().__init__()
        found = self._targets = HeadTargets(head)
        self.names, self.rank = list(found.targets), rank
        self.down, self.up = nn.ParameterList(), nn.ParameterList()
        self._weights: list[Tensor] = []  # of `Linear`s, whole
        self._rows: list[tuple[int, slice]] = []  # of each pair: which of these, and its rows
        linears = list(found.ends)
        head.requires_grad_(False)
        for name in linears:
            weight = found.linears[name].weight
            assert isinstance(weight, nn.Parameter)
            self._weights.append(weight.requires_grad_(True))
        self._before = [weight.detach().clone() for weight in self._weights]
        generator = torch.Generator().manual_seed(seed)  # on the CPU, so that a seed gives the same on any device
        for target in found.targets.values():
            ends, weight = found.ends[target.linear], found.linears[target.linear].weight
            rows = slice(ends[target.slice - 1] if target.slice else 0, ends[target.slice])
            self._rows.append((linears.index(target.linear), rows))
            limit = target.inputs**-0.5
            down = (2 * torch.rand(rank, target.inputs, generator=generator) - 1) * limit
            self.down.append(nn.Parameter(down.to(weight)))
            self.up.append(nn.Parameter(weight.new_zeros(target.outputs, rank)))

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Makes gradients of factors from those of weights, which are gone afterwards."""
        for (number, rows), down, up in zip(self._rows, self.down, self.up, strict=True):
            of_weight = self._weights[number].grad
            assert of_weight is not None
            down.grad, up.grad = up.t() @ of_weight[rows], of_weight[rows] @ down.t()
        for weight in self._weights:
            weight.grad = None

    @torch.no_grad()
    def write(self) -> None:
        """Writes the weights that the factors make."""
        for (number, rows), down, up in zip(self._rows, self.down, self.up, strict=True):
            self._weights[number][rows] = self._before[number][rows] + up @ down

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Begins with the factors of a folder, and writes the weights that they make; the rest of a higher rank adds
        nothing yet. Raises CheckpointError, and ConfigError for a higher rank than this."""
        found = read_folder(folder, self._targets.most_bytes(self.rank))
        if found.rank > self.rank:
            raise ConfigError(f"{folder} has factors of rank {found.rank}: expected at most {self.rank} (--head-rank)")
        self._targets.check(found)
        for name, down, up in zip(self.names, self.down, self.up, strict=True):
            if (own := found.factors.get(name)) is not None:
                rank = len(own.down)
                down[:rank], up[:, :rank] = own.down.to(down), own.scale * own.up.to(up)
        self.write()

    @torch.no_grad()
    def fit(self) -> None:
        """Takes the factors of this rank that are nearest to what the head's weights are now, in the mean square, and
        writes the weights that they make."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for (number, rows), down, up in zip(self._rows, self.down, self.up, strict=True):
                change = self._weights[number][rows] - self._before[number][rows]
                # Of twice the rank: what was trained and what it began with, each of this one.
                left, sizes, right = torch.svd_lowrank(change, q=min(2 * self.rank, *change.shape), niter=4)
                kept = min(self.rank, len(sizes))
                down.zero_(), up.zero_()
                down[:kept], up[:, :kept] = right[:, :kept].t(), left[:, :kept] * sizes[:kept]
        self.write()

    def save(self, folder: Path, dtype: torch.dtype, base: str, more: dict[str, Any]) -> None:
        """Writes them as PEFT does an adapter. base: name of the head.  more: keys of the config."""
        tensors = {}
        for name, down, up in zip(self.names, self.down, self.up, strict=True):
            for part, value in (("A", down), ("B", up)):
                stored = value.detach().to("cpu", dtype).contiguous()
                tensors[f"base_model.model.{name.removeprefix('model.')}.lora_{part}.weight"] = stored
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).unlink(missing_ok=True)  # in the middle of being replaced it is no adapter
        partial = folder / f"{WEIGHTS}.partial"
        save_file(tensors, partial, metadata={"format": "pt"})
        partial.chmod(0o644)  # the library lets only the owner read it
        replace_file(partial, folder / WEIGHTS)
        kinds = sorted({name.rpartition(".")[2] for name in self.names})
        config = {"peft_type": "LORA", "base_model_name_or_path": base, "r": self.rank, "lora_alpha": self.rank}
        write_json(folder / CONFIG, {**config, "target_modules": kinds, "bias": "none", **more}, 2)
