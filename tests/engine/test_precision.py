"""In which types an engine computes, by options and device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from block_ops import BlockTorchOps
from group_ops import GroupTorchOps
from tiny_checkpoint import write_checkpoint

from draftwing import LLM
from draftwing.config.options import Options
from draftwing.engine.devices.cpu import CpuDevice
from draftwing.engine.precision import pick_dtype, pick_precision
from draftwing.errors import ConfigError
from draftwing.layers.linear_ops.blocks import BlockFormat
from draftwing.layers.linear_ops.formats import DENSE
from draftwing.layers.linear_ops.groups import GroupFormat
from draftwing.ops.torch.ops import TorchOps

CPU = torch.device("cpu")


class AllKinds(BlockTorchOps):
    block_kinds = BlockTorchOps.block_kinds | {"Q4_K"}


BLOCKS, PLAIN = CpuDevice(ops=AllKinds(CPU)), CpuDevice(ops=TorchOps(CPU))
GROUPS = CpuDevice(ops=GroupTorchOps(CPU))


class GpuOps(TorchOps):
    reads_half_pool_in_fp32 = False
    reads_fp8_pool = True

    def exact_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype


class Int8PoolOps(TorchOps):
    reads_int8_pool = True


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
def test_dense_weights(options: dict[str, Any], device: CpuDevice) -> None:
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


def test_the_types_of_the_pool() -> None:
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
    prompts = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (5, 37, 64, 100, 130, 201)]
    prompts += [(prompts[0] * 20)[:90], (prompts[1] * 4)[:111]]  # whose continuations repeat them
    wishes = {"return_logprob": True, "logprob_start_len": 0}
    params = {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}
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
                assert sum(a.meta_info["spec_num_correct_drafts"] for a in answers) > 20
    assert len({token for tokens, _, _ in found[0] for token in tokens}) > 8
    assert found[0] == found[1] == found[2]


def test_what_cannot_be_is_refused() -> None:
    for device, kind in ((PLAIN, "q8_0"), (CpuDevice(ops=BlockTorchOps(CPU)), "q4_k")):
        with pytest.raises(ConfigError, match=rf"--quantization {kind}: .*--device cpu.* Use none or auto"):
            pick_precision(Options(quantization=kind), device, None)
    with pytest.raises(ConfigError, match="computes in float32 between products: leave out --dtype bfloat16"):
        pick_precision(Options(quantization="q8_0", dtype="bfloat16"), BLOCKS, None)
    assert pick_precision(Options(quantization="q8_0", dtype="float32"), BLOCKS, None).weights == BlockFormat("Q8_0")
