"""Quantised checkpoints as engines run them: the text and the logits of the same weights, with drafts and without."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import tiny_quantised as tiny
import torch
from plain_attention import FunctionAttend
from reference import exact_heads
from reference.checkpoints import Checkpoint, llama_target, mimo, qwen2_target
from reference.learnable import ENGINE, prompts, write_target
from safetensors.torch import load_file, save_file
from tiny_gguf import causal
from torch import Tensor

from draftwing import LLM, SamplingParams
from draftwing.layers.linear import Linear
from draftwing.layers.linear_ops.blocks import BlockFormat, block_sizes
from draftwing.models.decoder import DecoderModel
from draftwing.models.heads.loader import load_mtp_head
from draftwing.models.loader import load_model
from draftwing.ops import make_ops

pytestmark = pytest.mark.slow

OPS = make_ops(torch.device("cpu"))
needs_blocks = pytest.mark.skipif(not OPS.block_kinds, reason="needs GEMMs of weights in blocks")
# What is of another kind in the blocks that a CPU multiplies; `test_from_quantized.py` has all.
AGAIN = ("fp8 block", "compressed fp8 channel", "modelopt nvfp4", "gptq order")  # which are quantised again
SOME = (*AGAIN, "compressed int4", "compressed int4 zeros", "awq", "gptq")


def pair(folder: Path, name: str, target: Checkpoint | None = None) -> tuple[Path, Path]:
    """A quantised checkpoint, and one with the same weights in float32."""
    config, write = tiny.FORMATS[name]
    made = [
        write_target(folder / part) if target is None else target.write(folder / part) for part in ("quantised", "wide")
    ]
    exact = tiny.quantise(made[0], config, lambda _: write)
    save_file(exact, made[1] / "model.safetensors")
    return made[0], made[1]


@torch.inference_mode()
def logits(model: DecoderModel) -> Tensor:
    ids = torch.tensor([3, 1, 7, 7, 30, 2, 39, 0, 12])
    return model.logits(model(ids, torch.arange(9), FunctionAttend(causal))[0])


def texts(folder: Path, algorithm: str, **options: object) -> list[list[int]]:
    params = [
        SamplingParams(temperature=0.0 if i % 2 else 0.8, sampling_seed=i, max_new_tokens=24, ignore_eos=True)
        for i in range(4)
    ]
    with LLM(str(folder), **{**ENGINE, **options}, speculative_algorithm=algorithm) as llm:
        return [done.token_ids for done in llm.generate(prompts(4, seed=1), params)]


@pytest.mark.further(name=[name for name in SOME if name != "gptq order"])
@pytest.mark.parametrize("name", SOME)
def test_the_text_of_the_same_weights(tmp_path: Path, name: str) -> None:
    quantised, wide = pair(tmp_path, name)
    found = texts(wide, "none"), texts(quantised, "none"), texts(quantised, "NGRAM")
    assert found[0] == found[1] == found[2]
    assert all(len(set(ids)) > 4 for ids in found[0])  # texts that could differ


@pytest.mark.further(name=[name for name in SOME if name != "compressed int4"])
@needs_blocks
@pytest.mark.parametrize("name", SOME)
def test_drafts_change_no_token_in_blocks(tmp_path: Path, name: str) -> None:
    quantised, _ = pair(tmp_path, name)
    plain = texts(quantised, "none", dtype="auto")
    assert texts(quantised, "NGRAM", dtype="auto") == plain
    tree = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
    fixed = {"speculative_fixed_shape": True, **tree}
    assert texts(quantised, "STANDALONE", dtype="auto", speculative_draft_model_path=str(quantised), **fixed) == plain
    assert all(len(set(ids)) > 4 for ids in plain)


@pytest.mark.further(arch=["qwen2", "mimo"], name=[name for name in SOME if name != "awq"])
@pytest.mark.further(arch="llama", name=["compressed fp8 channel", "compressed int4", "awq", "gptq"])
@needs_blocks
@pytest.mark.parametrize("arch", ["llama", "qwen2", "mimo"])
@pytest.mark.parametrize("name", SOME)
def test_in_blocks_it_is_near_the_same_weights(
    tmp_path: Path, arch: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
    make = {"llama": llama_target, "qwen2": qwen2_target, "mimo": mimo}[arch]
    quantised, wide = pair(tmp_path, name, make(3, **sizes, **({"head_dim": 32} if arch == "mimo" else {})))
    with caplog.at_level(logging.INFO):
        model = load_model(quantised, torch.float32, "cpu", weight_format=BlockFormat("Q8_0", OPS))
    said = [record.getMessage() for record in caplog.records if "tensors in" in record.getMessage()]
    assert len(said) == 1 and ("kept, as Q" in said[0]) == (name not in AGAIN)
    exact = load_model(wide, torch.float32, "cpu")
    for (part, mine), (_, theirs) in zip(model.named_modules(), exact.named_modules(), strict=True):
        if isinstance(mine, Linear) and isinstance(theirs, Linear) and part.startswith("layers."):
            off = mine.dense_weight() - theirs.dense_weight()
            assert off.std() < 0.006 * theirs.dense_weight().std(), part
    assert block_sizes(model)
    expected = logits(exact)
    model.pack(OPS)
    off = logits(model) - expected  # activations are rounded to 8 bits
    assert float(off.std() / expected.std()) < 0.05


@needs_blocks
def test_bytes_of_a_step(tmp_path: Path) -> None:
    """Of all matrices but the embedding, of which single rows are read."""
    quantised, wide = pair(tmp_path, "compressed int4")
    head, layers = 258 * 32, 6 * (32 * 32 * 2 + 2 * 16 * 32 + 2 * 48 * 32)
    down = 6 * 32 * 48  # whose rows are no whole blocks
    blocks = load_model(quantised, torch.float32, "cpu", weight_format=BlockFormat("Q8_0", OPS))
    for model in (blocks, dense := load_model(wide, torch.bfloat16, "cpu")):
        model.pack(OPS)
    assert blocks.weight_bytes() == {"Q8_0": head // 32 * 34, "Q4_0": layers // 32 * 18, "float32": down * 4}
    assert dense.weight_bytes() == {"bfloat16": (head + layers + down) * 2}


def test_a_module_that_is_left_as_it_is_and_two_formats_in_one(tmp_path: Path) -> None:
    config = tiny.compressed(tiny.INT4, "mixed-precision")
    config["config_groups"]["group_0"]["format"] = "pack-quantized"
    config["config_groups"]["group_1"] = {
        "targets": ["re:.*self_attn.(q|k)_proj"], "format": "float-quantized",
        "weights": {**tiny.FP8, "strategy": "channel"},
    }  # fmt: skip
    config["ignore"] = ["lm_head", "re:.*layers.0.mlp.*", "model.layers.1.self_attn.v_proj"]
    quantised, wide = write_target(tmp_path / "quantised"), write_target(tmp_path / "wide")

    def writer(module: str) -> tiny.Writer | None:
        if "layers.0.mlp" in module or module == "model.layers.1.self_attn.v_proj":
            return None
        return tiny.float8(1, 0) if module.endswith(("q_proj", "k_proj")) else tiny.packed()

    save_file(tiny.quantise(quantised, config, writer), wide / "model.safetensors")
    one, other = (load_model(path, torch.float32, "cpu") for path in (quantised, wide))
    torch.testing.assert_close(logits(one), logits(other), rtol=1e-5, atol=1e-5)
    assert texts(quantised, "NGRAM", dtype="auto") == texts(quantised, "none", dtype="auto")


def test_shards_and_names_without_a_prefix(tmp_path: Path) -> None:
    """Parts of one matrix in two files, as sharding by size leaves them."""
    quantised, wide = pair(tmp_path, "awq")
    stored = load_file(quantised / "model.safetensors")
    names, index = sorted(stored), {}
    for number in range(2):
        part = {name: stored[name] for name in names[number::2]}
        save_file(
            {name.removeprefix("model."): tensor for name, tensor in part.items()}, quantised / f"{number}.safetensors"
        )
        index |= dict.fromkeys(part, f"{number}.safetensors")
    (quantised / "model.safetensors").unlink()
    (quantised / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    one, other = (load_model(path, torch.float32, "cpu") for path in (quantised, wide))
    torch.testing.assert_close(logits(one), logits(other), rtol=1e-5, atol=1e-5)


@needs_blocks
@pytest.mark.parametrize("name", ["fp8 tensor", "gptq"])
def test_prediction_layers_of_a_quantised_model(tmp_path: Path, name: str) -> None:
    quantised, wide = pair(tmp_path, name, exact_heads.exact_mtp().target)
    heads = []
    for path, form in ((quantised, None), (wide, None), (quantised, BlockFormat("Q8_0", OPS))):
        options = {} if form is None else {"weight_format": form}
        target = load_model(path, torch.float32, "cpu", **options)  # type: ignore[arg-type]
        heads.append(load_mtp_head(path, target, torch.float32, "cpu", **options))  # type: ignore[arg-type]
    for part, linear in heads[1].layers.named_modules():
        if isinstance(linear, Linear):
            expected = linear.dense_weight()
            for head, error in ((heads[0], 1e-6), (heads[2], 0.02)):
                found = head.layers.get_submodule(part)
                assert isinstance(found, Linear)
                torch.testing.assert_close(
                    found.dense_weight(), expected, rtol=0, atol=error * float(expected.abs().max()), msg=part
                )


@pytest.mark.parametrize("name", ["compressed int4", "gptq"])
def test_scales_of_keys_and_values(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The loader keeps them for a pool in 8 bits, and reports no tensor that it did not use."""
    for folder in pair(tmp_path, name):
        file = folder / "model.safetensors"
        more = {
            "model.layers.1.self_attn.k_scale": torch.tensor([0.5]),
            "model.layers.1.self_attn.v_scale": torch.tensor(2.0),
        }
        save_file({**load_file(file), **more}, file)
        model = load_model(folder, torch.float32, "cpu")
        assert model.kv_scales.of(range(2)) == [(1.0, 1.0), (0.5, 2.0)]
    assert "not used" not in caplog.text
