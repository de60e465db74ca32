"""Configs that hold anything: what comes out is one sentence, soon, and no memory was taken for it."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from itertools import islice, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gemma4_models
import gguf as gguf_package
import hybrid_gguf
import moe_models
import pytest
import tiny_encoder
import tiny_gguf
import torch
from hybrid_models import KINDS, reference
from models.families import test_gemma3n, test_mamba
from models.test_decoder import random_reference
from models.test_gguf_families import UNSAID
from models.test_gguf_families import write as write_family
from published import published, written
from reference import hf_configs
from safetensors.torch import save_file
from tiny_checkpoint import write_checkpoint

from draftwing.config.options import Options
from draftwing.config.trees import carried_shape
from draftwing.engine.build import build
from draftwing.errors import CheckpointError, ConfigError
from draftwing.gguf_file import GGUFFile, open_gguf
from draftwing.models.config import from_hf
from draftwing.models.families import FAMILIES, in_gguf
from draftwing.models.fields import METADATA
from draftwing.models.folder import folder_tensors
from draftwing.models.generation import sampling_defaults, stop_ids
from draftwing.models.gguf_config import model_config
from draftwing.models.heads.config import draft_config, flatten_config, resolve_aux_layers
from draftwing.models.loader import load_config, load_model
from draftwing.models.weight_files import read_json

PUBLISHED: dict[str, dict[str, Any]] = {
    name: config for name, config in vars(hf_configs).items() if name.isupper() and not name.startswith("_")
}
PUBLISHED["MIMO"] = hf_configs.QWEN25_7B | {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
PUBLISHED |= {
    name: published(name)
    for name in (
        "apertus-v1.5-8b",
        "bamba-9b-v2",
        "cwm-32b",
        "gemma-3n-e2b-it",
        "falcon-40b-instruct",
        "flexolmo-7x7b-1t",
        "gpt2",
        "mimo-v2-flash",
        "starcoderbase",
        "granite-swash-2b",
        "granite-swash-3b-a600m",
        "glm-4-9b-chat",
        "helium-1-2b",
        "hy3-preview",
        "hyperclovax-seed-think-14b",
        "internlm2_5-7b-chat",
        "internlm3-8b-instruct",
        "jais-2-8b-chat",
        "jamba-1.5-mini",
        "k-exaone-236b-a23b",
        "laguna-m.1",
        "laguna-xs.2",
        "lfm3-1.7b",
        "ling-3.0-tiny",
        "llama-3.3-nemotron-super-49b",
        "falcon-mamba-7b",
        "mamba-2.8b-hf",
        "mamba-codestral-7b",
        "mellum2-12b-a2.5b",
        "minicpm4-8b",
        "minimax-m1-80k",
        "ministral-8b-transformers-5",
        "mistral-small-4-119b",
        "olmo-hybrid-7b",
        "nanochat-d32",
        "north-mini-code-1.0",
        "olmo-7b-hf",
        "phi-3.5-moe",
        "step-3.5-flash",
        "trinity-mini",
        "vaultgemma-1b",
        "youtu-llm-2b",
    )
}
for name in ("MiniMaxForCausalLM", "MiniMaxText01ForCausalLM"):
    PUBLISHED[name] = published("minimax-m1-80k") | {"architectures": [name]}
PUBLISHED["MLLAMA"] = published("llama-3.2-11b-vision-instruct")
PUBLISHED["CHATGLM3"] = published("glm-4-9b-chat") | {"architectures": ["ChatGLMForConditionalGeneration"]}
PUBLISHED["EXAONE_MOE"] = published("k-exaone-236b-a23b") | {"architectures": ["ExaoneMoeForCausalLM"]}
PUBLISHED["PHIMOE"] = published("phi-3.5-moe") | {"architectures": ["PhimoeForCausalLM"]}
RELATIVES = [  # of others among them
    "LLAMA2_7B", "LLAMA32_1B", "MISTRAL_7B_V01", "QWEN25_7B", "QWEN25_15B_TRANSFORMERS5", "QWEN3_30B", "GEMMA4_E2B",
]  # fmt: skip
HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 2**31, 2**63, 2**64, 10**30, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf"),
    "", "x", "1", "\ud800", "a" * 1000, [], [[]], [None], [1, "x"], [{}], ["x"] * 1000, {}, {"x": 1},
    {"rope_type": 3}, {"rope_type": "yarn", "factor": 1e-3, "beta_fast": 0, "beta_slow": 1e6}, {"full_attention": 1},
    {"rope_type": "yarn", "factor": 2, "rope_theta": 1}, {"sliding_attention": {"rope_type": "yarn"}},
    {"rope_type": "llama3", "factor": "x"}, {"type": []}, {"factor": 0}, {"quant_method": ["x"]}, {"rope_theta": -1},
    {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 2,
     "original_max_position_embeddings": 1}, {"rope_type": "linear", "factor": 10**400},
)  # fmt: skip
MORE_KEYS = ("architectures", "layer_types", "rope_scaling", "rope_parameters", "quantization_config", "dtype",
             "head_dim", "sliding_window", "use_sliding_window", "num_key_value_heads", "eos_token_id")  # fmt: skip


HYBRIDS = {"qwen35": "Qwen3_5", "qwen35moe": "Qwen3_5Moe", "qwen3next": "Qwen3Next", "lfm2": "Lfm2",
           "lfm2moe": "Lfm2Moe", "granitehybrid": "GraniteMoeHybrid", "nemotron_h": "NemotronH",
           "nemotron_h_moe": "NemotronH", "falcon-h1": "FalconH1", "kimi-linear": "KimiLinear", "qwen4exp": "Qwen4Exp",
           "bailingmoe3": "BailingHybrid", "jamba": "Jamba"}  # fmt: skip

LATENT = {"deepseek2": "deepseek-v3", "deepseek32": "deepseek-v3.2", "glm-dsa": "glm-5"}


def mutants(config: dict[str, Any], seed: int) -> Iterator[dict[str, Any]]:
    """Every hostile value of every key, each key left out, and a few of several keys at once; of a model that is one
    part of a config, of that part, too."""
    inner = config.get("text_config")
    if inner is not None:
        yield from ({**config, "text_config": one} for one in mutants(inner, seed))
    keys = [*dict.fromkeys((*config, *MORE_KEYS))]
    for key in keys:
        yield {name: value for name, value in config.items() if name != key}
        for value in HOSTILE:
            yield {**config, key: value}
    generator = random.Random(seed)
    for _ in range(200):
        yield {**config, **{key: generator.choice(HOSTILE) for key in generator.sample(keys, 3)}}


def refused(work: Callable[[], object]) -> str:
    """The error's sentence, "" where there is none; any other error fails the test."""
    try:
        work()
    except (CheckpointError, ConfigError) as error:
        message = str(error)
        assert message and len(message) < 700 and "\n" not in message
        message.encode()  # it can be printed
        return message
    return ""


def test_every_family_is_here() -> None:
    assert {from_hf(config).architecture for config in PUBLISHED.values()} == set(FAMILIES)


@pytest.mark.slow
@pytest.mark.further(name=RELATIVES)
@pytest.mark.further(part=1)
@pytest.mark.parametrize("part", [48, 1])
@pytest.mark.parametrize("name", PUBLISHED)
def test_configs(name: str, part: int) -> None:
    """Each mutant, or one of 48: others of each model."""
    began, count = time.process_time(), 0
    for config in islice(mutants(PUBLISHED[name], 0), [*PUBLISHED].index(name) % part, None, part):
        message = refused(lambda config=config: from_hf(config))  # type: ignore[misc]
        count += message != ""
        said = ("expected", "is not supported", "must be", "unknown architecture", "is not served")
        assert not message or any(one in message for one in said), message
    assert count > 200 / part and time.process_time() - began < 60


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm_eps": "x"}, "config of Qwen2ForCausalLM: rms_norm_eps: expected a number from 0 to 1, found 'x'"),
        ({"hidden_size": 10**9}, "hidden_size: expected an integer from 1 to 1048576, found 1000000000"),
        ({"hidden_size": 10**6}, "expected a model that fits into 1.0 GB of memory, found one of"),
        ({"vocab_size": 10**7}, "a vocabulary of 10000000"),
        ({"max_position_embeddings": 10**15}, "max_position_embeddings: expected an integer"),
        ({"num_hidden_layers": 10**8}, "num_hidden_layers: expected an integer from 1 to 1000, found 100000000"),
        ({"num_hidden_layers": 1000, "hidden_size": 2048}, "1000 layers of hidden_size 2048"),
    ],
)
def test_sizes_are_refused_before_memory_is_taken(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = write_checkpoint(tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    began = time.process_time()
    for dummy in (False, True):
        found = refused(lambda dummy=dummy: load_model(folder, torch.float32, "cpu", None, dummy, most_bytes=10**9))  # type: ignore[misc]
        assert message in found
    assert time.process_time() - began < 20


def test_an_engine_bounds_its_model_by_the_memory_of_the_machine(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 2**19, "intermediate_size": 2**19}))
    options = Options(model=str(folder), load_format="dummy", device="cpu", speculative_algorithm="none").resolve()
    assert "expected a model that fits into" in refused(lambda: build(options, folder))


@pytest.mark.slow
@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: repr(value)[:20])
def test_whole_files(tmp_path: Path, value: Any) -> None:
    """An index, a generation config, and files that are not an object at all."""
    folder = write_checkpoint(tmp_path / "tiny")
    text = json.dumps(value)
    tiny = load_config(folder)
    for content in (text, f'{{"eos_token_id": {text}, "temperature": {text}, "top_k": {text}, "do_sample": {text}}}'):
        (folder / "generation_config.json").write_text(content)
        refused(lambda: (stop_ids(folder, tiny), sampling_defaults(folder)))
    (folder / "model.safetensors").unlink()
    for content in (text, f'{{"weight_map": {text}}}', f'{{"weight_map": {{"model.norm.weight": {text}}}}}'):
        (folder / "model.safetensors.index.json").write_text(content)
        assert refused(lambda: list(folder_tensors(folder))), content
    (folder / "config.json").write_text(f'{{"transformers_weights": {text}}}')
    assert refused(lambda: list(folder_tensors(folder)))
    (folder / "config.json").write_text(text)
    assert refused(lambda: load_config(folder))
    (folder / "config.json").write_text(f'{{"draftwing": {text}}}')
    refused(lambda: carried_shape(folder, "cpu"))


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}", b'{"a": 1', b"NaN", b"null"]
)
def test_files_that_are_no_json(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    assert str(file) in refused(lambda: read_json(file))
    (tmp_path / "folder" / "config.json").mkdir(parents=True)
    assert "cannot be read" in refused(lambda: load_config(tmp_path / "folder"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_configs_of_draft_heads(kind: str, drafts: SimpleNamespace) -> None:
    weights = drafts.eagle_weights() if kind == "eagle" else drafts.eagle3_weights()
    whole = {**drafts.CONFIG, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, "draft_vocab_size": 20,
             "speculators_model_type": "eagle3", "transformer_layer_config": {"hidden_size": 32},
             "eagle_aux_hidden_state_layer_ids": [1, 2, 3], "num_aux_hidden_states": 3, "target_hidden_size": 32,
             "norm_before_fc": False}  # fmt: skip

    def read(raw: dict[str, Any]) -> None:
        flat = flatten_config(raw)
        draft_config(flat, weights)
        resolve_aux_layers(flat, 3, 8, "auto")

    assert not refused(lambda: read(whole))
    assert sum(bool(refused(lambda raw=raw: read(raw))) for raw in mutants(whole, 1)) > 100  # type: ignore[misc]


@pytest.mark.slow
@pytest.mark.further(part=1)
@pytest.mark.parametrize("part", [45, 1])
@pytest.mark.parametrize("arch", in_gguf())
def test_metadata_of_gguf_files(tmp_path: Path, arch: str, part: int) -> None:
    """Each value of each key, or one of 45: others of each architecture."""

    def more(writer: gguf_package.GGUFWriter) -> None:
        writer.add_layer_norm_eps(1e-5)  # which most read under another name
        writer.add_float32(f"{arch}.rope.scale_linear", 2.0)
        writer.add_string(f"{arch}.rope.scaling.type", "linear")

    kind = next((kind for kind in KINDS if KINDS[kind][0] == HYBRIDS.get(arch)), None)
    kind = "nemotron-h-moe" if arch == "nemotron_h_moe" else kind
    if arch == "gemma4":
        model = gemma4_models.reference("per-layer")
        file = open_gguf(gemma4_models.write_gguf(tmp_path / "m.gguf", model, suppressed=[3], edit=more))
    elif arch == "gemma3n":
        file = open_gguf(test_gemma3n.write_gguf(tmp_path / "m.gguf", test_gemma3n.reference()))
    elif arch in LATENT:
        latent = moe_models.reference(LATENT[arch])
        file = open_gguf(moe_models.write_gguf(tmp_path / "m.gguf", latent.config, latent.state_dict()))
    elif arch == "bert":
        file = open_gguf(tiny_encoder.write_gguf(tiny_encoder.write_encoder(tmp_path / "model")))
    elif arch in ("mamba", "mamba2"):
        model = written(tmp_path, "mamba-codestral-7b" if arch == "mamba2" else "falcon-mamba-7b")
        test_mamba.write(tmp_path / "m.gguf", model.config, model.state_dict())
        file = open_gguf(tmp_path / "m.gguf")
    elif arch in ("minicpm3", "afmoe", "laguna", "cohere2moe", "mellum", "mistral4", "granite_swa"):
        name = arch.replace("2moe", "2-moe").replace("_", "-")
        latent = random_reference(name, **UNSAID.get(name, {}))
        write_family(tmp_path / "m.gguf", latent.config, latent.state_dict(), arch, arch == "granite_swa")
        file = open_gguf(tmp_path / "m.gguf")
    elif kind is None:
        file = open_gguf(tiny_gguf.write(tmp_path / "m.gguf", arch, edit=more))
    else:
        model = reference(kind, **({"ple_layer_ids": [1]} if arch == "qwen4exp" else {}))
        file = open_gguf(hybrid_gguf.write(tmp_path / "m.gguf", model.config, model.state_dict(), edit=more))
    model_config(file)
    keys = [f"{arch}.{key}" for key in (*METADATA, "attention.sliding_window", "rope.dimension_count")]
    keys += [key for key in file.metadata if not key.startswith("GGUF")]
    count = 0
    values = product(keys, (*HOSTILE, torch.arange(3).numpy()))
    for key, value in islice(values, [*in_gguf()].index(arch) % part, None, part):
        hostile = GGUFFile(file.path, {**file.metadata, key: value}, file.tensors, file.data)
        count += bool(refused(lambda hostile=hostile: model_config(hostile)))  # type: ignore[misc]
    assert count > 100 / part


def test_shards_with_any_name(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    for name in ("", ".", "..", "../a.safetensors", "/etc/passwd", "a" * 300, "\x00", "\ud800", "a.safetensors/"):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        if name != "a.safetensors/":
            assert "names shards" in refused(lambda: list(folder_tensors(tmp_path))), name


def test_more_experts_in_all_than_any_model_has() -> None:
    config = hf_configs.QWEN3_30B | {"num_experts": 4096, "num_hidden_layers": 100, "num_experts_per_tok": 2}
    assert "from 1 to 655" in refused(lambda: from_hf(config))
