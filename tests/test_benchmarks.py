"""What the comparison with llama.cpp computes of what it measures; servers and builds are not started."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from safetensors.torch import save_file

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
MODULES = ("chat_servers", "gguf_files", "llama_cpp", "llama_cpp_build", "logits_quality")
SMAPS = """55d0-7ffe ---p 00000000 00:00 0    [rollup]
Rss:              300000 kB
Pss:              290123 kB
Pss_Dirty:        100000 kB
Pss_Anon:         190000 kB
Pss_File:         100123 kB
Shared_Clean:       5120 kB
"""
PERPLEXITY = """chunk             PPL               ln(PPL(Q)/PPL(base))          KL Divergence              Same top p
   1      12.3456 ±    1.2345       0.00123 ±    0.00100       0.02000 ±    0.00100     94.000 ±  1.500 %
====== KL divergence statistics ======
Mean    KLD:   0.021345 ±   0.000512
Maximum KLD:   0.912345
99.9%   KLD:   0.612345
99.0%   KLD:   0.151234
Median  KLD:   0.011234
Minimum KLD:  -0.000012
Same top p: 93.824 ± 0.533 %
"""


@pytest.fixture(scope="module")
def modules() -> dict[str, ModuleType]:
    """The benchmark's files, which import each other as scripts of one folder do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        return {name: importlib.import_module(name) for name in MODULES}


def test_memory(modules: dict[str, ModuleType]) -> None:
    memory = modules["chat_servers"].memory_of(SMAPS)
    assert memory == {"Rss": 307200000, "Pss": 297085952, "Pss_Anon": 194560000, "Pss_File": 102525952}


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (b'data: {"choices": [{"delta": {"role": "assistant", "content": null}}]}\n', ""),
        (b'data: {"choices": [{"delta": {"content": " sea"}}]}\n', " sea"),
        (b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}\n', ""),
    ],
)
def test_events(event: bytes, text: str, modules: dict[str, ModuleType]) -> None:
    assert modules["chat_servers"].text_of(event) == text


def test_summary(modules: dict[str, ModuleType]) -> None:
    """Ratios are made round by round, so that what slows a whole round does not count."""
    llama_cpp = modules["llama_cpp"]
    base = [{"tokens_per_s": rate, "decode_tokens_per_s": 2 * rate} for rate in (100.0, 50.0, 80.0)]
    ours = [{"tokens_per_s": rate, "decode_tokens_per_s": 2 * rate} for rate in (150.0, 100.0, 80.0)]
    found = llama_cpp.summary("one", {"llama.cpp": base, "draftwing": ours}, floor_s=0.001)
    mine = found["draftwing"]
    assert (mine["ratio_min"], mine["ratio"], mine["ratio_max"]) == (1.0, 1.5, 2.0)
    assert mine["tokens_per_s"] == 100.0
    assert mine["floor_share"] == pytest.approx(0.2)  # 200 tokens per second, each 1 ms at best
    assert found["llama.cpp"]["ratio"] == 1.0
    assert "| one | draftwing | tokens/s 100 | 1.50x | 1.00 to 2.00 | 0.20 |" in llama_cpp.table({"one": found})


def test_floor_of_a_batch(modules: dict[str, ModuleType]) -> None:
    rounds = {"llama.cpp": [{"tokens_per_s": 1600.0}]}  # 100 steps of 16 tokens
    assert modules["llama_cpp"].summary("batch", rounds, 0.005)["llama.cpp"]["floor_share"] == pytest.approx(0.5)


def test_every_row_has_a_headline(modules: dict[str, ModuleType]) -> None:
    assert modules["llama_cpp"].ROWS.keys() == modules["llama_cpp"].HEADLINES.keys()


def test_divergences(modules: dict[str, ModuleType]) -> None:
    """Against sums in numpy; the logits of a distribution may be moved by any constant."""
    rng = np.random.default_rng(0)
    p, q = (rng.dirichlet(np.ones(50), 7) for _ in range(2))
    expected = (p * (np.log(p) - np.log(q))).sum(1)
    found = modules["logits_quality"].divergences(torch.from_numpy(np.log(p) + 3), torch.from_numpy(np.log(q) - 2))
    np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_perplexity_output(modules: dict[str, ModuleType]) -> None:
    found = modules["logits_quality"].parsed(PERPLEXITY)
    assert found == pytest.approx(
        {"mean": 0.021345, "median": 0.011234, "p99": 0.151234, "max": 0.912345, "same_choice": 0.93824}
    )
    with pytest.raises(ValueError, match="Mean"):
        modules["logits_quality"].parsed("error: failed to load the model")


def test_interleaved(modules: dict[str, ModuleType]) -> None:
    """draftwing's reader of GGUF undoes it."""
    from draftwing.models.gguf import unpermuted

    weight = np.arange(2 * 6 * 3, dtype=np.float32).reshape(12, 3)
    there = modules["gguf_files"].interleaved(weight, 6)
    assert there[:, 0].tolist()[:6] == [0, 9, 3, 12, 6, 15]
    assert torch.equal(unpermuted(torch.from_numpy(there), 2), torch.from_numpy(weight))


def test_eagle3_file(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    files = modules["gguf_files"]
    target, head = tmp_path / "target.gguf", tmp_path / "head"
    writer = GGUFWriter(target, "llama")
    writer.add_block_count(12)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "c", "d"])
    files.finish(writer)
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(32, 32, generator=generator) for name in files.NAMES}
    head.mkdir()
    save_file(tensors | {"d2t": torch.tensor([0, 1, 1])}, head / "model.safetensors")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1}
    rest = {"head_dim": 32, "vocab_size": 4, "target_hidden_size": 32, "max_position_embeddings": 64}
    config = {**sizes, **rest, "rope_theta": 1e4, "rms_norm_eps": 1e-5}
    (head / "config.json").write_text(json.dumps(config), encoding="utf8")
    files.write_eagle3(head, target, tmp_path / "head.gguf")
    reader = GGUFReader(tmp_path / "head.gguf")
    stored = {tensor.name: tensor for tensor in reader.tensors}
    assert stored.keys() == {*files.NAMES.values(), "d2t"}
    assert stored["d2t"].data.tolist() == [0, 2, 3]
    assert reader.fields["eagle3.target_layers"].contents() == [2, 6, 9]
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b", "c", "d"]


def test_float32_file(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    weight = np.random.default_rng(0).standard_normal((4, 32), np.float32)
    blocks = quantize(weight, GGMLQuantizationType.Q8_0)
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_block_count(1)
    writer.add_tensor("blk.0.attn_q.weight", blocks, raw_dtype=GGMLQuantizationType.Q8_0)
    modules["gguf_files"].finish(writer)
    modules["gguf_files"].write_float32(tmp_path / "model.gguf", tmp_path / "exact.gguf")
    reader = GGUFReader(tmp_path / "exact.gguf")
    (tensor,) = reader.tensors
    assert np.array_equal(tensor.data, dequantize(blocks, GGMLQuantizationType.Q8_0))
    assert reader.fields["llama.block_count"].contents() == 1
