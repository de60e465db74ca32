"""Adapters of every matrix of every family, against transformers with the same merged into its weights in float64."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import gemma4_models
import hybrid_models
import moe_models
import pytest
import torch
from models.families import test_gemma3n
from models.test_decoder import FAMILIES, random_reference
from safetensors.torch import load_file, save_file
from thread_ranks import meet
from torch import Tensor, nn

from draftwing.errors import CheckpointError
from draftwing.models.adapters.adapter import AdapterSlots, AdapterTargets
from draftwing.models.adapters.files import CONFIG, WEIGHTS
from draftwing.models.adapters.groups import kind_of
from draftwing.models.adapters.peft import read_folder
from draftwing.models.adapters.read import stored_kinds
from draftwing.models.decoder import EXPERTS, SHARED, WIDE, DecoderModel
from draftwing.models.loader import load_model
from draftwing.ops import make_ops
from draftwing.ops.table import TorchOps
from draftwing.parallel.ranks import ALONE, Ranks
from draftwing.train.capture import Causal

CPU = torch.device("cpu")
MAKERS: dict[str, tuple[Mapping[str, Any], Callable[..., Any]]]
MAKERS = {"dense": (FAMILIES, random_reference), "moe": (moe_models.KINDS, moe_models.reference)}
MAKERS["hybrid"] = hybrid_models.KINDS, hybrid_models.reference
GEMMA4 = {f"gemma4-{kind}": kind for kind in gemma4_models.KINDS}
MAKERS["gemma4"] = GEMMA4, lambda name, **sizes: gemma4_models.reference(GEMMA4[name], **sizes)
MAKERS["gemma3n"] = {"gemma3n": None}, lambda _: test_gemma3n.reference()
AS_STORED = "ling2"  # whose own code is not in transformers, and calls matrices as checkpoints do
CASES = [
    (kind, name)
    for kind, (names, _) in MAKERS.items()
    for name in names
    if name != AS_STORED and (kind == "dense" or name not in FAMILIES)
]
QUICK = {"llama3.2-tied", "qwen3.5-every", "phi3", "gemma3", "lfm2-plain", "deepseek-v2", "mixtral", "gpt-oss"}
# Of layers, what no adapter is served of.
UNSERVED = (".experts", "router", "altup", "block_sparse_moe", "weights_proj", "hyper_connection", ".ple.")
# Of models with a row that random factors make ill-conditioned: transformers' own float32 is off by 1.1e-4 and 1.6e-4
# there. This MiniCPM3 is by 2.2e-4 with the factors merged (5e-5 in float64), and by 5.8e-4 with these rounded apart.
LIMITS = {"qwen3-next": 2e-4, "minicpm3-defaults": 6e-4}
OF_LAYERS = re.compile(r"layers\.|per_layer")
OF_EXPERTS = ("shared_expert_gate", "mlp.gate.")
PARAMETERS = "experts.gate_up_proj", "experts.up_proj", "experts.down_proj"
ONE_SHAPE = "nemotron-h-latent"  # has experts whose parameters cannot be told apart
LENGTH = 70


def write(
    folder: Path, modules: Mapping[str, Tensor], experts: Mapping[str, Tensor], across: bool = False, rank: int = 3
) -> dict[str, Tensor]:
    """Writes an adapter of these matrices, and of parameters of all experts [experts, outputs, inputs], or across;
    returns what it adds to each, float64."""
    generator, added, tensors = torch.Generator().manual_seed(5), {}, {}
    for name, weight in modules.items():
        outputs, inputs = weight.shape
        down = torch.randn(rank, inputs, generator=generator) / inputs**0.5
        up = torch.randn(outputs, rank, generator=generator) * weight.std() * inputs**0.5 / 8
        tensors[f"base_model.model.{name}.lora_A.weight"], tensors[f"base_model.model.{name}.lora_B.weight"] = down, up
        added[name] = 2 * up.double() @ down.double()
    for name, weight in experts.items():
        count, outputs, inputs = weight.transpose(1, 2).shape if across else weight.shape
        down = torch.randn(rank * count, inputs, generator=generator) / inputs**0.5
        up = torch.randn(outputs, rank * count, generator=generator) * weight.std() * inputs**0.5 / 4
        module, _, matrix = name.rpartition(".")
        own = f"base_model.model.{module}" + ("" if matrix == "down_proj" else ".base_layer")
        tensors[f"{own}.lora_A.weight"], tensors[f"{own}.lora_B.weight"] = down, up
        made = torch.einsum("ore,eri->eoi", up.view(outputs, rank, count).double(), down.view(count, rank, -1).double())
        added[name] = 2 * (made.transpose(1, 2) if across else made)
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_parameters": list(experts)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return added


def logits(model: DecoderModel, ids: Tensor, slots: Tensor | None) -> Tensor:
    if any(getattr(spec, "index_size", 0) for spec in model.kv_layers):  # which need a cache
        each = zip(ids.split(LENGTH), (None, None) if slots is None else slots.split(LENGTH), strict=True)
        return torch.stack([hybrid_models.Pooled(model, adapted=own).chunk(one, 0) for one, own in each])
    hidden, _ = model(ids, torch.arange(LENGTH).repeat(2), Causal(2, LENGTH), adapted=slots)
    return model.logits(hidden).view(2, LENGTH, -1)


@pytest.mark.parametrize(
    ("kind", "name"),
    [pytest.param(*case, marks=() if case[1] in QUICK else pytest.mark.exhaustive, id=case[1]) for case in CASES],
)
@torch.inference_mode()
def test_equal_to_transformers(kind: str, name: str, tmp_path: Path) -> None:
    check_all_matrices(kind, name, tmp_path, make_ops(CPU))


class Merging(TorchOps):
    """As GPUs do."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.merges_matrices = True


@pytest.mark.further(name=["qwen3-next", "glm4-moe"])
@pytest.mark.parametrize(
    ("kind", "name"), [("hybrid", "qwen3.5-moe"), ("hybrid", "qwen3-next"), ("moe", "deepseek-v2"), ("moe", "glm4-moe")]
)
@torch.inference_mode()
def test_where_matrices_of_the_same_input_are_one(kind: str, name: str, tmp_path: Path) -> None:
    """And an expert of all rows is one of the others, unless it is to have adapters."""
    targets = check_all_matrices(kind, name, tmp_path, Merging())
    model = load_model(tmp_path / "model", torch.float32, "cpu")
    model.pack(Merging())
    assert {one for one in targets if kind_of(one) != SHARED} == AdapterTargets(model, WIDE).targets.keys() < targets
    with pytest.raises(CheckpointError, match="shared experts: it is set aside where one of --lora-modules"):
        AdapterTargets(model, WIDE).fit(read_folder(tmp_path / "adapter", 1 << 24))


@pytest.mark.slow
@pytest.mark.further(whole_experts=True)
@pytest.mark.further(name=["kimi-linear", "gpt-oss", "deepseek-v3"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [("dense", "sarvam"), ("hybrid", "kimi-linear"), ("dense", "gpt-oss"), ("moe", "deepseek-v3")],
)
@pytest.mark.parametrize("whole_experts", [False, True])
@torch.inference_mode()
def test_ranks_have_their_shares(kind: str, name: str, whole_experts: bool, tmp_path: Path) -> None:
    check_all_matrices(kind, name, tmp_path, make_ops(CPU))
    ids = torch.randint(1, 101, (2 * LENGTH,), generator=torch.Generator().manual_seed(1))

    def adapted(ranks: Ranks) -> Tensor:
        model = load_model(tmp_path / "model", torch.float32, "cpu", ranks=ranks)
        model.pack(make_ops(CPU), shared_apart=True)
        slots = AdapterSlots(model, 3, 4, wide=WIDE)
        slots.put(2, slots.targets.fit(read_folder(tmp_path / "adapter", 1 << 24)))
        with torch.inference_mode():
            return logits(model, ids, torch.tensor([2] * LENGTH + [0] * LENGTH))

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(adapted, meet(2, whole_experts))
    assert torch.equal(one, other)
    torch.testing.assert_close(one, adapted(ALONE), atol=1e-4, rtol=1e-4)


def check_all_matrices(kind: str, name: str, tmp_path: Path, ops: TorchOps) -> Set[str]:
    """Returns the names of matrices that may have adapters."""
    theirs: Any = MAKERS[kind][1](name)
    hybrid_models.saved(tmp_path / "model", theirs)
    model = load_model(tmp_path / "model", torch.float32, "cpu")
    model.pack(ops, shared_apart=True)
    slots = AdapterSlots(model, 3, 4, wide=WIDE)
    every = {
        module: one for module, one in theirs.named_modules() if type(one) is nn.Linear and OF_LAYERS.search(module)
    }
    left = UNSERVED if model.config.experts is None else (*UNSERVED, *OF_EXPERTS)
    served = {module: one.weight for module, one in every.items() if not any(part in module for part in left)}
    experts = {
        param: value for param, value in theirs.named_parameters()
        if param.endswith(PARAMETERS) and not param.startswith("mtp") and name != ONE_SHAPE
    }  # fmt: skip
    ids = torch.randint(1, 101, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    plain = theirs(ids).logits
    weights = served | experts
    for one, added in write(tmp_path / "adapter", served, experts, name.startswith(("gpt-oss", "llama4"))).items():
        weights[one].copy_((weights[one].double() + added).float())
    adapter = read_folder(tmp_path / "adapter", 1 << 24)
    fitted = slots.targets.fit(adapter)
    own = {one for one in slots.targets.targets if experts or kind_of(one) != EXPERTS}
    assert fitted.factors.keys() == own
    slots.put(2, fitted)
    if model.config.experts is not None:
        theirs.set_experts_implementation("eager")  # others take no float64
    adapted = theirs.double()(ids).logits.float()  # whose own rounding can be above the limit
    assert not torch.allclose(adapted, plain, atol=0.1)
    found = logits(model, ids.flatten(), torch.tensor([2] * LENGTH + [0] * LENGTH))
    most = LIMITS.get(name, 1e-4)
    torch.testing.assert_close(found[0], adapted[0], atol=most, rtol=1e-4)
    torch.testing.assert_close(found[1], plain[1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits(model, ids.flatten(), None), plain, atol=1e-4, rtol=1e-4)
    return slots.targets.targets.keys()


def by_expert(folder: Path, tensors: Mapping[str, Tensor], **config: Any) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2} | config))
    save_file(
        {
            f"base_model.model.{name}": value.clone(memory_format=torch.contiguous_format)
            for name, value in tensors.items()
        },
        folder / WEIGHTS,
    )
    return folder


@torch.inference_mode()
def test_adapters_of_each_expert_are_those_of_all(tmp_path: Path) -> None:
    """In both forms that files have: a pair for each matrix, or for a parameter of all experts."""
    theirs: Any = moe_models.reference("glm4-moe")
    theirs.save_pretrained(tmp_path / "model")
    model = load_model(tmp_path / "model", torch.float32, "cpu")
    targets = AdapterTargets(model, [EXPERTS])
    experts, rank = "model.layers.1.mlp.experts", 2
    gate_up, generator = dict(theirs.named_parameters())[f"{experts}.gate_up_proj"], torch.Generator().manual_seed(3)
    count, outputs, inputs = gate_up.shape
    down = torch.randn(count * rank, inputs, generator=generator)
    up = torch.randn(outputs, rank * count, generator=generator)
    whole = {f"{experts}.lora_A.weight": down, f"{experts}.lora_B.weight": up}
    each = {}
    for expert in range(count):
        for name, rows in (("gate_proj", up[: outputs // 2]), ("up_proj", up[outputs // 2 :])):
            own = f"{experts}.{expert}.{name}"
            each[f"{own}.lora_A.weight"] = down[expert * rank : (expert + 1) * rank]
            each[f"{own}.lora_B.weight"] = rows[:, expert::count]
    parameters = {
        "target_parameters": ["mlp.experts.gate_up_proj"],
        "rank_pattern": {"experts.gate_up_proj": 2},
        "r": 7,
    }
    one = targets.fit(read_folder(by_expert(tmp_path / "one", whole, **parameters), 1 << 24))
    other = targets.fit(read_folder(by_expert(tmp_path / "other", each), 1 << 24))
    assert one.factors.keys() == other.factors.keys() and len(one.factors) == 2 * count
    for name, (found_down, found_up, scale) in one.factors.items():
        assert scale == other.factors[name].scale == 1
        assert torch.equal(found_down, other.factors[name].down) and torch.equal(found_up, other.factors[name].up)
    assert stored_kinds(tmp_path / "one") == stored_kinds(tmp_path / "other") == {EXPERTS}
    for wide, said in (((), "--lora-modules"), ([EXPERTS], "")):
        for adapter in (tmp_path / "one", tmp_path / "other"):
            with pytest.raises(CheckpointError, match=said) if said else nullcontext():
                AdapterTargets(model, wide).fit(read_folder(adapter, 1 << 24))
    more = {
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        "rank_pattern": {"experts.down_proj": 1},
    }
    with pytest.raises(CheckpointError, match="which of them each pair is of"):
        read_folder(by_expert(tmp_path / "more", whole, **more), 1 << 24)
    with pytest.raises(CheckpointError, match=r"experts \* 3, inputs"):
        read_folder(by_expert(tmp_path / "odd", whole, target_parameters=["experts.gate_up_proj"], r=3), 1 << 24)
    wrong = {f"{experts}.lora_A.weight": up.T, f"{experts}.lora_B.weight": down.T[: inputs // 4]}
    folder = by_expert(tmp_path / "wrong", wrong, target_parameters=["experts.gate_up_proj"])
    with pytest.raises(CheckpointError, match="expected an adapter of this model"):
        targets.fit(read_folder(folder, 1 << 24))


@pytest.mark.parametrize("name", ["qwen3-moe", pytest.param("llama4", marks=pytest.mark.exhaustive), "gpt-oss"])
def test_parameters_of_experts_the_other_way_round(tmp_path: Path, name: str) -> None:
    """As PEFT before 0.19 has them, and all have those of Llama 4, whose experts do not say how they lie. A square
    matrix among them is as the others are."""
    theirs: Any = random_reference(name, **({"hidden_size": 32} if name == "gpt-oss" else {}))
    theirs.save_pretrained(tmp_path / "model")
    targets = AdapterTargets(load_model(tmp_path / "model", torch.float32, "cpu"), [EXPERTS])
    experts = {one: value for one, value in theirs.named_parameters() if one.endswith(PARAMETERS)}
    across = name in ("gpt-oss", "llama4")
    with torch.no_grad():
        write(tmp_path / "one", {}, experts, across)
    stored = load_file(tmp_path / "one" / WEIGHTS)
    turned: dict[str, Tensor] = {}
    for one, down in stored.items():
        if ".lora_A." not in one:
            continue
        up = stored[one.replace("lora_A", "lora_B")]
        by_rank = up.unflatten(1, (3, -1)), down.unflatten(0, (-1, 3))  # [outputs, r, experts], [experts, r, inputs]
        turned[one] = by_rank[0].permute(2, 1, 0).flatten(0, 1).contiguous()
        turned[one.replace("lora_A", "lora_B")] = by_rank[1].permute(2, 1, 0).flatten(1).contiguous()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / CONFIG).write_text((tmp_path / "one" / CONFIG).read_text())
    save_file(turned, tmp_path / "other" / WEIGHTS)
    found, other = (targets.fit(read_folder(tmp_path / part, 1 << 24)).factors for part in ("one", "other"))
    assert found.keys() == other.keys() and len(found) > 3
    for one, (down, up, scale) in found.items():
        made = other[one].scale * other[one].up.double() @ other[one].down.double()
        torch.testing.assert_close(made, scale * up.double() @ down.double())


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "glm4-moe"])
@pytest.mark.parametrize("ranks", [(4, 2), (2, 4), (3, 2), (2, 2)])
@pytest.mark.covering
def test_parameters_of_experts_with_ranks_of_their_own(tmp_path: Path, name: str, ranks: tuple[int, int]) -> None:
    """As PEFT 0.21 stores `gate_proj`, `up_proj` and `down_proj` of `target_modules`: with twice the rank and alpha
    where two matrices are one parameter. Which pair lies outside may be either."""
    theirs: Any = (random_reference if name in FAMILIES else moe_models.reference)(name)
    theirs.save_pretrained(tmp_path / "model")
    targets = AdapterTargets(load_model(tmp_path / "model", torch.float32, "cpu"), [EXPERTS])
    generator, whole, added = torch.Generator().manual_seed(3), dict[str, Tensor](), dict[str, Tensor]()
    parameters = {one: value for one, value in theirs.named_parameters() if one.endswith(PARAMETERS)}
    for one, value in parameters.items():
        count, outputs, inputs = value.shape
        module, _, matrix = one.rpartition(".")
        rank = ranks["gate" not in matrix]
        down = torch.randn(count, rank, inputs, generator=generator)
        up = torch.randn(outputs, rank, count, generator=generator)
        inside = ("gate" in matrix) == (ranks[0] > ranks[1])
        own = f"{module}.base_layer" if inside else module
        whole[f"{own}.lora_A.weight"], whole[f"{own}.lora_B.weight"] = down.flatten(0, 1), up.flatten(1)
        scale = (5.0 if "gate" in matrix else 3.0) / rank
        added[one] = scale * torch.einsum("ore,eri->eoi", up.double(), down.double())
    assert len(parameters) > 1
    config = {
        "target_modules": ["q_proj"], "target_parameters": ["gate_up_proj", "down_proj"], "r": ranks[1],
        "lora_alpha": 3, "rank_pattern": {r".*\.gate_up_proj": ranks[0]}, "alpha_pattern": {r".*\.gate_up_proj": 5},
    }  # fmt: skip
    found = targets.fit(read_folder(by_expert(tmp_path / "one", whole, **config), 1 << 24)).factors
    seen = 0
    for one, value in added.items():
        layer = one.partition("layers.")[2].partition(".")[0]
        for expert, matrix in enumerate(value):
            parts = matrix.chunk(2) if "gate" in one else (matrix,)
            names = ("gate_proj", "w1"), ("up_proj", "w3")
            for part, known in zip(parts, names if "gate" in one else (("down_proj", "w2"),), strict=True):
                ends = tuple(f"experts.{expert}.{end}" for end in known)
                (factors,) = (found[key] for key in found if f"layers.{layer}." in key and key.endswith(ends))
                made = factors.scale * factors.up.double() @ factors.down.double()
                torch.testing.assert_close(made, part, atol=1e-5, rtol=1e-5)
                seen += 1
    assert seen == len(found)
