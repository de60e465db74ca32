"""What is said of models that are not loaded."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import tiny_gguf
from fake_engine import FakeEngine
from gguf import GGUFWriter
from scripted import client_of
from tiny_checkpoint import write_checkpoint

from draftwing.config.model_list import ServedModel
from draftwing.config.options import Options
from draftwing.models.stored import stored_as
from draftwing.server.chat import Prompts
from draftwing.server.parsers.reasoning import Reasoning
from draftwing.server.router.listing import Listing, show
from draftwing.server.router.model import Model
from draftwing.text.tokenizer import Tokenizer, load_tokenizer

TOOLS = "{{ tools }}{{ messages }}<tool_call>tool_calls"


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
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TOOLS}))
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
    assert found["model_info"].pop("general.parameter_count") == 0, "there are no weights"
    assert found["model_info"] == {"general.architecture": "qwen3", "qwen3.context_length": 4096}
    assert found["details"]["family"] == "qwen3" and found["capabilities"] == ["completion"]
    assert found["template"] == ("x" if tokenizer == '{"chat_template": "x"}' else "")


@pytest.mark.parametrize(
    ("architectures", "text", "family"),
    [
        (["Qwen3VLForConditionalGeneration"], "qwen3_vl_text", "qwen3"), (["Qwen3Model"], None, "qwen3"),
        (["SmolVLMForConditionalGeneration"], "llama", "llama"), (["BertModel"], None, "bertmodel"),
        (["LlavaForConditionalGeneration"], "mistral", "mistral"), ("llama", None, ""), ([], None, ""),
    ],
)  # fmt: skip
def test_the_family_is_that_of_the_language_model(
    tmp_path: Path, architectures: Any, text: str | None, family: str
) -> None:
    said = {"max_position_embeddings": 4096, **({"model_type": text} if text else {})}
    config = {"architectures": architectures, **({"text_config": said} if text else said)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = show_of(tmp_path)
    assert found["details"]["family"] == family and found["details"]["families"] == ([family] if family else [])
    context = {name: value for name, value in found["model_info"].items() if name.endswith("context_length")}
    assert context == ({f"{family}.context_length": 4096} if family else {})


@pytest.mark.parametrize(("kind", "family"), [("gpt-oss", "gptoss"), ("qwen35", "qwen3_5"), ("phi2", "phi")])
def test_the_family_of_a_gguf_file_is_that_of_the_loaded_model(tmp_path: Path, kind: str, family: str) -> None:
    found = show_of(Path(tiny_gguf.write(tmp_path / "m.gguf", kind)))
    assert found["details"]["family"] == found["model_info"]["general.architecture"] == family
    assert f"{family}.context_length" in found["model_info"]


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_mark_before_the_config_is_passed_over(tmp_path: Path, mark: str) -> None:
    config = {"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(mark + json.dumps(config), encoding="utf-8")
    assert show_of(tmp_path)["model_info"]["qwen3.context_length"] == 4096


def test_a_model_whose_files_are_broken_is_listed(tmp_path: Path) -> None:
    for name, header in (("deep", b"[" * 200_000), ("negative", b'{"a": {"dtype": "F32", "shape": [-4000000]}}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("[" * 200_000 if name == "deep" else "{}")
        (tmp_path / name / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        model = Model(ServedModel(("m",), 1e9, {"model": str(tmp_path / name)}))
        assert asyncio.run(Listing(lambda: None).ollama(model))["details"]["parameter_size"] == ""
        assert show(model)["model_info"]["general.parameter_count"] == 0


PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OWN = TOOLS
HARMONY = "<|start|><|channel|><|message|>{{ tools }}"
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


def show_of(place: Path, **options: Any) -> dict[str, Any]:
    return show(Model(ServedModel(("m",), 1e9, {"model": str(place), **options})))


def loaded_does(tokenizer: Tokenizer, **options: Any) -> list[str]:
    """What the loaded model says that it does, but for images."""
    chosen = Options(**options)
    chats = Prompts(chosen, tokenizer, Reasoning(chosen, tokenizer))
    known = {"tools": chats.calls_tools, "thinking": chats.harmony or chats.reasoning is not None}
    return ["completion", *(name for name, there in known.items() if there)]


@pytest.mark.parametrize("override", [None, "chatml_tools", OWN, HARMONY, "{{ tools }}<function=>"])
@pytest.mark.parametrize("files", FILES)
def test_the_template_is_that_of_the_loaded_model(tmp_path: Path, files: str, override: str | None) -> None:
    folder = write_checkpoint(tmp_path / "m")
    for name, text in FILES[files].items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    options = {} if override is None else {"chat_template": override}
    tokenizer = load_tokenizer(Path(folder), override)
    for parsers in (
        {}, {"reasoning_parser": "qwen3"}, {"tool_call_parser": "hermes"}, {"tool_call_parser": "gpt-oss"},
        {"reasoning_parser": "deepseek-r1", "tool_call_parser": "llama3"},
    ):  # fmt: skip
        found = show_of(folder, **options, **parsers)
        assert found["template"] == (tokenizer.chat_source or "") and found["details"]["family"]
        assert found["capabilities"] == loaded_does(tokenizer, **parsers), parsers


@pytest.mark.parametrize(
    ("architecture", "sees"),
    [
        ("Qwen3VLForConditionalGeneration", True),
        ("Gemma3ForConditionalGeneration", True),
        ("Glm4vForConditionalGeneration", False),
        ("Qwen3ForCausalLM", False),
    ],
)
def test_who_reads_images(tmp_path: Path, architecture: str, sees: bool) -> None:
    config = {"architectures": [architecture], "vision_config": {"hidden_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ("vision" in show_of(tmp_path)["capabilities"]) == sees
    assert "vision" not in show_of(tmp_path, disable_images=True)["capabilities"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"vision_config": None}))
    assert "vision" not in show_of(tmp_path)["capabilities"]


def test_a_gguf_file_reads_images_by_a_file_beside_it(tmp_path: Path) -> None:
    file = tiny_gguf.write(tmp_path / "m.gguf", "llama")
    assert show_of(file)["capabilities"] == ["completion"]
    assert show_of(file, mmproj="x.gguf")["capabilities"] == ["completion", "vision"]
    (tmp_path / "mmproj-f16.gguf").touch()
    assert show_of(file)["capabilities"] == ["completion", "vision"]


@pytest.mark.parametrize("kind", ["gguf", "folder"])
def test_sizes_and_formats_are_those_of_the_loaded_model(tmp_path: Path, kind: str) -> None:
    place = tiny_gguf.write(tmp_path / "m.gguf", "llama") if kind == "gguf" else write_checkpoint(tmp_path / "m")
    model = Model(ServedModel(("m",), 1e9, {"model": str(place)}))
    stored = stored_as(Path(place))
    assert stored["values"] > 0 and stored["bytes"] > 0
    card, shown = asyncio.run(Listing(lambda: None).ollama(model)), show(model)
    engine = FakeEngine(Options(random_seed=7))
    engine.info = dataclasses.replace(engine.info, stored=stored | {"on_device": False})
    with client_of(engine) as client:
        (loaded,) = client.get("/api/tags").json()["models"]
        shown_loaded = client.post("/api/show", json={"model": "m"}).json()
    assert card["details"] == shown["details"] and card["details"]["family"] == ("llama" if kind == "gguf" else "qwen2")
    for name in ("format", "parameter_size", "quantization_level"):
        assert card["details"][name] == shown["details"][name] == loaded["details"][name] != ""
    assert card["size"] == loaded["size"]
    count = "general.parameter_count"
    assert shown["model_info"][count] == shown_loaded["model_info"][count]


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
        found, tokenizer = show_of(file), load_tokenizer(file)
        assert found["template"] == tokenizer.chat_source and found["capabilities"] == loaded_does(tokenizer)
