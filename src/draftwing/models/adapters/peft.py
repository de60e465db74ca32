"""Adapters as PEFT stores them: a folder with adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

from torch import Tensor

from draftwing.errors import CheckpointError
from draftwing.models.adapters import groups
from draftwing.models.adapters.adapter import MAX_RANK, Adapter, Factors, checked_factors
from draftwing.models.adapters.files import CONFIG, WEIGHTS, folder_digest, read_config
from draftwing.models.adapters.image import all_finite
from draftwing.models.adapters.stored import read_whole, tensors_of
from draftwing.models.weight_map import canonical
from draftwing.requests.refusals import show

_PREFIX = "base_model.model."
_PARAMETER = re.compile(r"(?:(?:.+\.)?experts\.)?(?:gate_up_proj|up_proj|down_proj)")  # of `target_parameters`
_OF_ALL = re.compile(r"((?:.+\.)?experts)(?:\.base_layer)*")
_TENSOR = re.compile(r"(.+)\.lora_(A|B)(?:\.default)?\.weight")
# What is not served, by key of the config, and what it would do.
_REFUSED = {
    "use_dora": "DoRA, whose matrices are normed by column",
    "use_qalora": "QA-LoRA, whose inputs are pooled",
    "use_bdlora": "block-diagonal LoRA",
    "lora_bias": "biases of factors",
    "modules_to_save": "whole modules that were trained",
    "trainable_token_indices": "embeddings of tokens that were trained",
    "layer_replication": "layers that are copies of others",
    "alora_invocation_tokens": "activated LoRA, which begins at tokens of its own",
    "arrow_config": "routing among adapters",
    "kasa_config": "KaSA, which changes the model's own matrices",
    "monteclora_config": "MonteCLoRA, whose factors are drawn",
    "velora_config": "VeLoRA, whose inputs are grouped",
}
# Of `init_lora_weights`, those that change the matrices of the model, too.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_MOST_REPEATS = 3


def read_folder(folder: Path, most: int) -> Adapter:
    """Returns the adapter of a folder, on the CPU. Raises CheckpointError, naming what is not served. most: bytes of
    its tensors' file."""
    config, text = read_config(folder)
    _check(config, folder / CONFIG)
    path = folder / WEIGHTS
    if not path.exists() and (folder / "adapter_model.bin").exists():
        raise CheckpointError(
            f"{path.name} is missing in {folder}; found adapter_model.bin, which is not read: save the adapter with "
            "safe_serialization"
        )
    data, digest = read_whole(path, most)
    factors, base = _factors(tensors_of(data, path), config, path), config.get("base_model_name_or_path")
    return Adapter(factors, folder_digest(text, digest), base if isinstance(base, str) else "")


def _check(config: Mapping[str, Any], path: Path) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{path}: peft_type: expected LORA, found {show(kind)}")
    for key, what in _REFUSED.items():
        if config.get(key):
            raise CheckpointError(f"{path}: {key} asks for {what}, which is not served; expected a plain LoRA")
    wanted = config.get("target_parameters") or ()
    odd = [one for one in wanted if not isinstance(one, str) or _PARAMETER.fullmatch(one) is None]
    if not isinstance(wanted, list | tuple) or odd:
        raise CheckpointError(
            f"{path}: target_parameters: expected experts.gate_up_proj (or up_proj) and experts.down_proj "
            f"alone; found {show(wanted)}"
        )
    if config.get("bias", "none") != "none":
        raise CheckpointError(f"{path}: bias: expected none, found {show(config['bias'])}: biases are not adapted")
    begun = config.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_CHANGES_BASE):
        raise CheckpointError(
            f"{path}: init_lora_weights is {show(begun)}, which changes the model's own matrices: expected an adapter "
            "that was converted to a plain LoRA (path_initial_model_for_weight_conversion)"
        )


def _factors(tensors: Mapping[str, Tensor], config: Mapping[str, Any], path: Path) -> dict[str, Factors]:
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in sorted(tensors.items()):
        match = _TENSOR.fullmatch(name.removeprefix(_PREFIX))
        if match is None:
            raise CheckpointError(f"{path}: {show(name)} {_what(name)}; expected lora_A and lora_B alone")
        pairs.setdefault(match[1], {})[match[2]] = tensor
    if not pairs:
        raise CheckpointError(f"{path}: expected tensors lora_A and lora_B, found none")
    scale = _Scales(config, path)
    found: dict[str, Factors] = {}
    joined = bool(config.get("target_parameters"))
    alone = [one for one, pair in pairs.items() if len(pair) == 2 and not (joined and _OF_ALL.fullmatch(one))]
    floating = [one for one in tensors.values() if one.is_floating_point()]
    finite = bool(floating) and all_finite(floating)
    for one in alone:
        checked_factors(pairs[one]["A"], pairs[one]["B"], f"{path}: {show(one)}", finite)
    for module, pair in pairs.items():
        if len(pair) < 2:
            raise CheckpointError(f"{path}: {show(module)} has lora_{next(iter(pair))} alone; expected A and B")
        name = canonical(module)
        if name in found:
            raise CheckpointError(f"{path}: {show(module)}: expected one pair for each matrix, found two")
        where = f"{path}: {show(module)}"
        if joined and (of_all := _OF_ALL.fullmatch(module)):
            beside = [one for one in pairs if (match := _OF_ALL.fullmatch(one)) and match[1] == of_all[1]]
            if any(len(pairs[one]) < 2 or any(part.dim() != 2 for part in pairs[one].values()) for one in beside):
                raise CheckpointError(f"{where}: expected lora_A and lora_B of two dimensions for each parameter")
            shapes = [(len(pairs[one]["B"]), *pairs[one]["A"].shape) for one in beside]
            every = scale.of_parameters(of_all[1], config["target_parameters"], shapes, where)
            rank, times = every[beside.index(module)]
            for own, (down, up) in groups.apart(pair["A"], pair["B"], rank, name):
                checked_factors(down, up, where)
                found[own] = Factors(down, up, times)
            continue
        found[name] = Factors(pair["A"], pair["B"], scale.of(module, len(pair["A"]), where))
    return found


def _what(name: str) -> str:
    for part, what in (
        ("lora_embedding", "adapts an embedding, which is not served"),
        ("lora_magnitude", "is DoRA's, which is not served"),
        ("modules_to_save", "is a whole module, which is not served"),
        (".bias", "is a bias, which is not served"),
        (".base_layer.", "is the model's own"),
    ):
        if part in name:
            return what
    return "is no factor of a LoRA"


class _Scales:
    """The scale of each module: alpha / r, or with rsLoRA alpha / sqrt(r). Both may be other ones by patterns of
    names."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        self._path, self._root = path, bool(config.get("use_rslora"))
        self._rank, self._alpha = config.get("r", 8), _number(config.get("lora_alpha", 8), "lora_alpha", path)
        self._ranks = _patterns(config, "rank_pattern", path)
        self._alphas = _patterns(config, "alpha_pattern", path)

    def of_parameters(
        self, experts: str, parameters: Sequence[str], shapes: Sequence[tuple[int, ...]], where: str
    ) -> tuple[tuple[int, float], ...]:
        """Returns rank and scale of each pair of a module, of which files do not say what parameter it is of: that all
        are of as many experts does, and what they read and make. shapes: of each pair, its outputs, experts * rank and
        its inputs. Raises CheckpointError."""
        names = list(dict.fromkeys(f"{experts}.{one.rpartition('.')[2]}" for one in parameters))  # three at most
        ranks = [_matched(self._ranks, name, self._rank) for name in names]
        known = all(rank in range(1, MAX_RANK + 1) for rank in ranks)
        kinds = {
            name: (int(rank), self.of(name, rank, where)) for name, rank in zip(names, ranks, strict=True) if known
        }
        orders = [
            chosen
            for chosen in permutations(kinds, len(shapes))
            if len({divmod(one[1], kinds[name][0]) for one, name in zip(shapes, chosen, strict=True)}) == 1
        ]
        by_shape = [chosen for chosen in orders if _fit_together(dict(zip(chosen, shapes, strict=True)))]
        fits = {tuple(kinds[name] for name in chosen) for chosen in by_shape or orders}
        if len(fits) != 1:
            raise CheckpointError(
                f"{where}: expected ranks and alphas of experts' parameters that tell which of them each pair is of; "
                f"found ranks {show(sorted(map(str, ranks)))} for {show([one[1] for one in shapes])} rows of lora_A"
            )
        return fits.pop()

    def of(self, module: str, rank: float, where: str) -> float:
        wanted = _matched(self._ranks, module, self._rank)
        if wanted != rank:
            raise CheckpointError(f"{where}: expected the rank that {CONFIG} has, {show(wanted)}; found {rank}")
        alpha = _matched(self._alphas, module, self._alpha)
        return alpha / (math.sqrt(rank) if self._root else rank)


def _fit_together(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Returns whether what the last of experts' matrices makes, and reads, is what the first reads, and makes; or, of
    transposed ones, the reverse. shapes: of pairs by parameter, outputs, rows and inputs."""
    (outputs, _, inputs), (made, _, read) = (
        next((one for name, one in shapes.items() if name.endswith("down_proj") == last), (0, 0, 0)) for last in (0, 1)
    )
    times = 2 if any(name.endswith("gate_up_proj") for name in shapes) else 1
    return (made, times * read) == (inputs, outputs) or (read, times * made) == (outputs, inputs)


def _number(value: Any, key: str, path: Path) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e6:  # no NaN either
        raise CheckpointError(f"{path}: {key}: expected a number below a million, found {show(value)}")
    return float(value)


def _patterns(config: Mapping[str, Any], key: str, path: Path) -> list[tuple[re.Pattern[str], float]]:
    """As PEFT reads them: a pattern is of the end of a name, after a dot."""
    patterns = config.get(key) or {}
    if not isinstance(patterns, Mapping):
        raise CheckpointError(f"{path}: {key}: expected an object of numbers by name, found {show(patterns)}")
    found = []
    for pattern, value in patterns.items():
        repeats = sum(pattern.count(one) for one in "*+{?")
        if len(pattern) > 200 or repeats > _MOST_REPEATS or re.search(r"\)\s*[*+{?]", pattern):
            raise CheckpointError(
                f"{path}: {key}: expected names, or expressions of at most {_MOST_REPEATS} repetitions and none of "
                f"groups; found {show(pattern)}"
            )
        try:
            found.append((re.compile(rf"(?:.*\.)?(?:{pattern})"), _number(value, f"{key}.{show(pattern)}", path)))
        except re.error as error:
            raise CheckpointError(f"{path}: {key}: {show(pattern)} is no expression: {error}") from None
    return found


def _matched(patterns: list[tuple[re.Pattern[str], float]], module: str, default: float) -> float:
    return next((value for pattern, value in patterns if pattern.fullmatch(module)), default)
