"""What is said of models that are not loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_gguf
from gguf import GGUFWriter
from tiny_checkpoint import write_checkpoint

from draftwing.config.model_list import ServedModel
from draftwing.server.router.listing import show
from draftwing.server.router.model import Model
from draftwing.text.tokenizer import load_tokenizer


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


PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OWN = "{{ tools }}{{ messages }}"
FILES: dict[str, dict[str, str]] = {  # files with templates beside a checkpoint's
    "none": {"tokenizer_config.json": "{}"},
    "the configuration's": {"tokenizer_config.json": json.dumps({"chat_template": "{{ messages }}"})},
    "plain ChatML": {"tokenizer_config.json": json.dumps({"chat_template": PLAIN})},
    "a file of its own": {"chat_template.jinja": OWN},
    "a file of JSON": {"chat_template.json": json.dumps({"chat_template": OWN}), "tokenizer_config.json": "{}"},
    "one with tools": {
        "tokenizer_config.json": json.dumps({
            "chat_template": [{"name": "default", "template": "{{ messages }}"}, {"name": "tool_use", "template": OWN}]
        })
    },
    "a folder": {"additional_chat_templates/tool_use.jinja": OWN},
}  # fmt: skip


@pytest.mark.parametrize("override", [None, "chatml_tools", OWN])
@pytest.mark.parametrize("files", FILES)
def test_the_template_is_that_of_the_loaded_model(tmp_path: Path, files: str, override: str | None) -> None:
    folder = write_checkpoint(tmp_path / "m")
    for name, text in FILES[files].items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    options = {} if override is None else {"chat_template": override}
    loaded = load_tokenizer(Path(folder), override).chat_source or ""
    found = show(Model(ServedModel(("m",), 1e9, {"model": str(folder), **options})))
    assert found["template"] == loaded and found["details"]["family"]
    assert found["capabilities"] == ["completion", *(["tools"] if "tools" in loaded else [])]


def test_the_template_of_a_gguf_file_is_that_of_the_loaded_model(tmp_path: Path) -> None:
    for name, template in (("plain", PLAIN), ("own", OWN), ("other", "{{ messages }}")):

        def edit(writer: GGUFWriter, template: str = template) -> None:
            writer.add_chat_template(template)
            writer.add_tokenizer_model("gpt2")
            writer.add_tokenizer_pre("gpt-2")
            writer.add_token_list([*"abcd", "ab"])
            writer.add_token_types([1] * 5)
            writer.add_token_merges(["a b"])

        file = tiny_gguf.write(tmp_path / f"{name}.gguf", "llama", edit=edit)
        found = show(Model(ServedModel(("m",), 1e9, {"model": str(file)})))
        assert found["template"] == load_tokenizer(file).chat_source
        assert found["capabilities"] == ["completion", *(["tools"] if name != "other" else [])]
