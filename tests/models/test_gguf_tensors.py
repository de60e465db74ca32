"""GGUF: golden values of a published file, and small files written by the gguf package."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import gemma4_models
import gguf as gguf_package
import moe_models
import numpy as np
import pytest
import torch
import transformers
from block_ops import BlockTorchOps
from gguf import MODEL_ARCH, MODEL_TENSORS, TENSOR_NAMES
from gguf import GGMLQuantizationType as Type
from plain_attention import FunctionAttend
from timed import least_seconds
from tiny_gguf import FFN, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, VOCAB, causal, weights, write

from draftwing.errors import CheckpointError
from draftwing.gguf_file import GGUFFile, open_gguf
from draftwing.layers.linear_ops.base import WeightFormat
from draftwing.layers.linear_ops.blocks import BlockFormat
from draftwing.layers.linear_ops.dense import DENSE
from draftwing.layers.part_configs import ExpertConfig
from draftwing.layers.rope import RopeConfig
from draftwing.models.gguf_config import model_config
from draftwing.models.gguf_tensors import hf_name, is_copy
from draftwing.models.loader import load_config, load_model
from draftwing.ops.experts.routing import Routing
from draftwing.train.capture import Causal as windowed

# Largest error of a block format, relative to the largest value of its block.
TOLERANCE = {Type.F32: 0.0, Type.F16: 1e-3, Type.BF16: 8e-3, Type.Q8_0: 1 / 127, Type.Q4_0: 1 / 7, Type.Q4_1: 1 / 14}


@pytest.mark.further(arch=["qwen2", "qwen3"], kind=[kind for kind in TOLERANCE if kind != Type.Q4_1])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", list(TOLERANCE))
def test_rows_come_back_in_hugging_face_order(tmp_path: Path, arch: str, kind: Type) -> None:
    model = load_model(write(tmp_path / "m.gguf", arch, kind), torch.float32, "cpu")
    values, layer = weights(arch), model.layers[0]
    expected = {
        "mixer.qkv": np.concatenate([values[f"blk.0.attn_{x}.weight"] for x in "qkv"]),
        "mlp.gate_up": np.concatenate([values[f"blk.0.ffn_{x}.weight"] for x in ("gate", "up")]),
        "mixer.o": values["blk.0.attn_output.weight"], "mlp.down": values["blk.0.ffn_down.weight"],
    }  # fmt: skip
    for name, rows in expected.items():
        found = layer.get_submodule(name).weight.detach().numpy()
        assert np.abs(found - rows).max() <= TOLERANCE[kind] * np.abs(rows).max() * 1.01, name
    assert np.array_equal(layer.attn_norm.weight.detach().numpy(), values["blk.0.attn_norm.weight"])
    assert model.lm_head.weight is model.embed.weight
    if arch == "qwen2":
        bias = np.concatenate([values[f"blk.0.attn_{x}.bias"] for x in "qkv"])
        assert np.array_equal(layer.mixer.qkv.bias.detach().numpy(), bias)
    else:
        assert layer.mixer.qkv.bias is None
    assert (layer.mixer.q_norm is not None) == (arch == "qwen3")
    if arch == "qwen3":
        assert np.array_equal(layer.mixer.k_norm.weight.detach().numpy(), values["blk.0.attn_k_norm.weight"])


@pytest.mark.parametrize("window", [7, None])
@torch.inference_mode()
def test_gemma3_equals_transformers(tmp_path: Path, window: int | None) -> None:
    """Files without a window, as of Rnj-1, have no layer with one."""

    def edit(writer: gguf_package.GGUFWriter) -> None:
        if window is None:
            del writer.kv_data[0]["gemma3.attention.sliding_window"]

    model = load_model(write(tmp_path / "m.gguf", "gemma3", edit=edit), torch.float32, "cpu")
    assert model.config.attention.window == (window or 0) and model.config.ropes[0] == RopeConfig(5000.0)
    config = transformers.Gemma3TextConfig(
        hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=1, num_attention_heads=HEADS, vocab_size=VOCAB,
        num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, query_pre_attn_scalar=HEAD_DIM, sliding_window=7,
        rms_norm_eps=1e-5, layer_types=["sliding_attention" if window else "full_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
        },
    )  # fmt: skip
    reference = transformers.Gemma3ForCausalLM(config).eval()
    names = {
        "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
        "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
        **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
        **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
    }  # fmt: skip
    given = weights("gemma3")
    state = {f"model.layers.0.{theirs}.weight": given[f"blk.0.{ours}.weight"] for ours, theirs in names.items()}
    state |= {"model.embed_tokens.weight": given["token_embd.weight"], "model.norm.weight": given["output_norm.weight"]}
    state = {name: torch.from_numpy(v) - (1 if "norm" in name else 0) for name, v in state.items()}  # files add it
    reference.load_state_dict({**state, "lm_head.weight": state["model.embed_tokens.weight"]})
    ids = torch.randint(0, VOCAB, (30,), generator=torch.Generator().manual_seed(2))
    hidden, _ = model(ids, torch.arange(30), windowed(1, 30))
    theirs = reference(ids[None]).logits[0]
    torch.testing.assert_close(model.logits(hidden), theirs, atol=1e-4 * float(theirs.abs().max()), rtol=1e-4)


@pytest.mark.parametrize(("arch", "named"), [("llama", "Mixtral"), ("qwen3moe", "Qwen3Moe")])
@pytest.mark.parametrize("kind", [Type.F32, Type.Q8_0])
@pytest.mark.parametrize(
    "form", [DENSE, BlockFormat("Q8_0", BlockTorchOps(torch.device("cpu")))], ids=["dense", "blocks"]
)
def test_tensors_of_all_experts_are_taken_apart(
    tmp_path: Path, arch: str, named: str, kind: Type, form: WeightFormat
) -> None:
    path = write(tmp_path / "m.gguf", arch, kind, experts=3)
    model = load_model(path, torch.float32, "cpu", weight_format=form)
    assert model.config.architecture == f"{named}ForCausalLM" and model.config.experts == ExpertConfig(
        3, Routing(2), FFN
    )
    values, mlp = weights(arch, 3), model.layers[0].mlp
    gate, up, down = (values[f"blk.0.ffn_{part}_exps.weight"] for part in ("gate", "up", "down"))
    expected = {mlp.gate_up: np.concatenate((gate, up), 1).reshape(-1, HIDDEN), mlp.down: down.reshape(-1, FFN)}
    tolerance = 0.0 if kind == Type.F32 and form == DENSE else 1.01 / 127
    for linear, rows in expected.items():
        found = linear.dense_weight().detach().numpy()
        assert np.abs(found - rows).max() <= tolerance * np.abs(rows).max()
    assert np.array_equal(mlp.router.weight.detach().numpy(), values["blk.0.ffn_gate_inp.weight"])


@pytest.mark.parametrize(("arch", "experts"), [("llama", 0), ("qwen3moe", 3)])
@pytest.mark.parametrize("part", ["ffn_gate_shexp.weight", "exp_probs_b.bias"])
def test_what_is_not_used_is_named_as_in_the_file(
    tmp_path: Path, part: str, arch: str, experts: int, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"blk.0.{part}"
    extra = {name: np.zeros((FFN, HIDDEN), np.float32)}
    load_model(write(tmp_path / "m.gguf", arch, extra=extra, experts=experts), torch.float32, "cpu")
    assert f"not used: {name}" in caplog.text


def test_biases_of_llama_are_unpermuted(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    sizes = {"attn_q": HEADS * HEAD_DIM, "attn_k": KV_HEADS * HEAD_DIM, "attn_v": KV_HEADS * HEAD_DIM}
    biases = {f"blk.0.{name}.bias": rng.standard_normal(rows).astype(np.float32) for name, rows in sizes.items()}
    model = load_model(write(tmp_path / "m.gguf", "llama", extra=biases), torch.float32, "cpu")
    assert np.array_equal(model.layers[0].mixer.qkv.bias.detach().numpy(), np.concatenate(list(biases.values())))


def test_config(tmp_path: Path) -> None:
    config = load_config(write(tmp_path / "m.gguf", "llama"))
    assert config.attention.shape == (4, 2, 16) and config.vocab_size == VOCAB
    assert (config.max_positions, config.ropes[0].theta, config.tie_embeddings) == (128, 5000.0, True)
    assert config.norm.eps == pytest.approx(1e-5)
    assert config.stop_ids == (4, 1, 2)  # the named one, and tokens that are known to end an answer


def test_untied_output(tmp_path: Path) -> None:
    head = np.random.default_rng(2).standard_normal((VOCAB, HIDDEN), np.float32)
    model = load_model(write(tmp_path / "m.gguf", "llama", extra={"output.weight": head}), torch.float32, "cpu")
    assert np.array_equal(model.lm_head.weight.detach().numpy(), head)


@torch.inference_mode()
def test_rope_freqs_divide_the_frequencies(tmp_path: Path) -> None:
    """With all factors 4, positions 4p must give what positions p give without."""
    factors = {"rope_freqs.weight": np.full(HEAD_DIM // 2, 4.0, np.float32)}
    plain = load_model(write(tmp_path / "plain.gguf", "llama"), torch.float32, "cpu")
    scaled = load_model(write(tmp_path / "scaled.gguf", "llama", extra=factors), torch.float32, "cpu")
    ids, positions = torch.arange(20), torch.arange(20)
    expected, _ = plain(ids, positions, FunctionAttend(causal))
    torch.testing.assert_close(scaled(ids, positions * 4, FunctionAttend(causal))[0], expected, atol=1e-4, rtol=1e-4)
    assert (scaled(ids, positions, FunctionAttend(causal))[0] - expected).abs().max() > 1e-2


def test_linear_scaling(tmp_path: Path) -> None:
    def edit(writer: gguf_package.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf_package.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(2.0)

    rope = load_config(write(tmp_path / "m.gguf", "llama", edit=edit)).ropes[0]
    assert (rope.kind, rope.factor) == ("linear", 2.0)


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda w: w.add_rope_scaling_type(gguf_package.RopeScalingType.LONGROPE), "rope.scaling.type = 'longrope'"),
        (lambda w: w.add_expert_shared_count(1), "expert_shared_count = 1"),
        (lambda w: w.add_expert_count(8), "expert_used_count: expected an integer from 1 to 8, found None"),
        (lambda w: w.add_rope_dimension_count(8), "rope.dimension_count: expected 16, found 8"),
        (lambda w: w.add_sliding_window(64), "sliding_window: expected none, or at least 128, found 64"),
        (lambda w: w.add_array("llama.attention.key_length", [16]), "key_length: expected an integer from 1 to"),
    ],
)
def test_unsupported_metadata_is_refused_by_name(
    tmp_path: Path, edit: Callable[[gguf_package.GGUFWriter], None], named: str
) -> None:
    with pytest.raises(CheckpointError) as error:
        load_config(write(tmp_path / "m.gguf", "llama", edit=edit))
    assert named in str(error.value)


@pytest.mark.parametrize(
    ("arch", "missing"),
    [
        ("deepseek4", "sparse attention over compressed keys, and hyper-connections"),
        ("minimax-m3", "sparse attention"),
        ("bloom", "positions by biases of scores (ALiBi)"),
    ],
)  # fmt: skip
def test_an_architecture_that_is_not_served_says_what_it_has(tmp_path: Path, arch: str, missing: str) -> None:
    with pytest.raises(CheckpointError) as error:
        load_config(write(tmp_path / "m.gguf", arch))
    assert f"{arch} has {missing}, which is not served yet" in str(error.value)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    """(tests/test_gguf_file.py has files that are broken.)"""
    with pytest.raises(CheckpointError, match=r"unknown architecture 'gemma9'; the nearest .* gemma3"):
        load_model(write(tmp_path / "gemma.gguf", "gemma9"), torch.float32, "cpu")
    with pytest.raises(CheckpointError, match="dflash is the architecture of a draft head"):
        load_config(write(tmp_path / "head.gguf", "dflash"))
    with pytest.raises(CheckpointError, match="found none"):
        load_model(tmp_path / "none.gguf", torch.float32, "cpu")
    good = write(tmp_path / "m.gguf", "llama").read_bytes()
    for content, named in (
        (b"PK\3\4" + good[4:], "not a GGUF file"),
        (good[:4] + b"\1\0\0\0" + good[8:], "version 2 or 3, found 1"),
    ):
        (tmp_path / "m.gguf").write_bytes(content)
        with pytest.raises(CheckpointError, match=named):
            load_model(tmp_path / "m.gguf", torch.float32, "cpu")


def test_integers_are_no_weights(tmp_path: Path) -> None:
    def edit(writer: gguf_package.GGUFWriter) -> None:
        writer.add_tensor("blk.0.x.weight", np.ones(HIDDEN, np.int32))

    file = open_gguf(write(tmp_path / "m.gguf", "llama", edit=edit))
    with pytest.raises(CheckpointError, match="has the type I32"):
        file.dequantized("blk.0.x.weight")


def test_metadata_equals_that_of_the_gguf_package(tmp_path: Path) -> None:
    def edit(writer: gguf_package.GGUFWriter) -> None:
        writer.add_array("x.floats", [0.5, -2.0])
        writer.add_array("x.bools", [True, False, True])
        writer.add_bool("x.flag", True)
        writer.add_int8("x.small", -3)
        writer.add_uint64("x.large", 1 << 40)
        writer.add_float64("x.double", 0.1)
        writer.add_string("x.text", "naïve ☕")

    path = write(tmp_path / "m.gguf", "llama", edit=edit)
    found = open_gguf(path).metadata
    fields = {k: v for k, v in gguf_package.GGUFReader(path).fields.items() if not k.startswith("GGUF.")}
    assert found.keys() == fields.keys() and len(found) > 15
    for key, field in fields.items():
        value = found[key].tolist() if isinstance(found[key], np.ndarray) else found[key]
        assert value == field.contents(), key


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> GGUFFile:
    return open_gguf(smollm2_path)


def test_smollm2_values(smollm2: GGUFFile) -> None:
    query = torch.from_numpy(smollm2.dequantized("blk.0.attn_q.weight"))
    expected = torch.tensor([-0.09631348, 0.15734863, -0.09631348, -0.73046875])
    torch.testing.assert_close(query[0, :4], expected, atol=1e-8, rtol=0)
    assert query.double().sum().item() == pytest.approx(59.22322, abs=1e-4)
    expected = torch.tensor([-0.10654449, 0.03297806, 0.0481987, -0.02283096])
    embedding = torch.from_numpy(smollm2.dequantized("token_embd.weight"))
    torch.testing.assert_close(embedding[0, :4], expected, atol=1e-7, rtol=0)
    assert smollm2.dequantized("output_norm.weight")[:4].tolist() == [1.7578125, 1.8203125, 1.78125, 1.6015625]


@torch.inference_mode()
def test_smollm2_continues_the_capital_of_france(smollm2_path: Path) -> None:
    model = load_model(smollm2_path, torch.float32, "cpu")
    hidden, _ = model(torch.tensor([504, 3575, 282, 4649, 314]), torch.arange(5), FunctionAttend(causal))
    values, ids = model.logits(hidden[-1:]).topk(2)
    assert ids.tolist() == [[7042, 260]]  # " Paris", " the"
    torch.testing.assert_close(values, torch.tensor([[17.371, 14.889]]), atol=2e-3, rtol=0)
    assert set(model.config.stop_ids) == {0, 2}
    assert (model.config.max_positions, model.config.ropes[0].theta) == (8192, 100000.0)


@pytest.mark.timing
def test_smollm2_metadata_is_read_quickly(smollm2_path: Path) -> None:
    metadata = open_gguf(smollm2_path).metadata
    assert least_seconds(lambda: open_gguf(smollm2_path).metadata) < 0.5
    assert len(metadata["tokenizer.ggml.tokens"]) == 49152 and len(metadata["tokenizer.ggml.merges"]) == 48900
    assert metadata["tokenizer.ggml.tokens"][:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert np.bincount(metadata["tokenizer.ggml.token_type"]).tolist() == [0, 49135, 0, 17]


KINDS = {
    "glm4-moe-groups": MODEL_ARCH.GLM4_MOE, "minimax-m2": MODEL_ARCH.MINIMAXM2, "deepseek-v3": MODEL_ARCH.DEEPSEEK2,
    **dict.fromkeys(gemma4_models.KINDS, MODEL_ARCH.GEMMA4),
}  # fmt: skip
# What has no name in a folder: copies and factors of old converters, and tensors of all experts, which are taken apart.
NAMELESS = re.compile(
    r"rope_freqs|blk\.\d+\.(attn_rot_embd|ffn_(gate|up|down|gate_up)_exps|nextn\.(embed_tokens|shared_head_head))"
)


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_those_of_the_gguf_package(tmp_path: Path, kind: str) -> None:
    if kind in gemma4_models.KINDS:
        theirs = gemma4_models.reference(kind)
        path = gemma4_models.write_gguf(tmp_path / "m.gguf", theirs)
    else:
        theirs = moe_models.reference(kind)
        path = moe_models.write_gguf(tmp_path / "m.gguf", theirs.config, theirs.state_dict())
    file, layers = open_gguf(path), theirs.config.num_hidden_layers
    config, last = model_config(file), layers - 1
    known = {TENSOR_NAMES[tensor].format(bid=last) for tensor in MODEL_TENSORS[KINDS[kind]]}
    bases = {re.sub(r"^blk\.\d+", f"blk.{last}", name.rpartition(".")[0]) for name in file.tensors}
    assert bases <= known
    if config.experts is None:  # of which the table has names, too
        return
    named = {base for base in known if hf_name(f"{base}.weight", config, layers) != f"{base}.weight"}
    assert not [base for base in known - named if not NAMELESS.fullmatch(base)]


WHOLE, KEYS, VALUES = (f"blk.1.attn_{part}.weight" for part in ("kv_b", "k_b", "v_b"))


@pytest.mark.parametrize(
    ("names", "copied"), [((KEYS, VALUES), True), ((KEYS,), False), ((VALUES,), False), ((), False)]
)
def test_the_whole_matrix_is_left_out_where_both_parts_are(names: tuple[str, ...], copied: bool) -> None:
    file = {WHOLE, *names}
    assert [name for name in sorted(file) if is_copy(name, file)] == [WHOLE] * copied
