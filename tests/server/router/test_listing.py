"""What is said of models that are not loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_gguf

from draftwing.config.model_list import ServedModel
from draftwing.server.router.listing import show
from draftwing.server.router.model import Model


@pytest.mark.parametrize(
    "architecture, does",
    [
        ("Qwen3ForCausalLM", ["completion", "tools"]),
        ("Gemma3ForConditionalGeneration", ["completion", "tools"]),
        ("Qwen3Model", ["embedding"]),  # saved without its head
        ("BertModel", ["embedding"]),
        ("XLMRobertaForSequenceClassification", []),
    ],
)
def test_what_models_do(tmp_path: Path, architecture: str, does: list[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ tools }}"}))
    model = Model(ServedModel(("m",), 1e9, {"model": str(tmp_path)}))
    assert show(model)["capabilities"] == does
    (tmp_path / "tokenizer_config.json").unlink()  # as of encoders
    assert show(model)["capabilities"] == (["completion"] if "completion" in does else does)


@pytest.mark.parametrize(("causal", "does"), [(False, ["embedding"]), (True, ["completion"])])
def test_what_gguf_files_do(tmp_path: Path, causal: bool, does: list[str]) -> None:
    file = tiny_gguf.write(tmp_path / "m.gguf", "bert", edit=lambda writer: writer.add_causal_attention(causal))
    assert show(Model(ServedModel(("m",), 1e9, {"model": str(file)})))["capabilities"] == does


@pytest.mark.parametrize(
    "tokenizer", [None, "{", "[]", "{}", '{"chat_template": null}', '{"chat_template": "x"}', b"\xff"]
)
@pytest.mark.parametrize("nested", [False, True])
def test_family_and_context_are_said_whatever_the_template_is(
    tmp_path: Path, tokenizer: str | bytes | None, nested: bool
) -> None:
    said = {"max_position_embeddings": 4096}
    config = {"architectures": ["Qwen3ForCausalLM"], **({"text_config": said} if nested else said)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if tokenizer is not None:
        (tmp_path / "tokenizer_config.json").write_bytes(
            tokenizer.encode() if isinstance(tokenizer, str) else tokenizer
        )
    found = show(Model(ServedModel(("m",), 1e9, {"model": str(tmp_path)})))
    assert found["model_info"] == {"general.architecture": "qwen3", "qwen3.context_length": 4096}
    assert found["details"]["family"] == "qwen3" and found["capabilities"] == ["completion"]
    assert found["template"] == ("x" if tokenizer == '{"chat_template": "x"}' else "")
