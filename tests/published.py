"""Published configs, and small random checkpoints of them, each in the format that its config speaks of."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import reference.minimax  # noqa: F401  (of which heads are turned in part)
import tiny_quantised as tiny
import torch
import transformers
from hybrid_models import of_convolutions
from moe_models import by_expert
from reference.deci import deci
from reference.fused import AS_PUBLISHED
from reference.step3 import Step3p5ForCausalLM
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftwing.ops.gemm.stored import MXRows

FOLDER = Path(__file__).parent / "models" / "published"
PROMPT = 96  # tokens: sizes in positions are a 64th of the published ones, so that most windows are shorter
OTHER_SENSES = re.compile(r"visual|vision|audio|projector|embed_")


class Row(NamedTuple):
    """What the index says of a config.

    models: what was published with it.  source: where its keys are from.  missing: what it is refused for, "": its
    architecture, None: it is served.  says: a part of the refusal, "": what is missing.  stored: how its matrices are
    written, a key of `WRITERS`, or mixed, as ModelOpt does.  like: the `model_type` of transformers that it is one of,
    where transformers has no such name, or the text alone where it needs others for the whole.  beside: JSON files of
    its folder that matter, by name.  theirs: what transformers reads besides.
    """

    name: str
    family: str
    models: str
    source: str
    missing: str | None = None
    says: str = ""
    stored: str = ""
    like: str = ""
    beside: Mapping[str, Any] = {}
    theirs: Mapping[str, Any] = {}


@cache
def rows() -> dict[str, Row]:
    index = json.loads((FOLDER / "index.json").read_text(encoding="utf8"))
    return {name: Row(name, source=about.pop("from"), **about) for name, about in index.items()}


def published(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf8"))
    return found


WRITERS: dict[str, tiny.Writer] = {
    "awq": tiny.awq(128),
    "awq 64": tiny.awq(64),
    "gptq": tiny.gptq(wide=128),
    "gptq 8": tiny.gptq(bits=8, wide=128),
    "gptq row": tiny.gptq(wide=-1, shuffled=True),
    "gptq order": tiny.gptq(wide=128, shuffled=True),
    "fp8 block": tiny.float8(128, 128, "weight_scale_inv"),
    "fp8 channel": tiny.float8(1, 0, scale_dtype=torch.bfloat16),
    "fp8 tensor": tiny.float8(0, 0),
    "packed": tiny.packed(wide=128),
    "packed 32": tiny.packed(wide=32),
    "packed zeros": tiny.packed(wide=32, symmetric=False),
    "packed 8": tiny.packed(bits=8, wide=-1),
    "int8": tiny.int8(),
    "fp8 row": tiny.float8(1, 0),
    "nf4": tiny.bnb(),
    "nvfp4": tiny.nvfp4(),
    "nvfp4 divided": tiny.nvfp4(divided=True),
}
OF_MODELOPT = {"FP8": "fp8 tensor", "W4A16_NVFP4": "nvfp4"}


def written(folder: Path, name: str, changes: Callable[[dict[str, Any]], dict[str, Any]] = dict) -> Any:
    """Writes a checkpoint with this config; returns the model of transformers that it is, read from the same config.
    changes: makes another config of it."""
    row, config = rows()[name], changes(published(name))
    plain = without_formats(config)
    if "text_config" in plain:
        plain["text_config"] = without_formats(plain["text_config"])
    if row.like.endswith("_text"):
        plain = plain["text_config"]
    if row.like:
        plain |= {"model_type": row.like, "architectures": [architecture(row.like)]}
    plain |= row.theirs
    wide = folder / "wide"
    wide.mkdir(parents=True)
    (wide / "config.json").write_text(json.dumps(plain))
    theirs = random_model(wide, plain["architectures"][0])
    theirs.save_pretrained(wide)
    # As published; of Kimi-K2.5 transformers writes another name than it reads.
    stored = load_file(wide / "model.safetensors").items()
    tensors = {name.replace("language_model.model.blocks.", "language_model.model.layers."): t for name, t in stored}
    if config["model_type"] in AS_PUBLISHED:
        tensors = AS_PUBLISHED[config["model_type"]](tensors, theirs.config)
    if theirs.config.model_type == "olmo_hybrid":
        tensors = of_convolutions(tensors, theirs.config)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    if row.stored == "mxfp4":
        save_file(in_mxfp4(theirs, tensors), folder / "model.safetensors")
    elif row.stored:
        save_file({name: part.clone() for name, part in by_expert(tensors).items()}, folder / "model.safetensors")
        exact = tiny.quantise(folder, None, lambda module: writer(row, config, module))
        for file, content in row.beside.items():
            (folder / file).write_text(json.dumps(content))
        save_file(exact, wide / "model.safetensors")
        theirs = type(theirs).from_pretrained(wide).float().eval()
    # In transformers 5.24 the whole model has no forward without images.
    return theirs.language_model if isinstance(theirs, transformers.Llama4ForConditionalGeneration) else theirs


def without_formats(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in ("quantization_config", "auto_map")}


def quantization(row: Row, config: dict[str, Any]) -> dict[str, Any]:
    own, inner = config.get("quantization_config"), config.get("text_config", {}).get("quantization_config")
    found: dict[str, Any] = own or inner or row.beside["hf_quant_config.json"]["quantization"]
    return found


def architecture(model_type: str) -> str:
    found: str = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    return found


def random_model(folder: Path, name: str) -> Any:
    """Of transformers, in float32, whose values matter everywhere."""
    torch.manual_seed(0)
    if name == "DeciLMForCausalLM":
        model = deci(json.loads((folder / "config.json").read_text())).eval()
    elif name == "Step3p5ForCausalLM":
        model = Step3p5ForCausalLM(transformers.AutoConfig.from_pretrained(folder)).float().eval()
    else:
        config = transformers.AutoConfig.from_pretrained(folder)
        for part in (config, config.get_text_config()):
            part.pad_token_id = 0  # of a small vocabulary
        model = getattr(transformers, name)(config).float().eval()
    with torch.no_grad():
        for key, value in (*model.named_parameters(), *model.named_buffers()):
            last = key.rpartition(".")[2]
            if last == "A_log":
                value.uniform_(-3, 0.5)
            elif "norm" in key or last == "layer_scalar":  # which begin with ones, or with zeros for ones
                value.add_(torch.empty_like(value).uniform_(-0.5, 0.5)).mul_(0.4 if "k_norm" in key else 1)
            elif key in dict(model.named_parameters()) or last == "e_score_correction_bias":
                value.normal_(0, 0.3 if value.dim() == 1 or "embed" in key else 1.0 / value.shape[-1] ** 0.5)
    return model


def writer(row: Row, config: dict[str, Any], module: str) -> tiny.Writer | None:
    """How a matrix is stored, None for one that its config leaves as it is, or that is of no language model."""
    said = quantization(row, config)
    names = [name for key in ("ignore", "modules_to_not_convert", "exclude_modules") for name in said.get(key) or ()]

    def names_it(one: str) -> bool:
        if one.startswith("re:"):
            return re.match(one[3:], module) is not None
        return fnmatch(module, one) or f".{one}." in f".{module}."

    if any(map(names_it, names)) or OTHER_SENSES.search(module):
        return None
    if row.stored != "mixed":
        return WRITERS[row.stored]
    own = said["quantized_layers"].get(module)
    return None if own is None else WRITERS[OF_MODELOPT[own["quant_algo"]]]


def in_mxfp4(theirs: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with random experts in MXFP4, which the model gets, too."""
    generator, found = torch.Generator().manual_seed(0), {}
    for name, param in theirs.named_parameters():
        if not name.endswith(("gate_up_proj", "down_proj")):
            found[name] = tensors[name]
            continue
        count, columns, rows = param.shape
        blocks = torch.randint(0, 256, (count, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 124, (count, rows, columns // 32), generator=generator, dtype=torch.uint8)
        found |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values = [MXRows(blocks[i].flatten(1), scales[i]).dense(torch.float32).t() for i in range(count)]
        param.data.copy_(torch.stack(values))
    return found
