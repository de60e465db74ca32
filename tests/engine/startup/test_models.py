"""What is refused before any weight is read: the files of weights here are not such."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from block_ops import BlockGemmOps, BlockTorchOps
from group_ops import GroupTorchOps
from reference.block_heads import dflash_head
from reference.checkpoints import Checkpoint, eagle2_head, eagle3_head, llama_target, small_llama_draft
from safetensors.torch import save_file
from tiny_checkpoint import VOCAB, write_checkpoint, write_tokenizer

from draftwing import LLM
from draftwing.config.options import Options
from draftwing.engine.build import spread
from draftwing.engine.devices.cpu import CpuDevice
from draftwing.engine.engine import Engine
from draftwing.engine.startup.models import check_target, pick_dtype, pick_precision
from draftwing.errors import CheckpointError, ConfigError, DraftwingError
from draftwing.layers.linear_ops.blocks import BlockFormat
from draftwing.layers.linear_ops.dense import DENSE
from draftwing.layers.linear_ops.groups import GroupFormat
from draftwing.models.config import from_hf
from draftwing.models.loader import load_config
from draftwing.ops.runtime import Runtime
from draftwing.ops.table import TorchOps

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_threads": 1, "max_total_tokens": 512}
UNREADABLE = b"these are no weights"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A llama whose weights cannot be read."""
    path = OF.write(tmp_path / "target")
    write_tokenizer(path)
    (path / "model.safetensors").write_bytes(UNREADABLE)
    return path


@pytest.fixture
def products_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that has them."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)


OF = llama_target(0, vocab_size=VOCAB, num_hidden_layers=6)


def eagle3(**changes: Any) -> Checkpoint:
    return eagle3_head(OF, vocab_size=VOCAB, **changes)


def refusal(model: Path, **options: Any) -> DraftwingError:
    with pytest.raises((CheckpointError, ConfigError)) as error:
        Engine(Options(model=str(model), **OPTIONS | options))
    assert "cannot be read" not in str(error.value)
    return error.value


def head(folder: Path, made: Checkpoint, weights: bool = True) -> dict[str, Any]:
    made.write(folder)
    write_tokenizer(folder)
    (folder / "model.safetensors").unlink()
    if weights:
        (folder / "model.safetensors").write_bytes(UNREADABLE)
    return {"speculative_draft_model_path": str(folder)}


TREE = {"speculative_num_steps": 2, "speculative_eagle_topk": 8, "speculative_num_draft_tokens": 12}


@pytest.mark.parametrize("drafter", ["none", "NGRAM", "STANDALONE"])
def test_a_context_that_is_too_long(target: Path, drafter: str) -> None:
    positions = json.loads((target / "config.json").read_text())["max_position_embeddings"]
    error = refusal(
        target, context_length=positions + 1, speculative_algorithm=drafter,
        speculative_draft_model_path="/nowhere" if drafter == "STANDALONE" else None,
    )  # fmt: skip
    assert isinstance(error, ConfigError) and f"--context-length {positions + 1} exceeds the {positions}" in str(error)


def test_weights_that_are_not_there(target: Path) -> None:
    (target / "model.safetensors").unlink()
    assert "no weights in" in str(refusal(target))
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "a.safetensors"}}))
    assert "a.safetensors" in str(refusal(target))


@pytest.mark.parametrize("algorithm", ["STANDALONE", "EAGLE", "EAGLE3", "EAGLE3+NGRAM", "DFLASH"])
def test_a_draft_without_weights(tmp_path: Path, target: Path, algorithm: str) -> None:
    made = {
        "STANDALONE": small_llama_draft(vocab_size=VOCAB),
        "EAGLE": eagle2_head(OF, vocab_size=VOCAB),
        "DFLASH": dflash_head(OF),
    }.get(algorithm, eagle3())
    draft = tmp_path / "draft"
    error = refusal(target, speculative_algorithm=algorithm, **head(draft, made, weights=False))
    assert isinstance(error, CheckpointError) and f"no weights in {draft}" in str(error)
    (draft / "config.json").unlink()
    assert "no config.json" in str(refusal(target, speculative_algorithm=algorithm, **head_of(draft)))


def head_of(folder: Path) -> dict[str, Any]:
    return {"speculative_draft_model_path": str(folder)}


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
def test_a_head_of_another_vocabulary(tmp_path: Path, target: Path, algorithm: str) -> None:
    other = llama_target(0, vocab_size=VOCAB + 6)
    made = (eagle2_head if algorithm == "EAGLE" else eagle3_head)(other, vocab_size=VOCAB + 6)
    error = refusal(target, speculative_algorithm=algorithm, **head(tmp_path / "draft", made))
    assert f"vocab_size: expected {VOCAB}, found {VOCAB + 6}" in str(error)


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "DFLASH"])
def test_a_head_of_a_target_of_another_size(tmp_path: Path, target: Path, algorithm: str) -> None:
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"hidden_size": 96}))
    made = {"EAGLE": eagle2_head(OF, vocab_size=VOCAB), "EAGLE3": eagle3(), "DFLASH": dflash_head(OF)}[algorithm]
    error = refusal(target, speculative_algorithm=algorithm, **head(tmp_path / "draft", made))
    assert f"expected 96, found {config['hidden_size']}" in str(error)


def test_a_draft_of_an_architecture_that_is_not_served(tmp_path: Path, target: Path) -> None:
    """Said before its tokenizer is looked for."""
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps({"architectures": ["DeepseekV4ForCausalLM"]}))
    error = refusal(target, speculative_algorithm="STANDALONE", **head_of(draft))
    assert "sparse attention over compressed keys" in str(error)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"architectures": ["DeepseekV4ForCausalLM"]}, "sparse attention over compressed keys"),
        ({"architectures": ["OPTForCausalLM"], "model_type": "opt"}, "learned positions"),
        ({"architectures": ["SomethingForCausalLM"]}, "unknown architecture SomethingForCausalLM"),
        *(
            ({"architectures": [name]}, f"{name} is the architecture of a draft head: expected a model, with the head")
            for name in ("LlamaForCausalLMEagle3", "DFlash2DraftModel", "Qwen3DSparkModel")
        ),
        ({"architectures": ["LlamaForCausalLM"], "hidden_size": 0}, "max_position_embeddings"),
    ],
)
@pytest.mark.parametrize("weights", [True, False])
def test_the_architecture_is_said_before_a_tokenizer_is_missed(
    tmp_path: Path, config: dict[str, Any], said: str, weights: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if weights:
        save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    assert said in str(refusal(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")  # which cannot be read
    assert said in str(refusal(tmp_path))


def test_a_missing_tokenizer_is_still_said(target: Path) -> None:
    (target / "tokenizer.json").unlink()
    assert "has no tokenizer" in str(refusal(target))


# -- fewer tokens than branches ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4, 7])
@pytest.mark.parametrize("algorithm", ["EAGLE", "NEXTN", "EAGLE+NGRAM"])
def test_a_token_map_with_fewer_tokens_than_branches(tmp_path: Path, target: Path, size: int, algorithm: str) -> None:
    tokens = tmp_path / "map.json"
    tokens.write_text(json.dumps([*range(10, 10 + size), 10]))  # 10 twice
    draft = (
        {}
        if algorithm == "NEXTN"
        else head(tmp_path / "draft", eagle2_head(llama_target(0, vocab_size=VOCAB), vocab_size=VOCAB))
    )
    error = refusal(target, speculative_algorithm=algorithm, speculative_token_map=str(tokens), **draft, **TREE)
    assert isinstance(error, ConfigError)
    assert f"--speculative-eagle-topk: expected at most {size}," in str(error) and "found 8" in str(error)


def test_a_draft_vocabulary_with_fewer_tokens_than_branches(tmp_path: Path, target: Path) -> None:
    draft = head(tmp_path / "draft", eagle3(rows=5))
    error = refusal(target, speculative_algorithm="EAGLE3", **draft, **TREE)
    assert isinstance(error, ConfigError)
    assert "--speculative-eagle-topk: expected at most 5," in str(error) and "found 8" in str(error)


def test_a_draft_vocabulary_that_its_config_does_not_tell(tmp_path: Path) -> None:
    target = OF.write(tmp_path / "target")
    write_tokenizer(target)
    made = eagle3(rows=5)
    del made.config["draft_vocab_size"]
    made.write(tmp_path / "draft")
    error = refusal(target, speculative_algorithm="EAGLE3", **head_of(tmp_path / "draft"), **TREE)
    assert isinstance(error, ConfigError) and "expected at most 5," in str(error)


@pytest.mark.slow
def test_as_many_tokens_as_branches_draft(tmp_path: Path) -> None:
    target = OF.write(tmp_path / "target")
    write_tokenizer(target)
    eagle3(rows=8).write(tmp_path / "draft")
    draft = {"speculative_algorithm": "EAGLE3", **head_of(tmp_path / "draft"), **TREE, "speculative_fixed_shape": True}
    params = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    texts = []
    for options in (draft, {"speculative_algorithm": "none"}):
        with LLM(str(target), **OPTIONS, **options) as llm:
            texts.append(llm.generate([[1, 2, 3]], params)[0].token_ids)
    assert texts[0] == texts[1] and len(texts[0]) == 12


@pytest.mark.parametrize(
    ("asked", "stored", "warned"),
    [("q4_0", "fp8", True), ("fp8", "fp8", False), ("auto", "fp8", False), ("none", "fp8", False), ("q8_0", "", False)],
)
def test_a_checkpoint_that_is_quantised_already(
    target: Path, asked: str, stored: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = json.loads((target / "config.json").read_text())
    if stored:
        config["quantization_config"] = {"quant_method": stored, "weight_block_size": [128, 128]}
    options = Options(model=str(target), quantization=asked)
    check_target(options, target, from_hf(config))
    assert [record.args for record in caplog.records] == ([(asked, stored)] if warned else [])


def test_a_gguf_file_that_is_quantised_already(smollm2_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_target(Options(quantization="q4_1"), smollm2_path, load_config(smollm2_path))
    assert not caplog.records
    check_target(Options(quantization="q4_0"), smollm2_path, load_config(smollm2_path))
    assert "(q4_1" in caplog.text


def test_more_ranks_than_cores(target: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    config = load_config(target)
    for threads in (2, 1):
        monkeypatch.setattr(CpuDevice, "threads", threads)
        spread(Options(model=str(target), tp_size=2).resolve(), config, CpuDevice())
        assert len(caplog.records) == (threads == 1)
    assert "--tp-size 2" in caplog.text
    with pytest.raises(ConfigError, match="--enable-expert-parallel: expected a model with experts"):
        spread(Options(model=str(target), tp_size=2, enable_expert_parallel=True).resolve(), config, CpuDevice())


CPU = torch.device("cpu")


BLOCKS, PLAIN = CpuDevice(ops=BlockTorchOps(CPU, BlockGemmOps.block_kinds | {"Q4_K"})), CpuDevice(ops=TorchOps(CPU))
GROUPS = CpuDevice(ops=GroupTorchOps(CPU))


class GpuRuntime(Runtime):
    reads_half_pool_in_fp32 = False
    reads_fp8_pool = True

    def exact_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype


class Int8PoolRuntime(Runtime):
    reads_int8_pool = True


def GpuOps(device: torch.device) -> TorchOps:
    return TorchOps(device, runtime=GpuRuntime(device))


def Int8PoolOps(device: torch.device) -> TorchOps:
    return TorchOps(device, runtime=Int8PoolRuntime(device))


@pytest.mark.parametrize("quantization", ["auto", "q8_0", "q4_0", "q4_k"])
def test_blocks_on_a_cpu(quantization: str) -> None:
    found = pick_precision(Options(quantization=quantization), BLOCKS, torch.bfloat16)
    assert (found.dtype, found.kv_dtype) == (torch.float32, torch.bfloat16)
    assert found.weights == BlockFormat("Q8_0" if quantization == "auto" else quantization.upper())
    assert found.head_weights == BlockFormat("Q8_0")
    assert isinstance(found.weights, BlockFormat) and found.weights.ops is BLOCKS.ops


@pytest.mark.parametrize(
    ("options", "device"),
    [({"dtype": "float32"}, BLOCKS), ({"dtype": "bfloat16"}, BLOCKS), ({"quantization": "none"}, BLOCKS), ({}, PLAIN)],
)
def test_dense_weights(options: dict[str, Any], device: CpuDevice, products_in_bfloat16: None) -> None:
    found = pick_precision(Options(**options), device, None)
    assert found.weights == found.head_weights == DENSE
    assert found.dtype == found.kv_dtype == pick_dtype(options.get("dtype", "auto"), device, None)


def test_weights_that_stay_quantised() -> None:
    half = {"dtype": "bfloat16"}
    for options, scheme in (({}, None), ({"quantization": "fp8"}, "fp8"), ({"quantization": "w4a16"}, "w4a16")):
        found = pick_precision(Options(**options, **half), GROUPS, None)
        assert found.weights == GroupFormat(scheme)
        assert found.head_weights == (DENSE if scheme is None else GroupFormat("int8"))
        assert isinstance(found.weights, GroupFormat) and found.weights.ops is GROUPS.ops
        assert found.dtype == found.kv_dtype == torch.bfloat16
    assert pick_precision(Options(**half), GROUPS, None, quantised=True).head_weights == GroupFormat("int8")
    assert pick_precision(Options(dtype="float16"), GROUPS, None, quantised=True).head_weights == DENSE
    for quantised in (False, True):
        found = pick_precision(Options(quantization="none", **half), GROUPS, None, quantised)
        assert found.weights == found.head_weights == DENSE
    for kind, dtype, expected in (("fp8", "float16", "bfloat16"), ("w4a16", "float32", "bfloat16 or float16")):
        with pytest.raises(ConfigError, match=rf"--quantization {kind} with --dtype {dtype}: expected {expected}$"):
            pick_precision(Options(quantization=kind, dtype=dtype), GROUPS, None)
    with pytest.raises(ConfigError, match=r"--quantization q4_0: .*Use fp8, w4a16, none or auto"):
        pick_precision(Options(quantization="q4_0"), GROUPS, None)


@pytest.mark.parametrize(("name", "kind"), [("fp8", "Q8_0"), ("w4a16", "Q4_0")])
def test_what_a_gpu_has_is_blocks_on_a_cpu(name: str, kind: str) -> None:
    assert pick_precision(Options(quantization=name), BLOCKS, None).weights == BlockFormat(kind)
    with pytest.raises(ConfigError, match=rf"--quantization {name}: .*Use none or auto"):
        pick_precision(Options(quantization=name), PLAIN, None)


def test_the_types_of_the_pool(products_in_bfloat16: None) -> None:
    def kv(device: CpuDevice, **options: Any) -> torch.dtype:
        return pick_precision(Options(**options), device, None).kv_dtype

    assert kv(BLOCKS, kv_cache_dtype="float32") == torch.float32
    assert kv(PLAIN, dtype="float32", kv_cache_dtype="bfloat16") == torch.bfloat16
    assert kv(PLAIN, dtype="bfloat16", kv_cache_dtype="bfloat16") == torch.bfloat16
    assert kv(CpuDevice(ops=GpuOps(CPU)), dtype="bfloat16", kv_cache_dtype="fp8_e4m3") == torch.float8_e4m3fn
    for device, dtype in ((PLAIN, "bfloat16"), (BLOCKS, "auto"), (CpuDevice(ops=GpuOps(CPU)), "float32")):
        with pytest.raises(ConfigError, match=r"fp8_e4m3: expected a model in bfloat16 or float16 on CUDA \(compute"):
            kv(device, dtype=dtype, kv_cache_dtype="fp8_e4m3")
    for kv_dtype in ("float32", "bfloat16"):
        assert kv(CpuDevice(ops=Int8PoolOps(CPU)), dtype=kv_dtype, kv_cache_dtype="int8") == torch.int8
    for device in (PLAIN, CpuDevice(ops=GpuOps(CPU))):
        with pytest.raises(ConfigError, match=r"int8: expected a CPU .*our C extension, .*the operations of t"):
            kv(device, kv_cache_dtype="int8")
    with pytest.raises(ConfigError, match="--kv-cache-dtype float32 with a model in bfloat16: expected auto or bf"):
        kv(PLAIN, dtype="bfloat16", kv_cache_dtype="float32")
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype bfloat16 with a model in float16: expected auto$"):
        kv(CpuDevice(ops=GpuOps(CPU)), dtype="float16", kv_cache_dtype="bfloat16")
    with pytest.raises(ConfigError, match="--kv-cache-dtype bfloat16 with a model in float32: expected auto or fl"):
        kv(CpuDevice(ops=GpuOps(CPU)), dtype="float32", kv_cache_dtype="bfloat16")


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_a_type_that_is_not_exact_on_this_cpu_is_computed_in_float32(
    half: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """float16 on any, bfloat16 where oneDNN has no products in it."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    with caplog.at_level("INFO"):
        for options in ({"dtype": half}, {"dtype": half, "quantization": "none"}):
            found = pick_precision(Options(**options), PLAIN, torch.float16)
            assert (found.dtype, found.kv_dtype, found.weights) == (torch.float32, torch.float32, DENSE)
    assert f"--dtype {half}: computed in float32" in caplog.text
    gpu = CpuDevice(ops=GpuOps(CPU))
    assert pick_precision(Options(dtype=half), gpu, None).dtype == getattr(torch, half)


ENGINE = {
    "device": "cpu", "num_threads": 1, "max_total_tokens": 4096, "max_running_requests": 8, "quantization": "none",
    "context_length": 512,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param("float16", marks=pytest.mark.exhaustive), "bfloat16"])
def test_texts_and_log_probabilities_do_not_depend_on_the_batch(tmp_path: Path, dtype: str) -> None:
    """Of a model whose sums are long enough for their order to matter: drafts, other requests, parts of prompts."""
    folder = write_checkpoint(tmp_path / "tiny", hidden=512, heads=8, size=64)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (5, 37, 64, 130)]
    prompts += [(prompts[0] * 20)[:90], (prompts[1] * 4)[:111]]  # whose continuations repeat them
    wishes = {"return_logprob": True, "logprob_start_len": 0}
    params = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    found = []
    for more in (
        {"speculative_algorithm": "none", "max_running_requests": 1},
        {"speculative_algorithm": "none", "chunked_prefill_size": 48},
        {"speculative_algorithm": "NGRAM", "speculative_fixed_shape": True, "chunked_prefill_size": 64},
    ):
        with LLM(str(folder), **{**ENGINE, "dtype": dtype, "disable_radix_cache": True, **more}) as llm:
            answers = llm.generate(prompts, params, **wishes)
            metas = [(a.token_ids, a.meta_info) for a in answers]
            found.append([(ids, m["input_token_logprobs"], m["output_token_logprobs"]) for ids, m in metas])
            if more["speculative_algorithm"] == "NGRAM":
                assert sum(a.meta_info["spec_num_correct_drafts"] for a in answers) > 8
    assert len({token for tokens, _, _ in found[0] for token in tokens}) > 5
    assert found[0] == found[1] == found[2]


def test_what_cannot_be_is_refused() -> None:
    for device, kind in ((PLAIN, "q8_0"), (CpuDevice(ops=BlockTorchOps(CPU)), "q4_k")):
        with pytest.raises(ConfigError, match=rf"--quantization {kind}: .*--device cpu.* Use none or auto"):
            pick_precision(Options(quantization=kind), device, None)
    with pytest.raises(ConfigError, match="computes in float32 between products: leave out --dtype bfloat16"):
        pick_precision(Options(quantization="q8_0", dtype="bfloat16"), BLOCKS, None)
    assert pick_precision(Options(quantization="q8_0", dtype="float32"), BLOCKS, None).weights == BlockFormat("Q8_0")
